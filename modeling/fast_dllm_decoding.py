"""Fast-dLLM (arXiv 2505.22618), a baseline: confident tokens in parallel, from keys and values that are stale."""

# B batch, R response tokens (the limit), K block size, W window, L sequence, V vocabulary, M masked tokens of a block

import itertools
from collections.abc import Iterator

import torch

from .cache_d2f import D2FCache
from .decoding_loop import BlockDiffusionModel
from .decoding_rules import scatter_rows
from .generation_config_d2f import D2FGenerationConfig
from .response import Response
from .sampler import Sampler
from .vanilla_decoding import steps_per_block, vanilla_accepted_tokens


class FastDLLMDecoder:
    """Decodes a [`Response`] as Fast-dLLM does: bidirectional, block by block.

    All response tokens are masked from the start and seen by all. The batch goes from block to block; in a block,
    until all rows have decoded it:

    1. Which of its tokens are masked, and which rows would go on if they were alone.
    2. The window, which replaces its keys and values in the cache. In the first step it is the whole sequence, in the
       others the block (dual cache), or all from the block on (prefix cache). Without a cache it is always the whole
       sequence.
    3. Forward.
    4. Accept the best token and all that reach `confidence_threshold`, or as many as `steps` say.

    Args:
        model (`BlockDiffusionModel`): The model.
        response (`Response`): The tokens.
        sampler (`Sampler`): Chooses tokens.
        generation_config (`D2FGenerationConfig`): With its defaults filled in.
        use_cache (`bool`): `False` means `block_cache="none"`.

    Attributes:
        num_forward_passes (`torch.LongTensor` of shape `(B,)`): Those that each row would take alone.

    Raises:
        ValueError: for `steps` that cannot be shared evenly by the blocks.
    """

    trace = None
    forwards_per_step = 1

    def __init__(
        self,
        model: BlockDiffusionModel,
        response: Response,
        sampler: Sampler,
        generation_config: D2FGenerationConfig,
        use_cache: bool = True,
    ):
        self.model = model
        self.response = response
        self.sampler = sampler
        self.confidence_threshold = generation_config.confidence_threshold
        self.block_size = min(generation_config.block_size, response.max_new_tokens)
        self.steps_per_block = steps_per_block(generation_config.steps, response.max_new_tokens, self.block_size)
        self.block_cache = (generation_config.block_cache or "dual") if use_cache else "none"
        self.look_back = int(model.config.right_shift_logits)  # the token before the window predicts its first one
        self.num_forward_passes = torch.zeros_like(response.prompt_lengths)
        num_slots = response.sequences.shape[1]
        self.slot = torch.arange(num_slots, device="cpu").expand_as(response.sequences)  # [B, L]
        self.is_token = self.slot < (response.prompt_lengths + response.max_new_tokens)[:, None]
        self.cache: D2FCache | None = None
        if self.block_cache != "none":
            self.cache = D2FCache(model.config.num_hidden_layers, num_slots, response.device)

    def steps(self) -> Iterator[None]:
        """Decodes everything. It yields before each step."""
        response, limit = self.response, self.response.max_new_tokens
        min_steps = 1 if self.cache is None else 2  # the original looks whether it is done only behind a cached step
        for start in range(0, limit, self.block_size):
            end = min(start + self.block_size, limit)
            for step in itertools.count():
                # 1. What there is to decode.
                is_masked = response.is_masked()[:, start:end]  # [B, K]
                is_active = (is_masked.any(-1) | (step < min_steps)) & ~response.has_stopped
                if not is_active.any():
                    break
                yield
                row, index = is_masked.nonzero(as_tuple=True)

                # 2. The window.
                position = self.slot
                if self.cache is not None and step > 0:
                    first = start - self.look_back
                    last = end if self.block_cache == "dual" else limit
                    position = response.prompt_lengths[:, None] + torch.arange(first, last, device="cpu")  # [B, W]

                # 3. Forward.
                logits = self._forward(position, row, start + index)  # [M, V]
                self.num_forward_passes += is_active

                # 4. Accept.
                prediction = self.sampler(logits, row, start + index, response)
                probability, ranking = (
                    scatter_rows(values, row, index, is_masked.shape)
                    for values in (prediction.probability, prediction.ranking)
                )
                if self.steps_per_block is None:
                    accepted = fast_dllm_accepted_tokens(is_masked, probability, ranking, self.confidence_threshold)
                else:
                    accepted = vanilla_accepted_tokens(is_masked, ranking, step, self.steps_per_block, "even")
                response.accept(
                    accepted[row, index],
                    row,
                    start + index,
                    prediction.tokens,
                    scores=prediction.scores,
                    logits=logits,
                )
                response.publish(shown=response.limits)

    def _forward(self, position: torch.LongTensor, row: torch.LongTensor, index: torch.LongTensor) -> torch.Tensor:
        """Feeds the tokens at `position` `(B, W)`: logits `(M, V)` of the response tokens `(row, index)`, `(M,)`."""
        response, device = self.response, self.response.device
        if self.cache is not None:
            self.cache.set_window(position, response.sequences.shape[1])
        column = response.prompt_lengths[row] + index - self.look_back - position[row, 0]  # in the window
        return self.model(
            input_ids=response.sequences.gather(1, position).to(device),
            attention_mask=self.is_token.to(device),
            position_ids=position.to(device),
            cache=self.cache,
            logits_to_keep=(row.to(device), column.to(device)),
            return_dict=True,
        ).logits


def fast_dllm_accepted_tokens(
    is_masked: torch.BoolTensor,
    probability: torch.FloatTensor,
    ranking: torch.FloatTensor,
    confidence_threshold: float,
) -> torch.BoolTensor:
    """Which masked tokens Fast-dLLM accepts: the best one of the block in any case, and each confident one.

    Args:
        is_masked (`torch.BoolTensor` of shape `(B, K)`): The masked tokens of the block.
        probability (`torch.FloatTensor` of shape `(B, K)`): Probability of the predicted token.
        ranking (`torch.FloatTensor` of shape `(B, K)`): What decides which token is the best one.
        confidence_threshold (`float`): A token is confident when it reaches this; in D2F
            ([`~acceptance_rules.accepted_tokens`]) it has to exceed it.

    Returns:
        `torch.BoolTensor` of shape `(B, K)`.
    """
    best = ranking.masked_fill(~is_masked, -torch.inf).argmax(-1, keepdim=True)
    is_best = torch.zeros_like(is_masked).scatter(-1, best, True)
    return is_masked & (is_best | (probability >= confidence_threshold))

"""Vanilla decoding: the samplers that LLaDA and Dream came with. Bidirectional, without a cache, in fixed steps."""

# B batch, R response tokens (the limit), K block size, V vocabulary, M masked tokens of a block, all rows

import math
from collections.abc import Iterator

import torch

from .decoding_loop import BlockDiffusionModel
from .decoding_rules import scatter_rows
from .generation_config_d2f import D2FGenerationConfig
from .response import Response
from .sampler import Sampler


class VanillaDecoder:
    """Decodes a [`Response`] as the original models do.

    All response tokens are masked from the start and seen by all. Blocks are decoded from left to right, each in its
    share of the steps. In a step:

    1. Which tokens of the block are masked.
    2. Forward over the whole sequence; with guidance a second one, over a sequence whose prompt is masked.
    3. Accept as many of the highest-ranking tokens as the schedule says.

    Args:
        model (`BlockDiffusionModel`): The model.
        response (`Response`): The tokens.
        sampler (`Sampler`): Chooses tokens.
        generation_config (`D2FGenerationConfig`): With its defaults filled in.

    Raises:
        ValueError: for `steps` that cannot be shared evenly by the blocks.
    """

    trace = None

    def __init__(
        self, model: BlockDiffusionModel, response: Response, sampler: Sampler, generation_config: D2FGenerationConfig
    ):
        self.model = model
        self.response = response
        self.sampler = sampler
        self.block_size = min(generation_config.block_size, response.max_new_tokens)
        self.steps_per_block = steps_per_block(generation_config.steps, response.max_new_tokens, self.block_size)
        self.unmask_schedule = generation_config.unmask_schedule or "even"
        self.ranking_temperature = generation_config.ranking_temperature
        self.guidance_scale = generation_config.guidance_scale
        self.is_guided = self.guidance_scale is not None and self.guidance_scale != 1
        self.forwards_per_step = 1 + self.is_guided
        self.look_back = int(model.config.right_shift_logits)  # the token before a masked one predicts it
        self.num_forward_passes = torch.zeros_like(response.prompt_lengths)
        position = torch.arange(response.sequences.shape[1], device="cpu")[None]
        self.is_prompt = position < response.prompt_lengths[:, None]  # [B, L]
        self.is_token = position < (response.prompt_lengths + response.max_new_tokens)[:, None]

    def steps(self) -> Iterator[None]:
        """Decodes everything. It yields before each step."""
        response, limit = self.response, self.response.max_new_tokens
        for start in range(0, limit, self.block_size):
            end = min(start + self.block_size, limit)
            num_steps = end - start if self.steps_per_block is None else self.steps_per_block
            for step in range(num_steps):
                if response.has_stopped.all():
                    return
                yield

                # 1. What there is to decode.
                is_masked = response.is_masked()[:, start:end]  # [B, K]
                row, index = is_masked.nonzero(as_tuple=True)
                index = index + start  # in the response

                # 2. Forward.
                logits = self._forward(row, index)  # [M, V]
                self.num_forward_passes += ~response.has_stopped

                # 3. Accept.
                prediction = self.sampler(logits, row, index, response)
                accepted = vanilla_accepted_tokens(
                    is_masked,
                    scatter_rows(prediction.ranking, row, index - start, is_masked.shape),
                    step,
                    num_steps,
                    self.unmask_schedule,
                    self.ranking_temperature,
                    self.sampler.generator,
                )[row, index - start]
                response.accept(accepted, row, index, prediction.tokens, scores=prediction.scores, logits=logits)
                response.publish(shown=response.limits)

    def _forward(self, row: torch.LongTensor, index: torch.LongTensor) -> torch.Tensor:
        """Logits `(M, V)` of the response tokens `(row, index)`, `(M,)` each; with guidance the guided ones."""
        response, device = self.response, self.response.device
        position = response.prompt_lengths[row] + index - self.look_back
        inputs = {
            "attention_mask": self.is_token.to(device),
            "logits_to_keep": (row.to(device), position.to(device)),
            "return_dict": True,
        }
        logits = self.model(input_ids=response.sequences.to(device), **inputs).logits
        if self.is_guided:
            without_prompt = response.sequences.masked_fill(self.is_prompt, response.mask_token_id)
            unconditional = self.model(input_ids=without_prompt.to(device), **inputs).logits
            logits = unconditional + self.guidance_scale * (logits - unconditional)
        return logits


def steps_per_block(steps: int | None, max_new_tokens: int, block_size: int) -> int | None:
    """The share of each block in `steps`; `None` if they are not given.

    Raises:
        ValueError: if blocks or steps do not divide evenly.
    """
    if steps is None:
        return None
    num_blocks = math.ceil(max_new_tokens / block_size)
    if steps % num_blocks or max_new_tokens % block_size:
        raise ValueError(
            f"`steps` must be a multiple of the number of blocks and `max_new_tokens` one of `block_size`, got "
            f"{steps} steps for {max_new_tokens} tokens in blocks of {block_size}. Without `steps` any length will do."
        )
    return steps // num_blocks


def vanilla_accepted_tokens(
    is_masked: torch.BoolTensor,
    ranking: torch.FloatTensor,
    step: int,
    num_steps: int,
    unmask_schedule: str,
    ranking_temperature: float | None = None,
    generator: torch.Generator | None = None,
) -> torch.BoolTensor:
    """Which masked tokens of a block the original samplers accept in a step, by `unmask_schedule`.

    Args:
        is_masked (`torch.BoolTensor` of shape `(B, K)`): The masked tokens of the block.
        ranking (`torch.FloatTensor` of shape `(B, K)`): What orders them.
        step (`int`): Steps of this block before this one.
        num_steps (`int`): Steps of this block in all.
        unmask_schedule (`str`): `"even"`, `"linear"` or `"independent"`.
        ranking_temperature (`float`, *optional*): Draws instead of taking the best.
        generator (`torch.Generator`, *optional*): Source of randomness.

    Returns:
        `torch.BoolTensor` of shape `(B, K)`.
    """
    block_size = is_masked.shape[1]
    # Time runs from 1 to almost 0; the last step leaves nothing. In float32, as the original computes it.
    times = torch.linspace(1, 1e-3, num_steps + 1, device=is_masked.device)
    share = 1.0 - times[step + 1] / times[step] if step < num_steps - 1 else torch.ones_like(times[0])
    if unmask_schedule == "independent":
        uniform = torch.rand(int(is_masked.sum()), generator=generator, device=is_masked.device)
        return is_masked.clone().masked_scatter_(is_masked, uniform < share)
    num_masked = is_masked.sum(-1)  # [B]
    if unmask_schedule == "linear":
        num_accepted = (num_masked.float() * share).long()
    else:
        # The first steps take what does not divide evenly.
        num_accepted = torch.full_like(num_masked, block_size // num_steps + (step < block_size % num_steps))
    if ranking_temperature:
        # The best of perturbed values are a draw without replacement (Gumbel top-k).
        noise = torch.empty_like(ranking).exponential_(generator=generator)
        ranking = ranking / ranking_temperature - noise.log()
    order = ranking.masked_fill(~is_masked, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    rank = torch.arange(block_size, device=is_masked.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(-1, order, rank)  # of each token in its row
    return is_masked & (rank < num_accepted[:, None])

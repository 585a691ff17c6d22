"""The noise of training: which mask ratio each block gets, and which tokens are masked with it.

Discrete diffusion forcing masks the response blocks of one sequence with ratios that rise from block to block
(Algorithm 1, lines 4-5 of arXiv 2508.09192); plain masked diffusion masks the whole response with one ratio. In order:

    mask_ratios = rising_mask_ratios(num_blocks)                                     # or random_mask_ratio(batch_size)
    ratios = token_mask_ratios(mask_ratios, prompt_lengths, sequence_length, block_size)
    noisy_ids, is_masked = mask_tokens(input_ids, maskable, ratios, mask_token_id)

`D2FNoisingCollator` does this to the batches of `D2FDataCollator`.
"""

# B batch, L sequence, N blocks of the longest row, K block size

import copy
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from d2f_hf.data import D2FDataCollator


def rising_mask_ratios(
    num_blocks: torch.Tensor, *, low: float = 0.2, high: float = 0.7, generator: torch.Generator | None = None
) -> torch.Tensor:
    r"""
    A mask ratio for every response block, rising from the first block of a row to its last (Algorithm 1, lines 4-5).

    The first block of a row draws its ratio from U[low, high). Each later block adds an independent
    U[0, 1) * (high - first) / (n - 1), where n is the row's own number of blocks, so that no ratio exceeds `high` and
    the schedule of a row never depends on its batch.

    The defaults are the range that the released adapters were trained with; the paper says 0.3 to 0.7.

    Args:
        num_blocks (`torch.Tensor` of shape `[B]`, integer):
            Number of response blocks of each row, at least 1. A short last block counts.
        low (`float`, *optional*, defaults to 0.2):
            Lower end of the first block's range.
        high (`float`, *optional*, defaults to 0.7):
            Upper end of every block's range.
        generator (`torch.Generator`, *optional*):
            Source of randomness; the global one if not given.

    Returns:
        `torch.Tensor` of shape `[B, N]`, float32: the mask ratios, 0 behind the last block of a shorter row.

    Raises:
        ValueError: If `num_blocks` is not a vector of positive integers, or not `0 <= low <= high <= 1`.
    """
    if num_blocks.dim() != 1 or num_blocks.is_floating_point() or num_blocks.numel() == 0 or num_blocks.min() < 1:
        raise ValueError(
            f"`num_blocks` must be a non-empty vector of integers >= 1, one per row, got {num_blocks}. "
            "Leave out examples without a response."
        )
    if not 0.0 <= low <= high <= 1.0:
        raise ValueError(
            f"`low` and `high` must satisfy 0 <= low <= high <= 1, got low={low} and high={high}. "
            "They are shares of masked tokens, e.g. low=0.3 and high=0.7."
        )
    block_count = int(num_blocks.max())
    first = low + (high - low) * _uniform((len(num_blocks), 1), num_blocks.device, generator)  # [B, 1]
    steps = _uniform((len(num_blocks), block_count - 1), num_blocks.device, generator)  # [B, N - 1]
    steps = steps * (high - first) / (num_blocks[:, None] - 1).clamp(min=1)
    # Rounding of the running sum may pass `high` by a few 1e-8.
    mask_ratios = torch.cat([first, steps], dim=1).cumsum(dim=1).clamp(max=high)  # [B, N]
    in_row = torch.arange(block_count, device=num_blocks.device) < num_blocks[:, None]  # [B, N]
    return mask_ratios.where(in_row, 0.0)


def random_mask_ratio(
    batch_size: int, *, stratified: bool = True, generator: torch.Generator | None = None
) -> torch.Tensor:
    r"""
    One mask ratio t ~ U(0, 1] per row, for the masked-diffusion objective of LLaDA (arXiv 2502.09992).

    With `stratified` the rows share one draw u ~ U(0, 1] and row i takes (i + u) / B, in random order: each ratio
    alone is still uniform, but together they cover (0, 1] evenly, which takes noise out of a loss with weight 1/t.

    Args:
        batch_size (`int`):
            Number of rows B, at least 1.
        stratified (`bool`, *optional*, defaults to `True`):
            Whether the rows cover (0, 1] evenly. `False` draws them independently.
        generator (`torch.Generator`, *optional*):
            Source of randomness; the global one if not given. The result lies on its device (CPU for the global one).

    Returns:
        `torch.Tensor` of shape `[B]`, float32: the mask ratios, none of them 0.

    Raises:
        ValueError: If `batch_size` is below 1.
    """
    if batch_size < 1:
        raise ValueError(f"`batch_size` must be at least 1, got {batch_size}. Leave out empty batches.")
    device = torch.device("cpu") if generator is None else generator.device
    if not stratified:
        return 1.0 - _uniform((batch_size,), device, generator)
    offset = 1.0 - _uniform((1,), device, generator)
    strata = torch.randperm(batch_size, device=device, generator=generator)  # [B]
    return (strata + offset) / batch_size


def token_mask_ratios(
    mask_ratios: torch.Tensor, prompt_lengths: torch.Tensor, sequence_length: int, block_size: int
) -> torch.Tensor:
    r"""
    The mask ratio of every position: that of its block in the response, 0 in the prompt.

    Blocks are counted from the end of each row's prompt. A `mask_ratios` with N = 1 and a `block_size` of at least the
    longest response gives the whole response one ratio.

    Args:
        mask_ratios (`torch.Tensor` of shape `[B, N]`):
            Mask ratio of each response block, in [0, 1].
        prompt_lengths (`torch.Tensor` of shape `[B]`, integer):
            Number of prompt tokens of each row.
        sequence_length (`int`):
            Number of positions L.
        block_size (`int`):
            Tokens per response block, at least 1.

    Returns:
        `torch.Tensor` of shape `[B, L]` in the dtype of `mask_ratios`; 0 in the prompt and behind block N.

    Raises:
        ValueError: If the shapes do not fit together, `block_size` is below 1 or `sequence_length` negative.
    """
    if mask_ratios.dim() != 2 or mask_ratios.shape[1] == 0:
        raise ValueError(
            f"`mask_ratios` must have shape [B, N] with N >= 1, got {list(mask_ratios.shape)}. "
            "One ratio per row, [B], becomes one block per row with `mask_ratios[:, None]`."
        )
    if prompt_lengths.shape != mask_ratios.shape[:1]:
        raise ValueError(
            f"`prompt_lengths` must have one entry per row of `mask_ratios` ({mask_ratios.shape[0]}), "
            f"got shape {list(prompt_lengths.shape)}."
        )
    if block_size < 1 or sequence_length < 0:
        raise ValueError(
            f"`block_size` must be at least 1 and `sequence_length` at least 0, got {block_size} and "
            f"{sequence_length}. For one block per row use the length of the longest response."
        )
    position = torch.arange(sequence_length, device=mask_ratios.device)
    response_offset = position - prompt_lengths[:, None]  # [B, L], negative in the prompt
    block = response_offset.div(block_size, rounding_mode="floor")  # [B, L]
    in_blocks = (block >= 0) & (block < mask_ratios.shape[1])
    block = block.clamp(0, mask_ratios.shape[1] - 1)
    return mask_ratios.gather(1, block).where(in_blocks, 0.0)


def mask_tokens(
    input_ids: torch.Tensor,
    maskable: torch.Tensor,
    token_mask_ratios: torch.Tensor,
    mask_token_id: int,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""
    The noisy sequence: every maskable token is replaced by the mask token with its own probability, independently.

    A row, and even a batch, may come out without any masked token.

    Args:
        input_ids (`torch.Tensor` of shape `[B, L]`):
            Clean token ids.
        maskable (`torch.Tensor` of shape `[B, L]`, bool):
            Which tokens may be masked: those of the response, neither prompt nor padding.
        token_mask_ratios (`torch.Tensor` of shape `[B, L]`):
            Probability of each token to be masked, in [0, 1]; see [`~noising.token_mask_ratios`].
        mask_token_id (`int`):
            Id that stands for a masked token.
        generator (`torch.Generator`, *optional*):
            Source of randomness; the global one if not given.

    Returns:
        `tuple(torch.Tensor, torch.Tensor)`: `noisy_ids` and the bool `is_masked`, both of shape `[B, L]`.

    Raises:
        ValueError: If the shapes differ, `maskable` is not bool, or a ratio is outside [0, 1].
    """
    if input_ids.dim() != 2:
        raise ValueError(
            f"`input_ids` must have shape [B, L], got {list(input_ids.shape)}. "
            "Add a batch dimension with `input_ids[None]`."
        )
    if maskable.shape != input_ids.shape or maskable.dtype != torch.bool:
        raise ValueError(
            f"`maskable` must be a bool tensor of the shape of `input_ids` {list(input_ids.shape)}, "
            f"got {maskable.dtype} {list(maskable.shape)}. A 0/1 mask becomes one with `.bool()`."
        )
    if token_mask_ratios.shape != input_ids.shape:
        raise ValueError(
            f"`token_mask_ratios` must have the shape of `input_ids` {list(input_ids.shape)}, "
            f"got {list(token_mask_ratios.shape)}. Expand ratios of blocks with `noising.token_mask_ratios`."
        )
    if ((token_mask_ratios < 0) | (token_mask_ratios > 1)).any():
        raise ValueError(
            "`token_mask_ratios` must lie in [0, 1], "
            f"got values from {token_mask_ratios.min():.4g} to {token_mask_ratios.max():.4g}. "
            "They are probabilities, not percentages."
        )
    draw = _uniform(input_ids.shape, input_ids.device, generator)  # [B, L], in [0, 1): a ratio of 1 always masks
    is_masked = maskable & (draw < token_mask_ratios)
    return input_ids.masked_fill(is_masked, mask_token_id), is_masked


def _uniform(
    shape: tuple[int, ...] | torch.Size, device: torch.device, generator: torch.Generator | None
) -> torch.Tensor:
    """Draws from U[0, 1) on the generator's own device, so that a CPU generator gives the same noise everywhere."""
    source = device if generator is None else generator.device
    return torch.rand(shape, dtype=torch.float32, device=source, generator=generator).to(device)


class D2FNoisingCollator:
    r"""
    A batch with noise: masks response tokens as the objective asks, and keeps what the loss needs to know about it.

    The noise of a row follows from `seed`, `epoch` and the row's own tokens. So a resumed run goes on with the same
    noise, and a row is masked in the same way whatever process or batch it is in. There are two exceptions: EOS tails
    that reach to the end of the longest row of the batch, and the ratios of `"masked_diffusion"`, which cover their
    range evenly within a batch. [`~D2FNoisingCollator.for_evaluation`] has neither.

    Args:
        collate (`D2FDataCollator`):
            Makes the clean batch.
        objective (`str`):
            `"distillation"`: ratios that rise from block to block (Algorithm 1, lines 4-5). `"masked_diffusion"`: one
            ratio for the whole response.
        mask_token_id (`int`):
            Id that stands for a masked token.
        mask_ratio_low (`float`), mask_ratio_high (`float`):
            Bounds of the ratios, see [`~noising.rising_mask_ratios`]; those of `"masked_diffusion"` are uniform in
            (low, high].
        decoding_probability (`float`, *optional*, defaults to 0.0):
            Share of the rows that look as in decoding. `"distillation"`: the blocks before a uniformly drawn one are
            clean, and the ratios rise from there. `"masked_diffusion"`: up to a uniformly drawn position the response
            is clean, the next `block_size` tokens are masked with the row's ratio, and the rest is masked and not in
            the loss.
        causal_probability (`float`, *optional*, defaults to 0.0):
            For `"masked_diffusion"` of a model whose logits are one position ahead: share of the rows with nothing
            masked and causal attention, on which each token is predicted from those before it.
        clean_context (`bool`, *optional*, defaults to `False`):
            For `"masked_diffusion"`: each response block gets a ratio of its own, and the batch has the clean tokens
            too. The ratios of a row cover their range evenly, in random order. See [`d2f_hf.clean_context`].
        complementary_masks (`bool`, *optional*, defaults to `False`):
            With `clean_context`: a second noisy sequence behind the first, with the masks where the first has none.
        block_alignment (`str`, *optional*, defaults to `"prompt"`):
            Where the blocks of `clean_context` start, as in the model's configuration.
        seed (`int`, *optional*, defaults to 0):
            Seed of the noise.
        epoch (`int`, *optional*, defaults to 0):
            Set by the trainer, so that each epoch has other noise. Copies of the collator in the worker processes of
            a `DataLoader` see it change, also where the workers outlive an epoch.
        stratified (`bool`, *optional*, defaults to `True`):
            Whether the ratios of `"masked_diffusion"` cover their range evenly within a batch, see
            [`~noising.random_mask_ratio`]. `False` draws each from the row alone.
    """

    def __init__(
        self,
        collate: D2FDataCollator,
        *,
        objective: str,
        mask_token_id: int,
        mask_ratio_low: float,
        mask_ratio_high: float,
        decoding_probability: float = 0.0,
        causal_probability: float = 0.0,
        clean_context: bool = False,
        complementary_masks: bool = False,
        block_alignment: str = "prompt",
        seed: int = 0,
        epoch: int = 0,
        stratified: bool = True,
    ):
        self.collate = collate
        self.objective = objective
        self.mask_token_id = mask_token_id
        self.mask_ratio_low = mask_ratio_low
        self.mask_ratio_high = mask_ratio_high
        self.decoding_probability = decoding_probability
        self.causal_probability = causal_probability
        self.clean_context = clean_context
        self.complementary_masks = complementary_masks
        self.block_alignment = block_alignment
        self.seed = seed
        self.stratified = stratified
        # In shared memory, as `datasets.IterableDataset` does it, because persistent workers get the collator once.
        self._epoch = torch.tensor(epoch, device="cpu").share_memory_()

    @property
    def epoch(self) -> int:
        """The epoch that the noise is of."""
        return int(self._epoch)

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch.fill_(epoch)

    def for_evaluation(self) -> "D2FNoisingCollator":
        r"""
        A collator for evaluation, where the noise of a row depends on `seed` and its tokens alone.

        It stays at epoch 0. What a batch does to its rows is left out: ratios are not stratified, and where EOS tokens
        would follow a response to the end of the longest row (`eos_tail="batch"`) they only fill its last block.
        """
        other = copy.copy(self)
        other.collate = copy.copy(self.collate)
        if getattr(other.collate, "eos_tail", None) == "batch":
            other.collate.eos_tail = "block"
        other.stratified = False
        other._epoch = torch.tensor(0, device="cpu")
        return other

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        r"""
        Collates and masks.

        Returns:
            `dict[str, torch.Tensor]`: `input_ids` `[B, L]` with masked tokens, `attention_mask` `[B, L]`,
            `prompt_lengths` `[B]`, `is_causal` `[B]` bool, `is_masked` `[B, L]` bool (the tokens to predict),
            `mask_ratios` `[B, L]`, and `labels` `[B, L]`: the true tokens the loss is averaged over (distillation:
            those to predict; masked diffusion: all that could have been), -100 elsewhere. With `clean_context` also
            `clean_ids` `[B, L]`. With `complementary_masks` `input_ids`, `is_masked` and `mask_ratios` are `[B, 2 L]`,
            the two noisy sequences one behind the other.
        """
        batch = self.collate(features)
        input_ids, prompt_lengths = batch["input_ids"], batch["prompt_lengths"]
        sequence_length, block_size = input_ids.shape[1], self.collate.block_size
        lengths = batch["attention_mask"].sum(-1)
        position = torch.arange(sequence_length, device="cpu")
        in_response = (position >= prompt_lengths[:, None]) & (position < lengths[:, None])
        if self.clean_context:
            return self._with_clean_context(batch, features, in_response)
        in_loss, is_causal = in_response.clone(), torch.zeros(len(input_ids), dtype=torch.bool, device="cpu")
        noisy_ids, is_masked = input_ids.clone(), torch.zeros_like(in_response)
        ratios = torch.zeros(input_ids.shape, dtype=torch.float32, device="cpu")
        token_ids = [[int(token) for token in feature["input_ids"]] for feature in features]
        generators = [self._generator(tokens) for tokens in token_ids]
        row_ratios = self._row_ratios(token_ids) if self.objective == "masked_diffusion" else None  # [B]
        for b, generator in enumerate(generators):
            response_length = lengths[b] - prompt_lengths[b]
            if row_ratios is not None:
                block_ratios = row_ratios[b].expand(1, -(-int(response_length) // block_size))
            else:
                block_ratios = rising_mask_ratios(
                    -(-response_length[None] // block_size),
                    low=self.mask_ratio_low,
                    high=self.mask_ratio_high,
                    generator=generator,
                )  # [1, N]
            is_decoding, where = _uniform((2,), torch.device("cpu"), generator)
            ratios[b] = token_mask_ratios(block_ratios, prompt_lengths[b, None], sequence_length, block_size)[0]
            if is_decoding < self.decoding_probability and row_ratios is not None:
                start = prompt_lengths[b] + (where * response_length).long()
                ratios[b, :start] = 0.0
                ratios[b, start + block_size :] = 1.0
                in_loss[b] &= (position >= start) & (position < start + block_size)
            elif is_decoding < self.decoding_probability:
                num_clean = int(where * block_ratios.shape[1]) * block_size
                ratios[b] = torch.nn.functional.pad(ratios[b], (num_clean, 0))[:sequence_length]
            row = slice(b, b + 1)
            noisy_ids[row], is_masked[row] = mask_tokens(
                input_ids[row], in_response[row], ratios[row], self.mask_token_id, generator
            )
            if self.causal_probability > 0.0:
                # Of a generator of its own: how much the mask takes of the row's follows the width of the batch.
                draw = _uniform((), torch.device("cpu"), self._generator([-2, *token_ids[b]]))
                is_causal[b] = draw < self.causal_probability
            if is_causal[b]:
                noisy_ids[b], ratios[b] = input_ids[b], 1.0
                in_loss[b] = is_masked[b] = in_response[b]
        is_masked &= in_loss
        counted = is_masked if self.objective == "distillation" else in_loss
        return {
            "input_ids": noisy_ids,
            "attention_mask": batch["attention_mask"],
            "prompt_lengths": prompt_lengths,
            "is_masked": is_masked,
            "mask_ratios": ratios,
            "is_causal": is_causal,
            "labels": input_ids.masked_fill(~counted, -100),
        }

    def _with_clean_context(
        self, batch: dict[str, torch.Tensor], features: Sequence[Mapping[str, Any]], in_response: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """A batch in which each response block has its own mask ratio, with the clean tokens."""
        input_ids, prompt_lengths = batch["input_ids"], batch["prompt_lengths"]
        block_size = self.collate.block_size
        start = prompt_lengths  # of the first block that holds response tokens, [B]
        if self.block_alignment == "sequence":
            start = prompt_lengths // block_size * block_size
        noisy_ids, is_masked = input_ids.clone(), torch.zeros_like(in_response)
        ratios = torch.zeros(input_ids.shape, dtype=torch.float32, device="cpu")
        for b, feature in enumerate(features):
            generator = self._generator([int(token) for token in feature["input_ids"]])
            length = batch["attention_mask"][b].sum() - start[b]
            draws = random_mask_ratio(-(-int(length) // block_size), generator=generator)
            block_ratios = self.mask_ratio_low + (self.mask_ratio_high - self.mask_ratio_low) * draws[None]
            row = slice(b, b + 1)
            ratios[row] = token_mask_ratios(block_ratios, start[row], input_ids.shape[1], block_size)
            noisy_ids[row], is_masked[row] = mask_tokens(
                input_ids[row], in_response[row], ratios[row], self.mask_token_id, generator
            )
        ratios = ratios.where(in_response, 0.0)  # the first of these blocks may hold prompt tokens
        if self.complementary_masks:
            others = in_response & ~is_masked
            noisy_ids = torch.cat([noisy_ids, input_ids.masked_fill(others, self.mask_token_id)], dim=1)
            is_masked = torch.cat([is_masked, others], dim=1)
            ratios = torch.cat([ratios, (1.0 - ratios).where(in_response, 0.0)], dim=1)
        return {
            "input_ids": noisy_ids,
            "clean_ids": input_ids,
            "attention_mask": batch["attention_mask"],
            "prompt_lengths": prompt_lengths,
            "is_masked": is_masked,
            "mask_ratios": ratios,
            "labels": input_ids.masked_fill(~in_response, -100),
        }

    def _row_ratios(self, token_ids: list[list[int]]) -> torch.Tensor:
        """The ratio of each row, `[B]`, for masked diffusion."""
        if self.stratified:
            draws = random_mask_ratio(len(token_ids), generator=self._generator([-1, *token_ids[0]]))
        else:
            draws = torch.cat([random_mask_ratio(1, generator=self._generator([-1, *row])) for row in token_ids])
        return self.mask_ratio_low + (self.mask_ratio_high - self.mask_ratio_low) * draws

    def _generator(self, tokens: list[int]) -> torch.Generator:
        text = f"{self.seed} {self.epoch} {tokens}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
        return torch.Generator(device="cpu").manual_seed(seed)


def causal_attention_mask(is_causal: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """A `[B, 1, L, L]` mask: padding is not seen, and rows with `is_causal` `[B]` do not see what comes later."""
    length = attention_mask.shape[1]
    no_future = torch.ones(length, length, dtype=torch.bool, device=attention_mask.device).tril()
    allowed = attention_mask.bool()[:, None, :] & (no_future | ~is_causal[:, None, None])  # [B, L, L]
    return allowed[:, None]

"""The noise of training: which mask ratio each block gets, and which tokens are masked with it.

Discrete diffusion forcing masks the response blocks of one sequence with ratios that rise from block to block
(Algorithm 1, lines 4-5 of arXiv 2508.09192); plain masked diffusion masks the whole response with one ratio. In order:

    mask_ratios = rising_mask_ratios(num_blocks)                                     # or random_mask_ratio(batch_size)
    ratios = token_mask_ratios(mask_ratios, prompt_lengths, sequence_length, block_size)
    noisy_ids, is_masked = mask_tokens(input_ids, maskable, ratios, mask_token_id)
"""

# B batch, L sequence, N blocks of the longest row, K block size

import torch


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
    return torch.rand(shape, device=source, generator=generator).to(device)

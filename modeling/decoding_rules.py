"""Which blocks of a response are open, fully activated and final (Algorithm 2). Pure functions of tensors.

They follow from which tokens are masked. No branch depends on a tensor's values and nothing is changed in place, so
another engine can call them on its own device without waiting. Thresholds may differ from row to row.
"""

# B batch, R response tokens (the limit), N blocks, K block size, M tokens

import torch
from torch.nn import functional as F


def as_blocks(values: torch.Tensor, block_size: int) -> torch.Tensor:
    """`values` of shape `(B, R)` as blocks `(B, N, K)`; what the last block lacks is 0 or `False`."""
    missing = -values.shape[1] % block_size
    if missing:
        values = F.pad(values, (0, missing))
    return values.unflatten(1, (-1, block_size))


def scatter_rows(
    values: torch.Tensor, row: torch.LongTensor, index: torch.LongTensor, shape: tuple[int, int]
) -> torch.Tensor:
    """`values` of tokens, `(M,)`, at position `index` of their `row`: a tensor of `shape`, 0 or `False` elsewhere."""
    return values.new_zeros(shape[0] * shape[1]).index_copy_(0, row * shape[1] + index, values).view(shape)


def decoded_ratio(is_masked: torch.BoolTensor, block_size: int, limits: torch.LongTensor) -> torch.FloatTensor:
    """The share of each block that is decoded, `(B, N)`.

    Args:
        is_masked (`torch.BoolTensor` of shape `(B, R)`): The masked tokens, as far as they are looked at.
        block_size (`int`): K.
        limits (`torch.LongTensor` of shape `(B,)`): The most response tokens of each row: the last block may be short.
    """
    num_masked = as_blocks(is_masked, block_size).sum(-1)
    first = torch.arange(num_masked.shape[1], device=is_masked.device) * block_size
    sizes = (limits[:, None] - first).clamp(min=1, max=block_size)
    return (sizes - num_masked) / sizes


def first_index(condition: torch.BoolTensor) -> torch.LongTensor:
    """The index of the first `True` of each row of `(B, R)`, R where there is none."""
    length = condition.shape[1]
    return torch.where(condition, torch.arange(length, device=condition.device), length).amin(-1)


def opened_blocks(
    num_opened: torch.LongTensor,
    ratio: torch.FloatTensor,
    num_blocks: torch.LongTensor,
    eos_block: torch.LongTensor,
    block_add_threshold: float | torch.Tensor,
    max_active_blocks: int | torch.Tensor | None = None,
) -> torch.LongTensor:
    """How many blocks each row has in this step (Algorithm 2, adding a block; the first step opens the first one).

    A block is added, at most one a step, when the decoded ratio of the last one has reached `block_add_threshold` and
    fewer than `max_active_blocks` are in flight. With an EOS decoded no block is added, and those after the EOS's
    block are dropped.

    Args:
        num_opened (`torch.LongTensor` of shape `(B,)`): Blocks opened before.
        ratio (`torch.FloatTensor` of shape `(B, N)`): Decoded ratio of each block; N exceeds no row's need but covers
            all opened ones.
        num_blocks (`torch.LongTensor` of shape `(B,)`): Blocks that a row can have.
        eos_block (`torch.LongTensor` of shape `(B,)`): Block of the first EOS; `num_blocks` or more without one.
        block_add_threshold (`float`, or `torch.Tensor` of shape `(B,)`): tau_add.
        max_active_blocks (`int`, or `torch.Tensor` of shape `(B,)`, *optional*): Most blocks that are open and not
            final. No cap by default.
    """
    # Before the first block comes the prompt, which is decoded.
    last_ratio = F.pad(ratio, (1, 0), value=1.0).gather(1, num_opened[:, None]).squeeze(1)
    may_add = (num_opened < num_blocks) & (last_ratio >= block_add_threshold)
    if max_active_blocks is not None:
        may_add = may_add & (num_opened - final_blocks(ratio, num_opened) < max_active_blocks)
    return torch.where(eos_block < num_blocks, torch.minimum(num_opened, eos_block + 1), num_opened + may_add)


def fully_activated(ratio: torch.FloatTensor, block_activation_threshold: float | torch.Tensor) -> torch.BoolTensor:
    """Which blocks, `(B, N)`, accept at least one token: those whose predecessor has reached tau_act.

    Without `remask_threshold` ratios only rise, so a block that is fully activated stays so.

    Args:
        ratio (`torch.FloatTensor` of shape `(B, N)`): Decoded ratio of each block.
        block_activation_threshold (`float`, or `torch.Tensor` of shape `(B, 1)`): tau_act.
    """
    return F.pad(ratio[:, :-1], (1, 0), value=1.0) >= block_activation_threshold


def final_blocks(ratio: torch.FloatTensor, num_opened: torch.LongTensor) -> torch.LongTensor:
    """How many blocks of each row, `(B,)`, are decoded and have only decoded blocks before them."""
    return torch.minimum(first_index(ratio < 1.0), num_opened)

"""Which blocks of a response are open, fully activated and final (Algorithm 2). Pure functions of tensors.

They follow from which tokens are masked. No branch depends on a tensor's values and nothing is changed in place, so
another engine can call them on its own device without waiting. Thresholds may differ from row to row.
"""

# B batch, R response tokens that are looked at, N blocks of them, K block size, M tokens

import torch
from torch.nn import functional as F


def as_blocks(values: torch.Tensor, block_size: int) -> torch.Tensor:
    """`values` of shape `(B, R)` as blocks `(B, N, K)`; what the last block lacks is 0 or `False`."""
    missing = -values.shape[1] % block_size
    if missing:
        values = F.pad(values, (0, missing))
    return values.view(len(values), -1, block_size)


def scatter_rows(
    values: torch.Tensor, row: torch.LongTensor, index: torch.LongTensor, shape: tuple[int, int]
) -> torch.Tensor:
    """`values` of tokens, `(M,)`, at position `index` of their `row`: a tensor of `shape`, 0 or `False` elsewhere."""
    return values.new_zeros(shape).index_put_((row, index), values)


def scatter_where(values: torch.Tensor, where: torch.BoolTensor) -> torch.Tensor:
    """`values` of tokens, `(M,)`, at the M positions `where` `(B, R)`, row by row; 0 or `False` elsewhere."""
    return values.new_zeros(where.shape).masked_scatter_(where, values)


def first_index(condition: torch.BoolTensor) -> torch.LongTensor:
    """The index of the first `True` of each row of `(B, R)`, R where there is none."""
    length = condition.shape[1]
    return torch.where(condition, torch.arange(length, device=condition.device), length).amin(-1)


def block_sizes(limits: torch.LongTensor, block_size: int, num_blocks: int) -> torch.FloatTensor:
    """How many tokens each of the first `num_blocks` blocks has, `(B, N)`. The last block may be short.

    A block behind the limit, which no row ever opens, counts as one token, so that its ratio can be computed.

    Args:
        limits (`torch.LongTensor` of shape `(B,)`): The most response tokens of each row.
        block_size (`int`): K.
        num_blocks (`int`): N.
    """
    first = torch.arange(num_blocks, device=limits.device) * block_size
    return (limits[:, None] - first).clamp(min=1, max=block_size).float()


def decoded_ratio(is_masked: torch.BoolTensor, sizes: torch.FloatTensor) -> torch.FloatTensor:
    """The share of each block that is decoded, `(B, N)`.

    Args:
        is_masked (`torch.BoolTensor` of shape `(B, N, K)`): The masked tokens.
        sizes (`torch.FloatTensor` of shape `(B, N)`): See [`block_sizes`].
    """
    return (sizes - is_masked.sum(-1, dtype=sizes.dtype)) / sizes


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
    fewer than `max_active_blocks` are in flight. An EOS is in an open block. Those behind it are dropped, and none is
    added.

    Args:
        num_opened (`torch.LongTensor` of shape `(B,)`): Blocks opened before.
        ratio (`torch.FloatTensor` of shape `(B, N)`): Decoded ratio of each block; N exceeds no row's need but covers
            all opened ones.
        num_blocks (`torch.LongTensor` of shape `(B,)`): Blocks that a row can have.
        eos_block (`torch.LongTensor` of shape `(B,)`): Block of the first EOS; without one the last block, or more.
        block_add_threshold (`float`, or `torch.Tensor` of shape `(B,)`): tau_add.
        max_active_blocks (`int`, or `torch.Tensor` of shape `(B,)`, *optional*): Most blocks that are open and not
            final. No cap by default.
    """
    # Before the first block comes the prompt, which is decoded.
    last_ratio = F.pad(ratio, (1, 0), value=1.0).gather(1, num_opened[:, None]).squeeze(1)
    is_added = last_ratio >= block_add_threshold
    if max_active_blocks is not None:
        is_added = is_added & (num_opened - final_blocks(ratio, num_opened) < max_active_blocks)
    return torch.minimum(num_opened + is_added, torch.minimum(eos_block + 1, num_blocks))


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
    return torch.minimum((ratio >= 1.0).cumprod(-1).sum(-1), num_opened)


def final_length(first_masked: torch.LongTensor, opened_length: torch.LongTensor, block_size: int) -> torch.LongTensor:
    """The tokens of these blocks, `(B,)`: those of all open blocks before the first masked token.

    Args:
        first_masked (`torch.LongTensor` of shape `(B,)`): Index of the first masked token.
        opened_length (`torch.LongTensor` of shape `(B,)`): Tokens of all open blocks. If none of them is masked, all
            blocks are final.
        block_size (`int`): K.
    """
    return torch.where(first_masked < opened_length, first_masked - first_masked % block_size, opened_length)

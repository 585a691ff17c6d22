"""Where the blocks of a row that is decoded begin and end, counted from the prompt's end or the sequence's start."""

# A rows

from typing import NamedTuple

import torch


class BlockGrid(NamedTuple):
    """The blocks of rows. Indices count from the first token of a row's first block.

    Args:
        starts (`torch.LongTensor` of shape `(A,)`): Tokens before the first block, all of the prompt.
        offsets (`torch.LongTensor` of shape `(A,)`): Prompt tokens in the first block: the index where the response
            begins.
        limits (`torch.LongTensor` of shape `(A,)`): The index behind the last response token.
        ends (`torch.LongTensor` of shape `(A,)`): The index behind the last block. What is between the limit and it is
            decoded with the last block, and is no part of the response.
    """

    starts: torch.LongTensor
    offsets: torch.LongTensor
    limits: torch.LongTensor
    ends: torch.LongTensor


def block_grid(
    prompt_lengths: torch.LongTensor, limits: torch.LongTensor, block_size: int, block_alignment: str
) -> BlockGrid:
    """The blocks of rows with `prompt_lengths` `(A,)` and at most `limits` `(A,)` response tokens.

    With `block_alignment="prompt"` the first block begins with the response, and the last one is cut at the limit.
    With `"sequence"` the first block has the last `prompt_lengths % block_size` tokens of the prompt, and the last one
    is whole: a model that was trained with whole blocks predicts other tokens in a shorter one.
    """
    if block_alignment == "prompt":
        return BlockGrid(prompt_lengths, torch.zeros_like(prompt_lengths), limits, limits)
    offsets = prompt_lengths % block_size
    limits = limits + offsets
    return BlockGrid(prompt_lengths - offsets, offsets, limits, limits + -limits % block_size)


def num_further_tokens(block_size: int, block_alignment: str) -> int:
    """Tokens behind the limit of a row that its blocks may reach, wherever they begin."""
    return 0 if block_alignment == "prompt" else 2 * (block_size - 1)

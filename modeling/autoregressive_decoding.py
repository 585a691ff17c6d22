"""Autoregressive decoding: one token after the other under a causal mask, by the weights of a block-diffusion model.

It is for models whose clean tokens under a causal mask are their autoregressive mode (`config.has_causal_mode`). It is
pipelined decoding with blocks of one token: the next block is opened once the last one is decoded, and accepts its
token whatever its probability. Masks are never fed: the last token predicts the next one.
"""

# A live rows, M tokens that have logits, V vocabulary

import torch

from .pipelined_decoding import PipelinedDecoder


class AutoregressiveDecoder(PipelinedDecoder):
    """Decodes the rows of a [`Response`] from left to right, with the arguments of [`PipelinedDecoder`].

    The first forward of a row reads its prompt, each other one a token.
    """

    is_causal = True

    def _forward(
        self, start: torch.LongTensor, end: torch.LongTensor, row: torch.LongTensor, index: torch.LongTensor
    ) -> torch.Tensor:
        """Feeds the live rows from `start` up to the last decoded token: logits `(M, V)` of the next one."""
        return super()._forward(start, end - 1, row, index - 1)

    def _record(self, start: torch.LongTensor, end: torch.LongTensor, *args) -> None:
        super()._record(start, end - 1, *args)

"""Verified decoding with two models: a block-diffusion model drafts, and an autoregressive one verifies.

The response is exactly that of the verifier. The drafter is used as it is: it reads the text in its own blocks, the
tokens of which are decoded already, and masks behind it.
"""

# A live rows, K draft length, R' tokens from the first response token on, M tokens that have logits, V vocabulary

import torch

from .decoding_loop import BlockDiffusionModel
from .sampler import Prediction
from .verified_decoding import VerifiedDecoder
from .window_forward import WindowForward


class TwoModelDecoder(VerifiedDecoder):
    """A [`VerifiedDecoder`] whose drafts are those of another model. A step drafts and verifies.

    Args:
        drafter (`BlockDiffusionModel`): The model that drafts.
        verifier (`BlockDiffusionModel`): The model whose response it is.
        args, kwargs: The further arguments of [`VerifiedDecoder`].
    """

    forwards_per_step = 2

    def __init__(self, drafter: BlockDiffusionModel, verifier: BlockDiffusionModel, *args, **kwargs):
        # Of the live rows: tokens whose keys and values are in the drafter's cache for good, `(A,)`.
        self.num_read = torch.zeros(0, dtype=torch.long, device="cpu")
        super().__init__(verifier, *args, **kwargs)
        response, config = self.response, self.generation_config
        block_size = config.block_size or drafter.config.block_size
        self.drafter_block_size: int = min(block_size, response.max_new_tokens)
        num_rows, num_slots = response.sequences.shape
        self.draft_feed = WindowForward(drafter, self.drafter_block_size, num_slots, response.device)
        if self.feed.compiled is not None:
            self.draft_feed.compile(config.compile_config, num_rows)

    def _keep_rows(self, kept: torch.LongTensor, new: torch.LongTensor, num_copies: torch.LongTensor) -> None:
        super()._keep_rows(kept, new, num_copies)
        self.num_read = torch.cat([self.num_read.index_select(0, kept), torch.zeros_like(new)])

    def _move_rows(self, sources: torch.LongTensor, targets: torch.LongTensor) -> None:
        super()._move_rows(sources, targets)
        self.draft_feed.cache.move_rows(sources, targets)

    def recover(self) -> None:
        super().recover()
        self.num_read = torch.zeros_like(self.live)

    def step(self) -> None:
        """The drafter reads the text and masks behind it; then the verifier reads what that gave."""
        if self.has_copies:  # the two models would share a first forward each; rows go through it alone instead
            self._split_live_rows()
            self._refresh()
        known, starts, block_size = self.first_masked, self.grid.starts, self.drafter_block_size
        # The last token of a response is the verifier's own choice.
        num_drafted = (self.grid.limits - 1 - known).clamp(min=0, max=self.draft_length if self.may_draft else 0)
        draft = self.draft.new_full(self.draft.shape, self.response.mask_token_id)
        row, offset = (self.offset[:-1] < num_drafted[:, None]).nonzero(as_tuple=True)
        if len(row) > 0:
            index, end = known[row] + offset, starts + known + num_drafted
            logits = self.draft_feed(self.response.sequences, self.live, starts, self.num_read, end, row, index)
            self.num_positions[self.live] += end - self.num_read
            logits[:, self.response.mask_token_id] = -torch.inf
            draft[row, offset] = self.guess(logits, row, index)
            self.num_steps += 1
        self._set_draft(draft, num_drafted, torch.ones_like(known))
        if len(row) > 0 and self.trace is not None:
            nothing = row[:0]
            self._record(self.num_read, end, nothing, nothing, Prediction(*[nothing] * 3), nothing.bool())
            self._record_draft()
        if len(row) > 0 and self.use_cache:  # the prompt, and blocks that were read decoded
            self.num_read = starts + known // block_size * block_size
        super().step()

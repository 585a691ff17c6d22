"""Verified decoding: masks behind the text are decoded at once as a draft, which the same weights then verify.

A forward reads the text and a draft under a causal mask, so it gives what the autoregressive model itself chooses
behind each of these tokens. The draft is kept as far as it is what the model chooses; behind it comes one token more,
the model's own choice. So what comes out is the answer of autoregressive decoding, whatever was drafted. Sampling is
exact in the same way: a token is drawn behind each one of the draft, and the first that differs takes its place. So a
drafted token d is kept with its probability p(d), and otherwise one is drawn from p without d. That is speculative
sampling (arXiv 2211.17192) for a draft without a distribution of its own.

Masks stand behind the text, or behind the draft that is being verified. They see all of what is before them and each
other, and the logits of each mask draft the token behind it. The token right behind the text needs no draft: the last
token of the text predicts it.
"""

# B rows of the response, A live rows, K draft length, R' tokens from the first response token on, M tokens that have
# logits, V vocabulary

import copy

import torch

from .decoding_rules import first_index
from .logits_process_d2f import is_known
from .pipelined_decoding import PipelinedDecoder
from .sampler import Prediction


class VerifiedDecoder(PipelinedDecoder):
    """Decodes the rows of a [`Response`] with the arguments of [`PipelinedDecoder`]; each row has its own phase.

    A row without a draft reads `draft_length` masks behind its text. A row with one reads that draft, which verifies
    it; with `draft_layout="rolling"` it reads masks behind it too. With several `num_draft_steps` the surest tokens of
    a draft are read among the masks of the others, before the whole is verified.

    Attributes:
        num_positions (`torch.LongTensor` of shape `(B,)`): Tokens and masks that the forwards of each row have read.
        accepted_lengths (`list[list[int]]`): By row, how many tokens of each of its drafts were accepted.
    """

    is_causal = True

    def __init__(self, *args, **kwargs):
        # Of the live rows: their drafts `(A, K)`, with masks where nothing is drafted; the lengths of these, and the
        # forwards that they took so far, `(A,)` each.
        self.draft = torch.zeros(0, 0, dtype=torch.long, device="cpu")
        self.num_drafted = self.num_steps_of_draft = torch.zeros(0, dtype=torch.long, device="cpu")
        super().__init__(*args, **kwargs)
        config, response = self.generation_config, self.response
        self.draft_length: int = min(config.draft_length, response.max_new_tokens)
        self.draft = self.draft.new_zeros(0, self.draft_length)
        self.offset = torch.arange(self.draft_length + 1, device="cpu")  # from the first token behind the text
        self.is_rolling = config.draft_layout == "rolling"
        self.num_draft_steps: int = config.num_draft_steps
        # A processor that may keep a state sees all rows that were asked for together in each call, one token longer
        # each time. So these rows have to stay of equal length.
        self.may_draft = len(response.groups[0].rows) == 1 or all(map(is_known, self.sampler.logits_processor))
        self.num_positions = torch.zeros_like(response.prompt_lengths)
        self.accepted_lengths: list[list[int]] = [[] for _ in response.prompt_lengths]

    def add_rows(self, rows: torch.LongTensor) -> None:
        super().add_rows(rows)
        self.num_positions[rows] = 0
        for row in rows.tolist():
            self.accepted_lengths[row] = []

    def _keep_rows(self, kept: torch.LongTensor, new: torch.LongTensor, num_copies: torch.LongTensor) -> None:
        super()._keep_rows(kept, new, num_copies)
        no_drafts = self.draft.new_full((len(new), self.draft.shape[1]), self.response.mask_token_id)
        self.draft = torch.cat([self.draft.index_select(0, kept), no_drafts])
        zeros = torch.zeros_like(new)
        self.num_drafted, self.num_steps_of_draft = (
            torch.cat([values.index_select(0, kept), zeros]) for values in (self.num_drafted, self.num_steps_of_draft)
        )

    def recover(self) -> None:
        """As for all loops. Drafts are made anew."""
        super().recover()
        self.draft = self.draft.new_full(self.draft.shape, self.response.mask_token_id)
        self.num_drafted = self.num_steps_of_draft = torch.zeros_like(self.live)

    def step(self) -> None:
        """One forward for all live rows, and what follows from it.

        1. What each row reads: its text, the draft that is to be verified, and masks behind that.
        2. Forward. Keys and values of the text are in the cache then, and those of the draft as far as it is kept.
           What is not kept is overwritten.
        3. The model's own choices, behind the text and behind each token of the draft. Those that are tokens of the
           draft are accepted, and the first one that is not.
        4. What the masks gave becomes the next draft, if all before them was kept.
        5. Rows that are finished leave.
        """
        response = self.response

        # 1. Of the response `known` tokens are text, and `causal_end` are read under a causal mask.
        known, limits = self.first_masked, self.grid.limits  # [A]
        is_verifying = (self.num_drafted > 0) & (self.num_steps_of_draft >= self.num_draft_steps)
        causal_end = known + self.num_drafted.where(is_verifying, 0)
        # The last token of a response is always the model's own choice, so none is drafted for it.
        num_masks = (limits - 2 - causal_end).clamp(min=0, max=self.draft_length if self.may_draft else 0)
        if not self.is_rolling:
            num_masks = num_masks.masked_fill(is_verifying, 0)
        start, text_end = self.num_committed, self.grid.starts + causal_end
        end = text_end + num_masks
        last = causal_end + num_masks  # the last token that something is predicted for
        position = torch.arange(int(last.max()) + 1, device="cpu")
        has_logits = (position >= known[:, None]) & (position <= last[:, None])
        row, index = has_logits.nonzero(as_tuple=True)

        # 2. Forward.
        text = self._with_drafts(known)
        logits = self.feed(
            text, self.live, self.grid.starts, start, end, row, index - 1, text_end if num_masks.any() else None
        )
        self.num_steps += 1
        if self.has_copies:
            source, logits, row, index = self._split_shared_rows(row, index, logits)
            known, is_verifying, causal_end, num_masks, start, end = (
                values[source] for values in (known, is_verifying, causal_end, num_masks, start, end)
            )
        self.num_positions[self.live] += end - start

        # 3. Verify and accept.
        is_own = index <= causal_end.index_select(0, row)
        own = is_own.nonzero().squeeze(1)
        own_logits, own_row, own_index = logits[own.to(logits.device)], row[own], index[own]
        response_row, offset = self.live.index_select(0, own_row), own_index - known.index_select(0, own_row)
        prediction = self._choose(own_logits, own_row, own_index, known, causal_end)
        tokens = self.draft.new_full((len(self.live), self.draft_length + 1), response.mask_token_id)
        tokens[own_row, offset] = prediction.tokens
        is_kept = (tokens[:, :-1] == self.draft) & (self.offset[:-1] < (causal_end - known)[:, None])
        num_kept = first_index(~is_kept)  # [A]
        first_eos = first_index(response.is_eos(tokens, self.live))  # nothing is behind it
        num_accepted = torch.minimum(num_kept, first_eos) + 1
        accepted = offset < num_accepted.index_select(0, own_row)
        if self.trace is not None:
            self._record(start, end, own_row, own_index, prediction, accepted)
        response.accept(
            accepted, response_row, own_index, prediction.tokens, scores=prediction.scores, logits=own_logits
        )
        if self.use_cache:
            self.num_committed = self.grid.starts + known + num_kept
        for a in is_verifying.nonzero().flatten().tolist():
            self.accepted_lengths[int(self.live[a])].append(min(int(num_kept[a]), int(num_accepted[a])))

        # 4. Draft.
        num_drafted = num_masks.masked_fill(known + num_kept < causal_end, 0)
        self._draft(logits, row, index, causal_end + 1, num_drafted, ~is_verifying)
        if response.has_listeners:
            response.publish(torch.zeros_like(self.live), rows=self.live, forwards=self.last_forwards())

        # 5. Who is left.
        self.num_opened = known + num_accepted
        self._refresh()
        self._drop_finished_rows()

    def _with_drafts(self, known: torch.LongTensor) -> torch.LongTensor:
        """A copy of the response's tokens in which the live rows have their drafts behind the `known` `(A,)`."""
        sequences = self.response.sequences.clone()
        row, offset = (self.offset[:-1] < self.num_drafted[:, None]).nonzero(as_tuple=True)
        sequences[self.live[row], (self.grid.starts + known)[row] + offset] = self.draft[row, offset]
        return sequences

    def _choose(
        self,
        logits: torch.Tensor,
        row: torch.LongTensor,
        index: torch.LongTensor,
        known: torch.LongTensor,
        causal_end: torch.LongTensor,
    ) -> Prediction:
        """What the model chooses by `logits` `(M, V)`. The draft before a token is text for logits processors."""
        view = copy.copy(self.response)
        view.sequences = self._with_drafts(known)
        response_row = self.live.index_select(0, row)
        if not self.sampler.left_to_right:
            return self.sampler(logits, response_row, index, view)
        # A processor may keep a state: it is asked once about each token that comes out, in their order.
        tokens, scores = torch.zeros_like(row), None
        probability = torch.zeros(len(row), device="cpu")
        following, is_open = known.clone(), torch.ones_like(known, dtype=torch.bool)  # [A]
        while is_open.any():
            now = following[is_open].min()
            is_asked = (index == now) & (is_open & (following == now)).index_select(0, row)
            asked = is_asked.nonzero().squeeze(1)
            part = self.sampler(logits[asked.to(logits.device)], response_row[asked], index[asked], view)
            tokens[asked], probability[asked] = part.tokens, part.probability
            if part.scores is not None:
                scores = part.scores.new_zeros(logits.shape) if scores is None else scores
                scores[asked.to(logits.device)] = part.scores
            rows = row[asked]
            goes_on = now < causal_end[rows]
            offset = (now - known[rows]).clamp(max=self.draft_length - 1)
            goes_on &= part.tokens == self.draft[rows, offset]
            goes_on &= ~self.response.is_eos(part.tokens[:, None], self.live[rows])[:, 0]
            following[rows], is_open[rows] = now + 1, goes_on
        return Prediction(tokens, probability, probability, scores)

    def _draft(
        self,
        logits: torch.Tensor,
        row: torch.LongTensor,
        index: torch.LongTensor,
        start: torch.LongTensor,
        num_drafted: torch.LongTensor,
        was_drafting: torch.BoolTensor,
    ) -> None:
        """Makes drafts of `num_drafted` tokens from `start` on, `(A,)` each, of those of the `logits` `(M, V)`.

        Drafts are only guesses, so they are chosen without logits processors. Rows that `was_drafting` `(A,)` had
        their last draft read among masks: its tokens stay, one position nearer to the text.
        """
        num_steps, mask_token_id = self.num_draft_steps, self.response.mask_token_id
        draft = self.draft.new_full(self.draft.shape, mask_token_id)
        offset = index - start.index_select(0, row)
        own = ((offset >= 0) & (num_drafted > 0).index_select(0, row)).nonzero().squeeze(1)
        if len(own) > 0:
            row, offset, index, logits = row[own], offset[own], index[own], logits[own.to(logits.device)]
            logits[:, mask_token_id] = -torch.inf
            draft[row, offset] = self.guess(logits, row, index)
        taken = self.num_steps_of_draft.where(was_drafting, 0) + 1  # [A]
        if num_steps > 1 and len(own) > 0:
            confidence = torch.full(draft.shape, -1.0, device="cpu")
            confidence[row, offset] = logits.float().softmax(-1).amax(-1).cpu()
            before = self.draft.roll(-1, 1)
            before[:, -1] = mask_token_id
            stays = (before != mask_token_id) & (taken > 1)[:, None] & (self.offset[:-1] < num_drafted[:, None])
            draft, confidence = before.where(stays, draft), confidence.masked_fill(stays, 2.0)
            num_read = (num_drafted * taken + num_steps - 1) // num_steps
            rank = confidence.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
            draft = draft.where(rank < num_read[:, None], mask_token_id)
        self._set_draft(draft, num_drafted, taken)
        if self.trace is not None:
            self._record_draft()

    def _set_draft(self, draft: torch.LongTensor, num_drafted: torch.LongTensor, taken: torch.LongTensor) -> None:
        """Goes on with a `draft` `(A, K)` of `num_drafted` `(A,)` tokens that has `taken` `(A,)` forwards."""
        first_eos = first_index(self.response.is_eos(draft, self.live))  # nothing is drafted behind it
        is_whole = taken >= self.num_draft_steps
        num_drafted = torch.minimum(num_drafted, (first_eos + 1).where(is_whole, self.draft_length))
        self.draft = draft.where(self.offset[:-1] < num_drafted[:, None], self.response.mask_token_id)
        self.num_drafted, self.num_steps_of_draft = num_drafted, taken.where(num_drafted > 0, 0)

    def guess(self, logits: torch.Tensor, row: torch.LongTensor, index: torch.LongTensor) -> torch.LongTensor:
        """A draft of the response tokens `index` of the live rows `row`, by `logits` `(M, V)`: `(M,)` each."""
        return logits.argmax(-1).cpu()

    def _record_draft(self) -> None:
        """Appends to the trace what is drafted behind the text of each live row."""
        for a, b in enumerate(self.live.tolist()):
            drafted = [(k, token) for k, token in enumerate(self.draft[a].tolist())]
            text_end = int(self.grid.starts[a]) + sum(len(step["accepted"]) for step in self.trace[b])
            self.trace[b][-1]["drafted"] = [
                (text_end + k, token) for k, token in drafted if token != self.response.mask_token_id
            ]

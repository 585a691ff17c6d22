"""The state of decoding: the tokens of a batch, of which some are still masked.

It lives in the host's memory. The host has to see what was accepted anyway, to compose the next window, and there each
rule costs microseconds, not a kernel launch: a step of decoding waits for the accelerator once.
"""

# B rows, R response tokens (the limit), P prompt tokens, A rows that are looked at, M tokens, V vocabulary, E most EOS
# tokens of a row, G rows of a group, t response tokens of a text

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional as F
from transformers.generation import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer

from .decoding_rules import first_index
from .generation_config_d2f import D2FGenerationConfig
from .generation_output import D2FGenerationOutput

NO_TOKEN = -1  # behind the limit of a row
NO_EOS = -2  # fills up a short list of EOS tokens; equal to no token

# Their answer depends on the text alone, so without a new token they need not be asked again. A subclass may differ.
_OF_THE_TEXT = (EosTokenCriteria, MaxLengthCriteria, StopStringCriteria)


class RowGroup(NamedTuple):
    """Rows of a [`Response`] that were asked for together, and who listens to them.

    Criteria and logits processors of the caller see the rows of a group, and only these, in one tensor.

    Args:
        rows (`list[int]`): G rows of the response.
        input_ids (`torch.LongTensor` of shape `(G, P)`): Their prompts as they were given, with padding.
        stopping_criteria (`StoppingCriteriaList`): Asked about each decoded token once all before it are decoded.
        streamer (`BaseStreamer`, *optional*): Gets the same tokens, and drafts of what follows if it takes them. For a
            group of one row.
        pad_token_id (`int`): Stands behind the tokens of a row that has fewer than the text.
    """

    rows: list[int]
    input_ids: torch.LongTensor
    stopping_criteria: StoppingCriteriaList
    streamer: BaseStreamer | None
    pad_token_id: int


class Response:
    """The tokens of a batch while it is decoded, and what has been said about them to streamers and stopping criteria.

    Args:
        prompts (`torch.LongTensor` of shape `(B, P)`): Prompts from position 0; behind a shorter one anything.
        prompt_lengths (`torch.LongTensor` of shape `(B,)`): Their lengths.
        max_new_tokens (`int`): R, response tokens at the most.
        min_new_tokens (`int`): Response tokens before the first EOS at the least.
        mask_token_id (`int`): Stands for a token that is not decoded.
        eos_token_ids (`torch.LongTensor`, *optional*): Tokens that end a response.
        stopping_criteria (`StoppingCriteriaList`): Asked about each decoded token once all before it are decoded.
        streamer (`BaseStreamer`, *optional*): Gets the same tokens, and drafts of what follows if it takes them.
        keep (`tuple[str]`): `"scores"` and `"logits"`: which of them to keep for each token.
        input_ids (`torch.LongTensor` of shape `(B, P)`, *optional*): The prompts as they were given, with padding
            anywhere, for criteria and logits processors. `prompts` by default.
        pad_token_id (`int`, *optional*): Fills up rows that criteria and logits processors see. By default the first
            EOS token, or 0.
        num_further_tokens (`int`): Masked tokens behind the limit of each row, for its last block. Nobody is told of
            them.

    Attributes:
        source_rows (`torch.LongTensor` of shape `(B,)`): Which row each row is; in a copy of `of_rows`, was.
        groups (`list[RowGroup]`): That of each row. The rows of the constructor are one group.
        has_listeners (`bool`): Whether anybody wants to know what is new before all is decoded.
        has_stopped (`torch.BoolTensor` of shape `(B,)`): Rows that were ended before their EOS or limit.
        stopped_at (`torch.LongTensor` of shape `(B,)`): Their lengths; the limit of all others.
    """

    def __init__(
        self,
        prompts: torch.LongTensor,
        prompt_lengths: torch.LongTensor,
        max_new_tokens: int,
        min_new_tokens: int,
        mask_token_id: int,
        eos_token_ids: torch.LongTensor | None,
        stopping_criteria: StoppingCriteriaList,
        streamer: BaseStreamer | None,
        keep: tuple[str, ...] = (),
        input_ids: torch.LongTensor | None = None,
        pad_token_id: int | None = None,
        num_further_tokens: int = 0,
    ):
        self.device = prompts.device  # of the model's input, and of what streamers, criteria and callers get
        prompts, prompt_lengths = prompts.cpu(), prompt_lengths.cpu()
        num_rows = len(prompt_lengths)
        self.prompt_lengths = prompt_lengths
        self.max_new_tokens = max_new_tokens
        self.mask_token_id = mask_token_id
        self.limits = torch.full_like(prompt_lengths, max_new_tokens)  # of each row, R or less
        self.num_further_tokens = num_further_tokens
        num_slots = max_new_tokens + num_further_tokens
        self.sequences = F.pad(prompts, (0, num_slots), value=mask_token_id)
        response_slots = prompt_lengths[:, None] + torch.arange(num_slots, device="cpu")
        self.sequences.scatter_(1, response_slots, mask_token_id)
        self.stopped_at = self.limits.clone()
        self.has_stopped = torch.zeros(num_rows, dtype=torch.bool, device="cpu")
        self.was_remasked = torch.zeros(num_rows, num_slots, dtype=torch.bool, device="cpu")
        self.kept: dict[str, torch.FloatTensor | None] = dict.fromkeys(keep)  # [B, R, V] each, once there is one
        self.published = [0] * num_rows  # tokens that criteria and streamer know
        # What each row may have of its own, with the defaults.
        self._default_minimum = min_new_tokens
        self._default_ends: list[int] = [] if eos_token_ids is None else eos_token_ids.flatten().tolist()
        self.min_new_tokens = torch.full_like(prompt_lengths, min_new_tokens)
        self._ends = [self._default_ends] * num_rows
        if pad_token_id is None:
            pad_token_id = self._default_ends[0] if self._default_ends else 0
        given = prompts if input_ids is None else input_ids.cpu()
        self._default_group = RowGroup(list(range(num_rows)), given, stopping_criteria, streamer, pad_token_id)
        self.groups = [self._default_group] * num_rows
        self.source_rows = torch.arange(num_rows, device="cpu")
        self._see_options()

    def _see_options(self) -> None:
        """What follows from the options of the rows; it saves work in each step where nobody has asked for any."""
        num_ends = max(map(len, self._ends))
        ends = [own + [NO_EOS] * (num_ends - len(own)) for own in self._ends]
        self.eos_token_ids = torch.tensor(ends, dtype=torch.long, device="cpu")  # [B, E]
        self._ends_of_all = self._ends[0] if all(own == self._ends[0] for own in self._ends) else None
        self.has_minimum = num_ends > 0 and int(self.min_new_tokens.max()) > 0
        self.has_listeners = any(len(g.stopping_criteria) > 0 or g.streamer is not None for g in self.groups)

    def replace_rows(
        self,
        rows: torch.LongTensor,
        prompts: Sequence[torch.LongTensor],
        limits: torch.LongTensor,
        min_new_tokens: Sequence[int | None] | None = None,
        eos_token_ids: Sequence[list[int] | None] | None = None,
        stopping_criteria: Sequence[StoppingCriteriaList | None] | None = None,
        streamers: Sequence[BaseStreamer | None] | None = None,
    ) -> None:
        """Puts new prompts in the place of ended `rows`. Each is a group of its own.

        Args:
            rows (`torch.LongTensor` of shape `(A,)`): The rows.
            prompts (`Sequence[torch.LongTensor]`): Their prompts, `(L,)` each and at most P long.
            limits (`torch.LongTensor` of shape `(A,)`): Response tokens of each at the most.
            min_new_tokens, eos_token_ids, stopping_criteria, streamers (`Sequence`, *optional*): One for each row. A
                row without one has what the constructor was given. An empty list of EOS tokens, or of criteria, means
                none.
        """
        default, nothing = self._default_group, [None] * len(rows)
        options = (min_new_tokens, eos_token_ids, stopping_criteria, streamers)
        options = zip(*(nothing if values is None else values for values in options), strict=True)
        for row, prompt, limit, (minimum, ends, criteria, streamer) in zip(
            rows.tolist(), prompts, limits.tolist(), options, strict=True
        ):
            prompt = prompt.cpu()
            self.sequences[row] = NO_TOKEN
            self.sequences[row, : len(prompt)] = prompt
            self.sequences[row, len(prompt) :][: limit + self.num_further_tokens] = self.mask_token_id
            self.prompt_lengths[row] = len(prompt)
            self.limits[row] = self.stopped_at[row] = limit
            self.has_stopped[row] = False
            self.published[row] = 0
            self.was_remasked[row] = False
            self.min_new_tokens[row] = self._default_minimum if minimum is None else minimum
            self._ends[row] = self._default_ends if ends is None else list(ends)
            self.groups[row] = RowGroup(
                rows=[row],
                input_ids=prompt[None],
                stopping_criteria=default.stopping_criteria if criteria is None else criteria,
                streamer=default.streamer if streamer is None else streamer,
                pad_token_id=default.pad_token_id,
            )
        self._see_options()

    def of_rows(self, rows: torch.LongTensor) -> "Response":
        """A copy to be read whose row a has the tokens and options of row `rows[a]`. Groups and listeners are not."""
        own = copy.copy(self)
        for name in ("sequences", "prompt_lengths", "limits", "min_new_tokens", "eos_token_ids"):
            setattr(own, name, getattr(self, name)[rows])
        own.source_rows = self.source_rows[rows]
        return own

    def group(self, row: int) -> RowGroup:
        """The group of a row, in a copy of `of_rows` too."""
        return self.groups[int(self.source_rows[row])]

    def tokens(self, rows: torch.LongTensor | None = None, length: int | None = None) -> torch.LongTensor:
        """The first `length` response tokens of `rows` (all), `(A, length)`."""
        sequences, prompt_lengths = self.sequences, self.prompt_lengths
        if rows is not None:
            sequences, prompt_lengths = sequences[rows], prompt_lengths[rows]
        length = self.max_new_tokens if length is None else length
        return sequences.gather(1, prompt_lengths[:, None] + torch.arange(length, device="cpu"))

    def is_masked(self) -> torch.BoolTensor:
        """Which response tokens, `(B, R)`, are not decoded."""
        return self.tokens() == self.mask_token_id

    def is_eos(self, tokens: torch.LongTensor, rows: torch.LongTensor | None = None) -> torch.BoolTensor:
        """Which of `tokens` `(A, L)`, whose rows are `rows` (all), are EOS."""
        ends = self._ends_of_all
        if ends is None:
            ends = self.eos_token_ids if rows is None else self.eos_token_ids[rows]  # [A, E]
            return (tokens[..., None] == ends[:, None]).any(-1)
        if len(ends) == 1:
            return tokens == ends[0]
        is_eos = torch.zeros_like(tokens, dtype=torch.bool)
        for token_id in ends:
            is_eos |= tokens == token_id
        return is_eos

    def first_eos(self) -> torch.LongTensor:
        """Index of the first decoded EOS of each row, `(B,)`, its limit where there is none."""
        return torch.minimum(first_index(self.is_eos(self.tokens())), self.limits)

    def early_eos(self, row: torch.LongTensor, index: torch.LongTensor, nothing: int) -> torch.LongTensor:
        """EOS tokens that come too early at positions `index` of `row`, `(M, E)`; filled up with `nothing`."""
        ends = self.eos_token_ids[row]
        is_early = (index < self.min_new_tokens[row])[:, None] & (ends != NO_EOS)
        return ends.masked_fill(~is_early, nothing)

    def prefix_length(self) -> torch.LongTensor:
        """How many response tokens of each row, `(B,)`, are decoded without a gap, up to and including an EOS."""
        end = torch.minimum(self.first_eos() + 1, self.limits)
        return torch.minimum(first_index(self.is_masked()), end)

    def lengths(self) -> torch.LongTensor:
        """The lengths of ended responses, `(B,)`: up to and including their EOS, or where they were stopped."""
        return torch.minimum(self.first_eos() + 1, self.stopped_at)

    def text(self, group: RowGroup, length: int, known: torch.LongTensor | None = None) -> torch.LongTensor:
        """What transformers would have of `group` when it has `length` response tokens, `(G, P + length)`.

        Prompts are as they were given. A row that has fewer tokens is filled up with the padding token. `known` `(B,)`
        says how many tokens of each row count; by default those that are decoded without a gap.
        """
        if known is None:
            known = torch.minimum(self.prefix_length(), self.stopped_at)
        rows = torch.tensor(group.rows, device="cpu")
        is_missing = torch.arange(length, device="cpu") >= known[rows][:, None]
        tokens = self.tokens(rows, length).masked_fill(is_missing, group.pad_token_id)
        return torch.cat([group.input_ids, tokens], dim=1).to(self.device)

    def accept(
        self,
        accepted: torch.BoolTensor,
        row: torch.LongTensor,
        index: torch.LongTensor,
        tokens: torch.LongTensor,
        **values: torch.Tensor | None,
    ) -> None:
        """Puts the `accepted` of `tokens`, `(M,)` each, at positions `index` of the responses of `row`.

        Their `scores` and `logits`, `values` of shape `(M, V)`, are kept as far as they are asked for.
        """
        chosen = accepted.nonzero().squeeze(1)
        row, index, tokens = (values.index_select(0, chosen) for values in (row, index, tokens))
        self.sequences[row, self.prompt_lengths.index_select(0, row) + index] = tokens
        if self.kept and self.num_further_tokens:
            is_told = index < self.max_new_tokens
            chosen, row, index = chosen[is_told], row[is_told], index[is_told]
        for name in self.kept:
            own = values[name][chosen.to(self.device)].float()
            if self.kept[name] is None:
                self.kept[name] = own.new_zeros(len(self.sequences), self.max_new_tokens, own.shape[-1])
            self.kept[name][row.to(self.device), index.to(self.device)] = own

    def remask(self, row: torch.LongTensor, index: torch.LongTensor) -> None:
        """Takes the tokens at positions `index` of the responses of `row` back, `(M,)` each."""
        self.sequences[row, self.prompt_lengths[row] + index] = self.mask_token_id
        self.was_remasked[row, index] = True

    def stop(self, row: int, length: int) -> None:
        """Ends a row behind its first `length` tokens."""
        self.stopped_at[row] = length
        self.has_stopped[row] = True

    def publish(
        self,
        shown: torch.LongTensor,
        block_size: int = 1,
        rows: torch.LongTensor | None = None,
        offsets: torch.LongTensor | int = 0,
        forwards: dict[int, dict] | None = None,
    ) -> None:
        """Tells stopping criteria and streamers of `rows` (all) what is new; drafts reach to `shown` tokens or an EOS.

        Where a token can be taken back as long as its block of `block_size` is not decoded, whole blocks are told.
        Criteria are asked about each row that has not been stopped, with or without a new token.

        Args:
            shown (`torch.LongTensor` of shape `(A,)`): Response tokens of each row that a draft may show.
            block_size (`int`): 1 where tokens stay.
            rows (`torch.LongTensor` of shape `(A,)`, *optional*): The rows that are being decoded.
            offsets (`torch.LongTensor` of shape `(B,)`, or `int`): Prompt tokens in the first block of each row.
            forwards (`dict[int, dict]`, *optional*): By row, what a streamer that has `put_trace` gets.
        """
        if not self.has_listeners:
            return
        rows = torch.arange(len(self.sequences), device="cpu") if rows is None else rows
        first_eos, known = self.first_eos(), self.prefix_length()
        if block_size > 1:
            is_whole = known == torch.minimum(first_eos + 1, self.limits)
            known = (known - ((known + offsets) % block_size).masked_fill(is_whole, 0)).clamp(min=0)
        known = torch.minimum(known, self.stopped_at)
        shown = torch.minimum(shown, first_eos[rows] + 1)
        asked: dict[int, list[int]] = {}  # rows of each group
        for row, has_stopped in zip(rows.tolist(), self.has_stopped[rows].tolist(), strict=True):
            if not has_stopped and len(self.groups[row].stopping_criteria) > 0:
                asked.setdefault(id(self.groups[row]), []).append(row)
        for own in asked.values():
            self._ask(self.groups[own[0]], own, known)
        for row, end in zip(rows.tolist(), shown.tolist(), strict=True):
            streamer, before, decoded = self.groups[row].streamer, self.published[row], int(known[row])
            self.published[row] = decoded
            if streamer is None:
                continue
            tokens = self.tokens(torch.tensor([row], device="cpu"))[0]
            if decoded > before:
                streamer.put(tokens[before:decoded].clone())
            if decoded < end and not self.has_stopped[row] and hasattr(streamer, "put_draft"):
                streamer.put_draft(tokens[decoded:end].clone())
            if forwards is not None and hasattr(streamer, "put_trace"):
                streamer.put_trace(forwards[row])

    def _ask(self, group: RowGroup, rows: list[int], known: torch.LongTensor) -> None:
        """Asks the criteria of `group` about `rows` of it, whose first `known` tokens `(B,)` are decoded for good.

        Rows that reach the same number of tokens are asked about together, in one text. Where a criterion says stop,
        `known` is what the row had then.
        """
        asked: dict[int, list[int]] = {}  # rows by number of tokens
        for row in rows:
            before, decoded = self.published[row], int(known[row])
            for length in range(before + 1, decoded + 1) if decoded > before else [decoded]:
                asked.setdefault(length, []).append(row)
        text = self.text(group, max(*asked, 1), known)
        width = group.input_ids.shape[1]
        slots = {row: slot for slot, row in enumerate(group.rows)}
        for length, rows_at_length in sorted(asked.items()):
            rows_at_length = [row for row in rows_at_length if not self.has_stopped[row]]
            if not rows_at_length:
                continue
            criteria = group.stopping_criteria
            if all(length == self.published[row] for row in rows_at_length):  # no new token, but time may be up
                criteria = [criterion for criterion in criteria if type(criterion) not in _OF_THE_TEXT]
            slots_at_length = [slots[row] for row in rows_at_length]
            if length == 0:
                says_stop = self._says_stop_without_a_token(group, text[:, : width + 1], slots_at_length, criteria)
            else:
                says_stop = self._says_stop(group, text[:, : width + length], length, criteria)
            for row, slot in zip(rows_at_length, slots_at_length, strict=True):
                if says_stop[slot]:
                    self.stop(row, length)
                    known[row] = length
                    text[slot, width + length :] = group.pad_token_id

    def _says_stop(
        self, group: RowGroup, text: torch.LongTensor, length: int, criteria: Sequence[StoppingCriteria]
    ) -> list[bool]:
        """Whether one of `criteria` says stop to each row of `text` `(G, P + length)`."""
        answers = [self._answer(criterion, group, text, length) for criterion in criteria]
        return [any(of_row) for of_row in zip(*answers, strict=True)] if answers else [False] * len(text)

    def _says_stop_without_a_token(
        self, group: RowGroup, text: torch.LongTensor, slots: list[int], criteria: Sequence[StoppingCriteria]
    ) -> list[bool]:
        """Whether one of `criteria` ends rows that have no token; those at `slots` of `text` `(G, P + 1)` are meant.

        A criterion is asked about the prompt with a mask token behind it, and about the bare prompt. One that goes by
        the text or its length cannot say stop to both, or it would have done so to the prompt.
        """
        text = text.clone()
        text[slots, -1] = self.mask_token_id
        says_stop = [False] * len(text)
        for criterion in criteria:
            answer = self._answer(criterion, group, text, 1)
            if any(answer[slot] for slot in slots):
                of_prompt = self._answer(criterion, group, text[:, :-1], 1)
                says_stop = [said or (a and b) for said, a, b in zip(says_stop, answer, of_prompt, strict=True)]
        return says_stop

    def _answer(self, criterion: StoppingCriteria, group: RowGroup, text: torch.LongTensor, length: int) -> list[bool]:
        """What `criterion` says of each row of `text` `(G, L)`; it may give one bool for all, or one for each."""
        answer = criterion(text.clone(), self._scores(group, length))
        if isinstance(answer, bool):
            return [answer] * len(text)
        try:
            says_stop = torch.as_tensor(answer, device="cpu").bool().flatten().tolist()
        except (TypeError, ValueError, RuntimeError):
            says_stop = []
        if len(says_stop) not in (1, len(text)):
            raise ValueError(
                f"`stopping_criteria` must answer with a bool, or with one for each of the {len(text)} rows, but "
                f"{type(criterion).__name__} gave {answer!r}. Return a tensor of the shape (B,)."
            )
        return says_stop if len(says_stop) == len(text) else says_stop * len(text)

    def _scores(self, group: RowGroup, length: int) -> tuple[torch.FloatTensor, ...] | None:
        """The scores of the first `length` tokens as transformers has them, `(G, V)` each, if they are kept."""
        scores = self.kept.get("scores")
        if scores is None:
            return None
        return scores[torch.tensor(group.rows, device=scores.device), :length].unbind(1)

    def output(
        self,
        input_ids: torch.LongTensor,
        num_forward_passes: torch.LongTensor,
        trace: list | None,
        generation_config: D2FGenerationConfig,
    ) -> torch.LongTensor | D2FGenerationOutput:
        """Prompts as they were given, responses cut at their end and padded."""
        lengths = self.lengths()  # [B]
        is_response = torch.arange(self.max_new_tokens, device="cpu") < lengths[:, None]
        pad_token_id = generation_config._pad_token_tensor
        if pad_token_id is None:
            if (lengths != lengths[0]).any():
                raise ValueError("`pad_token_id` must be set when rows of a batch end at different lengths.")
            pad_token_id = 0
        responses = self.tokens().masked_fill(~is_response, int(pad_token_id))[:, : int(lengths.max())]
        sequences = torch.cat([input_ids, responses.to(self.device)], dim=1)
        if not generation_config.return_dict_in_generate:
            return sequences
        return D2FGenerationOutput(
            sequences=sequences,
            num_forward_passes=num_forward_passes.clone().to(self.device),
            tokens_per_forward=(lengths / num_forward_passes).to(self.device),
            trace=trace,
            **{name: self._per_token(values, is_response) for name, values in self.kept.items()},
        )

    def _per_token(
        self, values: torch.FloatTensor | None, is_response: torch.BoolTensor
    ) -> tuple[torch.FloatTensor, ...]:
        """`values` `(B, R, V)` as transformers has them: one tensor `(B, V)` per token, 0 behind the end of a row."""
        if values is None:
            return ()
        length = int(is_response.sum(-1).max())
        return tuple(values.where(is_response.to(self.device)[..., None], 0.0)[:, :length].unbind(1))

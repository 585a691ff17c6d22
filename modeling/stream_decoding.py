"""Requests that are answered as they come, by pipelined decoding: a finished one makes room for the next.

[`StreamDecoder`] has `add`, `step` and `abort`. A server calls `step` in a loop; `stream_responses` is such a loop.
"""

# R response tokens at most, L prompt tokens, T tokens of a response, D tokens of a draft, M masked tokens of all rows

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation import MaxTimeCriteria, StoppingCriteria, StoppingCriteriaList

from .decoding_rules import first_index
from .pipelined_decoding import PipelinedDecoder
from .response import Response
from .sampler import Prediction
from .stream_requests import PreparedRequest, prompt_and_options


@dataclass
class StreamUpdate:
    """What is new about a response.

    Args:
        request (`int`): The number that `add` gave.
        sequence_index (`int`): Which of its `num_return_sequences` responses.
        tokens (`torch.LongTensor` of shape `(T,)`): Further final tokens, behind those of the updates before.
        draft (`torch.LongTensor` of shape `(D,)`): What follows them so far. It may change, and has mask tokens where
            nothing is decoded. Empty once the response is finished.
        is_finished (`bool`): This is the last update.
        finish_reason (`str`, *optional*): `"eos"`, `"length"` (the limit), `"stop"` (a stopping criterion) or
            `"error"`.
        num_forward_passes (`int`): Forwards so far.
        error (`Exception`, *optional*): What went wrong with this response alone.
    """

    request: int
    sequence_index: int
    tokens: torch.LongTensor
    draft: torch.LongTensor
    is_finished: bool = False
    finish_reason: str | None = None
    num_forward_passes: int = 0
    error: Exception | None = None


@dataclass
class _Sequence:
    """What a row of the batch is decoding."""

    request: int
    sequence_index: int
    prepared: PreparedRequest
    criteria: "_GuardedCriteria"
    joined_at_step: int  # steps of the decoder before its first one
    num_told: int = 0  # tokens that updates have told
    draft: list[int] | None = None  # what the last update told of the others


class StreamSampler:
    """The samplers of a stream: each row has that of its request.

    Rows that share a sampler are sampled together. Where a sampler fails, only the rows fail that it fails for.

    Attributes:
        sequences (`dict[int, _Sequence]`): By row.
        errors (`dict[int, Exception]`): By row.
    """

    generator = None
    logits_processor = ()  # those of a stream keep no state for several rows

    def __init__(self):
        self.sequences: dict[int, _Sequence] = {}
        self.errors: dict[int, Exception] = {}

    @property
    def left_to_right(self) -> bool:
        """Whether any row decodes from left to right. Which ones is the row option `left_to_right`."""
        return any(sequence.prepared.sampler.left_to_right for sequence in self.sequences.values())

    def __call__(
        self, logits: torch.Tensor, row: torch.LongTensor, index: torch.LongTensor, response: Response
    ) -> Prediction:
        rows_of_sampler: dict[int, list[int]] = {}
        for b, sequence in self.sequences.items():
            rows_of_sampler.setdefault(id(sequence.prepared.sampler), []).append(b)
        if len(rows_of_sampler) == 1:
            return self._sample(logits, row, index, response)
        source = response.source_rows[row]
        parts = [torch.isin(source, row.new_tensor(rows)).nonzero().squeeze(1) for rows in rows_of_sampler.values()]
        return self._sample_parts(parts, logits, row, index, response)

    def _sample_parts(
        self,
        parts: list[torch.LongTensor],
        logits: torch.Tensor,
        row: torch.LongTensor,
        index: torch.LongTensor,
        response: Response,
    ) -> Prediction:
        """Samples each of `parts`, indices of tokens, by itself."""
        tokens = torch.zeros_like(row)
        probability = torch.zeros(len(row), dtype=torch.float, device="cpu")
        ranking = torch.zeros_like(probability)
        for part in parts:
            prediction = self._sample(logits[part.to(logits.device)], row[part], index[part], response)
            tokens[part], probability[part], ranking[part] = prediction[:3]
        return Prediction(tokens, probability, ranking)

    def _sample(
        self, logits: torch.Tensor, row: torch.LongTensor, index: torch.LongTensor, response: Response
    ) -> Prediction:
        """Samples tokens whose rows share a sampler."""
        zeros = torch.zeros(len(row), dtype=torch.float, device="cpu")
        nothing = Prediction(torch.zeros_like(row), zeros, zeros)
        if len(row) == 0:
            return nothing
        source = response.source_rows[row]
        prepared = self.sequences[int(source[0])].prepared
        try:
            if not prepared.has_guests:
                return prepared.sampler(logits, row, index, response)
            with _for_guests():
                return prepared.sampler(logits.clone(), row, index, response)
        except Exception as error:
            rows = source.unique().tolist()
            if len(rows) > 1:  # whose fault is it?
                parts = [(source == b).nonzero().squeeze(1) for b in rows]
                return self._sample_parts(parts, logits, row, index, response)
            self.errors[rows[0]] = error
            return nothing


class _GuardedCriteria(StoppingCriteria):
    """The stopping criteria of one response. An error of theirs ends that response, and is kept."""

    def __init__(self, criteria: StoppingCriteriaList):
        self.criteria = criteria
        self.error: Exception | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs) -> torch.BoolTensor:
        says_stop = False
        try:
            with _for_guests():
                for criterion in self.criteria:
                    says_stop |= bool(
                        torch.as_tensor(criterion(input_ids.clone(), scores, **kwargs), device="cpu").any()
                    )
        except Exception as error:
            self.error, says_stop = error, True
        return torch.tensor([says_stop], device="cpu")


@contextlib.contextmanager
def _for_guests() -> Iterator[None]:
    """Tensors that are made in it may outlive decoding, unlike those of `torch.inference_mode`."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class StreamDecoder:
    """Answers requests as they come, all of them in one batch. Made by `model.open_stream`.

    ```python
    stream = model.open_stream(max_batch_size=8, max_prompt_length=512, max_new_tokens=256)
    request = stream.add(input_ids, do_sample=True, temperature=0.7, seed=0)
    while stream.has_unfinished:
        for update in stream.step():
            print(update.request, update.tokens, update.is_finished)
    ```

    A request gets the response that `generate` with the same options gives to it alone, up to rounding. A request that
    fails does not touch the others. All methods must be called by one thread at a time.

    Args:
        prepare (`Callable`): From a prompt `(L,)` and the options of a request to a [`PreparedRequest`].
        make_decoder (`Callable`): From a [`StreamSampler`] to a [`PipelinedDecoder`] without rows that are live.
        gradient_mode (`Callable`): Makes the context of decoding.
    """

    def __init__(
        self,
        prepare: Callable[[torch.LongTensor, dict[str, Any]], PreparedRequest],
        make_decoder: Callable[[StreamSampler], PipelinedDecoder],
        gradient_mode: Callable[[], contextlib.AbstractContextManager],
    ):
        self.prepare = prepare
        self._gradient_mode = gradient_mode
        self._sampler = StreamSampler()
        with gradient_mode():
            self._decoder = make_decoder(self._sampler)
        self._running = self._sampler.sequences  # by row
        self._waiting: deque[tuple[int, PreparedRequest]] = deque()
        self._numbers = itertools.count()

    @property
    def max_batch_size(self) -> int:
        """Rows of the batch."""
        return len(self._decoder.response.sequences)

    @property
    def num_free(self) -> int:
        """Rows that no request needs, running or waiting; 0 if more wait than there is room for."""
        num_waiting = sum(request.num_return_sequences for _, request in self._waiting)
        return max(0, self.max_batch_size - len(self._running) - num_waiting)

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do."""
        return len(self._running) > 0 or len(self._waiting) > 0

    def add(self, input_ids: torch.LongTensor, **options) -> int:
        """Adds a request. It waits until there is room in the batch.

        Args:
            input_ids (`torch.LongTensor` of shape `(L,)`): The prompt, without padding.
            options: As for `generate`, for this request alone: lengths, thresholds, `max_active_blocks`, sampling,
                `stop_strings` with a `tokenizer`, stopping criteria, logits processors, EOS tokens,
                `num_return_sequences`. `seed` (`int`) makes sampling repeatable. What concerns the whole batch, such
                as `block_size`, is an option of the stream.

        Returns:
            `int`: The number of the request, from 0.

        Raises:
            ValueError: for a prompt or an option that cannot be. The stream is as it was.
        """
        request = self.prepare(input_ids, options)
        if request.num_return_sequences > self.max_batch_size:
            raise ValueError(
                f"`num_return_sequences` must be at most the {self.max_batch_size} rows of the stream "
                f"(`max_batch_size`), got {request.num_return_sequences}. Open a larger stream."
            )
        number = next(self._numbers)
        self._waiting.append((number, request))
        return number

    def abort(self, request: int) -> bool:
        """Drops a request, waiting or running, with all its responses. No update about it follows.

        Returns:
            `bool`: Whether there was an unfinished request of this number.
        """
        num_waiting = len(self._waiting)
        self._waiting = deque(item for item in self._waiting if item[0] != request)
        rows = [row for row, sequence in self._running.items() if sequence.request == request]
        self._free(rows)
        return len(rows) > 0 or len(self._waiting) < num_waiting

    def step(self) -> list[StreamUpdate]:
        """Lets waiting requests in as far as there is room, and decodes one step of all.

        What it raises, such as an interrupt or an error of the model, loses no request: the next step goes on.

        Returns:
            `list[StreamUpdate]`: One for each response about which there is something new.
        """
        with self._gradient_mode():
            self._let_in()
            if len(self._decoder.live) > 0:
                try:
                    self._decoder.step()
                except BaseException:
                    self._decoder.recover()
                    raise
            progress = self._progress()
        updates, ended = [], []
        for row, tokens, draft, is_finished in progress:
            update = self._update(row, tokens, draft, is_finished)
            if update is not None:
                updates.append(update)
            if is_finished:
                ended.append(row)
        self._free(ended)
        return updates

    def _let_in(self) -> None:
        """Gives free rows to the requests that have waited longest."""
        response, new_rows = self._decoder.response, []
        free = [row for row in range(self.max_batch_size) if row not in self._running]
        while self._waiting and self._waiting[0][1].num_return_sequences <= len(free):
            number, prepared = self._waiting.popleft()
            num_rows = prepared.num_return_sequences
            rows, free = free[:num_rows], free[num_rows:]
            for criterion in prepared.stopping_criteria:
                if isinstance(criterion, MaxTimeCriteria):
                    criterion.initial_timestamp = time.time()  # its time begins now
            for i, row in enumerate(rows):
                criteria = _GuardedCriteria(prepared.stopping_criteria)
                self._running[row] = _Sequence(number, i, prepared, criteria, self._decoder.num_steps)
                options = {**prepared.row_options, "left_to_right": prepared.sampler.left_to_right}
                self._decoder.set_row_options(row, options)
            has_criteria = len(prepared.stopping_criteria) > 0
            response.replace_rows(
                torch.tensor(rows, device="cpu"),
                [prepared.prompt] * num_rows,
                torch.tensor([prepared.max_new_tokens] * num_rows, device="cpu"),
                min_new_tokens=[prepared.min_new_tokens] * num_rows,
                eos_token_ids=[prepared.eos_token_ids] * num_rows,
                stopping_criteria=[
                    StoppingCriteriaList([self._running[row].criteria] if has_criteria else []) for row in rows
                ],
            )
            new_rows += rows
        if new_rows:
            self._decoder.add_rows(torch.tensor(new_rows, device="cpu"))

    def _progress(self) -> list[tuple[int, torch.LongTensor, torch.LongTensor, bool]]:
        """For each running row: its final tokens, what follows them so far, and whether it is finished."""
        decoder, response = self._decoder, self._decoder.response
        progress, live = [], decoder.live.tolist()
        if live:
            is_masked, first_eos = decoder.is_masked, decoder.first_eos  # [A, R'], [A]
            known = torch.minimum(first_index(is_masked), first_eos + 1).minimum(decoder.grid.limits)
            if decoder.generation_config.remask_threshold:  # a token may be taken back until its block is decoded
                known = known // decoder.block_size * decoder.block_size
            end = torch.minimum(first_eos + 1, decoder.grid.limits)
            shown = torch.minimum(decoder.num_opened * decoder.block_size, end)
            # So far counted from the first block, which may begin in the prompt.
            known, shown = ((index - decoder.grid.offsets).clamp(min=0) for index in (known, shown))
            tokens = response.tokens(decoder.live, int(torch.maximum(known, shown).max()))
            for row, own, final, end in zip(live, tokens, known.tolist(), shown.tolist(), strict=True):
                progress.append((row, own[:final], own[final:end], False))
        ended = sorted(self._running.keys() - set(live))
        if ended:
            rows = torch.tensor(ended, device="cpu")
            lengths = response.lengths()[rows]
            for row, own, length in zip(ended, response.tokens(rows), lengths.tolist(), strict=True):
                progress.append((row, own[:length], own[:0], True))
        failed = self._sampler.errors
        return [(row, own, draft, is_finished or row in failed) for row, own, draft, is_finished in progress]

    def _update(
        self, row: int, tokens: torch.LongTensor, draft: torch.LongTensor, is_finished: bool
    ) -> StreamUpdate | None:
        """What is new about a row that has the final `tokens` and a `draft`; `None` if there is nothing."""
        sequence, response = self._running[row], self._decoder.response
        error = self._sampler.errors.pop(row, None) or sequence.criteria.error
        finish_reason = None
        if error is not None:
            # What the failed step has accepted is not to be told.
            tokens, draft, finish_reason = tokens[: sequence.num_told], draft[:0], "error"
        elif is_finished:
            finish_reason = "length"
            if len(tokens) > 0 and bool(response.is_eos(tokens[None, -1:], torch.tensor([row], device="cpu"))):
                finish_reason = "eos"
            elif len(tokens) < sequence.prepared.max_new_tokens:
                finish_reason = "stop"
        new, draft_ids = tokens[sequence.num_told :], draft.tolist()
        if not is_finished and len(new) == 0 and draft_ids == sequence.draft:
            return None
        sequence.num_told, sequence.draft = len(tokens), draft_ids
        return StreamUpdate(
            request=sequence.request,
            sequence_index=sequence.sequence_index,
            # Copies that are made outside of inference mode may be used anywhere.
            tokens=new.clone().to(response.device),
            draft=draft.clone().to(response.device),
            is_finished=is_finished,
            finish_reason=finish_reason,
            num_forward_passes=self._decoder.num_steps - sequence.joined_at_step,
            error=error,
        )

    def _free(self, rows: Iterable[int]) -> None:
        """Takes rows out of the batch, finished or not."""
        rows = list(rows)
        if rows:
            with self._gradient_mode():
                self._decoder.remove_rows(torch.tensor(rows, device="cpu"))
        for row in rows:
            del self._running[row]


def stream_responses(
    stream: StreamDecoder, requests: Iterable[torch.LongTensor | tuple[torch.LongTensor, Any] | None]
) -> Iterator[tuple[int, torch.LongTensor]]:
    """The responses to `requests`, as they are finished; see `generate_stream_batch`."""
    waiting, responses = iter(requests), {}
    numbers: dict[int, int] = {}  # positions among `requests`, by the stream's number
    errors: list[tuple[int | None, Exception]] = []
    count = itertools.count()
    while True:
        # 1. Who comes.
        while waiting is not None and stream.num_free > 0:
            try:
                request = next(waiting)
            except StopIteration:
                waiting = None
                break
            except Exception as error:  # raised once all others have their response
                waiting = None
                errors.append((None, error))
                break
            if request is None:
                break
            number = next(count)
            try:
                prompt, options = prompt_and_options(request)
                numbers[stream.add(prompt, **options)] = number
            except Exception as error:
                errors.append((number, error))

        # 2. A step for all.
        if not stream.has_unfinished:
            if waiting is None:
                if errors:
                    raise _first_error(errors)
                return
            continue
        for update in stream.step():
            responses.setdefault(update.request, []).append(update.tokens)

            # 3. Who goes.
            if update.is_finished:
                number, tokens = numbers.pop(update.request), torch.cat(responses.pop(update.request))
                if update.error is not None:
                    errors.append((number, update.error))
                else:
                    yield number, tokens


def _first_error(errors: list[tuple[int | None, Exception]]) -> Exception:
    """The error to raise for all of them: the first one, which names its request and how many there are."""
    number, error = errors[0]
    if number is None or not isinstance(error, ValueError):
        return error
    others = f" {len(errors) - 1} further requests failed." if len(errors) > 1 else ""
    raised = ValueError(f"Request {number} was not answered: {error}{others}")
    raised.__cause__ = error
    return raised

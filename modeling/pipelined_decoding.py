"""Pipelined parallel decoding: Algorithm 2 of arXiv 2508.09192, for a batch whose rows go at their own pace.

One truth is kept: the tokens, of which some are still masked. Decoded ratios, activation, what is final and what can
be committed follow from it in each step. All of that is done on the host with small tensors; the model's device gets
the window and gives back, in one transfer, what was chosen for the masked tokens.
"""

# B rows of the response, A live rows, R' response tokens that are looked at, N blocks of them, K block size, W window,
# S key/value slots, V vocabulary, M masked tokens in the window, over all live rows

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from transformers.generation import LogitsProcessorList

from .acceptance_rules import Credit, accept, tokens_to_mask_again
from .block_causal import visible_length
from .cache_d2f import CHUNK, PADDING, D2FCache
from .decoding_rules import (
    as_blocks,
    decoded_ratio,
    final_blocks,
    first_index,
    fully_activated,
    opened_blocks,
    spread,
)
from .generation_config_d2f import D2FGenerationConfig
from .logits_process_d2f import depends_on_neighbours
from .response_d2f import Response


class PipelinedDecoder:
    """Decodes the rows of a [`Response`], one forward per step for all that are live.

    Rows can be added between two steps, and a row that is finished leaves the batch at once. What a row decodes does
    not depend on the others. Rows with the same prompt next to each other share their first forward.

    Args:
        model: A block-diffusion model with its `generate`.
        response (`Response`): The tokens.
        logits_processor (`LogitsProcessorList`): Applied to the logits of each masked token.
        generation_config (`D2FGenerationConfig`): With its defaults filled in.
        generator (`torch.Generator`, *optional*): Source of randomness.
        use_cache (`bool`): Without the cache each row is fed from its first token in each step.

    Attributes:
        live (`torch.LongTensor` of shape `(A,)`): Rows of the response that are not finished, in the order of the
            cache's rows.
        num_forward_passes (`torch.LongTensor` of shape `(B,)`): Forwards of each row that is finished.
        trace (`list[list[dict]]`, *optional*): With `output_trace`, what each forward of each row saw and led to.
    """

    def __init__(
        self,
        model: Any,
        response: Response,
        logits_processor: LogitsProcessorList,
        generation_config: D2FGenerationConfig,
        generator: torch.Generator | None = None,
        use_cache: bool = True,
    ):
        self.model = model
        self.head: Any = model.get_output_embeddings()
        self.response = response
        self.logits_processor = logits_processor
        self.generation_config = generation_config
        self.generator = generator
        self.use_cache = use_cache
        # What a longer block lacks would only take memory.
        self.block_size = min(model._block_size(generation_config), response.max_new_tokens)
        self.look_back = int(model.config.right_shift_logits)  # the token before the window predicts its first one
        self.must_wait = any(depends_on_neighbours(processor) for processor in logits_processor)
        self.acceptance_options = generation_config.acceptance_options()
        self.credit: Credit | None = None  # of acceptance_rule="credit", `(A, N, K)`
        self.compiled: Callable | None = None
        if generation_config.compile_config is not None or (
            generation_config.cache_implementation == "static" and response.device.type != "cpu"
        ):
            self.compiled = model._compiled_base_model(generation_config.compile_config)
        self.cache = D2FCache(model.config.num_hidden_layers, response.sequences.shape[1], response.device)
        if self.compiled is not None:  # a graph writes to one place
            num_rows = len(response.sequences) * (generation_config.num_branches or 1)
            self.cache.reserve(_bucket(num_rows, 1), _bucket(response.sequences.shape[1], CHUNK))
        self.num_forward_passes = torch.zeros_like(response.prompt_lengths)
        self.trace: list[list[dict]] | None = None
        if generation_config.output_trace:
            self.trace = [[] for _ in response.prompt_lengths]
        self.num_steps = 0
        self.has_copies = False
        # Of the live rows, `(A,)` each. `opened`: blocks; `committed`: tokens whose keys and values are in the cache
        # for good; `copies`: rows that this one stands for until its first forward, itself included; `joined`: the
        # number of steps before its first one.
        self.live = torch.zeros(0, dtype=torch.long)
        self.prompt_lengths, self.limits, self.num_blocks = (self.live,) * 3
        self.opened, self.committed, self.copies, self.joined = (self.live,) * 4

    def add_rows(self, rows: torch.LongTensor) -> None:
        """Lets `rows` of the response, whose prompts are there, take part from the next step on."""
        response = self.response
        prompts = response.sequences[rows]
        # In the first forward rows with the same prompt see the same, so one of them is enough.
        is_first = torch.ones_like(rows, dtype=torch.bool)
        is_first[1:] = (
            (prompts[1:] != prompts[:-1]).any(-1)
            | (response.prompt_lengths[rows[1:]] != response.prompt_lengths[rows[:-1]])
            | (response.limits[rows[1:]] != response.limits[rows[:-1]])
            | (rows[1:] != rows[:-1] + 1)
        )
        first = is_first.nonzero().flatten()
        copies = torch.diff(first, append=torch.tensor([len(rows)]))
        self._select(torch.arange(len(self.live)), rows[first], copies)
        self.has_copies |= len(first) < len(rows)
        if self.trace is not None:
            for row in rows.tolist():
                self.trace[row] = []
        self._look()

    def _select(self, places: torch.LongTensor, rows: torch.LongTensor, copies: torch.LongTensor) -> None:
        """Keeps the live rows at `places`, in that order, and adds `rows` of the response behind them."""
        new = torch.zeros_like(rows)
        if self.credit is not None:
            self.credit = self.credit.select(places, len(rows))
        self.live = torch.cat([self.live[places], rows])
        self.opened = torch.cat([self.opened[places], new])
        self.committed = torch.cat([self.committed[places], new])
        self.copies = torch.cat([self.copies[places], copies])
        self.joined = torch.cat([self.joined[places], torch.full_like(rows, self.num_steps)])
        self.prompt_lengths, self.limits = self.response.prompt_lengths[self.live], self.response.limits[self.live]
        self.num_blocks = (self.limits + (self.block_size - 1)) // self.block_size

    def step(self) -> None:
        """One forward for all live rows, and what follows from it.

        1. Open a block where the last one is decoded far enough; see which blocks are fully activated.
        2. The window of a row: from its first token that is not in the cache (without one, from its first token) to
           the end of its last open block.
        3. Forward, which commits the blocks at the start of the window that it reads fully decoded. The prompt is
           block 0 and final from the start, so the first forward prefills it.
        4. Accept tokens, all from the logits of this one forward.
        5. Rows that are finished leave.
        """
        response, config, block_size = self.response, self.generation_config, self.block_size

        # 1. Which blocks there are.
        is_masked, end_of_text = self.is_masked, self.end_of_text  # [A, R'], [A]
        ratio = decoded_ratio(is_masked, block_size, self.limits)  # [A, N]
        # Without an EOS that is the limit, which lies inside the last block if that one is short.
        eos_block = torch.where(end_of_text < self.limits, end_of_text // block_size, self.num_blocks)
        self.opened = opened_blocks(
            self.opened, ratio, self.num_blocks, eos_block, config.block_add_threshold, config.max_active_blocks
        )
        is_fully_activated = fully_activated(ratio, config.block_activation_threshold)
        opened_length = torch.minimum(self.opened * block_size, self.limits)  # in tokens of the response

        # 2. The window.
        fed_from, end = self.committed, self.prompt_lengths + opened_length
        has_prediction = is_masked & (torch.arange(is_masked.shape[1]) < opened_length[:, None])  # [A, R']
        has_logits = has_prediction
        if config.remask_threshold:
            has_logits = has_prediction | self._may_be_masked_again(ratio, opened_length)
        row, index = has_logits.nonzero(as_tuple=True)  # of the live rows, and in the response

        # 3. Forward.
        if self.use_cache:
            final = torch.minimum(final_blocks(ratio, self.opened) * block_size, self.limits)
            self.committed = self.prompt_lengths + final
        logits = self._forward(fed_from, end, row, index)  # [M, V]
        self.num_steps += 1
        if self.has_copies:
            source, logits, row, index = self._take_copies_apart(row, index, logits)
            has_prediction, is_fully_activated, fed_from, end = (
                values[source] for values in (has_prediction, is_fully_activated, fed_from, end)
            )

        # 4. Accept.
        response_row = self.live[row]
        logits, scores, tokens, probability, ranking = self._predict(logits, row, index, response_row)
        accepted = self._accept(has_prediction, row, index, tokens, probability, ranking, is_fully_activated)
        if self.trace is not None:
            self._record(fed_from, end, row, index, tokens, accepted)
        response.accept(accepted, response_row, index, tokens, scores=scores, logits=logits)
        if config.remask_threshold:
            self._mask_again(~has_prediction[row, index], row, index, response_row, probability)
        if response.has_listeners:
            shown = torch.zeros_like(response.limits).index_copy_(0, self.live, end - self.prompt_lengths)
            response.publish(shown, block_size if config.remask_threshold else 1)

        # 5. Who is left.
        self._look()
        self._drop_finished_rows()

    def _look(self) -> None:
        """Sees which response tokens of the live rows are masked, `(A, R')`, and where their text ends: `(A,)`, index
        of the first EOS, the limit without one. It looks as far as blocks can be open in the next step."""
        if len(self.live) == 0:
            return
        response = self.response
        length = min((int(self.opened.max()) + 1) * self.block_size, response.max_new_tokens)
        place = torch.arange(length)
        tokens = response.sequences[self.live[:, None], self.prompt_lengths[:, None] + place]
        self.end_of_text = torch.where(response.ends_text(tokens), place, self.limits[:, None]).amin(-1)
        self.is_masked = tokens == response.mask_token_id

    def _forward(
        self, fed_from: torch.LongTensor, end: torch.LongTensor, row: torch.LongTensor, index: torch.LongTensor
    ) -> torch.Tensor:
        """Feeds the live rows from `fed_from` to `end`, positions `(A,)`: logits `(M, V)` of the response tokens
        `(row, index)`, `(M,)` each."""
        start = (fed_from - self.look_back).clamp(min=0) if self.look_back else fed_from
        width, num_slots = int((end - start).max()), int(end.max())
        compiled = self.compiled
        if compiled is not None and int(fed_from.min()) == 0:
            compiled = None  # prompts have any length; compiled shapes are for the steps behind them
        if compiled is not None:
            width, num_slots = _bucket(width, self.block_size), _bucket(num_slots, CHUNK)
        position = start[:, None] + torch.arange(width)  # [A, W]
        is_fed = position < end[:, None]
        position = position.where(is_fed, 0)
        visible = torch.minimum(visible_length(position, self.prompt_lengths, self.block_size), end[:, None])  # [A, W]
        allowed = torch.arange(num_slots) < visible[..., None]  # [A, W, S]
        column = (self.prompt_lengths - start)[row] + (index - self.look_back)  # in the window
        write_slots = position.where(is_fed, PADDING)
        input_ids = self.response.sequences[self.live[:, None], position]
        if compiled is not None:  # rows of nothing but padding, which see one slot
            missing = _bucket(len(position), 1) - len(position)
            input_ids, position = (F.pad(values, (0, 0, 0, missing)) for values in (input_ids, position))
            write_slots = F.pad(write_slots, (0, 0, 0, missing), value=PADDING)
            allowed = F.pad(allowed, (0, 0, 0, 0, 0, missing))
            allowed[len(self.live) :, :, 0] = True
        is_packed = compiled is None and len(position) > 1 and is_worth_packing(is_fed)
        if is_packed:  # one row of what is no padding
            column = (is_fed.flatten().cumsum(0) - 1)[row * width + column]
            row = torch.zeros_like(row)
            input_ids, position = input_ids[is_fed][None], position[is_fed][None]
        self.cache.set_window(write_slots, num_slots, is_packed)
        # Nobody waits for what goes to the device.
        input_ids, allowed, position, row, column = (
            values.to(self.response.device, non_blocking=True)
            for values in (input_ids, allowed[:, None], position, row, column)
        )
        inputs = {
            "input_ids": input_ids,
            "attention_mask": allowed,
            "position_ids": position,
            "cache": self.cache,
        }
        if compiled is not None:
            return self.head(compiled(**inputs).last_hidden_state[row, column])
        return self.model(**inputs, logits_to_keep=(row, column)).logits

    def _predict(
        self, logits: torch.Tensor, row: torch.LongTensor, index: torch.LongTensor, response_row: torch.LongTensor
    ) -> tuple[torch.Tensor, torch.FloatTensor | None, torch.LongTensor, torch.FloatTensor, torch.FloatTensor]:
        """What the forward says of each token: logits and, if they are kept, scores `(M, V)`; the predicted token, its
        probability and its rank value, `(M,)` each. `response_row` is `row` in the response."""
        return logits, *self.model._predict(
            logits,
            response_row,
            index,
            self.response,
            self.logits_processor,
            self.generation_config,
            self.generator,
        )

    def _accept(
        self,
        has_prediction: torch.BoolTensor,
        row: torch.LongTensor,
        index: torch.LongTensor,
        tokens: torch.LongTensor,
        probability: torch.FloatTensor,
        ranking: torch.FloatTensor,
        is_fully_activated: torch.BoolTensor,
    ) -> torch.BoolTensor:
        """Which of the `tokens` `(M,)` are accepted; only those that `has_prediction` `(A, R')` can be."""
        shape, block_size = has_prediction.shape, self.block_size
        if self.must_wait:  # for the tokens before them
            has_prediction = has_prediction & (torch.arange(shape[1]) == first_index(has_prediction)[:, None])
        probability_of_blocks = as_blocks(spread(probability, row, index, shape), block_size)  # [A, N, K]
        ranking_of_blocks = probability_of_blocks
        if ranking is not probability:
            ranking_of_blocks = as_blocks(spread(ranking, row, index, shape), block_size)
        tokens_of_blocks = None
        if self.generation_config.acceptance_rule == "credit":
            tokens_of_blocks = as_blocks(spread(tokens, row, index, shape), block_size)
        accepted, self.credit = accept(
            as_blocks(has_prediction, block_size),
            tokens_of_blocks,
            probability_of_blocks,
            ranking_of_blocks,
            is_fully_activated,
            credit=self.credit,
            **self.acceptance_options,
        )
        return accepted.flatten(1)[row, index]

    def _may_be_masked_again(self, ratio: torch.FloatTensor, opened_length: torch.LongTensor) -> torch.BoolTensor:
        """The decoded tokens, `(A, R')`, of open blocks that are not final, up to an EOS and without it."""
        place = torch.arange(self.is_masked.shape[1])
        final = final_blocks(ratio, self.opened) * self.block_size
        end = torch.minimum(opened_length, self.end_of_text)
        return ~self.is_masked & (place >= final[:, None]) & (place < end[:, None])

    def _mask_again(
        self,
        may_be_masked: torch.BoolTensor,
        row: torch.LongTensor,
        index: torch.LongTensor,
        response_row: torch.LongTensor,
        probability: torch.FloatTensor,
    ) -> None:
        """Takes back, of the decoded tokens that `may_be_masked` `(M,)`, those with too low a `probability`."""
        was_masked_again = self.response.was_masked_again[response_row, index]
        threshold = self.generation_config.remask_threshold
        again = tokens_to_mask_again(may_be_masked, probability, was_masked_again, threshold)
        self.response.mask_again(response_row[again], index[again])
        if self.trace is not None:
            for a, b in enumerate(self.live.tolist()):
                self.trace[b][-1]["masked_again"] = (self.prompt_lengths[a] + index[again & (row == a)]).tolist()

    def _move_rows(self, sources: torch.LongTensor, targets: torch.LongTensor) -> None:
        """Puts what the cache has of the live rows at places `sources` in the place of those at `targets`."""
        self.cache.move_rows(sources, targets)

    def _take_copies_apart(
        self, row: torch.LongTensor, index: torch.LongTensor, logits: torch.Tensor
    ) -> tuple[torch.LongTensor, torch.Tensor, torch.LongTensor, torch.LongTensor]:
        """Makes rows of their own of those that went through their first forward as one.

        The first of them stay where they are, and the others follow behind all.

        Returns:
            For each row which one it was `(A,)`; and logits, row and index of all their masked tokens.
        """
        num_rows, others = len(self.live), self.copies - 1
        old = torch.arange(num_rows)
        source = torch.repeat_interleave(old, others)  # of the new rows
        which = torch.arange(len(source)) - (others.cumsum(0) - others)[source] + 1  # of the copies of one row
        self._move_rows(source, torch.arange(num_rows, num_rows + len(source)))
        self.copies, self.has_copies = torch.ones_like(self.copies), False
        rows, source = self.live[source] + which, torch.cat([old, source])
        self._select(source, rows[:0], rows[:0])
        self.live[num_rows:] = rows
        own = [(row == a).nonzero().flatten() for a in source.tolist()]
        row = torch.repeat_interleave(torch.arange(len(source)), torch.tensor([len(tokens) for tokens in own]))
        taken = torch.cat(own)
        return source, logits[taken.to(logits.device)], row, index[taken]

    def _drop_finished_rows(self) -> None:
        """Rows that have everything decoded up to their first EOS, their limit, or where they were stopped, leave.

        The last ones take their places, so that the cache's rows stay together.
        """
        end = self.end_of_text
        if self.response.has_listeners:
            end = torch.minimum(end, self.response.stopped_at[self.live])
        is_live = first_index(self.is_masked) < end
        num_live = int(is_live.sum())
        if num_live == len(self.live):
            return
        self.num_forward_passes[self.live[~is_live]] = self.num_steps - self.joined[~is_live]
        places = torch.arange(num_live)
        targets = (~is_live[:num_live]).nonzero().flatten()
        sources = is_live[num_live:].nonzero().flatten() + num_live
        places[targets] = sources
        if len(sources):
            self._move_rows(sources, targets)
        self._select(places, sources[:0], sources[:0])
        self.is_masked, self.end_of_text = self.is_masked[places], self.end_of_text[places]

    def _record(
        self,
        fed_from: torch.LongTensor,
        end: torch.LongTensor,
        row: torch.LongTensor,
        index: torch.LongTensor,
        tokens: torch.LongTensor,
        accepted: torch.BoolTensor,
    ) -> None:
        """Appends this forward to the trace of each live row."""
        position = self.prompt_lengths[row] + index
        for a, b in enumerate(self.live.tolist()):
            chosen = (row == a) & accepted
            self.trace[b].append(
                {
                    "window_start": int(fed_from[a]),
                    "window_length": int(end[a] - fed_from[a]),
                    "committed_length": int(fed_from[a]),
                    "accepted": list(zip(position[chosen].tolist(), tokens[chosen].tolist(), strict=True)),
                }
            )


def is_worth_packing(is_fed: torch.BoolTensor) -> bool:
    """Whether so much of a window `(A, W)` is padding that leaving it out saves more than it costs.

    Measured with the reference model on a CPU: see docs/log.md.
    """
    num_fed = int(is_fed.sum())
    return num_fed < 0.8 * is_fed.numel() and is_fed.numel() - num_fed >= 64


def _bucket(size: int, unit: int) -> int:
    """The smallest of `unit`, 2 `unit`, 4 `unit` ... that is at least `size`: so that compiled shapes repeat."""
    while unit < size:
        unit *= 2
    return unit

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

from .acceptance_rules import Credit, accept
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
        num_forward_passes (`torch.LongTensor` of shape `(B,)`): Forwards of each row.
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
        self.response = response
        self.logits_processor = logits_processor
        self.generation_config = generation_config
        self.generator = generator
        self.use_cache = use_cache
        self.block_size = model.config.block_size
        if generation_config.block_size is not None:
            self.block_size = generation_config.block_size
        self.look_back = int(model.config.right_shift_logits)  # the token before the window predicts its first one
        self.must_wait = any(depends_on_neighbours(processor) for processor in logits_processor)
        self.acceptance_options = generation_config.acceptance_options()
        self.credit: Credit | None = None  # of acceptance_rule="credit", `(A, N, K)`
        self.compiled: Callable | None = None
        if generation_config.compile_config is not None or (
            generation_config.cache_implementation == "static" and response.device.type != "cpu"
        ):
            self.compiled = model._compiled_base_model(generation_config.compile_config)
        self.cache = D2FCache(model.config.num_hidden_layers, response.sequences.shape[1])
        self.num_forward_passes = torch.zeros_like(response.prompt_lengths)
        self.trace: list[list[dict]] | None = None
        if generation_config.output_trace:
            self.trace = [[] for _ in response.prompt_lengths]
        # Of the live rows, `(A,)` each:
        self.live = torch.zeros(0, dtype=torch.long)
        self.prompt_lengths, self.limits, self.opened, self.committed, self.copies = (self.live,) * 5
        # `opened`: blocks; `committed`: tokens whose keys and values are in the cache for good; `copies`: rows that
        # this one stands for until its first forward, itself included.

    def add_rows(self, rows: torch.LongTensor) -> None:
        """Lets `rows` of the response, whose prompts are there, take part from the next step on."""
        response = self.response
        prompts = response.sequences[rows]
        # In the first forward rows with the same prompt see the same, so one of them is enough.
        is_first = torch.ones_like(rows, dtype=torch.bool)
        is_first[1:] = (prompts[1:] != prompts[:-1]).any(-1) | (
            response.limits[rows[1:]] != response.limits[rows[:-1]]
        )
        first = is_first.nonzero().flatten()
        copies = torch.diff(first, append=torch.tensor([len(rows)]))
        self._select(torch.arange(len(self.live)), rows[first], copies)
        self.num_forward_passes[rows] = 0
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
        self.prompt_lengths, self.limits = self.response.prompt_lengths[self.live], self.response.limits[self.live]

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
        num_blocks = (self.limits + (block_size - 1)) // block_size
        # Without an EOS that is the limit, which lies inside the last block if that one is short.
        eos_block = torch.where(end_of_text < self.limits, end_of_text // block_size, num_blocks)
        self.opened = opened_blocks(
            self.opened, ratio, num_blocks, eos_block, config.block_add_threshold, config.max_active_blocks
        )
        is_fully_activated = fully_activated(ratio, config.block_activation_threshold)
        opened_length = torch.minimum(self.opened * block_size, self.limits)  # in tokens of the response

        # 2. The window.
        fed_from, end = self.committed, self.prompt_lengths + opened_length
        has_prediction = is_masked & (torch.arange(is_masked.shape[1]) < opened_length[:, None])  # [A, R']
        row, index = has_prediction.nonzero(as_tuple=True)  # of the live rows, and in the response

        # 3. Forward.
        logits = self._forward(fed_from, end, row, index)  # [M, V]
        if self.use_cache:
            final = torch.minimum(final_blocks(ratio, self.opened) * block_size, self.limits)
            self.committed = self.prompt_lengths + final
        if len(self.live) < int(self.copies.sum()):
            source, logits, row, index = self._take_copies_apart(row, index, logits)
            is_masked, has_prediction, is_fully_activated, fed_from, end = (
                values[source] for values in (is_masked, has_prediction, is_fully_activated, fed_from, end)
            )
        self.num_forward_passes.index_add_(0, self.live, torch.ones_like(self.live))

        # 4. Accept.
        response_row = self.live[row]
        scores, tokens, probability, ranking = self.model._predict(
            logits, response_row, index, response, self.logits_processor, config, self.generator
        )
        if self.must_wait:  # for the tokens before them
            has_prediction &= torch.arange(is_masked.shape[1]) == first_index(is_masked)[:, None]
        probability_of_blocks = as_blocks(spread(probability, row, index, is_masked.shape), block_size)  # [A, N, K]
        ranking_of_blocks = probability_of_blocks
        if ranking is not probability:
            ranking_of_blocks = as_blocks(spread(ranking, row, index, is_masked.shape), block_size)
        tokens_of_blocks = None
        if config.acceptance_rule == "credit":
            tokens_of_blocks = as_blocks(spread(tokens, row, index, is_masked.shape), block_size)
        accepted, self.credit = accept(
            as_blocks(has_prediction, block_size),
            tokens_of_blocks,
            probability_of_blocks,
            ranking_of_blocks,
            is_fully_activated,
            credit=self.credit,
            **self.acceptance_options,
        )
        accepted = accepted.flatten(1)[row, index]
        if self.trace is not None:
            self._record(fed_from, end, row, index, tokens, accepted)
        response.accept(accepted, response_row, index, tokens, scores=scores, logits=logits)
        if response.has_listeners:
            shown = torch.zeros_like(response.limits).index_copy_(0, self.live, end - self.prompt_lengths)
            response.publish(shown)

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
        tokens = response.tokens(self.live, length)
        place = torch.arange(length)
        self.end_of_text = torch.where(response.ends_text(tokens), place, self.limits[:, None]).amin(-1)
        self.is_masked = tokens == response.mask_token_id

    def _forward(
        self, fed_from: torch.LongTensor, end: torch.LongTensor, row: torch.LongTensor, index: torch.LongTensor
    ) -> torch.Tensor:
        """Feeds the live rows from `fed_from` to `end`, positions `(A,)`: logits `(M, V)` of the response tokens
        `(row, index)`, `(M,)` each."""
        start = (fed_from - self.look_back).clamp(min=0) if self.look_back else fed_from
        width, num_slots = int((end - start).max()), int(end.max())
        # Prompts have any length, so compiled shapes are for the steps behind them, as in transformers.
        is_compiled = self.compiled is not None and int(fed_from.min()) > 0
        if is_compiled:
            width, num_slots = _bucket(width, self.block_size), _bucket(num_slots, CHUNK)
        position = start[:, None] + torch.arange(width)  # [A, W]
        is_fed = position < end[:, None]
        position = position.where(is_fed, 0)
        visible = torch.minimum(visible_length(position, self.prompt_lengths, self.block_size), end[:, None])  # [A, W]
        allowed = torch.arange(num_slots) < visible[..., None]  # [A, W, S]
        column = (self.prompt_lengths - start)[row] + (index - self.look_back)  # in the window
        write_slots = position.where(is_fed, PADDING)
        input_ids = self.response.sequences[self.live[:, None], position]
        if is_compiled:  # rows of nothing but padding, which see one slot
            missing = _bucket(len(position), 1) - len(position)
            input_ids, position = (F.pad(values, (0, 0, 0, missing)) for values in (input_ids, position))
            write_slots = F.pad(write_slots, (0, 0, 0, missing), value=PADDING)
            allowed = F.pad(allowed, (0, 0, 0, 0, 0, missing))
            allowed[len(self.live) :, :, 0] = True
        device = self.response.device
        self.cache.set_window(write_slots.to(device), num_slots)
        inputs = {
            "input_ids": input_ids.to(device),
            "attention_mask": allowed[:, None].to(device),
            "position_ids": position.to(device),
            "cache": self.cache,
        }
        wanted = (row.to(device), column.to(device))
        if is_compiled:
            return self.model.get_output_embeddings()(self.compiled(**inputs).last_hidden_state[wanted])
        return self.model(**inputs, logits_to_keep=wanted).logits

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
        self.cache.move_rows(source, torch.arange(num_rows, num_rows + len(source)))
        self.copies = torch.ones_like(self.copies)
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
        end = torch.minimum(self.end_of_text, self.response.stopped_at[self.live])
        is_live = first_index(self.is_masked) < end
        num_live = int(is_live.sum())
        if num_live == len(self.live):
            return
        places = torch.arange(num_live)
        targets = (~is_live[:num_live]).nonzero().flatten()
        sources = is_live[num_live:].nonzero().flatten() + num_live
        places[targets] = sources
        if len(sources):
            self.cache.move_rows(sources, targets)
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


def _bucket(size: int, unit: int) -> int:
    """The smallest of `unit`, 2 `unit`, 4 `unit` ... that is at least `size`: so that compiled shapes repeat."""
    while unit < size:
        unit *= 2
    return unit

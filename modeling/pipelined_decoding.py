"""Pipelined parallel decoding: Algorithm 2 of arXiv 2508.09192, for a batch whose rows go at their own pace.

One truth is kept: the tokens, of which some are still masked. Decoded ratios, activation, what is final and what can
be committed follow from it in each step. All of that is done on the host with small tensors; the model's device gets
the window and gives back, in one transfer, what was chosen for the masked tokens.
"""

# B rows of the response, A live rows, R' response tokens that are looked at, N blocks of them, K block size, W window,
# S key/value slots, V vocabulary, M masked tokens in the window, over all live rows

from typing import Any

import torch
from transformers.generation import LogitsProcessorList

from .block_causal import visible_length
from .cache_d2f import PADDING, D2FCache
from .decoding_rules import (
    accepted_tokens,
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
        self.cache = D2FCache(model.config.num_hidden_layers, response.sequences.shape[1])
        self.live = torch.zeros(0, dtype=torch.long)
        self.copies = self.live.clone()  # rows that a live row stands for until its first forward, itself included
        self.opened = self.live.clone()  # blocks
        self.committed = self.live.clone()  # tokens whose keys and values are in the cache for good
        self.num_forward_passes = torch.zeros_like(response.prompt_lengths)
        self.trace: list[list[dict]] | None = None
        if generation_config.output_trace:
            self.trace = [[] for _ in response.prompt_lengths]

    def add_rows(self, rows: torch.LongTensor) -> None:
        """Lets `rows` of the response, whose prompts are there, take part from the next step on."""
        response = self.response
        prompts = response.sequences[rows]
        # In the first forward rows with the same prompt see the same, so one of them is enough.
        is_new = torch.ones_like(rows, dtype=torch.bool)
        is_new[1:] = (prompts[1:] != prompts[:-1]).any(-1) | (response.limits[rows[1:]] != response.limits[rows[:-1]])
        first = is_new.nonzero().flatten()
        new = torch.zeros_like(first)
        self.live = torch.cat([self.live, rows[first]])
        self.copies = torch.cat([self.copies, torch.diff(first, append=torch.tensor([len(rows)]))])
        self.opened = torch.cat([self.opened, new])
        self.committed = torch.cat([self.committed, new])
        self.num_forward_passes[rows] = 0

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
        prompt_lengths, limits = response.prompt_lengths[self.live], response.limits[self.live]

        # 1. Which blocks there are.
        length = min((int(self.opened.max()) + 1) * block_size, response.max_new_tokens)  # of all that can be open
        is_masked, end_of_text = self._look(length)  # [A, R'], [A]
        ratio = decoded_ratio(is_masked, block_size, limits)  # [A, N]
        num_blocks = (limits + (block_size - 1)) // block_size
        # Without an EOS that is the limit, which lies inside the last block if that one is short.
        eos_block = torch.where(end_of_text < limits, end_of_text // block_size, num_blocks)
        opened = opened_blocks(
            self.opened, ratio, num_blocks, eos_block, config.block_add_threshold, config.max_active_blocks
        )
        is_fully_activated = fully_activated(ratio, config.block_activation_threshold)
        opened_length = torch.minimum(opened * block_size, limits)  # in tokens of the response

        # 2. The window.
        end = prompt_lengths + opened_length
        start = (self.committed - self.look_back).clamp(min=0)
        offset = torch.arange(int((end - start).max()))
        position = start[:, None] + offset  # [A, W]
        is_fed = position < end[:, None]
        position = position.where(is_fed, 0)
        has_prediction = is_masked & (torch.arange(length) < opened_length[:, None])  # [A, R']
        row, index = has_prediction.nonzero(as_tuple=True)  # of the live rows, and in the response
        column = prompt_lengths[row] + index - start[row] - self.look_back  # in the window

        # 3. Forward.
        logits = self._forward(position, is_fed, prompt_lengths, end, row, column)  # [M, V]
        fed_from = self.committed
        self.opened = opened
        if self.use_cache:
            final = torch.minimum(final_blocks(ratio, opened) * block_size, limits)
            self.committed = prompt_lengths + final
        if (self.copies > 1).any():
            source, logits, row, index = self._take_copies_apart(row, index, logits)
            is_masked, has_prediction, is_fully_activated, start, end, fed_from = (
                values[source] for values in (is_masked, has_prediction, is_fully_activated, start, end, fed_from)
            )
        response_row = self.live[row]
        self.num_forward_passes[self.live] += 1

        # 4. Accept.
        scores, tokens, probability, ranking = self.model._predict(
            logits, response_row, index, response, self.logits_processor, config, self.generator
        )
        if self.must_wait:  # for the tokens before them
            has_prediction &= torch.arange(length) == first_index(is_masked)[:, None]
        shape = has_prediction.shape
        probability_of_blocks = as_blocks(spread(probability, row, index, shape), block_size)  # [A, N, K]
        ranking_of_blocks = probability_of_blocks
        if ranking is not probability:
            ranking_of_blocks = as_blocks(spread(ranking, row, index, shape), block_size)
        accepted = accepted_tokens(
            as_blocks(has_prediction, block_size),
            probability_of_blocks,
            ranking_of_blocks,
            is_fully_activated,
            config.confidence_threshold,
        ).flatten(1)[row, index]
        if self.trace is not None:
            self._record(fed_from, end, row, index, tokens, accepted)
        response.accept(accepted, response_row, index, tokens, scores=scores, logits=logits)
        shown = torch.zeros_like(response.prompt_lengths)
        shown[self.live] = torch.minimum(self.opened * block_size, response.limits[self.live])
        response.publish(shown)

        # 5. Who is left.
        self._drop_finished_rows()

    def _look(self, length: int) -> tuple[torch.BoolTensor, torch.LongTensor]:
        """Which of the first `length` response tokens of the live rows are masked, `(A, R')`, and where their text
        ends: `(A,)`, index of the first EOS, the limit without one."""
        tokens = self.response.tokens(self.live, length)
        limits = self.response.limits[self.live]
        end_of_text = first_index(self.response.ends_text(tokens))
        end_of_text = torch.where(end_of_text < length, end_of_text, limits)
        is_masked = (tokens == self.response.mask_token_id) & (torch.arange(length) < limits[:, None])
        return is_masked, end_of_text

    def _forward(
        self,
        position: torch.LongTensor,
        is_fed: torch.BoolTensor,
        prompt_lengths: torch.LongTensor,
        end: torch.LongTensor,
        row: torch.LongTensor,
        column: torch.LongTensor,
    ) -> torch.Tensor:
        """Logits `(M, V)` of the window: `position` `(A, W)` of its tokens, `(row, column)` `(M,)` what is wanted."""
        num_slots = int(end.max())
        visible = torch.minimum(visible_length(position, prompt_lengths, self.block_size), end[:, None])  # [A, W]
        allowed = torch.arange(num_slots) < visible[..., None]  # [A, W, S]
        device = self.response.device
        self.cache.set_window(torch.where(is_fed, position, PADDING).to(device), num_slots)
        return self.model(
            input_ids=self.response.sequences[self.live[:, None], position].to(device),
            attention_mask=allowed[:, None].to(device),
            position_ids=position.to(device),
            cache=self.cache,
            logits_to_keep=(row.to(device), column.to(device)),
        ).logits

    def _take_copies_apart(
        self, row: torch.LongTensor, index: torch.LongTensor, logits: torch.Tensor
    ) -> tuple[torch.LongTensor, torch.Tensor, torch.LongTensor, torch.LongTensor]:
        """Makes the rows that went through their first forward as one into rows of their own.

        Returns:
            For each row which one it was `(A,)`; and logits, row and index of all their masked tokens.
        """
        num_rows = len(self.live)
        source = torch.repeat_interleave(torch.arange(num_rows), self.copies)
        # The first of them stay where they are, and the others follow behind all.
        is_first = torch.ones_like(source, dtype=torch.bool)
        is_first[1:] = source[1:] != source[:-1]
        place_among_copies = torch.arange(len(source)) - is_first.nonzero().flatten()[source]
        order = torch.cat([is_first.nonzero().flatten(), (~is_first).nonzero().flatten()])
        source, place_among_copies = source[order], place_among_copies[order]
        self.cache.move_rows(source[num_rows:], torch.arange(num_rows, len(source)))
        self.live = self.live[source] + place_among_copies
        self.opened, self.committed = self.opened[source], self.committed[source]
        self.copies = torch.ones_like(self.live)
        own = [(row == old).nonzero().flatten() for old in source.tolist()]
        taken = torch.cat(own)
        row = torch.repeat_interleave(torch.arange(len(source)), torch.tensor([len(tokens) for tokens in own]))
        return source, logits[taken.to(logits.device)], row, index[taken]

    def _drop_finished_rows(self) -> None:
        """Rows that have everything decoded up to their first EOS, their limit, or where they were stopped, leave.

        The last ones take their places, so that the cache's rows stay together.
        """
        length = min(int(self.opened.max()) * self.block_size, self.response.max_new_tokens)
        is_masked, end_of_text = self._look(length)
        is_live = first_index(is_masked) < torch.minimum(end_of_text, self.response.stopped_at[self.live])
        num_live = int(is_live.sum())
        if num_live == len(self.live):
            return
        places = torch.arange(num_live)
        targets = (~is_live[:num_live]).nonzero().flatten()
        sources = is_live[num_live:].nonzero().flatten() + num_live
        places[targets] = sources
        if len(sources):
            self.cache.move_rows(sources, targets)
        self.live, self.copies = self.live[places], self.copies[places]
        self.opened, self.committed = self.opened[places], self.committed[places]

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
        position = self.response.prompt_lengths[self.live[row]] + index
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

"""Pipelined parallel decoding: Algorithm 2 of arXiv 2508.09192, for a batch whose rows go at their own pace.

One truth is kept: the tokens, of which some are still masked. Decoded ratios, activation, what is final and what can
be committed follow from it in each step. All of that is done on the host with small tensors; the model's device gets
the window and gives back, in one transfer, what was predicted for the masked tokens.
"""

# B rows of the response, A live rows, R' tokens from the first block on that are looked at, N blocks of them, K block
# size, V vocabulary, M tokens of the window that have logits, over all live rows

from collections.abc import Iterator

import torch

from .acceptance_rules import tokens_to_remask
from .block_grid import block_grid
from .decoding_loop import BlockDiffusionModel
from .decoding_rules import (
    as_blocks,
    block_sizes,
    decoded_ratio,
    final_length,
    first_index,
    fully_activated,
    opened_blocks,
)
from .generation_config_d2f import D2FGenerationConfig
from .response import Response
from .sampler import Prediction, Sampler
from .token_acceptance import TokenAcceptance
from .window_forward import WindowForward

# Options whose values may differ from row to row.
ROW_OPTIONS = (
    "confidence_threshold",
    "block_add_threshold",
    "block_activation_threshold",
    "max_active_blocks",
)


class PipelinedDecoder:
    """Decodes the rows of a [`Response`], one forward per step for all that are live.

    Rows can be added between two steps, and a row that is finished leaves the batch at once. What a row decodes does
    not depend on the others. Rows with the same prompt next to each other share their first forward.

    Args:
        model (`BlockDiffusionModel`): The model.
        response (`Response`): The tokens.
        sampler (`Sampler`): Chooses tokens.
        generation_config (`D2FGenerationConfig`): With its defaults filled in.
        use_cache (`bool`): Without the cache each row is fed from its first token in each step.

    Attributes:
        live (`torch.LongTensor` of shape `(A,)`): Rows of the response that are not finished, in the order of the
            cache's rows.
        num_forward_passes (`torch.LongTensor` of shape `(B,)`): Forwards of each row that is finished.
        trace (`list[list[dict]]`, *optional*): With `output_trace`, what each forward of each row saw and led to.
    """

    forwards_per_step = 1
    is_causal = False  # whether each token sees itself and those before it alone, the prompt included

    def __init__(
        self,
        model: BlockDiffusionModel,
        response: Response,
        sampler: Sampler,
        generation_config: D2FGenerationConfig,
        use_cache: bool = True,
    ):
        self.response = response
        self.sampler = sampler
        self.generation_config = generation_config
        self.use_cache = use_cache
        self.block_size: int = generation_config.block_size or model.config.block_size
        self.block_alignment: str = model.config.block_alignment
        if self.is_causal:
            self.block_size, self.block_alignment = 1, "prompt"
        if self.block_alignment == "prompt":  # a longer block would only add padding
            self.block_size = min(self.block_size, response.max_new_tokens)
        num_slots = response.max_new_tokens + response.num_further_tokens
        self.position = torch.arange(num_slots, device="cpu")  # counted from the first block
        self.acceptance = TokenAcceptance(generation_config, self.block_size, -(-num_slots // self.block_size))
        # Options that each row of the response may have its own value of, `(B,)` each. No value: no tensor.
        self.row_options = {
            name: torch.full((len(response.sequences),), value, device="cpu")
            for name in ROW_OPTIONS
            if (value := getattr(generation_config, name)) is not None
        }
        num_rows, num_slots = response.sequences.shape
        self.feed = WindowForward(model, self.block_size, num_slots, response.device, self.is_causal)
        if generation_config.compile_config is not None or (
            generation_config.cache_implementation == "static" and response.device.type != "cpu"
        ):
            self.feed.compile(generation_config.compile_config, num_rows * (generation_config.num_branches or 1))
        self.num_forward_passes = torch.zeros_like(response.prompt_lengths)
        self.trace: list[list[dict]] | None = None
        if generation_config.output_trace:
            self.trace = [[] for _ in response.prompt_lengths]
        self.confidence: dict[int, list[float]] = {}  # by row, with a trace: of what the last forward accepted
        self.num_steps = 0
        self.has_copies = False
        # Of the live rows, `(A,)` each. `num_committed`: tokens whose keys and values are in the cache for good;
        # `num_copies`: rows that this one stands for until its first forward, itself included; `joined_at_step`: the
        # number of steps before its first one.
        self.live = torch.zeros(0, dtype=torch.long, device="cpu")
        self.num_opened, self.num_committed, self.num_copies, self.joined_at_step = (self.live,) * 4

    @property
    def cache(self):
        """Keys and values; row a is that of the live row a."""
        return self.feed.cache

    def steps(self) -> Iterator[None]:
        """Decodes all rows of the response. It yields before each step."""
        self.add_rows(torch.arange(len(self.response.sequences), device="cpu"))
        while len(self.live) > 0:
            yield
            self.step()

    def set_row_options(self, row: int, options: dict[str, float | int | bool | None]) -> None:
        """Gives a row of the response that is not live its own values of `ROW_OPTIONS`, and of `left_to_right`.

        `None` is no cap, or the value of the batch where there is one.
        """
        num_rows, most_blocks = len(self.response.sequences), self.response.max_new_tokens
        for name, value in options.items():
            if value is None:
                value = most_blocks if name == "max_active_blocks" else getattr(self.generation_config, name)
            if name not in self.row_options:
                neutral = most_blocks if name == "max_active_blocks" else False
                self.row_options[name] = torch.full((num_rows,), neutral, device="cpu")
            self.row_options[name][row] = value

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
        num_copies = torch.diff(first, append=first.new_tensor([len(rows)]))
        self._keep_rows(torch.arange(len(self.live), device="cpu"), rows[first], num_copies)
        self.has_copies |= len(first) < len(rows)
        if self.trace is not None:
            for row in rows.tolist():
                self.trace[row] = []
        self._refresh()

    def _keep_rows(self, kept: torch.LongTensor, new: torch.LongTensor, num_copies: torch.LongTensor) -> None:
        """Keeps the live rows `kept`, in that order, and adds the rows `new` of the response behind them."""
        self.acceptance.keep_rows(kept, len(new))
        self.live, self.num_opened, self.num_committed, self.num_copies, self.joined_at_step = (
            values.index_select(0, kept)
            for values in (self.live, self.num_opened, self.num_committed, self.num_copies, self.joined_at_step)
        )
        if len(new) > 0:
            zeros = torch.zeros_like(new)
            self.live = torch.cat([self.live, new])
            self.num_opened = torch.cat([self.num_opened, zeros])
            self.num_committed = torch.cat([self.num_committed, zeros])
            self.num_copies = torch.cat([self.num_copies, num_copies])
            self.joined_at_step = torch.cat([self.joined_at_step, torch.full_like(new, self.num_steps)])
        self._look_up()

    def _look_up(self) -> None:
        """What the live rows have for as long as they are live."""
        response, block_size = self.response, self.block_size
        lengths = (values.index_select(0, self.live) for values in (response.prompt_lengths, response.limits))
        self.grid = block_grid(*lengths, block_size, self.block_alignment)
        self.num_blocks = (self.grid.ends + (block_size - 1)) // block_size
        self.sizes = block_sizes(self.grid.ends, block_size, -(-len(self.position) // block_size))
        # Where their tokens from the first block on are among those of all rows.
        first = self.live * response.sequences.shape[1] + self.grid.starts
        self.slots = first[:, None] + self.position
        self.live_options = {name: values.index_select(0, self.live) for name, values in self.row_options.items()}
        self.block_activation_threshold = self.live_options["block_activation_threshold"][:, None]

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
        is_masked, options = self.is_masked, self.live_options  # [A, R']
        length = is_masked.shape[1]
        blocks = as_blocks(is_masked, block_size)
        ratio = decoded_ratio(blocks, self.sizes[:, : blocks.shape[1]])  # [A, N]
        self.num_opened = opened_blocks(
            self.num_opened,
            ratio,
            self.num_blocks,
            self.first_eos // block_size,
            options["block_add_threshold"],
            options.get("max_active_blocks"),
        )
        is_fully_activated = fully_activated(ratio, self.block_activation_threshold)
        opened_length = torch.minimum(self.num_opened * block_size, self.grid.ends)  # in tokens
        final = final_length(self.first_masked, opened_length, block_size)

        # 2. The window.
        start, end = self.num_committed, self.grid.starts + opened_length
        has_prediction = is_masked & (self.position[:length] < opened_length[:, None])  # [A, R']
        has_logits = has_prediction
        if config.remask_threshold:
            has_logits = has_prediction | self._may_be_remasked(final, opened_length)
        row, index = has_logits.nonzero(as_tuple=True)  # of the live rows, and from their first block

        # 3. Forward.
        if self.use_cache:
            self.num_committed = self.grid.starts + final
        logits = self._forward(start, end, row, index)  # [M, V]
        self.num_steps += 1
        if self.has_copies:
            source, logits, row, index = self._split_shared_rows(row, index, logits)
            has_prediction, has_logits, is_fully_activated, start, end = (
                values[source] for values in (has_prediction, has_logits, is_fully_activated, start, end)
            )

        # 4. Accept.
        response_row = self.live.index_select(0, row)
        logits, prediction = self._predict(logits, row, index, response_row)
        accepted = self._accept(has_prediction, has_logits, prediction, is_fully_activated)[row, index]
        if self.trace is not None:
            self._record(start, end, row, index, prediction, accepted)
        told_index = self.index_in_response(row, index)
        response.accept(accepted, response_row, told_index, prediction.tokens, scores=prediction.scores, logits=logits)
        if config.remask_threshold:
            self._remask(~has_prediction[row, index], row, index, response_row, prediction.probability)
        if response.has_listeners:
            shown = torch.minimum(end - self.grid.starts, self.grid.limits) - self.grid.offsets
            offsets = response.prompt_lengths % block_size if self.block_alignment == "sequence" else 0
            response.publish(
                shown, block_size if config.remask_threshold else 1, self.live, offsets, self.last_forwards()
            )

        # 5. Who is left.
        self._refresh()
        self._drop_finished_rows()

    def recover(self) -> None:
        """To be called where an exception has ended a step, before the next one.

        The tokens are seen anew: those that the step accepted stay. What the cache has got is not known, so the next
        step feeds each row from its first token. Rows that shared a forward have each their own.
        """
        if self.has_copies:
            self._split_live_rows()
        self.num_committed = torch.zeros_like(self.live)
        self._refresh()

    def _refresh(self) -> None:
        """Sees which tokens of the live rows are masked, `(A, R')`, the first of them, and the first EOS.

        Prompt tokens of the first block are text, whatever they are, and what is behind the limit ends nothing. Where
        there is none, that is the limit. R' covers all blocks that can be open in the next step.
        """
        if len(self.live) == 0:
            return
        response, grid = self.response, self.grid
        length = min((max(self.num_opened.tolist()) + 1) * self.block_size, len(self.position))
        position = self.position[:length]
        tokens = response.sequences.take(self.slots[:, :length])
        self.is_masked, is_eos = tokens == response.mask_token_id, response.is_eos(tokens, self.live)
        if self.block_alignment == "sequence":
            is_response = position >= grid.offsets[:, None]
            self.is_masked, is_eos = self.is_masked & is_response, is_eos & is_response
        self.first_masked = torch.where(self.is_masked, position, grid.ends[:, None]).amin(-1)
        self.first_eos = torch.where(is_eos, position, grid.ends[:, None]).amin(-1).minimum(grid.limits)

    def _forward(
        self, start: torch.LongTensor, end: torch.LongTensor, row: torch.LongTensor, index: torch.LongTensor
    ) -> torch.Tensor:
        """Feeds the live rows from `start` to `end`, `(A,)` each: logits `(M, V)` of the tokens `(row, index)`."""
        return self.feed(self.response.sequences, self.live, self.grid.starts, start, end, row, index)

    def index_in_response(self, row: torch.LongTensor, index: torch.LongTensor) -> torch.LongTensor:
        """Where tokens of the live rows `row` that are at `index` from the first block on are in the response."""
        return index - self.grid.offsets.index_select(0, row)

    def _predict(
        self, logits: torch.Tensor, row: torch.LongTensor, index: torch.LongTensor, response_row: torch.LongTensor
    ) -> tuple[torch.Tensor | None, Prediction]:
        """What the forward says of each token: its logits `(M, V)` and the prediction.

        `response_row` `(M,)` is `row` counted in the response.
        """
        return logits, self.sampler(logits, response_row, self.index_in_response(row, index), self.response)

    def _accept(
        self,
        has_prediction: torch.BoolTensor,
        has_logits: torch.BoolTensor,
        prediction: Prediction,
        is_fully_activated: torch.BoolTensor,
    ) -> torch.BoolTensor:
        """Which tokens, `(A, R')` or a whole block more, are accepted: only those that `has_prediction` can be.

        `prediction` is about the tokens that `has_logits` `(A, R')`.
        """
        if self.sampler.left_to_right:  # a token waits for those before it
            is_next = self.position[: has_prediction.shape[1]] == first_index(has_prediction)[:, None]
            if "left_to_right" in self.live_options:
                is_next |= ~self.live_options["left_to_right"][:, None]
            has_prediction = has_prediction & is_next
        return self.acceptance(has_prediction, has_logits, prediction, is_fully_activated, self.live_options)

    def _may_be_remasked(self, final: torch.LongTensor, opened_length: torch.LongTensor) -> torch.BoolTensor:
        """The decoded tokens, `(A, R')`, of open blocks behind the `final` tokens `(A,)`, up to an EOS and without it.

        An EOS and what is behind it stay, because the blocks behind an EOS are gone.
        """
        position = self.position[: self.is_masked.shape[1]]
        end = torch.minimum(opened_length, self.first_eos)
        start = torch.maximum(final, self.grid.offsets)
        return ~self.is_masked & (position >= start[:, None]) & (position < end[:, None])

    def _remask(
        self,
        may_be_masked: torch.BoolTensor,
        row: torch.LongTensor,
        index: torch.LongTensor,
        response_row: torch.LongTensor,
        probability: torch.FloatTensor,
    ) -> None:
        """Takes back, of the decoded tokens that `may_be_masked` `(M,)`, those with too low a `probability`."""
        told_index = self.index_in_response(row, index)
        was_remasked = self.response.was_remasked[response_row, told_index]
        remasked = tokens_to_remask(may_be_masked, probability, was_remasked, self.generation_config.remask_threshold)
        self.response.remask(response_row[remasked], told_index[remasked])
        if self.trace is not None:
            for a, b in enumerate(self.live.tolist()):
                self.trace[b][-1]["remasked"] = (self.grid.starts[a] + index[remasked & (row == a)]).tolist()

    def _move_rows(self, sources: torch.LongTensor, targets: torch.LongTensor) -> None:
        """Gives the live rows `targets` what the cache has of the live rows `sources`."""
        self.cache.move_rows(sources, targets)

    def _split_shared_rows(
        self, row: torch.LongTensor, index: torch.LongTensor, logits: torch.Tensor
    ) -> tuple[torch.LongTensor, torch.Tensor, torch.LongTensor, torch.LongTensor]:
        """Splits rows that shared their first forward, what the cache has of them included.

        Returns:
            For each row which one it was, `(A,)`; and logits, row and index of all their masked tokens.
        """
        num_rows, source = len(self.live), self._split_live_rows()
        self._move_rows(source[num_rows:], torch.arange(num_rows, len(source), device="cpu"))
        own = [(row == a).nonzero().flatten() for a in source.tolist()]
        num_own = source.new_tensor([len(tokens) for tokens in own])
        row = torch.repeat_interleave(torch.arange(len(source), device="cpu"), num_own)
        taken = torch.cat(own)
        return source, logits[taken.to(logits.device)], row, index[taken]

    def _split_live_rows(self) -> torch.LongTensor:
        """Makes live rows of those that others stand for: for each row which one it was, `(A,)`.

        The first row of each stays where it is, and the others follow behind all.
        """
        num_rows, num_others = len(self.live), self.num_copies - 1
        old = torch.arange(num_rows, device="cpu")
        source = torch.repeat_interleave(old, num_others)  # of the new rows
        new = torch.arange(len(source), device="cpu")
        number = new - (num_others.cumsum(0) - num_others)[source] + 1  # of a copy among those of its row
        self.num_copies, self.has_copies = torch.ones_like(self.num_copies), False
        rows, source = self.live[source] + number, torch.cat([old, source])
        self._keep_rows(source, rows[:0], rows[:0])
        self.live[num_rows:] = rows
        self._look_up()
        return source

    def _drop_finished_rows(self) -> None:
        """Rows that have everything decoded up to their first EOS, their limit, or where they were stopped, leave."""
        end = self.first_eos
        if self.response.has_listeners:
            end = torch.minimum(end, self.response.stopped_at[self.live] + self.grid.offsets)
        self._leave(self.first_masked >= end)

    def remove_rows(self, rows: torch.LongTensor) -> None:
        """Takes `rows` of the response out, finished or not; between two steps, and after their first one."""
        self._leave(torch.isin(self.live, rows))

    def _leave(self, is_leaving: torch.BoolTensor) -> None:
        """The live rows that are leaving, `(A,)`, leave. The last rows take their slots in the cache."""
        num_live = len(self.live) - sum(is_leaving.tolist())
        if num_live == len(self.live):
            return
        is_live = ~is_leaving
        self.num_forward_passes[self.live[~is_live]] = self.num_steps - self.joined_at_step[~is_live]
        kept = torch.arange(num_live, device="cpu")
        targets = (~is_live[:num_live]).nonzero().flatten()
        sources = is_live[num_live:].nonzero().flatten() + num_live
        kept[targets] = sources
        if len(sources):
            self._move_rows(sources, targets)
        self._keep_rows(kept, sources[:0], sources[:0])
        self.is_masked, self.first_masked, self.first_eos = (
            values.index_select(0, kept) for values in (self.is_masked, self.first_masked, self.first_eos)
        )

    def _record(
        self,
        start: torch.LongTensor,
        end: torch.LongTensor,
        row: torch.LongTensor,
        index: torch.LongTensor,
        prediction: Prediction,
        accepted: torch.BoolTensor,
    ) -> None:
        """Appends this forward to the trace of each live row."""
        position, tokens = self.grid.starts[row] + index, prediction.tokens
        for a, b in enumerate(self.live.tolist()):
            chosen = (row == a) & accepted
            self.trace[b].append(
                {
                    "window_start": int(start[a]),
                    "window_length": int(end[a] - start[a]),
                    "committed_length": int(start[a]),
                    "accepted": list(zip(position[chosen].tolist(), tokens[chosen].tolist(), strict=True)),
                }
            )
            self.confidence[b] = prediction.probability[chosen].tolist()

    def last_forwards(self) -> dict[int, dict] | None:
        """The last entry of the trace of each live row, with the `confidence` of the tokens that it accepted.

        Rounding changes a probability from one window to another, so the trace itself has none.
        """
        if self.trace is None:
            return None
        return {b: {**self.trace[b][-1], "confidence": self.confidence[b]} for b in self.live.tolist()}

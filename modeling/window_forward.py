"""One forward over the windows of rows that have come to different lengths: positions, mask, cache slots, shapes.

A row is stored compactly, its prompt from slot 0, so block-causal attention is `slot < visible_length`. Padding of the
window is left out where there is much of it. Compiled windows are rounded up to a few sizes, so that shapes repeat.
"""

# B rows of the response, A of them that are fed, L its tokens, W window, S key/value slots, V vocabulary, M tokens
# that have logits

import weakref
from collections.abc import Callable

import torch
from torch.nn import functional as F
from transformers import CompileConfig

from .block_causal import visible_length
from .cache_d2f import CHUNK, PADDING, D2FCache
from .decoding_loop import BlockDiffusionModel

COMPILED_SHAPES = 64
# What is compiled for a model, with the config and the base model that it was compiled for.
_compiled: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class WindowForward:
    """Feeds windows to a model and keeps its cache.

    Args:
        model (`BlockDiffusionModel`): The model.
        block_size (`int`): K, tokens per response block.
        num_slots (`int`): Tokens of the longest row, prompt and response.
        device (`torch.device`): Of the model's inputs.
        is_causal (`bool`): Each token sees itself and those before it. Then a window ends before the token that its
            last one predicts, and `index` counts the tokens that predict.

    Attributes:
        cache (`D2FCache`): Its rows are the rows that are fed, in their order.
    """

    def __init__(
        self,
        model: BlockDiffusionModel,
        block_size: int,
        num_slots: int,
        device: torch.device,
        is_causal: bool = False,
    ):
        self.model = model
        self.block_size = block_size
        self.num_slots = num_slots
        self.device = device
        # Where the token before the window predicts its first one, it is fed too.
        self.look_back = int(model.config.right_shift_logits and not is_causal)
        self.cache = D2FCache(model.config.num_hidden_layers, num_slots, device)
        self.compiled: Callable | None = None
        self.slot = torch.arange(num_slots, device="cpu")
        # What the tokens of a window see that starts with a block, counted from its start.
        self.block_alignment: str = "sequence" if is_causal else model.config.block_alignment
        position = torch.arange(-self.look_back, num_slots, device="cpu")[None]
        self.visible_from_start = visible_length(position, position.new_zeros(1), block_size)[0]

    def compile(self, compile_config: CompileConfig | None, num_rows: int) -> None:
        """From now on feeds at most `num_rows` rows to a compiled model."""
        self.compiled = _compiled_base_model(self.model, compile_config)
        # CUDA graphs write to fixed addresses, so everything is reserved now.
        self.cache.reserve(bucket(num_rows, 1), bucket(self.num_slots, CHUNK))

    def __call__(
        self,
        sequences: torch.LongTensor,
        rows: torch.LongTensor,
        block_starts: torch.LongTensor,
        start: torch.LongTensor,
        end: torch.LongTensor,
        row: torch.LongTensor,
        index: torch.LongTensor,
        text_end: torch.LongTensor | None = None,
    ) -> torch.Tensor:
        """Feeds `rows` of `sequences`, each from `start` to `end`.

        Args:
            sequences (`torch.LongTensor` of shape `(B, L)`): Tokens, on the host like all arguments.
            rows (`torch.LongTensor` of shape `(A,)`): The rows that are fed, in the order of the cache's rows.
            block_starts (`torch.LongTensor` of shape `(A,)`): Prompt tokens of each row before its first block.
            start, end (`torch.LongTensor` of shape `(A,)`): The window of each row, which starts with the row or with
                a response block. Of what is before it, keys and values are in the cache.
            row, index (`torch.LongTensor` of shape `(M,)`): The tokens whose logits are wanted, counted from the first
                block of their row.
            text_end (`torch.LongTensor` of shape `(A,)`, *optional*): Where the masks of a draft begin, which see all
                of the window. A model with a drafter reads them with it.

        Returns:
            `torch.Tensor` of shape `(M, V)`: logits that predict these tokens, on the model's device.
        """
        starts, ends = start.tolist(), end.tolist()
        is_first_forward = min(starts) == 0
        width = max(last - max(first - self.look_back, 0) for first, last in zip(starts, ends, strict=True))
        num_slots = max(ends)
        # Prompts have any length. Compiled shapes are for the steps behind them.
        is_compiled = self.compiled is not None and not is_first_forward
        if is_compiled:
            width, num_slots = bucket(width, self.block_size), bucket(num_slots, CHUNK)
        first = (start - self.look_back).clamp(min=0) if self.look_back else start
        position = first[:, None] + self._slots(width)  # [A, W]
        write_slots, is_fed = position, None
        is_ragged = len(ends) > 1 or is_compiled
        if is_ragged:  # a row alone has no padding
            is_fed = position < end[:, None]
            position, write_slots = position.where(is_fed, 0), position.where(is_fed, PADDING)
        if is_first_forward or is_compiled:
            visible = visible_length(position, block_starts, self.block_size, self.block_alignment)
        else:
            visible = start[:, None] + self.visible_from_start[:width]
        if is_ragged:  # there are slots behind the end of a row
            visible = torch.minimum(visible, end[:, None])
        if text_end is not None:  # what is behind the text sees all of the window
            is_draft = position >= text_end[:, None]
            visible = torch.where(is_draft, end[:, None], visible)
        allowed = self._slots(num_slots) < visible[..., None]  # [A, W, S]
        column = index + (block_starts - first - self.look_back).index_select(0, row)  # in the window
        input_ids = sequences.take(position + (rows * sequences.shape[1])[:, None])
        is_drafted = None
        if text_end is not None and getattr(self.model.config, "drafter", None) is not None:
            is_drafted = is_draft & (input_ids == self.model.config.mask_token_id)
        is_packed = False
        if is_compiled:  # rows of nothing but padding, which see one slot
            num_rows = len(position)
            missing = bucket(num_rows, 1) - num_rows
            input_ids, position = (F.pad(values, (0, 0, 0, missing)) for values in (input_ids, position))
            write_slots = F.pad(write_slots, (0, 0, 0, missing), value=PADDING)
            allowed = F.pad(allowed, (0, 0, 0, 0, 0, missing))
            allowed[num_rows:, :, 0] = True
            if is_drafted is not None:
                is_drafted = F.pad(is_drafted, (0, 0, 0, missing))
        elif is_fed is not None and is_worth_packing(is_fed):  # one row of what is no padding
            is_packed = True
            column = (is_fed.flatten().cumsum(0) - 1)[row * width + column]
            row = torch.zeros_like(row)
            input_ids, position = input_ids[is_fed][None], position[is_fed][None]
            if is_drafted is not None:
                is_drafted = is_drafted[is_fed][None]
        self.cache.set_window(write_slots, num_slots, is_packed)
        allowed = allowed[:, None]
        if self.device.type != "cpu":  # nobody waits for what goes to the device
            input_ids, allowed, position, row, column = (
                values.to(self.device, non_blocking=True) for values in (input_ids, allowed, position, row, column)
            )
        inputs = {
            "input_ids": input_ids,
            "attention_mask": allowed,
            "position_ids": position,
            "cache": self.cache,
            "return_dict": True,
        }
        if is_drafted is not None:
            inputs["is_drafted"] = is_drafted.to(self.device, non_blocking=True)
        if is_compiled and self.compiled is not None:
            hidden_states = self.compiled(**inputs).last_hidden_state
            return self.model.get_output_embeddings()(hidden_states[row, column])
        return self.model(**inputs, logits_to_keep=(row, column)).logits

    def _slots(self, number: int) -> torch.LongTensor:
        """`arange(number)`. A bucket may have more slots than the longest row."""
        if number > self.slot.shape[0]:
            self.slot = torch.arange(number, device="cpu")
        return self.slot[:number]


def is_worth_packing(is_fed: torch.BoolTensor) -> bool:
    """Whether so much of a window `(A, W)` is padding that leaving it out saves more than it costs.

    Measured with the reference model on a CPU: see docs/log.md.
    """
    num_fed = int(is_fed.sum())
    return num_fed < 0.8 * is_fed.numel() and is_fed.numel() - num_fed >= 64


def bucket(size: int, unit: int) -> int:
    """The smallest of `unit`, 2 `unit`, 4 `unit` ... that is at least `size`."""
    while unit < size:
        unit *= 2
    return unit


def _compiled_base_model(model: BlockDiffusionModel, compile_config: CompileConfig | None) -> Callable:
    """The model without its head, compiled once; by default as transformers does it."""
    compile_config = CompileConfig() if compile_config is None else compile_config
    known = _compiled.get(model)
    if known is None or known[0] != compile_config or known[1] is not model.base_model:
        # The bound method: a compiled module would become a part of the model.
        compiled = torch.compile(model.base_model.__call__, **compile_config.to_dict())
        _compiled[model] = known = (compile_config, model.base_model, compiled)
    compiled = known[2]

    def call(**inputs):
        # Torch counts compiled shapes by code, which all models in a process share.
        with torch._dynamo.config.patch(recompile_limit=COMPILED_SHAPES):
            return compiled(**inputs)

    return call

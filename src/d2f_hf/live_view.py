"""What a response looks like while it is decoded: a streamer that knows the state of each token.

It is built on what any streamer gets: the decoded tokens (`put`), the draft that follows them (`put_draft`), and the
trace of each forward (`put_trace`, with `output_trace=True`). How the states are drawn is up to a terminal or a page.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

COMMITTED, FULLY_ACTIVATED, SEMI_ACTIVATED = "committed", "fully activated", "semi-activated"
VERIFIED, DRAFT = "verified", "draft"
STATES = (COMMITTED, FULLY_ACTIVATED, SEMI_ACTIVATED, VERIFIED, DRAFT)


@dataclass(frozen=True)
class Cell:
    """One token of a response.

    Args:
        token (`int`): The token, or the mask token.
        is_masked (`bool`): It is not decoded.
        state (`str`): One of `STATES`, that of its block: `"committed"`, its keys and values are in the cache for
            good; `"fully activated"`, a step decodes at least one token of it; `"semi-activated"`, only tokens above
            the threshold. In verified decoding `"verified"`, or `"draft"`, which may change.
        block (`int`): Its block, counted from 0.
        confidence (`float`, *optional*): The probability that it was accepted with, where that is known.
    """

    token: int
    is_masked: bool
    state: str
    block: int
    confidence: float | None = None


class LiveResponse(BaseStreamer):
    """The tokens of one response with their states, for `generate(..., streamer=LiveResponse.of(model, options))`.

    Without `output_trace` a block counts as committed once it and all before it are decoded, and confidences and
    the number of forwards are not known.

    Args:
        mask_token_id (`int`, *optional*): Of the model.
        block_size (`int`): K.
        is_sequence_aligned (`bool`): Blocks are counted from the start of the prompt.
        block_activation_threshold (`float`): tau_act.
        is_verified (`bool`): The decoding is `"verified"`.
        changed (`Callable[[], None]`, *optional*): Called when there is something new to see. The time that it takes
            is no part of `seconds`.
    """

    def __init__(
        self,
        mask_token_id: int | None,
        block_size: int,
        is_sequence_aligned: bool = False,
        block_activation_threshold: float = 0.95,
        is_verified: bool = False,
        changed: Callable[[], None] | None = None,
    ):
        self.mask_token_id = mask_token_id
        self.block_size = block_size
        self.is_sequence_aligned = is_sequence_aligned
        self.block_activation_threshold = block_activation_threshold
        self.is_verified = is_verified
        self.changed = changed
        self.prompt_length: int | None = None
        self.decoded: list[int] = []  # without a gap
        self.draft: list[int] = []
        self.trace: list[dict[str, Any]] = []
        self.confidence: dict[int, float] = {}  # by position in the response
        self.committed_length: int | None = None  # in response tokens
        self.num_forward_passes = 0
        self.is_finished = False
        self._start = time.perf_counter()
        self._end: float | None = None
        self._away = 0.0  # seconds in `changed`
        self._events: list[tuple[float, str, Any]] = []  # when what was told

    @classmethod
    def of(cls, model: Any, options: dict[str, Any] | None = None, changed: Callable[[], None] | None = None):
        """The one for `model.generate(**options)`, of a block-diffusion model or any other."""
        options, config = options or {}, model.generation_config
        values = {
            name: options.get(name, getattr(config, name, None))
            for name in ("decoding", "block_size", "block_activation_threshold")
        }
        is_block_diffusion = hasattr(model.config, "block_alignment")
        one_by_one = not is_block_diffusion or values["decoding"] in ("autoregressive", "verified")
        threshold = values["block_activation_threshold"]
        return cls(
            mask_token_id=getattr(model.config, "mask_token_id", None),
            block_size=1 if one_by_one else values["block_size"] or model.config.block_size,
            is_sequence_aligned=is_block_diffusion and not one_by_one and model.config.block_alignment == "sequence",
            block_activation_threshold=0.95 if threshold is None else threshold,
            is_verified=values["decoding"] == "verified",
            changed=changed,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens that are decoded without a gap."""
        return len(self.decoded)

    @property
    def seconds(self) -> float:
        """Time since `start`, until the end of the response, without what it took to draw."""
        return (time.perf_counter() if self._end is None else self._end) - self._start - self._away

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / max(self.seconds, 1e-9)

    @property
    def tokens_per_forward(self) -> float | None:
        """`None` where the forwards are not known."""
        return self.num_tokens / self.num_forward_passes if self.num_forward_passes else None

    def start(self) -> None:
        """The clock begins now."""
        self._start, self._end, self._away = time.perf_counter(), None, 0.0

    def at(self, seconds: float) -> "LiveResponse":
        """The response as it was so many seconds after the start."""
        then = LiveResponse(
            self.mask_token_id,
            self.block_size,
            self.is_sequence_aligned,
            self.block_activation_threshold,
            self.is_verified,
        )
        for when, what, value in self._events:
            if when <= seconds:
                getattr(then, what)(*value)
        then._start, then._end, then._away = 0.0, max(1e-9, min(seconds, self.seconds)), 0.0
        return then

    def put(self, value: torch.Tensor) -> None:
        """Takes decoded tokens; the first call has the prompt."""
        self._events.append((self.seconds, "put", (value,)))
        if self.prompt_length is None:
            self.prompt_length = value.shape[-1]
            return
        self.decoded += value.flatten().tolist()
        self.draft = self.draft[value.numel() :]
        if self.mask_token_id is None:  # an autoregressive model of transformers: one token, one forward
            self.num_forward_passes += 1
            self._show()

    def put_draft(self, value: torch.Tensor) -> None:
        """Takes what follows the decoded tokens up to the end of the last open block: tokens and mask tokens."""
        self._events.append((self.seconds, "put_draft", (value,)))
        self.draft = value.flatten().tolist()
        if self.num_forward_passes == 0:  # otherwise a trace follows
            self._show()

    def put_trace(self, value: dict[str, Any]) -> None:
        """Takes the entry of a forward in the trace, with `confidence`, behind what that forward made known."""
        self._events.append((self.seconds, "put_trace", (value,)))
        prompt_length = self.prompt_length or 0
        self.num_forward_passes += 1
        self.trace.append(value)
        # What the next forward finds in the cache is known only then, so a block is committed a forward late.
        self.committed_length = value["committed_length"] - prompt_length
        positions = [position - prompt_length for position, _ in value["accepted"]]
        self.confidence.update(zip(positions, value["confidence"], strict=True))
        if self.is_verified:
            self.draft = [token for _, token in value.get("drafted", ())]
        self._show()

    def end(self) -> None:
        """The response is whole."""
        self._end = time.perf_counter()
        self._events.append((self.seconds, "end", ()))
        self.is_finished, self.draft = True, []
        self._show()

    def _show(self) -> None:
        if self.changed is not None:
            before = time.perf_counter()
            self.changed()
            self._away += 0.0 if self.is_finished else time.perf_counter() - before

    def cells(self) -> Iterator[Cell]:
        """The tokens of the response as far as anything is known of them."""
        tokens = self.decoded + self.draft
        offset = (self.prompt_length or 0) % self.block_size if self.is_sequence_aligned else 0
        num_blocks = -(-(len(tokens) + offset) // self.block_size)
        masked = [0] * num_blocks
        for index, token in enumerate(tokens):
            masked[(index + offset) // self.block_size] += token == self.mask_token_id
        is_whole = True  # all before the block, and it itself
        states = []
        for block in range(num_blocks):
            ratio = 1.0 if block == 0 else 1 - masked[block - 1] / self.block_size
            is_whole &= masked[block] == 0
            end = (block + 1) * self.block_size - offset
            is_committed = is_whole if self.committed_length is None else end <= self.committed_length
            if is_committed or self.is_finished:
                states.append(COMMITTED)
            else:
                states.append(FULLY_ACTIVATED if ratio >= self.block_activation_threshold else SEMI_ACTIVATED)
        for index, token in enumerate(tokens):
            block, is_known = (index + offset) // self.block_size, index < len(self.decoded)
            state = (VERIFIED if is_known else DRAFT) if self.is_verified else states[block]
            is_masked = not is_known and token == self.mask_token_id
            yield Cell(token, is_masked, state, block, None if is_masked else self.confidence.get(index))

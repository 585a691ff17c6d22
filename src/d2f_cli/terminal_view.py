"""Draws a response in a terminal while it is decoded.

    Mia has 7 apples ░░░░░░ so she ░░░░
    ████████|██▓█▒███|██····█·|········          one sign per token: its confidence as a shade, · where it is masked
    2 committed  1 fully activated  1 semi-activated  0 waiting
    23 tokens  9 forwards  2.6 tokens/forward  512 tokens/s

Colours say the same as the line with the numbers of blocks, so nothing is lost without them.
"""

import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from d2f_hf.live_view import COMMITTED, DRAFT, FULLY_ACTIVATED, SEMI_ACTIVATED, VERIFIED, Cell, LiveResponse

# From Okabe and Ito's palette, which colour-blind people can tell apart; committed text is as all text is.
STYLES = {COMMITTED: "", FULLY_ACTIVATED: "#56B4E9", SEMI_ACTIVATED: "#E69F00", VERIFIED: "", DRAFT: "#E69F00"}
FRAMES_PER_SECOND = 20
QUIET_SECONDS = 0.5
REPLAY_SECONDS = 3.0
MOST_MAP_LINES = 6


class Signs:
    """What stands for a masked token, a boundary, and a token by its confidence, from low to high."""

    def __init__(self, encoding: str | None):
        try:
            "░▒▓█·".encode(encoding or "ascii")
            self.masked, self.hidden, self.shades = "·", "░", "░▒▓█"
        except (UnicodeEncodeError, LookupError):
            self.masked, self.hidden, self.shades = ".", "_", "-+*#"
        self.boundary = "|"

    def shade(self, confidence: float | None) -> str:
        """The shade of a token; one without a known confidence counts as sure."""
        return self.shades[-1] if confidence is None else self.shades[min(3, int(confidence * 4))]


class ResponseView:
    """A response as `rich` draws it, in whatever width there is and at most so many lines.

    Args:
        response (`LiveResponse`): What is drawn.
        tokenizer: Of its tokens.
        title (`str`, *optional*): Stands above it.
        max_lines (`int`, *optional*): Of the text the last so many lines are shown; those of the terminal by default.
    """

    def __init__(self, response: LiveResponse, tokenizer: Any, title: str | None = None, max_lines: int | None = None):
        self.response = response
        self.tokenizer = tokenizer
        self.title = title
        self.max_lines = max_lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        cells, signs = list(self.response.cells()), Signs(console.encoding)
        width = options.max_width
        below = [
            *self._map(cells, signs).wrap(console, width)[-MOST_MAP_LINES:],
            *self._figures(cells, console, width),
        ]
        height = self.max_lines or (console.size.height - len(below) - 3)
        lines = self._text(cells, signs).wrap(console, width)[-max(1, height) :]
        if self.title is not None:
            title = Text(self.title, style="bold")
            title.truncate(width, overflow="ellipsis")
            yield title
        yield from lines
        yield Segment.line()
        yield from below

    def _text(self, cells: Sequence[Cell], signs: Signs) -> Text:
        """The decoded text, with a sign for each masked token."""
        text = Text()
        special = set(self.tokenizer.all_special_ids)
        shown = (cell for cell in cells if cell.is_masked or cell.token not in special)
        # Tokens are decoded together as far as possible: one alone may be a part of a letter.
        for (state, is_masked), run in groupby(shown, key=lambda cell: (cell.state, cell.is_masked)):
            tokens = [cell.token for cell in run]
            piece = signs.hidden * len(tokens) if is_masked else self.tokenizer.decode(tokens)
            text.append(piece if text else piece.lstrip(), STYLES[state])
        text.rstrip()
        return text

    def _map(self, cells: Sequence[Cell], signs: Signs) -> Text:
        """One sign per token."""
        text, block = Text(overflow="fold"), 0
        has_blocks = self.response.block_size > 1
        for cell in cells:
            if cell.block != block and has_blocks:
                text.append(signs.boundary, "dim")
            block = cell.block
            text.append(signs.masked if cell.is_masked else signs.shade(cell.confidence), STYLES[cell.state])
        return text

    def _figures(self, cells: Sequence[Cell], console: Console, width: int) -> Iterator[Text]:
        """How many blocks are in which state, and how fast it goes."""
        response = self.response
        states = Text()
        if response.is_verified:
            counts = {state: sum(cell.state == state for cell in cells) for state in (VERIFIED, DRAFT)}
        elif response.block_size > 1:
            of_blocks = {cell.block: cell.state for cell in cells}
            counts = {
                state: list(of_blocks.values()).count(state) for state in (COMMITTED, FULLY_ACTIVATED, SEMI_ACTIVATED)
            }
        else:
            counts = {}
        for state, count in counts.items():
            states.append(f"{count} {state}", STYLES[state]).append("  ")
        speed = Text(speed_line(response))
        for line in (states, speed):
            line.rstrip()
            yield from line.wrap(console, width) if line.plain else ()


def speed_line(response: LiveResponse) -> str:
    """`23 tokens  9 forwards  2.6 tokens/forward  512 tokens/s`, without what is not known."""
    parts = [f"{response.num_tokens} tokens"]
    if response.tokens_per_forward is not None:
        parts += [f"{response.num_forward_passes} forwards", f"{response.tokens_per_forward:.1f} tokens/forward"]
    return "  ".join([*parts, f"{response.tokens_per_second:.0f} tokens/s"])


class LiveScreen:
    """Shows responses while they are decoded: `with LiveScreen(renderable, views, console) as screen: ...`.

    Drawing must not change the speed that is shown. So there are at most so many frames per second, and none before
    `QUIET_SECONDS`. Where everything was over by then, it is shown afterwards, slowed down.

    Args:
        renderable: What `rich` draws, with the views in it.
        views (`Sequence[ResponseView]`): The responses; `view.response.changed` has to be `refresh`.
        console (`Console`): A terminal.
    """

    def __init__(self, renderable: Any, views: Sequence[ResponseView], console: Console):
        self.views = views
        self._live = Live(renderable, console=console, auto_refresh=False, vertical_overflow="visible")
        self._start = self._drawn_at = time.perf_counter()
        self._was_drawn = False

    def __enter__(self) -> "LiveScreen":
        return self

    def __exit__(self, error_type: Any, *error) -> None:
        if error_type is None and not self._was_drawn:
            self._replay()
        if error_type is None or self._was_drawn:
            self._draw()
        self._live.stop()

    def refresh(self) -> None:
        """Draws what there is now, but not more often than an eye can see."""
        now = time.perf_counter()
        if now - self._start >= QUIET_SECONDS and now - self._drawn_at >= 1 / FRAMES_PER_SECOND:
            self._draw()

    def _draw(self) -> None:
        if not self._was_drawn:
            self._live.start()
        self._live.refresh()
        self._was_drawn, self._drawn_at = True, time.perf_counter()

    def _replay(self) -> None:
        """What happened, all of it at the same time, and slowed down."""
        responses = [view.response for view in self.views]
        whole = max(response.seconds for response in responses)
        num_frames = int(REPLAY_SECONDS * FRAMES_PER_SECOND)
        for frame in range(1, num_frames):
            for view, response in zip(self.views, responses, strict=True):
                view.response = response.at(whole * frame / num_frames)
            self._draw()
            time.sleep(1 / FRAMES_PER_SECOND)
        for view, response in zip(self.views, responses, strict=True):
            view.response = response


def can_be_drawn_on(console: Console) -> bool:
    """Whether a console is a terminal that can move its cursor."""
    return console.is_terminal and not console.is_dumb_terminal

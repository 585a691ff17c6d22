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
        below = [*self._map(cells, signs).wrap(console, width)[-MOST_MAP_LINES:], *self._figures(cells, width)]
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
            text.append(signs.hidden * len(tokens) if is_masked else self.tokenizer.decode(tokens), STYLES[state])
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

    def _figures(self, cells: Sequence[Cell], width: int) -> Iterator[Text]:
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
            line.truncate(width, overflow="ellipsis")
            if line.plain:
                yield line


def speed_line(response: LiveResponse) -> str:
    """`23 tokens  9 forwards  2.6 tokens/forward  512 tokens/s`, without what is not known."""
    parts = [f"{response.num_tokens} tokens"]
    if response.tokens_per_forward is not None:
        parts += [f"{response.num_forward_passes} forwards", f"{response.tokens_per_forward:.1f} tokens/forward"]
    return "  ".join([*parts, f"{response.tokens_per_second:.0f} tokens/s"])


class LiveScreen:
    """Shows something while it changes: `with LiveScreen(renderable) as screen: ... screen.refresh()`.

    Where the output is no terminal, or one that cannot move its cursor, the last state alone is printed.

    Args:
        renderable: What `rich` draws.
        console (`Console`): Where.
        pause (`float`): Seconds that each state stays. A small model is faster than the eye.
    """

    def __init__(self, renderable: Any, console: Console, pause: float = 0.0):
        self.pause = pause
        self.is_live = can_be_drawn_on(console)
        self._live = Live(renderable, console=console, auto_refresh=False, vertical_overflow="visible")
        self._drawn_at = 0.0

    def __enter__(self) -> "LiveScreen":
        self._live.start()
        return self

    def __exit__(self, *error) -> None:
        self._live.refresh()
        self._live.stop()

    def refresh(self) -> None:
        """Draws what there is now, but not more often than an eye can see."""
        if self.is_live and (self.pause or time.perf_counter() - self._drawn_at >= 1 / FRAMES_PER_SECOND):
            self._live.refresh()
            time.sleep(self.pause)
            self._drawn_at = time.perf_counter()


def can_be_drawn_on(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal

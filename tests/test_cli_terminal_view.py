"""How a response is drawn: in any width, with and without colours, and as plain text."""

import io
import re

import pytest
import torch
from rich.console import Console

from cli_runs import QUESTION, reference
from d2f_cli import terminal_view
from d2f_cli.answering import respond
from d2f_cli.terminal_view import LiveScreen, ResponseView, Signs, can_be_drawn_on, speed_line
from d2f_hf.live_view import LiveResponse
from tiny_models import EOS, LETTERS, MASK, letter_tokenizer


def half_way() -> LiveResponse:
    """abcd|ab__|_b__ where the last block is semi-activated; the confidences are known."""
    a, b, c, d = (LETTERS.index(letter) for letter in "abcd")
    response = LiveResponse(MASK, block_size=4)
    response.put(torch.tensor([[a]]))
    response.put(torch.tensor([a, b, c, d, a, b]))
    response.put_draft(torch.tensor([MASK, MASK, MASK, b, MASK, MASK]))
    accepted = [(1 + k, a) for k in (0, 1, 2, 3, 4, 5, 9)]
    confidence = [0.99, 0.6, 0.3, 0.1, 0.99, 0.99, 0.99]
    trace = {"window_start": 0, "window_length": 13, "committed_length": 5}
    response.put_trace({**trace, "accepted": accepted, "confidence": confidence})
    return response.at(1.0)  # whose clock stands still


def without_codes(text: str) -> str:
    return re.sub(r"\033\[[0-9;?]*[A-Za-z]", "", text)


def drawn(response: LiveResponse, tokenizer=None, width=80, encoding="utf-8", **options) -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=width, height=24, **options)
    console.print(ResponseView(response, tokenizer or letter_tokenizer(), "title"))
    file.flush()
    return file.buffer.getvalue().decode(encoding)


def test_what_is_drawn_without_colours():
    title, text, empty, shades, blocks, speed = drawn(half_way()).splitlines()
    assert (title, text.strip(), empty.strip()) == ("title", "abcdab░░░b░░", "")
    assert shades.strip() == "█▓▒░|██··|·█··"
    assert blocks.strip() == "1 committed  1 fully activated  1 semi-activated"
    assert speed.startswith("6 tokens  1 forwards  6.0 tokens/forward  ") and speed.strip().endswith("tokens/s")


def test_a_terminal_without_these_signs_gets_others():
    lines = drawn(half_way(), encoding="ascii").splitlines()
    assert lines[1].strip() == "abcdab___b__" and lines[3].strip() == "#*+-|##..|.#.."
    assert Signs(None).masked == Signs("no-such-encoding").masked == "."


def test_colours_say_what_the_signs_say(monkeypatch):
    response = half_way()
    colourful = drawn(response, force_terminal=True, color_system="truecolor")
    assert "\033[38;2;86;180;233m" in colourful and "\033[38;2;230;159;0m" in colourful
    plain = drawn(response)
    assert "\033" not in plain and without_codes(colourful) == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033[38" not in drawn(half_way(), force_terminal=True, color_system="truecolor")


@pytest.mark.parametrize("width", [20, 38, 80, 200])
def test_no_line_is_wider_than_the_terminal_and_no_token_is_lost(width):
    loaded = reference()
    _, response = respond(loaded, loaded.prompt(QUESTION), {})
    for share in (0.3, 0.7, 1.0):
        state = response.at(response.seconds * share)
        lines = drawn(state, loaded.tokenizer, width).splitlines()
        assert all(len(line) <= width for line in lines) and len(lines) <= 24
    assert lines[1][:1].strip(), "the text begins at the margin"
    words = " ".join(" ".join(lines).split())
    if width >= 80:
        assert loaded.text(response.decoded).split() == words.partition("█")[0].split()[1:]


def test_of_a_long_text_the_end_is_shown():
    response = LiveResponse(MASK, block_size=4)
    response.put(torch.tensor([[1]]))
    response.put(torch.tensor([LETTERS.index("a")] * 5000 + [LETTERS.index("z"), EOS]))
    response.end()
    lines = drawn(response, width=40).splitlines()
    assert len(lines) <= 24
    assert [line for line in lines if "z" in line]


def test_where_nothing_can_be_drawn_nothing_is():
    assert not can_be_drawn_on(Console(file=io.StringIO()))
    assert can_be_drawn_on(Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "xterm"}))
    assert not can_be_drawn_on(Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"}))


def test_the_speed_line_leaves_out_what_is_not_known():
    response = LiveResponse(MASK, block_size=4)
    response.put(torch.tensor([[1]]))
    assert "forward" not in speed_line(response)


def test_a_fast_answer_is_not_disturbed_but_shown_afterwards(monkeypatch):
    monkeypatch.setattr(terminal_view, "REPLAY_SECONDS", 0.2)
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, height=24, _environ={"TERM": "xterm"})
    loaded = reference()
    response = LiveResponse.of(loaded.model)
    view = ResponseView(response, loaded.tokenizer)
    monkeypatch.setattr(terminal_view, "QUIET_SECONDS", 1000.0)
    with LiveScreen(view, [view], console) as screen:
        response.changed = screen.refresh
        loaded.model.generate(
            loaded.prompt(QUESTION), streamer=response, return_dict_in_generate=True, output_trace=True
        )
        assert file.getvalue() == ""
    assert view.response is response
    assert "░" in file.getvalue(), "masked tokens were seen"
    assert "0 semi-activated" in without_codes(file.getvalue()).splitlines()[-2]


def test_a_slow_answer_is_drawn_while_it_is_decoded(monkeypatch):
    monkeypatch.setattr(terminal_view, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(terminal_view, "FRAMES_PER_SECOND", 1e9)
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, height=24, _environ={"TERM": "xterm"})
    view = ResponseView(half_way(), letter_tokenizer())
    monkeypatch.setattr(LiveScreen, "_replay", lambda self: pytest.fail("it was drawn already"))
    with LiveScreen(view, [view], console) as screen:
        screen.refresh()
        assert "abcdab" in without_codes(file.getvalue())


def test_what_fails_before_anything_is_drawn_draws_nothing():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, _environ={"TERM": "xterm"})
    view = ResponseView(half_way(), letter_tokenizer())
    with pytest.raises(ValueError), LiveScreen(view, [view], console):
        raise ValueError
    assert "abcd" not in without_codes(file.getvalue())

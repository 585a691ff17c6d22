"""Draws one question of the demo as an animated picture: D2F's blocks fill in above the autoregressive twin's tokens.

    python examples/reference_model/record_demo.py --output docs/demo.svg

Both models answer the question several times, taking turns, and note when each token is there. The picture shows the
run of median length of each, slowed down by one factor for both. A pale box is a masked token of an open block, which
later turns into the word that stands there. The SVG is animated by CSS alone. Where nothing moves, as in print, it
shows the end.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from d2f_hf.benchmarking import System, environment
from reference_models import D2F, HERE, MAX_NEW_TOKENS, TWIN, ReferenceModels, load
from word_problems import make_problems

WIDTH = 92  # characters of a line
CELL, LINE, FONT = 8.4, 22, 14  # pixels: width of a character, height of a line, size of the letters
MARGIN = 24
MASK_CELLS = 3  # width of a masked token that no word takes the place of
SHOWN_SECONDS, PAUSE_SECONDS = 10.0, 4.0  # of the slower one, and behind it
COLORS = {"ink": "#1f2328", "dim": "#59636e", "good": "#0a7040"}
MASK_COLOR, EDGE_COLOR, FRAME_COLOR = "#c8d3e0", "#8c96a3", "#d1d9e0"


class Recorder(BaseStreamer):
    """Notes the state of a response and the time whenever tokens of it are decoded.

    Attributes:
        frames (`list[tuple[float, list[int]]]`): Seconds since the recorder was made, and the tokens up to the last
            one that is decoded or shown as masked, mask tokens among them.
    """

    def __init__(self):
        self.start = time.perf_counter()
        self.frames: list[tuple[float, list[int]]] = []
        self.is_prompt = True
        self.decoded: list[int] = []  # without a gap

    def put(self, value: torch.Tensor) -> None:
        """Takes tokens that are decoded without a gap; the first call has the prompt."""
        if self.is_prompt:
            self.is_prompt = False
        else:
            self.decoded += value.flatten().tolist()
            self.put_draft(value[:0])

    def put_draft(self, value: torch.Tensor) -> None:
        """Takes what follows them."""
        self.frames.append((time.perf_counter() - self.start, self.decoded + value.flatten().tolist()))

    def end(self) -> None:
        pass


@dataclass(frozen=True)
class Run:
    """One recorded call of `generate`.

    Args:
        frames (`list[tuple[float, list[int]]]`): See [`Recorder`].
        response_ids (`list[int]`): The response.
        num_forward_passes (`int`): Forwards of the model.
        seconds (`float`): Wall time of the call.
        windows (`list[tuple[int, list[int]]]`): For each forward of D2F where its window ended, and which positions of
            the response it decoded. Empty for a model that decodes one token after the other.
    """

    frames: list[tuple[float, list[int]]]
    response_ids: list[int]
    num_forward_passes: int
    seconds: float
    windows: list[tuple[int, list[int]]]


@dataclass(frozen=True)
class Moments:
    """When a position of the response changed, in seconds: it was masked from `opened` to `decoded`.

    A position behind the end of the response (`is_response` is false) was masked until the end was decoded.
    """

    opened: float
    decoded: float
    is_response: bool = True


def moments(run: Run, mask_token_id: int) -> list[Moments]:
    """Those of each position that was decoded or open."""
    decoded: dict[int, float] = {}
    for seconds, ids in run.frames:
        for position, token in enumerate(ids):
            if token != mask_token_id:
                decoded.setdefault(position, seconds)
    length = len(run.response_ids)
    opened: list[float] = []
    done = 0.0  # when the forward before was
    for end, positions in run.windows:
        opened += [done] * (end - len(opened))
        done = min((decoded[position] for position in positions if position in decoded), default=done)
    if not opened:
        opened = [decoded[position] for position in range(length)]
    found = [Moments(opened[position], decoded[position]) for position in range(length)]
    return found + [Moments(start, found[-1].decoded, is_response=False) for start in opened[length:]]


def record(system: System, models: ReferenceModels, question: str) -> Run:
    """Answers the question once."""
    prompt = models.prompt(question)
    length = prompt["input_ids"].shape[1]
    recorder = Recorder()
    output = system.model.generate(**prompt, **system.options, streamer=recorder, return_dict_in_generate=True)
    seconds = time.perf_counter() - recorder.start
    response_ids = output.sequences[0, length:].tolist()
    trace = getattr(output, "trace", None)
    if trace is None:
        return Run(recorder.frames, response_ids, len(response_ids), seconds, [])
    ends = [step["window_start"] + step["window_length"] - length for step in trace[0]]
    accepted = [[position - length for position, _ in step["accepted"]] for step in trace[0]]
    windows = list(zip(ends, accepted, strict=True))
    return Run(recorder.frames, response_ids, int(output.num_forward_passes), seconds, windows)


def median_run(runs: Sequence[Run]) -> Run:
    """That of median length; of an even number the lower one."""
    return min(runs, key=lambda run: abs(run.seconds - statistics.median_low([run.seconds for run in runs])))


def layout(tokenizer: PreTrainedTokenizerBase, response_ids: Sequence[int]) -> list[tuple[int, int, str]]:
    """Line, column and text of each token; words are not broken, special tokens have no text."""
    pieces = ["" if t in tokenizer.all_special_ids else tokenizer.decode([t]) for t in response_ids]
    line, column, places = 0, 0, []
    for number, piece in enumerate(pieces):
        word = len(piece)  # and the pieces that go on with it
        for following in pieces[number + 1 :]:
            if not following or following[0] in " \n":
                break
            word += len(following)
        starts_word = number == 0 or not piece or piece[0] in " \n"
        if number == 0:
            piece = piece.lstrip()
        if piece.startswith("\n") or (starts_word and column + word > WIDTH) or column + len(piece) > WIDTH:
            line, column = line + 1, 0
            piece = piece.lstrip("\n ")
        places.append((line, column, piece))
        column += len(piece)
    return places


class Picture:
    """An SVG whose parts appear and disappear in a cycle; without animation it shows the end of it."""

    def __init__(self, slowdown: float, cycle: float):
        self.slowdown = slowdown
        self.cycle = cycle
        self.y = MARGIN + FONT
        self.parts: list[str] = []
        self.timings: dict[tuple[float, float | None], str] = {}

    def text(self, x: float, y: float, text: str, color: str = "ink", timing: str = "", **attributes) -> None:
        more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
        self.parts.append(f'<text x="{x:g}" y="{y:g}" fill="{COLORS[color]}"{more}{timing}>{escape(text)}</text>')

    def cells(self, line: int, column: int, text: str, timing: str) -> None:
        """Text in the grid of characters; spaces around it take their cells."""
        start = column + len(text) - len(text.lstrip())
        x, text = MARGIN + CELL * start, text.strip()
        self.text(x, self.y + LINE * line, text, timing=timing, textLength=f"{CELL * len(text):g}")

    def box(self, line: int, column: int, num_cells: int, timing: str) -> None:
        x, y = MARGIN + CELL * column + 2, self.y + LINE * line - FONT + 2
        size = f'width="{CELL * num_cells - 4:g}" height="{FONT}" rx="3"'
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" {size} fill="{MASK_COLOR}" opacity="0"{timing}/>')

    def edge(self, line: int, column: int, timing: str) -> None:
        """The boundary before a block."""
        x, y = MARGIN + CELL * column, self.y + LINE * line - FONT
        self.parts.append(f'<path d="M{x:g} {y:g}v{LINE - 4}" stroke="{EDGE_COLOR}" opacity="0"{timing}/>')

    def shown(self, start: float, end: float | None = None) -> str:
        """The attribute of what is there from `start` to `end` (the end of the cycle), in seconds of the run."""
        if start <= 0 and end is None:
            return ""
        return f' class="{self.timings.setdefault((start, end), f"t{len(self.timings)}")}"'

    def svg(self, height: float) -> str:
        rules = []
        for (start, end), name in self.timings.items():
            first, last = (100 * self.slowdown * (s or 0.0) / self.cycle for s in (start, end))
            frames = f"0%{{opacity:{int(start <= 0)}}}{first:.2f}%{{opacity:1}}"
            frames += "" if end is None else f"{last:.2f}%,100%{{opacity:0}}"
            rules.append(f"@keyframes {name}{{{frames}}}.{name}{{animation:{name} {self.cycle:g}s step-end infinite}}")
        width = WIDTH * CELL + 2 * MARGIN
        font = "ui-monospace,SFMono-Regular,Menlo,Consolas,'Liberation Mono',monospace"
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
                f'viewBox="0 0 {width:g} {height:g}" font-family="{font}" font-size="{FONT}">',
                f"<style>text{{white-space:pre}}{''.join(rules)}"
                "@media (prefers-reduced-motion:reduce){*{animation:none!important}}</style>",
                f'<rect x="0.5" y="0.5" width="{width - 1:g}" height="{height - 1:g}" rx="8" fill="#ffffff" '
                f'stroke="{FRAME_COLOR}"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


def draw(models: ReferenceModels, question: str, runs: dict[str, Run], hardware: str) -> str:
    """The picture of one run of each system.

    Args:
        models (`ReferenceModels`): Their tokenizer makes words of tokens; the student says the block size.
        question (`str`): What they answer.
        runs (`dict[str, Run]`): By the names of the systems. D2F is the first one.
        hardware (`str`): What they ran on.
    """
    slowest = max(run.seconds for run in runs.values())
    # A round number, so that everybody can calculate with it.
    slowdown = SHOWN_SECONDS / slowest
    digits = 10 ** math.floor(math.log10(slowdown))
    slowdown = max(1.0, round(slowdown / digits) * digits)
    picture = Picture(slowdown, slowdown * slowest + PAUSE_SECONDS)
    for number, line in enumerate(wrapped(question)):
        picture.text(MARGIN, picture.y + LINE * number, line, "dim")
    picture.y += LINE * (len(wrapped(question)) + 1)
    for name, run in runs.items():
        draw_run(picture, models, name, run)
    faster = runs[TWIN].seconds / runs[D2F].seconds
    size = round(models.student.num_parameters() / 1e6)
    dtype = str(models.student.dtype).removeprefix("torch.")
    paragraphs = [
        f"Here D2F is {faster:.1f} times as fast. Both have {size} million parameters and the same architecture; "
        f"{dtype}, batch size 1.",
        f"{hardware}. Shown " + (f"{slowdown:g} times slower than it was." if slowdown > 1 else "as fast as it was."),
    ]
    notes = [line for paragraph in paragraphs for line in wrapped(paragraph)]
    for number, note in enumerate(notes):
        picture.text(MARGIN, picture.y + LINE * number, note, "dim")
    return picture.svg(picture.y + LINE * (len(notes) - 1) + MARGIN)


def draw_run(picture: Picture, models: ReferenceModels, name: str, run: Run) -> None:
    """A heading with a counter, and below it the response; moves `picture.y` on."""
    mask, block_size = models.tokenizer.mask_token_id, models.student.config.block_size
    picture.text(MARGIN, picture.y, name, font_weight="bold")
    right = MARGIN + WIDTH * CELL
    for number, (seconds, ids) in enumerate(run.frames):
        following = run.frames[number + 1][0] if number + 1 < len(run.frames) else run.seconds
        count = sum(token != mask for token in ids[: len(run.response_ids)])
        counter = f"{count} tokens  {seconds:.3f} s"
        timing = picture.shown(seconds, following)
        picture.text(right, picture.y, counter, "dim", timing, text_anchor="end", opacity=0)
    rate = len(run.response_ids) / run.seconds
    length = f"{len(run.response_ids)} tokens in {run.seconds:.3f} s, {run.num_forward_passes} forwards"
    final = f"{length}: {rate:.0f} tokens/s"
    picture.text(right, picture.y, final, "good", picture.shown(run.seconds), text_anchor="end", font_weight="bold")
    picture.y += LINE * 1.2

    places = layout(models.tokenizer, run.response_ids)
    line = column = 0
    for position, moment in enumerate(moments(run, mask)):
        if moment.is_response:
            line, column, text = places[position]
            num_cells = max(1, len(text))
            if text.strip():
                picture.cells(line, column, text, picture.shown(moment.decoded))
        else:
            num_cells = MASK_CELLS
            if column + num_cells > WIDTH:
                line, column = line + 1, 0
        if moment.decoded > moment.opened:
            picture.box(line, column, num_cells, picture.shown(moment.opened, moment.decoded))
            if position and position % block_size == 0:
                picture.edge(line, column, picture.shown(moment.opened, run.seconds))
        column += num_cells
    picture.y += LINE * (max(line, places[-1][0]) + 2)


def wrapped(text: str) -> list[str]:
    """Lines of at most `WIDTH` characters."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > WIDTH:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=HERE.parents[1] / "docs" / "demo.svg")
    parser.add_argument("--question", help="a word problem of yours, instead of a built-in one")
    parser.add_argument("--runs", type=int, default=9, help="of each system; the picture shows those of median length")
    parser.add_argument("--max-new-tokens", type=int, default=MAX_NEW_TOKENS, help="limit of a response")
    parser.add_argument("--models", type=Path, default=HERE, help="folder of the models")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of both models")
    args = parser.parse_args(arguments)
    for name in ("runs", "max_new_tokens"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}: give more")
    if args.question is not None and not args.question.strip():
        parser.error("--question must not be empty. Leave it out for the built-in problem.")
    logging.disable_progress_bar()
    try:
        models = load(args.models, args.dtype)
    except FileNotFoundError as error:
        sys.exit(str(error))
    question = args.question or make_problems("test", 4, seed=1)[3].question
    systems = models.systems(args.max_new_tokens)
    systems[D2F].options["output_trace"] = True
    runs: dict[str, list[Run]] = {D2F: [], TWIN: []}
    for number in range(args.runs + 1):
        for name in runs:
            run = record(systems[name], models, question)
            if number > 0:  # the first one warms up
                runs[name].append(run)
    shown = {name: median_run(of_system) for name, of_system in runs.items()}
    args.output.write_text(draw(models, question, shown, environment(models.student)["hardware"]))
    for name, run in shown.items():
        rate = len(run.response_ids) / run.seconds
        print(f"{name}: {len(run.response_ids)} tokens in {run.seconds:.3f} s, {rate:.0f} tokens/s")
    print(f"Wrote {args.output}.")


if __name__ == "__main__":
    main()

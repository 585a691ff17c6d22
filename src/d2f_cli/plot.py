"""`d2f plot`: the score-speed curve of a report of `d2f bench`, and the block timeline of a trace, as PNG or SVG."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from d2f_cli import console
from d2f_cli.console import Debug, Json

EXAMPLE = "d2f plot report.json --output curve.svg"
# Okabe and Ito's palette, which colour-blind people can tell apart; lines differ in their markers too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "os^Dv*X"
# Of the timeline, from light to dark, so that they differ in grey too.
STATES = {
    "masked": "#F0E442",
    "accepted now": "#D55E00",
    "decoded": "#56B4E9",
    "committed": "#0072B2",
    "draft": "#CC79A7",
}
FORMATS = (".png", ".svg")


@console.ends_well
def plot(
    *,
    file: Annotated[Path, typer.Argument(help="Report of `d2f bench --output`, or trace of `d2f generate --trace`.")],
    output: Annotated[list[Path], typer.Option(help="Picture, .png or .svg. Can be given several times.")],
    x: Annotated[
        Literal["tokens_per_second", "tokens_per_forward"], typer.Option(help="Speed of the curve.")
    ] = "tokens_per_second",
    title: Annotated[str | None, typer.Option(help="Stands above the picture.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Draws a report or a trace."""
    for path in output:
        if path.suffix.lower() not in FORMATS:
            raise console.wrong_call(f"--output must end in one of {FORMATS}, got {path}.")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"FILE must be JSON, but {file} is not: {error}") from error
    is_object = isinstance(content, dict)
    if is_object and "trace" in content:
        kind, figure = "timeline", timeline(content)
    elif is_object and (rows := content.get("rows") or content.get("curve")):
        kind, figure = "curve", curve(rows, x)
    else:
        raise ValueError(f"FILE must be a report of `d2f bench` or a trace of `d2f generate`, but {file} is neither.")
    if title is not None:
        figure.axes[0].set_title(title)
    from matplotlib import rc_context

    for path in output:
        # Without a date and with ids that do not change, the same file gives the same picture.
        with rc_context({"svg.hashsalt": "d2f", "svg.fonttype": "none"}):
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    if as_json:
        console.print_json({"kind": kind, "output": [str(path) for path in output]})
    else:
        for path in output:
            print(path)


def curve(rows: Sequence[dict[str, Any]], x: str) -> Any:
    """Score over speed: a point per row, a line per model, sampler or block size."""
    from matplotlib.figure import Figure

    lines: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row.get("score") is None or row.get(x) is None:
            raise ValueError(
                f'FILE must have a score and `{x}` in each row: give an "answer" with each prompt, or --x.'
            )
        name = row.get("sampler") or row.get("model")
        if "block_size" in row and "sampler" not in row:
            name = f"block size {row['block_size']}"
        lines.setdefault(str(name), []).append(row)
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for number, (name, points) in enumerate(lines.items()):
        points = sorted(points, key=lambda row: row[x])
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        axes.plot([p[x] for p in points], [p["score"] for p in points], color=colour, marker=marker, label=name)
        for point in points:
            text = point.get("label") or point.get("confidence_threshold")
            if text not in (None, name):
                text = str(text).replace("confidence_threshold=", "")
                axes.annotate(text, (point[x], point["score"]), (4, 4), textcoords="offset points", fontsize=7)
    axes.set_xlabel(x.replace("_", " "))
    axes.set_ylabel("right answers, %")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def timeline_states(content: dict[str, Any]) -> list[list[str | None]]:
    """By forward and position of the response: the state of the token, or nothing where no block is open."""
    prompt_length, states = content["prompt_length"], []
    length = content["num_tokens"]
    accepted: set[int] = set()
    for step in content["trace"]:
        end = step["window_start"] + step["window_length"] - prompt_length
        now = {position - prompt_length for position, _ in step["accepted"]}
        accepted = (accepted | now) - {position - prompt_length for position in step.get("remasked", ())}
        drafted = {position - prompt_length for position, _ in step.get("drafted", ())}
        committed_length = step["committed_length"] - prompt_length
        row: list[str | None] = []
        for index in range(length):
            if index in now:
                row.append("accepted now")
            elif index in accepted:
                row.append("committed" if index < committed_length else "decoded")
            elif index in drafted:
                row.append("draft")
            else:
                row.append("masked" if index < end else None)
        states.append(row)
    return states


def timeline(content: dict[str, Any]) -> Any:
    """Which tokens each forward had open, and which it accepted: forwards from left to right, tokens upwards."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    states, names = timeline_states(content), list(STATES)
    numbers = [[float("nan") if state is None else names.index(state) for state in row] for row in states]
    length, block_size = content["num_tokens"], content["block_size"]
    figure = Figure(figsize=(6.4, 4.8), layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(
        list(zip(*numbers, strict=True)),
        cmap=ListedColormap(list(STATES.values())),
        vmin=-0.5,
        vmax=len(names) - 0.5,
        aspect="auto",
        origin="lower",
        interpolation="nearest",
        extent=(0.5, len(states) + 0.5, 0, length),
    )
    offset = content["prompt_length"] % block_size if content.get("is_sequence_aligned") else 0
    if block_size > 1:
        for boundary in range(block_size - offset, length, block_size):
            axes.axhline(boundary, color="white", linewidth=0.8)
    seen = {state for row in states for state in row}
    axes.legend(
        handles=[Patch(facecolor=STATES[name], label=name) for name in names if name in seen],
        loc="upper left",
        fontsize=8,
    )
    axes.set_xlabel("forward")
    axes.set_ylabel("token of the response")
    return figure

"""How a benchmark states what it measured: figures with their targets, tables, and a report that ends with JSON.

    python -m benchmarks.figures run0.json run1.json run2.json

prints the reports of several runs as Markdown tables: the median of each figure, and between which values it lies.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from d2f_hf.benchmarking import environment

ENGINE = "engine: "  # what the names of the decoding engine's figures begin with


@dataclass(frozen=True)
class Figure:
    """A measured value and its target.

    Args:
        name (`str`): What was measured, with the unit.
        value (`float`): The value.
        target (`float`, *optional*): What the value has to reach; nothing for a value that is for information.
        at_most (`bool`): The value must not exceed the target; otherwise it must not fall below it.
    """

    name: str
    value: float
    target: float | None = None
    at_most: bool = False

    @property
    def met(self) -> bool | None:
        """Whether the value reaches the target; `None` without one."""
        if self.target is None:
            return None
        return self.value <= self.target if self.at_most else self.value >= self.target

    def as_dict(self) -> dict[str, Any]:
        """`{"name", "value", "target", "at_most", "met"}` for a report; the value has four decimal places."""
        return {
            "name": self.name,
            "value": round(self.value, 4),
            "target": self.target,
            "at_most": self.at_most,
            "met": self.met,
        }


def figures_in(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The figures of a report as [`Figure.as_dict`] gives them, whether or not the report is from before its words.

    Older reports say `bar` for the target and `holds` for met, and have a list `at_most` of names beside the figures.
    """
    figures = []
    for figure in report["figures"]:
        if "bar" in figure:
            figure = {
                "name": figure["name"],
                "value": figure["value"],
                "target": figure["bar"],
                "at_most": figure["name"] in report.get("at_most", ()),
                "met": figure["holds"],
            }
        figures.append(figure)
    return figures


def table(rows: Sequence[Sequence[str]], num_left: int = 1) -> str:
    """Rows of cells as a table for people: the first `num_left` columns at the left, the others at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            f"{cell:{'<' if number < num_left else '>'}{width}}"
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def figure_table(figures: Sequence[Figure]) -> str:
    """The figures as a table for people, one a line, with the target beside each."""
    rows = [["", "value", "target", "met"]]
    for figure in figures:
        met = {None: "", True: "yes", False: "NO"}[figure.met]
        rows.append([figure.name, f"{figure.value:.3f}", _target(figure.target, figure.at_most), met])
    return table(rows)


def markdown_table(reports: Sequence[dict[str, Any]], of_engine: bool = False) -> str:
    """The figures of several runs: their median, and between which values they lie.

    Those of the reference models, or those of the decoding engine, which `benchmarks.decoding --targets` adds to them;
    reports without the engine's are left out then.
    """
    lines = ["| | median | lowest to highest | target | met |", "| --- | --- | --- | --- | --- |"]
    wanted = [[f for f in figures_in(report) if f["name"].startswith(ENGINE) == of_engine] for report in reports]
    for figures in zip(*filter(None, wanted), strict=True):
        first, values = figures[0], [figure["value"] for figure in figures]
        met = ""
        if first["target"] is not None:
            met = "yes" if all(figure["met"] for figure in figures) else "no"
        spread = f"{min(values):.2f} to {max(values):.2f}"
        target = _target(first["target"], first["at_most"])
        lines.append(f"| {first['name']} | {statistics.median(values):.2f} | {spread} | {target} | {met} |")
    return "\n".join(lines)


def _target(target: float | None, at_most: bool) -> str:
    return "" if target is None else f"{'<=' if at_most else '>='} {target:g}"


def write_report(
    report: dict[str, Any],
    module: str,
    arguments: Sequence[str] | None,
    model: Any,
    start: float,
    path: Path | None = None,
    **settings,
) -> None:
    """Ends a benchmark: prints its figures, what they depend on and, as the last line on stdout, one JSON object.

    Args:
        report (`dict`): What was measured. Under `"figures"` it may hold a list of [`Figure`].
        module (`str`): The `__name__` of the file in `benchmarks/`, without the package.
        arguments (`Sequence[str]`, *optional*): Of the command line; by default those of this process.
        model (`PreTrainedModel`): Says the device and the dtype.
        start (`float`): `time.perf_counter()` at the start of the benchmark.
        path (`Path`, *optional*): A file that gets the JSON object too, indented.
        settings: More of what the figures depend on, such as the number of problems.
    """
    figures = report.get("figures", [])
    if figures:
        print(figure_table(figures))
        report = {**report, "figures": [figure.as_dict() for figure in figures]}
    arguments = sys.argv[1:] if arguments is None else arguments
    of_run = {
        **environment(model, repository=ROOT),
        **settings,
        "minutes": round((time.perf_counter() - start) / 60, 1),
        "command": " ".join(["python -m", f"benchmarks.{module}", *arguments]),
    }
    print("\n" + "\n".join(f"{name}: {value}" for name, value in of_run.items()) + "\n")
    report = {**report, "environment": of_run}
    if path is not None:
        path.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))


def progress(what: str) -> Callable[[int, int], None]:
    """Reports on stderr, about every five seconds."""
    last = time.perf_counter()

    def report(done: int, total: int) -> None:
        nonlocal last
        if done == total or time.perf_counter() - last > 5:
            last = time.perf_counter()
            print(f"{what}: {done}/{total}", file=sys.stderr)

    return report


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Prints reports of some runs as Markdown tables.")
    parser.add_argument("reports", type=Path, nargs="+", help="files that --report wrote")
    args = parser.parse_args(arguments)
    reports = [json.loads(path.read_text()) for path in args.reports]
    print(markdown_table(reports))
    if any(figure["name"].startswith(ENGINE) for figure in reports[0]["figures"]):
        print("\n" + markdown_table(reports, of_engine=True))


if __name__ == "__main__":
    main()

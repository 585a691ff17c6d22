"""Draws the D2F student's score against its speed: curve.csv and curve.png, one point per block size and threshold.

    python -m benchmarks.curve --problems 200                    # into examples/reference_model
    python -m benchmarks.curve --problems 200 --output folder

The student answers test problems one by one. All thresholds of a block size take turns. Prints as its last line on
stdout one JSON object `{"curve": [...], "environment": {...}}`.
"""

import argparse
import csv
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as Drawing
from transformers.utils import logging

from benchmarks.figures import progress, write_report
from benchmarks.reference import load_models, score
from d2f_hf.benchmarking import System, measure, summarize
from reference_models import HERE, MAX_NEW_TOKENS, ReferenceModels
from word_problems import make_problems

THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
BLOCK_SIZES = (8, 16, 32)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--problems", type=int, default=500, help="test problems")
    parser.add_argument("--seed", type=int, default=0, help="of the problems")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the model")
    parser.add_argument("--models", type=Path, default=HERE, help="folder of the models")
    parser.add_argument("--output", type=Path, default=HERE, help="folder that gets curve.csv and curve.png")
    args = parser.parse_args(arguments)
    if args.problems < 1:
        parser.error(f"--problems must be at least 1, got {args.problems}: give more")
    logging.disable_progress_bar()
    start = time.perf_counter()
    models = load_models(args.models, args.dtype)
    points = measure_curve(models, args.problems, args.seed)
    args.output.mkdir(parents=True, exist_ok=True)
    with (args.output / "curve.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(points[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(points)
    draw(points, args.output / "curve.png")
    settings = {"batch_size": 1, "problems": args.problems, "seed": args.seed}
    write_report({"curve": points}, "curve", arguments, models.student, start, **settings)


def measure_curve(models: ReferenceModels, num_problems: int, seed: int) -> list[dict[str, Any]]:
    """The points: block size, threshold, score, tokens per forward and per second."""
    problems = make_problems("test", num_problems, seed)
    prompts = [models.prompt(problem.question) for problem in problems]
    points = []
    for block_size in BLOCK_SIZES:
        options = {"max_new_tokens": MAX_NEW_TOKENS, "block_size": block_size}
        systems = {
            str(threshold): System(models.student, {**options, "confidence_threshold": threshold})
            for threshold in THRESHOLDS
        }
        for name, measurements in measure(systems, prompts, progress=progress(f"block size {block_size}")).items():
            summary = summarize(measurements)
            points.append(
                {
                    "block_size": block_size,
                    "confidence_threshold": float(name),
                    "score": round(score([models.text(m.response_ids) for m in measurements], problems), 2),
                    "tokens_per_forward": round(summary.tokens_per_forward, 3),
                    "tokens_per_second": round(summary.tokens_per_second, 1),
                }
            )
    return points


def draw(points: Sequence[dict[str, Any]], path: Path) -> None:
    """One line per block size, over tokens per forward and over tokens per second."""
    drawing = Drawing(figsize=(10, 4), layout="constrained")
    axes = drawing.subplots(1, 2, sharey=True)
    for axis, key in zip(axes, ("tokens_per_forward", "tokens_per_second"), strict=True):
        for block_size in dict.fromkeys(point["block_size"] for point in points):
            own = [point for point in points if point["block_size"] == block_size]
            axis.plot([p[key] for p in own], [p["score"] for p in own], marker="o", label=f"block size {block_size}")
            for point in own:
                axis.annotate(
                    f"{point['confidence_threshold']:g}",
                    (point[key], point["score"]),
                    xytext=(4, 4),
                    textcoords="offset points",
                    fontsize=7,
                )
        axis.set_xlabel(key.replace("_", " "))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("problems answered right, %")
    axes[0].legend(title="labels: confidence threshold")
    drawing.savefig(path, dpi=150)


if __name__ == "__main__":
    main()

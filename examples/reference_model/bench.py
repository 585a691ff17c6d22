"""Measures the reference model: scores, tokens per forward, and speed against its twin and the vanilla sampler.

    python examples/reference_model/bench.py --report report.json

A score is the share of test problems whose final number is right. The D2F student and the autoregressive twin answer
all problems one by one, taking turns; these answers are scored, and their tokens and times make the speeds. The
teacher's vanilla sampler is slow: its score is of batches, with a response length that just holds every solution, and
its speed of a subset, taking turns with D2F at response length 256. All models run in the same dtype, that of
the weights unless told otherwise; for information the twin is also timed in float32.

Prints a table, and as its last line on stdout one JSON object
`{"figures": [{"name", "value", "bar", "holds"}], "environment": {...}}`.

Other runs, the first two with a JSON object of their own:

    python examples/reference_model/bench.py --search    # the teacher's best block size, on validation problems
    python examples/reference_model/bench.py --curve     # score against speed: curve.csv and curve.png
    python examples/reference_model/bench.py --table run0.json run1.json run2.json   # the README's tables
"""

import argparse
import copy
import csv
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers.utils import logging

from reference_models import HERE, TEACHER_BLOCK_SIZE, ReferenceModels, load
from word_problems import Problem, final_number, make_problems

MAX_NEW_TOKENS = 256
SCORING_LENGTH = 112  # the longest solution has 105 tokens, its EOS included
SCORING_BATCH_SIZE = 32
SEARCHED_BLOCK_SIZES = (1, 2, 4, 8, 16)
CURVE_THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
CURVE_BLOCK_SIZES = (8, 16, 32)
ENGINE = "engine: "  # what the names of the decode engine's figures begin with


@dataclass(frozen=True)
class Figure:
    """A measured value, and the least it has to be (`None`: for information)."""

    name: str
    value: float
    bar: float | None = None

    @property
    def holds(self) -> bool | None:
        return None if self.bar is None else self.value >= self.bar

    def as_dict(self) -> dict:
        return {"name": self.name, "value": round(self.value, 4), "bar": self.bar, "holds": self.holds}


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    if args.table is not None:
        reports = [json.loads(path.read_text()) for path in args.table]
        print(markdown_table(reports))
        if any(figure["name"].startswith(ENGINE) for figure in reports[0]["figures"]):
            print("\n" + markdown_table(reports, of_engine=True))
        return
    logging.disable_progress_bar()
    try:
        models = load(args.models, args.dtype)
    except FileNotFoundError as error:
        sys.exit(str(error))
    # Not before the models are loaded: they would then be of d2f_hf's classes, not of those in the exported folder.
    from d2f_hf.benchmarking import environment

    start = time.perf_counter()
    if args.search:
        report = search(models, args)
    elif args.curve:
        report = curve(models, args)
    else:
        figures = benchmark(models, args)
        print_table(figures)
        report = {"figures": [figure.as_dict() for figure in figures]}
    report["environment"] = {
        **environment(models.student, repository=HERE),
        "batch_size": 1,
        "teacher_scoring": {"batch_size": SCORING_BATCH_SIZE, "max_new_tokens": SCORING_LENGTH},
        "problems": args.problems,
        "slow_problems": args.slow_problems,
        "seed": args.seed,
        "teacher_block_size": args.teacher_block_size,
        "minutes": round((time.perf_counter() - start) / 60, 1),
        "command": " ".join(["bench.py", *(sys.argv[1:] if arguments is None else arguments)]),
    }
    if args.report is not None:
        args.report.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--problems", type=int, default=500, help="test problems (validation problems for --search)")
    parser.add_argument("--slow-problems", type=int, default=50, help="those of them that time the vanilla sampler")
    parser.add_argument("--seed", type=int, default=0, help="of the problems")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of all models")
    parser.add_argument("--teacher-block-size", type=int, default=TEACHER_BLOCK_SIZE, help="of the vanilla sampler")
    parser.add_argument("--models", type=Path, default=HERE, help="folder of the models")
    parser.add_argument("--report", type=Path, help="file that gets the JSON object too")
    parser.add_argument("--search", action="store_true", help="only score the teacher with several block sizes")
    parser.add_argument("--curve", type=Path, nargs="?", const=HERE, help="only write curve.csv and .png here")
    parser.add_argument("--table", type=Path, nargs="+", help="only print reports of some runs as Markdown tables")
    args = parser.parse_args(arguments)
    if args.problems < 1 or args.slow_problems < 1:
        parser.error(f"--problems and --slow-problems must be at least 1: {args.problems}, {args.slow_problems}")
    args.slow_problems = min(args.slow_problems, args.problems)
    return args


def benchmark(models: ReferenceModels, args: argparse.Namespace) -> list[Figure]:
    """All figures of the table."""
    from d2f_hf.benchmarking import System, measure, speed_up, summarize

    problems = make_problems("test", args.problems, args.seed)
    prompts = [models.prompt(problem.question) for problem in problems]
    d2f = System(models.student, {"max_new_tokens": MAX_NEW_TOKENS})
    twin = System(models.twin, {"max_new_tokens": MAX_NEW_TOKENS, "do_sample": False, "use_cache": True})
    vanilla = System(models.teacher, vanilla_options(MAX_NEW_TOKENS, args.teacher_block_size))

    fast = measure({"d2f": d2f, "twin": twin}, prompts, warm_up=3, progress=progress("D2F and twin"))
    scores = {
        name: score([models.text(m.response_ids) for m in of_system], problems) for name, of_system in fast.items()
    }
    scores["teacher"] = score(teacher_answers(models, problems, args.teacher_block_size), problems)
    some = prompts[: args.slow_problems]
    # No warm-up: student and teacher have both been at work.
    slow = measure({"d2f": d2f, "vanilla": vanilla}, some, warm_up=0, progress=progress("D2F and vanilla"))
    # On some processors a model that gets one token at a time is faster in float32.
    twin_float32 = System(copy.deepcopy(models.twin).float(), twin.options)
    other = measure({"d2f": d2f, "twin": twin_float32}, some, progress=progress("D2F and float32 twin"))

    over_twin = speed_up(fast["d2f"], fast["twin"])
    over_vanilla = speed_up(slow["d2f"], slow["vanilla"])
    over_twin_float32 = speed_up(other["d2f"], other["twin"])
    summary = {name: summarize(of_system) for name, of_system in {**slow, **fast}.items()}
    return [
        Figure("twin score, %", scores["twin"], 90.0),
        Figure("teacher score, % (vanilla, one token per step)", scores["teacher"], 90.0),
        Figure("D2F student score, %", scores["d2f"]),
        Figure("D2F student score less teacher score, points", scores["d2f"] - scores["teacher"], -2.0),
        Figure("D2F tokens per forward", summary["d2f"].tokens_per_forward, 4.0),
        Figure("D2F tokens/s over twin tokens/s", over_twin.of_totals, 2.5),
        Figure("D2F tokens/s over twin tokens/s, median over problems", over_twin.median, 2.5),
        Figure("D2F tokens/s over tokens/s of the twin in float32", over_twin_float32.of_totals),
        Figure("D2F tokens/s over vanilla tokens/s at length 256", over_vanilla.of_totals, 20.0),
        Figure("D2F tokens/s over vanilla tokens/s, median over problems", over_vanilla.median, 20.0),
        Figure("D2F tokens/s", summary["d2f"].tokens_per_second),
        Figure("twin tokens/s", summary["twin"].tokens_per_second),
        Figure("vanilla tokens/s at length 256", summary["vanilla"].tokens_per_second),
        Figure("D2F latency, median s", summary["d2f"].latency),
        Figure("twin latency, median s", summary["twin"].latency),
        Figure("vanilla latency at length 256, median s", summary["vanilla"].latency),
    ]


def vanilla_options(length: int, block_size: int) -> dict:
    """The original sampler, one token per step, for responses of `length` tokens."""
    return {"decoding": "vanilla", "max_new_tokens": length, "block_size": block_size}


def score(answers: Sequence[str], problems: Sequence[Problem]) -> float:
    """Percentage of answers whose final number is right."""
    right = [final_number(answer) == problem.answer for answer, problem in zip(answers, problems, strict=True)]
    return 100 * sum(right) / len(right)


def teacher_answers(models: ReferenceModels, problems: Sequence[Problem], block_size: int) -> list[str]:
    """What the vanilla sampler answers, in batches."""
    answers = []
    report = progress(f"teacher, block size {block_size}")
    for first in range(0, len(problems), SCORING_BATCH_SIZE):
        batch = problems[first : first + SCORING_BATCH_SIZE]
        inputs = models.tokenizer.apply_chat_template(
            [problem.messages[:1] for problem in batch],
            add_generation_prompt=True,
            padding=True,
            return_dict=True,
            return_tensors="pt",
        )
        sequences = models.teacher.generate(**inputs, **vanilla_options(SCORING_LENGTH, block_size))
        answers += [models.text(row) for row in sequences[:, inputs["input_ids"].shape[1] :].tolist()]
        report(len(answers), len(problems))
    return answers


def search(models: ReferenceModels, args: argparse.Namespace) -> dict:
    """Scores the teacher with several block sizes on validation problems, for TEACHER_BLOCK_SIZE."""
    problems = make_problems("validation", args.problems, args.seed)
    scores = {size: score(teacher_answers(models, problems, size), problems) for size in SEARCHED_BLOCK_SIZES}
    print("block size  teacher score, %")
    for size, value in scores.items():
        print(f"{size:10}  {value:.1f}")
    return {"teacher_scores": scores, "best_block_size": max(scores, key=scores.__getitem__)}


def curve(models: ReferenceModels, args: argparse.Namespace) -> dict:
    """D2F's score against its tokens per forward and tokens/s, as curve.csv and curve.png."""
    from d2f_hf.benchmarking import System, measure, summarize

    problems = make_problems("test", args.problems, args.seed)
    prompts = [models.prompt(problem.question) for problem in problems]
    points = []
    for block_size in CURVE_BLOCK_SIZES:
        # All thresholds take turns, as all systems of a comparison do.
        systems = {
            str(threshold): System(
                models.student,
                {"max_new_tokens": MAX_NEW_TOKENS, "block_size": block_size, "confidence_threshold": threshold},
            )
            for threshold in CURVE_THRESHOLDS
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
    args.curve.mkdir(parents=True, exist_ok=True)
    with (args.curve / "curve.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(points[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(points)
    draw_curve(points, args.curve / "curve.png")
    return {"curve": points}


def draw_curve(points: Sequence[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for axis, key in zip(axes, ("tokens_per_forward", "tokens_per_second"), strict=True):
        for block_size in CURVE_BLOCK_SIZES:
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
    figure.savefig(path, dpi=150)


def print_table(figures: Sequence[Figure]) -> None:
    width = max(len(figure.name) for figure in figures)
    print(f"{'':{width}}  {'value':>9}  {'bar':>6}  holds")
    for figure in figures:
        bar = "" if figure.bar is None else f"{figure.bar:g}"
        holds = {None: "", True: "yes", False: "NO"}[figure.holds]
        print(f"{figure.name:{width}}  {figure.value:9.2f}  {bar:>6}  {holds}")


def markdown_table(reports: Sequence[dict], of_engine: bool = False) -> str:
    """The figures of several runs: their median, and between which values they lie.

    Those of the reference model, or those of the decode engine, which `benchmark_decoding.py --bars` adds to them;
    reports without the latter are left out then.
    """
    lines = ["| | median | lowest to highest | bar | holds |", "| --- | --- | --- | --- | --- |"]
    wanted = [[f for f in report["figures"] if f["name"].startswith(ENGINE) == of_engine] for report in reports]
    at_most = {name for report in reports for name in report.get("at_most", ())}
    for figures in zip(*filter(None, wanted), strict=True):
        values = [figure["value"] for figure in figures]
        first = figures[0]
        holds, bar = "", ""
        if first["bar"] is not None:
            holds = "yes" if all(figure["holds"] for figure in figures) else "no"
            bar = f"{'<=' if first['name'] in at_most else '>='} {first['bar']:g}"
        spread = f"{min(values):.2f} to {max(values):.2f}"
        lines.append(f"| {first['name']} | {statistics.median(values):.2f} | {spread} | {bar} | {holds} |")
    return "\n".join(lines)


def progress(what: str) -> Callable[[int, int], None]:
    """Reports on stderr, about every five seconds."""
    last = time.perf_counter()

    def report(done: int, total: int) -> None:
        nonlocal last
        if done == total or time.perf_counter() - last > 5:
            last = time.perf_counter()
            print(f"{what}: {done}/{total}", file=sys.stderr)

    return report


if __name__ == "__main__":
    main()

"""Measures the reference models: scores, tokens per forward, and speed against the twin and the vanilla sampler.

    python -m benchmarks.reference --report report.json

A score is the share of test problems whose final number is right. The D2F student and the autoregressive twin answer
all problems one by one, taking turns; these answers are scored, and their tokens and times make the speeds. The
teacher's vanilla sampler is slow: its score is of batches, with a response length that just holds every solution, and
its speed of a subset, taking turns with D2F at response length 256. All models run in the same dtype, that of
the weights unless told otherwise; for information the twin is also timed in float32.

    python -m benchmarks.reference --search --problems 64    # the teacher's best block size, on validation problems

Prints a table, and as its last line on stdout one JSON object
`{"figures": [{"name", "value", "target", "at_most", "met"}], "environment": {...}}`.
"""

import argparse
import copy
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers.utils import logging

from benchmarks.figures import Figure, progress, table, write_report
from d2f_hf.benchmarking import System, answer_in_batches, measure, speed_up, summarize
from reference_models import D2F, HERE, TEACHER_BLOCK_SIZE, TWIN, VANILLA, ReferenceModels, load
from word_problems import Problem, final_number, make_problems

SCORING_LENGTH = 112  # the longest solution has 105 tokens, its EOS included
SCORING_BATCH_SIZE = 32
SEARCHED_BLOCK_SIZES = (1, 2, 4, 8, 16)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    logging.disable_progress_bar()
    start = time.perf_counter()
    models = load_models(args.models, args.dtype)
    if args.search:
        report = search(models, args.problems, args.seed)
    else:
        report = {
            "figures": reference_figures(models, args.problems, args.slow_problems, args.seed, args.teacher_block_size)
        }
    write_report(
        report,
        "reference",
        arguments,
        models.student,
        start,
        args.report,
        batch_size=1,
        teacher_scoring={"batch_size": SCORING_BATCH_SIZE, "max_new_tokens": SCORING_LENGTH},
        problems=args.problems,
        slow_problems=args.slow_problems,
        seed=args.seed,
        teacher_block_size=args.teacher_block_size,
    )


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
    args = parser.parse_args(arguments)
    for name in ("problems", "slow_problems", "teacher_block_size"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}: give more")
    args.slow_problems = min(args.slow_problems, args.problems)
    return args


def load_models(folder: Path, dtype: str, device: str = "cpu") -> ReferenceModels:
    """The reference models in a folder, on a device; ends the script if one of them is not there."""
    try:
        models = load(folder, dtype)
    except FileNotFoundError as error:
        sys.exit(str(error))
    for model in (models.student, models.teacher, models.twin, models.own_twin):
        model.to(device)
    return models


def reference_figures(
    models: ReferenceModels,
    num_problems: int,
    num_slow_problems: int,
    seed: int = 0,
    teacher_block_size: int = TEACHER_BLOCK_SIZE,
) -> list[Figure]:
    """All figures of the table, over test problems of which the first `num_slow_problems` time the vanilla sampler."""
    problems = make_problems("test", num_problems, seed)
    prompts = [models.prompt(problem.question) for problem in problems]
    systems = models.systems(teacher_block_size=teacher_block_size)
    d2f, twin, vanilla = systems[D2F], systems[TWIN], systems[VANILLA]

    fast = measure({"d2f": d2f, "twin": twin}, prompts, warm_up=3, progress=progress("D2F and twin"))
    scores = {
        name: score([models.text(m.response_ids) for m in of_system], problems) for name, of_system in fast.items()
    }
    scores["teacher"] = score(teacher_answers(models, problems, teacher_block_size), problems)
    some = prompts[:num_slow_problems]
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


def score(answers: Sequence[str], problems: Sequence[Problem]) -> float:
    """Percentage of answers whose final number is right."""
    right = [final_number(answer) == problem.answer for answer, problem in zip(answers, problems, strict=True)]
    return 100 * sum(right) / len(right)


def teacher_answers(models: ReferenceModels, problems: Sequence[Problem], block_size: int) -> list[str]:
    """What the vanilla sampler answers, in batches."""
    answers, _ = answer_in_batches(
        models.systems(SCORING_LENGTH, teacher_block_size=block_size)[VANILLA],
        [models.prompt(problem.question) for problem in problems],
        models.tokenizer.pad_token_id,
        SCORING_BATCH_SIZE,
        progress(f"teacher, block size {block_size}"),
    )
    return [models.text(answer) for answer in answers]


def search(models: ReferenceModels, num_problems: int, seed: int) -> dict[str, Any]:
    """Scores the teacher with several block sizes on validation problems, for TEACHER_BLOCK_SIZE."""
    problems = make_problems("validation", num_problems, seed)
    scores = {size: score(teacher_answers(models, problems, size), problems) for size in SEARCHED_BLOCK_SIZES}
    rows = [[str(size), f"{value:.1f}"] for size, value in scores.items()]
    print(table([["block size", "teacher score, %"], *rows], num_left=0))
    return {"teacher_scores": scores, "best_block_size": max(scores, key=scores.__getitem__)}


if __name__ == "__main__":
    main()

"""Compares the samplers of D2F on word problems: the score of each against its tokens per forward.

    python -m benchmarks.samplers --report report.json
    python -m benchmarks.samplers --samplers threshold credit --block-sizes 5 --seeds 3 4 5

The D2F student of the reference models answers test problems with each sampler at several settings: `threshold` is
Algorithm 2 of the paper, the others are the arguments of this name of `D2FGenerationConfig` (`entropy_bound`, `factor`
and `credit` are values of `acceptance_rule`). Every seed has problems of its own, and all settings get the same ones.
They are answered in batches, in float32, so that a row does not depend on its batch. No time is measured.

- score: percentage of problems whose final number is right; the mean over the seeds, and that of each.
- TPF, tokens per forward: all response tokens, up to and including the EOS, / all forwards that the rows took.
- cTPF, compute-weighted: the same / the branches that each forward reads; TPF where there is one.
- AUP: `metrics.accuracy_under_parallelism` of a sampler's settings at one block size, relative to the best
  score of all rows; cAUP is the same with cTPF.

At the end stand the settings that dominate the default, which is threshold 0.9 at the model's own block size: at least
its score on every seed, and a higher cTPF. Of many settings some look better by chance; other seeds can tell.

Prints tables, and as its last line on stdout one JSON object
`{"rows": [...], "areas": [...], "default": {...}, "dominating": [...], "environment": {...}}`.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers.utils import logging

from benchmarks.figures import progress, table, write_report
from benchmarks.metrics import accuracy_under_parallelism, compute_weighted_tokens_per_forward
from benchmarks.reference import load_models, score
from d2f_hf.benchmarking import System, answer_in_batches
from reference_models import HERE, MAX_NEW_TOKENS, ReferenceModels
from word_problems import Problem, make_problems

BATCH_SIZE = 32
DEFAULT = ("threshold", {"confidence_threshold": 0.9})
# The settings of each sampler, as keywords of `generate`: few, from careful to fast or the other way round.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "threshold": [{"confidence_threshold": value} for value in (0.7, 0.8, 0.9, 0.95, 0.98)],
    "entropy_bound": [
        {"acceptance_rule": "entropy_bound", "entropy_bound": value} for value in (0.01, 0.03, 0.1, 0.2, 0.4)
    ],
    "factor": [{"acceptance_rule": "factor", "confidence_factor": value} for value in (0.05, 0.1, 0.2, 0.4, 1.0)],
    "credit": [{"acceptance_rule": "credit", "confidence_threshold": value} for value in (0.8, 0.9, 0.95, 0.98, 0.99)],
    "semi_activated_threshold": [
        {"confidence_threshold": full, "semi_activated_threshold": semi}
        for full, semi in ((0.8, 0.95), (0.9, 0.95), (0.9, 0.98), (0.9, 0.99))
    ],
    "num_branches": [
        {"confidence_threshold": value, "num_branches": branches} for branches in (2, 3) for value in (0.9, 0.95)
    ],
    "remask_threshold": [
        {"confidence_threshold": value, "remask_threshold": remask} for remask in (0.3, 0.5) for value in (0.8, 0.9)
    ],
}


@dataclass(frozen=True)
class Row:
    """What a sampler reached with one setting.

    Args:
        sampler (`str`): Its name in `SETTINGS`.
        options (`dict`): Keywords of `generate` besides the block size and the limit.
        block_size (`int`): Tokens per block.
        score (`float`): Mean over the seeds of the percentage of right answers.
        scores (`list[float]`): That of each seed.
        tokens_per_forward (`float`): All response tokens / all forwards.
        compute_weighted_tokens_per_forward (`float`): The same / the branches of a forward.
    """

    sampler: str
    options: dict[str, Any]
    block_size: int
    score: float
    scores: list[float]
    tokens_per_forward: float
    compute_weighted_tokens_per_forward: float


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    logging.disable_progress_bar()
    start = time.perf_counter()
    models = load_models(args.models, "float32")
    own_block_size = models.student.config.block_size
    settings = [
        (sampler, options, block_size)
        for block_size in args.block_sizes
        for sampler in args.samplers
        for options in SETTINGS[sampler]
    ]
    if (*DEFAULT, own_block_size) not in settings:
        settings.insert(0, (*DEFAULT, own_block_size))
    problems = [make_problems("test", args.problems, seed) for seed in args.seeds]
    done = progress("settings")
    rows = []
    for setting in settings:
        rows.append(measure(models, problems, *setting, max_new_tokens=args.max_new_tokens))
        done(len(rows), len(settings))
    default = rows[settings.index((*DEFAULT, own_block_size))]
    areas = areas_of(rows)
    dominating = dominating_rows(rows, default)

    print_rows(rows)
    print_areas(areas)
    print(f"\ndefault: {describe(default.options)}, block size {own_block_size}")
    if dominating:
        print("At least its score on every seed and a higher cTPF have:")
        print_rows(dominating)
    else:
        print("No setting has at least its score on every seed and a higher cTPF.")
    report = {
        "rows": [as_dict(row) for row in rows],
        "areas": areas,
        "default": as_dict(default),
        "dominating": [as_dict(row) for row in dominating],
    }
    settings = {name: getattr(args, name) for name in ("problems", "seeds", "max_new_tokens")}
    write_report(report, "samplers", arguments, models.student, start, args.report, batch_size=BATCH_SIZE, **settings)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--problems", type=int, default=200, help="test problems per seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the problems")
    parser.add_argument("--samplers", choices=list(SETTINGS), nargs="+", default=list(SETTINGS), help="all by default")
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[5, 8], help="the model's own is 5")
    parser.add_argument("--max-new-tokens", type=int, default=MAX_NEW_TOKENS, help="limit of a response")
    parser.add_argument("--models", type=Path, default=HERE, help="folder of the models")
    parser.add_argument("--report", type=Path, help="file that gets the JSON object too")
    args = parser.parse_args(arguments)
    for name in ("problems", "max_new_tokens"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    for name in ("seeds", "samplers", "block_sizes"):
        values = getattr(args, name)
        if len(set(values)) < len(values):
            parser.error(f"--{name.replace('_', '-')} must be different ones, got {' '.join(map(str, values))}")
    if min(args.block_sizes) < 1:
        parser.error(f"--block-sizes must be at least 1, got {min(args.block_sizes)}")
    return args


def measure(
    models: ReferenceModels,
    problems: Sequence[Sequence[Problem]],
    sampler: str,
    options: dict[str, Any],
    block_size: int,
    max_new_tokens: int,
) -> Row:
    """Lets the student answer the `problems` of each seed."""
    scores, num_tokens, num_forward_passes = [], 0, 0
    for of_seed in problems:
        responses, forwards = answer(
            models, of_seed, {**options, "block_size": block_size, "max_new_tokens": max_new_tokens}
        )
        scores.append(score([models.text(response) for response in responses], of_seed))
        num_tokens += sum(map(len, responses))
        num_forward_passes += sum(forwards)
    # The first forward of a response has nothing to try, and reads one branch.
    num_responses = sum(map(len, problems))
    branches = 1 + (options.get("num_branches", 1) - 1) * (1 - num_responses / num_forward_passes)
    return Row(
        sampler,
        options,
        block_size,
        score=statistics.fmean(scores),
        scores=scores,
        tokens_per_forward=num_tokens / num_forward_passes,
        compute_weighted_tokens_per_forward=compute_weighted_tokens_per_forward(
            num_tokens, num_forward_passes, branches
        ),
    )


def answer(
    models: ReferenceModels, problems: Sequence[Problem], options: dict[str, Any]
) -> tuple[list[list[int]], list[int]]:
    """For each problem the response tokens up to and including the EOS, and the forwards that its row took."""
    prompts = [models.prompt(problem.question) for problem in problems]
    system = System(models.student, options)
    return answer_in_batches(system, prompts, models.tokenizer.pad_token_id, BATCH_SIZE)


def areas_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """AUP of each sampler at each block size, by TPF and by cTPF."""
    # Where all scores are 0 there is no best one, and every area is 0.
    best = max(row.score for row in rows) or None
    areas = []
    for sampler, block_size in dict.fromkeys((row.sampler, row.block_size) for row in rows):
        own = [row for row in rows if (row.sampler, row.block_size) == (sampler, block_size)]
        area = accuracy_under_parallelism([(row.tokens_per_forward, row.score) for row in own], best)
        weighted = accuracy_under_parallelism(
            [(row.compute_weighted_tokens_per_forward, row.score) for row in own], best
        )
        areas.append(
            {
                "sampler": sampler,
                "block_size": block_size,
                "num_settings": len(own),
                "aup": round(area, 2),
                "compute_weighted_aup": round(weighted, 2),
            }
        )
    return areas


def dominating_rows(rows: Sequence[Row], default: Row) -> list[Row]:
    """Those with at least the default's score on every seed and more compute-weighted TPF, the fastest first."""
    faster = [
        row
        for row in rows
        if row.compute_weighted_tokens_per_forward > default.compute_weighted_tokens_per_forward
        and all(score >= other for score, other in zip(row.scores, default.scores, strict=True))
    ]
    return sorted(faster, key=lambda row: row.compute_weighted_tokens_per_forward, reverse=True)


def as_dict(row: Row) -> dict[str, Any]:
    """For the JSON object, with numbers rounded."""
    values = asdict(row)
    for name in ("score", "tokens_per_forward", "compute_weighted_tokens_per_forward"):
        values[name] = round(values[name], 4)
    values["scores"] = [round(score, 4) for score in row.scores]
    return values


def describe(options: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items() if name != "acceptance_rule")


def print_rows(rows: Sequence[Row]) -> None:
    head = ["sampler", "setting", "block size", "score", "TPF", "cTPF", "score of each seed"]
    cells = [
        [
            row.sampler,
            describe(row.options),
            str(row.block_size),
            f"{row.score:.1f}",
            f"{row.tokens_per_forward:.2f}",
            f"{row.compute_weighted_tokens_per_forward:.2f}",
            " ".join(f"{score:5.1f}" for score in row.scores),
        ]
        for row in rows
    ]
    print(table([head, *cells], num_left=2))


def print_areas(areas: Sequence[dict[str, Any]]) -> None:
    names = ("sampler", "block_size", "num_settings", "aup", "compute_weighted_aup")
    cells = [[f"{area[name]:.0f}" if "aup" in name else str(area[name]) for name in names] for area in areas]
    print("\n" + table([["sampler", "block size", "settings", "AUP", "cAUP"], *cells]))


if __name__ == "__main__":
    main()

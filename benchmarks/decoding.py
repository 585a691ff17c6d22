"""Measures decoding: D2F against other ways to answer the same prompts, or the decoding loop alone.

    python -m benchmarks.decoding
    python -m benchmarks.decoding --problems 200    # scores to half a point

answers word problems with the reference models in seven ways: the autoregressive twin under transformers' own
`generate` and under our loop, the teacher's vanilla sampler at one token per step, Fast-dLLM with prefix and with dual
cache on the teacher, and the D2F student block by block and pipelined. They take turns on the same prompts and are
warm. Tokens count up to the first EOS; vanilla and Fast-dLLM, whose loops do not stop there, decode the whole length,
as the originals do.
The columns are those of `d2f_hf.benchmarking`: tokens/s, tokens per forward, latency (p50, p95), time to first token
(TTFT), response tokens, score, forwards, and how the time of a call is split (all times in milliseconds). Then come
the twin's own answers by verified decoding with the student as its drafter; tokens/s by batch size; and what the loop
adds to the forwards of the student.

    python -m benchmarks.decoding --engine 100m --tokens-per-forward 4 --batch-sizes 1 16    # make bench-engine
    python -m benchmarks.decoding --engine 8b --device cuda --batch-sizes 1 16 64

needs no trained model. Weights are random, and a script decides how many tokens each forward decodes: what is measured
is the loop (`engine.py`). Memory is measured with LLaDA's vocabulary on a narrow model.

    python -m benchmarks.decoding --targets --compile    # make bench

measures all that has a target: the reference models (`reference.py`), D2F against Fast-dLLM, the student by batch
size, and the loop alone with 100M parameters or as many as `--engine` says. `python -m benchmarks.figures` makes
Markdown tables of several such reports.

Prints tables, what the figures depend on, and as its last line on stdout one JSON object
`{"figures": [{"name", "value", "target", "at_most", "met"}], ..., "environment": {...}}`.
"""

import argparse
import copy
import dataclasses
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import CompileConfig
from transformers.utils import logging

from benchmarks.engine import (
    context_growth,
    early_end,
    gain,
    loop_overhead,
    masked_share,
    merged_adapter_gain,
    rows_as_alone,
)
from benchmarks.figures import ENGINE, Figure, progress, table, write_report
from benchmarks.memory import step_memory
from benchmarks.reference import load_models, reference_figures, score
from benchmarks.scripted import SIZES, random_model, random_prompts, scripted_run
from benchmarks.stages import Stages, mean_stages, measure_stages
from d2f_hf.benchmarking import (
    Measurement,
    System,
    answer_in_batches,
    batch_tokens_per_second,
    left_padded,
    measure,
    measure_batches,
    speed_up,
    summarize,
)
from reference_models import D2F, DUAL, HERE, MAX_NEW_TOKENS, OWN_TWIN, TWIN, VANILLA, VERIFIED, ReferenceModels
from word_problems import Problem, make_problems

CAREFUL, CAREFUL_OPTIONS = "D2F at threshold 0.99", {"confidence_threshold": 0.99}
VANILLA_RATIO = "D2F tokens/s over vanilla tokens/s, median over problems"
OVERHEAD_TARGETS = {("5m", 1): 1.25, ("5m", 16): 1.15, ("100m", 1): 1.05, ("100m", 16): 1.05}
MASKED_SHARE_TARGET = 0.6  # of batch 16
MEMORY_MODEL = {"size": "5m", "vocab_size": 126464, "weight_tying": True}
MEMORY_WINDOW, MEMORY_BATCH_SIZE = 128, 8


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)  # peft looks up an attribute under its old name
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    start = time.perf_counter()
    if args.targets:
        report, model = benchmark_targets(args)
    elif args.engine is not None:
        report, model = benchmark_engine(args)
    else:
        report, model = benchmark_reference(args)
    write_report(report, "decoding", arguments, model, start, args.report)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--targets", "--bars", action="store_true", help="measure all that has a target, in about a quarter of an hour"
    )
    parser.add_argument("--engine", metavar="SIZE", help="measure the loop alone: 5m, 100m, 1b or 8b")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of all models")
    parser.add_argument("--device", default="cpu", help="of all models")
    parser.add_argument("--threads", type=int, help="of torch; its own choice by default")
    parser.add_argument("--batch-sizes", type=int, nargs="+", help="1 4 16 64, with --engine 1 16")
    parser.add_argument("--repetitions", type=int, default=5, help="of each time of the loop; the median counts")
    parser.add_argument("--seed", type=int, default=0, help="of problems, prompts and ragged rows")
    parser.add_argument("--report", type=Path, help="file that gets the JSON object too")
    reference = parser.add_argument_group("reference task")
    reference.add_argument("--problems", type=int, help="problems that all systems answer: 24, with --targets 500")
    reference.add_argument(
        "--slow-problems", type=int, default=50, help="with --targets: those that time the vanilla one"
    )
    reference.add_argument("--stage-problems", type=int, default=6, help="those of them whose time is split")
    reference.add_argument("--batch-problems", type=int, default=64, help="problems for tokens/s by batch size")
    reference.add_argument("--max-new-tokens", type=int, default=MAX_NEW_TOKENS, help="limit of a response")
    reference.add_argument("--fast-dllm-block-size", type=int, default=32, help="Fast-dLLM's own is 32")
    reference.add_argument("--models", type=Path, default=HERE, help="folder of the models")
    engine = parser.add_argument_group("with --engine")
    engine.add_argument("--tokens-per-forward", type=float, default=4.0, help="that the script makes")
    engine.add_argument("--prompt-length", type=int, default=64, help="tokens; in a batch the longest")
    engine.add_argument("--response-length", type=int, default=64, help="tokens; in a batch the longest")
    engine.add_argument("--compile", action="store_true", help="compare with compiled steps, too")
    engine.add_argument("--contexts", type=int, nargs=2, default=(256, 4096), help="two prompts, for time per step")
    args = parser.parse_args(arguments)
    is_engine_alone = args.engine is not None and not args.targets
    args.batch_sizes = args.batch_sizes or ([1, 16] if is_engine_alone else [1, 4, 16, 64])
    args.problems = (500 if args.targets else 24) if args.problems is None else args.problems
    at_least_one = ("problems", "slow_problems", "stage_problems", "batch_problems", "repetitions", "max_new_tokens")
    at_least_one += ("fast_dllm_block_size", "prompt_length", "response_length")
    for name in at_least_one:
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}: give more")
    if args.threads is not None and args.threads < 1:
        parser.error(f"--threads must be at least 1, got {args.threads}: leave it out for torch's choice")
    if min(args.contexts) < 1:
        parser.error(f"--contexts must be at least 1, got {args.contexts}: give two lengths of prompts")
    if args.tokens_per_forward < 1.25:
        parser.error(
            f"--tokens-per-forward must be at least 1.25, got {args.tokens_per_forward}: rows of a batch differ by a "
            "quarter, and each decodes a token per forward"
        )
    if args.engine is not None and args.engine not in SIZES:
        parser.error(f"--engine must be one of {', '.join(SIZES)}, got {args.engine}")
    if min(args.batch_sizes) < 1:
        parser.error(f"--batch-sizes must be at least 1, got {args.batch_sizes}: leave them out for the usual ones")
    for size in args.batch_sizes:
        if not is_engine_alone and args.batch_problems % size:
            parser.error(
                f"--batch-problems must be a multiple of each of --batch-sizes, got {args.batch_problems} and {size}: "
                "all sizes answer the same problems"
            )
    return args


def load_task(args: argparse.Namespace) -> tuple[ReferenceModels, Sequence[Problem], list[Any]]:
    """The models on their device, the problems to score, and prompts: of these, and as many as the batches need."""
    models = load_models(args.models, args.dtype, args.device)
    problems = make_problems("test", max(args.problems, args.batch_problems), args.seed)
    prompts = [models.prompt(problem.question) for problem in problems]
    return models, problems[: args.problems], prompts


def benchmark_reference(args: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    """Report and student of the reference task."""
    models, problems, prompts = load_task(args)
    systems = models.systems(args.max_new_tokens, fast_dllm_block_size=args.fast_dllm_block_size)
    measurements = measure(systems, prompts[: args.problems], progress=progress("all systems"))
    stages = measure_stages(systems, prompts[: min(args.stage_problems, args.problems)], progress=progress("stages"))
    rows = {}
    for name, of_system in measurements.items():
        answers = [models.text(m.response_ids) for m in of_system]
        rows[name] = columns(of_system, stages[name], score(answers, problems))
    print_columns(rows)

    figures = []
    for name, target in ((TWIN, 4.0), (VANILLA, 50.0), (DUAL, 2.5)):
        scores = (rows[D2F]["score"], rows[name]["score"])
        figures += comparison(D2F, measurements[D2F], name, measurements[name], target, scores)
    figures += own_loop_figures(measurements, systems, prompts[: args.batch_problems], models)
    figures += verified_figures(models, prompts, args)
    figures += batch_figures(systems, prompts[: args.batch_problems], models, args)
    figures += student_figures(systems[D2F], prompts, models, args)
    return {"figures": figures, "systems": rows}, models.student


def benchmark_targets(args: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    """Report and student: the figures of the reference models, of the student's loop, and of the loop alone."""
    models, problems, prompts = load_task(args)
    figures = reference_figures(models, args.problems, min(args.slow_problems, args.problems), args.seed)
    value = {figure.name: figure.value for figure in figures}
    systems = models.systems(args.max_new_tokens, fast_dllm_block_size=args.fast_dllm_block_size)
    fast = {
        D2F: systems[D2F],
        CAREFUL: System(models.student, {**systems[D2F].options, **CAREFUL_OPTIONS}),
        TWIN: systems[TWIN],
        OWN_TWIN: systems[OWN_TWIN],
        DUAL: systems[DUAL],
    }
    measurements = measure(fast, prompts[: args.problems], progress=progress("D2F, twins, Fast-dLLM"))
    scores = {
        name: score([models.text(m.response_ids) for m in of_system], problems)
        for name, of_system in measurements.items()
    }
    engine = []
    for name, baseline, target in ((D2F, TWIN, 4.0), (CAREFUL, TWIN, 4.0), (D2F, DUAL, 2.5)):
        pair = (scores[name], scores[baseline])
        engine += comparison(name, measurements[name], baseline, measurements[baseline], target, pair)
    engine += own_loop_figures(measurements, systems, prompts[: args.batch_problems], models)
    engine += verified_figures(models, prompts, args)
    engine += [
        Figure(VANILLA_RATIO, value[VANILLA_RATIO], 50.0),
        *student_figures(systems[D2F], prompts, models, args),
        *batch_figures(systems, prompts[: args.batch_problems], models, args),
    ]
    args.engine, args.batch_sizes = args.engine or "100m", [1, 16]
    engine += benchmark_engine(args)[0]["figures"]
    figures += [dataclasses.replace(figure, name=ENGINE + figure.name) for figure in engine]
    return {"figures": figures}, models.student


def comparison(
    name: str,
    measurements: Sequence[Measurement],
    baseline: str,
    of_baseline: Sequence[Measurement],
    target: float,
    scores: tuple[float, float],
) -> list[Figure]:
    """Speed and score of a system against those of a baseline; the score may be one point behind."""
    ratio = speed_up(measurements, of_baseline).median
    return [
        Figure(f"{name} tokens/s over {baseline} tokens/s, median over problems", ratio, target),
        Figure(f"{name} score less {baseline} score, points", scores[0] - scores[1], -1.0),
    ]


def own_loop_figures(
    measurements: dict[str, list[Measurement]],
    systems: dict[str, System],
    prompts: Sequence[Any],
    models: ReferenceModels,
) -> list[Figure]:
    """Our autoregressive loop against that of transformers, with the same weights: its speed, and equal answers.

    In bfloat16 rounding may turn over a choice between two tokens, so the answers have a target in float32 only.
    """
    own, stock = measurements[OWN_TWIN], measurements[TWIN]
    same = same_answers([m.response_ids for m in own], [m.response_ids for m in stock])
    exact, batch_size = [], min(16, len(prompts))
    for system in (systems[OWN_TWIN], systems[TWIN]):
        system = System(copy.deepcopy(system.model).float(), system.options)
        exact.append(answer_in_batches(system, prompts, models.tokenizer.pad_token_id, batch_size)[0])
    ratio = speed_up(own, stock).median
    return [
        Figure(f"{OWN_TWIN} tokens/s over {TWIN} tokens/s, median over problems", ratio, 1.0),
        Figure(f"{OWN_TWIN}: answers as of {TWIN}, %", same),
        Figure(f"{OWN_TWIN}, float32, batch {batch_size}: answers as of {TWIN}, %", same_answers(*exact), 100.0),
    ]


def verified_figures(models: ReferenceModels, prompts: Sequence[Any], args: argparse.Namespace) -> list[Figure]:
    """Verified decoding with two models against the twin alone: the student drafts, and the twin verifies.

    The answers are the twin's own. As for the twin's two loops they have a target in float32.
    """
    twin = models.systems(args.max_new_tokens)[TWIN]
    pair = {VERIFIED: models.verified(args.max_new_tokens), TWIN: twin}
    measurements = measure(pair, prompts[: args.problems], progress=progress("verified and twin"))
    verified, of_twin = measurements[VERIFIED], measurements[TWIN]
    exact, batch_size = [], min(16, len(prompts))
    twin = System(copy.deepcopy(twin.model).float(), twin.options)
    for system in (models.verified(args.max_new_tokens, torch.float32), twin):
        exact.append(answer_in_batches(system, prompts, models.tokenizer.pad_token_id, batch_size)[0])
    ratio, per_forward = speed_up(verified, of_twin).median, summarize(verified).tokens_per_forward
    same = same_answers([m.response_ids for m in verified], [m.response_ids for m in of_twin])
    return [
        Figure(f"{VERIFIED}: tokens per forward, all forwards counted", per_forward, 5.0),
        Figure(f"{VERIFIED}: tokens/s over {TWIN} tokens/s, median over problems", ratio),
        Figure(f"{VERIFIED}: answers as of {TWIN}, %", same),
        Figure(f"{VERIFIED}, float32, batch {batch_size}: answers as of {TWIN}, %", same_answers(*exact), 100.0),
    ]


def same_answers(answers: Sequence[list[int]], others: Sequence[list[int]]) -> float:
    """Percentage of the answers that are the others in every token."""
    return 100 * sum(a == b for a, b in zip(answers, others, strict=True)) / len(answers)


def columns(measurements: Sequence[Measurement], stages: Sequence[Stages], score: float) -> dict[str, float]:
    """One row of the table; times in milliseconds."""
    summary, stage = summarize(measurements), mean_stages(stages)
    row = {
        "tokens/s": summary.tokens_per_second,
        "tokens/forward": summary.tokens_per_forward,
        "p50": 1000 * summary.latency,
        "p95": 1000 * summary.latency_p95,
        "TTFT": 1000 * stage.time_to_first_token,
        "tokens": summary.response_tokens,
        "score": score,
        "forwards": summary.num_forward_passes,
        "prefill": 1000 * stage.prefill,
        "decode": 1000 * stage.decode,
        "sampling": 1000 * stage.sampling,
        "host": 1000 * stage.host,
    }
    return {name: round(value, 2) for name, value in row.items()}


def print_columns(rows: dict[str, dict[str, float]]) -> None:
    names = list(next(iter(rows.values())))
    print(table([["", *names], *([system, *(f"{row[name]:.1f}" for name in names)] for system, row in rows.items())]))
    print("p50 to TTFT and prefill to host: ms; tokens, forwards: mean of a response; score: %\n")


def batch_figures(
    systems: dict[str, System], prompts: Sequence[Any], models: ReferenceModels, args: argparse.Namespace
) -> list[Figure]:
    """Tokens per second by batch size, of D2F and of the twin under both loops."""
    measurements = measure_batches(
        {name: systems[name] for name in (D2F, TWIN, OWN_TWIN)},
        prompts,
        models.tokenizer.pad_token_id,
        args.batch_sizes,
        progress=progress("batches"),
    )
    return [
        Figure(f"{name} tokens/s, batch {size}", batch_tokens_per_second(batches))
        for name, by_size in measurements.items()
        for size, batches in by_size.items()
    ]


def student_figures(
    system: System, prompts: Sequence[Any], models: ReferenceModels, args: argparse.Namespace
) -> list[Figure]:
    """What the loop adds to the student's forwards, how much of them is masked, and whether rows keep their tokens."""
    figures = []
    pad_token_id = models.tokenizer.pad_token_id
    for size in dict.fromkeys([1, min(16, len(prompts))]):
        batch = left_padded(prompts[:size], pad_token_id)
        # A call with one row is short, and noisy.
        overhead = loop_overhead(system, batch, repetitions=args.repetitions * (8 if size == 1 else 1))
        name = f"student, batch {size}"
        target = OVERHEAD_TARGETS.get(("5m", size))
        figures.append(Figure(f"{name}: generate / its forwards alone", overhead.ratio, target, at_most=True))
    target = MASKED_SHARE_TARGET if size == 16 else None
    figures.append(Figure(f"{name}: masked positions / positions", masked_share(overhead.forwards), target))
    share = masked_share(overhead.forwards, without_prefill=True)
    figures.append(Figure(f"{name}: the same without the first forward", share))

    if args.compile:
        compiled = System(models.student, {**system.options, "compile_config": CompileConfig()})
        one = left_padded(prompts[:1], pad_token_id)
        ratio = gain(compiled, system, one, repetitions=8 * args.repetitions)
        figures.append(Figure("student, batch 1: tokens/s compiled steps / as it is", ratio))
    exact = System(copy.deepcopy(models.student).float(), system.options)
    same = rows_as_alone(exact, prompts[:size], pad_token_id)
    return [*figures, Figure(f"{name}, float32: rows as when alone, %", same, 100.0)]


def benchmark_engine(args: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    """Report and model of the loop alone."""

    def report(what: str) -> None:
        print(what, file=sys.stderr)

    torch.manual_seed(args.seed)
    longest = max(max(args.contexts) + 32, 2048 + args.prompt_length, args.prompt_length + args.response_length)
    model = random_model(args.engine, args.dtype, args.device, max_sequence_length=longest)
    lengths = {"prompt_length": args.prompt_length, "max_new_tokens": args.response_length, "seed": args.seed}
    figures = []
    for size in args.batch_sizes:
        report(f"batch {size}")
        run = scripted_run(model, size, args.tokens_per_forward, **lengths)
        overhead = loop_overhead(*run, repetitions=args.repetitions * (4 if size == 1 else 1))
        name = f"{args.engine}, batch {size}"
        target = OVERHEAD_TARGETS.get((args.engine, size))
        share_target = MASKED_SHARE_TARGET if size == 16 else None
        figures += [
            Figure(f"{name}: generate / its forwards alone", overhead.ratio, target, at_most=True),
            Figure(f"{name}: masked positions / positions", masked_share(overhead.forwards), share_target),
            Figure(f"{name}: forwards", len(overhead.forwards)),
            Figure(f"{name}: tokens/s", overhead.tokens_per_second),
        ]
        if len(overhead.forwards) > 1:
            share = masked_share(overhead.forwards, without_prefill=True)
            figures.insert(-2, Figure(f"{name}: the same without the first forward", share))

    report("context")
    short, long = args.contexts
    growth = context_growth(
        model, (short, long), args.tokens_per_forward, repetitions=args.repetitions, seed=args.seed
    )
    for context, seconds, bare in zip(growth.contexts, growth.step_seconds, growth.forward_seconds, strict=True):
        name = f"{args.engine}, context {context}"
        figures += [Figure(f"{name}: ms per step", 1000 * seconds), Figure(f"{name}: ms per forward", 1000 * bare)]
    target = 1.1 if args.engine == "100m" and growth.contexts == (256, 4096) else None
    name = f"{args.engine}: growth of a step / of its forward, context {short} to {long}"
    figures.append(Figure(name, growth.ratio, target, at_most=True))

    report("early end")
    end = early_end(model, tokens_per_forward=args.tokens_per_forward, repetitions=args.repetitions, seed=args.seed)
    name = f"{args.engine}, EOS at token 20, limit 2048 / 64"
    figures += [
        Figure(f"{name}: forwards", end.num_forwards[1] / end.num_forwards[0], 1.0, at_most=True),
        Figure(f"{name}: time", end.time_ratio, 1.1, at_most=True),
    ]

    run = scripted_run(model, 1, args.tokens_per_forward, **lengths)
    if args.engine != "8b":  # three of them are too much for one GPU
        report("adapter")
        ratio = merged_adapter_gain(*run, repetitions=args.repetitions)
        figures.append(Figure(f"{args.engine}: tokens/s merged adapter / on top (rank 32)", ratio))

        report("rows")
        same = random_rows_as_alone(model, args.seed)
        figures.append(Figure(f"{args.engine}, batch 16, float32: rows as when alone, %", same, 100.0))

    if args.compile:
        report("compiled steps")
        system, inputs, script = run
        compiled = System(model, {**system.options, "compile_config": CompileConfig()})
        ratio = gain(compiled, system, inputs, script, args.repetitions)
        figures.append(Figure(f"{args.engine}: tokens/s compiled steps / as it is", ratio))

    report("memory")
    wide = random_model(dtype=args.dtype, device=args.device, **MEMORY_MODEL)
    run = scripted_run(
        wide, MEMORY_BATCH_SIZE, 16.0, 16, MEMORY_WINDOW, ragged=False, seed=args.seed, block_size=MEMORY_WINDOW
    )
    memory = step_memory(*run)
    name = f"peak memory / logits of the masked rows, V 126464, window {MEMORY_WINDOW}, batch {MEMORY_BATCH_SIZE}"
    figures.append(Figure(name, memory.ratio, 1.2, at_most=True))
    details = {
        "parameters": model.num_parameters(),
        "tokens_per_forward": args.tokens_per_forward,
        **lengths,
        "memory": {"peak_bytes": memory.peak_bytes, "logits_bytes": memory.logits_bytes},
    }
    return {"figures": figures, "engine": {"size": args.engine, **details}}, model


def random_rows_as_alone(model: Any, seed: int) -> float:
    """Percentage of the rows of a ragged batch of 16, decoded by the model itself, that are as when they are alone."""
    exact = copy.deepcopy(model).float()
    options = {"max_new_tokens": 12, "block_size": 4, "confidence_threshold": 0.001}
    batch = random_prompts(exact.config, range(5, 21), seed)
    prompts = [
        {"input_ids": ids[None, mask.bool()]}
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    return rows_as_alone(System(exact, options), prompts, exact.config.pad_token_id)


if __name__ == "__main__":
    main()

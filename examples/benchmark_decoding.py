"""Measures decoding: D2F against other ways to answer the same prompts, or the decoding loop alone.

    python examples/benchmark_decoding.py
    python examples/benchmark_decoding.py --problems 200    # scores to half a point

answers word problems with the reference models in six ways: the autoregressive twin under transformers' own
`generate`, the teacher's vanilla sampler at one token per step, Fast-dLLM with prefix and with dual cache on the
teacher, and the D2F student block by block and pipelined. They take turns on the same prompts and are warm. Tokens
count up to the first EOS; vanilla and Fast-dLLM, whose loops do not stop there, decode the whole length, as the
originals do.
The columns are those of `d2f_hf.benchmarking`: tokens/s, tokens per forward, latency (p50, p95), time to first token
(TTFT), response tokens, score, forwards, and how the time of a call is split (all times in milliseconds). Then come
tokens/s by batch size, and what the loop adds to the forwards of the student.

    python examples/benchmark_decoding.py --engine 100m --tokens-per-forward 4 --batch-sizes 1 16
    python examples/benchmark_decoding.py --engine 8b --device cuda --batch-sizes 1 16 64

needs no trained model. Weights are random, and a script decides how many tokens each forward decodes: what is measured
is the loop (`d2f_hf.engine_benchmarking`). Memory is measured with LLaDA's vocabulary on a narrow model.

    python examples/benchmark_decoding.py --bars --compile    # make bench

measures all that has a bar: the reference models (`reference_model/bench.py`), D2F against Fast-dLLM, the student by
batch size, and the loop alone with 100M parameters or as many as `--engine` says. `reference_model/bench.py --table`
makes Markdown tables of several such reports.

Prints tables, what the figures depend on, and as its last line on stdout one JSON object
`{"figures": [{"name", "value", "bar", "holds"}], ..., "environment": {...}}`.
"""

import argparse
import copy
import dataclasses
import importlib
import json
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import CompileConfig
from transformers.utils import logging

if TYPE_CHECKING:
    from d2f_hf.benchmarking import Figure

# d2f_hf itself is imported by the functions, because the reference models are to be loaded before it: see `load`.
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "reference_model"))
bench = importlib.import_module("bench")
reference_models = importlib.import_module("reference_models")
word_problems = importlib.import_module("word_problems")

D2F, TWIN, VANILLA, DUAL = "D2F", "autoregressive twin", "vanilla", "Fast-dLLM, dual cache"
CAREFUL, CAREFUL_OPTIONS = "D2F at threshold 0.99", {"confidence_threshold": 0.99}
VANILLA_RATIO = "D2F tokens/s over vanilla tokens/s, median over problems"
OVERHEAD_BARS = {("5m", 1): 1.25, ("5m", 16): 1.15, ("100m", 1): 1.05, ("100m", 16): 1.05}
ENGINE_SIZES = ("5m", "100m", "1b", "8b")  # d2f_hf.engine_benchmarking.SIZES
MASKED_SHARE_BAR = 0.6  # of batch 16
MEMORY_MODEL = {"size": "5m", "vocab_size": 126464, "weight_tying": True}
MEMORY_WINDOW, MEMORY_BATCH_SIZE = 128, 8


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)  # peft looks up an attribute under its old name
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    start = time.perf_counter()
    if args.bars:
        report, model = benchmark_bars(args)
    elif args.engine is not None:
        report, model = benchmark_engine(args)
    else:
        report, model = benchmark_reference(args)

    from d2f_hf.benchmarking import environment, figure_table

    figures = report.pop("figures")
    environment_of_run = {
        **environment(model, repository=HERE),
        "minutes": round((time.perf_counter() - start) / 60, 1),
        "command": " ".join(["benchmark_decoding.py", *(sys.argv[1:] if arguments is None else arguments)]),
    }
    report = {
        "figures": [figure.as_dict() for figure in figures],
        "at_most": [figure.name for figure in figures if figure.at_most],
        **report,
        "environment": environment_of_run,
    }
    print(figure_table(figures))
    print("\n" + "\n".join(f"{name}: {value}" for name, value in environment_of_run.items()) + "\n")
    if args.report is not None:
        args.report.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--bars", action="store_true", help="measure all that has a bar, in about a quarter of an hour"
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
    reference.add_argument("--problems", type=int, help="test problems that all systems answer: 24, with --bars 500")
    reference.add_argument(
        "--slow-problems", type=int, default=50, help="with --bars: those that time the vanilla one"
    )
    reference.add_argument("--stage-problems", type=int, default=6, help="those of them whose time is split")
    reference.add_argument("--batch-problems", type=int, default=64, help="problems for tokens/s by batch size")
    reference.add_argument("--max-new-tokens", type=int, default=256, help="limit of a response")
    reference.add_argument("--fast-dllm-block-size", type=int, default=32, help="Fast-dLLM's own is 32")
    reference.add_argument("--models", type=Path, default=reference_models.HERE, help="folder of the models")
    engine = parser.add_argument_group("with --engine")
    engine.add_argument("--tokens-per-forward", type=float, default=4.0, help="that the script makes")
    engine.add_argument("--prompt-length", type=int, default=64, help="tokens; in a batch the longest")
    engine.add_argument("--response-length", type=int, default=64, help="tokens; in a batch the longest")
    engine.add_argument("--compile", action="store_true", help="compare with compiled steps, too")
    engine.add_argument("--contexts", type=int, nargs=2, default=(256, 4096), help="two prompts, for time per step")
    args = parser.parse_args(arguments)
    is_engine_alone = args.engine is not None and not args.bars
    args.batch_sizes = args.batch_sizes or ([1, 16] if is_engine_alone else [1, 4, 16, 64])
    args.problems = (500 if args.bars else 24) if args.problems is None else args.problems
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
    if args.engine is not None and args.engine not in ENGINE_SIZES:
        parser.error(f"--engine must be one of {', '.join(ENGINE_SIZES)}, got {args.engine}")
    if min(args.batch_sizes) < 1:
        parser.error(f"--batch-sizes must be at least 1, got {args.batch_sizes}: leave them out for the usual ones")
    for size in args.batch_sizes:
        if not is_engine_alone and args.batch_problems % size:
            parser.error(
                f"--batch-problems must be a multiple of each of --batch-sizes, got {args.batch_problems} and {size}: "
                "all sizes answer the same problems"
            )
    return args


def load_task(args: argparse.Namespace) -> tuple[Any, Sequence[Any], list[Any]]:
    """The models on their device, the problems to score, and prompts: of these, and as many as the batches need."""
    try:
        models = reference_models.load(args.models, args.dtype)
    except FileNotFoundError as error:
        sys.exit(str(error))
    for model in (models.student, models.teacher, models.twin):
        model.to(args.device)
    problems = word_problems.make_problems("test", max(args.problems, args.batch_problems), args.seed)
    prompts = [models.prompt(problem.question) for problem in problems]
    return models, problems[: args.problems], prompts


def benchmark_reference(args: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    """Report and student of the reference task."""
    models, problems, prompts = load_task(args)
    from d2f_hf.benchmarking import Figure, measure, measure_stages, speed_up

    systems = reference_systems(models, args)
    measurements = measure(systems, prompts[: args.problems], progress=bench.progress("all systems"))
    stages = measure_stages(
        systems, prompts[: min(args.stage_problems, args.problems)], progress=bench.progress("stages")
    )
    rows = {}
    for name, of_system in measurements.items():
        answers = [models.text(m.response_ids) for m in of_system]
        rows[name] = columns(of_system, stages[name], bench.score(answers, problems))
    print_columns(rows)

    figures = []
    for name, bar in ((TWIN, 4.0), (VANILLA, 50.0), (DUAL, 2.5)):
        ratio = speed_up(measurements[D2F], measurements[name]).median
        figures += [
            Figure(f"D2F tokens/s over {name} tokens/s, median over problems", ratio, bar),
            Figure(f"D2F score less {name} score, points", rows[D2F]["score"] - rows[name]["score"], -1.0),
        ]
    figures += batch_figures(systems, prompts[: args.batch_problems], models, args)
    figures += student_figures(systems[D2F], prompts, models, args)
    return {"figures": figures, "systems": rows}, models.student


def benchmark_bars(args: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    """Report and student: the figures of the reference models, of the student's loop, and of the loop alone."""
    reference = bench.parse_arguments(
        [
            *("--problems", str(args.problems), "--slow-problems", str(args.slow_problems)),
            *("--seed", str(args.seed), "--dtype", args.dtype, "--models", str(args.models)),
        ]
    )
    models, problems, prompts = load_task(args)
    from d2f_hf.benchmarking import Figure, System, measure, speed_up

    figures = [Figure(figure.name, figure.value, figure.bar) for figure in bench.benchmark(models, reference)]
    value = {figure.name: figure.value for figure in figures}
    systems = reference_systems(models, args)
    fast = {
        D2F: systems[D2F],
        CAREFUL: System(models.student, {**systems[D2F].options, **CAREFUL_OPTIONS}),
        TWIN: systems[TWIN],
        DUAL: systems[DUAL],
    }
    measurements = measure(fast, prompts[: args.problems], progress=bench.progress("D2F, twin, Fast-dLLM"))
    scores = {
        name: bench.score([models.text(m.response_ids) for m in of_system], problems)
        for name, of_system in measurements.items()
    }
    engine = []
    for name, baseline, bar in ((D2F, TWIN, 4.0), (CAREFUL, TWIN, 4.0), (D2F, DUAL, 2.5)):
        ratio = speed_up(measurements[name], measurements[baseline]).median
        engine += [
            Figure(f"{name} tokens/s over {baseline} tokens/s, median over problems", ratio, bar),
            Figure(f"{name} score less {baseline} score, points", scores[name] - scores[baseline], -1.0),
        ]
    engine += [
        Figure(VANILLA_RATIO, value[VANILLA_RATIO], 50.0),
        *student_figures(systems[D2F], prompts, models, args),
        *batch_figures(systems, prompts[: args.batch_problems], models, args),
    ]
    args.engine, args.batch_sizes = args.engine or "100m", [1, 16]
    engine += benchmark_engine(args)[0]["figures"]
    figures += [dataclasses.replace(figure, name=bench.ENGINE + figure.name) for figure in engine]
    return {"figures": figures}, models.student


def reference_systems(models: Any, args: argparse.Namespace) -> dict[str, Any]:
    """The ways to answer, by name; all have the same limit and the same EOS."""
    from d2f_hf.benchmarking import System

    limit = {"max_new_tokens": args.max_new_tokens}
    fast_dllm = {
        **limit,
        "decoding": "fast_dllm",
        "block_size": args.fast_dllm_block_size,
        "confidence_threshold": 0.9,
    }
    return {
        TWIN: System(models.twin, {**limit, "do_sample": False, "use_cache": True}),
        VANILLA: System(
            models.teacher, bench.vanilla_options(args.max_new_tokens, reference_models.TEACHER_BLOCK_SIZE)
        ),
        "Fast-dLLM, prefix cache": System(models.teacher, {**fast_dllm, "block_cache": "prefix"}),
        DUAL: System(models.teacher, {**fast_dllm, "block_cache": "dual"}),
        "block by block": System(models.student, {**limit, "block_add_threshold": 1.0}),
        D2F: System(models.student, limit),
    }


def columns(measurements: Sequence[Any], stages: Sequence[Any], score: float) -> dict[str, float]:
    """One row of the table; times in milliseconds."""
    from d2f_hf.benchmarking import mean_stages, summarize

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
    width = max(map(len, rows))
    print(" " * width, *(f"{name:>{max(8, len(name))}}" for name in names))
    for system, row in rows.items():
        print(f"{system:{width}}", *(f"{row[name]:{max(8, len(name))}.1f}" for name in names))
    print("p50 to TTFT and prefill to host: ms; tokens, forwards: mean of a response; score: %\n")


def batch_figures(
    systems: dict[str, Any], prompts: Sequence[Any], models: Any, args: argparse.Namespace
) -> list["Figure"]:
    """Tokens per second by batch size, of D2F and of the twin."""
    from d2f_hf.benchmarking import Figure, batch_tokens_per_second, measure_batches

    measurements = measure_batches(
        {name: systems[name] for name in (D2F, TWIN)},
        prompts,
        models.tokenizer.pad_token_id,
        args.batch_sizes,
        progress=bench.progress("batches"),
    )
    return [
        Figure(f"{name} tokens/s, batch {size}", batch_tokens_per_second(batches))
        for name, by_size in measurements.items()
        for size, batches in by_size.items()
    ]


def student_figures(system: Any, prompts: Sequence[Any], models: Any, args: argparse.Namespace) -> list["Figure"]:
    """What the loop adds to the student's forwards, how much of them is masked, and whether rows keep their tokens."""
    from d2f_hf.benchmarking import Figure, System, left_padded, measure_batches
    from d2f_hf.engine_benchmarking import gain, loop_overhead, masked_share

    figures = []
    pad_token_id = models.tokenizer.pad_token_id
    for size in dict.fromkeys([1, min(16, len(prompts))]):
        batch = left_padded(prompts[:size], pad_token_id)
        # A call with one row is short, and noisy.
        overhead = loop_overhead(system, batch, repetitions=args.repetitions * (8 if size == 1 else 1))
        name = f"student, batch {size}"
        bar = OVERHEAD_BARS.get(("5m", size))
        figures.append(Figure(f"{name}: generate / its forwards alone", overhead.ratio, bar, at_most=True))
    bar = MASKED_SHARE_BAR if size == 16 else None
    figures.append(Figure(f"{name}: masked positions / positions", masked_share(overhead.forwards), bar))
    share = masked_share(overhead.forwards, without_prefill=True)
    figures.append(Figure(f"{name}: the same without the first forward", share))

    # In bfloat16 rounding depends on the shape of the batch.
    exact = {D2F: System(copy.deepcopy(models.student).float(), system.options)}
    if args.compile:
        compiled = System(models.student, {**system.options, "compile_config": CompileConfig()})
        one = left_padded(prompts[:1], pad_token_id)
        ratio = gain(compiled, system, one, repetitions=8 * args.repetitions)
        figures.append(Figure("student, batch 1: tokens/s compiled steps / as it is", ratio))
    answers = measure_batches(exact, prompts[:size], pad_token_id, dict.fromkeys([1, size]), warm_up=0)[D2F]
    alone = [m.response_ids[0] for m in answers[1]]
    same = [row == lone for row, lone in zip(answers[size][0].response_ids, alone, strict=True)]
    return [*figures, Figure(f"{name}, float32: rows as when alone, %", 100 * sum(same) / size, 100.0)]


def benchmark_engine(args: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    """Report and model of the loop alone."""
    from d2f_hf.benchmarking import Figure, System
    from d2f_hf.engine_benchmarking import (
        context_growth,
        early_end,
        gain,
        loop_overhead,
        masked_share,
        merged_adapter_gain,
        random_model,
        scripted_run,
        step_memory,
    )

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
        bar = OVERHEAD_BARS.get((args.engine, size))
        share_bar = MASKED_SHARE_BAR if size == 16 else None
        figures += [
            Figure(f"{name}: generate / its forwards alone", overhead.ratio, bar, at_most=True),
            Figure(f"{name}: masked positions / positions", masked_share(overhead.forwards), share_bar),
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
    bar = 1.1 if args.engine == "100m" and growth.contexts == (256, 4096) else None
    name = f"{args.engine}: growth of a step / of its forward, context {short} to {long}"
    figures.append(Figure(name, growth.ratio, bar, at_most=True))

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
        figures.append(
            Figure(f"{args.engine}, batch 16, float32: rows as when alone, %", same_rows(model, args), 100.0)
        )

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


def same_rows(model: Any, args: argparse.Namespace) -> float:
    """Percentage of the rows of a ragged batch of 16, decoded by the model itself, that are as when they are alone."""
    from d2f_hf.engine_benchmarking import random_prompts

    model = copy.deepcopy(model).float()
    batch = random_prompts(model.config, range(5, 21), args.seed)
    batch = {name: values.to(model.device) for name, values in batch.items()}
    options = {"max_new_tokens": 12, "block_size": 4, "confidence_threshold": 0.001}
    together = model.generate(**batch, **options)[:, batch["input_ids"].shape[1] :]
    num_same = 0
    for row in range(16):
        prompt = batch["input_ids"][row, batch["attention_mask"][row].bool()][None]
        alone = model.generate(prompt, **options)[0, prompt.shape[1] :]
        num_same += together[row, : len(alone)].equal(alone)
    return 100 * num_same / 16


if __name__ == "__main__":
    main()

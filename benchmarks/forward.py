"""Time of the model's forward against that of another checkout: the same weights and the same steps of decoding.

    git worktree add /tmp/before HEAD~1
    python -m benchmarks.forward /tmp/before

Decodes problems with the reference model, records what each forward was given, and runs the forwards of all steps
again with the code of both checkouts in turns. The last line is one JSON object: milliseconds per forward, here and
there, and their ratio; below 1 this checkout is faster.
"""

import argparse
import importlib.util
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftModel
from transformers import AutoTokenizer

HERE = Path(__file__).parents[1]
MODELS = HERE / "examples" / "reference_model"
# Layers, width, heads, width of the feed-forward layers, vocabulary.
RANDOM_SIZES = {"5m": (4, 256, 4, 704, 4096), "100m": (12, 768, 12, 2048, 16384)}

Step = tuple[dict[str, Any], tuple]  # what one forward was given, and the window of its cache


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("other", type=Path, help="root of the other checkout")
    parser.add_argument("--size", choices=RANDOM_SIZES, help="a model with random weights, not the reference model")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--problems", type=int, default=4, help="batches that are decoded")
    parser.add_argument("--turns", type=int, default=31, help="of each checkout")
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument("--cpu-time", action="store_true", help="of this process, for a machine that others use too")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    here, other = modeling_of(HERE, "modeling_here"), modeling_of(args.other, "modeling_other")
    results = {}
    for dtype in args.dtypes:
        models = [make_model(code, args.size).to(getattr(torch, dtype)).eval() for code in (here, other)]
        models[1].load_state_dict(models[0].state_dict())
        steps = [step for ids in prompts(args) for step in record(models[0], **ids)]
        results[dtype] = compare(models, [here, other], steps, args)
        print(dtype, results[dtype])
    report = {
        "forward": results,
        "model": args.size or "reference model",
        "batch_size": args.batch_size,
        "threads": args.threads,
        "clock": "cpu" if args.cpu_time else "wall",
        "commits": [commit(HERE), commit(args.other)],
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "processor": platform.processor() or platform.machine(),
    }
    print(json.dumps(report))


def modeling_of(root: Path, name: str) -> Any:
    """The package `modeling` of a checkout, under a name of its own."""
    folder = root / "modeling"
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None or not folder.is_dir():
        raise ValueError(f"`other` must be the root of a checkout, but {root} has no folder modeling.")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_model(code: Any, size: str | None) -> Any:
    """The reference model, the student's adapter merged into its teacher; or one with random weights."""
    if size is None:
        teacher = code.D2FLLaDAForBlockDiffusion.from_pretrained(MODELS / "teacher", dtype=torch.float32)
        return PeftModel.from_pretrained(teacher, str(MODELS / "student")).merge_and_unload()
    layers, width, heads, feed_forward, vocabulary = RANDOM_SIZES[size]
    config = code.D2FLLaDAConfig(
        n_layers=layers,
        d_model=width,
        n_heads=heads,
        mlp_hidden_size=feed_forward,
        vocab_size=vocabulary,
        block_size=16,
        mask_token_id=vocabulary - 1,
    )
    return code.D2FLLaDAForBlockDiffusion(config)


def prompts(args: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    """Batches of prompts, `(B, L)` each."""
    if args.size is not None:
        shape = (args.batch_size, 64)
        vocabulary = RANDOM_SIZES[args.size][-1]
        ids = [torch.randint(vocabulary - 1, shape) for _ in range(args.problems)]
        return [{"input_ids": batch, "attention_mask": torch.ones_like(batch)} for batch in ids]
    sys.path.insert(0, str(MODELS))
    from word_problems import make_problems

    tokenizer = AutoTokenizer.from_pretrained(MODELS / "tokenizer", padding_side="left")
    problems = make_problems("test", args.problems * args.batch_size)
    questions = [[{"role": "user", "content": problem.question}] for problem in problems]
    named = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt", "padding": True}
    return [
        dict(tokenizer.apply_chat_template(questions[start : start + args.batch_size], **named))
        for start in range(0, len(questions), args.batch_size)
    ]


def record(model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> list[Step]:
    """What each forward of `generate` was given."""
    steps: list[Step] = []

    def keep(_, __, named):
        named = dict(named)
        steps.append((named, tuple(named.pop("cache").window)))

    hook = model.register_forward_pre_hook(keep, with_kwargs=True)
    with hook:
        model.generate(input_ids, attention_mask=attention_mask, max_new_tokens=64)
    return steps


@torch.inference_mode()
def run(model: Any, code: Any, steps: list[Step], clock: Callable[[], float]) -> list[float]:
    """Seconds that each forward takes, in the order of decoding."""
    cache = code.D2FCache(model.config.num_hidden_layers, device=model.device)
    times = [clock()]
    for named, window in steps:
        cache.set_window(*window)
        model(**named, cache=cache)
        times.append(clock())
    return [end - start for start, end in zip(times[:-1], times[1:], strict=True)]


def compare(models: list[Any], codes: list[Any], steps: list[Step], args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds per forward of both, and their ratio; who goes first changes with each turn.

    `ratio` is the median over the turns. `ratio_of_fastest` takes the fastest turn of each step, so that it leaves out
    what other processes on the machine took.
    """
    clock = time.process_time if args.cpu_time else time.perf_counter
    seconds: tuple[list[list[float]], list[list[float]]] = ([], [])  # per turn, and in it per step
    for turn in range(-2, args.turns):  # the first two warm up
        for which in (0, 1) if turn % 2 else (1, 0):
            taken = run(models[which], codes[which], steps, clock)
            if turn >= 0:
                seconds[which].append(taken)
    ratios = [sum(here) / sum(other) for here, other in zip(*seconds, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    fastest = [sum(map(min, zip(*taken, strict=True))) for taken in seconds]
    medians = [statistics.median(map(sum, taken)) for taken in seconds]
    per_step = 1e3 / len(steps)
    return {
        "ms": [round(value * per_step, 4) for value in medians],
        "ratio": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(quartiles[0], 4), round(quartiles[2], 4)],
        "fastest_ms": [round(value * per_step, 4) for value in fastest],
        "ratio_of_fastest": round(fastest[0] / fastest[1], 4),
        "forwards": len(steps),
        "turns": args.turns,
    }


def commit(root: Path) -> str:
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()

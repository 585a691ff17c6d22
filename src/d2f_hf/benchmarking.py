"""How fast models answer: forwards, tokens per forward, tokens per second and latency, each with its definition.

`measure` times systems that are to be compared side by side, one prompt after the other, so that a slow moment of the
machine meets all of them. What follows from the measurements is arithmetic: `summarize` and `speed_up`.
"""

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True)
class System:
    """A way to answer a prompt: a model and how its `generate` is called.

    Args:
        model (`PreTrainedModel`): Any model with `generate`. A block-diffusion model reports its forwards; any other
            one is taken to be autoregressive, with one forward per token.
        options (`dict`): Keywords of `generate`.
    """

    model: Any
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Measurement:
    """One call of `generate` with one prompt.

    Args:
        response_ids (`list[int]`): The response up to and including its first EOS. Neither what follows it nor the
            prompt is counted.
        num_forward_passes (`int`): Forwards of the model until `generate` returned. An autoregressive model makes one
            for each token; the vanilla diffusion sampler makes the same number whatever the length of the answer.
        seconds (`float`): Wall time of the call, on an accelerator until its work is done: the latency.
    """

    response_ids: list[int]
    num_forward_passes: int
    seconds: float

    @property
    def tokens_per_forward(self) -> float:
        """Response tokens / forwards (TPF)."""
        return len(self.response_ids) / self.num_forward_passes

    @property
    def tokens_per_second(self) -> float:
        """Response tokens / wall time (TPS). The prefill of the prompt is part of the time."""
        return len(self.response_ids) / self.seconds


@dataclass(frozen=True)
class Summary:
    """Many measurements of one system.

    Args:
        num_prompts (`int`): Measurements.
        tokens_per_forward (`float`): All response tokens / all forwards.
        tokens_per_second (`float`): All response tokens / all wall time.
        latency (`float`): Median wall time of a call, in seconds.
        response_tokens (`float`): Mean response tokens of a call.
    """

    num_prompts: int
    tokens_per_forward: float
    tokens_per_second: float
    latency: float
    response_tokens: float


@dataclass(frozen=True)
class SpeedUp:
    """How many times as many tokens per second one system makes as another one, over the same prompts.

    Args:
        of_totals (`float`): Ratio of the two systems' total response tokens / total wall time.
        median (`float`): Median over the prompts of the ratio of tokens per second.
    """

    of_totals: float
    median: float


def response_tokens(response_ids: Sequence[int], eos_token_ids: Sequence[int]) -> list[int]:
    """`response_ids` up to and including the first EOS; all of them where there is none."""
    for length, token in enumerate(response_ids, start=1):
        if token in eos_token_ids:
            return list(response_ids[:length])
    return list(response_ids)


def summarize(measurements: Sequence[Measurement]) -> Summary:
    """The figures of one system.

    Raises:
        ValueError: without measurements.
    """
    if not measurements:
        raise ValueError("`measurements` must hold at least one measurement, got none. Measure at least one prompt.")
    num_tokens = sum(len(m.response_ids) for m in measurements)
    return Summary(
        num_prompts=len(measurements),
        tokens_per_forward=num_tokens / sum(m.num_forward_passes for m in measurements),
        tokens_per_second=num_tokens / sum(m.seconds for m in measurements),
        latency=statistics.median(m.seconds for m in measurements),
        response_tokens=num_tokens / len(measurements),
    )


def speed_up(measurements: Sequence[Measurement], baseline: Sequence[Measurement]) -> SpeedUp:
    """How much faster a system is than a baseline that got the same prompts in the same order.

    Raises:
        ValueError: for unequal numbers of measurements.
    """
    if len(measurements) != len(baseline):
        raise ValueError(
            f"`measurements` and `baseline` must be of the same prompts, got {len(measurements)} and {len(baseline)} "
            "of them. Take both from one call of `measure`."
        )
    ratios = [m.tokens_per_second / b.tokens_per_second for m, b in zip(measurements, baseline, strict=True)]
    totals = summarize(measurements).tokens_per_second / summarize(baseline).tokens_per_second
    return SpeedUp(of_totals=totals, median=statistics.median(ratios))


def measure(
    systems: Mapping[str, System],
    prompts: Sequence[Mapping[str, torch.Tensor]],
    warm_up: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, list[Measurement]]:
    """One measurement per system and prompt, with batch size 1.

    The systems take turns: each prompt goes to all of them before the next one is touched. The first `warm_up` prompts
    are answered by all systems before, untimed.

    Args:
        systems (`Mapping[str, System]`): What to compare, by name.
        prompts (`Sequence[Mapping[str, torch.Tensor]]`): What a tokenizer returns with `return_tensors="pt"`:
            `input_ids` and `attention_mask` of shape `(1, L)`.
        warm_up (`int`): Prompts for warming up.
        progress (`Callable[[int, int], None]`, *optional*): Called with (prompts done, prompts in all) after each one.

    Returns:
        `dict[str, list[Measurement]]`: For each system its measurements in the order of the prompts.

    Raises:
        ValueError: for a prompt that is a batch.
    """
    for prompt in prompts:
        if len(prompt["input_ids"]) != 1:
            raise ValueError(
                f"Each of `prompts` must hold one row, got {len(prompt['input_ids'])}: measurements are of batch size "
                "1. Split the batch."
            )
    for prompt in prompts[:warm_up]:
        for system in systems.values():
            measure_one(system, prompt)
    measurements: dict[str, list[Measurement]] = {name: [] for name in systems}
    for number, prompt in enumerate(prompts, start=1):
        for name, system in systems.items():
            measurements[name].append(measure_one(system, prompt))
        if progress is not None:
            progress(number, len(prompts))
    return measurements


def measure_one(system: System, prompt: Mapping[str, torch.Tensor]) -> Measurement:
    """Answers one prompt and times it."""
    model = system.model
    inputs = {name: tensor.to(model.device) for name, tensor in prompt.items()}
    _wait_for(model.device)
    start = time.perf_counter()
    output = model.generate(**inputs, **system.options, return_dict_in_generate=True)
    _wait_for(model.device)
    seconds = time.perf_counter() - start
    generated = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    forwards = getattr(output, "num_forward_passes", None)
    return Measurement(
        response_ids=response_tokens(generated, _eos_token_ids(system)),
        num_forward_passes=len(generated) if forwards is None else int(forwards[0]),
        seconds=seconds,
    )


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _eos_token_ids(system: System) -> list[int]:
    eos = system.options.get("eos_token_id", system.model.generation_config.eos_token_id)
    if eos is None:
        return []
    return [eos] if isinstance(eos, int) else list(eos)


def environment(model: PreTrainedModel | None = None, repository: str | Path = ".") -> dict[str, Any]:
    """What a figure depends on besides the code: versions, hardware, threads, dtype, commit.

    Args:
        model (`PreTrainedModel`, *optional*): Says the device and the dtype.
        repository (`str` or `Path`): Folder whose git commit is named, with `-dirty` if tracked files differ from it.

    Returns:
        `dict`: `python`, `torch`, `transformers` and, where it is installed, `peft` (versions), `hardware`, `threads`
        and, where it is known, `dtype` and `commit`.
    """
    device = torch.device("cpu") if model is None else model.device
    found: dict[str, Any] = {"python": platform.python_version()}
    for package in ("torch", "transformers", "peft"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    found["hardware"] = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    found["threads"] = torch.get_num_threads()
    if model is not None:
        found["dtype"] = str(model.dtype).removeprefix("torch.")
    commit = _commit(Path(repository))
    if commit is not None:
        found["commit"] = commit
    return found


def _cpu_name() -> str:
    """The processor as the system names it, and how many cores there are."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        name = lines[0].split(":", 1)[1].strip() if lines else name
    return f"{name}, {os.cpu_count()} cores"


def _commit(repository: Path) -> str | None:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    except OSError:  # no git, or no such folder
        return None
    return done.stdout.strip() if done.returncode == 0 else None

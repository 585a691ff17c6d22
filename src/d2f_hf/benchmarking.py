"""How fast models answer: forwards, tokens per forward, tokens per second and latency, each with its definition.

`measure` times systems that are to be compared side by side, one prompt after the other, so that a slow moment of the
machine meets all of them; `measure_batches` does so with several prompts per call, and `measure_stages` says where the
time of a call goes. What follows from the measurements is arithmetic: `summarize`, `speed_up`, `mean_stages`,
`batch_tokens_per_second`. What measures the decoding loop apart from the model is in `engine_benchmarking.py`.
"""

import contextlib
import functools
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

# B batch, L sequence


@dataclass(frozen=True)
class Figure:
    """A measured value and its bar.

    Args:
        name (`str`): What was measured, with the unit.
        value (`float`): The value.
        bar (`float`, *optional*): What the value has to reach; nothing for a value that is for information.
        at_most (`bool`): The value must not exceed the bar; otherwise it must not fall below it.
    """

    name: str
    value: float
    bar: float | None = None
    at_most: bool = False

    @property
    def holds(self) -> bool | None:
        """Whether the value reaches the bar; `None` without one."""
        if self.bar is None:
            return None
        return self.value <= self.bar if self.at_most else self.value >= self.bar

    def as_dict(self) -> dict[str, Any]:
        """`{"name", "value", "bar", "holds"}` for a report; the value has four decimal places."""
        return {"name": self.name, "value": round(self.value, 4), "bar": self.bar, "holds": self.holds}


def figure_table(figures: Sequence[Figure]) -> str:
    """The figures as a table for people, one a line, with the bar beside each."""
    width = max((len(figure.name) for figure in figures), default=0)
    lines = [f"{'':{width}}  {'value':>10}  {'bar':>9}  holds"]
    for figure in figures:
        bar = "" if figure.bar is None else f"{'<=' if figure.at_most else '>='} {figure.bar:g}"
        holds = {None: "", True: "yes", False: "NO"}[figure.holds]
        lines.append(f"{figure.name:{width}}  {figure.value:10.3f}  {bar:>9}  {holds}".rstrip())
    return "\n".join(lines)


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
        latency (`float`): Median wall time of a call (p50), in seconds.
        latency_p95 (`float`): The wall time, in seconds, that 95 % of the calls do not exceed; see [`percentile`].
        response_tokens (`float`): Mean response tokens of a call.
        num_forward_passes (`float`): Mean forwards of a call.
    """

    num_prompts: int
    tokens_per_forward: float
    tokens_per_second: float
    latency: float
    latency_p95: float
    response_tokens: float
    num_forward_passes: float


@dataclass(frozen=True)
class SpeedUp:
    """How many times as many tokens per second one system makes as another one, over the same prompts.

    Args:
        of_totals (`float`): Ratio of the two systems' total response tokens / total wall time.
        median (`float`): Median over the prompts of the ratio of tokens per second.
    """

    of_totals: float
    median: float


@dataclass(frozen=True)
class Stages:
    """Where the time of a call goes, in seconds.

    Args:
        time_to_first_token (`float`): From the call until the first token of the response is decoded (TTFT). Tokens
            that a block-diffusion model decodes earlier, but further on, do not count.
        prefill (`float`): The first forward. It reads the prompt; a block-diffusion model's already decodes with it.
        decode (`float`): The other forwards.
        sampling (`float`): Choosing tokens from logits, logits processors included. In a model that does not do this
            in a method `_predict`, such as an autoregressive one, it is 0 and part of `host`.
        host (`float`): The rest of the call: preparing it, composing windows, applying the rules, building the output.
    """

    time_to_first_token: float
    prefill: float
    decode: float
    sampling: float
    host: float

    @property
    def seconds(self) -> float:
        """The whole call: prefill + decode + sampling + host."""
        return self.prefill + self.decode + self.sampling + self.host


@dataclass(frozen=True)
class BatchMeasurement:
    """One call of `generate` with a batch of prompts.

    Args:
        response_ids (`list[list[int]]`): Per row the response up to and including its first EOS.
        seconds (`float`): Wall time of the call, until all rows are finished.
    """

    response_ids: list[list[int]]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Response tokens of all rows / wall time (TPS). Padding behind the end of a row is not counted."""
        return sum(len(row) for row in self.response_ids) / self.seconds


def response_tokens(response_ids: Sequence[int], eos_token_ids: Sequence[int]) -> list[int]:
    """`response_ids` up to and including the first EOS; all of them where there is none."""
    for length, token in enumerate(response_ids, start=1):
        if token in eos_token_ids:
            return list(response_ids[:length])
    return list(response_ids)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of `values` that at least `share` of them do not exceed (nearest rank, nothing interpolated).

    Raises:
        ValueError: without values, or for a share that is not in (0, 1].
    """
    if not values:
        raise ValueError("`values` must hold at least one value, got none. Measure at least one prompt.")
    if not 0.0 < share <= 1.0:
        raise ValueError(f"`share` must be in (0, 1], got {share}. 0.95 gives the 95th percentile.")
    return sorted(values)[math.ceil(share * len(values) - 1e-9) - 1]  # 0.07 * 100 is a little more than 7


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
        latency_p95=percentile([m.seconds for m in measurements], 0.95),
        response_tokens=num_tokens / len(measurements),
        num_forward_passes=statistics.fmean(m.num_forward_passes for m in measurements),
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


def mean_stages(stages: Sequence[Stages]) -> Stages:
    """The mean over calls of each stage, and of the time to the first token.

    Raises:
        ValueError: without stages.
    """
    if not stages:
        raise ValueError("`stages` must hold the stages of at least one call, got none. Measure at least one prompt.")
    names = [part.name for part in fields(Stages)]
    return Stages(**{name: statistics.fmean(getattr(s, name) for s in stages) for name in names})


def batch_tokens_per_second(measurements: Sequence[BatchMeasurement]) -> float:
    """All response tokens / all wall time of several batches.

    Raises:
        ValueError: without measurements.
    """
    if not measurements:
        raise ValueError("`measurements` must hold at least one batch, got none. Measure at least one.")
    num_tokens = sum(len(row) for m in measurements for row in m.response_ids)
    return num_tokens / sum(m.seconds for m in measurements)


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
    _check_single_rows(prompts)
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
    output, seconds = timed_generate(system, prompt)
    generated = output.sequences[0, prompt["input_ids"].shape[1] :].tolist()
    forwards = getattr(output, "num_forward_passes", None)
    return Measurement(
        response_ids=response_tokens(generated, eos_token_ids(system)),
        num_forward_passes=len(generated) if forwards is None else int(forwards[0]),
        seconds=seconds,
    )


def measure_batches(
    systems: Mapping[str, System],
    prompts: Sequence[Mapping[str, torch.Tensor]],
    pad_token_id: int,
    batch_sizes: Sequence[int] = (1, 4, 16, 64),
    warm_up: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, dict[int, list[BatchMeasurement]]]:
    """All prompts answered in batches of each size, so that tokens per second can be compared between sizes.

    The systems take turns, batch by batch, and the sizes follow each other. Of each size the first `warm_up` batches
    are answered by all systems before, untimed.

    Args:
        systems (`Mapping[str, System]`): What to compare, by name.
        prompts (`Sequence[Mapping[str, torch.Tensor]]`): As for [`measure`]. A batch is padded at the left.
        pad_token_id (`int`): The token that pads.
        batch_sizes (`Sequence[int]`): Prompts per call.
        warm_up (`int`): Batches for warming up.
        progress (`Callable[[int, int], None]`, *optional*): Called with (batches done, batches in all) after each one.

    Returns:
        `dict[str, dict[int, list[BatchMeasurement]]]`: For each system and batch size its measurements in order.

    Raises:
        ValueError: for a prompt that is a batch, or if a batch size does not divide the number of prompts.
    """
    _check_single_rows(prompts)
    for size in batch_sizes:
        if size < 1 or not prompts or len(prompts) % size:
            raise ValueError(
                f"`prompts` must be a multiple of each of `batch_sizes`, so that all sizes answer the same ones, got "
                f"{len(prompts)} prompts for batches of {size}. Leave some out, or take other sizes."
            )
    batches = {
        size: [left_padded(prompts[i : i + size], pad_token_id) for i in range(0, len(prompts), size)]
        for size in batch_sizes
    }
    num_batches, done = sum(len(of_size) for of_size in batches.values()), 0
    measurements: dict[str, dict[int, list[BatchMeasurement]]]
    measurements = {name: {size: [] for size in batch_sizes} for name in systems}
    for size, of_size in batches.items():
        for batch in of_size[:warm_up]:
            for system in systems.values():
                timed_generate(system, batch)
        for batch in of_size:
            for name, system in systems.items():
                output, seconds = timed_generate(system, batch)
                generated = output.sequences[:, batch["input_ids"].shape[1] :].tolist()
                rows = [response_tokens(row, eos_token_ids(system)) for row in generated]
                measurements[name][size].append(BatchMeasurement(rows, seconds))
            done += 1
            if progress is not None:
                progress(done, num_batches)
    return measurements


def left_padded(prompts: Sequence[Mapping[str, torch.Tensor]], pad_token_id: int) -> dict[str, torch.Tensor]:
    """Prompts `(1, L)` as one batch `(B, L)` with `attention_mask`, the shorter ones padded at the left."""
    length = max(prompt["input_ids"].shape[1] for prompt in prompts)
    ids, masks = [], []
    for prompt in prompts:
        missing = length - prompt["input_ids"].shape[1]
        mask = prompt.get("attention_mask")
        ids.append(F.pad(prompt["input_ids"], (missing, 0), value=pad_token_id))
        masks.append(F.pad(torch.ones_like(prompt["input_ids"]) if mask is None else mask, (missing, 0)))
    return {"input_ids": torch.cat(ids), "attention_mask": torch.cat(masks)}


def measure_stages(
    systems: Mapping[str, System],
    prompts: Sequence[Mapping[str, torch.Tensor]],
    warm_up: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, list[Stages]]:
    """Where the time of each system's calls goes, with batch size 1; the systems take turns as in [`measure`].

    Looking costs time, so these calls are apart from those that make tokens per second. Each prompt is answered twice:
    once up to its first token, with a streamer, which is told when that is decoded and ends the call; and once with
    clocks around the forwards and `_predict`, which wait for an accelerator before they are read.

    Args:
        systems, prompts, warm_up, progress: As for [`measure`].

    Returns:
        `dict[str, list[Stages]]`: For each system its stages in the order of the prompts.

    Raises:
        ValueError: for a prompt that is a batch.
    """
    _check_single_rows(prompts)
    for prompt in prompts[:warm_up]:
        for system in systems.values():
            _stages(system, prompt)
    stages: dict[str, list[Stages]] = {name: [] for name in systems}
    for number, prompt in enumerate(prompts, start=1):
        for name, system in systems.items():
            stages[name].append(_stages(system, prompt))
        if progress is not None:
            progress(number, len(prompts))
    return stages


class _FirstToken(Exception):
    """Ends a call of `generate` when its first token is there."""


class _FirstTokenStreamer(BaseStreamer):
    def __init__(self):
        self.is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        if not self.is_prompt:
            raise _FirstToken
        self.is_prompt = False

    def end(self) -> None:
        pass


def _stages(system: System, prompt: Mapping[str, torch.Tensor]) -> Stages:
    streaming = System(system.model, {**system.options, "streamer": _FirstTokenStreamer()})
    wait_for(system.model.device)
    start = time.perf_counter()
    with contextlib.suppress(_FirstToken):
        timed_generate(streaming, prompt)
    time_to_first_token = time.perf_counter() - start

    model = without_adapter(system.model)
    forwards: list[float] = []
    choices: list[float] = []

    def clocked(method: Callable, seconds: list[float]) -> Callable:
        def call(*args, **kwargs):
            wait_for(model.device)
            start = time.perf_counter()
            result = method(*args, **kwargs)
            wait_for(model.device)
            seconds.append(time.perf_counter() - start)
            return result

        return call

    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced_method(model, "forward", lambda forward: clocked(forward, forwards)))
        if hasattr(model, "_predict"):
            stack.enter_context(replaced_method(model, "_predict", lambda predict: clocked(predict, choices)))
        _, seconds = timed_generate(system, prompt)
    prefill, decode, sampling = sum(forwards[:1]), sum(forwards[1:]), sum(choices)
    return Stages(time_to_first_token, prefill, decode, sampling, host=seconds - prefill - decode - sampling)


@contextlib.contextmanager
def replaced_method(model: Any, name: str, replacement: Callable[[Callable], Callable]) -> Iterator[None]:
    """Puts `replacement(method)` in the place of the method `name` of this one `model` while the context lasts."""
    method = getattr(model, name)
    before = vars(model).get(name)  # another replacement
    setattr(model, name, functools.wraps(method)(replacement(method)))  # `generate` reads the signature of `forward`
    try:
        yield
    finally:
        delattr(model, name)
        if before is not None:
            setattr(model, name, before)


def without_adapter(model: Any) -> Any:
    """The model itself where `model` is a `PeftModel`, which runs the model's own `generate` and `forward`."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def timed_generate(system: System, inputs: Mapping[str, torch.Tensor]) -> tuple[Any, float]:
    """Calls `generate` with prompts `(B, L)`: the output and the seconds, on an accelerator until its work is done."""
    model = system.model
    inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    wait_for(model.device)
    start = time.perf_counter()
    output = model.generate(**inputs, **system.options, return_dict_in_generate=True)
    wait_for(model.device)
    return output, time.perf_counter() - start


def wait_for(device: torch.device) -> None:
    """Waits until an accelerator has done its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _check_single_rows(prompts: Sequence[Mapping[str, torch.Tensor]]) -> None:
    for prompt in prompts:
        if len(prompt["input_ids"]) != 1:
            raise ValueError(
                f"Each of `prompts` must hold one row, got {len(prompt['input_ids'])}: they are measured one by one, "
                "or batched here. Split the batch."
            )


def eos_token_ids(system: System) -> list[int]:
    """The tokens that end a response of a system: those of its options, else those of its model."""
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

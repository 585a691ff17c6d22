"""How fast models answer: forwards, tokens per forward, tokens per second and latency, each with its definition.

`measure` times systems that are to be compared side by side, one prompt after the other, so that a slow moment of the
machine meets all of them. `measure_batches` does so with several prompts per call, and `answer_in_batches` lets one
system answer prompts. What follows from the measurements is arithmetic: `summarize`, `speed_up`,
`batch_tokens_per_second`.

    twin = System(autoregressive_model, {"max_new_tokens": 256, "do_sample": False})
    d2f = System(d2f_model, {"max_new_tokens": 256})
    measurements = measure({"D2F": d2f, "twin": twin}, prompts)
    print(summarize(measurements["D2F"]), speed_up(measurements["D2F"], measurements["twin"]))
"""

import math
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
from torch.nn import functional as F
from transformers import PreTrainedModel

# B batch, L sequence


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
    check_single_rows(prompts)
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
    (response_ids,), (num_forward_passes,), seconds = _answer(system, prompt)
    return Measurement(response_ids, num_forward_passes, seconds)


def answer_in_batches(
    system: System,
    prompts: Sequence[Mapping[str, torch.Tensor]],
    pad_token_id: int,
    batch_size: int,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[list[int]], list[int]]:
    """All prompts answered by one system, so many at a time, without a clock. The last batch may be smaller.

    Args:
        system (`System`): What answers.
        prompts (`Sequence[Mapping[str, torch.Tensor]]`): As for [`measure`]. A batch is padded at the left.
        pad_token_id (`int`): The token that pads.
        batch_size (`int`): Prompts per call.
        progress (`Callable[[int, int], None]`, *optional*): Called with (prompts done, prompts in all) after each
            call.

    Returns:
        `tuple[list[list[int]], list[int]]`: For each prompt the response up to and including its first EOS, and the
            forwards that its row took part in.

    Raises:
        ValueError: for a prompt that is a batch, or a batch size below 1.
    """
    check_single_rows(prompts)
    if batch_size < 1:
        raise ValueError(f"`batch_size` must be at least 1, got {batch_size}. 1 answers the prompts one by one.")
    response_ids: list[list[int]] = []
    num_forward_passes: list[int] = []
    for first in range(0, len(prompts), batch_size):
        rows, forwards, _ = _answer(system, left_padded(prompts[first : first + batch_size], pad_token_id))
        response_ids += rows
        num_forward_passes += forwards
        if progress is not None:
            progress(len(response_ids), len(prompts))
    return response_ids, num_forward_passes


def _answer(system: System, inputs: Mapping[str, torch.Tensor]) -> tuple[list[list[int]], list[int], float]:
    """One call with prompts `(B, L)`: the response and the forwards of each row, and the seconds."""
    output, seconds = timed_generate(system, inputs)
    num_forward_passes = getattr(output, "num_forward_passes", None)
    if num_forward_passes is None:  # an autoregressive model
        forwards = [output.sequences.shape[1] - inputs["input_ids"].shape[1]] * len(output.sequences)
    else:
        forwards = num_forward_passes.tolist()
    return responses(system, inputs, output), forwards, seconds


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
    check_single_rows(prompts)
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
                rows, _, seconds = _answer(system, batch)
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


def timed_generate(system: System, inputs: Mapping[str, torch.Tensor]) -> tuple[Any, float]:
    """Calls `generate` with prompts `(B, L)`: the output and the seconds, on an accelerator until its work is done."""
    model = system.model
    inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    wait_for(model.device)
    start = time.perf_counter()
    output = model.generate(**inputs, **{**system.options, "return_dict_in_generate": True})
    wait_for(model.device)
    return output, time.perf_counter() - start


def responses(system: System, inputs: Mapping[str, torch.Tensor], output: Any) -> list[list[int]]:
    """The response of each row of `inputs` in an `output` of `generate`, up to and including its first EOS.

    Raises:
        ValueError: if the output has another number of rows.
    """
    if len(output.sequences) != len(inputs["input_ids"]):
        raise ValueError(
            f"`system.options` must give one response for each prompt, got {len(output.sequences)} for "
            f"{len(inputs['input_ids'])} prompts. Leave out `num_return_sequences`, and repeat the prompts instead."
        )
    rows = output.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    return [response_tokens(row, eos_token_ids(system)) for row in rows]


def wait_for(device: torch.device) -> None:
    """Waits until an accelerator has done its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def check_single_rows(prompts: Sequence[Mapping[str, torch.Tensor]]) -> None:
    """Raises a `ValueError` for a prompt that is not a single row `(1, L)`."""
    for prompt in prompts:
        if prompt["input_ids"].dim() != 2:
            raise ValueError(
                f"Each of `prompts` must have `input_ids` of shape (1, L), got {tuple(prompt['input_ids'].shape)}. "
                'A tokenizer gives them with return_tensors="pt".'
            )
        if len(prompt["input_ids"]) != 1:
            raise ValueError(
                f"Each of `prompts` must hold one row, got {len(prompt['input_ids'])}: they are measured one by one, "
                "or batched here. Split the batch."
            )


def eos_token_ids(system: System) -> list[int]:
    """The tokens that end a response of a system: those of its options, else those of its model."""
    eos = system.model.generation_config.eos_token_id
    if getattr(system.options.get("generation_config"), "eos_token_id", None) is not None:
        eos = system.options["generation_config"].eos_token_id
    eos = system.options.get("eos_token_id", eos)
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

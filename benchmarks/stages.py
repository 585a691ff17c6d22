"""Where the time of a call of `generate` goes: prefill, other forwards, choosing tokens, and the rest."""

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from transformers.generation.streamers import BaseStreamer

from benchmarks.probes import replaced_method, without_adapter, wrapped_sampler
from d2f_hf.benchmarking import System, check_single_rows, timed_generate, wait_for


@dataclass(frozen=True)
class Stages:
    """Where the time of a call goes, in seconds.

    Args:
        time_to_first_token (`float`): From the call until the first token of the response is decoded (TTFT). Tokens
            that a block-diffusion model decodes earlier, but further on, do not count.
        prefill (`float`): The first forward. It reads the prompt; a block-diffusion model's already decodes with it.
        decode (`float`): The other forwards.
        sampling (`float`): Choosing tokens from logits, logits processors included. In a model that has no
            `sampler_class`, such as an autoregressive one, it is 0 and part of `host`.
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


def mean_stages(stages: Sequence[Stages]) -> Stages:
    """The mean over calls of each stage, and of the time to the first token.

    Raises:
        ValueError: without stages.
    """
    if not stages:
        raise ValueError("`stages` must hold the stages of at least one call, got none. Measure at least one prompt.")
    names = [part.name for part in fields(Stages)]
    return Stages(**{name: statistics.fmean(getattr(s, name) for s in stages) for name in names})


def measure_stages(
    systems: Mapping[str, System],
    prompts: Sequence[Mapping[str, torch.Tensor]],
    warm_up: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, list[Stages]]:
    """Where the time of each system's calls goes, with batch size 1; the systems take turns as in [`measure`].

    Looking costs time, so these calls are apart from those that make tokens per second. Each prompt is answered twice:
    once up to its first token, with a streamer, which is told when that is decoded and ends the call; and once with
    clocks around the forwards and the sampler, which wait for an accelerator before they are read.

    Args:
        systems, prompts, warm_up, progress: As for [`measure`].

    Returns:
        `dict[str, list[Stages]]`: For each system its stages in the order of the prompts.

    Raises:
        ValueError: for a prompt that is a batch.
    """
    check_single_rows(prompts)
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
        if hasattr(model, "sampler_class"):
            stack.enter_context(wrapped_sampler(model, lambda choose: clocked(choose, choices)))
        _, seconds = timed_generate(system, prompt)
    prefill, decode, sampling = sum(forwards[:1]), sum(forwards[1:]), sum(choices)
    return Stages(time_to_first_token, prefill, decode, sampling, host=seconds - prefill - decode - sampling)

"""How much memory a denoising step takes beyond the weights and the key/value cache."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from transformers.cache_utils import Cache

from benchmarks.engine import num_logits
from benchmarks.probes import block_diffusion_model, replaced_method
from benchmarks.scripted import ScriptedAcceptance, timed_call
from d2f_hf.benchmarking import System, wait_for

# B batch, W window, M masked tokens in the window, all rows, V vocabulary

STEP = "d2f_denoising_step"  # marks the start of a forward among the profiler's events


@dataclass(frozen=True)
class StepMemory:
    """The denoising step that takes most memory.

    Args:
        peak_bytes (`int`): Most memory at a time, beyond weights and key/value cache.
        logits_bytes (`int`): The logits of the masked rows in the model's dtype: M * V * bytes of a value.
        num_masked (`int`): M.
        num_positions (`int`): Positions in the window of the batch, B * W.
    """

    peak_bytes: int
    logits_bytes: int
    num_masked: int
    num_positions: int

    @property
    def ratio(self) -> float:
        """Peak memory / logits."""
        return self.peak_bytes / self.logits_bytes


def step_memory(
    system: System, inputs: Mapping[str, torch.Tensor], script: ScriptedAcceptance | None = None
) -> StepMemory:
    """The memory of the denoising step that takes the most, beyond weights and key/value cache.

    A step lasts from the start of a forward to the start of the next one, or to the end of the call; the first one is
    left out. On a CPU the allocator's events are added up in order of time, from the start of the call; what a kernel
    takes from elsewhere is not seen. On CUDA it is what the allocator says.

    Args:
        system (`System`): A block-diffusion model and the keywords of `generate`.
        inputs (`Mapping[str, torch.Tensor]`): Prompts `(B, L)`.
        script (`ScriptedAcceptance`, *optional*): Replaces the choice of tokens.

    Raises:
        ValueError: on another device, or if the call takes less than two forwards.
    """
    model = block_diffusion_model(system.model)
    device = model.device
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"`system.model` must be on a CPU or on CUDA to count memory, but it is on {device}. Move it."
        )
    value_size = torch.empty((), dtype=model.dtype).element_size()
    steps: list[tuple[int, int]] = []  # positions and masked ones
    cache_bytes: list[int] = []  # at the start of each step
    peaks: list[int] = []  # on CUDA: up to the start of each step

    def marking(forward: Callable) -> Callable:
        def call(**kwargs):
            steps.append((kwargs["input_ids"].numel(), num_logits(kwargs["logits_to_keep"])))
            caches.append(kwargs.get("cache"))
            cache_bytes.append(_cache_bytes(caches[-1]))
            if device.type == "cuda":
                peaks.append(torch.cuda.max_memory_allocated(device))
                torch.cuda.reset_peak_memory_stats(device)
            with record_function(STEP):
                return forward(**kwargs)

        return call

    caches: list[Cache | None] = []
    with replaced_method(model, "forward", marking):
        if device.type == "cuda":
            wait_for(device)
            before = torch.cuda.memory_allocated(device)
            timed_call(system, inputs, script)
            peaks.append(torch.cuda.max_memory_allocated(device))
            totals = [peak - before for peak in peaks[1:]]
        else:
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
                timed_call(system, inputs, script)
            events = list(_flat(profiler.profiler.kineto_results.experimental_event_tree()))
            allocations = [
                (event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size)
                for event in events
                if event.name == "[memory]"
            ]
            starts = [event.start_time_ns for event in events if event.name == STEP]
            totals = highest_totals(known_changes(allocations), starts)
    if len(steps) < 2:
        raise ValueError(
            f"`inputs` and `script` must take two forwards at least, because the first one is left out, got "
            f"{len(steps)}. Decode more tokens."
        )
    # The cache may grow at the end of a step, for the next one.
    cache_bytes.append(_cache_bytes(caches[-1]))
    beyond = [total - max(cache_bytes[i : i + 2]) for i, total in enumerate(totals)]
    largest = max(range(1, len(beyond)), key=beyond.__getitem__)
    num_positions, num_masked = steps[largest]
    logits_bytes = num_masked * model.config.vocab_size * value_size
    return StepMemory(beyond[largest], logits_bytes, num_masked, num_positions)


def known_changes(allocations: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Time and bytes of what was taken in a profile, and of when that was given back.

    The profiler also reports memory that is given back in the profile but was taken before it, with the size of what
    an earlier profile saw at its address.

    Args:
        allocations (`Sequence[tuple[int, int, int]]`): Time, address and bytes, negative where memory is given back.
    """
    changes, taken = [], set()
    for moment, address, size in sorted(allocations):
        if size > 0:
            taken.add(address)
        elif address not in taken:
            continue
        else:
            taken.remove(address)
        changes.append((moment, size))
    return changes


def highest_totals(changes: Sequence[tuple[int, int]], starts: Sequence[int]) -> list[int]:
    """The highest running total of memory in each step.

    Args:
        changes (`Sequence[tuple[int, int]]`): Time and bytes, negative where memory is given back, in any order.
        starts (`Sequence[int]`): When each step starts. It lasts until the next one starts, the last one for ever.

    Returns:
        `list[int]`: Per step. What was taken before it counts as long as it is not given back.
    """
    # At the same time the start of a step comes first.
    points = sorted([(start, 0, 0) for start in starts] + [(moment, 1, size) for moment, size in changes])
    total, highest = 0, []
    for _, is_change, size in points:
        total += size
        if not is_change:
            highest.append(total)
        elif highest:
            highest[-1] = max(highest[-1], total)
    return highest


def _cache_bytes(cache: Cache | None) -> int:
    layers = [] if cache is None else [layer for layer in cache.layers if layer.is_initialized]
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)


def _flat(events: Sequence[Any]) -> Iterator[Any]:
    """The profiler's events and those within them."""
    for event in events:
        yield event
        yield from _flat(event.children)

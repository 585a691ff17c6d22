"""The memory of a denoising step beyond weights and cache."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks import memory as memory_module
from benchmarks.memory import StepMemory, highest_totals, known_changes, step_memory
from benchmarks.probes import replaced_method, wrapped_sampler
from benchmarks.scripted import scripted_run
from tiny_models import VOCAB_SIZE, tiny_model


def test_highest_total_of_each_step_counts_what_is_still_held():
    changes = [(1, 10), (3, 5), (4, -5), (5, 20), (6, -20), (8, 7), (9, -10), (10, 1)]
    assert highest_totals(changes, [2, 7]) == [30, 17]
    assert highest_totals(list(reversed(changes)), [7, 2]) == [30, 17]
    # Memory that is taken in the very moment when a step starts belongs to it.
    assert highest_totals([(1, 10), (2, 5)], [0, 2]) == [10, 15]
    assert highest_totals([(1, 10)], []) == []


def test_memory_that_was_taken_before_the_profile_is_not_given_back_in_it():
    """The profiler reports it with the size of what an earlier profile saw at its address, which made totals low."""
    allocations = [(5, 100, 10), (7, 300, -3584), (8, 100, -10), (9, 300, 6), (6, 200, 4), (11, 300, -6)]
    assert known_changes(allocations) == [(5, 10), (6, 4), (8, -10), (9, 6), (11, -6)]


def memory_with(model, num_bytes, in_calls, **options):
    """Step memory when those of the calls of the sampler hold so many bytes for a moment."""
    calls = []

    def allocating(choose):
        def call(*args):
            calls.append(torch.empty(num_bytes, dtype=torch.uint8).shape if len(calls) in in_calls else None)
            return choose(*args)

        return call

    system, inputs, script = scripted_run(
        model, 2, 4.0, prompt_length=5, max_new_tokens=8, ragged=False, block_size=8, **options
    )
    with wrapped_sampler(model, allocating):
        return step_memory(system, inputs, script)


def test_step_memory_sees_a_known_allocation():
    model = tiny_model()
    size = 8 * 2**20
    plain, more = memory_with(model, size, []), memory_with(model, size, [1])
    assert size <= more.peak_bytes <= size + plain.peak_bytes
    assert plain.peak_bytes < size / 10


def test_step_memory_leaves_the_first_forward_out():
    model = tiny_model()
    assert memory_with(model, 8 * 2**20, [0]).peak_bytes < 2**20


def test_step_memory_is_beyond_the_cache():
    """Room for 30,000 tokens of two rows is more than a step of a few tokens takes."""
    model = tiny_model(max_position_embeddings=40000)

    def reserving(forward):
        def call(**kwargs):
            kwargs["cache"].reserve(2, 30000)
            return forward(**kwargs)

        return call

    with replaced_method(model, "forward", reserving):
        memory = memory_with(model, 0, [])
    assert memory.peak_bytes < 2**20 < 2 * 2 * 2 * 30000 * 32 * 4


def test_step_memory_is_compared_with_the_logits_of_the_masked_rows():
    memory = memory_with(tiny_model(), 0, [])
    # The second of two forwards: 2 rows of 8 positions, of which 4 are still masked.
    assert memory.num_positions == 16 and memory.num_masked == 8
    assert memory.logits_bytes == 8 * VOCAB_SIZE * 4
    assert StepMemory(300, 200, 1, 1).ratio == 1.5
    half = memory_with(tiny_model().to(torch.bfloat16), 0, [])
    assert half.logits_bytes == 8 * VOCAB_SIZE * 2


def test_step_memory_needs_a_second_forward():
    run = scripted_run(tiny_model(), prompt_length=4, max_new_tokens=4)
    with pytest.raises(ValueError, match="must take two forwards at least.*got 1"):
        step_memory(*run)


def test_memory_is_counted_on_a_cpu_or_cuda_only(monkeypatch):
    system, inputs, script = scripted_run(tiny_model(), prompt_length=4, max_new_tokens=4)
    elsewhere = SimpleNamespace(device=torch.device("meta"))
    monkeypatch.setattr(memory_module, "block_diffusion_model", lambda model: elsewhere)
    with pytest.raises(ValueError, match="must be on a CPU or on CUDA.*meta"):
        step_memory(system, inputs, script)

"""What the decoding loop costs apart from the model: recorded forwards, overhead, shares, context, adapters."""

from types import SimpleNamespace

import pytest
import torch
from d2f_hf.modeling.sampler import Sampler
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM

from benchmarks.engine import (
    ContextGrowth,
    RecordedForward,
    context_growth,
    early_end,
    gain,
    loop_overhead,
    masked_share,
    merged_adapter_gain,
    record_forwards,
    replay_forwards,
)
from benchmarks.memory import step_memory
from benchmarks.probes import replaced_method
from benchmarks.scripted import ScriptedAcceptance, scripted_run
from d2f_hf import D2FLLaDAForBlockDiffusion, benchmarking
from d2f_hf.benchmarking import System, left_padded
from tiny_models import MASK, PAD, tiny_model

PROMPT = {"input_ids": torch.tensor([[1, 2, 3]])}


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(benchmarking.time, "perf_counter", lambda: clock.now)
    return clock


def model_that_takes(clock, forward=lambda kwargs: 1.0, predict=0.5):
    """A tiny model whose forwards and choices take so many seconds of the scripted clock, and nothing else does."""

    class TimedSampler(Sampler):
        def __call__(self, *args, **kwargs):
            clock.now += predict
            return super().__call__(*args, **kwargs)

    class Timed(D2FLLaDAForBlockDiffusion):
        sampler_class = TimedSampler

        def forward(self, *args, **kwargs):
            clock.now += forward(kwargs)
            return super().forward(*args, **kwargs)

    model = tiny_model()
    model.__class__ = Timed
    return model


def test_replayed_forwards_are_those_of_the_loop():
    """Same arguments in the same order, and for one row, whose keys and values are written anew, the same logits."""
    model = tiny_model()
    logits = []

    def keeping(forward):
        return lambda **kwargs: (output := forward(**kwargs), logits.append(output.logits.clone()))[0]

    system = System(model, {"max_new_tokens": 16, "confidence_threshold": 0.2})
    with replaced_method(model, "forward", keeping):
        forwards = record_forwards(system, PROMPT)
    output = model.generate(**PROMPT, **system.options, return_dict_in_generate=True)
    assert len(forwards) == len(logits) == int(output.num_forward_passes)
    assert forwards[0].kwargs["input_ids"].shape == (1, 3 + 4)
    with torch.inference_mode():
        for forward in forwards:
            forward.kwargs["cache"].layers[0].keys.normal_()  # it does not matter what the cache holds
    replayed = []
    with replaced_method(model, "forward", lambda forward: lambda **kwargs: replayed.append(forward(**kwargs).logits)):
        replay_forwards(model, forwards)
    assert all(torch.equal(a, b) for a, b in zip(logits, replayed, strict=True))
    assert "forward" not in vars(model)


def test_forwards_of_compiled_steps_are_not_recorded():
    system = System(tiny_model(), {"max_new_tokens": 4, "compile_config": CompileConfig()})
    for call in (record_forwards, loop_overhead):
        with pytest.raises(ValueError, match="`compile_config`"):
            call(system, PROMPT)


def test_compiled_steps_are_compared_with_those_as_they_are():
    model = tiny_model()
    system, inputs, script = scripted_run(model, prompt_length=4, max_new_tokens=8)
    compiled = System(model, {**system.options, "compile_config": CompileConfig(backend="eager", mode=None)})
    with torch.compiler.set_stance("default"):
        assert gain(compiled, system, inputs, script, repetitions=1) > 0.0


def test_recorded_tensors_are_copies():
    """A loop may write each window into the same tensors."""
    model = tiny_model()

    def overwriting(forward):
        def call(**kwargs):
            output = forward(**kwargs)
            kwargs["input_ids"].zero_()
            kwargs["cache"].window[0].zero_()
            return output

        return call

    with replaced_method(model, "forward", overwriting):
        (first, *_) = record_forwards(System(model, {"max_new_tokens": 4}), PROMPT)
    assert first.kwargs["input_ids"].tolist() == [[1, 2, 3, MASK, MASK, MASK, MASK]]
    assert first.window[0].tolist() == [list(range(7))]


@pytest.mark.parametrize("decoding", ["vanilla", "fast_dllm"])
def test_forwards_of_other_decoders_can_be_replayed(decoding):
    model = tiny_model()
    system = System(model, {"max_new_tokens": 8, "decoding": decoding})
    forwards = record_forwards(system, PROMPT)
    output = model.generate(**PROMPT, **system.options, return_dict_in_generate=True)
    assert len(forwards) == int(output.num_forward_passes)
    replay_forwards(model, forwards)


def test_forwards_of_a_batch_whose_rows_leave_can_be_replayed():
    model = tiny_model(block_size=8)
    system, inputs, script = scripted_run(model, 6, 4.0, prompt_length=8, max_new_tokens=32)
    forwards = record_forwards(system, inputs, script)
    rows = [len(forward.kwargs["input_ids"]) for forward in forwards]
    assert rows[0] == 6 and rows == sorted(rows, reverse=True)
    replay_forwards(model, forwards)
    replay_forwards(model, forwards)


def test_an_autoregressive_model_cannot_be_recorded():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    twin = LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes))
    for function in (record_forwards, loop_overhead, step_memory):
        with pytest.raises(ValueError, match="`system.model` must be a block-diffusion model.*LlamaForCausalLM"):
            function(System(twin), PROMPT)


def test_overhead_is_the_call_over_its_forwards(clock):
    model = model_that_takes(clock, predict=0.25)
    overhead = loop_overhead(System(model, {"max_new_tokens": 12}), PROMPT, ScriptedAcceptance([3.0]), repetitions=4)
    assert overhead.ratio == 1.25
    assert overhead.generate_seconds == 5.0 and overhead.forward_seconds == 4.0
    assert len(overhead.forwards) == 4 and overhead.num_tokens == 12
    assert overhead.tokens_per_second == 2.4


def test_time_in_the_script_is_not_the_loops(clock, monkeypatch):
    choose = ScriptedAcceptance.choose

    def slow(*args):
        clock.now += 10.0
        return choose(*args)

    monkeypatch.setattr(ScriptedAcceptance, "choose", slow)
    model, script = model_that_takes(clock, predict=0.25), ScriptedAcceptance([3.0])
    assert loop_overhead(System(model, {"max_new_tokens": 12}), PROMPT, script, repetitions=1).ratio == 1.25
    growth = context_growth(model, (8, 16), max_new_tokens=16, repetitions=1)
    assert growth.step_seconds == (1.25, 1.25) and growth.forward_seconds == (1.0, 1.0)


def test_repetitions_are_at_least_one():
    model = tiny_model()
    system, inputs, script = scripted_run(model, prompt_length=4, max_new_tokens=8)
    for call in (
        lambda: loop_overhead(system, inputs, script, repetitions=0),
        lambda: merged_adapter_gain(system, inputs, script, repetitions=0),
        lambda: context_growth(model, (4, 8), repetitions=0),
        lambda: early_end(model, 4, (8, 16), repetitions=0),
    ):
        with pytest.raises(ValueError, match="`repetitions` must be at least 1, got 0"):
            call()


def by_hand(num_rows, width, masked):
    """A forward with a window of that width, of which the `masked` places (row, column) are wanted."""
    mask = torch.zeros(num_rows, width, dtype=torch.bool)
    for row, column in masked:
        mask[row, column] = True
    return RecordedForward({"input_ids": torch.zeros(num_rows, width), "logits_to_keep": mask}, None)


def test_masked_share_is_of_all_positions_that_went_through_the_model():
    first = by_hand(2, 5, [(0, 3), (0, 4), (1, 4)])
    second = by_hand(2, 3, [(0, 0), (0, 1), (1, 0), (1, 2)])
    assert masked_share([first, second]) == 7 / 16
    assert masked_share([first, second], without_prefill=True) == 4 / 6
    pair = (torch.tensor([0, 0, 1]), torch.tensor([3, 4, 4]))
    assert masked_share([RecordedForward({**first.kwargs, "logits_to_keep": pair}, None)]) == 3 / 10
    with pytest.raises(ValueError, match="`forwards` must hold a forward to count"):
        masked_share([first], without_prefill=True)


def test_masked_share_of_a_run_counted_by_hand():
    """Prompt 3, block 4, two tokens a step: 7 positions with 4 masked ones, then the block alone with 2; and so on."""
    model = tiny_model()
    system = System(model, {"max_new_tokens": 4})
    forwards = record_forwards(system, PROMPT, ScriptedAcceptance([2.0]))
    assert [(forward.num_positions, forward.num_masked) for forward in forwards] == [(7, 4), (4, 2)]
    assert masked_share(forwards) == 6 / 11
    # In a batch the shorter prompt is padding in the first forward, and the row that ends first leaves.
    batch = left_padded([PROMPT, {"input_ids": torch.tensor([[5]])}], PAD)
    forwards = record_forwards(system, batch, ScriptedAcceptance([2.0, 4.0]))
    assert [(forward.num_positions, forward.num_masked) for forward in forwards] == [(14, 8), (4, 2)]


def test_growth_of_a_step_is_compared_with_that_of_its_forward():
    growth = ContextGrowth((256, 4096), step_seconds=(2.0, 5.0), forward_seconds=(1.0, 2.0))
    assert growth.ratio == 1.25


def test_context_growth_leaves_the_prefill_out(clock):
    model = model_that_takes(clock, forward=lambda kwargs: float(kwargs["cache"].window[1] > 40) * 2 + 1, predict=1.0)
    growth = context_growth(model, (16, 64), max_new_tokens=16, repetitions=1)
    assert growth.contexts == (16, 64)
    assert growth.step_seconds == (2.0, 4.0) and growth.forward_seconds == (1.0, 3.0)
    with pytest.raises(ValueError, match="`max_new_tokens` must be more than the first forward decodes, got 4"):
        context_growth(model, (16, 64), max_new_tokens=4)


def test_a_response_that_ends_early_takes_the_same_forwards_under_any_limit(clock):
    model = model_that_takes(clock)
    end = early_end(model, 7, (8, 64), tokens_per_forward=2.0, prompt_length=4, repetitions=1)
    assert end.limits == (8, 64) and end.num_forwards == (4, 4)
    assert end.time_ratio == 1.0
    with pytest.raises(ValueError, match=r"`response_length` must be within both `limits`, got 20 and \(8, 64\)"):
        early_end(model, 20, (8, 64))


def test_adapter_gain_leaves_the_model_as_it_is():
    model = tiny_model(block_size=8)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    run = scripted_run(model, prompt_length=4, max_new_tokens=8)
    assert merged_adapter_gain(*run, rank=2, repetitions=1) > 0.0
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())

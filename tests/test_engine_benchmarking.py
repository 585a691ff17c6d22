"""What measures the decoding loop apart from the model: recorded forwards, scripted acceptance, shares and memory."""

from types import SimpleNamespace

import pytest
import torch
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM

from d2f_hf import D2FLLaDAConfig, D2FLLaDAForBlockDiffusion, benchmarking, engine_benchmarking
from d2f_hf.benchmarking import System, left_padded, replaced_method
from d2f_hf.engine_benchmarking import (
    SIZES,
    ContextGrowth,
    RecordedForward,
    ScriptedAcceptance,
    StepMemory,
    context_growth,
    early_end,
    gain,
    highest_totals,
    loop_overhead,
    masked_share,
    merged_adapter_gain,
    random_model,
    random_prompts,
    record_forwards,
    replay_forwards,
    row_rates,
    scripted_run,
    step_memory,
)
from tiny_models import EOS, MASK, PAD, VOCAB_SIZE, tiny_model

PROMPT = {"input_ids": torch.tensor([[1, 2, 3]])}


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(benchmarking.time, "perf_counter", lambda: clock.now)
    return clock


def model_that_takes(clock, forward=lambda kwargs: 1.0, predict=0.5):
    """A tiny model whose forwards and choices take so many seconds of the scripted clock, and nothing else does."""

    class Timed(D2FLLaDAForBlockDiffusion):
        def forward(self, *args, **kwargs):
            clock.now += forward(kwargs)
            return super().forward(*args, **kwargs)

        def _predict(self, *args, **kwargs):
            clock.now += predict
            return super()._predict(*args, **kwargs)

    model = tiny_model()
    model.__class__ = Timed
    return model


def accepted_per_forward(model, script, inputs=PROMPT, **options):
    """For each row how many tokens each forward decoded."""
    with script.on(model):
        output = model.generate(**inputs, **options, output_trace=True, return_dict_in_generate=True)
    return [[len(step["accepted"]) for step in row] for row in output.trace], output


# Scripted acceptance


def test_script_decodes_exactly_the_tokens_per_forward_asked_for():
    model = tiny_model(block_size=8)
    (counts,), output = accepted_per_forward(model, ScriptedAcceptance([4.0]), max_new_tokens=32)
    assert counts == [4] * 8
    assert output.tokens_per_forward.tolist() == [4.0]
    assert output.sequences[0, 3:].tolist() == [0] * 32


def test_fractions_of_tokens_per_forward_add_up():
    model = tiny_model(block_size=8)
    (counts,), output = accepted_per_forward(model, ScriptedAcceptance([2.5]), max_new_tokens=30)
    assert counts == [2, 3] * 6
    assert output.tokens_per_forward.tolist() == [2.5]
    (counts,), _ = accepted_per_forward(model, ScriptedAcceptance([4 / 3]), max_new_tokens=32)
    assert sum(counts) == 32 and len(counts) == 24


def test_one_script_runs_call_after_call():
    model, script = tiny_model(block_size=8), ScriptedAcceptance([2.5])
    runs = [accepted_per_forward(model, script, max_new_tokens=10)[0] for _ in range(2)]
    assert runs == [[[2, 3, 2, 3]]] * 2
    assert "_predict" not in vars(model)


def test_what_a_window_was_too_short_for_is_made_up_for():
    """With blocks of 4 the first forward sees 4 masked tokens, although 5 are asked for; the second makes it 10."""
    script = ScriptedAcceptance([5.0])
    row, index = torch.zeros(4, dtype=torch.long), torch.arange(4)
    _, first, _ = script._choose(row, index, 16, [EOS])
    assert first.tolist() == [1.0] * 4
    _, second, _ = script._choose(torch.zeros(8, dtype=torch.long), torch.arange(4, 12), 16, [EOS])
    assert second.tolist() == [1.0] * 6 + [0.0] * 2


def test_rows_of_a_batch_go_at_their_own_pace_and_end_at_their_own_length():
    model = tiny_model(block_size=8)
    inputs = random_prompts(model.config, [3, 7, 5, 4])
    script = ScriptedAcceptance([2.0, 4.0, 3.0, 8.0], response_lengths=[6, 20, 32, 9])
    counts, output = accepted_per_forward(model, script, inputs, max_new_tokens=32)
    # The last forward of a row may decode past its EOS.
    assert counts[0] == [2] * 3 and counts[1] == [4] * 5 and counts[2][:10] == [3] * 10
    responses = output.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    for row, length in zip(responses, [6, 20, 32, 9], strict=True):
        assert row[:length] == [0] * (length - 1) + [EOS]
        assert set(row[length:]) <= {PAD}
    assert output.num_forward_passes.tolist() == [3, 5, 11, 2]


def test_the_models_own_choice_is_still_made():
    model, calls = tiny_model(block_size=8), []

    def counting(predict):
        return lambda logits, *args: (calls.append(logits.shape[1]), predict(logits, *args))[1]

    with replaced_method(model, "_predict", counting):
        accepted_per_forward(model, ScriptedAcceptance([4.0]), max_new_tokens=16)
    assert calls == [VOCAB_SIZE] * 4


def test_script_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match=r"`tokens_per_forward` must hold a number of at least 1.*got \[2, 0.5\]"):
        ScriptedAcceptance([2, 0.5])
    with pytest.raises(ValueError, match="`tokens_per_forward` must hold"):
        ScriptedAcceptance([])
    for lengths in ([3], [3, 0]):
        with pytest.raises(ValueError, match="`response_lengths` must hold a length of at least 1 for each of the 2"):
            ScriptedAcceptance([2, 2], lengths)
    for token in (EOS, MASK):
        with pytest.raises(ValueError, match=f"`token_id` must be an ordinary token, but {token}"):
            ScriptedAcceptance([2], token_id=token).on(tiny_model()).__enter__()
    without_eos = tiny_model(eos_token_id=None)
    with pytest.raises(ValueError, match="eos_token_id` must be set"):
        ScriptedAcceptance([2], [3]).on(without_eos).__enter__()


def test_rates_of_rows_differ_and_together_are_the_tokens_per_forward():
    rates = row_rates(16, 4.0, spread=0.25)
    assert sum(1 / rate for rate in rates) / 16 == pytest.approx(1 / 4.0)
    assert max(rates) == pytest.approx(4 / 0.75) and min(rates) == pytest.approx(4 / 1.25)
    assert rates == row_rates(16, 4.0, spread=0.25) != row_rates(16, 4.0, spread=0.25, seed=1)
    assert rates != sorted(rates)
    assert row_rates(3, 2.5) == [2.5] * 3
    assert row_rates(1, 2.0, spread=0.5) == [2.0]


def test_rates_refuse_rows_without_a_token_per_forward():
    with pytest.raises(ValueError, match=r"`spread` must be in \[0, 1\), got 1.0"):
        row_rates(4, 8.0, spread=1.0)
    with pytest.raises(ValueError, match="`tokens_per_forward` must be at least 1 .* got 1.2 and 0.25"):
        row_rates(4, 1.2, spread=0.25)


def test_a_ragged_run_has_the_tokens_per_forward_asked_for():
    model = tiny_model(block_size=8)
    system, inputs, script = scripted_run(model, 8, 4.0, prompt_length=12, max_new_tokens=64)
    assert sorted(inputs["attention_mask"].sum(-1).tolist()) == [6, 7, 8, 9, 9, 10, 11, 12]
    with script.on(model):
        output = model.generate(**inputs, **system.options, return_dict_in_generate=True)
    lengths = (output.tokens_per_forward * output.num_forward_passes).round().long()
    assert sorted(lengths.tolist()) == [32, 37, 41, 46, 50, 55, 59, 64]
    # A row's last forward decodes what is left, so its mean is a little lower.
    assert 3.6 < lengths.sum() / output.num_forward_passes.sum() <= 4.0


def test_a_run_that_is_not_ragged_has_equal_rows():
    model = tiny_model(block_size=8)
    system, inputs, script = scripted_run(model, 3, 4.0, prompt_length=5, max_new_tokens=16, ragged=False)
    counts, _ = accepted_per_forward(model, script, inputs, **system.options)
    assert inputs["attention_mask"].all() and inputs["input_ids"].shape == (3, 5)
    assert counts == [[4] * 4] * 3


# Recorded forwards


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
    choose = ScriptedAcceptance._choose

    def slow(*args):
        clock.now += 10.0
        return choose(*args)

    monkeypatch.setattr(ScriptedAcceptance, "_choose", slow)
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


# Masked share


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


# Context, early end, adapters


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


# Memory


def test_highest_total_of_each_step_counts_what_is_still_held():
    changes = [(1, 10), (3, 5), (4, -5), (5, 20), (6, -20), (8, 7), (9, -10), (10, 1)]
    assert highest_totals(changes, [2, 7]) == [30, 17]
    assert highest_totals(list(reversed(changes)), [7, 2]) == [30, 17]
    # Memory that is taken in the very moment when a step starts belongs to it.
    assert highest_totals([(1, 10), (2, 5)], [0, 2]) == [10, 15]
    assert highest_totals([(1, 10)], []) == []


def memory_with(model, num_bytes, in_calls, **options):
    """Step memory when those of the calls of `_predict` hold so many bytes for a moment."""
    calls = []

    def allocating(predict):
        def call(*args):
            calls.append(torch.empty(num_bytes, dtype=torch.uint8).shape if len(calls) in in_calls else None)
            return predict(*args)

        return call

    system, inputs, script = scripted_run(
        model, 2, 4.0, prompt_length=5, max_new_tokens=8, ragged=False, block_size=8, **options
    )
    with replaced_method(model, "_predict", allocating):
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


# Random models and prompts


def test_sizes_have_about_the_parameters_of_their_names():
    for size, millions in {"5m": 5, "100m": 100, "1b": 1000, "8b": 8000}.items():
        model = random_model(size, device="meta")
        assert 0.9 * millions < model.num_parameters() / 1e6 < 1.2 * millions
        assert model.dtype == torch.bfloat16
    assert set(SIZES) == {"5m", "100m", "1b", "8b"}


def test_a_random_model_can_be_changed_and_decodes():
    model = random_model("5m", dtype="float32", n_layers=1, vocab_size=50)
    assert model.config.mask_token_id == 49 and model.config.n_layers == 1 and not model.training
    output = model.generate(**random_prompts(model.config, [3]), max_new_tokens=2, min_new_tokens=2)
    assert output.shape == (1, 5)
    with pytest.raises(ValueError, match="`size` must be one of 5m, 100m, 1b, 8b, got '2m'"):
        random_model("2m")


def test_random_prompts_hold_ordinary_tokens_and_come_from_a_seed():
    config = D2FLLaDAConfig(vocab_size=12, mask_token_id=11, eos_token_id=10, pad_token_id=9)
    prompts = random_prompts(config, [200, 150])
    assert prompts["attention_mask"].sum(-1).tolist() == [200, 150]
    assert set(prompts["input_ids"][0].tolist()) == set(range(1, 9))
    assert prompts["input_ids"][1, :50].tolist() == [9] * 50
    again, other = random_prompts(config, [200, 150]), random_prompts(config, [200, 150], seed=1)
    assert torch.equal(again["input_ids"], prompts["input_ids"])
    assert not torch.equal(other["input_ids"], prompts["input_ids"])


def test_memory_is_counted_on_a_cpu_or_cuda_only(monkeypatch):
    system, inputs, script = scripted_run(tiny_model(), prompt_length=4, max_new_tokens=4)
    elsewhere = SimpleNamespace(device=torch.device("meta"), _predict=None)
    monkeypatch.setattr(engine_benchmarking, "_block_diffusion_model", lambda model: elsewhere)
    with pytest.raises(ValueError, match="must be on a CPU or on CUDA.*meta"):
        step_memory(system, inputs, script)

"""The arithmetic of tokens, forwards and rates, and the order in which systems are asked."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from d2f_hf import benchmarking
from d2f_hf.benchmarking import (
    BatchMeasurement,
    Measurement,
    System,
    answer_in_batches,
    batch_tokens_per_second,
    environment,
    left_padded,
    measure,
    measure_batches,
    percentile,
    response_tokens,
    speed_up,
    summarize,
)
from tiny_models import tiny_model

EOS, PAD = 9, 8


class ScriptedModel:
    """Answers every prompt with `response`; takes `seconds` of the scripted clock for it."""

    device = torch.device("cpu")
    generation_config = SimpleNamespace(eos_token_id=EOS)

    def __init__(self, name, log, clock, response, seconds, num_forward_passes=None):
        self.name, self.log, self.clock = name, log, clock
        self.response, self.seconds, self.num_forward_passes = response, seconds, num_forward_passes

    def generate(self, input_ids, attention_mask, return_dict_in_generate, **options):
        assert return_dict_in_generate
        self.log.append((self.name, int(input_ids[0, 0]), options))
        self.clock.now += self.seconds
        response = torch.tensor([self.response]).expand(len(input_ids), -1)
        output = SimpleNamespace(sequences=torch.cat([input_ids, response], dim=1))
        if self.num_forward_passes is not None:
            output.num_forward_passes = torch.tensor([self.num_forward_passes])
        return output


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(benchmarking.time, "perf_counter", lambda: clock.now)
    return clock


def prompt(*token_ids):
    return {"input_ids": torch.tensor([token_ids]), "attention_mask": torch.ones(1, len(token_ids), dtype=torch.long)}


def test_response_tokens_end_with_the_first_eos():
    assert response_tokens([3, 4, EOS, 5, EOS], [EOS]) == [3, 4, EOS]
    assert response_tokens([3, 4, 5], [EOS]) == [3, 4, 5]
    assert response_tokens([EOS, 4], [8, EOS]) == [EOS]
    assert response_tokens([3, EOS], []) == [3, EOS]
    assert response_tokens([], [EOS]) == []


def test_rates_are_tokens_over_forwards_and_over_seconds():
    measurement = Measurement(response_ids=[3, 4, 5, 6, 7, EOS], num_forward_passes=4, seconds=0.5)
    assert measurement.tokens_per_forward == 1.5
    assert measurement.tokens_per_second == 12.0


def test_summary_divides_totals_so_that_long_answers_count_more():
    summary = summarize([Measurement([1] * 10, 2, 1.0), Measurement([1] * 2, 2, 2.0), Measurement([1] * 6, 5, 3.0)])
    assert summary.num_prompts == 3
    assert summary.tokens_per_forward == 18 / 9
    assert summary.tokens_per_second == 18 / 6
    assert summary.latency == 2.0
    assert summary.latency_p95 == 3.0
    assert summary.response_tokens == 6.0
    assert summary.num_forward_passes == 3.0


def test_percentile_is_the_smallest_value_that_so_many_do_not_exceed():
    values = [float(value) for value in range(20, 0, -1)]
    assert percentile(values, 0.95) == 19.0
    assert percentile(values, 0.951) == 20.0
    assert percentile(values, 0.5) == 10.0
    assert percentile(values, 1.0) == 20.0
    assert percentile([3.0], 0.01) == 3.0
    assert percentile(list(range(1, 101)), 0.07) == 7


def test_percentile_refuses_no_values_and_shares_out_of_range():
    with pytest.raises(ValueError, match="at least one value"):
        percentile([], 0.5)
    for share in (0.0, 1.01):
        with pytest.raises(ValueError, match=r"`share` must be in \(0, 1\], got"):
            percentile([1.0], share)


def test_speed_up_is_the_ratio_of_totals_and_the_median_of_ratios():
    fast = [Measurement([1] * 8, 2, 1.0), Measurement([1] * 6, 2, 1.0), Measurement([1] * 10, 2, 1.0)]
    slow = [Measurement([1] * 4, 4, 2.0), Measurement([1] * 6, 6, 2.0), Measurement([1] * 10, 9, 6.0)]
    ratios = speed_up(fast, slow)  # per prompt 4, 2 and 6
    assert ratios.of_totals == pytest.approx((24 / 3) / (20 / 10))
    assert ratios.median == pytest.approx(4.0)


def test_speed_up_over_itself_is_one():
    measurements = [Measurement([1] * 8, 2, 0.3), Measurement([1] * 5, 2, 0.7)]
    assert speed_up(measurements, measurements) == benchmarking.SpeedUp(of_totals=1.0, median=1.0)


def test_speed_up_refuses_measurements_of_different_prompts():
    with pytest.raises(ValueError, match="same prompts, got 1 and 2"):
        speed_up([Measurement([1], 1, 1.0)], [Measurement([1], 1, 1.0)] * 2)


def test_summary_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="at least one measurement"):
        summarize([])


def test_forwards_are_the_models_own_count_or_one_per_token(clock):
    systems = {
        "diffusion": System(ScriptedModel("diffusion", [], clock, [3, 4, EOS], 0.25, num_forward_passes=2)),
        "autoregressive": System(ScriptedModel("autoregressive", [], clock, [3, 4, 5, EOS], 0.5)),
    }
    measurements = measure(systems, [prompt(1, 2)], warm_up=0)
    assert measurements["diffusion"] == [Measurement([3, 4, EOS], 2, 0.25)]
    assert measurements["autoregressive"] == [Measurement([3, 4, 5, EOS], 4, 0.5)]


def test_a_stock_autoregressive_model_makes_one_forward_per_token():
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, eos_token_id=None, pad_token_id=0, **sizes))
    forwards = []
    model.register_forward_hook(lambda *_: forwards.append(1))
    system = System(model, {"max_new_tokens": 5, "do_sample": False})
    (measurement,) = measure({"twin": system}, [prompt(1, 2, 3)], warm_up=0)["twin"]
    assert len(measurement.response_ids) == measurement.num_forward_passes == len(forwards) == 5
    assert measurement.tokens_per_forward == 1.0 and measurement.seconds > 0


def test_tokens_behind_the_eos_are_work_but_not_response(clock):
    """A sampler of fixed length makes its forwards whether or not the answer is short."""
    model = ScriptedModel("vanilla", [], clock, [3, EOS, 0, 0], 1.0, num_forward_passes=4)
    (measurement,) = measure({"vanilla": System(model)}, [prompt(1)], warm_up=0)["vanilla"]
    assert measurement.response_ids == [3, EOS]
    assert measurement.tokens_per_forward == 0.5


def test_eos_of_the_options_goes_before_the_models(clock):
    model = ScriptedModel("a", [], clock, [3, 4, EOS], 1.0)
    (measurement,) = measure({"a": System(model, {"eos_token_id": [4]})}, [prompt(1)], warm_up=0)["a"]
    assert measurement.response_ids == [3, 4]
    for eos, expected in ((3, [3]), (None, [3, 4, EOS])):
        options = {"generation_config": SimpleNamespace(eos_token_id=eos)}
        (measurement,) = measure({"a": System(model, options)}, [prompt(1)], warm_up=0)["a"]
        assert measurement.response_ids == expected


def test_systems_take_turns_and_warm_up_is_not_measured(clock):
    log, progress = [], []
    systems = {
        "a": System(ScriptedModel("a", log, clock, [3, EOS], 1.0), {"do_sample": False}),
        "b": System(ScriptedModel("b", log, clock, [3, EOS], 2.0)),
    }
    prompts = [prompt(1), prompt(2), prompt(5)]
    measurements = measure(systems, prompts, warm_up=1, progress=lambda done, total: progress.append((done, total)))
    assert [(name, first) for name, first, _ in log] == [
        *[("a", 1), ("b", 1)],  # warm-up
        *[("a", 1), ("b", 1), ("a", 2), ("b", 2), ("a", 5), ("b", 5)],
    ]
    assert log[0][2] == {"do_sample": False} and log[1][2] == {}
    assert [m.seconds for m in measurements["a"]] == [1.0] * 3
    assert [m.seconds for m in measurements["b"]] == [2.0] * 3
    assert progress == [(1, 3), (2, 3), (3, 3)]


def test_a_batch_as_prompt_is_an_error():
    batch = {"input_ids": torch.ones(2, 3, dtype=torch.long)}
    with pytest.raises(ValueError, match="must hold one row, got 2"):
        measure({}, [batch])


def test_a_prompt_without_a_batch_dimension_is_an_error():
    for input_ids in (torch.ones(3, dtype=torch.long), torch.ones(1, dtype=torch.long)):
        with pytest.raises(ValueError, match=r"must have `input_ids` of shape \(1, L\), got \(\d,\)"):
            measure({}, [{"input_ids": input_ids}])


def test_several_responses_for_a_prompt_are_an_error():
    """Only the first of them was counted, and the time was that of all."""
    system = System(tiny_model(), {"max_new_tokens": 4, "num_return_sequences": 2, "do_sample": True})
    for call in (
        lambda: measure({"a": system}, [prompt(1)], warm_up=0),
        lambda: measure_batches({"a": system}, [prompt(1)] * 2, PAD, batch_sizes=(2,), warm_up=0),
        lambda: answer_in_batches(system, [prompt(1)], PAD, 1),
    ):
        with pytest.raises(ValueError, match="`system.options` must give one response for each prompt.*num_return"):
            call()


def test_answers_in_batches_come_in_the_order_of_the_prompts(clock):
    log, progress = [], []
    system = System(ScriptedModel("a", log, clock, [3, EOS, 4], 1.0), {"do_sample": False})
    prompts = [prompt(1), prompt(2, 2), prompt(5)]
    responses, forwards = answer_in_batches(system, prompts, PAD, 2, lambda *done: progress.append(done))
    assert responses == [[3, EOS]] * 3 and forwards == [3] * 3
    assert [first for _, first, _ in log] == [PAD, 5] and progress == [(2, 3), (3, 3)]
    assert answer_in_batches(system, [], PAD, 2) == ([], [])
    for size in (0, -1):
        with pytest.raises(ValueError, match=f"`batch_size` must be at least 1, got {size}"):
            answer_in_batches(system, prompts, PAD, size)


def test_answers_in_batches_are_those_alone():
    system = System(tiny_model(), {"max_new_tokens": 8, "confidence_threshold": 0.2})
    prompts = [prompt(1), prompt(2, 3, 4), prompt(5, 6)]
    alone = measure({"a": system}, prompts, warm_up=0)["a"]
    responses, forwards = answer_in_batches(system, prompts, PAD, 2)
    assert responses == [m.response_ids for m in alone] and forwards == [m.num_forward_passes for m in alone]


def test_rates_of_batches_are_of_all_rows():
    first = BatchMeasurement([[3, 4, EOS], [EOS]], 0.5)
    assert first.tokens_per_second == 8.0
    assert batch_tokens_per_second([first, BatchMeasurement([[3, 3], [3, 3]], 1.5)]) == 4.0
    with pytest.raises(ValueError, match="at least one batch"):
        batch_tokens_per_second([])


def test_batches_are_padded_at_the_left():
    batch = left_padded([prompt(1, 2, 3), {"input_ids": torch.tensor([[4]])}], PAD)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [PAD, PAD, 4]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]


def test_batches_of_each_size_hold_all_prompts_and_systems_take_turns(clock):
    log, progress = [], []
    systems = {
        "a": System(ScriptedModel("a", log, clock, [3, EOS, 4], 1.0)),
        "b": System(ScriptedModel("b", log, clock, [3, 4, 5], 2.0)),
    }
    prompts = [prompt(1), prompt(2, 2), prompt(5), prompt(6)]
    measurements = measure_batches(
        systems, prompts, PAD, batch_sizes=(2, 4), warm_up=1, progress=lambda *done: progress.append(done)
    )
    assert [(name, first) for name, first, _ in log] == [
        *[("a", PAD), ("b", PAD)],  # warm-up of size 2
        *[("a", PAD), ("b", PAD), ("a", 5), ("b", 5)],
        *[("a", PAD), ("b", PAD)],  # of size 4
        *[("a", PAD), ("b", PAD)],
    ]
    assert measurements["a"][2] == [BatchMeasurement([[3, EOS]] * 2, 1.0)] * 2
    assert measurements["b"][4] == [BatchMeasurement([[3, 4, 5]] * 4, 2.0)]
    assert progress == [(1, 3), (2, 3), (3, 3)]


def test_batches_that_would_leave_prompts_out_are_an_error():
    for prompts, size in (([prompt(1)] * 3, 2), ([prompt(1)], 0), ([], 1)):
        with pytest.raises(ValueError, match=f"multiple of each.*got {len(prompts)} prompts for batches of {size}"):
            measure_batches({}, prompts, PAD, batch_sizes=(size,))
    with pytest.raises(ValueError, match="must hold one row, got 2"):
        measure_batches({}, [{"input_ids": torch.ones(2, 3, dtype=torch.long)}], PAD, batch_sizes=(1,))


def test_environment_says_what_a_figure_depends_on(tmp_path):
    model = SimpleNamespace(device=torch.device("cpu"), dtype=torch.bfloat16)
    found = environment(model, repository=tmp_path / "missing")
    assert found["torch"] == torch.__version__
    assert {"python", "transformers", "hardware", "threads"} <= set(found)
    assert found["dtype"] == "bfloat16"
    assert "commit" not in found
    json.dumps(found)

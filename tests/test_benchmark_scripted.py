"""Random models and prompts, and scripts that decide how many tokens each forward decodes."""

import pytest
import torch

from benchmarks.probes import wrapped_sampler
from benchmarks.scripted import (
    SIZES,
    ScriptedAcceptance,
    random_model,
    random_prompts,
    row_rates,
    scripted_run,
)
from d2f_hf import D2FLLaDAConfig
from tiny_models import EOS, MASK, PAD, VOCAB_SIZE, tiny_model

PROMPT = {"input_ids": torch.tensor([[1, 2, 3]])}


def accepted_per_forward(model, script, inputs=PROMPT, **options):
    """For each row how many tokens each forward decoded."""
    with script.on(model):
        output = model.generate(**inputs, **options, output_trace=True, return_dict_in_generate=True)
    return [[len(step["accepted"]) for step in row] for row in output.trace], output


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
    assert "sampler_class" not in vars(model)


def test_what_a_window_was_too_short_for_is_made_up_for():
    """With blocks of 4 the first forward sees 4 masked tokens, although 5 are asked for; the second makes it 10."""
    script = ScriptedAcceptance([5.0])
    row, index = torch.zeros(4, dtype=torch.long), torch.arange(4)
    _, first, _ = script.choose(row, index, 16, [EOS])
    assert first.tolist() == [1.0] * 4
    _, second, _ = script.choose(torch.zeros(8, dtype=torch.long), torch.arange(4, 12), 16, [EOS])
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

    def counting(choose):
        return lambda sampler, logits, *args: (calls.append(logits.shape[1]), choose(sampler, logits, *args))[1]

    with wrapped_sampler(model, counting):
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


@pytest.mark.parametrize(
    "option",
    [
        {"num_branches": 2},
        {"remask_threshold": 0.5},
        {"acceptance_rule": "entropy_bound"},
        {"decoding": "vanilla"},
        {"decoding": "fast_dllm"},
    ],
    ids=str,
)
def test_options_under_which_rows_do_not_keep_to_a_script_are_refused(option):
    """Look-ahead gave the script a fresh copy of the response in each step, so it began anew each time."""
    model = tiny_model(block_size=8)
    (name, value), *_ = option.items()
    with ScriptedAcceptance([2.0]).on(model), pytest.raises(ValueError, match=f"`{name}` is not supported.*{value!r}"):
        model.generate(**PROMPT, max_new_tokens=16, **option)
    assert "sampler_class" not in vars(model)


@pytest.mark.parametrize("acceptance_rule", ["threshold", "factor", "credit"])
def test_rules_that_go_by_probability_keep_to_a_script(acceptance_rule):
    model = tiny_model(block_size=8)
    options = {"max_new_tokens": 32, "acceptance_rule": acceptance_rule, "num_branches": 1}
    (counts,), _ = accepted_per_forward(model, ScriptedAcceptance([4.0]), **options)
    assert counts == [4] * 8


@pytest.mark.parametrize(
    "options", [{"confidence_threshold": 1.0}, {"no_repeat_ngram_size": 3}, {"semi_activated_threshold": 1.0}], ids=str
)
def test_tokens_that_are_held_back_are_noticed_in_the_next_step(options):
    """They were decoded later than scripted, and the figures were of another number of tokens per forward."""
    model = tiny_model(block_size=4)
    with ScriptedAcceptance([3.0]).on(model), pytest.raises(ValueError, match="must let tokens be accepted as script"):
        model.generate(**PROMPT, max_new_tokens=32, **options)


def test_a_script_is_for_a_batch_of_its_size():
    model = tiny_model()
    inputs = random_prompts(model.config, [3, 4])
    for rates in ([2.0], [2.0] * 3):
        with ScriptedAcceptance(rates).on(model), pytest.raises(ValueError, match=f"each of the 2 rows.*{len(rates)}"):
            model.generate(**inputs, max_new_tokens=8)


def test_requests_that_join_and_leave_have_no_script():
    model = tiny_model()
    with ScriptedAcceptance([2.0, 2.0]).on(model), pytest.raises(ValueError, match="streams"):
        requests = [torch.tensor(ids) for ids in ([1, 2], [3], [4, 5], [6])]
        list(model.generate_stream_batch(requests, max_batch_size=2, max_prompt_length=4, max_new_tokens=8))


def test_random_inputs_are_on_the_host_whatever_the_default_device():
    with torch.device("meta"):
        rates = row_rates(4, 4.0, spread=0.25)
        script = ScriptedAcceptance(rates, [3] * 4)
        prompts = random_prompts(D2FLLaDAConfig(vocab_size=12, mask_token_id=11, eos_token_id=10, pad_token_id=9), [3])
        tensors = (script.rates, script.last, script.num_decoded, prompts["input_ids"])
    assert {tensor.device.type for tensor in tensors} == {"cpu"}


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

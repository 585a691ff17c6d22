"""The oracle of pipelined decoding against the recorded runs of the reference implementation."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from safetensors.torch import load_file

from golden_data import GOLDEN, GoldenRun, expected_until_eos, load_runs
from plain_models import load_plain_model
from reference_decoding import ReferenceResult, reference_decode

# L sequence, V vocabulary

MASK, EOS = 9, 8

plain_model = cache(load_plain_model)
golden_runs = [*load_runs("decode_llada.json"), *load_runs("decode_dream.json")]
whole_runs = [run for run in golden_runs if run.whole_blocks_max_new_tokens > 0]
partial_runs = [run for run in golden_runs if run.whole_blocks_max_new_tokens < run.max_new_tokens]


def decode(run: GoldenRun, max_new_tokens: int) -> ReferenceResult:
    return reference_decode(
        plain_model(GOLDEN / f"{run.family}_tiny"),
        run.prompt_ids,
        **run.decoding,
        max_new_tokens=max_new_tokens,
        mask_token_id=run.mask_token_id,
        eos_token_ids=run.eos_token_id,
        right_shift_logits=run.family == "dream",
    )


def run_id(run: GoldenRun) -> str:
    return f"{run.family}-{run}"


# ---- against the reference ----


def test_plain_llada_gives_the_reference_logits():
    golden = load_file(GOLDEN / "logits_llada.safetensors")
    compared = 0
    for name, expected in golden.items():
        kind, _, case = name.partition(".")
        if kind not in ("logits_full", "logits_blockcausal"):
            continue
        ids = golden["input_ids." + case.split(".")[0]][0].tolist()
        structure = []
        if kind == "logits_blockcausal":
            structure = [int(golden[f"{part}.{case}"]) for part in ("prompt_length", "block_size")]
        logits = plain_model(GOLDEN / "llada_tiny")(ids, *structure)
        torch.testing.assert_close(logits, expected[0], atol=1e-4, rtol=0)
        compared += 1
    assert compared == 9


@pytest.mark.parametrize("run", whole_runs, ids=run_id)
def test_the_oracle_reproduces_tokens_forwards_and_trace_of_the_reference(run):
    result = decode(run, run.whole_blocks_max_new_tokens)
    expected = expected_until_eos(run)
    assert result.tokens == expected.tokens
    assert result.num_forward_passes == expected.num_forward_passes
    assert result.trace == expected.trace


@pytest.mark.parametrize("run", partial_runs, ids=run_id)
def test_an_exact_length_continues_what_the_reference_rounds_down(run):
    """No token sees a later block, so a short last block changes nothing before it."""
    result = decode(run, run.max_new_tokens)
    expected = expected_until_eos(run)
    assert result.tokens[: len(expected.tokens)] == expected.tokens
    if run.eos_token_id in result.tokens:
        assert result.tokens.index(run.eos_token_id) == len(result.tokens) - 1
    else:
        assert len(result.tokens) == run.max_new_tokens


def test_the_golden_runs_exercise_eos_waiting_blocks_and_short_blocks():
    """If the data were thinned out, the tests above would pass without testing much."""
    assert (len(whole_runs), len(partial_runs)) == (176, 24)
    expected = [expected_until_eos(run) for run in whole_runs]
    assert sum(run.eos_token_id in run.raw_tokens for run in whole_runs) == 28 + 34
    shorter = [e for run, e in zip(whole_runs, expected, strict=True) if len(e.trace) < len(run.raw_trace)]
    assert len(shorter) >= 20


# ---- what the reference does otherwise: hand-made logits ----


def scripted(tokens: list[int], sure_from: dict[int, int] | None = None):
    """A model that predicts `tokens[p]` at position p, and is sure of it from call `sure_from[p]` on (default 0)."""
    calls = []

    def logits_fn(ids: list[int], prompt_length: int, block_size: int) -> torch.Tensor:
        logits = torch.zeros(len(ids), 10)
        for position in range(len(ids)):
            sure = (sure_from or {}).get(position, 0) <= len(calls)
            logits[position, tokens[position]] = 10.0 if sure else 1.0
        calls.append(list(ids))
        return logits

    return logits_fn, calls


OPTIONS = {
    "block_size": 2,
    "block_add_threshold": 0.0,
    "block_activation_threshold": 1.0,
    "confidence_threshold": 0.9,
    "max_new_tokens": 6,
    "mask_token_id": MASK,
    "eos_token_ids": EOS,
}


def test_max_new_tokens_is_exact_and_the_last_block_short():
    logits_fn, calls = scripted([0, 1, 2, 3, 4, 5])
    result = reference_decode(logits_fn, [0], **{**OPTIONS, "max_new_tokens": 5})
    assert result.tokens == [1, 2, 3, 4, 5]
    assert [step["window_length"] for step in result.trace] == [3, 4, 3]  # prompt + 2, 2 + 2, 2 + 1
    assert calls[-1] == [0, 1, 2, 3, 4, MASK]


def test_fewer_new_tokens_than_a_block_are_decoded():
    logits_fn, _ = scripted([0, 1])
    assert reference_decode(logits_fn, [0], **{**OPTIONS, "max_new_tokens": 1}).tokens == [1]


def test_the_mask_token_is_never_sampled():
    """The reference writes it, keeps the position masked and repeats that until a safety limit."""

    def logits_fn(ids, prompt_length, block_size):
        logits = torch.zeros(len(ids), 10)
        logits[:, MASK], logits[:, 4] = 20.0, 10.0
        return logits

    assert reference_decode(logits_fn, [0], **OPTIONS).tokens == [4] * 6


def test_the_row_ends_with_the_forward_that_decodes_everything_up_to_the_first_eos():
    logits_fn, _ = scripted([0, 1, EOS, 3, 4, 5, 6])
    result = reference_decode(logits_fn, [0], **OPTIONS)
    assert result.tokens == [1, EOS]
    assert result.num_forward_passes == 1


def test_blocks_behind_the_first_decoded_eos_leave_the_window():
    """Block 1 takes four forwards, so block 3 is in the window when the EOS of block 2 is accepted."""
    unsure = dict.fromkeys(range(1, 13), 99) | {6: 2}
    logits_fn, calls = scripted([0, 1, 2, 3, 4, 5, EOS, 7, 7, 7, 7, 7, 7], unsure)
    result = reference_decode(logits_fn, [0], **{**OPTIONS, "block_size": 4, "max_new_tokens": 16})
    assert result.tokens == [1, 2, 3, 4, 5, EOS]
    accepted = [step["accepted"] for step in result.trace]
    assert accepted == [[(1, 1)], [(2, 2)], [(3, 3), (6, EOS)], [(4, 4)], [(5, 5)]]
    assert [len(ids) for ids in calls] == [5, 9, 13, 9, 9]
    assert [step["committed_length"] for step in result.trace] == [0, 1, 1, 1, 1]


def test_an_eos_found_later_at_an_earlier_position_shortens_the_row_further():
    unsure = dict.fromkeys(range(1, 13), 99) | {10: 2, 6: 3}
    logits_fn, calls = scripted([0, 1, 2, 3, 4, 5, EOS, 7, 7, 7, EOS, 7, 7], unsure)
    result = reference_decode(logits_fn, [0], **{**OPTIONS, "block_size": 4, "max_new_tokens": 16})
    assert result.tokens == [1, 2, 3, 4, 5, EOS]
    accepted = [step["accepted"] for step in result.trace]
    assert accepted == [[(1, 1)], [(2, 2)], [(3, 3), (10, EOS)], [(4, 4), (6, EOS)], [(5, 5)]]
    assert [len(ids) for ids in calls] == [5, 9, 13, 13, 9]


def test_tokens_behind_the_eos_in_its_own_block_are_decoded_until_the_row_ends():
    logits_fn, calls = scripted([0, 1, 2, EOS, 4], {1: 2, 2: 9, 4: 1})
    result = reference_decode(logits_fn, [0], **{**OPTIONS, "block_size": 4, "max_new_tokens": 8})
    assert result.tokens == [1, 2, EOS]
    assert [step["accepted"] for step in result.trace] == [[(3, EOS)], [(4, 4)], [(1, 1)], [(2, 2)]]
    assert all(len(ids) == 5 for ids in calls)


def test_any_of_several_eos_tokens_ends_the_row():
    logits_fn, _ = scripted([0, 1, 7, EOS, 4, 5, 6])
    assert reference_decode(logits_fn, [0], **{**OPTIONS, "eos_token_ids": [EOS, 7]}).tokens == [1, 7]


def test_the_confidence_threshold_is_strict_and_the_others_are_not():
    def logits_fn(ids, prompt_length, block_size):
        return torch.full((len(ids), 10), -torch.inf).index_fill_(1, torch.tensor([1, 2]), 0.0)  # probability 0.5

    options = {**OPTIONS, "max_new_tokens": 4, "block_activation_threshold": 0.5, "block_add_threshold": 0.5}
    forced = reference_decode(logits_fn, [0], **{**options, "confidence_threshold": 0.5})
    # One forced token per block and forward; block 2 is added and fully activated at a decoded ratio of exactly 0.5.
    assert [len(step["accepted"]) for step in forced.trace] == [1, 2, 1]
    above = reference_decode(logits_fn, [0], **{**options, "confidence_threshold": 0.49})
    assert [len(step["accepted"]) for step in above.trace] == [2, 2]


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "`prompt_ids` must hold at least one token"),
        ([0], {"max_new_tokens": 0}, "`max_new_tokens` must be >= 1"),
        ([0], {"block_size": 0}, "`block_size`"),
        ([0], {"block_add_threshold": 1.1}, "`block_add_threshold`"),
        ([0], {"block_activation_threshold": 1.1}, "`block_activation_threshold`"),
        ([0], {"token_ranking": "entropy"}, "`token_ranking` must be"),
    ],
)
def test_inputs_that_would_never_finish_or_mean_nothing_are_errors(prompt, options, message):
    logits_fn, _ = scripted(list(range(8)))
    with pytest.raises(ValueError, match=message):
        reference_decode(logits_fn, prompt, **{**OPTIONS, **options})


# ---- against a broken rule: the golden data notices ----


def test_the_golden_data_notices_a_changed_setting():
    run = next(run for run in whole_runs if run.setting == "bs8_paper")
    changed = replace(run, confidence_threshold=0.8)
    assert decode(changed, run.max_new_tokens).trace != expected_until_eos(run).trace

"""Decoding of models whose blocks are counted from the start of the sequence, as their official code does it."""

import json
from functools import cache
from unittest import mock

import pytest
import torch
from d2f_hf.modeling import window_forward
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from prompts import pad
from sequence_models import BLOCK_MODELS, FAMILIES, block_model, official_runs
from sequence_reference import sequence_decode, sequence_logits
from tiny_models import EOS, MASK, tiny_model

FULL = {"return_dict_in_generate": True, "output_trace": True}
RUNS = [run for family in FAMILIES for run in official_runs(family)]


def decode(run, **options):
    ids = torch.tensor([run.prompt])
    common = {"attention_mask": torch.ones_like(ids), **FULL, **run.options, **options}
    return block_model(run.family).generate(ids, **common)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_official_code(family):
    folder, model = BLOCK_MODELS / f"{family}_tiny", block_model(family)
    data, entries = load_file(folder / "logits.safetensors"), json.loads((folder / "logits.json").read_text())
    compared = 0
    for entry in entries:
        key = entry["key"]
        if key.startswith("train."):
            continue
        for prompt_length in (entry["prompt_length"], 1):  # it changes nothing
            with torch.no_grad():
                logits = model(
                    data[f"input_ids.{key}"],
                    prompt_lengths=torch.tensor([prompt_length]),
                    block_size=entry["block_size"],
                ).logits
            assert (logits - data[f"logits_blockcausal.{key}"]).abs().max() < 1e-4, key
        compared += 1
    assert compared >= 6


def test_the_number_of_official_runs():
    numbers = [len(official_runs(family)) for family in FAMILIES]
    assert numbers == [55, 54]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_tokens_and_accepted_positions_are_those_of_the_official_code(run):
    output = decode(run)
    assert tuple(output.sequences[0, len(run.prompt) :].tolist()) == run.response
    accepted = tuple(tuple(step["accepted"]) for step in output.trace[0])
    assert accepted == run.accepted
    # A commit costs nothing, unless it gives Fast-dLLM v2 the first token of a block. No prefill costs more than that.
    most = run.denoise if run.family == "sdar" else run.forwards
    assert output.num_forward_passes.item() == len(run.accepted) <= most


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_padded_batches_and_streams_give_the_official_tokens(family, use_cache):
    model = block_model(family)
    by_options = {}
    for run in official_runs(family):
        options = {name: value for name, value in run.options.items() if name != "max_new_tokens"}
        by_options.setdefault(json.dumps(options), []).append(run)
    for text, runs in by_options.items():
        options = json.loads(text)
        limit = max(run.options["max_new_tokens"] for run in runs)
        inputs = pad([list(run.prompt) for run in runs], "left")
        output = model.generate(**inputs, **options, **FULL, max_new_tokens=limit, use_cache=use_cache)
        requests = ((torch.tensor(run.prompt), run.options["max_new_tokens"]) for run in runs)
        stream = dict(model.generate_stream_batch(requests, 2, 64, **options, max_new_tokens=limit))
        for row, run in enumerate(runs):
            response = output.sequences[row, inputs["input_ids"].shape[1] :].tolist()
            assert tuple(response[: len(run.response)]) == run.response
            assert tuple(stream[row].tolist()) == run.response


@pytest.mark.parametrize("limit", range(1, 18))
def test_a_limit_within_a_block_gives_the_official_tokens_up_to_it(limit):
    """A block that is cut at the limit would be seen with fewer masks, and be predicted otherwise."""
    for run in RUNS:
        if len(run.response) >= limit and run.setting in ("eval_b8_thr0.9", "b8_sb2_thr0.8"):
            output = decode(run, max_new_tokens=limit, eos_token_id=None)
            assert tuple(output.sequences[0, len(run.prompt) :].tolist()) == run.response[:limit]


def test_commits_and_prefills_are_saved():
    """SDAR with blocks of 4: the same tokens in about a fifth fewer forwards."""
    runs = [run for run in official_runs("sdar") if run.setting == "eval_b4_thr0.95"]
    official, ours = sum(run.forwards for run in runs), sum(int(decode(run).num_forward_passes) for run in runs)
    assert official == sum([44, 42, 38, 12, 39])
    assert 0.7 < ours / official < 0.82


@pytest.mark.parametrize("decoding", ["vanilla", "fast_dllm"])
def test_bidirectional_decoding_is_refused(decoding):
    with pytest.raises(ValueError, match="`decoding` must not be '" + decoding):
        block_model("sdar").generate(torch.tensor([[1, 2]]), decoding=decoding, max_new_tokens=4)


@cache
def random_model(family: str, seed: int, shift: bool):
    return tiny_model(seed=seed, family=family, block_alignment="sequence", right_shift_logits=shift)


@st.composite
def cases(draw):
    block_size = draw(st.integers(1, 9))
    thresholds = st.one_of(st.sampled_from([0.0, 0.1, 0.5, 0.95, 1.0]), st.floats(0.0, 1.0, width=16))
    prompt = st.lists(st.integers(0, MASK), min_size=1, max_size=19).filter(lambda ids: set(ids) != {MASK})
    options = {
        "block_size": block_size,
        "max_new_tokens": draw(st.integers(1, 20)),
        "block_add_threshold": draw(st.one_of(st.just(1.0), thresholds)),
        "block_activation_threshold": draw(thresholds),
        "max_active_blocks": draw(st.sampled_from([None, 1, 2])),
        "steps_per_block": draw(st.one_of(st.none(), st.integers(1, block_size))),
        "sub_block_size": draw(st.sampled_from([None, *(n for n in range(1, block_size + 1) if block_size % n == 0)])),
        "first_token_alone": draw(st.booleans()),
        "acceptance_rule": draw(st.sampled_from(["threshold", "threshold", "sequential"])),
    }
    if options["acceptance_rule"] == "threshold":
        options["confidence_threshold"] = draw(thresholds)
    return {
        "model": (draw(st.sampled_from(["llada", "dream"])), draw(st.integers(0, 3)), draw(st.booleans())),
        "prompts": draw(st.lists(prompt, min_size=1, max_size=4)),
        "side": draw(st.sampled_from(["left", "right"])),
        "options": options,
        "eos_token_id": draw(st.sampled_from([[EOS], [EOS, 5, 11]])),
        "use_cache": draw(st.booleans()),
        "is_packed": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**31)),
    }


@given(cases())
@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_batch_stream_and_uncached_are_the_oracle_on_each_row_alone(case):
    model, prompts, options = random_model(*case["model"]), case["prompts"], case["options"]
    inputs, eos_token_ids = pad(prompts, case["side"]), case["eos_token_id"]
    width = inputs["input_ids"].shape[1]
    common = {**options, **FULL, "eos_token_id": eos_token_ids}
    with mock.patch.object(window_forward, "is_worth_packing", lambda is_fed: case["is_packed"]):
        batch = model.generate(**inputs, **common, use_cache=case["use_cache"])
    requests = [torch.tensor(prompt) for prompt in prompts]
    stream = dict(model.generate_stream_batch(requests, 2, width, **options, eos_token_id=eos_token_ids))
    logits_fn, noise = sequence_logits(model), torch.Generator().manual_seed(case["seed"])
    shift = model.config.right_shift_logits
    rules = {**options, "mask_token_id": MASK, "eos_token_ids": eos_token_ids, "right_shift_logits": shift}
    for row, prompt in enumerate(prompts):
        expected = sequence_decode(logits_fn, prompt, **rules)
        for _ in range(2):  # a decision that rounding can turn over is no test of the rules
            shaken = sequence_decode(
                lambda *args: (x := logits_fn(*args)) + 3e-5 * torch.randn(x.shape, generator=noise), prompt, **rules
            )
            assume(shaken == expected)
        tokens, accepted = expected
        assert batch.sequences[row, width:].tolist()[: len(tokens)] == tokens
        assert [step["accepted"] for step in batch.trace[row]] == accepted
        assert stream[row].tolist() == tokens
        ids = torch.tensor([prompt])
        alone = model.generate(ids, attention_mask=torch.ones_like(ids), **common)
        assert alone.sequences[0, len(prompt) :].tolist() == tokens
        assert [step["accepted"] for step in alone.trace[0]] == accepted

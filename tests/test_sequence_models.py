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
from transformers.generation.streamers import BaseStreamer

from d2f_hf import load_d2f_model
from prompts import pad
from sequence_models import BLOCK_MODELS, FAMILIES, block_model, official_runs
from sequence_models import MASK as MASK_ID
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


class Heard(BaseStreamer):
    """Keeps what it is told."""

    def __init__(self):
        self.tokens: list[int] = []

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        pass


PROMPTS = [
    [3],
    [5, 2, 9],
    [7, 1, 4, 8],
    [2] * 5,
    [6, 1, 2, 3, 4, 5, 6, 7, 9],
]  # block 0 empty, short of one, whole ...


@pytest.mark.parametrize(
    "options",
    [
        {"num_branches": 3},
        {"num_branches": 3, "block_add_threshold": 0.3},
        {"remask_threshold": 0.3},
        {"remask_threshold": 0.9, "block_add_threshold": 0.3},
        {"acceptance_rule": "credit", "block_add_threshold": 0.3},
        {"acceptance_rule": "factor"},
        {"min_new_tokens": 5},
        {"do_sample": True, "top_k": 1, "min_new_tokens": 3},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},  # from left to right
        {"cache_implementation": "static"},
    ],
    ids=str,
)
@pytest.mark.parametrize("limit", [1, 6, 13])
def test_every_option_gives_the_same_alone_in_a_batch_and_in_a_stream(options, limit):
    model = random_model("dream", 1, True)
    common = {"block_add_threshold": 1.0, "block_size": 4, "max_new_tokens": limit, **options}
    inputs = pad(PROMPTS, "left")
    width = inputs["input_ids"].shape[1]
    batch = model.generate(**inputs, **common, **FULL, output_scores=True, output_logits=True)
    uncached = model.generate(**inputs, **common, use_cache=False)
    stream = dict(model.generate_stream_batch([torch.tensor(p) for p in PROMPTS], 2, width, **common))
    assert batch.sequences.equal(uncached)
    assert len(batch.scores) == len(batch.logits) == batch.sequences.shape[1] - width <= limit
    for row, prompt in enumerate(PROMPTS):
        ids, heard = torch.tensor([prompt]), Heard()
        alone = model.generate(ids, attention_mask=torch.ones_like(ids), **common, streamer=heard)
        response = alone[0, len(prompt) :].tolist()
        assert len(response) <= limit and MASK not in response
        assert batch.sequences[row, width:].tolist()[: len(response)] == response
        assert stream[row].tolist() == response
        # transformers' streamers are told the prompt first, by the caller's side of `generate`.
        assert heard.tokens[-len(response) :] == response
        for i, token in enumerate(response):
            assert batch.scores[i][row].isfinite().any()
            if "repetition_penalty" not in options:
                assert batch.scores[i][row].argmax() == token or options.get("do_sample")
        written = {position: token for step in batch.trace[row] for position, token in step["accepted"]}
        assert [written[len(prompt) + i] for i in range(len(response))] == response
        assert min(written) >= len(prompt)


def test_returned_sequences_share_their_first_forward_and_stay_apart():
    model = random_model("dream", 1, True)
    ids = torch.tensor([PROMPTS[4]])
    common = {"attention_mask": torch.ones_like(ids), "block_size": 4, "max_new_tokens": 7, "block_add_threshold": 1.0}
    one = model.generate(ids, **common, do_sample=True, top_k=1)
    surest = model.generate(ids, **common, do_sample=True, top_k=1, num_return_sequences=3, **FULL)
    assert surest.sequences.equal(one.expand(3, -1))
    sampling = {"do_sample": True, "temperature": 3.0, "top_k": 0, "eos_token_id": None}
    several = model.generate(ids, **common, **sampling, num_return_sequences=4)
    assert len({tuple(row) for row in several.tolist()}) > 1


@pytest.mark.parametrize("length", [1, 3, 4, 5])
def test_a_stopping_criterion_ends_a_row_where_it_says(length):
    """It once would have been compared with a length that counts the prompt's tokens in the first block."""
    model, ids = random_model("dream", 1, True), torch.tensor([PROMPTS[1]])
    common = {"attention_mask": torch.ones_like(ids), "block_size": 4, "max_new_tokens": 9, "eos_token_id": None}
    whole = model.generate(ids, **common)
    end = ids.shape[1] + length
    stopped = model.generate(ids, **common, stopping_criteria=[lambda ids, scores, **k: ids.shape[1] >= end])
    assert stopped.equal(whole[:, :end])


def test_masks_in_a_prompt_stay_and_an_eos_in_its_last_block_ends_nothing():
    model = random_model("dream", 1, True)
    for prompt in ([1, MASK, 3], [1, EOS, 3], [4, 5, 6, 7, MASK, EOS]):
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            block_size=4,
            max_new_tokens=6,
            min_new_tokens=6,
            remask_threshold=0.5,
        )
        assert output[0, : len(prompt)].tolist() == prompt and output.shape[1] == len(prompt) + 6


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"block_size": 4, "steps_per_block": 5}, "steps_per_block"),
        ({"block_size": 4, "sub_block_size": 3}, "sub_block_size"),
        ({"block_size": 4, "sub_block_size": 8}, "sub_block_size"),
        ({"steps_per_block": 2, "acceptance_rule": "factor"}, "steps_per_block"),
        ({"confidence_threshold": 0.5, "acceptance_rule": "sequential"}, "confidence_threshold"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, name):
    with pytest.raises(ValueError, match=f"`{name}`"):
        block_model("sdar").generate(torch.tensor([[1, 2]]), max_new_tokens=4, **options)
    with pytest.raises(ValueError, match=f"`{name}`"):
        block_model("sdar").open_stream(1, 4, max_new_tokens=4, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loader_gives_a_model_that_decodes_as_the_official_code(family):
    """Blocks one after the other, and Fast-dLLM v2's first token alone, without a word from the caller."""
    options = {"mask_token_id": MASK_ID} if family == "fastdllm_v2" else {}  # the original names none in its files
    model = load_d2f_model(BLOCK_MODELS / f"{family}_tiny", **options).eval()
    assert model.config.block_alignment == "sequence"
    for run in official_runs(family)[::7]:
        ids = torch.tensor([run.prompt])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), **run.options)
        assert tuple(output[0, len(run.prompt) :].tolist()) == run.response

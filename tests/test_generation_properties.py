"""What holds for every model, batch and setting of `generate(decoding="d2f")`, on random ones.

150 cases in the ordinary tests; `make nightly` runs 2,000 more, with other seeds each time.
"""

from functools import cache
from unittest import mock

import pytest
import torch
from d2f_hf.modeling import window_forward
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from prompts import pad
from reference_decoding import reference_decode
from tiny_models import EOS, FAMILIES, MASK, PAD, plain_logits, tiny_model

FULL = {"return_dict_in_generate": True, "output_trace": True}


@cache
def model_of(family: str, kind: str, seed: int):
    options = {
        "plain": {},
        "grouped": {"num_key_value_heads": 2},
        "tied": {"tie_word_embeddings": True},
        "other shift": {"right_shift_logits": family == "llada"},
    }[kind]
    return tiny_model(seed=seed, family=family, **options)


@st.composite
def cases(draw):
    thresholds = st.one_of(st.sampled_from([0.0, 0.1, 0.5, 0.95, 1.0]), st.floats(0.0, 1.0, width=16))
    # Special tokens too; but behind nothing but masks all response tokens look alike, and only rounding orders them.
    prompt = st.lists(st.integers(0, MASK), min_size=1, max_size=9).filter(lambda ids: set(ids) != {MASK})
    return {
        "model": (
            draw(st.sampled_from(sorted(FAMILIES))),
            draw(st.sampled_from(["plain", "grouped", "tied", "other shift"])),
            draw(st.integers(0, 3)),
        ),
        "implementation": draw(st.sampled_from(["eager", "sdpa", "flex_attention"])),
        "prompts": draw(st.lists(prompt, min_size=1, max_size=4)),
        "side": draw(st.sampled_from(["left", "right"])),
        "options": {
            "max_new_tokens": draw(st.integers(1, 20)),
            "block_size": draw(st.integers(1, 9)),
            "block_add_threshold": draw(thresholds),
            "block_activation_threshold": draw(thresholds),
            "confidence_threshold": draw(thresholds),
            "token_ranking": draw(st.sampled_from(["probability", "neg_entropy", "margin"])),
            "max_active_blocks": draw(st.sampled_from([None, 1, 2, 3])),
        },
        "eos_token_id": draw(st.sampled_from([[EOS], [EOS, 5, 11]])),
        "use_cache": draw(st.booleans()),
        "is_packed": draw(st.booleans()),
        "min_new_tokens": draw(st.integers(0, 4)),
        "seed": draw(st.integers(0, 2**31)),
    }


def check(case: dict) -> None:
    model = model_of(*case["model"])
    model.set_attn_implementation(case["implementation"])
    prompts, options = case["prompts"], case["options"]
    inputs = pad(prompts, case["side"])
    width, limit, block_size = inputs["input_ids"].shape[1], options["max_new_tokens"], options["block_size"]
    eos_token_ids, minimum = case["eos_token_id"], min(case["min_new_tokens"], limit)
    common = {**options, **FULL, "eos_token_id": eos_token_ids}

    with torch.compiler.set_stance("force_eager"):
        with mock.patch.object(window_forward, "is_worth_packing", lambda is_fed: case["is_packed"]):
            batch = model.generate(**inputs, **common, use_cache=case["use_cache"])
        requests = [torch.tensor(prompt) for prompt in prompts]
        stream = dict(model.generate_stream_batch(requests, 2, width, **options, eos_token_id=eos_token_ids))
        sampling = {"do_sample": True, "temperature": 1.5, "top_k": 0, "min_new_tokens": minimum, **common}
        samples = []
        for _ in range(2):
            generator = torch.Generator().manual_seed(case["seed"])
            samples.append(model.generate(**inputs, **sampling, generator=generator))
        vanilla = model.generate(
            **inputs,
            decoding="vanilla",
            max_new_tokens=limit,
            block_size=block_size,
            unmask_schedule=("even", "linear", "independent")[case["seed"] % 3],
            eos_token_id=eos_token_ids,
            do_sample=True,
            generator=torch.Generator().manual_seed(case["seed"]),
        )
    assert vanilla[:, :width].equal(inputs["input_ids"]) and MASK not in vanilla[:, width:]
    assert width < vanilla.shape[1] <= width + limit

    for output in (batch, samples[0]):
        assert output.sequences[:, :width].equal(inputs["input_ids"]), "the prompt is unchanged"
        assert width < output.sequences.shape[1] <= width + limit
        assert MASK not in output.sequences[:, width:]
        for row, response in enumerate(output.sequences[:, width:].tolist()):
            ends = [i + 1 for i, token in enumerate(response) if token in eos_token_ids]
            end = ends[0] if ends else limit
            assert output is batch or end >= min(minimum + 1, limit)
            assert len(response) >= end and set(response[end:]) <= {PAD}
            num_forward_passes = output.num_forward_passes[row].item()
            assert num_forward_passes <= min(end - 1 + block_size, limit), "each decodes a token up to the EOS's block"
            assert all(step["accepted"] for step in output.trace[row])
            assert num_forward_passes == len(output.trace[row])
            assert output.tokens_per_forward[row].item() == pytest.approx(end / num_forward_passes)
    assert samples[0].sequences.equal(samples[1].sequences) and samples[0].trace == samples[1].trace

    logits_fn = plain_logits(model)
    rules = {
        **options,
        "mask_token_id": MASK,
        "eos_token_ids": eos_token_ids,
        "right_shift_logits": model.config.right_shift_logits,
    }
    noise = torch.Generator().manual_seed(case["seed"])
    for row, prompt in enumerate(prompts):
        expected = reference_decode(logits_fn, prompt, **rules)
        # A decision that rounding can turn over is no test of the rules.
        for _ in range(2):
            shaken = reference_decode(
                lambda *args: (x := logits_fn(*args)) + 3e-5 * torch.randn(x.shape, generator=noise), prompt, **rules
            )
            assume(shaken == expected)
        response = batch.sequences[row, width:].tolist()
        assert response[: len(expected.tokens)] == expected.tokens
        accepted = [step["accepted"] for step in batch.trace[row]]
        assert accepted == [step["accepted"] for step in expected.trace], "as the uncached oracle, on this row alone"
        assert stream[row].tolist() == expected.tokens
        assert batch.trace[row] == expected.trace or not case["use_cache"]
        ids = torch.tensor([prompt])
        alone = model.generate(ids, attention_mask=torch.ones_like(ids), **common)
        assert alone.sequences[0, len(prompt) :].tolist() == expected.tokens
        assert alone.trace[0] == expected.trace


IGNORED = [HealthCheck.too_slow, HealthCheck.filter_too_much]


@given(cases())
@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=IGNORED)
def test_what_holds_for_every_model_batch_and_setting(case):
    check(case)


@pytest.mark.nightly
@given(cases())
@settings(max_examples=2000, deadline=None, suppress_health_check=IGNORED)
def test_the_same_holds_for_two_thousand_more_cases(case):
    check(case)

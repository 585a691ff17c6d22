"""A block-diffusion model drafts for an autoregressive one: what comes out is the verifier's, whatever is drafted."""

import json
import random
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from causal_models import FAMILIES, MASK, VOCAB_SIZE, models, prompts, with_its_weights
from d2f_hf import D2FLlamaForBlockDiffusion
from plain_models import block_causal_mask
from test_verified_decoding import DRAFTERS, drafter
from tiny_models import tiny_model

OF_ALL = {"vocab_size": VOCAB_SIZE, "mask_token_id": MASK}


def diffusion_model(name: str, seed: int = 3):
    """A random model that drafts; that of "llama" has other weights than the verifier."""
    if name == "llama":
        model = with_its_weights(models(seed=seed)[0], D2FLlamaForBlockDiffusion, mask_token_id=MASK, block_size=4)
        model.config.has_causal_mode = False
        return model
    return tiny_model(seed, name, **OF_ALL)


all_models = pytest.mark.parametrize("name", ["llama", "llada", "dream"])


@pytest.mark.parametrize("case", range(24))
def test_tokens_are_those_of_the_verifier(case):
    rng = random.Random(case)
    _, verifier = models(rng.choice(list(FAMILIES)), seed=case)
    model = diffusion_model(rng.choice(["llama", "llada", "dream"]))
    lengths = [rng.randint(1, 12) for _ in range(rng.randint(1, 5))]
    inputs = prompts(lengths, seed=case)
    options = {
        "max_new_tokens": rng.choice([1, 2, 3, 10, 20]),
        "eos_token_id": rng.choice([None, [11], list(range(20, 30))]),
        "pad_token_id": 78,
    }
    if rng.random() < 0.5:
        options |= rng.choice(
            [{"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"bad_words_ids": [[5, 6], [7]]}]
        )
    expected = verifier.generate(**inputs, decoding="autoregressive", **options)
    verified = {
        **options,
        "decoding": "verified",
        "verifier": verifier,
        "draft_length": rng.choice([1, 2, 7, 40]),
        "block_size": rng.choice([None, 1, 3, 16]),
    }
    width = inputs["input_ids"].shape[1]
    patch = drafter(verifier, rng.choice(["weights", "right", "wrong", "mixed"]), expected[:, width:], case)
    assert model.generate(**inputs, **verified).tolist() == expected.tolist()
    assert model.generate(**inputs, **verified, use_cache=False).tolist() == expected.tolist()
    patch.undo()  # the drafts of a stream are for other rows
    rows = [ids[mask.bool()] for ids, mask in zip(*inputs.values(), strict=True)]
    responses = dict(model.generate_stream_batch(rows, rng.randint(1, 4), 12, **verified))
    for b, row in enumerate(rows):
        alone = model.generate(row[None], **verified)[0, len(row) :].tolist()
        assert alone == responses[b].tolist()
        assert expected[b, width:].tolist()[: len(alone)] == alone


@all_models
def test_a_drafter_from_a_published_folder_has_classes_of_its_own(name, tmp_path):
    """The verifier is of this package; both read one kind of cache, also with padding left out."""
    _, verifier = models()
    diffusion_model(name).save_pretrained(tmp_path)
    reference = json.loads((tmp_path / "config.json").read_text())["auto_map"]["AutoModelForCausalLM"]
    model: Any = get_class_from_dynamic_module(reference, str(tmp_path)).from_pretrained(tmp_path).eval()
    assert type(model).__module__.startswith("transformers_modules")
    options = {"max_new_tokens": 12, "eos_token_id": None}
    for lengths in ([4], [40, 2, 3, 40, 1]):
        inputs = prompts(lengths)
        expected = verifier.generate(**inputs, decoding="autoregressive", **options)
        found = model.generate(**inputs, decoding="verified", verifier=verifier, draft_length=5, **options)
        assert found.equal(expected)


@torch.no_grad()
def draft_of(model, text: list[int], prompt_length: int, num_masks: int, block_size: int) -> list[int]:
    """A slow oracle: one forward without a cache over the text and masks behind it, block-causal from the prompt."""
    ids = torch.tensor([text + [MASK] * num_masks])
    allowed = block_causal_mask(ids.shape[1], prompt_length, block_size)
    logits = model(ids, attention_mask=allowed[None, None]).logits[0]
    if model.config.right_shift_logits:
        logits = logits.roll(1, 0)
    logits[:, MASK] = -torch.inf
    return logits[len(text) :].argmax(-1).tolist()


@all_models
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_drafts_are_those_of_the_model_over_its_own_blocks(name, block_size):
    _, verifier = models(seed=1)
    model = diffusion_model(name)
    prompt, limit, length = [5, 6, 7, 8, 9], 18, 4
    output = model.generate(
        torch.tensor([prompt]),
        decoding="verified",
        verifier=verifier,
        block_size=block_size,
        draft_length=length,
        max_new_tokens=limit,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_trace=True,
    )
    text = list(prompt)
    drafts = verified = 0
    for step in output.trace[0]:
        if step["accepted"]:
            text += [token for _, token in step["accepted"]]
            verified += 1
            continue
        num_masks = min(length, len(prompt) + limit - 1 - len(text))
        expected = draft_of(model, text, len(prompt), num_masks, block_size)
        assert step["drafted"] == [(len(text) + k, token) for k, token in enumerate(expected)]
        drafts += 1
    assert text == output.sequences[0].tolist()
    assert drafts > 1 and len(output.accepted_lengths[0]) == drafts
    assert output.num_forward_passes.tolist() == [drafts + verified]


def test_right_drafts_take_two_forwards_a_cycle():
    _, verifier = models()
    model = diffusion_model("llada")
    inputs, limit, length = prompts([4]), 30, 9
    options = {"max_new_tokens": limit, "eos_token_id": None, "return_dict_in_generate": True}
    answers = verifier.generate(**inputs, decoding="autoregressive", **options).sequences[:, 4:]
    patch = drafter(verifier, "right", answers)
    try:
        output = model.generate(
            **inputs, decoding="verified", verifier=verifier, draft_length=length, output_trace=True, **options
        )
    finally:
        patch.undo()
    assert output.accepted_lengths == [[9, 9, 9]] and output.num_forward_passes.tolist() == [6]
    fed = sum(step["window_length"] for step in output.trace[0])
    assert output.positions_per_forward.tolist() == pytest.approx([fed / 6])


@pytest.mark.parametrize("name", DRAFTERS)
def test_several_responses_to_a_prompt_are_samples_of_the_verifier(name):
    _, verifier = models()
    model = diffusion_model("llada")
    inputs = prompts([5, 3])
    options = {"max_new_tokens": 9, "eos_token_id": None, "num_return_sequences": 3, "do_sample": True, "top_k": 1}
    expected = verifier.generate(**inputs, decoding="autoregressive", **options)
    patch = drafter(verifier, name, expected[::3, 5:].repeat_interleave(3, 0))
    try:
        output = model.generate(
            **inputs,
            decoding="verified",
            verifier=verifier,
            draft_length=4,
            output_trace=True,
            return_dict_in_generate=True,
            **options,
        )
    finally:
        patch.undo()
    assert output.sequences.equal(expected)
    for row, trace in enumerate(output.trace):
        assert sum(len(step["accepted"]) for step in trace) == 9
        fed = sum(step["window_length"] for step in trace)
        assert float(output.positions_per_forward[row] * output.num_forward_passes[row]) == pytest.approx(fed)


def test_an_interrupted_step_of_a_stream_loses_nothing(monkeypatch):
    _, verifier = models()
    model = diffusion_model("llada")
    options = {"max_new_tokens": 10, "eos_token_id": None}
    expected = verifier.generate(torch.tensor([[5, 6, 7]]), decoding="autoregressive", **options)[0, 3:].tolist()
    for interrupted, broken in ((1, model), (2, model), (1, verifier), (2, verifier)):
        stream = model.open_stream(2, 12, decoding="verified", verifier=verifier, draft_length=3, **options)
        stream.add(torch.tensor([5, 6, 7]), num_return_sequences=2, do_sample=True, top_k=1)
        found, number = {0: [], 1: []}, 0

        def interrupt(*args, **kwargs):
            raise KeyboardInterrupt

        while stream.has_unfinished:
            number += 1
            with monkeypatch.context() as patch:
                if number == interrupted:
                    patch.setattr(broken.get_output_embeddings(), "forward", interrupt)
                    with pytest.raises(KeyboardInterrupt):
                        stream.step()
                    continue
                for update in stream.step():
                    found[update.sequence_index] += update.tokens.tolist()
        assert found == {0: expected, 1: expected}


def test_an_adapter_of_either_model_counts():
    _, verifier = models()
    options = {"max_new_tokens": 12, "eos_token_id": None}
    inputs = prompts([4, 6])
    adapted = get_peft_model(verifier, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    expected = adapted.generate(**inputs, decoding="autoregressive", **options)
    with adapted.disable_adapter():
        assert not verifier.generate(**inputs, decoding="autoregressive", **options).equal(expected)
    model = get_peft_model(diffusion_model("dream"), LoraConfig(r=4, target_modules=["q_proj"]))
    verified = {"decoding": "verified", "draft_length": 4, **options}
    found = model.generate(**inputs, verifier=adapted.get_base_model(), **verified)
    assert found.equal(expected)
    with pytest.raises(ValueError, match="a PeftModel.*get_base_model"):
        model.generate(**inputs, verifier=adapted, **verified)


@pytest.mark.parametrize(
    ("verifier", "options", "message"),
    [
        ({}, {"decoding": "d2f"}, "`verifier` is not used by decoding='d2f'"),
        ({}, {"decoding": "autoregressive"}, "`verifier` is not used by decoding='autoregressive'"),
        ({}, {"draft_layout": "rolling"}, "`draft_layout` must be 'linear' with a `verifier`"),
        ({}, {"num_draft_steps": 2}, "`num_draft_steps` must be 1 with a `verifier`"),
        ({}, {"block_size": 0}, "`block_size`"),
        ({}, {"synced_gpus": True}, "`verifier` is not supported with `synced_gpus`"),
        ({"vocab_size": VOCAB_SIZE + 1}, {}, "`verifier` must have the `vocab_size`"),
        ({"mask_token_id": 3}, {}, "`verifier` must have the `mask_token_id`"),
        ({"has_causal_mode": False}, {}, "has_causal_mode=True"),
        ({"own": {"block_alignment": "sequence"}}, {}, "block_alignment='sequence'"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_before_any_forward(verifier, options, message, monkeypatch):
    model, other = diffusion_model("llama"), models()[1]
    for name, value in verifier.pop("own", {}).items():
        setattr(model.config, name, value)
    for name, value in verifier.items():
        setattr(other.config, name, value)
    for each in (model, other):
        monkeypatch.setattr(each, "forward", lambda *args, **kwargs: pytest.fail("a forward"))
    with pytest.raises(ValueError, match=message):
        model.generate(**prompts([3]), **{"decoding": "verified", "max_new_tokens": 4, **options}, verifier=other)


@pytest.mark.parametrize("verifier", ["twin", 3, torch.nn.Linear(2, 2), models()[0]], ids=lambda v: type(v).__name__)
def test_what_is_no_model_of_ours_is_refused(verifier):
    with pytest.raises(ValueError, match=r"`verifier` must be a model of this package"):
        diffusion_model("llama").generate(**prompts([3]), decoding="verified", max_new_tokens=4, verifier=verifier)


def test_a_request_of_a_stream_has_no_verifier_of_its_own():
    _, verifier = models()
    stream = diffusion_model("llama").open_stream(2, 8, decoding="verified", verifier=verifier, max_new_tokens=4)
    with pytest.raises(ValueError, match="`verifier` concerns all requests"):
        stream.add(torch.tensor([5, 6]), verifier=verifier)

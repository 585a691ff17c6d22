"""`decoding="fast_dllm"`: Fast-dLLM's confidence threshold and its approximate caches."""

import json
from collections.abc import Callable

import pytest
import torch
from d2f_hf.modeling.fast_dllm_decoding import fast_dllm_accepted_tokens
from transformers import StoppingCriteria, StoppingCriteriaList

from golden_data import GOLDEN, golden_model, until_eos
from prompts import pad, random_prompts
from tiny_models import EOS, MASK, PAD, VOCAB_SIZE, ScriptedModel, plain_logits, sure_of, tiny_model

CACHES = ["none", "prefix", "dual"]
golden = json.loads((GOLDEN / "vanilla_fastdllm_llada.json").read_text())


def windows_of(model) -> tuple[list[tuple[int, int]], Callable]:
    """A list that grows by first position and length of what each forward reads in row 0; and how to end that."""
    windows = []

    def record(module, args, kwargs):
        windows.append((int(kwargs["position_ids"][0, 0]), kwargs["input_ids"].shape[1]))

    return windows, model.model.register_forward_pre_hook(record, with_kwargs=True).remove


@pytest.mark.parametrize("result", golden["results"], ids=lambda r: f"{r['setting']}-{r['prompt']}")
def test_fast_dllm_is_reproduced_forward_by_forward(result):
    setting, prompt = golden["settings"][result["setting"]], golden["prompts"][result["prompt"]]
    pace = {"confidence_threshold": setting["threshold"]}
    windows, remove = windows_of(golden_model("llada"))
    output = golden_model("llada").generate(
        torch.tensor([prompt]),
        decoding="fast_dllm",
        block_cache=setting["cache"],
        max_new_tokens=setting["gen_length"],
        block_size=setting["block_length"],
        return_dict_in_generate=True,
        **(pace if setting["threshold"] is not None else {"steps": setting["steps"]}),
    )
    remove()
    expected = until_eos(result["tokens"], golden_model("llada").config.eos_token_id)
    assert output.sequences[0, len(prompt) :].tolist() == expected
    assert output.num_forward_passes.item() == result["nfe"] == len(windows)
    assert [length for _, length in windows] == [length for length, _ in result["calls"]]
    if setting["cache"] != "dual":  # which passes the keys and values of the whole sequence
        assert [start for start, _ in windows] == [cached for _, cached in result["calls"]]


def test_the_golden_runs_hold_an_eos_and_blocks_that_their_first_forward_fills():
    eos = golden_model("llada").config.eos_token_id
    assert any(eos in result["tokens"][:-1] for result in golden["results"])
    one_forward = {r["prompt"] for r in golden["results"] if r["nfe"] == 1}
    cached = [
        r["nfe"] for r in golden["results"] if r["setting"].startswith("dual_g32") and r["prompt"] in one_forward
    ]
    assert min(cached) == 2


def oracle(
    logits_fn: Callable[..., torch.Tensor],
    prompt: list[int],
    limit: int,
    block_size: int,
    block_cache: str,
    right_shift_logits: bool,
    confidence_threshold: float = 0.9,
    steps_per_block: int | None = None,
) -> tuple[list[int], int]:
    """Fast-dLLM, one row, literally. Its tokens up to the first EOS, and its forwards."""
    ids, shift, num_forward_passes = list(prompt) + [MASK] * limit, int(right_shift_logits), 0
    for start in range(len(prompt), len(ids), block_size):
        block = range(start, min(start + block_size, len(ids)))
        memory, step = {}, 0
        while any(ids[i] == MASK for i in block) or (block_cache != "none" and step < 2):
            fed = range(len(ids))
            if block_cache == "none":
                memory = {}
            elif step > 0:
                fed = range(start - shift, block.stop if block_cache == "dual" else len(ids))
            logits = logits_fn([ids[i] for i in fed], positions=torch.tensor(fed), memory=memory)
            p = logits.double().softmax(-1)
            p[:, MASK] = 0
            confidence = {i: p[i - shift - fed.start].max().item() for i in block if ids[i] == MASK}
            best_first = sorted(confidence, key=lambda i: -confidence[i])
            if steps_per_block is not None:
                size = len(block)
                chosen = best_first[: size // steps_per_block + (step < size % steps_per_block)]
            else:
                chosen = [i for i in best_first if i == best_first[0] or confidence[i] >= confidence_threshold]
            for i in chosen:
                ids[i] = p[i - shift - fed.start].argmax().item()
            step += 1
            num_forward_passes += 1
    return until_eos(ids[len(prompt) :], EOS), num_forward_passes


PACES = {
    "threshold": {"max_new_tokens": 11, "confidence_threshold": 0.4},
    "steps": {"max_new_tokens": 12, "steps": 9},
}


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("block_cache", CACHES)
@pytest.mark.parametrize("pace", PACES)
def test_batches_equal_the_literal_oracle_and_each_row_alone(family, side, block_cache, pace):
    """Dream's logits are shifted. The last block of eleven tokens is short."""
    model = tiny_model(family=family, seed=2)
    options = {"decoding": "fast_dllm", "block_size": 4, "block_cache": block_cache, "return_dict_in_generate": True}
    prompts = random_prompts([1, 6, 3, 9], seed=8)
    output = model.generate(**pad(prompts, side), **options, **PACES[pace])
    for row, prompt in enumerate(prompts):
        rules = {"confidence_threshold": 0.4} if pace == "threshold" else {"steps_per_block": 3}
        tokens, num_forward_passes = oracle(
            plain_logits(model),
            prompt,
            PACES[pace]["max_new_tokens"],
            4,
            block_cache,
            model.config.right_shift_logits,
            **rules,
        )
        response = output.sequences[row, 9:].tolist()
        assert response[: len(tokens)] == tokens and set(response[len(tokens) :]) <= {PAD}
        assert output.num_forward_passes[row].item() == num_forward_passes
        alone = model.generate(torch.tensor([prompt]), **options, **PACES[pace])
        assert alone.sequences[0, len(prompt) :].tolist() == tokens
        assert alone.num_forward_passes.item() == num_forward_passes


def test_the_caches_are_approximations_that_differ():
    model = tiny_model(seed=2)
    [prompt] = random_prompts([6], seed=8)
    outputs = {
        tuple(
            model.generate(
                torch.tensor([prompt]), decoding="fast_dllm", block_size=4, max_new_tokens=12, block_cache=block_cache
            )[0].tolist()
        )
        for block_cache in CACHES
    }
    assert len(outputs) == 3


@pytest.mark.parametrize("shift", [False, True])
def test_without_a_cache_the_fixed_schedule_is_vanilla_decoding(shift):
    model = tiny_model(right_shift_logits=shift, seed=1)
    inputs = pad(random_prompts([1, 6, 3], seed=8), "left")
    options = {"max_new_tokens": 8, "block_size": 4, "steps": 6, "return_dict_in_generate": True}
    vanilla = model.generate(**inputs, decoding="vanilla", **options)
    for off in ({"block_cache": "none"}, {"use_cache": False}):
        output = model.generate(**inputs, decoding="fast_dllm", **off, **options)
        assert output.sequences.equal(vanilla.sequences)
        assert output.num_forward_passes.equal(vanilla.num_forward_passes)


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize(
    ("block_cache", "windows"),
    [
        ("none", [(0, 8), (0, 8)]),
        ("prefix", [(0, 8), (3, 5), (0, 8), (6, 2)]),
        ("dual", [(0, 8), (3, 3), (0, 8), (6, 2)]),
    ],
)
def test_each_cache_feeds_its_window(block_cache, windows, shift):
    """A prompt of three, blocks of three and two, decoded at once; a shifted model reads one token more in front."""
    model = tiny_model(right_shift_logits=shift)
    seen, remove = windows_of(model)
    model.generate(
        torch.tensor([[1, 2, 3]]), decoding="fast_dllm", block_cache=block_cache, max_new_tokens=5, block_size=3,
        confidence_threshold=0.0,
    )  # fmt: skip
    remove()
    assert seen == [(start - shift, length + shift) if start else (0, length) for start, length in windows]


def test_a_token_is_accepted_when_it_reaches_the_threshold_and_the_best_one_in_any_case():
    probability = torch.tensor([[0.5, 0.9, 0.4, 0.5], [0.1, 0.2, 0.3, 0.9], [0.9, 0.9, 0.9, 0.9]])
    is_masked = torch.tensor([[True, False, True, True], [True, True, True, False], [False] * 4])
    accepted = fast_dllm_accepted_tokens(is_masked, probability, probability, 0.5)
    assert accepted.tolist() == [[True, False, False, True], [False, False, True, False], [False] * 4]
    by_another_ranking = fast_dllm_accepted_tokens(is_masked, probability, -probability, 0.5)
    assert by_another_ranking.tolist() == [[True, False, True, True], [True, False, False, False], [False] * 4]


def test_the_default_threshold_is_nine_tenths():
    logits = torch.zeros(9, VOCAB_SIZE)
    logits[:, 4], logits[3:5, 4] = 5.0, 7.0  # probabilities 0.79 and 0.966
    output = ScriptedModel(logits).generate(
        torch.tensor([[0]]), decoding="fast_dllm", max_new_tokens=4, block_size=4, return_dict_in_generate=True
    )
    assert output.num_forward_passes.item() == 3


def test_a_row_counts_the_forwards_that_it_would_take_alone_and_waits_unchanged():
    script = torch.stack([sure_of(range(9))(0), torch.zeros(9, VOCAB_SIZE)])
    model = ScriptedModel(script)
    for block_cache, forwards in (("none", [2, 8]), ("dual", [4, 8])):
        output = model.generate(
            torch.tensor([[0], [0]]), decoding="fast_dllm", max_new_tokens=8, block_size=4, block_cache=block_cache,
            return_dict_in_generate=True,
        )  # fmt: skip
        assert output.sequences[0].tolist() == list(range(9))
        assert output.num_forward_passes.tolist() == forwards


@pytest.mark.parametrize("block_cache", CACHES)
def test_the_output_ends_with_the_first_eos_and_forwards_behind_it_count_as_in_the_original(block_cache):
    model = ScriptedModel(sure_of([0, 1, EOS, 3, EOS, 5, 6]))
    output = model.generate(
        torch.tensor([[0]]), decoding="fast_dllm", max_new_tokens=6, block_size=2, block_cache=block_cache,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert output.sequences.tolist() == [[0, 1, EOS]]
    assert output.num_forward_passes.item() == len(model.calls) == (3 if block_cache == "none" else 6)


def test_a_row_that_a_stopping_criterion_ends_takes_no_more_forwards():
    class StopAtThree(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return input_ids[:, -1] == 3

    script = torch.stack([sure_of(range(9))(0), torch.zeros(9, VOCAB_SIZE)])
    options = {"decoding": "fast_dllm", "max_new_tokens": 8, "block_size": 4, "return_dict_in_generate": True}
    output = ScriptedModel(script).generate(
        torch.tensor([[0], [0]]), stopping_criteria=StoppingCriteriaList([StopAtThree()]), **options
    )
    assert output.sequences[0].tolist() == [0, 1, 2, 3] + [PAD] * 5
    assert output.num_forward_passes.tolist() == [1, 8]


def test_what_a_saved_config_says_for_other_modes_does_not_count_and_what_it_says_for_this_one_does():
    prompt, length = torch.tensor([[1, 2]]), {"max_new_tokens": 4, "return_dict_in_generate": True}
    by_threshold = tiny_model().generate(prompt, decoding="fast_dllm", confidence_threshold=0.1, **length)
    by_steps = tiny_model().generate(prompt, decoding="fast_dllm", steps=4, **length)
    assert by_threshold.num_forward_passes.item() < by_steps.num_forward_passes.item() == 4

    model = tiny_model()
    model.generation_config.update(decoding="vanilla", steps=4, unmask_schedule="linear", confidence_threshold=0.1)
    output = model.generate(prompt, decoding="fast_dllm", **length)
    assert output.num_forward_passes.equal(by_threshold.num_forward_passes)

    model = tiny_model()
    model.generation_config.update(decoding="fast_dllm", steps=4, block_cache="prefix")
    assert model.generate(prompt, **length).num_forward_passes.item() == 4
    output = model.generate(prompt, confidence_threshold=0.1, **length)
    assert output.num_forward_passes.equal(by_threshold.num_forward_passes)
    for decoding in ("d2f", "vanilla"):
        output = model.generate(prompt, decoding=decoding, **length)
        assert output.sequences.equal(tiny_model().generate(prompt, decoding=decoding, max_new_tokens=4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_cache": "triple"}, "`block_cache`.*'dual'"),
        ({"block_cache": "dual", "decoding": "d2f"}, "`block_cache`.*fast_dllm"),
        ({"block_cache": "none", "decoding": "vanilla"}, "`block_cache`.*fast_dllm"),
        ({"steps": 3, "block_size": 2}, "`steps`.*multiple"),
        ({"steps": 2, "block_size": 3}, "`steps`.*`max_new_tokens`"),
        ({"steps": 4, "confidence_threshold": 0.9}, "`confidence_threshold`.*`steps`"),
        ({"confidence_threshold": 1.1}, "`confidence_threshold`"),
        ({"block_add_threshold": 0.5}, "`block_add_threshold`.*d2f"),
        ({"block_activation_threshold": 0.5}, "`block_activation_threshold`.*d2f"),
        ({"output_trace": True}, "`output_trace`.*fast_dllm"),
        ({"max_active_blocks": 2}, "`max_active_blocks`.*d2f"),
        ({"unmask_schedule": "even"}, "`unmask_schedule`.*vanilla"),
        ({"ranking_temperature": 0.5}, "`ranking_temperature`.*vanilla"),
        ({"guidance_scale": 1.5}, "`guidance_scale`.*vanilla"),
        ({"no_repeat_ngram_size": 2}, "`no_repeat_ngram_size`.*fast_dllm"),
        ({"prefix_allowed_tokens_fn": lambda *_: [1]}, "`prefix_allowed_tokens_fn`.*fast_dllm"),
        ({"bad_words_ids": [[1, 2]]}, "`bad_words_ids`.*fast_dllm"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_arguments_that_make_no_sense_here_are_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        tiny_model().generate(torch.tensor([[1, 2]]), **{"decoding": "fast_dllm", "max_new_tokens": 4, **arguments})


def test_fast_dllm_accepts_the_best_token_and_each_that_reaches_the_threshold():
    """In D2F a token has to exceed the threshold. The best one is that of the ranking, and is always masked."""
    is_masked = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0], [0, 0, 0, 0]], dtype=torch.bool)
    probability = torch.tensor([[0.5, 0.75, 0.25, 1.0], [0.5, 0.25, 0.25, 1.0], [1.0, 1.0, 1.0, 1.0]])
    accepted = fast_dllm_accepted_tokens(is_masked, probability, probability, 0.75)
    assert accepted.tolist() == [[False, True, False, False], [True, False, False, False], [False] * 4]
    accepted = fast_dllm_accepted_tokens(is_masked, probability, 1 - probability, 0.75)
    assert accepted.tolist() == [[False, True, True, False], [False, True, False, False], [False] * 4]

"""`generate()`: pipelined and vanilla decoding, its options, and what it leaves to transformers."""

import asyncio
import json
import math
import threading
from functools import cache

import pytest
import torch
from peft import PeftModel
from transformers import (
    AsyncTextIteratorStreamer,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TextDiffusionStreamer,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)

from d2f_hf import D2FGenerationOutput, D2FLLaDAForBlockDiffusion, load_d2f_model
from golden_data import GOLDEN, ExpectedRun, GoldenRun, expected_until_eos, golden_model, load_runs
from prompts import pad, random_prompts
from reference_decoding import ReferenceResult, reference_decode
from tiny_models import (
    BLOCK_DECODINGS,
    EOS,
    LETTERS,
    MASK,
    PAD,
    VOCAB_SIZE,
    ScriptedModel,
    letter_tokenizer,
    plain_logits,
    sure_of,
    tiny_model,
)

# B batch, T positions, V vocabulary

FULL = {"return_dict_in_generate": True, "output_trace": True}
golden_runs = load_runs("decode_llada.json") + load_runs("decode_dream.json")
whole_runs = [run for run in golden_runs if run.whole_blocks_max_new_tokens > 0]
partial_runs = [run for run in golden_runs if run.whole_blocks_max_new_tokens < run.max_new_tokens]


@cache
def golden_model_with_adapter(family: str) -> PeftModel:
    return load_d2f_model(GOLDEN / f"{family}_tiny", GOLDEN / f"{family}_adapter", merge=False).eval()


@cache
def random_model(**options) -> D2FLLaDAForBlockDiffusion:
    return tiny_model(**options)


def oracle(model: D2FLLaDAForBlockDiffusion, prompt: list[int], **options) -> ReferenceResult:
    """What Algorithm 2, written literally, makes of a tiny model."""
    special = {"mask_token_id": MASK, "eos_token_ids": EOS, "right_shift_logits": model.config.right_shift_logits}
    return reference_decode(plain_logits(model), prompt, **special, **options)


def assert_row_equals(
    output: D2FGenerationOutput, row: int, prompt_width: int, expected: ExpectedRun | ReferenceResult, pad_token: int
):
    response = output.sequences[row, prompt_width:].tolist()
    length = len(expected.tokens)
    assert response[:length] == expected.tokens
    assert set(response[length:]) <= {pad_token}
    assert output.num_forward_passes[row] == expected.num_forward_passes
    assert output.tokens_per_forward[row].item() == pytest.approx(length / expected.num_forward_passes)
    assert output.trace[row] == expected.trace


# ---- the golden runs of the reference ----


@pytest.mark.parametrize("run", whole_runs, ids=str)
def test_d2f_reproduces_tokens_forwards_and_trace_of_the_reference(run: GoldenRun):
    output = golden_model(run.family).generate(
        torch.tensor([run.prompt_ids]), max_new_tokens=run.whole_blocks_max_new_tokens, **run.decoding, **FULL
    )
    assert_row_equals(output, 0, len(run.prompt_ids), expected_until_eos(run), run.eos_token_id)


@pytest.mark.parametrize("run", partial_runs, ids=str)
def test_an_exact_length_continues_what_the_reference_rounds_down(run: GoldenRun):
    output = golden_model(run.family).generate(
        torch.tensor([run.prompt_ids]), max_new_tokens=run.max_new_tokens, **run.decoding, **FULL
    )
    tokens, expected = output.sequences[0, len(run.prompt_ids) :].tolist(), expected_until_eos(run)
    assert tokens[: len(expected.tokens)] == expected.tokens
    assert len(tokens) == (tokens.index(run.eos_token_id) + 1 if run.eos_token_id in tokens else run.max_new_tokens)


@pytest.mark.parametrize(
    "run", load_runs("decode_adapter_llada.json") + load_runs("decode_adapter_dream.json"), ids=str
)
def test_d2f_reproduces_the_reference_through_its_adapter(run: GoldenRun):
    output = golden_model_with_adapter(run.family).generate(
        input_ids=torch.tensor([run.prompt_ids]), max_new_tokens=run.max_new_tokens, **run.decoding, **FULL
    )
    assert_row_equals(output, 0, len(run.prompt_ids), expected_until_eos(run), run.eos_token_id)


settings = sorted({run.setting for run in whole_runs})


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize(
    ("setting", "side"), [(s, "left") for s in settings] + [("bs8_paper", "right"), ("bs16_lowconf", "right")]
)
def test_a_batch_of_unequal_prompts_reproduces_every_row_of_the_reference(family, setting, side):
    runs = [run for run in whole_runs if (run.family, run.setting) == (family, setting)]
    inputs = pad([run.prompt_ids for run in runs], side, pad_token=runs[0].eos_token_id)
    output = golden_model(family).generate(
        **inputs, max_new_tokens=runs[0].whole_blocks_max_new_tokens, **runs[0].decoding, **FULL
    )
    for row, run in enumerate(runs):
        assert_row_equals(output, row, inputs["input_ids"].shape[1], expected_until_eos(run), run.eos_token_id)


def test_the_golden_runs_are_all_there():
    """If the data were thinned out, the tests above would pass without testing much."""
    assert (len(whole_runs), len(partial_runs)) == (2 * 88, 2 * 12)
    assert (len(load_runs("decode_adapter_llada.json")), len(load_runs("decode_adapter_dream.json"))) == (8, 8)


def test_a_model_that_predicts_its_mask_token_terminates():
    """The reference writes it, keeps the position masked, and stops after 10,001 forwards."""
    cases = json.loads((GOLDEN / "quirks.json").read_text())["cases"]
    case = next(c for c in cases if c["case"] == "mask_token_predicted_never_finishes" and c["family"] == "llada")
    model = D2FLLaDAForBlockDiffusion.from_pretrained(
        GOLDEN / "llada_tiny", mask_token_id=case["mask_token_id_override"]
    )
    settings = case["settings"]
    output = model.generate(
        torch.tensor([case["prompt"]]).masked_fill(
            torch.tensor([case["prompt"]]) == case["mask_token_id_override"], 0
        ),
        block_size=settings["block_size"],
        max_new_tokens=settings["max_new_tokens"],
        return_dict_in_generate=True,
    )
    assert case["mask_token_id_override"] not in output.sequences[0, len(case["prompt"]) :]
    assert output.num_forward_passes[0] <= settings["max_new_tokens"]


# ---- against the oracle, on random models ----

KINDS = {
    "plain": {},
    "shifted": {"right_shift_logits": True},
    "grouped": {"n_kv_heads": 2, "seed": 1},
    "shifted and grouped": {"right_shift_logits": True, "n_kv_heads": 1, "seed": 2},
}
SHAPES = {  # prompt length, block size, limit
    "one-token prompt": (1, 4, 12),
    "blocks of one": (3, 1, 7),
    "block above the limit": (4, 32, 9),
    "short last block": (5, 4, 14),
    "one new token": (2, 4, 1),
    "one more than a block": (6, 8, 9),
}
THRESHOLDS = {
    "paper": {"block_add_threshold": 0.1, "block_activation_threshold": 0.95, "confidence_threshold": 0.9},
    "eager": {"block_add_threshold": 0.0, "block_activation_threshold": 0.5, "confidence_threshold": 0.4},
    "block by block": {"block_add_threshold": 1.0, "block_activation_threshold": 1.0, "confidence_threshold": 0.7},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("thresholds", THRESHOLDS)
def test_the_fast_loop_equals_the_oracle(kind, shape, thresholds):
    model = random_model(**KINDS[kind])
    prompt_length, block_size, limit = SHAPES[shape]
    [prompt] = random_prompts([prompt_length], seed=prompt_length)
    options = {"block_size": block_size, **THRESHOLDS[thresholds], "max_new_tokens": limit}
    expected = oracle(model, prompt, **options)
    assert_row_equals(model.generate(torch.tensor([prompt]), **options, **FULL), 0, prompt_length, expected, PAD)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_active_blocks", [1, 2, 3, None])
def test_a_cap_on_the_blocks_in_flight_is_that_of_the_oracle(kind, max_active_blocks):
    model = random_model(**KINDS[kind])
    [prompt] = random_prompts([5], seed=6)
    options = {"block_size": 3, "max_new_tokens": 16, "max_active_blocks": max_active_blocks, **THRESHOLDS["eager"]}
    expected = oracle(model, prompt, **options)
    assert_row_equals(model.generate(torch.tensor([prompt]), **options, **FULL), 0, 5, expected, PAD)
    if max_active_blocks is not None:
        assert max(step["window_length"] for step in expected.trace[1:]) <= 3 * max_active_blocks + 3


@pytest.mark.parametrize("kind", KINDS)
def test_the_cache_changes_no_token(kind):
    model = random_model(**KINDS[kind])
    inputs = pad(random_prompts([2, 7, 5], seed=4), "left")
    options = {"block_size": 4, "max_new_tokens": 18, **FULL}
    cached, uncached = model.generate(**inputs, **options), model.generate(**inputs, **options, use_cache=False)
    static = model.generate(**inputs, **options, cache_implementation="static")
    assert cached.sequences.equal(uncached.sequences) and cached.sequences.equal(static.sequences)
    assert cached.num_forward_passes.equal(uncached.num_forward_passes)
    for with_cache, without in zip(cached.trace, uncached.trace, strict=True):
        assert [step["accepted"] for step in with_cache] == [step["accepted"] for step in without]
        assert all(step["window_start"] == 0 for step in without)
        assert any(step["window_start"] > 0 for step in with_cache)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("ranking", ["probability", "neg_entropy", "margin"])
def test_every_row_of_a_batch_equals_the_row_alone(kind, side, ranking):
    model = random_model(**KINDS[kind])
    prompts = random_prompts([1, 9, 4], seed=5)
    options = {"block_size": 4, "max_new_tokens": 14, "confidence_threshold": 0.6, "token_ranking": ranking}
    inputs = pad(prompts, side)
    batch = model.generate(**inputs, **options, **FULL)
    for row, prompt in enumerate(prompts):
        alone = model.generate(torch.tensor([prompt]), **options, **FULL)
        tokens = alone.sequences[0, len(prompt) :].tolist()
        expected = ExpectedRun(tokens, int(alone.num_forward_passes[0]), alone.trace[0])
        assert_row_equals(batch, row, 9, expected, PAD)
        assert batch.sequences[row, :9].equal(inputs["input_ids"][row])
    assert len(set(batch.num_forward_passes.tolist())) > 1, "rows at the same pace test nothing"


def test_a_batch_takes_one_forward_per_step_for_all_rows():
    model = random_model()
    calls = []
    handle = model.model.register_forward_pre_hook(lambda *_: calls.append(1))
    output = model.generate(**pad(random_prompts([2, 7, 5]), "left"), max_new_tokens=12, **FULL)
    handle.remove()
    assert len(calls) == output.num_forward_passes.max()


def test_padding_tokens_of_the_prompt_do_not_matter():
    model, prompts = random_model(), random_prompts([2, 7])
    outputs = [model.generate(**pad(prompts, "left", token), max_new_tokens=10) for token in (PAD, EOS, 3, MASK)]
    for other in outputs[1:]:
        assert other[:, 7:].equal(outputs[0][:, 7:])


def test_holes_in_the_attention_mask_are_padding():
    model, [prompt] = random_model(), random_prompts([5])
    with_hole = torch.tensor([[*prompt[:2], 11, 12, *prompt[2:]]])
    mask = torch.tensor([[1, 1, 0, 0, 1, 1, 1]])
    output = model.generate(with_hole, attention_mask=mask, max_new_tokens=10)
    assert output[:, 7:].equal(model.generate(torch.tensor([prompt]), max_new_tokens=10)[:, 5:])


# ---- lengths and ends ----


@pytest.mark.parametrize("max_new_tokens", [1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("block_size", [1, 4, 7])
@pytest.mark.parametrize("decoding", BLOCK_DECODINGS)
def test_max_new_tokens_is_exact(max_new_tokens, block_size, decoding):
    model = ScriptedModel(sure_of([1] * 20))
    options = {"max_new_tokens": max_new_tokens, "block_size": block_size, "decoding": decoding}
    assert model.generate(torch.tensor([[2, 3]]), **options).tolist() == [[2, 3] + [1] * max_new_tokens]
    seen = max(len(row) for call in model.calls for row in call)
    assert seen <= 2 + max_new_tokens


def test_max_length_counts_the_prompt():
    model = ScriptedModel(sure_of([1] * 20))
    assert model.generate(torch.tensor([[2, 3]]), max_length=7).shape == (1, 7)


def test_the_default_length_is_256_new_tokens():
    assert ScriptedModel(sure_of([1] * 300)).generate(torch.tensor([[2, 3]]), block_size=64).shape == (1, 258)


def test_a_max_length_in_the_models_generation_config_counts():
    model = ScriptedModel(sure_of([1] * 20))
    model.generation_config.max_length = 9
    assert model.generate(torch.tensor([[2, 3]])).shape == (1, 9)


def test_a_row_ends_with_the_forward_that_decodes_everything_up_to_its_first_eos():
    model = ScriptedModel(sure_of([0, 1, EOS, 3, 4, 5, 6]))
    output = model.generate(torch.tensor([[0]]), max_new_tokens=100, block_size=2, return_dict_in_generate=True)
    assert output.sequences.tolist() == [[0, 1, EOS]]
    assert (output.num_forward_passes.item(), output.tokens_per_forward.item()) == (1, 2.0)


def test_an_eos_in_a_later_block_does_not_end_a_row_whose_earlier_blocks_are_open():
    script = sure_of([0, 1, 2, 3, 4, EOS, 5, 6, 7, 8, 9, 10, 11], {1: 99, 2: 99, 3: 2, 4: 99})
    model = ScriptedModel(script)
    output = model.generate(torch.tensor([[0]]), max_new_tokens=12, block_size=4, **FULL)
    assert output.sequences.tolist() == [[0, 1, 2, 3, 4, EOS]]
    accepted = [step["accepted"] for step in output.trace[0]]
    assert (5, EOS) in accepted[1], "decoded long before its predecessors"
    assert len(accepted) == 4
    assert [len(call[0]) for call in model.calls] == [5, 8, 8, 8], "the block behind the EOS leaves the window"


def test_any_of_several_eos_tokens_ends_a_row_and_the_rest_is_padding():
    script = torch.stack([sure_of([0, 1, 7, 2, 3, 4])(0), sure_of([0, 1, 2, 3, EOS, 4])(0)])
    model = ScriptedModel(script)
    output = model.generate(
        torch.tensor([[0], [0]]), max_new_tokens=5, eos_token_id=[EOS, 7], pad_token_id=PAD, block_size=2
    )
    assert output.tolist() == [[0, 1, 7, PAD, PAD], [0, 1, 2, 3, EOS]]


def test_forwards_do_not_grow_with_max_new_tokens_once_a_row_has_ended():
    counts = []
    for limit in (8, 80):
        output = ScriptedModel(sure_of([0, 1, 2, 3, EOS] + [EOS] * 90)).generate(
            torch.tensor([[0]]), max_new_tokens=limit, block_size=4, return_dict_in_generate=True
        )
        counts.append(output.num_forward_passes.item())
        assert output.sequences.shape == (1, 5)
    assert counts == [1, 1]


def test_a_finished_row_waits_for_the_others_without_changing():
    script = torch.stack([sure_of([0, EOS, 1, 1, 1, 1, 1])(0), torch.zeros(7, VOCAB_SIZE)])
    model = ScriptedModel(script)
    output = model.generate(torch.tensor([[0], [0]]), max_new_tokens=6, block_size=2, return_dict_in_generate=True)
    assert output.num_forward_passes.tolist() == [1, 6]
    assert output.sequences[0].tolist() == [0, EOS] + [PAD] * 5


@pytest.mark.parametrize("block_size", [2, 4, 16])
def test_flat_logits_at_threshold_one_take_at_most_one_forward_per_token(block_size):
    model = ScriptedModel(torch.zeros(20, VOCAB_SIZE))
    output = model.generate(
        torch.tensor([[0]]), max_new_tokens=8, block_size=block_size, confidence_threshold=1.0, **FULL
    )
    assert output.num_forward_passes.item() <= 8
    # Only fully activated blocks force a token: with the paper's threshold that is one block at a time.
    assert all(len(step["accepted"]) == 1 for step in output.trace[0])


@pytest.mark.parametrize("decoding", BLOCK_DECODINGS)
def test_the_mask_token_is_never_sampled(decoding):
    logits = torch.zeros(9, VOCAB_SIZE)
    logits[:, MASK], logits[:, 4] = 20.0, 10.0
    output = ScriptedModel(logits).generate(torch.tensor([[0]]), max_new_tokens=8, decoding=decoding)
    assert output.tolist() == [[0] + [4] * 8]
    sampled = ScriptedModel(logits).generate(
        torch.tensor([[0]]), max_new_tokens=8, decoding=decoding, do_sample=True, temperature=5.0
    )
    assert MASK not in sampled


@pytest.mark.parametrize("decoding", BLOCK_DECODINGS)
def test_an_empty_prompt_is_an_error_that_names_the_way_out(decoding):
    model = random_model()
    with pytest.raises(ValueError, match="BOS"):
        model.generate(
            **{"input_ids": torch.tensor([[1], [2]]), "attention_mask": torch.tensor([[1], [0]])}, decoding=decoding
        )
    with pytest.raises(ValueError, match="bos_token_id|BOS|at least one"):
        model.generate(torch.zeros(1, 0, dtype=torch.long), decoding=decoding)


@pytest.mark.parametrize("decoding", BLOCK_DECODINGS)
def test_special_tokens_inside_the_prompt_are_text_like_any_other(decoding):
    """The reference takes an EOS or a mask in the prompt for one of the response, and ends or never ends."""
    model = random_model()
    prompt = [1, EOS, 2, MASK, PAD, 3, MASK]
    options = {"max_new_tokens": 10, "decoding": decoding}
    output = model.generate(torch.tensor([prompt]), **options)  # the padding token is not inferred to be padding
    assert output[0, :7].tolist() == prompt
    explicit = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, 7, dtype=torch.long), **options)
    assert output.equal(explicit)
    if decoding == "d2f":
        expected = oracle(model, prompt, block_size=4, max_new_tokens=10, **THRESHOLDS["paper"])
        assert output[0, 7:].tolist() == expected.tokens
    batch = model.generate(torch.tensor([[PAD, PAD, *prompt], [*prompt, 4, 5]]), **options)
    tokens = output[0, 7:].tolist()
    assert batch[0, 9 : 9 + len(tokens)].tolist() == tokens, "at the ends it is padding where no mask says otherwise"


def test_a_block_far_longer_than_the_response_costs_nothing_and_changes_nothing():
    model, prompt = random_model(), torch.tensor([[1, 2, 3]])
    expected = model.generate(prompt, max_new_tokens=5, block_size=5)
    assert model.generate(prompt, max_new_tokens=5, block_size=10**9).equal(expected)


def test_ids_may_be_of_any_integer_type():
    model, prompt = random_model(), torch.tensor([[1, 2, 3]])
    for decoding in BLOCK_DECODINGS:
        expected = model.generate(prompt, max_new_tokens=5, decoding=decoding)
        assert model.generate(prompt.int(), max_new_tokens=5, decoding=decoding).equal(expected)


@pytest.mark.parametrize("decoding", BLOCK_DECODINGS)
def test_max_time_ends_decoding_at_once(decoding):
    model = ScriptedModel(sure_of(range(31), dict.fromkeys(range(1, 31), 99)))
    output = model.generate(torch.tensor([[0]]), max_new_tokens=30, block_size=5, max_time=1e-9, decoding=decoding)
    assert len(model.calls) == 1 and output.shape[1] <= 6


@pytest.mark.parametrize("decoding", BLOCK_DECODINGS)
def test_the_padding_token_may_be_the_eos_token(decoding):
    model = random_model()
    prompts = random_prompts([2, 6, 4], seed=9)
    options = {"max_new_tokens": 12, "decoding": decoding, "pad_token_id": EOS}
    batch = model.generate(**pad(prompts, "left", EOS), **options)
    for row, prompt in enumerate(prompts):
        alone = model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
        tokens = batch[row, 6:].tolist()
        assert tokens[: len(alone)] == alone and set(tokens[len(alone) :]) <= {EOS}


def test_a_call_inside_another_changes_neither():
    """From within a streamer, that is between two steps of the outer call."""
    model, outer, inner = random_model(seed=5), torch.tensor([[1, 2, 3]]), torch.tensor([[7, 8]])
    expected = model.generate(outer, max_new_tokens=12), model.generate(inner, max_new_tokens=9, block_size=2)
    between = []

    class Nested(TextStreamer):
        def put(self, value):
            between.append(model.generate(inner, max_new_tokens=9, block_size=2))

        def end(self):
            pass

    output = model.generate(outer, max_new_tokens=12, streamer=Nested(letter_tokenizer()))
    assert output.equal(expected[0]) and len(between) > 2
    assert all(tokens.equal(expected[1]) for tokens in between)


def test_a_prompt_has_to_fit_into_the_positions_of_the_model():
    model = tiny_model(max_sequence_length=8)
    with pytest.raises(ValueError, match="`input_ids`.*8 positions"):
        model.generate(torch.ones(1, 8, dtype=torch.long), max_new_tokens=2)
    assert model.generate(torch.ones(1, 7, dtype=torch.long), max_new_tokens=1).shape == (1, 8)


@pytest.mark.parametrize("decoding", BLOCK_DECODINGS)
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_numbers_raise(decoding, do_sample, value):
    logits = torch.zeros(5, VOCAB_SIZE)
    logits[4, 3] = value  # the last token of all
    with pytest.raises(ValueError, match="NaN"):
        ScriptedModel(logits).generate(
            torch.tensor([[0]]), max_new_tokens=4, decoding=decoding, do_sample=do_sample, top_k=0
        )


# ---- sampling, processors, stopping criteria ----

SAMPLING = {
    "temperature": {"temperature": 2.0, "top_k": 0},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.7, "top_k": 0},
    "all": {"temperature": 0.5, "top_k": 5, "top_p": 0.8},
}


def sampled_distribution(logits: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0):
    """The distribution `(V,)` that temperature, then top-k, then top-p make of `logits`, the obvious way."""
    p = (logits / temperature).softmax(-1)
    order = p.argsort(descending=True)
    kept = order[: top_k or len(p)]
    nucleus = p[kept] / p[kept].sum()
    before = nucleus.cumsum(-1) - nucleus
    kept = kept[before < top_p]
    return torch.zeros_like(p).index_copy(0, kept, p[kept] / p[kept].sum())


@pytest.mark.parametrize("decoding", BLOCK_DECODINGS)
@pytest.mark.parametrize("sampling", SAMPLING)
def test_each_row_is_sampled_from_its_own_distribution(sampling, decoding):
    num_samples = 1500
    logits = torch.randn(3, 1, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 1.5
    logits[:, :, [EOS, MASK]] = -torch.inf
    model = ScriptedModel(logits.expand(-1, num_samples + 2, -1))
    once = {  # one forward decodes everything
        "d2f": {"confidence_threshold": 0.0},
        "vanilla": {"steps": 1},
        "fast_dllm": {"confidence_threshold": 0.0, "block_cache": "none"},
    }[decoding]
    torch.manual_seed(0)
    output = model.generate(
        torch.tensor([[1], [1], [1]]),
        max_new_tokens=num_samples,
        block_size=num_samples,
        decoding=decoding,
        do_sample=True,
        **once,
        **SAMPLING[sampling],
    )
    assert len(model.calls) == 1
    for row in range(3):
        observed = output[row, 1:].bincount(minlength=VOCAB_SIZE) / num_samples
        expected = sampled_distribution(logits[row, 0], **SAMPLING[sampling])
        assert (observed[expected == 0] == 0).all()
        assert 0.5 * (observed - expected).abs().sum() < 0.1
        if row:
            other = sampled_distribution(logits[row - 1, 0], **SAMPLING[sampling])
            assert 0.5 * (other - expected).abs().sum() > 0.3, "rows of one distribution test nothing"


def test_sampling_is_reproducible_by_the_global_seed():
    model = ScriptedModel(torch.zeros(40, VOCAB_SIZE))
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(
            model.generate(torch.tensor([[0]]), max_new_tokens=30, do_sample=True, confidence_threshold=0.0)
        )
    assert outputs[0].equal(outputs[1]) and not outputs[0].equal(outputs[2])


def test_the_confidence_is_the_probability_after_the_processors():
    logits = torch.zeros(9, VOCAB_SIZE)
    logits[:, 4] = 3.0  # probability 0.34, and 1 once top_k = 1 has removed the others
    options = {"max_new_tokens": 8, "block_size": 8, "confidence_threshold": 0.9, "return_dict_in_generate": True}
    for sampling, num_forward_passes in (({}, 8), ({"do_sample": True, "top_k": 1}, 1)):
        output = ScriptedModel(logits).generate(torch.tensor([[0]]), **options, **sampling)
        assert output.sequences.tolist() == [[0] + [4] * 8]
        assert output.num_forward_passes.item() == num_forward_passes


class StopAfter(StoppingCriteria):
    def __init__(self, length):
        self.length, self.seen = length, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids[0].tolist())
        return torch.tensor([input_ids.shape[1] >= self.length])


def test_a_stopping_criterion_is_asked_about_each_token_of_the_gapless_prefix():
    criterion = StopAfter(5)
    model = ScriptedModel(sure_of([0, 1, 2, 3, 4, 5, 6, 7, 8], {2: 9}))
    output = model.generate(
        torch.tensor([[0]]),
        max_new_tokens=8,
        block_size=4,
        stopping_criteria=StoppingCriteriaList([criterion]),
        return_dict_in_generate=True,
    )
    assert criterion.seen == [[0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert output.sequences.tolist() == [[0, 1, 2, 3, 4]]
    assert output.num_forward_passes.item() == 2
    assert output.tokens_per_forward.item() == 2.0


@pytest.mark.parametrize("decoding", BLOCK_DECODINGS)
def test_stop_strings_end_a_row_where_the_prefix_first_holds_them(decoding):
    tokenizer = letter_tokenizer()
    texts = ["a start. the end. more of it", "a start no full stop at all!"]
    script = torch.stack([sure_of([max(LETTERS.find(c), 0) for c in text])(0) for text in texts])
    output = ScriptedModel(script).generate(
        torch.tensor([[0], [0]]),
        max_new_tokens=28,
        block_size=14,
        stop_strings=["the end."],
        tokenizer=tokenizer,
        decoding=decoding,
    )
    assert tokenizer.decode(output[0], skip_special_tokens=True) == "a start. the end."
    assert set(output[0, 17:].tolist()) == {PAD}
    assert PAD not in output[1]


# ---- streaming ----

TEXT = "the quick brown fox. it jumps over"


def streamed_model() -> ScriptedModel:
    """Says TEXT, some words late, then EOS."""
    late = dict.fromkeys(range(8, 14), 2) | {20: 5, 26: 99}
    return ScriptedModel(
        sure_of([0] * 3 + [LETTERS.index(c) for c in TEXT] + [EOS] * 40, {k + 3: v for k, v in late.items()})
    )


class RecordingStreamer(TextDiffusionStreamer):
    def __init__(self):
        self.events = []

    def put(self, value):
        self.events.append(("put", value.tolist()))

    def put_draft(self, value, **kwargs):
        self.events.append(("draft", value.tolist()))

    def end(self):
        self.events.append(("end", None))


@pytest.mark.parametrize("decoding", BLOCK_DECODINGS)
def test_a_streamer_gets_the_prompt_then_exactly_the_gapless_prefix_as_it_grows(decoding):
    streamer = RecordingStreamer()
    output = streamed_model().generate(
        torch.tensor([[0] * 3]), max_new_tokens=48, block_size=8, streamer=streamer, decoding=decoding
    )
    assert streamer.events[0] == ("put", [[0] * 3])
    assert streamer.events[-1] == ("end", None)
    puts = [value for kind, value in streamer.events[1:] if kind == "put"]
    drafts = [value for kind, value in streamer.events[1:] if kind == "draft"]
    assert all(puts) and len(puts) > 3
    assert sum(puts, []) == output[0, 3:].tolist() == [LETTERS.index(c) for c in TEXT] + [EOS]
    assert len(drafts) >= 3
    assert all(draft[0] == MASK for draft in drafts), "a decoded token there would not be a draft"
    assert not any(EOS in draft[:-1] for draft in drafts), "nothing behind a decoded EOS is shown"


class TracingStreamer(RecordingStreamer):
    def put_trace(self, value):
        self.events.append(("trace", value))


@pytest.mark.parametrize("options", [{}, {"remask_threshold": 0.01}], ids=str)
def test_a_streamer_gets_the_trace_of_each_forward_behind_what_that_made_known(options):
    streamer, model = TracingStreamer(), streamed_model()
    options = {"max_new_tokens": 48, "block_size": 8, **options}
    output = model.generate(torch.tensor([[0] * 3]), streamer=streamer, **options, **FULL)
    told = [value for kind, value in streamer.events if kind == "trace"]
    assert [{k: v for k, v in step.items() if k != "confidence"} for step in told] == output.trace[0]
    known, decoded = [], set()
    for kind, value in streamer.events[1:]:
        if kind == "put":
            known += value
        elif kind == "trace":
            decoded |= {position for position, _ in value["accepted"]}
            gapless = next(k for k in range(len(TEXT) + 2) if k + 3 not in decoded or k > len(TEXT))
            whole = gapless == len(TEXT) + 1 or "remask_threshold" not in options
            assert len(known) == (gapless if whole else gapless // 8 * 8)
    assert len(known) == len(TEXT) + 1


def test_a_streamer_gets_the_probability_of_each_accepted_token():
    """By hand: one logit among zeros."""
    streamer = TracingStreamer()
    streamed_model().generate(torch.tensor([[0] * 3]), max_new_tokens=48, block_size=8, streamer=streamer, **FULL)
    by_hand = [math.exp(logit) / (math.exp(logit) + VOCAB_SIZE - 1) for logit in (1.0, 15.0)]
    told = [value for kind, value in streamer.events if kind == "trace"]
    assert all(len(step["confidence"]) == len(step["accepted"]) for step in told)
    confidences = [confidence for step in told for confidence in step["confidence"]]
    nearest = [min(by_hand, key=lambda p, own=own: abs(p - own)) for own in confidences]
    assert confidences == pytest.approx(nearest, abs=1e-6) and set(nearest) == set(by_hand)


def test_text_streamers_print_the_response(capsys):
    tokenizer = letter_tokenizer()
    prompt = torch.tensor([[0] * 3])
    for streamer_class in (TextStreamer, TextDiffusionStreamer):
        streamer = streamer_class(tokenizer, skip_prompt=True, skip_special_tokens=True)
        streamed_model().generate(prompt, max_new_tokens=48, block_size=8, streamer=streamer)
        printed = capsys.readouterr().out
        if streamer_class is TextDiffusionStreamer:
            assert "\033[33m" in printed, "drafts are yellow"
            printed = "".join(part.split("\0337")[0] for part in printed.split("\0338\033[J"))
        assert printed.replace("\n", "") == TEXT


def test_a_text_iterator_streamer_gives_the_response_to_another_thread():
    streamer = TextIteratorStreamer(letter_tokenizer(), skip_prompt=True, skip_special_tokens=True, timeout=60)
    arguments = {"inputs": torch.tensor([[0] * 3]), "max_new_tokens": 48, "block_size": 8, "streamer": streamer}
    thread = threading.Thread(target=streamed_model().generate, kwargs=arguments)
    thread.start()
    pieces = [piece for piece in streamer if piece]
    thread.join()
    assert "".join(pieces) == TEXT and len(pieces) > 3


def test_streaming_a_batch_is_an_error():
    with pytest.raises(ValueError, match="`streamer`.*2|batch size 1"):
        random_model().generate(torch.tensor([[1], [2]]), streamer=TextStreamer(letter_tokenizer()))


# ---- around the loop ----


def test_a_model_without_a_mask_token_cannot_decode():
    with pytest.raises(ValueError, match="mask_token_id"):
        tiny_model(mask_token_id=None).generate(torch.tensor([[1]]), max_new_tokens=2)


@pytest.mark.parametrize("decoding", BLOCK_DECODINGS)
def test_scores_and_logits_are_those_that_each_token_was_chosen_from(decoding):
    model = random_model(seed=7)
    inputs = pad(random_prompts([3, 6], seed=2), "left")
    options = {"max_new_tokens": 9, "decoding": decoding, "repetition_penalty": 1.3, "return_dict_in_generate": True}
    output = model.generate(**inputs, **options, output_scores=True, output_logits=True)
    plain = model.generate(**inputs, **options)
    assert output.sequences.equal(plain.sequences) and plain.scores is None and plain.logits is None
    length = output.sequences.shape[1] - 6
    assert len(output.scores) == len(output.logits) == length
    assert {values.shape for values in output.scores + output.logits} == {(2, VOCAB_SIZE)}
    scores, logits = torch.stack(output.scores, 1), torch.stack(output.logits, 1)  # [B, R, V]
    for row, tokens in enumerate(output.sequences[:, 6:].tolist()):
        end = tokens.index(EOS) + 1 if EOS in tokens else length
        assert scores[row, :end].argmax(-1).tolist() == tokens[:end]
        assert (scores[row, :end, MASK] == -torch.inf).all() and logits[row, :end, MASK].isfinite().all()
        assert not scores[row, :end].equal(logits[row, :end])
        assert not scores[row, end:].any() and not logits[row, end:].any()
    transition = model.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
    assert transition.shape == (2, length) and (transition <= 0).all()


@pytest.mark.parametrize("decoding", BLOCK_DECODINGS)
def test_a_generator_decides_the_sample_whatever_the_global_seed(decoding):
    model = ScriptedModel(torch.zeros(9, VOCAB_SIZE))
    options = {"max_new_tokens": 8, "do_sample": True, "decoding": decoding}
    samples = []
    for global_seed, seed in ((0, 5), (1, 5), (0, 6)):
        torch.manual_seed(global_seed)
        generator = torch.Generator().manual_seed(seed)
        samples.append(model.generate(torch.tensor([[0]]), generator=generator, **options))
    assert samples[0].equal(samples[1]) and not samples[0].equal(samples[2])


def test_return_sequences_are_several_samples_of_each_prompt():
    model = ScriptedModel(torch.zeros(9, VOCAB_SIZE))
    torch.manual_seed(0)
    output = model.generate(
        **pad([[1], [2, 3]], "left"),
        max_new_tokens=6,
        do_sample=True,
        num_return_sequences=3,
        return_dict_in_generate=True,
    )
    assert output.sequences.shape[0] == 6 and output.num_forward_passes.shape == (6,)
    assert output.sequences[:, 1].tolist() == [1] * 3 + [3] * 3
    assert not output.sequences[0].equal(output.sequences[1])


def test_generate_leaves_nothing_on_the_model():
    model = random_model(seed=3)
    before = (set(vars(model)), set(vars(model.model)), model.config.to_dict(), model.generation_config.to_dict())
    buffers = {name: id(buffer) for name, buffer in model.named_buffers()}
    first = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=9)
    model.generate(torch.tensor([[4]]), max_new_tokens=5, decoding="vanilla", do_sample=True, temperature=2.0)
    model.generate(**pad([[4], [5, 6]], "left"), max_new_tokens=5, block_size=2, confidence_threshold=0.2)
    after = (set(vars(model)), set(vars(model.model)), model.config.to_dict(), model.generation_config.to_dict())
    assert after == before
    assert {name: id(buffer) for name, buffer in model.named_buffers()} == buffers
    assert model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=9).equal(first)


def test_two_threads_give_what_they_give_one_after_the_other():
    model = random_model(seed=4)
    jobs = [
        {"inputs": torch.tensor([prompt]), "max_new_tokens": 12, "block_size": size}
        for prompt, size in zip(random_prompts([3, 8]), (2, 6), strict=True)
    ]
    serial = [model.generate(**job) for job in jobs]
    results: list[list[torch.Tensor]] = [[], []]

    def work(index):
        for _ in range(4):
            results[index].append(model.generate(**jobs[index]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for expected, outputs in zip(serial, results, strict=True):
        assert len(outputs) == 4 and all(output.equal(expected) for output in outputs)


@pytest.mark.parametrize(
    "options",
    [
        {"output_trace": True},
        *({"decoding": "fast_dllm", "block_cache": name} for name in ("none", "prefix", "dual")),
        {"decoding": "vanilla"},
        {"decoding": "vanilla", "guidance_scale": 1.5},
    ],
    ids=str,
)
def test_a_process_that_has_finished_takes_part_in_the_forwards_of_the_others(options, monkeypatch):
    """Under ZeRO-3 every process must call forward until all have finished; what is decoded stays the same."""
    model, prompt = random_model(), torch.tensor([[1, 2, 3]])
    options = {"max_new_tokens": 6, "return_dict_in_generate": True, **options}
    alone = model.generate(prompt, **options)
    extra, calls = [3], []

    def peers_take_three_more(self, this_peer_finished, synced_gpus, device):
        extra[0] -= this_peer_finished
        return not this_peer_finished or extra[0] >= 0

    monkeypatch.setattr(type(model), "_has_unfinished_sequences", peers_take_three_more)
    handle = model.model.register_forward_pre_hook(lambda *_: calls.append(1))
    output = model.generate(prompt, synced_gpus=True, **options)
    handle.remove()
    per_step = 2 if "guidance_scale" in options else 1
    assert len(calls) == per_step * (alone.num_forward_passes.item() + 3)
    assert output.sequences.equal(alone.sequences) and output.trace == alone.trace
    assert output.num_forward_passes.equal(alone.num_forward_passes)


def test_calls_of_different_models_and_settings_between_two_equal_ones_change_nothing():
    first, second = random_model(seed=8), random_model(right_shift_logits=True, seed=9)
    jobs = [
        (model, {"inputs": torch.tensor([prompt]), "max_new_tokens": 10, "block_size": size})
        for model, prompt, size in zip((first, second, first), random_prompts([2, 5, 9]), (3, 4, 8), strict=True)
    ]
    fresh = [tiny_model(**KIND).generate(**job) for KIND, (_, job) in zip(
        ({"seed": 8}, {"right_shift_logits": True, "seed": 9}, {"seed": 8}), jobs, strict=True
    )]  # fmt: skip
    for _ in range(2):
        for expected, (model, job) in zip(fresh, jobs, strict=True):
            assert model.generate(**job).equal(expected)


def test_an_exception_in_a_streamer_leaves_the_model_as_it_was():
    class Broken(TextStreamer):
        def put(self, value):
            if value.dim() == 1:
                raise RuntimeError("the pipe is closed")

    model, options = random_model(seed=5), {"inputs": torch.tensor([[1, 2, 3]]), "max_new_tokens": 9}
    expected, before = model.generate(**options), set(vars(model))
    with pytest.raises(RuntimeError, match="pipe"):
        model.generate(**options, streamer=Broken(letter_tokenizer()))
    assert model.generate(**options).equal(expected) and set(vars(model)) == before


def test_an_async_text_iterator_streamer_gives_the_response_to_a_coroutine():
    async def collect() -> list[str]:
        streamer = AsyncTextIteratorStreamer(letter_tokenizer(), skip_prompt=True, skip_special_tokens=True)
        arguments = {"inputs": torch.tensor([[0] * 3]), "max_new_tokens": 48, "block_size": 8, "streamer": streamer}
        thread = threading.Thread(target=streamed_model().generate, kwargs=arguments)
        thread.start()
        pieces = [piece async for piece in streamer if piece]
        thread.join()
        return pieces

    pieces = asyncio.run(collect())
    assert "".join(pieces) == TEXT and len(pieces) > 3


def test_a_pipeline_takes_chat_messages():
    model, tokenizer = streamed_model(), letter_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    messages = [{"role": "user", "content": "aaa"}]
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    [result] = pipe(messages, max_new_tokens=48, block_size=8, do_sample=False)
    assert result["generated_text"] == [*messages, {"role": "assistant", "content": TEXT}]


def test_continuous_batching_is_refused():
    with pytest.raises(ValueError, match="Continuous batching"):
        random_model().init_continuous_batching()


def test_a_text_generation_pipeline_runs_it():
    model, tokenizer = streamed_model(), letter_tokenizer()
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    [result] = pipe("aaa", max_new_tokens=48, block_size=8, decoding="d2f", do_sample=False)
    assert result["generated_text"] == "aaa" + TEXT


def test_what_generate_returns_can_be_trained_on():
    """Decoding runs in inference mode, whose tensors autograd refuses; none of them leaves it."""
    model = random_model()
    options = {"max_new_tokens": 5, "output_scores": True, "output_logits": True, **FULL}
    output = model.generate(torch.tensor([[1, 2, 3]]), **options)
    tensors = [output.sequences, output.num_forward_passes, output.tokens_per_forward, *output.scores, *output.logits]
    assert not any(tensor.is_inference() for tensor in tensors)
    assert not any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers()))
    [response] = dict(model.generate_stream_batch([torch.tensor([1, 2, 3])], 1, 3, max_new_tokens=5)).values()
    assert not response.is_inference()
    loss = model(output.sequences, prompt_lengths=torch.tensor([3]), labels=output.sequences).loss
    (loss * output.scores[0].exp().sum() * output.tokens_per_forward[0]).backward()
    assert model.get_input_embeddings().weight.grad.abs().sum() > 0


def test_what_others_keep_of_decoding_can_be_trained_on():
    """Decoding is in inference mode only where nobody else gets its tensors."""
    model, prompt = random_model(), torch.tensor([[1, 2, 3]])
    seen = []

    class GuidedByGradients(LogitsProcessor):
        def __call__(self, input_ids, scores):
            with torch.enable_grad():
                scores = scores.clone().requires_grad_()
                [gradient] = torch.autograd.grad(scores.logsumexp(-1).sum(), scores)
            seen.append(gradient)
            return scores.detach() - gradient

    model.generate(prompt, max_new_tokens=4, logits_processor=LogitsProcessorList([GuidedByGradients()]))
    handle = model.get_output_embeddings().register_forward_hook(lambda _, inputs, output: seen.append(output))
    model.generate(prompt, max_new_tokens=4)
    list(model.generate_stream_batch([prompt[0]], 1, 3, max_new_tokens=4))
    handle.remove()
    assert len(seen) > 4 and not any(tensor.is_inference() for tensor in seen)
    dynamic = tiny_model(
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}, max_position_embeddings=8
    )
    dynamic.generate(torch.tensor([[1, 2]]), max_new_tokens=30, eos_token_id=None)
    assert not any(tensor.is_inference() for tensor in dynamic.buffers())

"""`generate()`: pipelined and vanilla decoding, its options, and what it leaves to transformers."""

import json
import threading
from functools import cache

import pytest
import torch
from d2f_hf.modeling.generation_d2f import accepted_tokens, choose_tokens
from peft import PeftModel
from safetensors.torch import load_file
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TextDiffusionStreamer,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)

from d2f_hf import D2FGenerationConfig, D2FGenerationOutput, D2FLLaDAForBlockDiffusion
from golden_data import GOLDEN, TOKEN_RANKINGS, ExpectedRun, GoldenRun, expected_until_eos, load_runs
from reference_decoding import ReferenceResult, reference_decode
from tiny_models import (
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
golden_runs = load_runs("decode_llada.json")
whole_runs = [run for run in golden_runs if run.whole_blocks_max_new_tokens > 0]
partial_runs = [run for run in golden_runs if run.whole_blocks_max_new_tokens < run.max_new_tokens]


@cache
def golden_model() -> D2FLLaDAForBlockDiffusion:
    return D2FLLaDAForBlockDiffusion.from_pretrained(GOLDEN / "llada_tiny").eval()


@cache
def golden_model_with_adapter() -> PeftModel:
    model = D2FLLaDAForBlockDiffusion.from_pretrained(GOLDEN / "llada_tiny")
    return PeftModel.from_pretrained(model, GOLDEN / "llada_adapter").eval()


@cache
def random_model(**options) -> D2FLLaDAForBlockDiffusion:
    return tiny_model(**options)


def pad(prompts, side: str, pad_token: int = PAD) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` of prompts of different lengths."""
    width = max(map(len, prompts))
    ids, mask = [], []
    for prompt in prompts:
        missing = width - len(prompt)
        fill, ones, zeros = [pad_token] * missing, [1] * len(prompt), [0] * missing
        ids.append(fill + list(prompt) if side == "left" else list(prompt) + fill)
        mask.append(zeros + ones if side == "left" else ones + zeros)
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def random_prompts(lengths, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, PAD, (length,), generator=generator).tolist() for length in lengths]


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
    output = golden_model().generate(
        torch.tensor([run.prompt_ids]), max_new_tokens=run.whole_blocks_max_new_tokens, **run.decoding, **FULL
    )
    assert_row_equals(output, 0, len(run.prompt_ids), expected_until_eos(run), run.eos_token_id)


@pytest.mark.parametrize("run", partial_runs, ids=str)
def test_an_exact_length_continues_what_the_reference_rounds_down(run: GoldenRun):
    output = golden_model().generate(
        torch.tensor([run.prompt_ids]), max_new_tokens=run.max_new_tokens, **run.decoding, **FULL
    )
    tokens, expected = output.sequences[0, len(run.prompt_ids) :].tolist(), expected_until_eos(run)
    assert tokens[: len(expected.tokens)] == expected.tokens
    assert len(tokens) == (tokens.index(run.eos_token_id) + 1 if run.eos_token_id in tokens else run.max_new_tokens)


@pytest.mark.parametrize("run", load_runs("decode_adapter_llada.json"), ids=str)
def test_d2f_reproduces_the_reference_through_its_adapter(run: GoldenRun):
    output = golden_model_with_adapter().generate(
        input_ids=torch.tensor([run.prompt_ids]), max_new_tokens=run.max_new_tokens, **run.decoding, **FULL
    )
    assert_row_equals(output, 0, len(run.prompt_ids), expected_until_eos(run), run.eos_token_id)


settings = sorted({run.setting for run in whole_runs})


@pytest.mark.parametrize(
    ("setting", "side"), [(s, "left") for s in settings] + [("bs8_paper", "right"), ("bs16_lowconf", "right")]
)
def test_a_batch_of_unequal_prompts_reproduces_every_row_of_the_reference(setting, side):
    runs = [run for run in whole_runs if run.setting == setting]
    inputs = pad([run.prompt_ids for run in runs], side, pad_token=runs[0].eos_token_id)
    output = golden_model().generate(
        **inputs, max_new_tokens=runs[0].whole_blocks_max_new_tokens, **runs[0].decoding, **FULL
    )
    for row, run in enumerate(runs):
        assert_row_equals(output, row, inputs["input_ids"].shape[1], expected_until_eos(run), run.eos_token_id)


def test_the_golden_runs_are_all_there():
    """If the data were thinned out, the tests above would pass without testing much."""
    assert (len(whole_runs), len(partial_runs), len(load_runs("decode_adapter_llada.json"))) == (88, 12, 8)


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


sample_cases = json.loads((GOLDEN / "sample_tokens.json").read_text())


@pytest.mark.parametrize("strategy", ["default", "neg_entropy", "margin_confidence"])
def test_tokens_probabilities_and_ranks_are_those_of_the_reference(strategy):
    golden = load_file(GOLDEN / "sample_tokens.safetensors")
    tokens, probability, ranking = choose_tokens(
        golden["logits"], do_sample=False, token_ranking=TOKEN_RANKINGS[strategy]
    )
    assert tokens.equal(golden[f"{strategy}.x0"])
    torch.testing.assert_close(probability, golden[f"{strategy}.initial_confidence"])
    torch.testing.assert_close(ranking, golden[f"{strategy}.confidence"])


@pytest.mark.parametrize("case", sample_cases["selection_rule"], ids=lambda case: case["name"])
def test_accepted_tokens_are_those_of_the_reference(case):
    accepted = accepted_tokens(
        is_masked=torch.ones(1, 1, len(case["max_prob"]), dtype=torch.bool),
        probability=torch.tensor([[case["max_prob"]]]),
        ranking=torch.tensor([[case["strategy_conf"]]]),
        is_fully_activated=torch.tensor([[case["is_complete"]]]),
        confidence_threshold=case["tau_conf"],
    )
    assert accepted[0, 0].nonzero().flatten().tolist() == sorted(case["selected"])


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
    expected = reference_decode(
        plain_logits(model),
        prompt,
        **options,
        mask_token_id=MASK,
        eos_token_ids=EOS,
        right_shift_logits=model.config.right_shift_logits,
    )
    assert_row_equals(model.generate(torch.tensor([prompt]), **options, **FULL), 0, prompt_length, expected, PAD)


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
@pytest.mark.parametrize("decoding", ["d2f", "vanilla"])
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


@pytest.mark.parametrize("decoding", ["d2f", "vanilla"])
def test_the_mask_token_is_never_sampled(decoding):
    logits = torch.zeros(9, VOCAB_SIZE)
    logits[:, MASK], logits[:, 4] = 20.0, 10.0
    output = ScriptedModel(logits).generate(torch.tensor([[0]]), max_new_tokens=8, decoding=decoding)
    assert output.tolist() == [[0] + [4] * 8]
    sampled = ScriptedModel(logits).generate(
        torch.tensor([[0]]), max_new_tokens=8, decoding=decoding, do_sample=True, temperature=5.0
    )
    assert MASK not in sampled


@pytest.mark.parametrize("decoding", ["d2f", "vanilla"])
def test_an_empty_prompt_is_an_error_that_names_the_way_out(decoding):
    model = random_model()
    with pytest.raises(ValueError, match="BOS"):
        model.generate(
            **{"input_ids": torch.tensor([[1], [2]]), "attention_mask": torch.tensor([[1], [0]])}, decoding=decoding
        )
    with pytest.raises(ValueError, match="bos_token_id|BOS|at least one"):
        model.generate(torch.zeros(1, 0, dtype=torch.long), decoding=decoding)


def test_a_mask_token_in_the_prompt_is_an_error():
    """The reference never decodes it and leaves through a side exit."""
    with pytest.raises(ValueError, match="`input_ids`.*mask token"):
        random_model().generate(torch.tensor([[1, MASK, 2]]))


@pytest.mark.parametrize("decoding", ["d2f", "vanilla"])
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


@pytest.mark.parametrize("decoding", ["d2f", "vanilla"])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_each_row_is_sampled_from_its_own_distribution(sampling, decoding):
    num_samples = 1500
    logits = torch.randn(3, 1, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 1.5
    logits[:, :, [EOS, MASK]] = -torch.inf
    model = ScriptedModel(logits.expand(-1, num_samples + 2, -1))
    once = {"confidence_threshold": 0.0} if decoding == "d2f" else {"steps": 1}  # one forward decodes everything
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


class Recorder(LogitsProcessor):
    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        assert len(input_ids) == len(scores)
        self.seen.append(input_ids.tolist())
        return scores


def test_a_processor_sees_the_gapless_prefix_of_the_row_once_per_masked_token():
    """Position 2 is decoded late: what is decoded behind it is not shown before."""
    recorder = Recorder()
    model = ScriptedModel(sure_of([0, 1, 2, 3, 4], {2: 9}))
    model.generate(torch.tensor([[0]]), max_new_tokens=4, block_size=4, logits_processor=[recorder])
    assert recorder.seen == [[[0]] * 4, [[0, 1]]]


def test_a_processor_sees_rows_of_a_batch_at_the_length_of_the_batch():
    """Stock processors count from the padded length; the mask token is a filler that means nothing to them."""
    recorder = Recorder()
    model = ScriptedModel(sure_of([0, 1, 2, 3, 4, 5, 6]))
    model.generate(
        **pad([[0], [0, 1, 2]], "right"),
        max_new_tokens=2,
        block_size=2,
        logits_processor=LogitsProcessorList([recorder]),
    )
    assert recorder.seen == [[[MASK, MASK, 0]] * 2, [[0, 1, 2]] * 2]


@pytest.mark.parametrize("decoding", ["d2f", "vanilla"])
def test_the_repetition_penalty_equals_the_hand_computation(decoding):
    """Penalty 2 halves the logits 4, 3, 2.5 of seen tokens: 2, 3, 2.5, then 2, 1.5, 2.5, then 2, 1.5, 1.25."""
    logits = torch.zeros(9, VOCAB_SIZE)
    logits[:, [1, 2, 3]] = torch.tensor([4.0, 3.0, 2.5])
    options = {"max_new_tokens": 4, "repetition_penalty": 2.0, "decoding": decoding}
    one_by_one = ScriptedModel(logits).generate(torch.tensor([[1]]), block_size=1, **options)
    assert one_by_one.tolist() == [[1, 2, 3, 1, 1]]
    at_once = {"confidence_threshold": 0.0} if decoding == "d2f" else {"steps": 1}
    together = ScriptedModel(logits).generate(torch.tensor([[1]]), block_size=4, **at_once, **options)
    assert together.tolist() == [[1, 2, 2, 2, 2]], "all from the prefix before this forward"


def test_the_repetition_penalty_of_a_padded_row_does_not_count_its_padding():
    logits = torch.zeros(9, VOCAB_SIZE)
    logits[:, [PAD, 2]] = torch.tensor([4.0, 3.0])
    output = ScriptedModel(logits).generate(**pad([[1], [1, 5]], "left"), max_new_tokens=1, repetition_penalty=2.0)
    assert output[:, -1].tolist() == [PAD, PAD]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("option", ["min_new_tokens", "min_length"])
def test_min_new_tokens_forbids_the_eos_before_that_place_only(side, option):
    """A model that says EOS everywhere, next best token 3: the first four places must be something else."""
    logits = torch.zeros(9, VOCAB_SIZE)
    logits[:, [EOS, 3]] = torch.tensor([25.0, 15.0])
    for prompts in ([[1]], [[1], [1, 2, 5]]):
        width = max(map(len, prompts))
        minimum = {option: 4 if option == "min_new_tokens" else width + 4}
        model = ScriptedModel(logits)
        output = model.generate(**pad(prompts, side), max_new_tokens=6, block_size=3, **minimum)
        assert output[:, width:].tolist() == [[3, 3, 3, 3, EOS]] * len(prompts)
        assert len(model.calls) == 2, "the place of a token decides, not how much is decoded before it"


def test_other_length_processors_count_alike_in_rows_of_all_lengths():
    logits = torch.zeros(9, VOCAB_SIZE)
    logits[:, 3] = 15.0
    options = {"max_new_tokens": 4, "block_size": 1, "forced_eos_token_id": EOS}
    for prompts in ([[1]], [[1], [1, 2, 5]]):
        output = ScriptedModel(logits).generate(**pad(prompts, "left"), **options)
        assert output[:, max(map(len, prompts)) :].tolist() == [[3, 3, 3, EOS]] * len(prompts)


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


@pytest.mark.parametrize("decoding", ["d2f", "vanilla"])
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


@pytest.mark.parametrize("decoding", ["d2f", "vanilla"])
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


# ---- the generation config ----

KNOBS = {
    "decoding": "vanilla",
    "block_size": 3,
    "block_add_threshold": 0.5,
    "block_activation_threshold": 0.4,
    "confidence_threshold": 0.3,
    "token_ranking": "margin",
    "output_trace": True,
}


def test_generate_without_arguments_does_d2f_with_the_papers_values():
    config = random_model().generation_config
    assert type(config) is D2FGenerationConfig
    assert (config.decoding, config.token_ranking) == ("d2f", "probability")
    thresholds = (config.block_add_threshold, config.block_activation_threshold, config.confidence_threshold)
    assert thresholds == (0.1, 0.95, 0.9)
    output = random_model().generate(torch.tensor([[1, 2]]), max_new_tokens=8, return_dict_in_generate=True)
    explicit = random_model().generate(
        torch.tensor([[1, 2]]), max_new_tokens=8, decoding="d2f", block_size=4, confidence_threshold=0.9
    )
    assert isinstance(output, D2FGenerationOutput) and output.trace is None
    assert output.sequences.equal(explicit)


def test_a_saved_generation_config_comes_back_with_class_and_values(tmp_path):
    model = tiny_model()
    for name, value in KNOBS.items():
        setattr(model.generation_config, name, value)
    model.generation_config.steps = 6
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    assert {name: saved[name] for name in KNOBS} == KNOBS and saved["steps"] == 6
    reloaded = D2FLLaDAForBlockDiffusion.from_pretrained(tmp_path).generation_config
    assert type(reloaded) is D2FGenerationConfig
    assert {name: getattr(reloaded, name) for name in KNOBS} == KNOBS and reloaded.steps == 6
    assert D2FGenerationConfig.from_pretrained(tmp_path).to_dict() == reloaded.to_dict()


def test_a_saved_generation_config_says_d2f_and_no_nulls(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    assert saved["decoding"] == "d2f"
    assert None not in saved.values()
    assert "block_size" not in saved, "it follows the model's block_size"


@pytest.mark.parametrize("way", ["keyword", "plain config", "own config", "model's config"])
def test_every_knob_reaches_the_loop_in_every_way(way, monkeypatch):
    seen = {}

    def record(self, input_ids, generation_config, **kwargs):
        seen.update({name: getattr(generation_config, name) for name in KNOBS})

    monkeypatch.setattr(ScriptedModel, "_sample", record)
    model = ScriptedModel(torch.zeros(5, VOCAB_SIZE))
    arguments = {"max_new_tokens": 4, "pad_token_id": PAD, "eos_token_id": EOS, **KNOBS}
    if way == "keyword":
        model.generate(torch.tensor([[0]]), **arguments)
    elif way == "model's config":
        model.generation_config.update(**arguments)
        model.generate(torch.tensor([[0]]))
    else:
        config_class = GenerationConfig if way == "plain config" else D2FGenerationConfig
        model.generate(torch.tensor([[0]]), generation_config=config_class(**arguments))
    assert seen == KNOBS


BAD_VALUES = [
    ("decoding", "autoregressive"),
    ("token_ranking", "entropy"),
    ("block_size", 0),
    ("block_size", 2.5),
    ("block_size", True),
    ("steps", 0),
    ("block_add_threshold", 1.1),
    ("block_add_threshold", -0.1),
    ("block_activation_threshold", 2),
    ("confidence_threshold", float("nan")),
    ("confidence_threshold", "0.9"),
    ("output_trace", "yes"),
]


@pytest.mark.parametrize(("name", "value"), BAD_VALUES)
def test_a_bad_value_is_an_error_that_names_the_parameter(name, value):
    with pytest.raises(ValueError, match=f"`{name}`"):
        D2FGenerationConfig(**{name: value})
    with pytest.raises(ValueError, match=f"`{name}`"):
        random_model().generate(torch.tensor([[1]]), max_new_tokens=2, **{name: value})
    with pytest.raises(ValueError, match=f"`{name}`"):
        config = GenerationConfig(max_new_tokens=2, **{name: value})
        random_model().generate(torch.tensor([[1]]), generation_config=config)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"confidence_treshold": 0.5}, "confidence_treshold"),
        ({"num_beams": 2}, "BEAM_SEARCH"),
        ({"steps": 4}, "`steps`.*vanilla"),
        ({"max_new_tokens": 0}, "max_new_tokens|max_length"),
        ({"max_new_tokens": None, "max_length": 1}, "max_length"),
        ({"guidance_scale": 1.5}, "`guidance_scale`"),
        ({"prefix_allowed_tokens_fn": lambda *_: [1]}, "`prefix_allowed_tokens_fn`"),
        ({"output_scores": True, "return_dict_in_generate": True}, "`output_scores`"),
        ({"decoding": "vanilla", "steps": 5, "max_new_tokens": 8, "block_size": 4}, "`steps`"),
        ({"cache": object()}, "`cache`"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_arguments_that_make_no_sense_are_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        random_model().generate(torch.tensor([[1, 2]]), **{"max_new_tokens": 4, **arguments})


def test_a_model_without_a_mask_token_cannot_decode():
    with pytest.raises(ValueError, match="mask_token_id"):
        tiny_model(mask_token_id=None).generate(torch.tensor([[1]]), max_new_tokens=2)


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


def test_a_process_that_has_finished_keeps_its_peers_company(monkeypatch):
    """Under ZeRO-3 every process must call forward until all have finished; what is decoded stays the same."""
    model, prompt = random_model(), torch.tensor([[1, 2, 3]])
    alone = model.generate(prompt, max_new_tokens=6, **FULL)
    extra, calls = [3], []

    def peers_take_three_more(self, this_peer_finished, synced_gpus, device):
        extra[0] -= this_peer_finished
        return not this_peer_finished or extra[0] >= 0

    monkeypatch.setattr(type(model), "_has_unfinished_sequences", peers_take_three_more)
    handle = model.model.register_forward_pre_hook(lambda *_: calls.append(1))
    output = model.generate(prompt, max_new_tokens=6, synced_gpus=True, **FULL)
    handle.remove()
    assert len(calls) == alone.num_forward_passes.item() + 3
    assert output.sequences.equal(alone.sequences) and output.trace == alone.trace
    assert output.num_forward_passes.equal(alone.num_forward_passes)


def test_a_text_generation_pipeline_runs_it():
    model, tokenizer = streamed_model(), letter_tokenizer()
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    [result] = pipe("aaa", max_new_tokens=48, block_size=8, decoding="d2f", do_sample=False)
    assert result["generated_text"] == "aaa" + TEXT


# ---- vanilla decoding ----

vanilla_data = json.loads((GOLDEN / "vanilla_llada.json").read_text())
vanilla_results = [r for r in vanilla_data["results"] if "cfg_scale" not in vanilla_data["settings"][r["setting"]]]


@pytest.mark.parametrize("result", vanilla_results, ids=lambda r: f"{r['setting']}-{r['prompt']}")
def test_vanilla_decoding_reproduces_the_original_sampler(result):
    setting = vanilla_data["settings"][result["setting"]]
    prompt = vanilla_data["prompts"][result["prompt"]]
    output = golden_model().generate(
        torch.tensor([prompt]),
        decoding="vanilla",
        steps=setting["steps"],
        max_new_tokens=setting["gen_length"],
        block_size=setting["block_length"],
        return_dict_in_generate=True,
    )
    eos = golden_model().config.eos_token_id
    expected = result["tokens"]
    if eos in expected:
        expected = expected[: expected.index(eos) + 1]
    assert output.sequences[0, len(prompt) :].tolist() == expected
    assert output.num_forward_passes.item() == result["forwards"]


def vanilla_oracle(logits_fn, prompt, limit, block_size, steps_per_block, right_shift_logits):
    """LLaDA's sampler, one row, literally: each step accepts the most probable tokens of the current block."""
    ids = list(prompt) + [MASK] * limit
    for start in range(len(prompt), len(ids), block_size):
        block = range(start, min(start + block_size, len(ids)))
        for step in range(steps_per_block):
            p = logits_fn(ids)
            p[:, MASK] = -torch.inf
            p = p.softmax(-1)
            masked = [i for i in block if ids[i] == MASK]
            count = len(block) // steps_per_block + (step < len(block) % steps_per_block)
            rows = {i: p[i - 1 if right_shift_logits else i] for i in masked}
            for i in sorted(masked, key=lambda i: -float(rows[i].max()))[:count]:
                ids[i] = int(rows[i].argmax())
    tokens = ids[len(prompt) :]
    return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens


@pytest.mark.parametrize("kind", ["plain", "shifted"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_vanilla_batches_equal_the_oracle_row_by_row(kind, side):
    model = random_model(**KINDS[kind])
    prompts = random_prompts([1, 6, 3], seed=8)
    output = model.generate(
        **pad(prompts, side), decoding="vanilla", max_new_tokens=8, block_size=4, steps=6, return_dict_in_generate=True
    )
    assert output.num_forward_passes.tolist() == [6] * 3
    for row, prompt in enumerate(prompts):
        expected = vanilla_oracle(plain_logits(model), prompt, 8, 4, 3, kind == "shifted")
        assert output.sequences[row, 6 : 6 + len(expected)].tolist() == expected


def test_vanilla_steps_beyond_one_per_token_decode_nothing_more():
    model = ScriptedModel(sure_of([0, 1, 2, 3, 4]))
    output = model.generate(
        torch.tensor([[0]]), decoding="vanilla", steps=8, max_new_tokens=4, block_size=2, return_dict_in_generate=True
    )
    assert output.sequences.tolist() == [[0, 1, 2, 3, 4]]
    assert output.num_forward_passes.item() == 8


def test_vanilla_decoding_without_steps_takes_one_per_token_also_in_a_short_last_block():
    output = ScriptedModel(sure_of(range(8))).generate(
        torch.tensor([[0]]), decoding="vanilla", max_new_tokens=7, block_size=4, return_dict_in_generate=True
    )
    assert output.sequences.tolist() == [list(range(8))]
    assert output.num_forward_passes.item() == 7

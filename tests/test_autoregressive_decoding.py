"""Autoregressive decoding by our own loop gives the tokens of transformers' `generate` with the stock class."""

# B batch, P prompt tokens

import random

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CompileConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

import reference_models
from causal_models import FAMILIES, MASK, VOCAB_SIZE, models, prompts
from d2f_hf import (
    D2FGenerationConfig,
    load_d2f_model,
)
from tiny_models import letter_tokenizer, tiny_model
from word_problems import make_problems

all_families = pytest.mark.parametrize("family", FAMILIES)


def assert_same_tokens(stock, own, inputs: dict, **options) -> torch.Tensor:
    # transformers before 5.20 counts padding as text, which some processors then weigh.
    not_text = [MASK, VOCAB_SIZE - 2]
    options = {"do_sample": False, "max_new_tokens": 24, "suppress_tokens": not_text, **options}
    torch.manual_seed(3)
    expected = stock.generate(**inputs, **options)
    torch.manual_seed(3)
    found = own.generate(**inputs, decoding="autoregressive", **options)
    assert found.tolist() == expected.tolist()
    return found


class PreferTwiceTheLast(LogitsProcessor):
    """A processor of the user's own that needs the token right before."""

    def __call__(self, input_ids, scores):
        return scores.scatter_add(1, input_ids[:, -1:] * 2 % VOCAB_SIZE, torch.full_like(scores[:, :1], 2.0))


OPTIONS = {
    "greedy": {},
    "one token": {"max_new_tokens": 1},
    "repetition": {"repetition_penalty": 1.7},
    "n-grams": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[5], [7, 9], [11, 12, 13]]},
    "sequence bias": {"sequence_bias": {(8,): 3.0, (8, 9): 4.0}},
    "minimum": {"min_new_tokens": 9, "eos_token_id": list(range(20, 60))},
    "several EOS": {"eos_token_id": list(range(30, 45))},
    "forced end": {"forced_eos_token_id": 6},
    "own processor": {"logits_processor": LogitsProcessorList([PreferTwiceTheLast()])},
    "prefix": {"prefix_allowed_tokens_fn": lambda b, ids: [(int(ids[-1]) * 3 + b + k) % 70 + 1 for k in range(4)]},
    "suppressed at first": {"begin_suppress_tokens": list(range(1, 40))},
    "minimum with the prompt": {"min_length": 14, "eos_token_id": list(range(20, 60))},
    "limit with the prompt": {"max_new_tokens": None, "max_length": 20},
    "decaying length": {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": [30]},
    "forced start": {"forced_bos_token_id": 7},
    "several forced ends": {"forced_eos_token_id": [6, 7]},
    "normalised": {"renormalize_logits": True, "repetition_penalty": 1.2, "remove_invalid_values": True},
    "no EOS": {"eos_token_id": None},
    "static cache": {"cache_implementation": "static"},
}


@all_families
@pytest.mark.parametrize("name", OPTIONS)
def test_ragged_batches_give_the_tokens_of_the_stock_class(family, name):
    stock, own = models(family)
    assert_same_tokens(stock, own, prompts([3, 9, 1, 6]), **OPTIONS[name])


@all_families
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.1},
        {"typical_p": 0.7},
        {"top_h": 0.5},
        {"epsilon_cutoff": 0.01},
        {"eta_cutoff": 0.01},
        {"top_k": 3, "top_p": 0.8},
    ],
    ids=str,
)
def test_sampling_with_the_same_seed_draws_what_the_stock_class_draws(family, sampling):
    stock, own = models(family)
    options = {"top_k": 0, **sampling, "do_sample": True}
    assert_same_tokens(stock, own, prompts([7, 4]), **options, eos_token_id=None)
    assert_same_tokens(stock, own, prompts([5]), **options, eos_token_id=list(range(20, 30)))
    assert_same_tokens(stock, own, prompts([5]), **options, eos_token_id=None, num_return_sequences=3)


@pytest.mark.parametrize("sampling", [{"top_k": 0}, {"top_k": 4, "temperature": 0.7}], ids=str)
def test_rows_that_outlive_others_are_sampled_from_the_distribution_of_the_stock_class(sampling):
    """A row that has ended draws nothing more, so from then on the draws are others than those of transformers."""
    stock, own = models()
    inputs, num_samples = prompts([3]), 4000
    ends = list(range(40, VOCAB_SIZE))  # the first token is one of them in some rows
    options = {"do_sample": True, "eos_token_id": ends, "suppress_tokens": [MASK], **sampling}

    def next_scores(ids):
        output = stock.generate(ids, max_new_tokens=1, output_scores=True, return_dict_in_generate=True, **options)
        return output.scores[0]

    logits = next_scores(inputs["input_ids"])
    first = int(logits[0, :40].argmax())
    second = next_scores(torch.cat([inputs["input_ids"], torch.tensor([[first]])], dim=1))
    torch.manual_seed(0)
    found = own.generate(
        **inputs, decoding="autoregressive", max_new_tokens=2, num_return_sequences=num_samples, **options
    )[:, 3:]
    drawn = {"first": (logits, found[:, 0]), "second": (second, found[found[:, 0] == first, 1])}
    assert len(drawn["second"][1]) > 100 and torch.isin(found[:, 0], torch.tensor(ends)).sum() > 100
    for scores, tokens in drawn.values():
        p = scores[0].softmax(-1)
        error = (torch.bincount(tokens, minlength=VOCAB_SIZE) / len(tokens) - p).abs()
        assert (error <= 4.5 * (p * (1 - p) / len(tokens)).sqrt() + 1e-9).all()


@pytest.mark.parametrize("case", range(30))
def test_alone_batch_stream_uncached_and_stock_are_the_same(case):
    draw = random.Random(case)
    stock, own = models(draw.choice(list(FAMILIES)), seed=case)
    inputs = prompts([draw.randint(1, 12) for _ in range(draw.randint(1, 5))], seed=case)
    options = {
        "max_new_tokens": draw.randint(1, 20),
        "eos_token_id": draw.sample(range(1, VOCAB_SIZE - 2), draw.choice([1, 4, 10])),
        "pad_token_id": VOCAB_SIZE - 2,
        **draw.choice([{}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 3}]),
    }
    expected = assert_same_tokens(stock, own, inputs, **options)
    options |= {"decoding": "autoregressive", "suppress_tokens": [MASK, VOCAB_SIZE - 2]}
    assert own.generate(**inputs, use_cache=False, **options).tolist() == expected.tolist()
    width = inputs["input_ids"].shape[1]
    rows = [ids[mask.bool()] for ids, mask in zip(*inputs.values(), strict=True)]
    found = dict(own.generate_stream_batch(rows, draw.randint(1, 3), 12, **options))
    for b, row in enumerate(rows):
        alone = own.generate(row[None], **options)[0, len(row) :]
        assert found[b].equal(alone)
        assert expected[b, width : width + len(alone)].equal(alone)


def test_returned_sequences_share_the_prompt_and_differ():
    _, own = models()
    torch.manual_seed(0)
    output = own.generate(
        **prompts([5, 3]),
        decoding="autoregressive",
        do_sample=True,
        num_return_sequences=3,
        max_new_tokens=12,
        eos_token_id=None,
    )
    assert output.shape == (6, 17) and len({tuple(row[5:].tolist()) for row in output}) == 6


@all_families
def test_scores_and_logits_are_those_of_the_stock_class(family):
    stock, own = models(family, seed=2)
    inputs, ends = prompts([3, 9, 1, 6]), list(range(30, 40))
    options = {
        "max_new_tokens": 10,
        "suppress_tokens": [MASK, VOCAB_SIZE - 2],
        "repetition_penalty": 1.3,
        "eos_token_id": ends,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    expected = stock.generate(**inputs, do_sample=False, **options)
    found = own.generate(**inputs, decoding="autoregressive", **options)
    assert found.sequences.equal(expected.sequences)
    response = expected.sequences[:, inputs["input_ids"].shape[1] :]
    has_ended = torch.isin(response, torch.tensor(ends)).long().cumsum(-1)
    is_live = torch.nn.functional.pad(has_ended, (1, 0))[:, :-1] == 0  # what is behind an end differs
    assert not is_live.all()
    for name in ("scores", "logits"):
        ours, theirs = (torch.stack(output[name], dim=1)[is_live] for output in (found, expected))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


class RecordingStreamer(BaseStreamer):
    def __init__(self):
        self.heard = []

    def put(self, value):
        self.heard.append(value.flatten().tolist())

    def end(self):
        self.heard.append("end")


def test_a_streamer_hears_each_token_when_the_stock_class_would_tell_it():
    stock, own = models()
    options = {"max_new_tokens": 9, "suppress_tokens": [MASK, VOCAB_SIZE - 2], "eos_token_id": None}
    expected, found = RecordingStreamer(), RecordingStreamer()
    stock.generate(**prompts([4]), do_sample=False, streamer=expected, **options)
    own.generate(**prompts([4]), decoding="autoregressive", streamer=found, **options)
    assert found.heard == expected.heard and len(found.heard) == 11


def test_stop_strings_and_time_end_rows_as_in_the_stock_class():
    stock, own = models(seed=1)
    tokenizer = letter_tokenizer()
    others = list(range(29, VOCAB_SIZE))  # no letters
    # Without an EOS the stock class pads nothing, and goes on with rows that have ended.
    options = {"suppress_tokens": [MASK, *others], "eos_token_id": VOCAB_SIZE - 1, "pad_token_id": VOCAB_SIZE - 2}
    inputs = prompts([4, 2, 6])
    free = assert_same_tokens(stock, own, inputs, **options)
    stops = [tokenizer.decode(free[row, 6 + at : 8 + at]) for row, at in ((0, 3), (1, 7))]
    found = assert_same_tokens(stock, own, inputs, **options, stop_strings=stops, tokenizer=tokenizer)
    assert (found[:2] == VOCAB_SIZE - 2).any(-1).any(), "a row has ended before the others"
    assert assert_same_tokens(stock, own, inputs, **options, max_time=1e-9).shape[1] == 7


@all_families
def test_compiled_steps_give_the_same_tokens(family):
    _, own = models(family)
    options = {"decoding": "autoregressive", "max_new_tokens": 12, "eos_token_id": list(range(20, 26))}
    expected = own.generate(**prompts([4, 2, 7]), **options)
    torch.compiler.reset()
    with torch.compiler.set_stance("default"):
        compiled = CompileConfig(backend="eager", mode=None, fullgraph=True)
        assert own.generate(**prompts([4, 2, 7]), compile_config=compiled, **options).equal(expected)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
@all_families
def test_every_attention_gives_the_tokens_of_the_stock_class(family, implementation):
    stock, own = models(family)
    own.set_attn_implementation(implementation)
    with torch.compiler.set_stance("force_eager"):
        assert_same_tokens(stock, own, prompts([3, 9, 1, 6]))


def test_a_generator_decides_the_sample_whatever_the_global_seed():
    _, own = models()
    options = {"decoding": "autoregressive", "do_sample": True, "max_new_tokens": 12}
    samples = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        samples.append(own.generate(**prompts([4]), generator=torch.Generator().manual_seed(7), **options))
    assert samples[0].equal(samples[1])


def test_padding_may_be_on_the_right():
    _, own = models()
    left, options = prompts([3, 6]), {"decoding": "autoregressive", "max_new_tokens": 8, "eos_token_id": None}
    right = {name: torch.stack([values[0].roll(-3), values[1]]) for name, values in left.items()}
    assert own.generate(**right, **options)[:, 6:].equal(own.generate(**left, **options)[:, 6:])


def test_mask_and_eos_in_the_prompt_are_text_and_the_mask_is_never_chosen():
    stock, own = models()
    ends = [20, 21, 22]
    inputs = {"input_ids": torch.tensor([[5, MASK, 20, MASK, 9, MASK]]), "attention_mask": torch.ones(1, 6).long()}
    assert_same_tokens(stock, own, inputs, eos_token_id=ends)
    own.lm_head.weight.data[MASK] = own.lm_head.weight.data.abs().sum(0)  # often by far the likeliest
    for do_sample in (False, True):
        options = {"decoding": "autoregressive", "do_sample": do_sample, "max_new_tokens": 40, "eos_token_id": None}
        assert MASK not in own.generate(**prompts([6, 2]), **options)[:, 6:]


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_numbers_raise(do_sample, value):
    _, own = models()
    own.get_submodule("model.norm").get_parameter("weight").data[3] = value
    with pytest.raises(ValueError, match="NaN"):
        own.generate(**prompts([3]), decoding="autoregressive", do_sample=do_sample, max_new_tokens=4)


def test_an_adapter_changes_the_tokens_and_merged_gives_the_same():
    _, own = models()
    options = {"decoding": "autoregressive", "max_new_tokens": 12}
    plain = own.generate(**prompts([3, 5]), **options)
    model = get_peft_model(own, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)).eval()
    found = model.generate(**prompts([3, 5]), **options)
    assert not found.equal(plain)
    assert model.merge_and_unload().generate(**prompts([3, 5]), **options).equal(found)


def test_an_adapter_that_learns_prompts_is_refused():
    _, own = models()
    config = PromptTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=4, num_layers=2, token_dim=32, num_attention_heads=4
    )
    with pytest.raises(ValueError, match="PROMPT_TUNING"):
        get_peft_model(own, config).generate(**prompts([3]), decoding="autoregressive", max_new_tokens=4)


def test_a_process_that_has_finished_takes_part_in_the_forwards_of_the_others(monkeypatch):
    _, own = models()
    calls, forward = [], own.forward
    monkeypatch.setattr(own, "forward", lambda *args, **kwargs: (calls.append(1), forward(*args, **kwargs))[1])
    goes_on = lambda self, is_finished, **_: not is_finished or len(calls) < 15  # noqa: E731
    monkeypatch.setattr(type(own), "_has_unfinished_sequences", goes_on)
    output = own.generate(
        **prompts([3]), decoding="autoregressive", max_new_tokens=8, eos_token_id=None, synced_gpus=True
    )
    assert output.shape == (1, 11) and len(calls) == 15


def test_requests_of_a_stream_have_their_own_options_and_no_drafts():
    _, own = models()
    common = {"decoding": "autoregressive", "max_new_tokens": 15}
    stream = own.open_stream(3, 12, **common)
    requests = {}
    for prompt, options in (
        ([5, 6, 7], {}),
        ([9, 8], {"repetition_penalty": 1.4}),
        ([5, 6, 7], {"num_return_sequences": 2, "do_sample": True, "top_k": 1}),
        ([3] * 11, {"no_repeat_ngram_size": 2, "max_new_tokens": 7}),
    ):
        requests[stream.add(torch.tensor(prompt), **options)] = (prompt, options)
    found = {}
    while stream.has_unfinished:
        for update in stream.step():
            assert len(update.tokens) == 1 and len(update.draft) == 0
            found.setdefault((update.request, update.sequence_index), []).extend(update.tokens.tolist())
    assert len(found) == 5
    for (number, _), tokens in found.items():
        prompt, options = requests[number]
        options = {name: value for name, value in options.items() if name != "num_return_sequences"}
        alone = own.generate(torch.tensor([prompt]), **{**common, **options})
        assert alone[0, len(prompt) :].tolist() == tokens
    for options in ({"confidence_threshold": 0.5}, {"max_active_blocks": 2}, {"block_size": 2}, {"decoding": "d2f"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            stream.add(torch.tensor([1]), **options)


@pytest.mark.parametrize("interrupted", [1, 2, 5])
def test_an_interrupted_step_of_a_stream_loses_nothing(interrupted, monkeypatch):
    _, own = models()
    options = {"decoding": "autoregressive", "max_new_tokens": 10, "eos_token_id": None}
    expected = own.generate(torch.tensor([[5, 6, 7]]), **options)[0, 3:].tolist()
    stream = own.open_stream(2, 12, **options)
    stream.add(torch.tensor([5, 6, 7]), num_return_sequences=2, do_sample=True, top_k=1)
    found, number, layer = {0: [], 1: []}, 0, own.get_submodule("model.layers.1")

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    while stream.has_unfinished:
        number += 1
        with monkeypatch.context() as patch:
            if number == interrupted:
                patch.setattr(layer, "forward", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    stream.step()
                continue
            for update in stream.step():
                found[update.sequence_index] += update.tokens.tolist()
    assert found == {0: expected, 1: expected} and number == 11


@pytest.mark.parametrize(
    "options",
    [
        {"confidence_threshold": 0.2, "block_add_threshold": 0.0, "block_activation_threshold": 1.0},
        {"confidence_threshold": 1.0, "block_add_threshold": 1.0, "token_ranking": "margin"},
        {"token_ranking": "neg_entropy", "block_size": 3},
    ],
    ids=str,
)
def test_what_the_models_config_says_of_other_decodings_changes_nothing(options):
    """A model may have thresholds with a default in its config, which are those of another decoding."""
    _, own = models()
    call = {"decoding": "autoregressive", "max_new_tokens": 12, "eos_token_id": 79, "pad_token_id": 78}
    expected = own.generate(**prompts([3, 5]), **call)
    own.generation_config = D2FGenerationConfig(**options)
    output = own.generate(**prompts([3, 5]), **call, return_dict_in_generate=True)
    assert output.sequences.equal(expected) and (output.tokens_per_forward == 1.0).all()


def test_where_the_models_blocks_start_changes_nothing():
    stock, own = models("qwen2")
    own.config.block_alignment, own.config.block_size = "sequence", 4
    assert_same_tokens(stock, own, prompts([3, 9, 1, 6]))


def test_a_family_that_was_no_autoregressive_one_may_have_a_causal_mode():
    """The mode is a matter of the configuration, not of the class."""
    model = tiny_model(family="llada", right_shift_logits=True, has_causal_mode=True)
    options = {"decoding": "autoregressive", "max_new_tokens": 8, "eos_token_id": None}
    found = model.generate(torch.tensor([[1, 2, 3]]), **options)[0].tolist()
    causal = {"prompt_lengths": torch.zeros(1, dtype=torch.long), "block_size": 1}
    for length in range(3, 11):
        logits = model(torch.tensor([found[:length]]), **causal).logits[0, -1]
        logits[model.config.mask_token_id] = -torch.inf
        assert found[length] == int(logits.argmax())


@pytest.mark.parametrize("use_cache", [True, False])
def test_the_model_reads_each_token_once_with_the_cache_and_never_a_mask(use_cache, monkeypatch):
    """The trace alone would not tell of a mask that is read behind the last token."""
    _, own = models()
    fed, forward = [], own.forward
    monkeypatch.setattr(own, "forward", lambda **inputs: (fed.append(inputs["input_ids"][0]), forward(**inputs))[1])
    prompt = torch.tensor([[5, 6, 7]])
    options = {"decoding": "autoregressive", "max_new_tokens": 6, "eos_token_id": None, "use_cache": use_cache}
    found = own.generate(prompt, **options)[0]
    if use_cache:
        assert torch.cat(fed).equal(found[:-1])
    else:
        assert all(ids.equal(found[: 3 + i]) for i, ids in enumerate(fed)) and len(fed) == 6


def test_each_token_takes_one_forward_and_the_trace_tells_what_was_fed():
    _, own = models()
    output = own.generate(
        **prompts([5, 3]),
        decoding="autoregressive",
        max_new_tokens=6,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_trace=True,
        output_scores=True,
    )
    assert output.num_forward_passes.tolist() == [6, 6] and output.tokens_per_forward.tolist() == [1.0, 1.0]
    fed = [(step["window_start"], step["window_length"]) for step in output.trace[1]]
    assert fed == [(0, 3), (3, 1), (4, 1), (5, 1), (6, 1), (7, 1)]
    positions = [[position for position, _ in step["accepted"]] for step in output.trace[0]]
    assert positions == [[5], [6], [7], [8], [9], [10]]
    assert torch.stack(output.scores, 1).argmax(-1).equal(output.sequences[:, 5:])


def test_a_stopping_criterion_ends_rows():
    class AtLength(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((len(input_ids),), input_ids.shape[1] >= 9)

    stock, own = models()
    options = {"stopping_criteria": StoppingCriteriaList([AtLength()]), "eos_token_id": None}
    assert assert_same_tokens(stock, own, prompts([4, 2]), pad_token_id=1, **options).shape[1] == 9


@pytest.mark.parametrize("family", ["llada", "dream", "llama", "qwen3"])
def test_a_model_without_a_causal_mode_is_refused(family):
    model = tiny_model(family=family)
    with pytest.raises(ValueError, match="has_causal_mode=False"):
        model.generate(torch.tensor([[1, 2]]), decoding="autoregressive", max_new_tokens=2)
    with pytest.raises(ValueError, match="has_causal_mode=False"):
        model.open_stream(1, 4, decoding="autoregressive", max_new_tokens=2)


@pytest.mark.parametrize(
    "option",
    [
        {"block_size": 4},
        {"confidence_threshold": 0.5},
        {"block_add_threshold": 0.5},
        {"steps": 4},
        {"acceptance_rule": "credit"},
        {"num_branches": 2},
        {"token_ranking": "margin"},
        {"block_activation_threshold": 0.5},
        {"max_active_blocks": 2},
        {"semi_activated_threshold": 0.5},
        {"credit_decay": 0.5},
        {"confidence_factor": 1.0},
        {"entropy_bound": 0.1},
        {"remask_threshold": 0.5},
        {"sub_block_size": 2},
        {"first_token_alone": True},
        {"unmask_schedule": "even"},
        {"ranking_temperature": 0.5},
        {"block_cache": "dual"},
        {"guidance_scale": 2.0},
        {"num_beams": 2},
        {"penalty_alpha": 0.5},
        {"prompt_lookup_num_tokens": 3},
        {"encoder_repetition_penalty": 1.5},
    ],
    ids=str,
)
def test_options_of_other_decodings_are_refused_by_name(option):
    _, own = models()
    calls = []
    own.model.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(ValueError, match=next(iter(option))) as error:
        own.generate(**prompts([3]), decoding="autoregressive", max_new_tokens=4, **option)
    assert "an autoregressive model does" not in str(error.value)  # it is one
    if "num_beams" not in option:
        with pytest.raises(ValueError, match=next(iter(option))):
            own.open_stream(1, 4, decoding="autoregressive", max_new_tokens=4, **option)
    assert calls == []


def test_the_trained_twin_answers_word_problems_as_under_the_loop_of_transformers():
    folder = reference_models.HERE / "twin"
    tokenizer = AutoTokenizer.from_pretrained(reference_models.HERE / "tokenizer", padding_side="left")
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    own = load_d2f_model(folder, dtype=torch.float32, mask_token_id=tokenizer.mask_token_id)
    chats = [[{"role": "user", "content": problem.question}] for problem in make_problems("test", 6, seed=0)]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_dict=True, return_tensors="pt", padding=True
    )
    expected = stock.generate(**inputs, max_new_tokens=128, do_sample=False)
    assert own.generation_config.decoding == "autoregressive"
    assert own.generate(**inputs, max_new_tokens=128).equal(expected)

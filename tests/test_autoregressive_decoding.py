"""Autoregressive decoding by our own loop gives the tokens of transformers' `generate` with the stock class."""

# B batch, P prompt tokens

import random

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
)

import reference_models
from causal_models import VOCAB_SIZE, stock_model, with_its_weights
from d2f_hf import D2FDreamForBlockDiffusion, D2FLlamaForBlockDiffusion, D2FQwen3ForBlockDiffusion, load_d2f_model
from tiny_models import tiny_model
from word_problems import make_problems

MASK = 0  # it is never chosen here, so the stock class is kept from choosing it
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, D2FLlamaForBlockDiffusion),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, D2FDreamForBlockDiffusion),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, D2FQwen3ForBlockDiffusion),
}
all_families = pytest.mark.parametrize("family", FAMILIES)


def models(family: str = "llama", seed: int = 0):
    config_class, stock_class, own_class = FAMILIES[family]
    stock = stock_model(config_class, stock_class, seed, head_dim=12) if family == "qwen3" else None
    stock = stock_model(config_class, stock_class, seed) if stock is None else stock
    return stock, with_its_weights(stock, own_class, mask_token_id=MASK)


def prompts(lengths: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Padded at the left."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.randint(1, VOCAB_SIZE - 2, (len(lengths), width), generator=generator)
    mask = torch.tensor([[int(i >= width - length) for i in range(width)] for length in lengths])
    return {"input_ids": ids.masked_fill(mask == 0, VOCAB_SIZE - 2), "attention_mask": mask}


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
        {"top_k": 3, "top_p": 0.8},
    ],
    ids=str,
)
def test_sampling_with_the_same_seed_draws_what_the_stock_class_draws(family, sampling):
    stock, own = models(family)
    options = {"top_k": 0, **sampling, "do_sample": True, "eos_token_id": None}
    assert_same_tokens(stock, own, prompts([7, 7]), **options)


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
        {"num_beams": 2},
    ],
    ids=str,
)
def test_options_of_other_decodings_are_refused_by_name(option):
    _, own = models()
    with pytest.raises(ValueError, match=next(iter(option))):
        own.generate(**prompts([3]), decoding="autoregressive", max_new_tokens=4, **option)


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

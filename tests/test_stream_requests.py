"""What a request of a stream may ask for, and what it shares with others."""

import pytest
import torch
from d2f_hf.modeling.stream_requests import prompt_and_options
from transformers import TextStreamer

from d2f_hf import D2FGenerationConfig
from tiny_models import EOS, PAD, VOCAB_SIZE, letter_tokenizer, tiny_model

OPTIONS = {"max_new_tokens": 14, "block_size": 4, "pad_token_id": PAD}
PROMPT = torch.tensor([1, 2, 3])


@pytest.mark.parametrize(
    ("input_ids", "options", "message"),
    [
        ([1, 2], {}, "must be a tensor of token ids"),
        (torch.tensor([[1, 2]]), {}, "`max_prompt_length`"),
        (torch.tensor(3), {}, "`max_prompt_length`"),
        (torch.tensor([], dtype=torch.long), {}, "`max_prompt_length`"),
        (torch.arange(9), {}, "`max_prompt_length`"),
        (torch.tensor([1.0, 2.0]), {}, "integers"),
        (torch.tensor([-1]), {}, "vocabulary"),
        (torch.tensor([VOCAB_SIZE]), {}, "vocabulary"),
        (PROMPT, {"max_new_tokens": 15}, "`max_new_tokens`"),
        (PROMPT, {"max_new_tokens": 0}, "`max_new_tokens`"),
        (PROMPT, {"max_new_tokens": 2.5}, "`max_new_tokens`"),
        (PROMPT, {"max_new_tokens": True}, "`max_new_tokens`"),
        (PROMPT, {"max_length": 100}, "`max_new_tokens`"),
        (PROMPT, {"confidence_threshold": 1.5}, "`confidence_threshold`"),
        (PROMPT, {"block_size": 8}, "`block_size` concerns all requests"),
        (PROMPT, {"remask_threshold": 0.5}, "`remask_threshold` concerns all requests"),
        (PROMPT, {"num_branches": 2}, "`num_branches` concerns all requests"),
        (PROMPT, {"acceptance_rule": "credit"}, "`acceptance_rule` concerns all requests"),
        (PROMPT, {"decoding": "vanilla", "confidence_threshold": None}, "`decoding`"),
        (PROMPT, {"use_cache": False}, "`use_cache` concerns all requests"),
        (PROMPT, {"seed": 1.5}, "`seed`"),
        (PROMPT, {"seed": True}, "`seed`"),
        (PROMPT, {"inputs": PROMPT[None]}, "`inputs`"),
        (PROMPT, {"stopping_criteria": len}, "`stopping_criteria`.*list"),
        (PROMPT, {"logits_processor": len}, "`logits_processor`.*list"),
        (PROMPT, {"max_time": "30"}, "`max_time`"),
        (PROMPT, {"seed": 1, "do_sample": True, "num_return_sequences": 2}, "`seed`"),
        (PROMPT, {"streamer": TextStreamer(letter_tokenizer())}, "`streamer`"),
        (PROMPT, {"attention_mask": torch.ones(1, 3)}, "`attention_mask`"),
        (PROMPT, {"output_scores": True, "return_dict_in_generate": True}, "`output_scores`"),
        (PROMPT, {"temprature": 2.0}, "temprature"),
        (PROMPT, {"num_beams": 2}, "num_beams"),
        (PROMPT, {"stop_strings": ["a"]}, "tokenizer"),
        (PROMPT, {"num_return_sequences": 2}, "num_return_sequences"),
        (PROMPT, {"generation_config": D2FGenerationConfig(block_size=2)}, "`block_size` concerns all requests"),
    ],
    ids=str,
)
def test_a_request_that_cannot_be_is_refused_at_once_and_leaves_the_stream_as_it_was(input_ids, options, message):
    model = tiny_model()
    stream = model.open_stream(2, 5, **OPTIONS)
    handle = model.register_forward_pre_hook(lambda *_: pytest.fail("a forward"))
    with pytest.raises(ValueError, match=message):
        stream.add(input_ids, **options)
    handle.remove()
    assert not stream.has_unfinished and stream.num_free == 2
    assert stream.add(PROMPT) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_return_sequences": 2, "do_sample": True}, "`num_return_sequences`"),
        ({"generation_config": D2FGenerationConfig(num_return_sequences=2, do_sample=True)}, "`num_return_sequences`"),
        ({"generation_config": D2FGenerationConfig(decoding="vanilla")}, "`decoding`"),
        ({"seed": 1}, "`seed`"),
        ({"custom_generate": lambda *_, **__: None}, "`custom_generate`"),
        ({"max_new_tokens": 10**6}, None),
    ],
    ids=str,
)
def test_options_that_a_stream_cannot_have_are_refused_when_it_is_opened(options, message):
    if message is None:
        options = {"max_new_tokens": 7}
        assert tiny_model().open_stream(2, 5, **options).add(PROMPT) == 0
        return
    with pytest.raises(ValueError, match=message):
        tiny_model().open_stream(2, 5, **options)


def test_requests_share_a_sampler_where_nothing_depends_on_them():
    stream = tiny_model().open_stream(2, 5, **OPTIONS)
    options = [
        {}, {}, {"max_new_tokens": 3}, {"confidence_threshold": 0.5}, {"do_sample": True}, {"do_sample": True},
        {"do_sample": True, "seed": 1}, {"do_sample": True, "seed": 1}, {"no_repeat_ngram_size": 2},
    ]  # fmt: skip
    samplers = [stream.prepare(PROMPT, own).sampler for own in options]
    assert samplers[0] is samplers[1] is samplers[2] is samplers[3]
    assert samplers[4] is samplers[5] is not samplers[0]
    assert len({id(sampler) for sampler in samplers}) == 5


@pytest.mark.parametrize("options", [{"max_length": 9}, {"min_new_tokens": 2}, {"eos_token_id": [EOS, 5]}], ids=str)
def test_options_of_the_stream_hold_for_each_request_by_its_own_length(options):
    """`max_length` counts the prompt, and was once counted from the longest prompt that may come."""
    model = tiny_model()
    prompts = [torch.arange(1, 1 + length) for length in (1, 3, 5)]
    finished = dict(model.generate_stream_batch(prompts, 2, 5, pad_token_id=PAD, **options))
    for number, prompt in enumerate(prompts):
        expected = model.generate(prompt[None], pad_token_id=PAD, **options)[0, len(prompt) :]
        assert finished[number].equal(expected)


@pytest.mark.parametrize(
    "request_of_batch",
    [(PROMPT, {1: 2}), (PROMPT, {"input_ids": PROMPT}), (PROMPT, None), (PROMPT,), (3, PROMPT), [1]],
    ids=str,
)  # fmt: skip
def test_a_request_of_another_shape_or_type_is_a_value_error(request_of_batch):
    """Names that are no strings, and the prompt a second time, were a TypeError that did not say which request."""
    with pytest.raises(ValueError, match="Each of `requests` must be.*Convert it"):
        prompt_and_options(request_of_batch)


def test_a_request_is_a_prompt_alone_or_with_its_limit_or_its_options():
    numpy = pytest.importorskip("numpy")
    assert prompt_and_options(PROMPT) == (PROMPT, {})
    assert prompt_and_options((PROMPT, {"do_sample": True})) == (PROMPT, {"do_sample": True})
    for limit in (5, numpy.int64(5)):
        assert prompt_and_options((PROMPT, limit)) == (PROMPT, {"max_new_tokens": 5})

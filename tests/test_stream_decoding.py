"""Streams: requests with options of their own get what they would get alone, as it is decoded."""

import threading
import time

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from prompts import random_prompts
from tiny_models import EOS, FAMILIES, MASK, PAD, VOCAB_SIZE, letter_tokenizer, tiny_model

OPTIONS = {"max_new_tokens": 14, "block_size": 4, "confidence_threshold": 0.3, "pad_token_id": PAD}


def alone(model, prompt, **options):
    """The response `(T,)` of `generate`; a `seed` becomes a generator."""
    options = {**OPTIONS, **options}
    if "max_length" in options:
        options.pop("max_new_tokens")
    seed = options.pop("seed", None)
    if seed is not None:
        options["generator"] = torch.Generator().manual_seed(seed)
    return model.generate(prompt[None], **options)[:, len(prompt) :]


def run(stream):
    """All updates until nothing is left, by request and sequence."""
    updates = {}
    while stream.has_unfinished:
        for update in stream.step():
            updates.setdefault((update.request, update.sequence_index), []).append(update)
    return updates


def tokens_of(updates):
    return torch.cat([update.tokens for update in updates]).tolist()


def prompts_of(lengths, seed=0):
    return [torch.tensor(prompt) for prompt in random_prompts(lengths, seed=seed)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("max_batch_size", [1, 3, 9])
def test_each_request_gets_what_it_would_get_alone_with_its_own_options(family, max_batch_size):
    """Limits, thresholds, sampling, seeds, EOS tokens, processors: every request of a batch has others."""
    model = tiny_model(family=family)
    tokenizer = letter_tokenizer()
    own = [
        {},
        {"max_new_tokens": 3},
        {"max_length": 12},
        {"confidence_threshold": 0.9, "block_add_threshold": 1.0},
        {"block_activation_threshold": 0.0, "max_active_blocks": 1},
        {"do_sample": True, "temperature": 1.5, "seed": 3},
        {"do_sample": True, "top_k": 5, "seed": 4},
        {"eos_token_id": [5, 7, EOS]},
        {"no_repeat_ngram_size": 1},
        {"repetition_penalty": 1.7},
        {"min_new_tokens": 9},
        {"min_length": 12},
        {"forced_eos_token_id": EOS, "max_new_tokens": 5},
        {"prefix_allowed_tokens_fn": lambda batch_id, ids: [3, 4, 5, int(ids[-1]) % 29]},
        {"stop_strings": ["a", "q"], "tokenizer": tokenizer},
        {"do_sample": True, "temperature": 2.0, "seed": 5, "max_new_tokens": 7},
    ]
    prompts = prompts_of([i % 7 + 1 for i in range(len(own))], seed=1)
    stream = model.open_stream(max_batch_size, 7, **OPTIONS)
    numbers = [stream.add(prompt, **options) for prompt, options in zip(prompts, own, strict=True)]
    updates = run(stream)
    assert numbers == list(range(len(own)))
    for number, prompt, options in zip(numbers, prompts, own, strict=True):
        expected = alone(model, prompt, **options)[0].tolist()
        assert tokens_of(updates[number, 0]) == expected, options
        assert updates[number, 0][-1].is_finished and not any(u.is_finished for u in updates[number, 0][:-1])


def test_a_request_has_its_own_stopping_criteria_and_time():
    class StopsAt(StoppingCriteria):
        def __init__(self, length):
            self.length = length

        def __call__(self, input_ids, scores, **kwargs):
            assert input_ids.shape[0] == 1, "each request alone"
            return torch.full((1,), input_ids.shape[1] >= self.length, dtype=torch.bool)

    model, (first, second, third) = tiny_model(), prompts_of([4, 4, 6])
    options = {**OPTIONS, "eos_token_id": None}
    stream = model.open_stream(3, 6, **options)
    stream.add(first, stopping_criteria=StoppingCriteriaList([StopsAt(6)]))
    stream.add(second)
    stream.add(third, stopping_criteria=StoppingCriteriaList([StopsAt(9)]))
    updates = run(stream)
    assert [len(tokens_of(updates[i, 0])) for i in range(3)] == [2, 14, 3]
    assert [updates[i, 0][-1].finish_reason for i in range(3)] == ["stop", "length", "stop"]
    stream = model.open_stream(1, 6, **options)
    stream.add(first)
    stream.add(second, max_time=1e-9)
    updates = run(stream)
    assert len(tokens_of(updates[0, 0])) == 14 and updates[1, 0][-1].finish_reason == "stop"


def test_the_time_of_a_request_begins_when_it_is_let_in(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    model, (first, second) = tiny_model(), prompts_of([4, 5])
    stream = model.open_stream(1, 5, **OPTIONS, eos_token_id=None)
    stream.add(first)
    stream.add(second, max_time=30.0)
    stream.step()
    now[0] = 1000.0  # so long does the first one take
    assert len(tokens_of(run(stream)[1, 0])) == 14


def test_returned_sequences_of_a_request_are_those_of_a_lone_call():
    model, (prompt, other) = tiny_model(), prompts_of([5, 3], seed=2)
    options = {"do_sample": True, "top_k": 1, "num_return_sequences": 3, "eos_token_id": 11}
    expected = alone(model, prompt, **options)
    stream = model.open_stream(5, 5, **OPTIONS)
    stream.add(other)
    number = stream.add(prompt, **options)
    stream.add(other, do_sample=True, seed=8)
    updates = run(stream)
    for i, row in enumerate(expected):
        tokens = tokens_of(updates[number, i])
        assert tokens == row[: len(tokens)].tolist() and (row[len(tokens) :] == PAD).all()
    with pytest.raises(ValueError, match="`num_return_sequences` must be at most the 5 rows"):
        stream.add(prompt, do_sample=True, num_return_sequences=6)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_come_as_they_are_decoded_and_are_never_taken_back(family):
    model, prompts = tiny_model(family=family), prompts_of([5, 2, 7], seed=3)
    stream = model.open_stream(2, 7, **OPTIONS)
    for prompt in prompts:
        stream.add(prompt)
    updates = run(stream)
    for number, prompt in enumerate(prompts):
        expected = alone(model, prompt)[0].tolist()
        told = []
        for update in updates[number, 0]:
            told += update.tokens.tolist()
            assert told == expected[: len(told)]
            decoded = [token for token in update.draft.tolist() if token != MASK]
            assert len(decoded) < len(update.draft) or not decoded, "what has no mask before it is final"
            assert len(told) + len(update.draft) <= 14
        assert told == expected
        assert len(updates[number, 0][-1].draft) == 0
    assert any(len(update.draft) > 0 for own in updates.values() for update in own)
    passes = [updates[number, 0][-1].num_forward_passes for number in range(3)]
    outputs = [model.generate(p[None], **OPTIONS, return_dict_in_generate=True) for p in prompts]
    assert passes == [output.num_forward_passes.item() for output in outputs]


def test_with_remasking_only_final_blocks_are_told():
    model, prompts = tiny_model(), prompts_of([5, 2, 7], seed=3)
    options = {**OPTIONS, "remask_threshold": 0.5, "confidence_threshold": 0.05}
    stream = model.open_stream(2, 7, **options)
    for prompt in prompts:
        stream.add(prompt)
    updates = run(stream)
    for number, prompt in enumerate(prompts):
        assert tokens_of(updates[number, 0]) == model.generate(prompt[None], **options)[0, len(prompt) :].tolist()


def test_an_aborted_request_leaves_at_once_and_the_others_do_not_notice():
    model, prompts = tiny_model(), prompts_of([5, 2, 7, 4], seed=4)
    stream = model.open_stream(3, 7, **OPTIONS, eos_token_id=None)
    numbers = [stream.add(prompt) for prompt in prompts]
    stream.step()
    assert stream.abort(numbers[1]) and not stream.abort(numbers[1])
    assert stream.abort(numbers[3]), "one that waits"
    assert not stream.abort(99)
    late = stream.add(prompts[3])
    updates = run(stream)
    assert {number for number, _ in updates} == {numbers[0], numbers[2], late}
    for number, prompt in ((numbers[0], prompts[0]), (numbers[2], prompts[2])):
        told = tokens_of(updates[number, 0])
        assert told == alone(model, prompt, eos_token_id=None)[0, -len(told) :].tolist()
    assert tokens_of(updates[late, 0]) == alone(model, prompts[3], eos_token_id=None)[0].tolist()
    assert stream.num_free == 3 and not stream.abort(late)


class Fails(LogitsProcessor):
    depends_on_previous_tokens = False

    def __call__(self, input_ids, scores):
        raise RuntimeError("a broken processor")


class Nothing(LogitsProcessor):
    depends_on_previous_tokens = False

    def __call__(self, input_ids, scores):
        return torch.full_like(scores, float("nan"))


class Unchanged(LogitsProcessor):
    depends_on_previous_tokens = False

    def __call__(self, input_ids, scores):
        return scores


def broken_criterion(input_ids, scores, **kwargs):
    raise KeyError("a broken criterion")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"logits_processor": LogitsProcessorList([Fails()])}, RuntimeError),
        ({"logits_processor": LogitsProcessorList([Nothing()])}, ValueError),
        ({"stopping_criteria": StoppingCriteriaList([broken_criterion])}, KeyError),
    ],
    ids=["processor", "nan", "criterion"],
)
def test_a_request_that_fails_fails_alone(options, error):
    model, prompts = tiny_model(), prompts_of([5, 2, 7], seed=5)
    stream = model.open_stream(2, 7, **OPTIONS)
    stream.add(prompts[0])
    stream.add(prompts[1], **options)
    stream.add(prompts[2])
    updates = run(stream)
    last = updates[1, 0][-1]
    assert last.is_finished and last.finish_reason == "error" and isinstance(last.error, error)
    for number in (0, 2):
        assert tokens_of(updates[number, 0]) == alone(model, prompts[number])[0].tolist()
    finished = {}
    with pytest.raises(error):
        for number, tokens in model.generate_stream_batch(
            [prompts[0], (prompts[1], options), prompts[2]], 2, 7, **OPTIONS
        ):
            finished[number] = tokens.tolist()
    assert finished == {number: alone(model, prompts[number])[0].tolist() for number in (0, 2)}


def out_of_memory(*args):
    raise MemoryError


@pytest.mark.parametrize("is_shared", [False, True], ids=["prompts", "one_prompt"])
@pytest.mark.parametrize("where", ["before_layer", "head", "criterion", "processor"])
def test_a_step_that_is_interrupted_loses_nothing(where, is_shared):
    """The model runs out of memory, or somebody presses Ctrl-C, and the stream goes on.

    It took for fed what no layer had seen, and for masked what was accepted, and gave wrong tokens in silence.
    """
    prompts = prompts_of([5, 5, 7], seed=6)
    if is_shared:
        prompts[1] = prompts[0]
    model = tiny_model()
    expected = [alone(model, prompt)[0].tolist() for prompt in prompts]
    if where == "processor":  # with any, no probability is left for the mask token
        expected[1] = alone(model, prompts[1], logits_processor=[Unchanged()])[0].tolist()
    for at in range(1, 8):
        model, calls = tiny_model(), 0

        def interrupt(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == at:  # noqa: B023
                raise KeyboardInterrupt

        def criterion(input_ids, scores, **kwargs):
            interrupt()
            return False

        def processor(input_ids, scores):
            interrupt()
            return scores

        processor.depends_on_previous_tokens = False
        stream = model.open_stream(3, 7, **OPTIONS)
        if where == "before_layer":
            model.model.get_layers()[0].register_forward_pre_hook(interrupt)
        if where == "head":
            model.get_output_embeddings().register_forward_pre_hook(interrupt)
        guests = {"criterion": {"stopping_criteria": [criterion]}, "processor": {"logits_processor": [processor]}}
        for number, prompt in enumerate(prompts):
            stream.add(prompt, **(guests.get(where, {}) if number == 1 else {}))
        told, interrupts = {0: [], 1: [], 2: []}, 0
        while stream.has_unfinished:
            try:
                for update in stream.step():
                    told[update.request] += update.tokens.tolist()
            except KeyboardInterrupt:
                interrupts += 1
        assert interrupts == (calls >= at) and [told[number] for number in range(3)] == expected, at


def test_a_request_can_be_aborted_after_an_interrupted_step():
    """Of requests with the same prompt only the first one is fed at first. The others have to know when it is gone."""
    model, [prompt] = tiny_model(), prompts_of([5])
    stream = model.open_stream(3, 7, **OPTIONS)
    numbers = [stream.add(prompt) for _ in range(3)]
    handle = model.model.get_layers()[0].register_forward_pre_hook(out_of_memory)
    with pytest.raises(MemoryError):
        stream.step()
    handle.remove()
    assert stream.abort(numbers[0])
    updates = run(stream)
    assert {number for number, _ in updates} == {numbers[1], numbers[2]}
    for number in numbers[1:]:
        assert tokens_of(updates[number, 0]) == alone(model, prompt)[0].tolist()


def test_nobody_else_gets_inference_tensors():
    """A processor or criterion of one request may keep what it is given, in a stream that is in inference mode."""
    kept = []

    class Keeps(LogitsProcessor):
        def __call__(self, input_ids, scores):
            kept.extend([input_ids, scores])
            return scores

    def criterion(input_ids, scores, **kwargs):
        kept.append(input_ids)
        return torch.zeros(len(input_ids), dtype=torch.bool)

    def allowed(batch_id, input_ids):
        kept.append(input_ids)
        return [1, 2, 3]

    model, prompts = tiny_model(), prompts_of([5, 2, 7], seed=6)
    stream = model.open_stream(3, 7, **OPTIONS)
    stream.add(prompts[0], logits_processor=LogitsProcessorList([Keeps()]))
    stream.add(prompts[1], stopping_criteria=StoppingCriteriaList([criterion]))
    stream.add(prompts[2], prefix_allowed_tokens_fn=allowed)
    updates = run(stream)
    assert len(kept) > 10 and not any(tensor.is_inference() for tensor in kept)
    assert not any(u.tokens.is_inference() or u.draft.is_inference() for own in updates.values() for u in own)


def test_the_error_of_a_batch_of_requests_names_the_request_and_how_many_failed():
    model, prompts = tiny_model(), prompts_of([5, 2, 7], seed=7)
    requests = [prompts[0], torch.tensor([VOCAB_SIZE]), prompts[1], (prompts[2], {"temprature": 2}), "abc"]
    finished = {}
    with pytest.raises(ValueError, match=r"Request 1 was not answered: .*vocabulary.* 2 further requests failed"):
        for number, tokens in model.generate_stream_batch(requests, 2, 7, **OPTIONS):
            finished[number] = tokens.tolist()
    assert finished == {0: alone(model, prompts[0])[0].tolist(), 2: alone(model, prompts[1])[0].tolist()}


def test_a_stream_can_be_fed_from_another_thread():
    """As a server does it: the iterable waits for requests while nothing is decoded."""
    model, prompts = tiny_model(), prompts_of([5, 2, 7], seed=8)
    arrived, is_closed = [], threading.Event()

    def requests():
        while arrived or not is_closed.is_set():
            yield arrived.pop(0) if arrived else None

    def client():
        for prompt in prompts:
            arrived.append(prompt)
            time.sleep(0.01)
        is_closed.set()

    thread = threading.Thread(target=client)
    thread.start()
    finished = dict(model.generate_stream_batch(requests(), 2, 7, **OPTIONS))
    thread.join()
    assert [finished[i].tolist() for i in range(3)] == [alone(model, prompt)[0].tolist() for prompt in prompts]


def test_a_default_device_changes_nothing():
    model, prompts = tiny_model(), prompts_of([5, 2, 7], seed=9)
    expected = [alone(model, prompt)[0].tolist() for prompt in prompts]
    torch.set_default_device("meta")
    try:
        finished = dict(model.generate_stream_batch(prompts, 2, 7, **OPTIONS))
    finally:
        torch.set_default_device(None)
    assert [finished[i].tolist() for i in range(3)] == expected

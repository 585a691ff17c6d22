"""How the pipelined loop runs: rows that join and leave, shared first forwards, compiled steps, memory.

What it decodes is the subject of test_generation_d2f.py.
"""

import copy
import pickle

import pytest
import torch
from d2f_hf.modeling import sampler, window_forward
from d2f_hf.modeling.sampler import Sampler
from transformers import CompileConfig, StoppingCriteria, StoppingCriteriaList, TextDiffusionStreamer

from prompts import pad, random_prompts
from tiny_models import EOS, FAMILIES, MASK, VOCAB_SIZE, tiny_model

OPTIONS = {"block_size": 3, "max_new_tokens": 14, "confidence_threshold": 0.06}
FULL = {"return_dict_in_generate": True, "output_trace": True}


def eager_model(family: str = "llada", **options):
    """A tiny model that is sure enough of its tokens to end its rows at different steps."""
    model = tiny_model(family=family, **options)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(8)
    return model


def shapes_of(model) -> list[torch.Size]:
    """A list that grows by the shape of `input_ids` of each forward."""
    shapes = []
    model.model.register_forward_pre_hook(
        lambda _, __, named: shapes.append(named["input_ids"].shape), with_kwargs=True
    )
    return shapes


def alone(model, prompt: list[int], **options) -> list[int]:
    """The response to a prompt in a call of its own."""
    ids = torch.tensor([prompt])
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), **{**OPTIONS, **options})[
        0, len(prompt) :
    ].tolist()
    return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens


def test_a_finished_row_leaves_the_batch_at_once():
    model = eager_model()
    shapes = shapes_of(model)
    output = model.generate(**pad(random_prompts([5, 2, 9, 4, 7, 3], seed=3), "left"), **OPTIONS, **FULL)
    num_forward_passes = output.num_forward_passes.tolist()
    assert len(set(num_forward_passes)) > 2, "rows end at different steps"
    live = [sum(number > step for number in num_forward_passes) for step in range(max(num_forward_passes))]
    assert [shape[0] for shape in shapes] == live


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "flex_attention"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_window_without_its_padding_decodes_the_same(family, implementation, monkeypatch):
    model = eager_model(family, num_key_value_heads=2)
    model.set_attn_implementation(implementation)
    fed = []
    model.model.register_forward_pre_hook(
        lambda _, __, named: fed.append((named["input_ids"].shape, named["cache"].window)), with_kwargs=True
    )
    inputs = pad(random_prompts([5, 2, 30, 4, 1], seed=3), "left")
    with torch.compiler.set_stance("force_eager"):
        monkeypatch.setattr(window_forward, "is_worth_packing", lambda is_fed: True)
        output = model.generate(**inputs, **OPTIONS, **FULL)
        assert sum(window[2] for _, window in fed) > 3
        for shape, (write_slots, _, is_packed) in fed:
            assert shape == ((1, (write_slots >= 0).sum()) if is_packed else write_slots.shape)
        monkeypatch.setattr(window_forward, "is_worth_packing", lambda is_fed: False)
        expected = model.generate(**inputs, **OPTIONS, **FULL)
    assert output.sequences.equal(expected.sequences) and output.trace == expected.trace


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_with_the_same_prompt_share_its_first_forward(family):
    model = eager_model(family)
    shapes = shapes_of(model)
    first, second = random_prompts([5, 8], seed=1)
    output = model.generate(**pad([first, first, second, first, second, second], "left"), **OPTIONS, **FULL)
    expected = model.generate(**pad([first, second], "left"), **OPTIONS, **FULL)
    assert [shape[0] for shape in shapes[:2]] == [4, 6], "of those next to each other, one"
    for row, other in enumerate([0, 0, 1, 0, 1, 1]):
        assert output.trace[row] == expected.trace[other]
        assert output.sequences[row].equal(expected.sequences[other][: output.sequences.shape[1]])
    assert output.num_forward_passes.tolist() == [expected.num_forward_passes[i].item() for i in (0, 0, 1, 0, 1, 1)]


def test_a_prompt_that_goes_on_with_masks_is_another_prompt():
    """A mask token in a prompt is text; once, `[1, 2, MASK]` and `[1, 2]` were taken for the same prompt."""
    model = eager_model()
    prompts = [[1, 2, MASK], [1, 2], [1, 2, MASK, MASK], [1]]
    for side in ("left", "right"):
        output = model.generate(**pad(prompts, side), **OPTIONS)[:, 4:].tolist()
        for row, prompt in enumerate(prompts):
            expected = alone(model, prompt)
            assert output[row][: len(expected)] == expected


def test_returned_sequences_of_one_prompt_are_drawn_apart_behind_one_prefill():
    model = tiny_model()
    shapes = shapes_of(model)
    prompt = torch.tensor([random_prompts([6], seed=2)[0]])
    sampling = {"do_sample": True, "temperature": 2.0, "num_return_sequences": 5, "output_logits": True}
    output = model.generate(prompt, **OPTIONS, **FULL, **sampling, generator=torch.Generator().manual_seed(0))
    assert shapes[0][0] == 1 and shapes[1][0] == 5
    assert len({tuple(row) for row in output.sequences.tolist()}) == 5
    assert output.logits[0].shape == (5, VOCAB_SIZE)
    again = model.generate(prompt, **OPTIONS, **FULL, **sampling, generator=torch.Generator().manual_seed(0))
    assert output.sequences.equal(again.sequences)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("max_batch_size", [1, 2, 3, 20])
def test_requests_that_join_at_any_step_get_the_response_of_a_lone_run(family, max_batch_size):
    model = eager_model(family)
    prompts = random_prompts([5, 1, 9, 9, 3, 7, 2, 8, 4, 6, 5, 5], seed=4)
    prompts[3] = prompts[2]
    limits = [14, 3, 8, 8, 14, 1, 14, 9, 14, 5, 14, 2]
    expected = [alone(model, prompt, max_new_tokens=limit) for prompt, limit in zip(prompts, limits, strict=True)]
    shapes = shapes_of(model)

    def requests():
        for number, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            yield from [None] * (number % 3)  # nobody is waiting right now
            yield torch.tensor(prompt) if limit == 14 else (torch.tensor(prompt), limit)

    finished = dict(model.generate_stream_batch(requests(), max_batch_size, max_prompt_length=9, **OPTIONS))
    assert [finished[number].tolist() for number in range(len(prompts))] == expected
    assert max(shape[0] for shape in shapes) <= max_batch_size
    assert max_batch_size == 1 or max(shape[0] for shape in shapes) > 1


def test_equal_requests_for_rows_that_are_apart_get_a_response_each():
    """The second one once got the row behind the first one's, whose own request was lost."""
    model = eager_model()
    first, second, third = random_prompts([5, 4, 6], seed=9)
    prompts, limits = [first, second, first, third, third], [2, 14, 2, 14, 14]
    expected = [
        alone(model, prompt, max_new_tokens=limit, eos_token_id=None)
        for prompt, limit in zip(prompts, limits, strict=True)
    ]
    requests = [(torch.tensor(prompt), limit) for prompt, limit in zip(prompts, limits, strict=True)]
    finished = dict(model.generate_stream_batch(requests, 3, max_prompt_length=6, **OPTIONS, eos_token_id=None))
    assert [finished[number].tolist() for number in range(5)] == expected


def test_a_response_comes_as_soon_as_it_is_finished():
    model = eager_model()
    short, long = (torch.tensor(prompt) for prompt in random_prompts([4, 4], seed=5))
    asked = []

    def requests():
        for number, request in enumerate([(long, 14), (short, 1), (short, 1)]):
            asked.append(number)
            yield request

    stream = model.generate_stream_batch(requests(), 2, max_prompt_length=4, **OPTIONS)
    assert asked == [], "nothing is done before the first response is wanted"
    assert next(stream)[0] == 1 and asked == [0, 1]
    assert next(stream)[0] == 2 and next(stream)[0] == 0
    assert next(stream, None) is None


def test_a_bad_request_is_an_error_once_the_others_have_their_response():
    model = eager_model()
    good = [torch.tensor(prompt) for prompt in random_prompts([4, 3, 4], seed=5)]
    for bad, message in ((torch.arange(9), "`max_prompt_length`"), (torch.tensor([VOCAB_SIZE]), "vocabulary")):
        finished = {}
        with pytest.raises(ValueError, match=message):
            for number, response in model.generate_stream_batch([*good, bad, good[0]], 2, 4, **OPTIONS):
                finished[number] = response.tolist()
        expected = {number: alone(model, prompt.tolist()) for number, prompt in enumerate(good)}
        assert finished == {**expected, 4: expected[0]}

    def breaking():
        yield good[0]
        raise KeyError("a broken source")

    stream = model.generate_stream_batch(breaking(), 2, 4, **OPTIONS)
    assert next(stream)[1].tolist() == alone(model, good[0].tolist())
    with pytest.raises(KeyError, match="a broken source"):
        next(stream)


def test_a_stream_that_is_made_in_inference_mode_can_be_read_outside():
    model, prompt = eager_model(), random_prompts([4], seed=5)[0]
    with torch.inference_mode():
        stream = model.generate_stream_batch([torch.tensor(prompt)], 2, 4, **OPTIONS)
    assert [response.tolist() for _, response in stream] == [alone(model, prompt)]


def test_stopping_criteria_and_seeds_work_where_rows_come_and_go():
    class StopsAtLength(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((len(input_ids),), input_ids.shape[1] >= 8, dtype=torch.bool)

    model = eager_model()
    prompts = [torch.tensor(prompt) for prompt in random_prompts([5, 6, 7], seed=6)]
    options = {**OPTIONS, "stopping_criteria": StoppingCriteriaList([StopsAtLength()]), "eos_token_id": None}
    finished = dict(model.generate_stream_batch(prompts, 2, max_prompt_length=9, **options))
    assert [len(finished[number]) for number in range(3)] == [3, 2, 1]
    sampling = {"do_sample": True, "temperature": 2.0}
    runs = [
        dict(
            model.generate_stream_batch(
                prompts, 2, 9, **OPTIONS, **sampling, generator=torch.Generator().manual_seed(seed)
            )
        )
        for seed in (0, 0, 1)
    ]
    tokens = [[run[number].tolist() for number in range(3)] for run in runs]
    assert tokens[0] == tokens[1] != tokens[2]


@pytest.mark.parametrize(
    ("requests", "options", "message"),
    [
        ([torch.tensor([], dtype=torch.long)], {}, "`requests`"),
        ([torch.tensor([[1, 2]])], {}, "`requests`"),
        ([torch.arange(5)], {}, "`max_prompt_length`"),
        ([(torch.tensor([1]), 15)], {}, "`max_new_tokens`"),
        ([(torch.tensor([1]), 0)], {}, "`max_new_tokens`"),
        ([], {"decoding": "vanilla", "confidence_threshold": None}, "`decoding`"),
        ([], {"max_batch_size": 0}, "`max_batch_size`"),
        ([], {"max_prompt_length": 0}, "`max_prompt_length`"),
        ([], {"max_batch_size": True}, "`max_batch_size`"),
        ([], {"max_prompt_length": 10**6}, "positions"),
        ([], {"eos_token_id": MASK}, "`eos_token_id`"),
        ([], {"attention_mask": torch.ones(1, 4)}, "`attention_mask`"),
        ([], {"do_sample": True, "num_return_sequences": 3}, "`num_return_sequences`"),
        ([], {"output_scores": True, "return_dict_in_generate": True}, "`output_scores`"),
        ([], {"return_dict_in_generate": True}, "`return_dict_in_generate`"),
        ([], {"streamer": TextDiffusionStreamer(None)}, "`streamer`"),
        ([[1, 2]], {}, "`requests`"),
        ([(torch.tensor([1]), 2.0)], {}, "`requests`"),
        ([], {"prefix_allowed_tokens_fn": lambda *_: [1]}, "`prefix_allowed_tokens_fn`"),
        ([], {"forced_eos_token_id": EOS}, "`forced_eos_token_id`"),
        ([], {"min_length": 8}, "`min_length`"),
        ([], {"synced_gpus": True}, "`synced_gpus`"),
    ],
    ids=str,
)
def test_requests_that_cannot_be_answered_are_errors(requests, options, message):
    arguments = {"max_batch_size": 2, "max_prompt_length": 4, **OPTIONS, **options}
    with pytest.raises(ValueError, match=message):
        list(tiny_model().generate_stream_batch(requests, **arguments))


@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_steps_decode_the_same_and_compile_nothing_after_warm_up(family):
    model = eager_model(family)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = {"compile_config": CompileConfig(backend=backend, mode=None, fullgraph=True)}
    batches = [random_prompts(lengths, seed=7) for lengths in ([5], [5, 2, 9, 4], [3, 3, 8])]
    torch.compiler.reset()
    with torch.compiler.set_stance("default"):
        for _ in range(2):
            num_graphs = len(graphs)
            for prompts in batches:
                inputs = pad(prompts, "left")
                output = model.generate(**inputs, **OPTIONS, **FULL, **compiled)
                expected = model.generate(**inputs, **OPTIONS, **FULL)
                assert output.sequences.equal(expected.sequences) and output.trace == expected.trace
    assert len(graphs) == num_graphs > 0


def test_more_shapes_than_torch_allows_by_default_are_compiled():
    model = eager_model()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = {"compile_config": CompileConfig(backend=backend, mode=None, fullgraph=True, dynamic=False)}
    torch.compiler.reset()
    with torch.compiler.set_stance("default"):
        for num_rows in (1, 2, 3, 5, 9):
            inputs = pad(random_prompts([i % 7 + 1 for i in range(num_rows)], seed=num_rows), "left")
            options = {**OPTIONS, "max_new_tokens": 24}
            assert model.generate(**inputs, **options, **compiled).equal(model.generate(**inputs, **options))
    assert len(graphs) > torch._dynamo.config.recompile_limit


def test_a_copy_of_a_model_does_not_call_what_was_compiled_for_the_other():
    model = eager_model()
    compiled = {"compile_config": CompileConfig(backend="eager", mode=None)}
    prompt = torch.tensor([random_prompts([5], seed=2)[0]])
    torch.compiler.reset()
    with torch.compiler.set_stance("default"):
        first = model.generate(prompt, **OPTIONS, **compiled)
        other = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        assert other.generate(prompt, **OPTIONS, **compiled).equal(first)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
        expected = other.generate(prompt, **OPTIONS)
        assert not expected.equal(first)
        assert other.generate(prompt, **OPTIONS, **compiled).equal(expected)
    assert other.state_dict().keys() == model.state_dict().keys() == tiny_model().state_dict().keys()


def test_tokens_are_chosen_a_few_rows_at_a_time(monkeypatch):
    model, inputs = eager_model(), pad(random_prompts([5, 2, 9], seed=8), "left")
    options = {**OPTIONS, **FULL, "output_scores": True, "output_logits": True, "min_new_tokens": 3, "top_k": 7}
    expected = model.generate(**inputs, **options)
    sizes = []

    class Recording(Sampler):
        def choose(self, logits, *rest):
            sizes.append(len(logits))
            return super().choose(logits, *rest)

    model.sampler_class = Recording
    monkeypatch.setattr(sampler, "SCORES_AT_A_TIME", 2 * VOCAB_SIZE)
    output = model.generate(**inputs, **options)
    assert max(sizes) == 2 and len(sizes) > len(output.trace[0])
    assert output.sequences.equal(expected.sequences) and output.trace == expected.trace
    assert all(torch.equal(a, b) for a, b in zip(output.scores, expected.scores, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(output.logits, expected.logits, strict=True))


def test_no_place_is_taken_for_tokens_that_never_come():
    model = eager_model()
    caches = []
    model.model.register_forward_pre_hook(lambda _, __, named: caches.append(named["cache"]), with_kwargs=True)
    model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2000, stopping_criteria=StoppingCriteriaList([
        lambda input_ids, scores, **kwargs: torch.full((len(input_ids),), input_ids.shape[1] >= 20, dtype=torch.bool)
    ]))  # fmt: skip
    assert caches[-1].layers[0].keys.shape[1] == 1 + 256


def test_the_mask_token_is_never_fed_to_the_cache_as_final():
    """What is committed was read fully decoded: each forward's window starts at the first block that is not."""
    model = eager_model()
    windows: list[tuple[list[int], list[int]]] = []
    model.model.register_forward_pre_hook(
        lambda _, __, named: windows.append((named["input_ids"][0].tolist(), named["position_ids"][0].tolist())),
        with_kwargs=True,
    )
    model.generate(torch.tensor([random_prompts([4], seed=9)[0]]), **OPTIONS)
    seen = {}
    for ids, positions in windows:
        before = {p: t for p, t in seen.items() if p < positions[0]}
        assert MASK not in before.values()
        seen.update(zip(positions, ids, strict=True))

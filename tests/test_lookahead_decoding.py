"""How branches run: rows of the forward and of the cache. What they decode is compared in test_acceptance_rules.py."""

import pytest
import torch
from transformers import CompileConfig, LogitsProcessor, LogitsProcessorList

from prompts import pad, random_prompts
from tiny_models import FAMILIES, MASK, tiny_model

OPTIONS = {"block_size": 3, "max_new_tokens": 14, "confidence_threshold": 0.6, "block_add_threshold": 0.3}
FULL = {"return_dict_in_generate": True, "output_trace": True}


def num_rows_of(model) -> list[int]:
    """A list that grows by the rows of each forward."""
    num_rows = []
    model.model.register_forward_pre_hook(
        lambda _, __, named: num_rows.append(len(named["cache"].window[0])), with_kwargs=True
    )
    return num_rows


@pytest.mark.parametrize("num_branches", [2, 5])
def test_a_forward_reads_the_branches_of_all_live_rows_and_counts_once(num_branches):
    model = tiny_model(seed=9)
    num_rows = num_rows_of(model)
    first, *others = random_prompts([5, 2, 9, 4], seed=3)
    output = model.generate(**pad([first, first, *others], "left"), **OPTIONS, num_branches=num_branches, **FULL)
    num_forward_passes = output.num_forward_passes.tolist()
    assert len(set(num_forward_passes)) > 2, "rows end at different steps"
    live = [sum(number > step for number in num_forward_passes) for step in range(max(num_forward_passes))]
    assert num_rows == [4, *(number * num_branches for number in live[1:])], "each prompt is read once"


def test_one_branch_is_no_look_ahead():
    model, prompt = tiny_model(), torch.tensor([[1, 2, 3]])
    num_rows = num_rows_of(model)
    output = model.generate(prompt, **OPTIONS, num_branches=1, **FULL)
    assert set(num_rows) == {1}
    assert output.trace == model.generate(prompt, **OPTIONS, **FULL).trace


def test_returned_sequences_are_drawn_apart_behind_one_prefill():
    model = tiny_model()
    num_rows = num_rows_of(model)
    options = {"num_branches": 3, "num_return_sequences": 4, "do_sample": True, "temperature": 2.0}
    output = model.generate(
        torch.tensor([[1, 2, 3]]), **OPTIONS, **options, **FULL, generator=torch.Generator().manual_seed(0)
    )
    assert num_rows[:2] == [1, 12]
    assert len({tuple(row) for row in output.sequences.tolist()}) == 4


def test_all_branches_know_a_prompt_that_fills_more_than_the_first_chunk_of_the_cache():
    model = tiny_model(seed=3, max_position_embeddings=512)
    inputs = pad(random_prompts([300, 7, 254], seed=4), "left")
    cached = model.generate(**inputs, **OPTIONS, num_branches=3, **FULL)
    uncached = model.generate(**inputs, **OPTIONS, num_branches=3, **FULL, use_cache=False)
    assert cached.sequences.equal(uncached.sequences)
    assert [[step["accepted"] for step in trace] for trace in cached.trace] == [
        [step["accepted"] for step in trace] for trace in uncached.trace
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_join_while_others_look_ahead_are_decoded_as_alone(family):
    """Some take the place of a row that ends in its first block, and two with one prompt come at the same time."""
    model = tiny_model(seed=1, family=family)
    prompts = random_prompts([5, 4, 6, 6, 3, 8, 2, 2, 7], seed=6)
    prompts[3], prompts[7] = prompts[2], prompts[6]
    limits = [14, 2, 14, 14, 3, 14, 14, 14, 14]
    options = {**OPTIONS, "num_branches": 4}
    expected = []
    for prompt, limit in zip(prompts, limits, strict=True):
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), **{**options, "max_new_tokens": limit}, eos_token_id=None
        )
        expected.append(output[0, len(prompt) :].tolist())

    def requests():
        for number, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            yield from [None] * (number in (1, 2))
            yield torch.tensor(prompt), limit

    stream = model.generate_stream_batch(requests(), 4, max_prompt_length=8, **options, eos_token_id=None)
    finished = dict(stream)
    assert [finished[number].tolist() for number in range(len(prompts))] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_steps_decode_the_same(family):
    model, inputs = tiny_model(seed=1, family=family), pad(random_prompts([5, 2, 9], seed=7), "left")
    compiled = CompileConfig(backend="eager", mode=None, fullgraph=True)
    torch.compiler.reset()
    with torch.compiler.set_stance("default"):
        output = model.generate(**inputs, **OPTIONS, num_branches=3, **FULL, compile_config=compiled)
    expected = model.generate(**inputs, **OPTIONS, num_branches=3, **FULL)
    assert output.sequences.equal(expected.sequences) and output.trace == expected.trace


def test_processors_get_the_text_of_the_branch():
    texts = []

    class Reader(LogitsProcessor):
        depends_on_previous_tokens = False

        def __call__(self, input_ids, scores):
            texts.extend(input_ids.tolist())
            return scores

    prompt = [1, 2, 3]
    model = tiny_model(seed=2)
    options = {**OPTIONS, "num_branches": 3, "logits_processor": LogitsProcessorList([Reader()])}
    output = model.generate(torch.tensor([prompt]), **options)[0].tolist()
    assert MASK not in sum(texts, [])
    tried_in_vain = [text for text in texts if text != output[: len(text)]]
    assert tried_in_vain and all(text[:3] == prompt for text in tried_in_vain)

"""Verified decoding gives the tokens of the autoregressive model itself, whatever the drafts are.

Drafts come from random weights, or are put in the place of the model's own: all right, all wrong, or a mixture.
"""

import itertools
import random

import pytest
import torch
from d2f_hf.modeling.verified_decoding import VerifiedDecoder
from transformers import CompileConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from causal_models import FAMILIES, MASK, VOCAB_SIZE, models, prompts
from test_autoregressive_decoding import OPTIONS
from tiny_models import letter_tokenizer, tiny_model

all_families = pytest.mark.parametrize("family", FAMILIES)
LAYOUTS = (
    {},
    {"draft_layout": "rolling"},
    {"num_draft_steps": 2},
    {"num_draft_steps": 3, "draft_layout": "rolling"},
)
all_layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=str)
DRAFTERS = ("weights", "adapter", "right", "wrong", "mixed")


def drafter(own, name: str, answers: torch.Tensor | None = None, seed: int = 0) -> pytest.MonkeyPatch:
    """Lets `own` draft as `name` says until it is undone. `answers` `(B, R)` are the right response tokens."""
    patch = pytest.MonkeyPatch()
    if name == "adapter" and own.config.drafter is None:
        own.model.add_drafter({"rank": 4})
        torch.manual_seed(seed)
        for parameter in (p for n, p in own.named_parameters() if "draft" in n):
            parameter.data.normal_(std=0.5)
    if name in ("right", "wrong", "mixed"):
        rng = random.Random(seed)

        def guess(self, logits, row, index):
            right = answers[self.live[row], index.clamp(max=answers.shape[1] - 1)]
            share = {"right": 1.0, "wrong": 0.0, "mixed": 0.8}[name]
            is_right = torch.tensor([rng.random() < share for _ in row], dtype=torch.bool)
            return right.where(is_right, (right + 1) % (VOCAB_SIZE - 3) + 1)

        patch.setattr(VerifiedDecoder, "guess", guess)
    return patch


def both(own, inputs, name="weights", seed=0, layout=(), **options):
    """The outputs of autoregressive and of verified decoding."""
    options = {"max_new_tokens": 24, "return_dict_in_generate": True, **options}
    expected = own.generate(**inputs, decoding="autoregressive", **options)
    answers = expected.sequences[:, inputs["input_ids"].shape[1] :]
    patch = drafter(own, name, answers, seed)
    try:
        found = own.generate(**inputs, decoding="verified", **options, **dict(layout))
    finally:
        patch.undo()
    return expected, found


@pytest.mark.parametrize("name", OPTIONS)
@all_families
def test_ragged_batches_give_the_tokens_of_the_stock_class(family, name):
    stock, own = models(family)
    # transformers before 5.20 counts padding as text, which some processors then weigh.
    not_text = [MASK, VOCAB_SIZE - 2]
    options = {"do_sample": False, "max_new_tokens": 24, "suppress_tokens": not_text, **OPTIONS[name]}
    inputs = prompts([3, 9, 1, 6])
    expected = stock.generate(**inputs, **options)
    answers = expected[:, inputs["input_ids"].shape[1] :]
    for which, layout in zip(DRAFTERS, itertools.cycle(LAYOUTS)):
        patch = drafter(own, which, answers)
        found = own.generate(**inputs, decoding="verified", draft_length=5, **options, **layout)
        patch.undo()
        assert found.tolist() == expected.tolist(), which


@pytest.mark.parametrize("case", range(40))
def test_alone_in_a_batch_in_a_stream_and_without_a_cache(case):
    rng = random.Random(case)
    stock, own = models(rng.choice(list(FAMILIES)), seed=case)
    lengths = [rng.randint(1, 12) for _ in range(rng.randint(1, 5))]
    inputs = prompts(lengths, seed=case)
    ends = rng.choice([None, [11], list(range(20, 30))])
    options = {"max_new_tokens": rng.choice([1, 2, 3, 10, 20]), "eos_token_id": ends, "pad_token_id": 78}
    if rng.random() < 0.5:
        options |= rng.choice(
            [{"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"bad_words_ids": [[5, 6], [7]]}]
        )
    expected = own.generate(**inputs, decoding="autoregressive", **options)
    verified = {
        **options,
        "decoding": "verified",
        "draft_length": rng.choice([1, 2, 7, 40]),
        "draft_layout": rng.choice(["linear", "rolling"]),
        "num_draft_steps": rng.choice([1, 1, 2, 3]),
    }
    width = inputs["input_ids"].shape[1]
    patch = drafter(own, rng.choice(DRAFTERS), expected[:, width:], case)
    assert own.generate(**inputs, **verified).tolist() == expected.tolist()
    assert own.generate(**inputs, **verified, use_cache=False).tolist() == expected.tolist()
    patch.undo()  # the drafts of a stream are for other rows
    rows = [ids[mask.bool()] for ids, mask in zip(*inputs.values(), strict=True)]
    responses = dict(own.generate_stream_batch(rows, rng.randint(1, 4), 12, **verified))
    for b, row in enumerate(rows):
        alone = own.generate(row[None], **verified)[0, len(row) :].tolist()
        assert alone == responses[b].tolist()
        assert expected[b, width:].tolist()[: len(alone)] == alone


def forwards(answer: list[int], guesses: dict[int, list[int]], length: int, limit: int, rolling: bool):
    """A slow oracle: how many forwards an answer takes, and what each draft has right.

    `guesses[k]` is drafted when the masks stand behind k tokens of the answer, and begins with token k + 1.
    """
    num_known, draft, count, kept = 0, [], 0, []
    while num_known < len(answer):
        count += 1
        end = num_known + len(draft)
        num_masks = max(0, min(length, limit - 2 - end)) if rolling or not draft else 0
        right = 0
        while right < len(draft) and draft[right] == answer[num_known + right]:
            right += 1
            if num_known + right == len(answer):
                break
        if draft:
            kept.append(right)
        all_right = right == len(draft)
        num_known += right + 1
        draft = guesses[end][:num_masks] if all_right else []
    return count, kept


@pytest.mark.parametrize("rolling", [False, True])
@pytest.mark.parametrize("name", ["right", "wrong", "mixed"])
@pytest.mark.parametrize("length", [1, 3, 8])
def test_forwards_and_accepted_lengths_are_those_of_the_oracle(name, length, rolling, monkeypatch):
    _, own = models(seed=1)
    limit, prompt = 20, torch.tensor([[5, 6, 7]])
    answer = own.generate(prompt, decoding="autoregressive", max_new_tokens=limit, eos_token_id=None)[0, 3:].tolist()
    rng = random.Random(length)
    share = {"right": 1.0, "wrong": 0.0, "mixed": 0.7}[name]
    guesses = {
        k: [t if rng.random() < share else (t + 1) % 70 + 1 for t in (answer + [1] * 9)[k + 1 : k + 1 + length]]
        for k in range(limit)
    }
    monkeypatch.setattr(
        VerifiedDecoder,
        "guess",
        lambda self, logits, row, index: torch.tensor(guesses[int(index[0]) - 1])[: len(row)],
    )
    found = own.generate(
        prompt,
        decoding="verified",
        max_new_tokens=limit,
        eos_token_id=None,
        draft_length=length,
        draft_layout="rolling" if rolling else "linear",
        return_dict_in_generate=True,
        output_trace=True,
    )
    count, kept = forwards(answer, guesses, length, limit, rolling)
    assert found.sequences[0, 3:].tolist() == answer
    assert found.num_forward_passes.tolist() == [count] and found.accepted_lengths == [kept]
    trace = found.trace[0]
    assert len(trace) == count and sum(len(step["accepted"]) for step in trace) == limit
    assert found.positions_per_forward.item() == pytest.approx(sum(s["window_length"] for s in trace) / count)
    assert [token for step in trace for _, token in step["accepted"]] == answer


def test_right_drafts_take_two_forwards_a_cycle_and_rolling_ones_take_one():
    _, own = models(seed=2)
    inputs = prompts([4])
    options = {"max_new_tokens": 30, "eos_token_id": None}
    draft = {"draft_length": 4}
    _, linear = both(own, inputs, "right", layout=draft, **options)
    _, rolling = both(own, inputs, "right", layout={"draft_layout": "rolling", **draft}, **options)
    assert linear.num_forward_passes.item() == 10  # 6 tokens a cycle
    assert rolling.num_forward_passes.item() == 7  # 1, then 5 a forward
    _, wrong = both(own, inputs, "wrong", layout=draft, **options)
    assert wrong.num_forward_passes.item() == 30


SAMPLING = (
    {"temperature": 0.7},
    {"top_k": 3},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"temperature": 1.5, "top_k": 5, "top_p": 0.9},
)


@pytest.mark.parametrize("name", ["weights", "likely", "unlikely"])
@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
def test_samples_are_distributed_as_those_of_the_model(sampling, name, monkeypatch):
    """A chi-square test of all sequences of three tokens, whose probabilities are computed one by one."""
    stock, own = models()
    vocabulary = list(range(1, 7))
    others = [token for token in range(VOCAB_SIZE) if token not in vocabulary]
    inputs, num_samples = prompts([3]), 3000
    options = {"do_sample": True, "top_k": 0, "eos_token_id": None, "suppress_tokens": others, **sampling}

    def probabilities(texts):
        output = stock.generate(
            torch.cat(
                [
                    inputs["input_ids"].expand(len(texts), -1),
                    torch.tensor(texts, dtype=torch.long).view(len(texts), -1),
                ],
                dim=1,
            ),
            **{**options, "max_new_tokens": 1, "output_scores": True, "return_dict_in_generate": True},
        )
        return output.scores[0].softmax(-1)[:, vocabulary]

    expected = {(): 1.0}
    for _ in range(3):
        texts = list(expected)
        rows = probabilities([list(text) for text in texts])
        expected = {
            (*text, token): expected[text] * float(p)
            for text, row in zip(texts, rows, strict=True)
            for token, p in zip(vocabulary, row, strict=True)
            if p > 0
        }
    if name != "weights":
        best = {"likely": 0, "unlikely": -1}[name]
        order = probabilities([[]])[0].argsort(descending=True)
        token = vocabulary[int(order[best])]
        monkeypatch.setattr(VerifiedDecoder, "guess", lambda self, logits, row, index: torch.full_like(row, token))
    torch.manual_seed(0)
    samples = own.generate(
        **inputs, decoding="verified", max_new_tokens=5, num_return_sequences=num_samples, draft_length=3, **options
    )[:, 3:6]
    counts: dict[tuple[int, ...], int] = {}
    for sample in map(tuple, samples.tolist()):
        counts[sample] = counts.get(sample, 0) + 1
    assert counts.keys() <= expected.keys(), "a sequence came that cannot come"
    # Rare sequences are counted together.
    common = [text for text, p in expected.items() if p * num_samples >= 5]
    cells = [(counts.get(text, 0), expected[text] * num_samples) for text in common]
    rest = num_samples - sum(observed for observed, _ in cells), num_samples - sum(mean for _, mean in cells)
    if rest[1] >= 5:
        cells.append(rest)
    statistic = sum((observed - mean) ** 2 / mean for observed, mean in cells)
    freedom = len(cells) - 1
    assert statistic < freedom + 4.5 * (2 * freedom) ** 0.5 + 8, (statistic, freedom)


@all_layouts
def test_a_seed_repeats_a_sample(layout):
    _, own = models()
    options = {"decoding": "verified", "do_sample": True, "max_new_tokens": 12, **layout}
    samples = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        samples.append(own.generate(**prompts([4, 7]), generator=torch.Generator().manual_seed(7), **options))
    assert samples[0].equal(samples[1])


@pytest.mark.parametrize("tolerance", [0.05, 0.4, 1.0])
def test_a_tolerated_token_has_the_stated_share_of_the_best_probability(tolerance):
    stock, own = models(seed=3)
    inputs, options = prompts([4]), {"max_new_tokens": 24, "eos_token_id": None}
    exact, found = both(
        own, inputs, "adapter", layout={"verification_tolerance": tolerance, "draft_length": 6}, **options
    )
    logits = stock(found.sequences).logits[0, 3:-1].clone()
    logits[:, MASK] = -torch.inf
    probabilities = logits.softmax(-1)
    share = probabilities.gather(-1, found.sequences[0, 4:, None])[:, 0] / probabilities.amax(-1)
    assert (share >= tolerance - 1e-5).all()
    if tolerance == 1.0:
        assert found.sequences.equal(exact.sequences)
    if tolerance == 0.05:
        assert (share < 1).any() and found.num_forward_passes.sum() < 24


def test_forbidden_tokens_are_not_tolerated():
    _, own = models(seed=3)
    patch = drafter(own, "right", torch.full((1, 24), 33))
    options = {"decoding": "verified", "max_new_tokens": 12, "verification_tolerance": 1e-6, "eos_token_id": None}
    assert 33 in own.generate(**prompts([4]), **options)[0, 4:]
    assert 33 not in own.generate(**prompts([4]), **options, suppress_tokens=[33])[0, 4:]
    patch.undo()


@all_families
@all_layouts
def test_scores_are_those_of_the_verifier(family, layout):
    _, own = models(family, seed=2)
    options = {"output_scores": True, "output_logits": True, "eos_token_id": list(range(30, 40)), "draft_length": 4}
    draft = {"draft_length": options.pop("draft_length"), **layout}
    expected, found = both(own, prompts([3, 9, 1, 6]), "mixed", layout=draft, **options)
    assert found.sequences.equal(expected.sequences)
    for name in ("scores", "logits"):
        for ours, theirs in zip(found[name], expected[name], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


@all_families
def test_compiled_steps_and_a_static_cache_give_the_same_tokens(family):
    _, own = models(family)
    inputs, options = prompts([4, 2, 7]), {"max_new_tokens": 12, "eos_token_id": list(range(20, 26))}
    torch.compiler.reset()
    with torch.compiler.set_stance("default"):
        compiled = {"compile_config": CompileConfig(backend="eager", mode=None, fullgraph=True)}
        for extra in (compiled, {"cache_implementation": "static"}):
            expected, found = both(own, inputs, "adapter", layout=extra, **options)
            assert found.sequences.equal(expected.sequences)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
def test_every_attention_gives_the_same_tokens(implementation):
    _, own = models("qwen3")
    own.set_attn_implementation(implementation)
    with torch.compiler.set_stance("force_eager"):
        expected, found = both(own, prompts([3, 9, 1, 6]), "adapter", layout={"draft_layout": "rolling"})
    assert found.sequences.equal(expected.sequences)


class CountCalls(LogitsProcessor):
    """Keeps a state: each call raises another token. It says nothing of what it depends on."""

    def __init__(self):
        self.calls = []

    def __call__(self, input_ids, scores):
        self.calls.append(tuple(input_ids.shape))
        scores = scores.clone()
        scores[:, 1 + len(self.calls) % 50] += 30.0
        return scores


@pytest.mark.parametrize("lengths", [[4], [4, 2, 6]])
@pytest.mark.parametrize("name", ["right", "mixed", "weights"])
def test_a_processor_with_a_state_is_called_as_in_autoregressive_decoding(lengths, name):
    """Each token is asked about once and in order. Rows that it sees together stay of equal length."""
    stock, own = models()
    processors = [CountCalls() for _ in range(3)]
    inputs, options = prompts(lengths), {"max_new_tokens": 12, "eos_token_id": None}
    outputs = []
    for decoding, processor in zip(("autoregressive", "verified"), processors, strict=False):
        patch = drafter(own, name if decoding == "verified" else "none", outputs and outputs[0][:, max(lengths) :])
        outputs.append(
            own.generate(**inputs, decoding=decoding, logits_processor=LogitsProcessorList([processor]), **options)
        )
        patch.undo()
    assert outputs[1].equal(outputs[0]) and processors[1].calls == processors[0].calls


class RecordingStreamer(BaseStreamer):
    def __init__(self):
        self.heard = []

    def put(self, value):
        self.heard += value.flatten().tolist()

    def end(self):
        self.heard.append("end")


@all_layouts
def test_a_streamer_hears_the_tokens_in_their_order(layout):
    _, own = models()
    streamer = RecordingStreamer()
    output = own.generate(**prompts([4]), decoding="verified", max_new_tokens=9, streamer=streamer, **layout)
    assert streamer.heard == [*output[0].tolist(), "end"]


class StopAfter(StoppingCriteria):
    def __init__(self, token_id):
        self.token_id = token_id

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token_id


@pytest.mark.parametrize("name", DRAFTERS)
def test_criteria_and_stop_strings_end_rows_inside_a_draft(name):
    stock, own = models(seed=1)
    tokenizer, inputs = letter_tokenizer(), prompts([4, 2, 6])
    options = {"suppress_tokens": [MASK, *range(29, VOCAB_SIZE)], "eos_token_id": VOCAB_SIZE - 1, "pad_token_id": 78}
    free = own.generate(**inputs, decoding="autoregressive", max_new_tokens=24, **options)
    stops = [tokenizer.decode(free[row, 6 + at : 8 + at]) for row, at in ((0, 3), (1, 7))]
    expected, found = both(own, inputs, name, **options, stop_strings=stops, tokenizer=tokenizer)
    assert found.sequences.equal(expected.sequences) and (found.sequences[:2] == 78).any()
    criteria = StoppingCriteriaList([StopAfter(int(free[2, 11]))])
    expected, found = both(own, inputs, name, **options, stopping_criteria=criteria)
    assert found.sequences.equal(expected.sequences)


@all_layouts
def test_an_interrupted_step_of_a_stream_loses_nothing(layout, monkeypatch):
    _, own = models()
    options = {"max_new_tokens": 10, "eos_token_id": None}
    expected = own.generate(torch.tensor([[5, 6, 7]]), decoding="autoregressive", **options)[0, 3:].tolist()
    for interrupted in (1, 2, 3):
        stream = own.open_stream(2, 12, decoding="verified", draft_length=3, **options, **layout)
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
        assert found == {0: expected, 1: expected}


def test_several_responses_share_the_forward_of_their_prompt():
    _, own = models()
    calls = []
    own.model.register_forward_pre_hook(
        lambda _, __, inputs: calls.append(inputs["input_ids"].shape), with_kwargs=True
    )
    output = own.generate(
        **prompts([5]), decoding="verified", do_sample=True, num_return_sequences=6, max_new_tokens=12, draft_length=4
    )
    assert output.shape == (6, 17) and len({tuple(row.tolist()) for row in output}) > 1
    assert calls[0] == (1, 9)


def test_a_mask_token_in_the_prompt_is_text():
    """It is read by the model's own weights. Only the masks of a draft see the drafter."""
    stock, own = models()
    inputs = {"input_ids": torch.tensor([[5, MASK, 20, MASK, 9, MASK]]), "attention_mask": torch.ones(1, 6).long()}
    expected = stock.generate(**inputs, do_sample=False, max_new_tokens=12, suppress_tokens=[MASK], eos_token_id=None)
    drafter(own, "adapter")
    found = own.generate(**inputs, decoding="verified", max_new_tokens=12, eos_token_id=None)
    assert found.equal(expected)


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_a_model_without_a_causal_mode_is_refused(family):
    with pytest.raises(ValueError, match="has_causal_mode"):
        tiny_model(family=family).generate(torch.tensor([[1, 2]]), decoding="verified", max_new_tokens=4)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"draft_length": 0}, "draft_length"),
        ({"draft_length": 2.5}, "draft_length"),
        ({"num_draft_steps": 0}, "num_draft_steps"),
        ({"draft_layout": "tree"}, "draft_layout"),
        ({"verification_tolerance": -0.1}, "verification_tolerance"),
        ({"verification_tolerance": 1.5}, "verification_tolerance"),
        ({"verification_tolerance": float("nan")}, "verification_tolerance"),
        ({"confidence_threshold": 0.5}, "confidence_threshold"),
        ({"block_size": 4}, "block_size"),
        ({"steps": 4}, "steps"),
        ({"num_branches": 2}, "num_branches"),
        ({"num_beams": 2}, "num_beams"),
        ({"guidance_scale": 2.0}, "guidance_scale"),
    ],
    ids=str,
)
def test_what_it_does_not_use_is_refused_by_name_before_any_forward(options, named):
    _, own = models()
    calls = []
    own.model.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(ValueError, match=named):
        own.generate(**prompts([3]), decoding="verified", max_new_tokens=4, **options)
    assert calls == []


@pytest.mark.parametrize("name", ["draft_length", "num_draft_steps", "draft_layout", "verification_tolerance"])
@pytest.mark.parametrize("decoding", ["d2f", "autoregressive", "vanilla", "fast_dllm"])
def test_its_options_are_refused_by_other_decodings(name, decoding):
    _, own = models()
    value = {"draft_layout": "rolling", "verification_tolerance": 0.5}.get(name, 2)
    with pytest.raises(ValueError, match=name):
        own.generate(**prompts([3]), decoding=decoding, max_new_tokens=4, **{name: value})

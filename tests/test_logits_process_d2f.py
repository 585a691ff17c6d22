"""Logits processors on masked tokens anywhere in a response."""

import logging

import pytest
import torch
from d2f_hf.modeling.logits_process_d2f import depends_on_previous_tokens, is_known
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
)
from transformers.generation import EosTokenCriteria, UnbatchedClassifierFreeGuidanceLogitsProcessor

from prompts import pad, random_prompts
from tiny_models import BLOCK_DECODINGS, EOS, MASK, PAD, VOCAB_SIZE, ScriptedModel, sure_of, tiny_model


class Recorder(LogitsProcessor):
    depends_on_previous_tokens = False

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


def test_a_decoded_token_is_judged_by_the_text_in_front_of_it():
    recorder = Recorder()
    model = ScriptedModel(sure_of([0, 1, 2, 3, 4], {2: 9}))
    options = {"max_new_tokens": 4, "block_size": 4, "remask_threshold": 0.5}
    model.generate(torch.tensor([[0]]), logits_processor=[recorder], **options)
    assert recorder.seen == [[[0]] * 4, [[0]], [[0, 1]] * 3]


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


@pytest.mark.parametrize("decoding", BLOCK_DECODINGS)
def test_the_repetition_penalty_equals_the_hand_computation(decoding):
    """Penalty 2 halves the logits 4, 3, 2.5 of seen tokens: 2, 3, 2.5, then 2, 1.5, 2.5, then 2, 1.5, 1.25."""
    logits = torch.zeros(9, VOCAB_SIZE)
    logits[:, [1, 2, 3]] = torch.tensor([4.0, 3.0, 2.5])
    options = {"max_new_tokens": 4, "repetition_penalty": 2.0, "decoding": decoding}
    one_by_one = ScriptedModel(logits).generate(torch.tensor([[1]]), block_size=1, **options)
    assert one_by_one.tolist() == [[1, 2, 3, 1, 1]]
    at_once = {"steps": 1} if decoding == "vanilla" else {"confidence_threshold": 0.0}
    together = ScriptedModel(logits).generate(torch.tensor([[1]]), block_size=4, **at_once, **options)
    assert together.tolist() == [[1, 2, 2, 2, 2]], "all from the prefix before this forward"


def test_the_repetition_penalty_of_a_padded_row_does_not_count_its_padding():
    logits = torch.zeros(9, VOCAB_SIZE)
    logits[:, [PAD, 2]] = torch.tensor([4.0, 3.0])
    output = ScriptedModel(logits).generate(**pad([[1], [1, 5]], "left"), max_new_tokens=1, repetition_penalty=2.0)
    assert output[:, -1].tolist() == [PAD, PAD]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("option", ["min_new_tokens", "min_length"])
def test_min_new_tokens_forbids_the_eos_before_that_position_only(side, option):
    """A model that says EOS everywhere, next best token 3: the first four positions must be something else."""
    logits = torch.zeros(9, VOCAB_SIZE)
    logits[:, [EOS, 3]] = torch.tensor([25.0, 15.0])
    for prompts in ([[1]], [[1], [1, 2, 5]]):
        width = max(map(len, prompts))
        minimum = {option: 4 if option == "min_new_tokens" else width + 4}
        model = ScriptedModel(logits)
        output = model.generate(**pad(prompts, side), max_new_tokens=6, block_size=3, **minimum)
        assert output[:, width:].tolist() == [[3, 3, 3, 3, EOS]] * len(prompts)
        assert len(model.calls) == 2, "the position of a token decides, not how much is decoded before it"


def test_other_length_processors_count_alike_in_rows_of_all_lengths():
    logits = torch.zeros(9, VOCAB_SIZE)
    logits[:, 3] = 15.0
    options = {"max_new_tokens": 4, "block_size": 1, "forced_eos_token_id": EOS}
    for prompts in ([[1]], [[1], [1, 2, 5]]):
        output = ScriptedModel(logits).generate(**pad(prompts, "left"), **options)
        assert output[:, max(map(len, prompts)) :].tolist() == [[3, 3, 3, EOS]] * len(prompts)


@pytest.mark.parametrize("side", ["left", "right"])
def test_length_processors_go_by_the_position_of_a_token_when_many_are_decoded_at_once(side):
    """`begin_suppress_tokens` forbids one at the first position, `forced_eos_token_id` says what is at the last."""
    logits = torch.zeros(12, VOCAB_SIZE)
    logits[:, [3, 4]] = torch.tensor([25.0, 15.0])
    for prompts in ([[1]], [[1], [1, 2, 5]]):
        model = ScriptedModel(logits)
        output = model.generate(
            **pad(prompts, side), max_new_tokens=4, block_size=4, forced_eos_token_id=EOS, begin_suppress_tokens=[3]
        )
        assert output[:, max(map(len, prompts)) :].tolist() == [[4, 3, 3, EOS]] * len(prompts)
        assert len(model.calls) == 1


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_prefix_constraint_holds_for_every_token_in_every_row(side):
    """After an even token its successor, after an odd one anything even; each row has its own first token."""
    model, width = tiny_model(seed=2), 5
    asked = []

    def allowed(row: int, text: torch.LongTensor) -> list[int]:
        asked.append(row)
        assert len(text) >= width
        if len(text) == width:
            return [10 + 2 * row]
        last = int(text[-1])
        return [last + 1] if last % 2 == 0 else list(range(0, 36, 2))

    inputs = pad(random_prompts([5, 2, 4], seed=1), side)
    output = model.generate(
        **inputs, max_new_tokens=9, block_size=3, prefix_allowed_tokens_fn=allowed, confidence_threshold=0.0
    )
    responses = output[:, width:].tolist()
    for row, tokens in enumerate(responses):
        assert tokens[0] == 10 + 2 * row and len(tokens) == 9
        for last, token in zip(tokens, tokens[1:], strict=False):
            assert token == last + 1 if last % 2 == 0 else token % 2 == 0
    assert set(asked) == {0, 1, 2}


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_prefix_constraint_sees_the_padding_of_its_row_and_is_not_asked_once_that_has_ended(side):
    texts = {0: [], 1: []}

    def allowed(row: int, text: torch.LongTensor) -> list[int]:
        texts[row].append(text.tolist())
        return [EOS if row == 1 and len(text) == 4 else 7]

    inputs = pad([[1, 2, 3], [4]], side)
    tiny_model().generate(**inputs, max_new_tokens=3, prefix_allowed_tokens_fn=allowed)
    first, second = inputs["input_ids"].tolist()
    assert texts == {0: [first, [*first, 7], [*first, 7, 7]], 1: [second, [*second, 7]]}


def test_a_prefix_constraint_of_a_request_is_asked_about_prompt_0():
    asked = []
    requests = [
        (torch.tensor([1]), {"prefix_allowed_tokens_fn": lambda row, text, n=n: asked.append(row) or [n]})
        for n in (5, 6, 7)
    ]
    stream = dict(tiny_model().generate_stream_batch(requests, 2, 3, max_new_tokens=4))
    assert [stream[n].tolist() for n in range(3)] == [[5] * 4, [6] * 4, [7] * 4] and set(asked) == {0}


def test_a_prefix_constraint_that_allows_nothing_is_an_error():
    with pytest.raises(ValueError, match="`prefix_allowed_tokens_fn` returned an empty list"):
        tiny_model().generate(torch.tensor([[1]]), max_new_tokens=2, prefix_allowed_tokens_fn=lambda row, text: [])


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "top_k": 2},
        {"do_sample": True, "top_p": 0.3},
        {"do_sample": True, "num_return_sequences": 3},
        {"forced_eos_token_id": EOS},
    ],
    ids=str,
)
def test_a_prefix_constraint_goes_with_other_processors_and_knows_its_prompt(options):
    """It comes before the warpers, which would else leave none of its tokens, and a forced EOS comes after it."""
    torch.manual_seed(0)
    inputs = pad([[1, 2], [3]], "left")
    output = tiny_model(seed=2).generate(
        **inputs, max_new_tokens=5, prefix_allowed_tokens_fn=lambda prompt, text: [[5, 6], [7, 8]][prompt], **options
    )
    responses = output[:, 2:].tolist()
    copies = options.get("num_return_sequences", 1)
    assert len(responses) == 2 * copies
    for row, tokens in enumerate(responses):
        if "forced_eos_token_id" in options:
            assert tokens.pop() == EOS
        assert set(tokens) <= {5, 6} if row < copies else set(tokens) <= {7, 8}


def test_the_callers_own_stock_processors_and_criteria_do_what_they_say():
    """They were taken for those that `generate` makes itself, and left out."""
    logits = torch.zeros(20, VOCAB_SIZE)
    logits[:, [EOS, 3]] = torch.tensor([25.0, 15.0])
    prompts = pad([[1], [1, 2]], "left")
    for own, length in ((MinNewTokensLengthLogitsProcessor(2, 3, EOS), 4), (MinLengthLogitsProcessor(7, EOS), 6)):
        output = ScriptedModel(logits).generate(**prompts, max_new_tokens=9, logits_processor=[own])
        assert output[:, 2:].tolist() == [[3] * (length - 1) + [EOS]] * 2
    constraint = PrefixConstrainedLogitsProcessor(lambda row, text: [[5], [6]][row], 1)
    output = tiny_model().generate(**prompts, max_new_tokens=4, logits_processor=[constraint])
    assert output[:, 2:].tolist() == [[5] * 4, [6] * 4]
    model, prompt = ScriptedModel(sure_of(range(12))), torch.tensor([[0]])
    for criterion, tokens in ((MaxLengthCriteria(5), [0, 1, 2, 3, 4]), (EosTokenCriteria(7), list(range(8)))):
        output = model.generate(prompt, max_new_tokens=11, stopping_criteria=StoppingCriteriaList([criterion]))
        assert output[0].tolist() == tokens


REPEAT = torch.zeros(20, VOCAB_SIZE)
REPEAT[:, [3, 4, 5]] = torch.tensor([25.0, 15.0, 10.0])


def test_a_bad_word_of_several_tokens_never_comes_out():
    """The model wants 3 everywhere, and would decode all positions at once."""
    output = ScriptedModel(REPEAT).generate(
        torch.tensor([[0, 3]]), max_new_tokens=6, block_size=6, bad_words_ids=[[3, 3]]
    )
    assert output.tolist() == [[0, 3, 4, 3, 4, 3, 4, 3]]
    single = ScriptedModel(REPEAT)
    assert single.generate(torch.tensor([[0]]), max_new_tokens=6, bad_words_ids=[[3]]).tolist() == [[0] + [4] * 6]
    assert len(single.calls) == 2, "a single token needs no waiting: two blocks, opened one after the other"


def test_no_n_gram_is_repeated():
    output = ScriptedModel(REPEAT).generate(
        torch.tensor([[0]]), max_new_tokens=7, block_size=7, no_repeat_ngram_size=2
    )
    tokens = output[0].tolist()
    pairs = list(zip(tokens, tokens[1:], strict=False))
    assert len(set(pairs)) == len(pairs) and tokens[:3] == [0, 3, 3]


@pytest.mark.parametrize(
    "options",
    [
        {"suppress_tokens": [3, 5]},
        {"top_k": 3, "do_sample": True},
        {"top_p": 0.7, "do_sample": True},
        {"top_h": 0.5, "do_sample": True},
        {"min_p": 0.2, "do_sample": True},
        {"typical_p": 0.6, "do_sample": True},
        {"epsilon_cutoff": 0.02, "do_sample": True},
        {"eta_cutoff": 0.02, "do_sample": True},
        {"temperature": 0.3, "do_sample": True},
        {"renormalize_logits": True, "temperature": 3.0, "do_sample": True},
    ],
    ids=str,
)
def test_stock_processors_leave_what_they_leave_a_stock_model(options):
    """The scores that tokens are chosen from are the processors' of transformers, called one text at a time."""
    model = tiny_model(seed=4)
    inputs = pad(random_prompts([3, 6], seed=3), "left")
    torch.manual_seed(0)
    output = model.generate(
        **inputs, max_new_tokens=6, return_dict_in_generate=True, output_scores=True, output_logits=True, **options
    )
    config, _ = model._prepare_generation_config(None, max_new_tokens=6, **options)
    model._prepare_special_tokens(config, device="cpu")
    stock = model._get_logits_processor(config, input_ids_seq_length=6, device="cpu")
    assert len(stock) > 0
    compared = 0
    for position, (logits, scores) in enumerate(zip(output.logits, output.scores, strict=True)):
        for row in range(2):
            if not scores[row].any():
                continue  # behind the end of the row
            own = logits[row : row + 1].clone()
            own[:, MASK] = -torch.inf
            torch.testing.assert_close(stock(output.sequences[row : row + 1, : 6 + position], own)[0], scores[row])
            compared += 1
    assert compared > 6


# ---- processors of the caller ----


class NotTwice(LogitsProcessor):
    """Forbids the token right before, and says nothing of itself."""

    def __call__(self, input_ids, scores):
        return scores.scatter(1, input_ids[:, -1:], -torch.inf)


class Matcher(LogitsProcessor):
    """Constrained decoding as engines of grammars do it (xgrammar): a state per row, and a call per token.

    After an even token comes a token of the class of the row, after an odd one anything even.
    """

    def __init__(self):
        self.states, self.lengths, self.num_rows = [], [], None

    def __call__(self, input_ids, scores):
        if self.num_rows is None:
            self.num_rows = len(input_ids)
            self.states = [None] * self.num_rows
            self.width = input_ids.shape[1]
        assert len(input_ids) == len(scores) == self.num_rows, "the whole batch, also where rows have ended"
        assert input_ids.shape[1] == self.width + len(self.lengths), "once per token"
        self.lengths.append(input_ids.shape[1])
        if len(self.lengths) > 1:
            for row, token in enumerate(input_ids[:, -1].tolist()):
                if self.states[row] == "done":
                    assert token == PAD
                else:
                    assert token in self.allowed(row), "each token is one that was allowed"
                    self.states[row] = "done" if token == EOS else token
        for row in range(self.num_rows):
            forbidden = sorted(set(range(VOCAB_SIZE)) - set(self.allowed(row)))
            scores[row, forbidden] = -torch.inf  # in place
        return scores

    def allowed(self, row):
        state = self.states[row]
        if state == "done":
            return [PAD]
        if state is None or state % 2:
            return list(range(0, 36, 2))
        return [1 + 2 * row, 11 + 2 * row, EOS]


PACES = {
    "paper": {},
    "eager": {"confidence_threshold": 0.0, "block_add_threshold": 0.0, "block_activation_threshold": 0.0},
    "one block": {"max_active_blocks": 1, "block_add_threshold": 1.0},
    "credit": {"acceptance_rule": "credit"},
    "entropy": {"acceptance_rule": "entropy_bound", "entropy_bound": 5.0},
    "factor": {"acceptance_rule": "factor", "confidence_factor": 5.0},
    "semi": {"semi_activated_threshold": 0.0},
    "uncached": {"use_cache": False},
    "static": {"cache_implementation": "static"},
}


@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_processor_with_a_state_per_row_is_called_as_transformers_calls_it(pace, side):
    """All rows are at the same token, whatever the rules would accept; rows that have ended are filled up."""
    options = {"max_new_tokens": 13, "block_size": 3, "do_sample": True, "num_return_sequences": 2, "top_k": 0}
    num_lengths = set()
    for seed in range(3):
        matcher = Matcher()
        output = tiny_model(seed=seed).generate(
            **pad(random_prompts([4, 2, 4], seed=seed), side),
            **options,
            **PACES[pace],
            logits_processor=LogitsProcessorList([matcher]),
            return_dict_in_generate=True,
            generator=torch.Generator().manual_seed(seed),
        )
        assert matcher.num_rows == 6
        for row, tokens in enumerate(output.sequences[:, 4:].tolist()):
            tokens = tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens
            assert output.num_forward_passes[row] == len(tokens), "one token per forward"
            num_lengths.add(len(tokens))
            for before, token in zip([1, *tokens], tokens, strict=False):
                assert token % 2 == 0 if before % 2 else token in (1 + 2 * row, 11 + 2 * row, EOS)
    assert len(num_lengths) > 3, "rows end at different tokens"


def test_what_a_processor_forbids_behind_the_token_right_before_never_comes_out():
    """An undeclared processor was asked with the wrong token right before; a third of the pairs violated it."""
    for prompts in (random_prompts([9, 9], seed=1), random_prompts([9, 4, 1], seed=2)):
        for seed in range(3):
            output = tiny_model(seed=seed).generate(
                **pad(prompts, "left"), max_new_tokens=24, eos_token_id=None, confidence_threshold=0.0,
                logits_processor=LogitsProcessorList([NotTwice()]),
            )[:, 8:]  # fmt: skip
            assert (output[:, 1:] != output[:, :-1]).all()


@pytest.mark.parametrize("declared", [None, True])
def test_a_processor_of_the_caller_sees_the_batch_with_its_padding(declared):
    recorder = Recorder()
    recorder.depends_on_previous_tokens = declared
    script = torch.stack([sure_of([0, 7, 2, 3, 4, 5, 6])(0), sure_of([0, 1, 2, 3, EOS, 5, 6])(0)])
    for side, given in (("left", [PAD, PAD, 0]), ("right", [0, PAD, PAD])):
        recorder.seen.clear()
        output = ScriptedModel(script).generate(
            **pad([[0], [0, 1, 2]], side), max_new_tokens=4, block_size=4, logits_processor=[recorder]
        )
        assert recorder.seen == [
            [given, [0, 1, 2]],
            [[*given, 7], [0, 1, 2, 3]],
            [[*given, 7, 2], [0, 1, 2, 3, EOS]],
            [[*given, 7, 2, 3], [0, 1, 2, 3, EOS, PAD]],
        ]
        assert output[:, 3:].tolist() == [[7, 2, 3, 4], [3, EOS, PAD, PAD]]


def test_a_processor_that_declares_itself_decodes_at_full_speed_and_one_that_says_nothing_is_told_how(caplog):
    class Neutral(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores

    class Mine(TemperatureLogitsWarper):
        def __call__(self, input_ids, scores):
            return scores

    def function(input_ids, scores):
        return scores

    calls = {}
    logger = logging.getLogger("d2f_hf")
    logger.addHandler(caplog.handler)
    try:
        for processor in (Neutral(), Mine(2.0), function):
            model = ScriptedModel(sure_of(range(9)))
            caplog.clear()
            model.generate(torch.tensor([[0]]), max_new_tokens=8, block_size=8, logits_processor=[processor])
            name = getattr(processor, "__name__", type(processor).__name__)
            assert f"{name} does not say whether" in caplog.text
            assert "depends_on_previous_tokens = False" in caplog.text
            calls[name] = len(model.calls)
            caplog.clear()
            processor.depends_on_previous_tokens = False
            model = ScriptedModel(sure_of(range(9)))
            model.generate(torch.tensor([[0]]), max_new_tokens=8, block_size=8, logits_processor=[processor])
            assert len(model.calls) == 1 and caplog.text == ""
    finally:
        logger.removeHandler(caplog.handler)
    assert calls == {"Neutral": 8, "Mine": 8, "function": 8}


@pytest.mark.parametrize(
    "options",
    [{"decoding": "vanilla"}, {"decoding": "fast_dllm"}, {"num_branches": 2}, {"remask_threshold": 0.5}],
    ids=str,
)
def test_decoding_in_another_order_refuses_a_processor_that_may_need_the_token_right_before(options):
    model, prompt = tiny_model(), torch.tensor([[1, 2]])
    before = model.generate(prompt, max_new_tokens=4, **options)
    for declared in (None, True):
        processor = NotTwice()
        processor.depends_on_previous_tokens = declared
        with pytest.raises(ValueError, match="(?s)processors of your own.*depends_on_previous_tokens = False"):
            model.generate(prompt, max_new_tokens=4, logits_processor=[processor], **options)
    processor.depends_on_previous_tokens = False
    model.generate(prompt, max_new_tokens=4, logits_processor=[processor], **options)
    assert model.generate(prompt, max_new_tokens=4, **options).equal(before)


def test_what_generate_makes_of_its_own_options_is_known():
    """Each option that looks at the scores alone decodes at full speed."""
    options = {
        "do_sample": True, "temperature": 0.5, "top_k": 5, "top_p": 0.9, "top_h": 0.9, "min_p": 0.01, "typical_p": 0.9,
        "epsilon_cutoff": 0.01, "eta_cutoff": 0.01, "suppress_tokens": [5], "begin_suppress_tokens": [6],
        "exponential_decay_length_penalty": (3, 1.1), "forced_eos_token_id": EOS, "remove_invalid_values": True,
        "renormalize_logits": True, "repetition_penalty": 1.1, "sequence_bias": {(3,): -5.0}, "bad_words_ids": [[4]],
        "min_new_tokens": 2,
    }  # fmt: skip
    model = ScriptedModel(sure_of(range(7, 16)))
    config, _ = model._prepare_generation_config(None, max_new_tokens=8, **options)
    model._prepare_special_tokens(config, device="cpu")
    processors = model._get_logits_processor(
        config, input_ids_seq_length=1, device="cpu", logits_processor=[], prefix_allowed_tokens_fn=None
    )
    assert len(processors) > 15
    assert all(is_known(processor) and not depends_on_previous_tokens(processor) for processor in processors)


def test_a_processor_that_calls_the_model_is_refused():
    model = tiny_model()
    with pytest.raises(ValueError, match="`logits_processor` must not call the model.*`guidance_scale`"):
        processor = UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, model)
        model.generate(torch.tensor([[1]]), max_new_tokens=2, logits_processor=[processor])


def test_a_declaration_is_true_or_false():
    processor = NotTwice()
    processor.depends_on_previous_tokens = "no"
    with pytest.raises(ValueError, match="`depends_on_previous_tokens`.*NotTwice says 'no'"):
        tiny_model().generate(torch.tensor([[1]]), max_new_tokens=2, logits_processor=[processor])


def test_each_request_of_a_stream_may_have_a_processor_with_a_state():
    model, prompts = tiny_model(seed=1), [torch.tensor(prompt) for prompt in random_prompts([4, 2, 5, 1], seed=3)]
    options = {"max_new_tokens": 9, "block_size": 3, "confidence_threshold": 0.0}
    requests = [(prompt, {"logits_processor": [Matcher()]}) for prompt in prompts]
    stream = dict(model.generate_stream_batch([*requests, prompts[0]], 3, 5, **options))
    for number, prompt in enumerate(prompts):
        ids, alone = prompt[None], [Matcher()]
        output = model.generate(ids, attention_mask=torch.ones_like(ids), **options, logits_processor=alone)
        assert stream[number].equal(output[0, len(prompt) :])
    options["logits_processor"] = [Matcher()]
    with pytest.raises(ValueError, match="(?s)`logits_processor`.*Matcher does not say"):
        request = (prompts[0], {"num_return_sequences": 2, "do_sample": True, **options})
        list(model.generate_stream_batch([request], 3, 5, max_new_tokens=9, block_size=3))


def test_requests_share_a_processor_that_declares_itself_and_no_other():
    """Each request is asked about alone; one that counts on its own batch would mix them up."""
    model, prompts = tiny_model(seed=1), random_prompts([4, 2, 5], seed=3)
    options = {"max_new_tokens": 7, "block_size": 3, "eos_token_id": None}
    requests = [torch.tensor(prompt) for prompt in prompts]
    with pytest.raises(ValueError, match="`logits_processor`.*NotTwice does not say"):
        list(model.generate_stream_batch(requests, 2, 5, **options, logits_processor=[NotTwice()]))
    for declared in (True, False):
        processor = NotTwice()
        processor.depends_on_previous_tokens = declared
        stream = dict(model.generate_stream_batch(requests, 2, 5, **options, logits_processor=[processor]))
        for number, prompt in enumerate(requests):
            alone = model.generate(
                prompt[None], attention_mask=torch.ones(1, len(prompt)), **options, logits_processor=[processor]
            )
            assert stream[number].equal(alone[0, len(prompt) :])


@pytest.mark.parametrize("declared", [None, True, False])
def test_what_a_processor_does_in_place_leaves_the_logits_that_are_kept_alone(declared):
    class InPlace(LogitsProcessor):
        depends_on_previous_tokens = declared

        def __call__(self, input_ids, scores):
            scores.fill_(-3.0)
            scores[:, 5] = 4.0
            return scores

    model, prompt = tiny_model(), torch.tensor([[1, 2], [3, 4]])
    kept = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True, "max_new_tokens": 3}
    output = model.generate(prompt, **kept, logits_processor=[InPlace()])
    assert output.sequences[:, 2:].tolist() == [[5] * 3] * 2
    for scores, logits in zip(output.scores, output.logits, strict=True):
        assert (scores[:, 5] == 4.0).all() and not (logits == -3.0).any() and logits.isfinite().all()


def test_processors_of_all_kinds_are_applied_in_their_order():
    def doubling(input_ids, scores):
        return scores * 2

    def shifting(input_ids, scores):
        return scores + 1

    doubling.depends_on_previous_tokens, shifting.depends_on_previous_tokens = True, False
    options = {"max_new_tokens": 4, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    temperature = TemperatureLogitsWarper(0.5)
    for processors, expected in (
        ([doubling, shifting], lambda x: x * 2 + 1),
        ([shifting, doubling], lambda x: (x + 1) * 2),
        ([shifting, temperature, doubling], lambda x: (x + 1) * 4),
        ([MinLengthLogitsProcessor(9, EOS), doubling, temperature, shifting], lambda x: x * 4 + 1),
    ):
        output = tiny_model().generate(torch.tensor([[1, 2], [3, 4]]), **options, logits_processor=processors)
        for scores, logits in zip(output.scores, output.logits, strict=True):
            torch.testing.assert_close(scores[:, :EOS], expected(logits[:, :EOS]))


def test_a_processor_that_fails_leaves_the_model_usable():
    def broken(input_ids, scores):
        raise RuntimeError("no grammar")

    model, prompt = tiny_model(), torch.tensor([[1, 2]])
    expected = model.generate(prompt, max_new_tokens=4)
    for declared in (None, False):
        broken.depends_on_previous_tokens = declared
        with pytest.raises(RuntimeError, match="no grammar"):
            model.generate(prompt, max_new_tokens=4, logits_processor=[broken])
    assert model.generate(prompt, max_new_tokens=4).equal(expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("declared", [None, True, False])
def test_a_processor_may_compute_in_another_dtype(declared, dtype):
    """One that gave float64 or bfloat16 scores ended in a RuntimeError, and in a stream took all requests with it."""

    def wide(input_ids, scores):
        return scores.to(dtype)

    wide.depends_on_previous_tokens = declared
    model, prompts = tiny_model(), torch.tensor([[1, 2], [3, 4]])
    options = {"max_new_tokens": 6, "pad_token_id": PAD, "eos_token_id": None}
    if dtype == torch.float64:
        narrow = Recorder()
        narrow.depends_on_previous_tokens = declared
        expected = model.generate(prompts, **options, logits_processor=[narrow])
        assert model.generate(prompts, **options, logits_processor=[wide]).equal(expected)
    stream = model.open_stream(2, 2, **options)
    stream.add(prompts[0])
    stream.add(prompts[1], logits_processor=[wide])
    updates = [update for _ in range(20) for update in stream.step()]
    assert not stream.has_unfinished and all(update.error is None for update in updates)
    told = torch.cat([update.tokens for update in updates if update.request == 0])
    assert told.equal(model.generate(prompts[:1], **options)[0, 2:])


@pytest.mark.parametrize("result", [lambda s: None, lambda s: s[:, :20], lambda s: s[:0], lambda s: s.tolist()])
@pytest.mark.parametrize("declared", [None, True, False])
def test_a_processor_that_gives_no_scores_is_an_error_that_names_it(declared, result):
    def short(input_ids, scores):
        return result(scores)

    short.depends_on_previous_tokens = declared
    with pytest.raises(ValueError, match="`logits_processor` must return scores of the shape.*short gave"):
        tiny_model().generate(torch.tensor([[1, 2], [3, 4]]), max_new_tokens=4, logits_processor=[short])

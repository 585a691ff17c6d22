"""The tokens of a batch while they are decoded, and what streamers and stopping criteria are told about them."""

import threading

import pytest
import torch
from d2f_hf.modeling.response import NO_TOKEN, Response
from transformers import (
    LogitsProcessor,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    TextDiffusionStreamer,
)
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from prompts import pad, random_prompts
from tiny_models import EOS, LETTERS, MASK, PAD, VOCAB_SIZE, ScriptedModel, letter_tokenizer, sure_of, tiny_model

# B rows, P prompt tokens, t response tokens


class Told(TextDiffusionStreamer):
    def __init__(self):
        self.events = []

    def put(self, value):
        self.events.append(("put", value.tolist()))

    def put_draft(self, value, **kwargs):
        self.events.append(("draft", value.tolist()))

    def end(self):
        pass


class Asked(StoppingCriteria):
    """Remembers the texts it is asked about, and answers with what `answers` gives for the number of tokens."""

    def __init__(self, width=0, answers=None):
        self.width, self.answers, self.texts = width, answers or {}, []

    def __call__(self, input_ids, scores, **kwargs):
        self.texts.append(input_ids.tolist())
        return self.answers.get(input_ids.shape[1] - self.width, False)


def response_of(prompts, max_new_tokens=4, criteria=(), **options) -> Response:
    """Prompts padded on the right by 0, as a loop has them."""
    width = max(map(len, prompts))
    ids = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts])
    defaults = {"min_new_tokens": 0, "eos_token_ids": torch.tensor([EOS]), "streamer": None, "pad_token_id": PAD}
    return Response(
        prompts=ids,
        prompt_lengths=torch.tensor([len(prompt) for prompt in prompts]),
        max_new_tokens=max_new_tokens,
        mask_token_id=MASK,
        stopping_criteria=StoppingCriteriaList(criteria),
        **{**defaults, **options},
    )


def decode(response: Response, tokens: dict[tuple[int, int], int], **values) -> None:
    """Accepts `tokens` by row and index."""
    row, index = torch.tensor(list(tokens)).T
    response.accept(torch.ones_like(row, dtype=torch.bool), row, index, torch.tensor(list(tokens.values())), **values)


def publish(response: Response, shown: int = 0, rows: torch.LongTensor | None = None, **options) -> None:
    shown_of_rows = torch.full_like(response.limits if rows is None else rows, shown)
    response.publish(shown_of_rows, rows=rows, **options)


# ---- tokens ----


def test_a_row_is_its_prompt_its_response_and_nothing_behind():
    response = response_of([[1, 2], [3]], max_new_tokens=3)
    assert response.sequences.tolist() == [[1, 2, MASK, MASK, MASK], [3, MASK, MASK, MASK, MASK]]
    decode(response, {(0, 0): 5, (1, 2): 6})
    assert response.tokens().tolist() == [[5, MASK, MASK], [MASK, MASK, 6]]
    assert response.tokens(torch.tensor([1]), 2).tolist() == [[MASK, MASK]]
    assert response.is_masked().tolist() == [[False, True, True], [True, True, False]]
    assert response.prefix_length().tolist() == [1, 0]
    decode(response, {(1, 0): EOS})
    assert response.first_eos().tolist() == [3, 0] and response.prefix_length().tolist() == [1, 1]
    response.remask(torch.tensor([0]), torch.tensor([0]))
    assert response.tokens().tolist()[0] == [MASK] * 3 and response.was_remasked.tolist()[0] == [True, False, False]


def test_only_accepted_tokens_are_put_and_their_values_kept():
    response = response_of([[1], [2]], max_new_tokens=2, keep=("scores",))
    scores = torch.arange(6.0).view(3, 2)
    row, index = torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1])
    response.accept(torch.tensor([True, False, True]), row, index, torch.tensor([7, 8, 9]), scores=scores)
    assert response.tokens().tolist() == [[7, MASK], [MASK, 9]]
    assert response.kept["scores"].tolist() == [[[0, 1], [0, 0]], [[0, 0], [4, 5]]]


def test_the_length_of_a_row_is_that_up_to_its_eos_or_where_it_was_stopped():
    response = response_of([[1]] * 3, max_new_tokens=3)
    decode(response, {(b, i): [[4, EOS, 4], [4, 4, 4], [4, 4, EOS]][b][i] for b in range(3) for i in range(3)})
    assert response.lengths().tolist() == [2, 3, 3]
    response.stop(2, 1)
    assert response.lengths().tolist() == [2, 3, 1] and response.has_stopped.tolist() == [False, False, True]


def test_rows_may_have_eos_tokens_of_their_own_or_none():
    response = response_of([[1], [1], [1]], max_new_tokens=3, eos_token_ids=torch.tensor([5]))
    assert response.is_eos(torch.tensor([[4, 5]])).tolist() == [[False, True]]
    rows, prompts = torch.tensor([1, 2]), [torch.tensor([1]), torch.tensor([1])]
    response.replace_rows(rows, prompts, torch.tensor([3, 2]), eos_token_ids=[[6, 7], []])
    decode(response, {(0, 1): 5, (1, 0): 5, (1, 1): 7, (2, 0): 5})
    assert response.first_eos().tolist() == [1, 1, 2], "the limit where there is none"
    assert response.is_eos(torch.tensor([[7, 5]]), torch.tensor([2])).tolist() == [[False, False]]
    assert response.of_rows(torch.tensor([2, 1])).first_eos().tolist() == [2, 1]
    response.replace_rows(rows, prompts, torch.tensor([3, 3]))
    decode(response, {(1, 0): 7, (2, 2): 5})
    assert response.first_eos().tolist() == [1, 3, 2], "what the response was made with"


def test_an_early_eos_is_one_of_the_row_before_its_smallest_length():
    response = response_of([[1], [1]], min_new_tokens=2, eos_token_ids=torch.tensor([5]))
    row, index = torch.tensor([0, 0, 1]), torch.tensor([1, 2, 0])
    assert response.has_minimum and response.early_eos(row, index, 99).tolist() == [[5], [99], [5]]
    options = {"min_new_tokens": [1], "eos_token_ids": [[6, 7]]}
    response.replace_rows(torch.tensor([1]), [torch.tensor([1])], torch.tensor([4]), **options)
    assert response.early_eos(row, index, 99).tolist() == [[5, 99], [99, 99], [6, 7]]
    assert not response_of([[1]], min_new_tokens=3, eos_token_ids=None).has_minimum
    assert not response_of([[1]], min_new_tokens=-1).has_minimum


def test_a_replaced_row_starts_anew_with_what_is_its_own():
    criterion, streamer = Asked(), Told()
    response = response_of([[1, 2], [3, 4]], max_new_tokens=3, criteria=[Asked(2, {1: True})])
    decode(response, {(0, 0): 5, (1, 0): 6})
    publish(response)
    response.remask(torch.tensor([1]), torch.tensor([0]))
    assert response.has_stopped.tolist() == [True, True]
    response.replace_rows(
        torch.tensor([1]),
        [torch.tensor([9])],
        torch.tensor([2]),
        stopping_criteria=[StoppingCriteriaList([criterion])],
        streamers=[streamer],
    )
    assert response.sequences[1].tolist() == [9, MASK, MASK, NO_TOKEN, NO_TOKEN]
    assert (response.limits.tolist(), response.stopped_at.tolist()) == ([3, 2], [1, 2])
    assert response.has_stopped.tolist() == [True, False] and not response.was_remasked[1].any()
    decode(response, {(1, 0): 7, (1, 1): 8})
    publish(response)
    assert criterion.texts == [[[9, 7]], [[9, 7, 8]]] and streamer.events == [("put", [7, 8])]


def test_nobody_listens_where_nobody_is_given():
    assert not response_of([[1]]).has_listeners
    assert response_of([[1]], criteria=[Asked()]).has_listeners and response_of([[1]], streamer=Told()).has_listeners
    response = response_of([[1]], criteria=[Asked()])
    response.replace_rows(torch.tensor([0]), [torch.tensor([1])], torch.tensor([1]), stopping_criteria=[[]])
    assert not response.has_listeners


# ---- streamers ----


def test_a_streamer_gets_tokens_without_a_gap_and_drafts_up_to_what_is_shown_or_an_eos():
    streamer = Told()
    response = response_of([[1]], max_new_tokens=5, streamer=streamer)
    decode(response, {(0, 0): 4, (0, 2): 6})
    publish(response, shown=4)
    decode(response, {(0, 3): EOS})
    publish(response, shown=5)
    decode(response, {(0, 1): 5})
    publish(response, shown=5)
    assert streamer.events == [
        ("put", [4]),
        ("draft", [MASK, 6, MASK]),
        ("draft", [MASK, 6, EOS]),
        ("put", [5, 6, EOS]),
    ]


def test_what_can_be_taken_back_is_told_by_whole_blocks():
    streamer = Told()
    response = response_of([[1]], max_new_tokens=5, streamer=streamer)
    decode(response, {(0, 0): 4, (0, 1): 5, (0, 2): 6})
    publish(response, shown=4, block_size=2)
    decode(response, {(0, 3): 7, (0, 4): 8})
    publish(response, shown=5, block_size=2)
    assert streamer.events == [("put", [4, 5]), ("draft", [6, MASK]), ("put", [6, 7, 8])]


def test_a_streamer_gets_nothing_behind_where_its_row_was_stopped():
    streamer = Told()
    response = response_of([[1]], streamer=streamer, criteria=[Asked(1, {2: True})])
    decode(response, {(0, 0): 4, (0, 1): 5, (0, 2): 6})
    publish(response, shown=4)
    publish(response, shown=4)
    assert streamer.events == [("put", [4, 5])]


# ---- stopping criteria ----


def test_a_criterion_is_asked_about_rows_at_the_same_number_of_tokens_in_one_text():
    """Row 1 is one token behind; row 2 has ended; the prompts are as they were given."""
    criterion = Asked()
    given = torch.tensor([[1, 2], [PAD, 3], [4, PAD]])
    response = response_of([[1, 2], [3], [4]], criteria=[criterion], input_ids=given)
    decode(response, {(0, 0): 5, (0, 1): 6, (1, 0): 7, (1, 2): 8, (2, 0): EOS})
    publish(response)
    first, second = criterion.texts
    assert first == [[1, 2, 5], [PAD, 3, 7], [4, PAD, EOS]]
    assert second == [[1, 2, 5, 6], [PAD, 3, 7, PAD], [4, PAD, EOS, PAD]]
    criterion.texts.clear()
    publish(response, rows=torch.tensor([0, 1]))
    assert criterion.texts == [first, second], "again without a new token, each at what it has"
    criterion.texts.clear()
    decode(response, {(1, 1): 9})
    publish(response, rows=torch.tensor([1]))
    assert criterion.texts == [
        [[1, 2, 5, 6], [PAD, 3, 7, 9], [4, PAD, EOS, PAD]],
        [[1, 2, 5, 6, PAD], [PAD, 3, 7, 9, 8], [4, PAD, EOS, PAD, PAD]],
    ]


def test_only_the_answers_for_rows_that_are_asked_about_count():
    response = response_of([[1], [2]], criteria=[lambda ids, scores: torch.full((2,), ids.shape[1] == 3)])
    decode(response, {(0, 0): 5, (0, 1): 6, (0, 2): 7, (1, 0): 8})
    publish(response)
    assert response.has_stopped.tolist() == [True, False] and response.lengths().tolist()[0] == 2


ANSWERS = {
    "bool": lambda stop: bool(all(stop)),
    "0-d": lambda stop: torch.tensor(all(stop)),
    "(1,)": lambda stop: torch.tensor([all(stop)]),
    "int": lambda stop: int(all(stop)),
    "(B,)": lambda stop: torch.tensor(stop),
    "(B,) of int": lambda stop: torch.tensor(stop).int(),
    "(B, 1)": lambda stop: torch.tensor(stop)[:, None],
    "list": lambda stop: list(stop),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_an_answer_may_be_of_any_kind(kind):
    """For each row, or for all that are asked about."""
    has_one_for_each = kind.startswith(("(B", "list"))
    for answer in ([False, False], [True, True], [False, True]):
        response = response_of([[1], [2]], criteria=[lambda ids, scores, answer=answer: ANSWERS[kind](answer)])
        decode(response, {(0, 0): 5, (1, 0): 6})
        publish(response)
        assert response.has_stopped.tolist() == (answer if has_one_for_each else [all(answer)] * 2)


@pytest.mark.parametrize("answer", [None, torch.tensor([True] * 3), "yes", torch.zeros(0)], ids=str)
def test_an_answer_that_is_none_is_an_error(answer):
    response = response_of([[1], [2]], criteria=[lambda ids, scores: answer])
    decode(response, {(0, 0): 5})
    with pytest.raises(ValueError, match="`stopping_criteria` must answer.*2 rows"):
        publish(response)


def test_without_a_token_a_row_ends_only_by_what_does_not_go_by_the_text():
    """Such criteria say stop to the bare prompt as well as to a prompt with a mask token behind it."""
    stop = [True]
    for criterion, is_heeded in (
        (lambda ids, scores: True, True),
        (lambda ids, scores: stop[0], True),
        (lambda ids, scores: ids[:, -1] == 2, False),
        (lambda ids, scores: ids[:, -1] == MASK, False),
        (lambda ids, scores: ids.shape[1] >= 3, False),
        (lambda ids, scores: ids[0, 2:].tolist()[-1] == 5, False),  # looks at the first new token
        (MaxTimeCriteria(0.0, initial_timestamp=0.0), True),
        (EosTokenCriteria(2), False),
        (MaxLengthCriteria(2), False),
    ):
        response = response_of([[1, 2], [3, 2]], criteria=[criterion])
        decode(response, {(0, 1): 5})
        publish(response)
        assert response.has_stopped.tolist() == [is_heeded] * 2
        assert response.lengths().tolist() == [0 if is_heeded else 4] * 2


def test_a_criterion_sees_the_scores_that_are_kept():
    seen = []
    response = response_of(
        [[1], [2]], keep=("scores",), criteria=[lambda ids, scores: seen.append([s.tolist() for s in scores]) or False]
    )
    decode(response, {(0, 0): 5, (1, 0): 6, (1, 1): 7}, scores=torch.tensor([[1.0], [2.0], [3.0]]))
    publish(response)
    assert seen == [[[[1.0], [2.0]]], [[[1.0], [2.0]], [[0.0], [3.0]]]]


def test_what_a_criterion_does_to_its_input_stays_there():
    seen = []
    criteria = [lambda ids, scores: bool(ids.fill_(0).any()), lambda ids, scores: seen.append(ids.tolist()) or 0]
    response = response_of([[1]], criteria=criteria)
    decode(response, {(0, 0): 5})
    publish(response)
    assert seen == [[[1, 5]]] and response.sequences[0, :2].tolist() == [1, 5]


# ---- what comes out ----


class Config:
    return_dict_in_generate = True
    _pad_token_tensor = torch.tensor(PAD)


def test_the_output_is_the_given_prompt_and_the_responses_cut_and_padded():
    response = response_of([[1, 2], [3]], max_new_tokens=3, keep=("logits",))
    given = torch.tensor([[1, 2], [PAD, 3]])
    decode(response, {(0, 0): 5, (0, 1): EOS, (0, 2): 6, (1, 0): 7}, logits=torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
    response.stop(1, 1)
    output = response.output(given, torch.tensor([2, 1]), None, Config())
    assert output.sequences.tolist() == [[1, 2, 5, EOS], [PAD, 3, 7, PAD]]
    assert output.tokens_per_forward.tolist() == [1.0, 1.0] and output.num_forward_passes.tolist() == [2, 1]
    assert [values.tolist() for values in output.logits or ()] == [[[1.0], [4.0]], [[2.0], [0.0]]]


def test_rows_of_different_lengths_need_a_padding_token():
    class Without(Config):
        _pad_token_tensor = None

    response = response_of([[1], [2]], max_new_tokens=2)
    decode(response, {(0, 0): EOS, (1, 0): 5, (1, 1): 6})
    with pytest.raises(ValueError, match="`pad_token_id`"):
        response.output(torch.tensor([[1], [2]]), torch.tensor([1, 1]), None, Without())


# ---- in `generate` ----

MODES = {
    "d2f": {},
    "uncached": {"use_cache": False},
    "block by block": {"block_add_threshold": 1.0},
    "vanilla": {"decoding": "vanilla"},
    "vanilla in parallel": {"decoding": "vanilla", "steps": 6},
    "fast_dllm": {"decoding": "fast_dllm"},
    "look-ahead": {"num_branches": 3},
    "remask": {"remask_threshold": 0.3},
}
OPTIONS = {"max_new_tokens": 12, "block_size": 4, "pad_token_id": PAD}


def stops_at(criterion, prompt: list[int], tokens: list[int]) -> list[int]:
    """What transformers' loop keeps of `tokens`, which asks after each one."""
    for t in range(1, len(tokens) + 1):
        if criterion(torch.tensor([prompt + tokens[:t]]), None).flatten()[0]:
            return tokens[:t]
    return tokens


def row_wise_criteria(width: int, some: torch.Tensor) -> list:
    """Criteria that go by each row alone, for prompts of this width."""
    return [
        lambda ids, scores: torch.isin(ids[:, -1], some),
        lambda ids, scores: torch.full((len(ids),), ids.shape[1] - width >= 5),
        lambda ids, scores: ((ids[:, width:] % 2 == 1).sum(-1, keepdim=True) >= 3).int(),
        lambda ids, scores: (ids[:, width:].sum(-1) % 5 == 0) & (ids.shape[1] - width > 2),
    ]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_a_criterion_keeps_of_each_row_what_transformers_loop_keeps(mode, family):
    """Alone, in a batch, with padding on any side: the greedy tokens up to the first at which it says stop."""
    model = tiny_model(seed=3, family=family)
    prompts = random_prompts([3, 6, 1, 6], seed=11)
    prompts[3] = prompts[1]  # they share their first forward
    options = {**OPTIONS, **MODES[mode], **({} if "decoding" in MODES[mode] else {"confidence_threshold": 0.3})}

    def responses(output, width):
        return [[t for t in row if t != PAD] for row in output[:, width:].tolist()]

    for eos_token_id in (EOS, None):
        inputs = pad(prompts, "left")
        free = responses(model.generate(**inputs, **options, eos_token_id=eos_token_id), 6)
        some = torch.tensor(sorted({row[min(i, len(row) - 1)] for i, row in enumerate(free, 2)}))
        num_cut = 0
        for number in range(4):
            criterion = row_wise_criteria(0, some)[number]
            expected = [stops_at(criterion, [], row) for row in free]
            num_cut += expected != free
            ends = {"eos_token_id": eos_token_id}
            for side in ("left", "right"):
                ends["stopping_criteria"] = StoppingCriteriaList([row_wise_criteria(6, some)[number]])
                assert responses(model.generate(**pad(prompts, side), **options, **ends), 6) == expected
            for prompt, tokens in zip(prompts, expected, strict=True):
                ends["stopping_criteria"] = StoppingCriteriaList([row_wise_criteria(len(prompt), some)[number]])
                alone = model.generate(
                    torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **options, **ends
                )
                assert responses(alone, len(prompt)) == [tokens]
            if mode == "d2f" and number == 0:  # the others count from one width, and prompts differ here
                ends["stopping_criteria"] = StoppingCriteriaList([criterion])
                requests = [torch.tensor(prompt) for prompt in prompts]
                stream = dict(model.generate_stream_batch(requests, 2, 6, **options, **ends))
                assert [stream[i].tolist() for i in range(4)] == expected
        assert num_cut >= 3


FLAGS = {
    "bool": lambda ids, flag: flag.is_set(),
    "0-d": lambda ids, flag: torch.tensor(flag.is_set()),
    "(B,)": lambda ids, flag: torch.full((len(ids),), flag.is_set()),
}


@pytest.mark.parametrize("kind", FLAGS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_prompts", [1, 2])
def test_a_flag_is_heeded_within_one_forward_though_no_new_token_is_decoded(mode, kind, num_prompts):
    """The first token comes late, so nothing is told to anybody; once criteria were asked about new tokens only."""
    flag = threading.Event()
    model = ScriptedModel(sure_of(range(13), {1: 99, 2: 99}))
    forward = model.forward

    def counting(*args, **kwargs):
        if len(model.calls) == 1:
            flag.set()
        return forward(*args, **kwargs)

    model.forward = counting
    criterion = StoppingCriteriaList([lambda ids, scores: FLAGS[kind](ids, flag)])
    options = {**OPTIONS, "block_size": 12, **MODES[mode]}
    model.generate(torch.tensor([[0]] * num_prompts), **options, stopping_criteria=criterion)
    assert len(model.calls) == 2


@pytest.mark.parametrize("decoding", ["vanilla", "fast_dllm"])
def test_a_flag_is_heeded_though_all_rows_have_their_eos(decoding):
    """These samplers go on behind an EOS; a row that had one was not asked about any more."""
    flag = threading.Event()
    model = ScriptedModel(sure_of([0, EOS, *range(2, 13)]))
    model.register_forward_hook(lambda *_: flag.set() if len(model.calls) == 3 else None)
    criterion = StoppingCriteriaList([lambda ids, scores: flag.is_set()])
    options = {**OPTIONS, "block_size": 2, "decoding": decoding, "stopping_criteria": criterion}
    output = model.generate(torch.tensor([[0], [0]]), **options, return_dict_in_generate=True)
    assert output.sequences.tolist() == [[0, EOS]] * 2 and len(model.calls) == 3
    assert output.num_forward_passes.tolist() == [3, 3]


def test_a_flag_ends_all_requests_of_a_stream_within_one_forward():
    flag = threading.Event()
    model = tiny_model()
    calls = []

    def count(*_):
        calls.append(1)
        if len(calls) == 2:
            flag.set()

    model.model.register_forward_pre_hook(count)
    requests = [torch.tensor(prompt) for prompt in random_prompts([3, 5])]
    criterion = StoppingCriteriaList([lambda ids, scores: flag.is_set()])
    options = {**OPTIONS, "confidence_threshold": 1.0, "eos_token_id": None, "stopping_criteria": criterion}
    finished = dict(model.generate_stream_batch(requests, 2, 5, **options))
    assert len(calls) == 2 and all(len(tokens) <= 2 for tokens in finished.values())


class MultiTokenEOSCriteria(StoppingCriteria):
    """That of EleutherAI's lm-evaluation-harness, as it is."""

    def __init__(self, sequence, tokenizer, initial_decoder_input_length, batch_size):
        self.initial_decoder_input_length = initial_decoder_input_length
        self.done_tracker = [False] * batch_size
        self.sequence = sequence
        self.sequence_ids = tokenizer.encode(sequence, add_special_tokens=False)
        self.sequence_id_len = len(self.sequence_ids) + 2
        self.tokenizer = tokenizer

    def __call__(self, input_ids, scores, **kwargs) -> bool:
        lookback_ids_batch = input_ids[:, self.initial_decoder_input_length :]
        lookback_ids_batch = lookback_ids_batch[:, -self.sequence_id_len :]
        lookback_tokens_batch = self.tokenizer.batch_decode(lookback_ids_batch)
        for i, done in enumerate(self.done_tracker):
            if not done:
                self.done_tracker[i] = self.sequence in lookback_tokens_batch[i]
        return False not in self.done_tracker


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "look-ahead"])  # the script is by row
def test_the_criterion_of_the_evaluation_harness_works_with_a_batch(mode):
    """It indexes all rows of the batch, keeps what each has said, and answers with one bool for all."""
    tokenizer = letter_tokenizer()
    texts = ["xx the end. more of it all", "x it goes on. the end. and"]
    script = torch.stack([sure_of([max(LETTERS.find(c), 0) for c in text])(0) for text in texts])
    model = ScriptedModel(script)
    inputs = pad([[0, 0], [0]], "left")
    criterion = MultiTokenEOSCriteria("the end.", tokenizer, 2, 2)
    options = {**OPTIONS, "max_new_tokens": 24, **MODES[mode], "eos_token_id": None}
    output = model.generate(**inputs, **options, stopping_criteria=StoppingCriteriaList([criterion]))
    assert criterion.done_tracker == [True, True]
    assert "the end." in tokenizer.decode(output[0, 2:])
    assert "the end." in tokenizer.decode(output[1, 2:])


def test_a_criterion_sees_all_sequences_that_are_returned():
    shapes = set()
    criterion = StoppingCriteriaList([lambda ids, scores: shapes.add(len(ids)) or False])
    options = {**OPTIONS, "do_sample": True, "num_return_sequences": 3, "stopping_criteria": criterion}
    tiny_model().generate(**pad([[1, 2], [3]], "left"), **options)
    assert shapes == {6}


def test_a_criterion_that_fails_leaves_the_model_usable():
    class Broken(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            raise RuntimeError("not today")

    model, options = tiny_model(), {"inputs": torch.tensor([[1, 2, 3]]), **OPTIONS}
    for mode in MODES.values():
        expected = model.generate(**options, **mode)
        with pytest.raises(RuntimeError, match="not today"):
            model.generate(**options, **mode, stopping_criteria=StoppingCriteriaList([Broken()]))
        assert model.generate(**options, **mode).equal(expected)


@pytest.mark.parametrize("mode", MODES)
def test_another_default_device_changes_nothing(mode):
    """torch.set_default_device("cuda") stands at the top of many scripts; "meta" shows the same mixing."""

    class Neutral(LogitsProcessor):
        depends_on_previous_tokens = False

        def __call__(self, input_ids, scores):
            return scores + 0 * input_ids[:, :1]

    class NotTwice(Neutral):
        depends_on_previous_tokens = True

        def __call__(self, input_ids, scores):
            return scores.scatter(1, input_ids[:, -1:], -torch.inf)

    model, prompts = tiny_model(), pad([[1, 2, 3], [4, 5]], "left")
    runs = []
    for device in (None, "meta"):
        torch.set_default_device(device)
        try:
            for processor in (Neutral(), NotTwice()):
                if type(processor) is NotTwice and mode not in ("d2f", "uncached", "block by block"):
                    continue
                for streamer, rows in ((None, 2), (Told(), 1)):
                    criterion = lambda ids, scores: ids[:, -1] == 6  # noqa: E731
                    output = model.generate(
                        prompts["input_ids"][:rows],
                        attention_mask=prompts["attention_mask"][:rows],
                        **OPTIONS,
                        **MODES[mode],
                        logits_processor=[processor],
                        stopping_criteria=StoppingCriteriaList([criterion]),
                        streamer=streamer,
                        repetition_penalty=1.2,
                        min_new_tokens=2,
                    )
                    runs.append((output.tolist(), streamer and streamer.events))
        finally:
            torch.set_default_device(None)
    torch.set_default_device("meta")
    try:
        requests = [torch.tensor([1, 2], device="cpu")]
        stream = dict(model.generate_stream_batch(requests, 2, 3, **OPTIONS, stopping_criteria=[criterion]))
    finally:
        torch.set_default_device(None)
    assert stream[0].equal(
        dict(model.generate_stream_batch(requests, 2, 3, **OPTIONS, stopping_criteria=[criterion]))[0]
    )
    assert runs[: len(runs) // 2] == runs[len(runs) // 2 :]
    assert all(token < VOCAB_SIZE for rows, _ in runs for row in rows for token in row)

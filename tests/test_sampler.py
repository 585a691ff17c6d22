"""From logits to tokens, by hand: choice, probability, rank, and what the sampler asks of processors and rows."""

import math

import pytest
import torch
from d2f_hf.modeling import sampler as sampler_module
from d2f_hf.modeling.response import Response
from d2f_hf.modeling.sampler import Prediction, Sampler, sample_tokens
from transformers import LogitsProcessorList, StoppingCriteriaList, TemperatureLogitsWarper

from d2f_hf import D2FGenerationConfig

# M masked tokens, V vocabulary

LOG = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]]).log()
MASK, EOS = 9, 8


def rounded(values: torch.Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]


def response_of(num_rows=2, max_new_tokens=3, **options) -> Response:
    """Rows of one prompt token."""
    defaults = {"min_new_tokens": 0, "eos_token_ids": torch.tensor([EOS]), "streamer": None}
    return Response(
        prompts=torch.ones(num_rows, 1, dtype=torch.long),
        prompt_lengths=torch.ones(num_rows, dtype=torch.long),
        max_new_tokens=max_new_tokens,
        mask_token_id=MASK,
        stopping_criteria=StoppingCriteriaList(),
        **{**defaults, **options},
    )


def sampler_of(processors=(), **options) -> Sampler:
    return Sampler(D2FGenerationConfig(**options).with_defaults(), LogitsProcessorList(processors))


def all_masked(response: Response) -> tuple[torch.Tensor, torch.Tensor]:
    return response.is_masked().nonzero(as_tuple=True)


# ---- one row of scores ----


def test_the_most_probable_token_is_chosen_with_its_probability():
    tokens, probability, ranking = sample_tokens(LOG.clone(), False, "probability")
    assert tokens.tolist() == [0, 2] and rounded(probability) == [0.5, 0.7] and ranking is probability


def test_rankings_equal_the_hand_computation():
    margin = sample_tokens(LOG.clone(), False, "margin")[2]
    assert rounded(margin) == [0.2, 0.5]
    entropy = sample_tokens(LOG.clone(), False, "neg_entropy")[2]
    by_hand = [sum(p * math.log(p) for p in row) for row in ([0.5, 0.3, 0.2], [0.1, 0.2, 0.7])]
    assert rounded(entropy) == [round(value, 4) for value in by_hand]
    draws = [
        sample_tokens(LOG.clone(), False, "random", generator=torch.Generator().manual_seed(seed))
        for seed in (0, 0, 1)
    ]
    assert draws[0][0].tolist() == [0, 2], "only the rank is random"
    assert draws[0][2].equal(draws[1][2]) and not draws[0][2].equal(draws[2][2])


def test_a_forbidden_token_is_not_chosen_and_counts_in_the_probabilities_of_the_others():
    scores = LOG.clone()
    tokens, probability, _ = sample_tokens(scores, False, "probability", forbidden_token_id=2)
    assert tokens.tolist() == [0, 1] and rounded(probability) == [0.5, 0.2]
    assert (scores[:, 2] == -torch.inf).all()
    for seed in range(50):
        tokens, _, _ = sample_tokens(
            LOG.clone(), True, "probability", forbidden_token_id=2, generator=torch.Generator().manual_seed(seed)
        )
        assert 2 not in tokens


def test_a_token_is_drawn_as_often_as_its_probability_says():
    scores = LOG[:1].expand(20_000, -1).clone()
    tokens, probability, _ = sample_tokens(scores, True, "probability", generator=torch.Generator().manual_seed(0))
    share = tokens.bincount(minlength=3) / len(tokens)
    assert (share - torch.tensor([0.5, 0.3, 0.2])).abs().max() < 0.01
    assert probability.allclose(torch.tensor([0.5, 0.3, 0.2])[tokens])


def test_current_tokens_are_kept_with_the_probability_that_they_have_now():
    tokens, probability, _ = sample_tokens(
        LOG.clone(), False, "probability", forbidden_token_id=1, current_tokens=torch.tensor([2, 1])
    )
    assert tokens.tolist() == [2, 2], "the second one is masked"
    assert rounded(probability) == [0.2, 0.7]


@pytest.mark.parametrize("size", [63, 4095, 4096, 4160, 6400])
def test_the_largest_value_is_found_in_a_vocabulary_of_any_size(size):
    scores = torch.randn(5, size, generator=torch.Generator().manual_seed(size))
    scores[2, -1] = scores[3, 0] = 99.0
    scores[4, [7, size // 2]] = 50.0
    assert sample_tokens(scores.clone(), False, "probability")[0].tolist() == scores.argmax(-1).tolist()


# ---- the sampler ----


def test_the_sampler_chooses_for_each_masked_token_and_never_the_mask_token():
    response = response_of()
    row, index = all_masked(response)
    logits = torch.zeros(6, 10)
    logits[:, MASK], logits[torch.arange(6), torch.arange(6)] = 5.0, 3.0
    prediction = sampler_of()(logits.clone(), row, index, response)
    assert prediction.tokens.tolist() == [0, 1, 2, 3, 4, 5] and prediction.scores is None
    share = math.exp(3) / (math.exp(5) + math.exp(3) + 8)
    assert prediction.probability.allclose(torch.full((6,), share))


def test_kept_scores_are_those_after_the_processors_and_logits_are_left_alone():
    response = response_of(keep=("scores", "logits"))
    row, index = all_masked(response)
    logits = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    prediction = sampler_of([TemperatureLogitsWarper(0.5)])(logits, row, index, response)
    assert logits.equal(before) and prediction.scores[:, :MASK].allclose(before[:, :MASK] * 2)
    assert (prediction.scores[:, MASK] == -torch.inf).all()


def test_an_early_eos_is_forbidden_in_the_rows_and_at_the_positions_of_their_own():
    response = response_of(min_new_tokens=2)
    response.replace_rows(
        torch.tensor([1]), [torch.tensor([1])], torch.tensor([3]), min_new_tokens=[1], eos_token_ids=[[7, 6]]
    )
    row, index = all_masked(response)
    logits = torch.zeros(6, 10)
    logits[:, [EOS, 7, 6, 0]] = torch.tensor([5.0, 4.0, 3.0, 2.0])
    assert sampler_of()(logits, row, index, response).tokens.tolist() == [7, 7, EOS, EOS, EOS, EOS]
    logits[:, [EOS, 7, 6, 0]] = torch.tensor([2.0, 5.0, 4.0, 3.0])
    assert sampler_of()(logits, row, index, response).tokens.tolist() == [7, 7, 7, 0, 7, 7]


@pytest.mark.parametrize("at_a_time", [1, 10, 25, 60])
def test_tokens_are_the_same_however_many_are_looked_at_at_a_time(at_a_time, monkeypatch):
    response = response_of(keep=("scores",), min_new_tokens=1)
    row, index = all_masked(response)
    logits = torch.randn(6, 10, generator=torch.Generator().manual_seed(1))
    expected = sampler_of(token_ranking="margin")(logits.clone(), row, index, response)
    monkeypatch.setattr(sampler_module, "SCORES_AT_A_TIME", at_a_time)
    prediction = sampler_of(token_ranking="margin")(logits.clone(), row, index, response)
    assert all(values.equal(others) for values, others in zip(prediction, expected, strict=True))


@pytest.mark.parametrize("at_a_time", [1, 2**19])
def test_from_left_to_right_only_the_first_masked_token_of_each_row_is_chosen(at_a_time, monkeypatch):
    """And all of them at once: a processor with a state per row has to see the whole batch."""
    monkeypatch.setattr(sampler_module, "SCORES_AT_A_TIME", at_a_time)
    seen = []

    def processor(input_ids, scores):
        seen.append((input_ids.tolist(), scores.shape))
        return scores

    processor.depends_on_previous_tokens = True
    response = response_of(keep=("scores",))
    response.accept(torch.ones(2).bool(), torch.tensor([0, 1]), torch.tensor([0, 0]), torch.tensor([4, 5]),
                    scores=torch.zeros(2, 10))  # fmt: skip
    row, index = all_masked(response)
    logits = torch.zeros(4, 10)
    logits[torch.arange(4), torch.arange(4)] = 3.0
    sampler = sampler_of([processor])
    prediction = sampler(logits, row, index, response)
    assert sampler.left_to_right and seen == [([[1, 4], [1, 5]], (2, 10))]
    assert prediction.tokens.tolist() == [0, 0, 2, 0] and (prediction.probability > 0).tolist() == [True, False] * 2
    assert prediction.scores[0, 0] == 3.0 and not prediction.scores[1].any() and prediction.scores[2, 2] == 3.0


def test_rows_are_told_to_a_processor_in_their_order_whatever_the_order_of_the_live_ones():
    def by_row(input_ids, scores):
        return scores + 10 * torch.nn.functional.one_hot(torch.tensor([1, 2, 3]), 10)

    by_row.depends_on_previous_tokens = True
    response = response_of(num_rows=3)
    prediction = sampler_of([by_row])(torch.zeros(2, 10), torch.tensor([2, 0]), torch.tensor([0, 0]), response)
    assert prediction.tokens.tolist() == [3, 1]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_leave_no_choice_raise(value):
    response = response_of()
    row, index = all_masked(response)
    logits = torch.zeros(6, 10)
    logits[5, 3] = value
    with pytest.raises(ValueError, match="NaN"):
        sampler_of()(logits, row, index, response)


def test_a_prediction_has_names():
    assert Prediction._fields == ("tokens", "probability", "ranking", "scores")

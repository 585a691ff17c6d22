"""The rules that give more tokens per forward: by hand, against the slow ones, at their limits, and in a loop."""

import dataclasses
import itertools
import math
from dataclasses import fields
from functools import cache

import pytest
import torch
from d2f_hf.modeling.acceptance_rules import (
    Credit,
    accept,
    accepted_tokens,
    at_least_tokens,
    credited_probability,
    first_tokens_alone,
    first_unfinished_sub_blocks,
    required_tokens,
    sequential_tokens,
    tokens_to_remask,
)
from d2f_hf.modeling.lookahead_decoding import best_branch, lookahead_tokens
from d2f_hf.modeling.sampler import sample_tokens
from transformers import StoppingCriteriaList, TextDiffusionStreamer

from d2f_hf import D2FGenerationConfig, D2FGenerationOutput
from prompts import pad
from reference_decoding import ReferenceResult, Rules, accepted_by_rule, reference_decode
from tiny_models import EOS, MASK, PAD, plain_logits, tiny_model

# B batch, A branches, N blocks, K block size, V vocabulary

RULES = [
    Rules(),
    Rules(semi_activated_threshold=0.95),
    Rules(acceptance_rule="entropy_bound", entropy_bound=0.0),
    Rules(acceptance_rule="entropy_bound", entropy_bound=0.3),
    Rules(acceptance_rule="entropy_bound", entropy_bound=3.0),
    Rules(acceptance_rule="factor"),
    Rules(acceptance_rule="factor", confidence_factor=0.3),
    Rules(acceptance_rule="factor", confidence_factor=4.0),
    Rules(acceptance_rule="credit"),
    Rules(acceptance_rule="credit", semi_activated_threshold=0.8, credit_decay=0.3, credit_strength=2.0),
]


def name_of(rules: Rules | dict) -> str:
    """What differs from Algorithm 2."""
    values = rules if isinstance(rules, dict) else {f.name: getattr(rules, f.name) for f in fields(rules)}
    return ", ".join(f"{name}={value}" for name, value in values.items() if value != getattr(Rules(), name, None))


each_rule = pytest.mark.parametrize("rules", RULES, ids=name_of)


def options_of(rules: Rules, confidence_threshold: float) -> dict:
    """The same for `accept`, by way of the generation config."""
    names = {
        "entropy_bound": ["entropy_bound"],
        "factor": ["confidence_factor"],
        "credit": ["credit_decay", "credit_strength"],
    }.get(rules.acceptance_rule, [])
    if rules.semi_activated_threshold is not None:
        names = [*names, "semi_activated_threshold"]
    config = D2FGenerationConfig(
        decoding="d2f",
        acceptance_rule=rules.acceptance_rule,
        confidence_threshold=confidence_threshold,
        **{name: getattr(rules, name) for name in names},
    )
    return config.with_defaults().acceptance_options()


def random_step(seed: int, shape: tuple[int, int, int] = (3, 4, 5)) -> dict[str, torch.Tensor]:
    """What a step passes to `accept`: sure and unsure predictions, decoded tokens, blocks without a masked one."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*shape, 12, generator=generator) * 6 * torch.rand(*shape, 1, generator=generator)
    scores = logits.flatten(0, 2)
    tokens, probability, _ = sample_tokens(scores.clone(), False, "probability", forbidden_token_id=0)
    _, _, negative_entropy = sample_tokens(scores.clone(), False, "neg_entropy", forbidden_token_id=0)
    is_masked = torch.rand(shape, generator=generator) < 0.7
    is_masked &= torch.rand(*shape[:2], 1, generator=generator) < 0.9
    return {
        "is_masked": is_masked,
        "tokens": tokens.view(shape),
        "probability": probability.view(shape).where(is_masked, 0.0),
        "negative_entropy": negative_entropy.view(shape).where(is_masked, 0.0),
        "is_fully_activated": torch.rand(shape[:2], generator=generator) < 0.5,
    }


def arguments(step: dict[str, torch.Tensor], acceptance_rule: str) -> tuple[torch.Tensor, ...]:
    ranking = step["negative_entropy" if acceptance_rule == "entropy_bound" else "probability"]
    return step["is_masked"], step["tokens"], step["probability"], ranking, step["is_fully_activated"]


def one_block(values: list[float], fully_activated: bool, **options) -> list[int]:
    """What `accept` takes of one block of masked tokens with these probabilities (or negative entropies)."""
    values = torch.tensor([[values]])
    is_masked = torch.ones_like(values, dtype=torch.bool)
    accepted, _ = accept(is_masked, values.long(), values, values, torch.tensor([[fully_activated]]), **options)
    return accepted[0, 0].nonzero().flatten().tolist()


# ---- each rule against the slow one ----


@each_rule
@pytest.mark.parametrize("seed", range(4))
def test_each_rule_accepts_what_the_oracle_accepts_in_each_block(rules, seed):
    step = random_step(seed)
    inputs = arguments(step, rules.acceptance_rule)
    accepted, _ = accept(*inputs, **options_of(rules, 0.6))
    probability, ranking = inputs[2:4]
    if rules.acceptance_rule == "credit":
        probability, _ = credited_probability(*inputs[:3], None, rules.credit_decay, rules.credit_strength)
        ranking = probability
    assert not (accepted & ~step["is_masked"]).any()
    for row in range(3):
        for block in range(4):
            masked = step["is_masked"][row, block].nonzero().flatten()
            if len(masked) == 0:
                continue
            expected = accepted_by_rule(
                probability[row, block, masked].tolist(),
                ranking[row, block, masked].tolist(),
                bool(step["is_fully_activated"][row, block]),
                confidence_threshold=0.6,
                rules=rules,
            )
            got = accepted[row, block, masked].nonzero().flatten().tolist()
            assert got == sorted(expected)


@each_rule
def test_a_fully_activated_block_accepts_at_least_one_token_and_a_semi_activated_one_may_accept_none(rules):
    some_semi_activated_accepts_none = False
    for seed in range(8):
        step = random_step(seed)
        accepted, _ = accept(*arguments(step, rules.acceptance_rule), **options_of(rules, 0.999))
        has_masked = step["is_masked"].any(-1)
        must = step["is_fully_activated"] & has_masked
        assert accepted.any(-1)[must].all()
        some_semi_activated_accepts_none |= bool((~accepted.any(-1) & has_masked & ~step["is_fully_activated"]).any())
    assert some_semi_activated_accepts_none or rules.entropy_bound == 3.0 or rules.confidence_factor == 4.0


@each_rule
def test_rows_and_blocks_do_not_depend_on_each_other(rules):
    step = random_step(0)
    together, _ = accept(*arguments(step, rules.acceptance_rule), **options_of(rules, 0.6))
    for row in range(3):
        for block in range(4):
            alone = {name: values[row : row + 1, block : block + 1] for name, values in step.items()}
            accepted, _ = accept(*arguments(alone, rules.acceptance_rule), **options_of(rules, 0.6))
            assert accepted[0, 0].equal(together[row, block])


@each_rule
def test_where_nothing_is_masked_nothing_is_accepted(rules):
    step = random_step(0)
    step["is_masked"][:] = False
    accepted, _ = accept(*arguments(step, rules.acceptance_rule), **options_of(rules, 0.0))
    assert not accepted.any()


# ---- threshold ----


def test_the_default_is_algorithm_2():
    step = random_step(0)
    inputs = arguments(step, "threshold")
    accepted, credit = accept(*inputs)
    assert credit is None
    assert accepted.equal(accepted_tokens(inputs[0], *inputs[2:], confidence_threshold=0.9))


def test_blocks_that_are_not_fully_activated_have_a_threshold_of_their_own():
    probability = [0.6, 0.8, 0.95]
    options = {"confidence_threshold": 0.7, "semi_activated_threshold": 0.9}
    assert one_block(probability, True, **options) == [1, 2]
    assert one_block(probability, False, **options) == [2]
    assert one_block([0.6, 0.5], True, **options) == [0]
    assert one_block([0.6, 0.5], False, **options) == []


# ---- entropy bound ----


def test_the_entropy_bound_leaves_out_the_largest_entropy_only_where_a_token_must_be_accepted():
    """Entropies in ascending order 0.04, 0.05, 0.2, 1.0; the sums before each 0, 0.04, 0.09, 0.29."""
    negative_entropy = [-0.05, -0.2, -0.04, -1.0]
    assert one_block(negative_entropy, True, acceptance_rule="entropy_bound", entropy_bound=0.1) == [0, 1, 2]
    assert one_block(negative_entropy, False, acceptance_rule="entropy_bound", entropy_bound=0.1) == [0, 2]
    assert one_block([-0.3, -0.2], False, acceptance_rule="entropy_bound", entropy_bound=0.1) == []
    assert one_block([-0.3, -0.2], True, acceptance_rule="entropy_bound", entropy_bound=0.1) == [1]


def test_an_entropy_bound_of_0_accepts_one_token_of_each_fully_activated_block():
    for seed in range(8):
        step = random_step(seed)
        accepted, _ = accept(*arguments(step, "entropy_bound"), acceptance_rule="entropy_bound", entropy_bound=0.0)
        expected = (step["is_fully_activated"] & step["is_masked"].any(-1)).long()
        assert accepted.sum(-1).equal(expected)


def test_tokens_without_entropy_are_free_and_of_equal_ones_the_first_comes_first():
    options = {"acceptance_rule": "entropy_bound", "entropy_bound": 0.0}
    assert one_block([-0.5, 0.0, -0.5, 0.0], True, **options) == [0, 1, 3]
    assert one_block([-0.5, 0.0, -0.5, 0.0], False, **options) == [1, 3]
    assert one_block([-0.5, -0.5], True, **options) == [0]
    # Rounding may leave the sum of p * log(p) a little above 0.
    assert one_block([1e-7, -0.5], False, **options) == [0]


def test_negative_entropy_is_as_the_bound_needs_it():
    """The 1e-10 inside the logarithm, and tokens that a processor has ruled out, must not show."""
    scores = torch.randn(50, 40, generator=torch.Generator().manual_seed(0)) * 5
    scores[:, 7] = -torch.inf
    exact = torch.distributions.Categorical(logits=scores.double()).entropy()
    _, _, ranking = sample_tokens(scores, False, "neg_entropy", forbidden_token_id=0)
    torch.testing.assert_close(-ranking.double(), exact, atol=1e-5, rtol=0)


def test_an_infinite_bound_accepts_everything():
    step = random_step(0)
    accepted, _ = accept(*arguments(step, "entropy_bound"), acceptance_rule="entropy_bound", entropy_bound=math.inf)
    assert accepted.equal(step["is_masked"])


# ---- factor ----


def test_the_factor_rule_takes_the_largest_number_of_tokens_that_are_sure_enough_together():
    """2 * 0.01, 3 * 0.1, 4 * 0.3 and 5 * 0.8 against the factor."""
    probability = [0.9, 0.7, 0.99, 0.2]
    for factor, expected in ((0.01, []), (0.1, [2]), (1.0, [0, 2]), (1.3, [0, 1, 2]), (4.5, [0, 1, 2, 3])):
        assert one_block(probability, False, acceptance_rule="factor", confidence_factor=factor) == expected
        assert one_block(probability, True, acceptance_rule="factor", confidence_factor=factor) == (expected or [2])


def test_the_factor_rule_is_strict_as_in_the_paper():
    """2 * (1 - 0.75) is 0.5 without rounding."""
    assert one_block([0.75, 0.25], False, acceptance_rule="factor", confidence_factor=0.5) == []
    assert one_block([0.75, 0.25], False, acceptance_rule="factor", confidence_factor=0.51) == [0]


def test_a_factor_of_0_accepts_one_token_and_a_large_one_everything():
    step = random_step(0)
    inputs = arguments(step, "factor")
    accepted, _ = accept(*inputs, acceptance_rule="factor", confidence_factor=0.0)
    assert accepted.equal(accepted_tokens(inputs[0], *inputs[2:], confidence_threshold=1.0))
    accepted, _ = accept(*inputs, acceptance_rule="factor", confidence_factor=100.0)
    assert accepted.equal(step["is_masked"])


# ---- credit ----


def test_credit_raises_the_probability_of_what_stays_the_prediction():
    is_masked, probability = torch.ones(1, 1, 2, dtype=torch.bool), torch.full((1, 1, 2), 0.5)
    first, credit = credited_probability(is_masked, torch.tensor([[[3, 4]]]), probability, None, 0.7, 0.65)
    second, credit = credited_probability(is_masked, torch.tensor([[[3, 5]]]), probability, credit, 0.7, 0.65)
    once = 0.5**0.2
    twice = 0.7 * once + once
    expected = [0.5 * g / (1 + 0.5 * (g - 1)) for g in ((1 + once) ** 0.65, (1 + twice) ** 0.65)]
    assert expected == pytest.approx([0.6003, 0.6435], abs=1e-4)
    torch.testing.assert_close(first, torch.tensor([[[expected[0], expected[0]]]]))
    torch.testing.assert_close(second, torch.tensor([[[expected[1], expected[0]]]]), msg="another token starts from 0")
    torch.testing.assert_close(credit.amount, torch.tensor([[[twice, once]]]))
    assert credit.tokens.tolist() == [[[3, 5]]]


def test_credited_probabilities_are_those_of_raised_logits():
    logits = torch.randn(2, 3, 4, 9, generator=torch.Generator().manual_seed(0)) * 3
    probability, tokens = logits.softmax(-1).max(-1)
    is_masked = torch.ones_like(tokens, dtype=torch.bool)
    before = Credit(tokens, torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(1)))
    raised, credit = credited_probability(is_masked, tokens, probability, before, 0.7, 0.65)
    logits.scatter_add_(-1, tokens[..., None], 0.65 * credit.amount.log1p()[..., None])
    expected, still = logits.softmax(-1).max(-1)
    assert still.equal(tokens), "the prediction stays the best token"
    torch.testing.assert_close(raised, expected)


def test_credit_is_lost_where_a_token_is_not_predicted():
    tokens, probability = torch.full((1, 1, 2), 3), torch.full((1, 1, 2), 0.5)
    everywhere = torch.ones(1, 1, 2, dtype=torch.bool)
    _, credit = credited_probability(everywhere, tokens, probability, None, 0.7, 0.65)
    _, credit = credited_probability(torch.tensor([[[True, False]]]), tokens, probability, credit, 0.7, 0.65)
    assert credit.tokens.tolist() == [[[3, -1]]] and credit.amount[0, 0, 1] == 0
    _, credit = credited_probability(everywhere, tokens, probability, credit, 0.7, 0.65)
    assert credit.amount[0, 0, 0] > credit.amount[0, 0, 1] == pytest.approx(0.5**0.2)


def test_blocks_may_join_and_leave_between_steps():
    step = random_step(0)
    inputs = arguments(step, "credit")[:3]
    _, credit = credited_probability(*inputs, None, 0.7, 0.65)
    _, expected = credited_probability(*inputs, credit, 0.7, 0.65)
    fewer = tuple(values[:, :2] for values in inputs)
    _, of_fewer = credited_probability(*fewer, credit, 0.7, 0.65)
    assert of_fewer.amount.equal(expected.amount[:, :2])
    _, of_more = credited_probability(*inputs, Credit(*(values[:, :2] for values in credit)), 0.7, 0.65)
    assert of_more.amount[:, :2].equal(expected.amount[:, :2])
    assert of_more.amount[:, 2:].equal(credit.amount[:, 2:]), "a new block has nothing yet"


def test_rows_take_their_credit_along_and_new_ones_have_none():
    step = random_step(0)
    inputs = arguments(step, "credit")[:3]
    _, credit = credited_probability(*inputs, None, 0.7, 0.65)
    positions = torch.tensor([2, 0])
    moved = credit.select(positions, num_new=1)
    assert moved.tokens[:2].equal(credit.tokens[positions]) and moved.amount[:2].equal(credit.amount[positions])
    assert (moved.tokens[2] == -1).all() and (moved.amount[2] == 0).all()
    rows = tuple(values[[2, 0, 1]] for values in inputs)
    _, expected = credited_probability(*inputs, credit, 0.7, 0.65)
    _, got = credited_probability(*rows, moved, 0.7, 0.65)
    assert got.amount[:2].equal(expected.amount[positions])
    assert got.amount[2].equal(credit.amount[1])


def test_credit_that_does_not_count_changes_nothing():
    first, second = random_step(0), random_step(1)
    for credit_strength, threshold in ((0.0, 0.6), (0.65, 1.0)):
        options = {"acceptance_rule": "credit", "confidence_threshold": threshold, "credit_strength": credit_strength}
        _, credit = accept(*arguments(first, "credit"), **options)
        if credit_strength == 0.0:
            accepted, _ = accept(*arguments(second, "credit"), **options, credit=credit)
            assert accepted.equal(accept(*arguments(second, "threshold"), confidence_threshold=threshold)[0])
        else:
            accepted, _ = accept(*arguments(second, "credit"), **options, credit=credit)
            assert accepted.sum(-1).max() == 1, "no credit raises a probability above 1"


# ---- look-ahead ----


def test_each_branch_tries_one_more_of_the_most_probable_tokens_that_are_left():
    is_masked = torch.tensor([[[True, False], [True, True]], [[False, True], [False, False]]])
    probability = torch.tensor([[[0.2, 0.9], [0.5, 0.5]], [[0.1, 0.3], [0.9, 0.9]]])
    tried = lookahead_tokens(is_masked, probability, 4)
    assert tried.shape == (2, 4, 2, 2)
    positions = [[tried[row, branch].nonzero().tolist() for branch in range(4)] for row in range(2)]
    assert positions == [[[], [[1, 0]], [[1, 1]], [[0, 0]]], [[], [[0, 1]], [], []]]


def test_without_look_ahead_there_is_only_the_anchor_and_more_branches_than_tokens_repeat_it():
    is_masked, probability = torch.ones(1, 1, 2, dtype=torch.bool), torch.full((1, 1, 2), 0.5)
    assert lookahead_tokens(is_masked, probability, 1).tolist() == [[[[False, False]]]]
    tried = lookahead_tokens(is_masked, probability, 6)
    assert tried.sum((2, 3)).tolist() == [[0, 1, 1, 0, 0, 0]]


def test_the_branch_with_the_highest_mean_probability_over_its_masked_tokens_goes_on():
    is_masked = torch.tensor([[[True, True, True], [False, True, True]], [[True, True, False], [True, False, False]]])
    probability = torch.tensor([[[0.9, 0.2, 0.4], [0.9, 0.5, 0.6]], [[0.6, 0.8, 0.9], [0.69, 0.9, 0.9]]])
    assert best_branch(is_masked[:, :, None], probability[:, :, None]).tolist() == [1, 0]  # 0.5 and 0.55; 0.7 and 0.69


def test_a_branch_without_masked_tokens_wins_and_of_equal_branches_the_first():
    is_masked = torch.tensor([[[True], [False], [False]], [[True], [True], [True]]])
    probability = torch.tensor([[[0.99], [0.0], [0.0]], [[0.5], [0.5], [0.5]]])
    assert best_branch(is_masked[:, :, None], probability[:, :, None]).tolist() == [1, 0]


# ---- remasking ----


def test_improbable_tokens_become_masks_again_once():
    may_be_masked = torch.tensor([True, True, True, False])
    probability = torch.tensor([0.1, 0.5, 0.7, 0.1])
    was_remasked = torch.tensor([False, False, False, False])
    again = tokens_to_remask(may_be_masked, probability, was_remasked, 0.5)
    assert again.tolist() == [True, False, False, False]
    assert not tokens_to_remask(may_be_masked, probability, was_remasked | again, 0.5).any()
    assert not tokens_to_remask(may_be_masked, probability, was_remasked, 0.0).any()
    assert tokens_to_remask(may_be_masked, probability, was_remasked, 1.0).equal(may_be_masked)


# ---- in a loop ----

OPTIONS = {
    "block_size": 4,
    "block_add_threshold": 0.25,
    "block_activation_threshold": 0.75,
    "confidence_threshold": 0.6,
    "max_new_tokens": 14,
}
LOOP_RULES = [
    *RULES,
    Rules(num_branches=3),
    Rules(acceptance_rule="credit", num_branches=4),
    Rules(acceptance_rule="entropy_bound", num_branches=20),
    Rules(remask_threshold=0.3),
    Rules(remask_threshold=1.0),
    Rules(acceptance_rule="factor", remask_threshold=0.5),
]
CASES = [(prompt, seed) for prompt in ([1, 2, 3], [7, 30, 12, 5, 9, 20], [4]) for seed in (5, 8, 9, 10)]


@cache
def logits_of(seed: int):
    return plain_logits(tiny_model(seed=seed))


def oracle(prompt: list[int], rules: Rules | None, seed: int = 0, **options) -> ReferenceResult:
    options = {**OPTIONS, **options, "mask_token_id": MASK, "eos_token_ids": EOS, "rules": rules}
    return reference_decode(logits_of(seed), prompt, **options)


def decode(prompt: list[int], rules: Rules, seed: int) -> tuple[list[int], list[list[tuple[int, int]]]]:
    """One row by these functions, as the docstring of `acceptance_rules.py` says: tokens, and those of each step."""
    block_size, limit = OPTIONS["block_size"], OPTIONS["max_new_tokens"]
    num_blocks, start = math.ceil(limit / block_size), len(prompt)
    options = options_of(rules, OPTIONS["confidence_threshold"])
    token_ranking = "neg_entropy" if rules.acceptance_rule == "entropy_bound" else "probability"
    shape = (num_blocks, block_size)
    position = torch.arange(num_blocks * block_size).view(shape)
    exists = position < limit
    tokens = torch.full(shape, MASK)
    predicted, probability = torch.zeros(shape, dtype=torch.long), torch.zeros(shape)
    has_prediction = torch.zeros(shape, dtype=torch.bool)
    was_remasked = torch.zeros(shape, dtype=torch.bool)
    opened, credit, steps = 0, None, []
    while True:
        # Open.
        is_masked = (tokens == MASK) & exists
        is_eos = (tokens == EOS).flatten()
        first_eos = int(is_eos.long().argmax()) if is_eos.any() else limit
        if not (is_masked & (position < first_eos)).any():
            return tokens.flatten()[: first_eos + 1].tolist()[:limit], steps
        ratio = 1 - is_masked.sum(-1) / exists.sum(-1)
        before = torch.cat([torch.ones(1), ratio])  # of each block the one before it; the prompt is decoded
        if is_eos.any():
            opened = min(opened, first_eos // block_size + 1)
        elif opened < num_blocks and before[opened] >= OPTIONS["block_add_threshold"]:
            opened += 1
        is_fully_activated = before[:-1] >= OPTIONS["block_activation_threshold"]
        is_open = (torch.arange(num_blocks) < opened)[:, None]
        num_final = int((ratio[:opened] == 1).long().cumprod(-1).sum())
        is_final = (torch.arange(num_blocks) < num_final)[:, None]

        # Forward, of all branches.
        tried = lookahead_tokens((is_masked & is_open & has_prediction)[None], probability[None], rules.num_branches)
        rows = torch.where(tried[0], predicted, tokens)  # [A, N, K]
        end = min(opened * block_size, limit)
        logits = torch.full((len(rows), *shape, 40), 0.0)
        for row, row_logits in zip(rows, logits.flatten(1, 2), strict=True):
            ids = prompt + row.flatten()[:end].tolist()
            row_logits[:end] = logits_of(seed)(ids, start, block_size)[start:]

        # Predict.
        is_masked_here = (rows == MASK) & exists & is_open  # [A, N, K]
        scores = logits.flatten(0, -2)
        of_token = scores.softmax(-1).gather(-1, rows.flatten()[:, None]).view(rows.shape)
        predicted, probability, ranking = (
            values.view(rows.shape) for values in sample_tokens(scores, False, token_ranking, forbidden_token_id=MASK)
        )
        winner = int(best_branch(is_masked_here[None], probability[None]))
        tokens = rows[winner]
        new = tried[0, winner]
        has_prediction, predicted, probability = is_masked_here[winner], predicted[winner], probability[winner]

        # Accept.
        accepted, credit = accept(
            has_prediction[None],
            predicted[None],
            probability[None],
            ranking[winner][None],
            is_fully_activated[None],
            credit=credit,
            **options,
        )
        may_be_masked = is_open & ~is_final & exists & ~has_prediction & (position < first_eos)
        again = tokens_to_remask(may_be_masked, of_token[winner], was_remasked, rules.remask_threshold)
        was_remasked |= again
        tokens = torch.where(accepted[0], predicted, tokens)
        steps.append(
            [(start + int(position[p]), int(tokens[p])) for p in map(tuple, (accepted[0] | new).nonzero().tolist())]
        )
        tokens = tokens.masked_fill(again, MASK)


@pytest.mark.parametrize("rules", LOOP_RULES, ids=name_of)
def test_a_loop_of_these_functions_decodes_what_the_oracle_decodes(rules):
    for prompt, seed in CASES:
        expected = oracle(prompt, rules, seed)
        tokens, steps = decode(prompt, rules, seed)
        assert tokens == expected.tokens
        assert steps == [step["accepted"] for step in expected.trace]


def test_the_cases_exercise_what_they_are_for():
    """If the models changed, the test above could pass without testing much."""
    results = {str(rules): [oracle(prompt, rules, seed) for prompt, seed in CASES] for rules in [None, *LOOP_RULES]}
    assert len({tuple(result.num_forward_passes for result in of_rule) for of_rule in results.values()}) > 12
    assert len({tuple(tuple(result.tokens) for result in of_rule) for of_rule in results.values()}) > 12
    assert sum(EOS in result.tokens for of_rule in results.values() for result in of_rule) > 4
    for name, of_rule in results.items():
        again = [position for result in of_rule for step in result.trace for position in step.get("remasked", [])]
        assert bool(again) == ("remask_threshold=0.0" not in name and name != "None")


@pytest.mark.parametrize(
    ("rules", "same_as"),
    [
        (Rules(), {}),
        (Rules(semi_activated_threshold=0.6), {}),
        (Rules(acceptance_rule="credit", credit_strength=0.0), {}),
        (Rules(acceptance_rule="factor", confidence_factor=0.0), {"confidence_threshold": 1.0}),
        (Rules(acceptance_rule="factor", confidence_factor=100.0), {"confidence_threshold": 0.0}),
        (
            Rules(acceptance_rule="entropy_bound", entropy_bound=0.0),
            {"confidence_threshold": 1.0, "token_ranking": "neg_entropy"},
        ),
        (Rules(acceptance_rule="entropy_bound", entropy_bound=math.inf), {"confidence_threshold": 0.0}),
    ],
    ids=name_of,
)
def test_at_its_limit_a_rule_decodes_as_algorithm_2_with_other_options(rules, same_as):
    for prompt, seed in CASES:
        result, expected = oracle(prompt, rules, seed), oracle(prompt, None, seed, **same_as)
        assert (result.tokens, result.trace) == (expected.tokens, expected.trace)


def test_decoding_ends_when_every_token_is_masked_again():
    masked_again = 0
    for prompt, seed in CASES:
        result = oracle(prompt, Rules(remask_threshold=1.0), seed)
        again = [position for step in result.trace for position in step["remasked"]]
        assert len(again) == len(set(again)), "each position once at most"
        assert result.num_forward_passes <= 2 * OPTIONS["max_new_tokens"]
        assert MASK not in result.tokens
        masked_again += len(again)
    assert masked_again > 20


def test_look_ahead_saves_a_forward_where_a_token_makes_the_others_sure():
    """Position 2 is the less probable one of the first forward, but all others follow from it."""

    def logits_fn(ids: list[int], prompt_length: int, block_size: int) -> torch.Tensor:
        logits = torch.zeros(len(ids), 10)
        sure = ids[2] == 2
        for position in range(len(ids)):
            logits[position, position] = 8.0 if sure else 2.0
        logits[1, 1] = 2.5
        logits[2, 2] = 2.4
        return logits

    options = {"block_size": 4, "block_add_threshold": 1.0, "block_activation_threshold": 1.0, "max_new_tokens": 4}
    options |= {"confidence_threshold": 0.9, "mask_token_id": 9, "eos_token_ids": 8}
    plain = reference_decode(logits_fn, [0], **options)
    assert [step["accepted"] for step in plain.trace] == [[(1, 1)], [(2, 2)], [(3, 3), (4, 4)]]
    ahead = reference_decode(logits_fn, [0], **options, rules=Rules(num_branches=2))
    assert [step["accepted"] for step in ahead.trace] == [[(1, 1)], [(2, 2), (3, 3), (4, 4)]]
    assert ahead.tokens == plain.tokens


# ---- in generate() ----

FULL = {"return_dict_in_generate": True, "output_trace": True}
MODELS = {
    "llada": {"seed": 9},
    "shifted and grouped": {"seed": 8, "right_shift_logits": True, "num_key_value_heads": 2},
    "dream": {"seed": 2, "family": "dream"},
}
PROMPTS = [[1, 2, 3], [7, 30, 12, 5, 9, 20], [7, 30, 12, 5, 9, 20], [4], [18, 22]]  # two share their first forward
GENERATE_RULES = [*LOOP_RULES, Rules(num_branches=2), Rules(semi_activated_threshold=0.8, num_branches=2)]


@cache
def model_of(name: str):
    return tiny_model(**MODELS[name])


def keywords(rules: Rules) -> dict:
    """The same for `generate`: what is not as in Algorithm 2."""
    values = {field.name: getattr(rules, field.name) for field in fields(rules)}
    return {name: value for name, value in values.items() if value != getattr(Rules(), name)}


def arguments_of(rules: Rules) -> dict:
    """`OPTIONS` and the rules as keywords of `generate`, which refuses a threshold that the rule does not have."""
    options = {**OPTIONS, **keywords(rules)}
    if rules.acceptance_rule in ("entropy_bound", "factor"):
        del options["confidence_threshold"]
    return options


@cache
def expected_rows(name: str, rules: Rules, **options) -> list[ReferenceResult]:
    model = model_of(name)
    special = {"mask_token_id": MASK, "eos_token_ids": EOS, "right_shift_logits": model.config.right_shift_logits}
    return [
        reference_decode(plain_logits(model), prompt, **{**OPTIONS, **special, **options}, rules=rules)
        for prompt in PROMPTS
    ]


def assert_rows_equal(output: D2FGenerationOutput, expected: list[ReferenceResult]):
    for row, result in enumerate(expected):
        tokens = output.sequences[row, max(map(len, PROMPTS)) :].tolist()
        assert tokens[: len(result.tokens)] == result.tokens and set(tokens[len(result.tokens) :]) <= {PAD}
        assert output.num_forward_passes[row] == result.num_forward_passes
        assert output.trace[row] == result.trace


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rules", GENERATE_RULES, ids=name_of)
def test_generate_decodes_each_row_of_a_batch_as_the_oracle(rules, name):
    options = arguments_of(rules)
    inputs = pad(PROMPTS, "left")
    output = model_of(name).generate(**inputs, **options, **FULL)
    assert_rows_equal(output, expected_rows(name, rules))
    uncached = model_of(name).generate(**inputs, **options, **FULL, use_cache=False)
    assert uncached.sequences.equal(output.sequences)
    assert uncached.num_forward_passes.equal(output.num_forward_passes)


@pytest.mark.parametrize("rules", GENERATE_RULES[1:], ids=name_of)
def test_each_option_changes_what_is_decoded(rules):
    """So the test above would not pass if `generate` left it out."""
    assert any(expected_rows(name, rules) != expected_rows(name, Rules()) for name in MODELS)
    if rules.num_branches > 1 or rules.remask_threshold:
        alone = dataclasses.replace(rules, num_branches=1, remask_threshold=0.0)
        assert any(expected_rows(name, rules) != expected_rows(name, alone) for name in MODELS)


def test_the_rows_end_at_different_steps_and_some_with_an_eos():
    for name in MODELS:
        rows = [row for rules in GENERATE_RULES for row in expected_rows(name, rules)]
        assert len({row.num_forward_passes for row in rows}) > 6
        assert any(EOS in row.tokens for row in rows) and any(len(row.tokens) == 14 for row in rows)


@pytest.mark.parametrize(
    "rules",
    [Rules(num_branches=3), Rules(remask_threshold=1.0), Rules(acceptance_rule="credit", remask_threshold=0.5)],
    ids=name_of,
)
@pytest.mark.parametrize(
    "options",
    [
        {"max_active_blocks": 1},
        {"max_active_blocks": 2, "max_new_tokens": 11},
        {"block_size": 1, "max_new_tokens": 6},
        {"block_size": 32, "max_new_tokens": 9},
        {"max_new_tokens": 1},
        {"block_add_threshold": 0.0, "block_activation_threshold": 0.5, "confidence_threshold": 0.4},
        {"block_add_threshold": 1.0, "block_activation_threshold": 1.0},
    ],
    ids=str,
)
def test_look_ahead_and_masking_again_go_with_all_shapes_and_thresholds(rules, options):
    for name in MODELS:
        output = model_of(name).generate(**pad(PROMPTS, "right"), **{**arguments_of(rules), **options}, **FULL)
        assert_rows_equal(output, expected_rows(name, rules, **options))


@pytest.mark.parametrize("rules", GENERATE_RULES, ids=name_of)
def test_rows_that_join_at_any_step_are_decoded_as_alone(rules):
    expected = [result.tokens for result in expected_rows("llada", rules)]
    prompts = [None, *map(torch.tensor, PROMPTS)]
    requests = [prompt for prompt in prompts for _ in range(2 if prompt is None else 1)]
    for max_batch_size in (2, 4):
        stream = model_of("llada").generate_stream_batch(iter(requests), max_batch_size, 6, **arguments_of(rules))
        finished = dict(stream)
        assert [finished[number].tolist() for number in range(len(PROMPTS))] == expected


@pytest.mark.parametrize("rules", [Rules(num_branches=3), Rules(remask_threshold=0.5)], ids=name_of)
def test_processors_that_need_the_tokens_right_before_are_refused(rules):
    [option] = keywords(rules)
    with pytest.raises(ValueError, match=f"no_repeat_ngram_size.*`{option}`.*leave out `{option}`"):
        model_of("llada").generate(torch.tensor([[1]]), **arguments_of(rules), no_repeat_ngram_size=2)


@pytest.mark.parametrize("rules", [Rules(num_branches=3), Rules(remask_threshold=0.5)], ids=name_of)
@pytest.mark.parametrize("name", MODELS)
def test_processors_sampling_and_scores_go_with_look_ahead_and_masking_again(rules, name):
    model = model_of(name)
    options = {**arguments_of(rules), **FULL, "output_scores": True, "output_logits": True}
    options |= {"repetition_penalty": 1.5, "min_new_tokens": 5}
    batch = model.generate(**pad(PROMPTS, "left"), **options)
    for row, prompt in enumerate(PROMPTS):
        alone = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **options)
        tokens = alone.sequences[0, len(prompt) :].tolist()
        assert batch.sequences[row, 6 : 6 + len(tokens)].tolist() == tokens
        assert batch.trace[row] == alone.trace[0]
        for position, token in enumerate(tokens):
            torch.testing.assert_close(batch.scores[position][row], alone.scores[position][0])
            torch.testing.assert_close(batch.logits[position][row], alone.logits[position][0])
            assert batch.scores[position][row].argmax() == token
            assert position >= 5 or batch.scores[position][row, EOS] == -math.inf
    sampling = {"do_sample": True, "num_return_sequences": 4}
    one, same, other = (
        model.generate(torch.tensor(PROMPTS[1:2]), **options, **sampling, generator=torch.Generator().manual_seed(i))
        for i in (0, 0, 1)
    )
    assert one.sequences.equal(same.sequences) and len({tuple(row) for row in one.sequences.tolist()}) == 4
    assert one.sequences.shape != other.sequences.shape or not one.sequences.equal(other.sequences)


class Recorder(TextDiffusionStreamer):
    """What a streamer is told, and in which state: prompt, puts, drafts."""

    def __init__(self):
        self.told, self.drafts = [], []

    def put(self, value):
        self.told += value.flatten().tolist()

    def put_draft(self, value, **kwargs):
        self.drafts.append(self.told + value.tolist())

    def end(self):
        pass


def told_early(result: ReferenceResult, start: int) -> bool:
    """Whether a token that all before it were decoded for was replaced later."""
    tokens = {}
    for step in result.trace:
        tokens |= dict(step["accepted"])
        prefix = [tokens[p] for p in itertools.takewhile(tokens.__contains__, itertools.count(start))]
        if prefix[: len(result.tokens)] != result.tokens[: len(prefix)]:
            return True
        for position in step["remasked"]:
            del tokens[position]
    return False


@pytest.mark.parametrize("name", MODELS)
def test_streamers_and_stopping_criteria_are_told_final_tokens_only(name):
    num_early = 0
    for threshold in (0.5, 1.0):
        rules = Rules(remask_threshold=threshold)
        for prompt, expected in zip(PROMPTS, expected_rows(name, rules), strict=True):
            streamer, texts = Recorder(), []

            def criterion(input_ids, scores, texts=texts, prompt=prompt, **kwargs):
                text = input_ids[0].tolist()
                # Without a new token it is asked again; before the first one, with a mask in its place.
                if text not in texts and text != [*prompt, MASK]:
                    texts.append(text)
                return torch.tensor([False])

            model_of(name).generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt)),
                **OPTIONS,
                **keywords(rules),
                streamer=streamer,
                stopping_criteria=StoppingCriteriaList([criterion]),
            )
            assert streamer.told == prompt + expected.tokens
            assert texts == [streamer.told[: len(prompt) + n + 1] for n in range(len(expected.tokens))]
            assert streamer.drafts
            num_early += told_early(expected, len(prompt))
    assert num_early > 0, "otherwise every way of telling is right"


def test_sdars_schedule_gives_the_first_steps_the_rest():
    num_steps = torch.tensor([[0, 1, 2, 3, 9]])
    assert required_tokens(num_steps, 8, 3).tolist() == [[3, 3, 2, 2, 2]]
    assert required_tokens(num_steps, 8, 8).tolist() == [[1] * 5]


@pytest.mark.parametrize(
    ("required", "threshold", "expected"),
    [
        (1, 0.5, [1, 0, 1, 0]),  # two are above it
        (2, 0.5, [1, 0, 1, 0]),
        (3, 0.5, [1, 0, 1, 1]),  # fewer than needed are above it: the best three
        (2, 1.0, [1, 0, 1, 0]),  # static
        (4, 1.0, [1, 0, 1, 1]),  # all that are masked
    ],
)
def test_a_full_block_accepts_at_least_what_is_required(required, threshold, expected):
    is_masked = torch.tensor([[[True, False, True, True]]])
    probability = torch.tensor([[[0.8, 0.99, 0.6, 0.1]]])
    arguments = (is_masked, probability, probability)
    is_full, number = torch.tensor([[True]]), torch.tensor([[required]])
    assert at_least_tokens(*arguments, is_full, threshold, number)[0, 0].int().tolist() == expected
    confident = (is_masked & (probability > threshold))[0, 0].int().tolist()
    assert at_least_tokens(*arguments, ~is_full, threshold, number)[0, 0].int().tolist() == confident
    if required == 1:
        assert accepted_tokens(*arguments, is_full, threshold)[0, 0].int().tolist() == expected


def test_sequential_takes_the_first_masked_tokens():
    is_masked = torch.tensor([[[False, True, True, True], [True, False, False, False]]])
    is_full = torch.tensor([[True, True]])
    assert sequential_tokens(is_masked, is_full, 2).int().tolist() == [[[0, 1, 1, 0], [1, 0, 0, 0]]]
    assert not sequential_tokens(is_masked, ~is_full, 2).any()


def test_sub_blocks_and_first_tokens_restrict_what_may_be_accepted():
    is_masked = torch.tensor([[[False, False, False, True, True], [True, True, False, False, False]]])
    assert first_unfinished_sub_blocks(is_masked, 2).int().tolist() == [[[0, 0, 0, 1, 0], [1, 1, 0, 0, 0]]]
    assert first_tokens_alone(is_masked, torch.tensor([True])).int().tolist() == [[[0, 0, 0, 1, 1], [1, 0, 0, 0, 0]]]
    assert first_tokens_alone(is_masked, torch.tensor([False])).equal(is_masked)

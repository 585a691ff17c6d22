"""The rules of decoding, against what the reference computed by hand-made numbers."""

import json

import pytest
import torch
from d2f_hf.modeling.acceptance_rules import accepted_tokens
from d2f_hf.modeling.decoding_rules import (
    as_blocks,
    block_sizes,
    decoded_ratio,
    final_blocks,
    final_length,
    first_index,
    fully_activated,
    opened_blocks,
    scatter_rows,
    scatter_where,
)
from d2f_hf.modeling.sampler import sample_tokens
from safetensors.torch import load_file

from golden_data import GOLDEN, TOKEN_RANKINGS

sample_cases = json.loads((GOLDEN / "sample_tokens.json").read_text())


@pytest.mark.parametrize("strategy", ["default", "neg_entropy", "margin_confidence"])
def test_tokens_probabilities_and_ranks_are_those_of_the_reference(strategy):
    golden = load_file(GOLDEN / "sample_tokens.safetensors")
    tokens, probability, ranking = sample_tokens(
        golden["logits"], do_sample=False, token_ranking=TOKEN_RANKINGS[strategy]
    )
    assert tokens.equal(golden[f"{strategy}.x0"])
    torch.testing.assert_close(probability, golden[f"{strategy}.initial_confidence"])
    torch.testing.assert_close(ranking, golden[f"{strategy}.confidence"])


@pytest.mark.parametrize("case", sample_cases["selection_rule"], ids=lambda case: case["name"])
def test_accepted_tokens_are_those_of_the_reference(case):
    accepted = accepted_tokens(
        is_masked=torch.ones(1, 1, len(case["max_prob"]), dtype=torch.bool),
        probability=torch.tensor([[case["max_prob"]]]),
        ranking=torch.tensor([[case["strategy_conf"]]]),
        is_fully_activated=torch.tensor([[case["is_complete"]]]),
        confidence_threshold=case["tau_conf"],
    )
    assert accepted[0, 0].nonzero().flatten().tolist() == sorted(case["selected"])


def test_no_block_is_opened_above_the_cap_on_blocks_in_flight():
    """Five blocks, the first final; block 3 is decoded but waits for block 2, so it counts as in flight."""
    ratio = torch.tensor([[1.0, 0.5, 1.0, 0.0, 0.0]])
    opened, num_blocks, no_eos = torch.tensor([3]), torch.tensor([5]), torch.tensor([5])
    for cap, expected in ((1, 3), (2, 3), (3, 4), (None, 4)):
        assert opened_blocks(opened, ratio, num_blocks, no_eos, 0.1, cap).tolist() == [expected]


@pytest.mark.parametrize("vocab_size", [64 * 64, 64 * 65, 64 * 64 + 1])
def test_the_best_of_a_wide_vocabulary_is_the_first_of_the_largest_scores(vocab_size):
    scores = torch.randint(0, 60, (50, vocab_size), generator=torch.Generator().manual_seed(0)).float()
    scores[0] = 1.0
    scores[1, -1] = 100.0
    tokens, probability, _ = sample_tokens(scores.clone(), do_sample=False, token_ranking="probability")
    expected = torch.tensor([row.tolist().index(max(row.tolist())) for row in scores])
    assert tokens.equal(expected)
    torch.testing.assert_close(probability, scores.softmax(-1).amax(-1))


def test_the_decoded_ratio_of_a_short_last_block_counts_the_tokens_that_it_has():
    """Limits of 5 and 4 tokens in blocks of 3: the last blocks have 2 tokens and 1."""
    is_masked = torch.tensor([[0, 0, 0, 1, 0], [1, 0, 1, 1, 0]], dtype=torch.bool)
    sizes = block_sizes(torch.tensor([5, 4]), block_size=3, num_blocks=2)
    assert sizes.tolist() == [[3, 2], [3, 1]]
    ratio = decoded_ratio(as_blocks(is_masked, 3), sizes)
    torch.testing.assert_close(ratio, torch.tensor([[1.0, 0.5], [1 / 3, 0.0]]))


def test_a_block_behind_the_limit_has_a_ratio_too():
    sizes = block_sizes(torch.tensor([2]), block_size=3, num_blocks=3)
    assert sizes.tolist() == [[2, 1, 1]]
    assert decoded_ratio(torch.zeros(1, 3, 3, dtype=torch.bool), sizes).tolist() == [[1.0, 1.0, 1.0]]


def test_blocks_are_fully_activated_by_the_block_before_them_and_the_first_by_the_prompt():
    ratio = torch.tensor([[0.0, 0.5, 0.4], [0.5, 0.6, 1.0]])
    assert fully_activated(ratio, 0.5).tolist() == [[True, False, True], [True, True, True]]
    per_row = torch.tensor([[0.0], [0.55]])
    assert fully_activated(ratio, per_row).tolist() == [[True, True, True], [True, False, True]]


def test_blocks_are_final_up_to_the_first_that_is_not_decoded():
    ratio = torch.tensor([[1.0, 1.0, 0.5, 1.0], [1.0, 1.0, 1.0, 1.0], [0.9, 1.0, 1.0, 1.0]])
    assert final_blocks(ratio, torch.tensor([4, 2, 4])).tolist() == [2, 2, 0], "a block that is not open is not final"


def test_final_tokens_are_those_of_the_final_blocks():
    """Blocks of 3, a limit of 8: the last block has 2 tokens."""
    first_masked, opened_length = torch.tensor([0, 2, 3, 7, 8, 7]), torch.tensor([3, 3, 6, 8, 8, 6])
    assert final_length(first_masked, opened_length, 3).tolist() == [0, 0, 3, 6, 8, 6]


def test_the_first_block_is_opened_whatever_the_threshold():
    opened, no_eos = torch.tensor([0]), torch.tensor([3])
    assert opened_blocks(opened, torch.zeros(1, 3), torch.tensor([3]), no_eos, 1.0).tolist() == [1]


def test_a_block_is_opened_at_the_threshold_of_its_row_and_within_its_limit():
    ratio = torch.tensor([[0.5, 0.0], [0.5, 0.0], [1.0, 0.0]])
    opened, num_blocks = torch.tensor([1, 1, 1]), torch.tensor([2, 2, 1])
    threshold = torch.tensor([0.5, 0.6, 0.1])
    assert opened_blocks(opened, ratio, num_blocks, num_blocks, threshold).tolist() == [2, 1, 1]


def test_an_eos_drops_the_blocks_behind_it_and_lets_none_be_added():
    """Four blocks are open, all decoded far enough for another one."""
    opened, num_blocks, ratio = torch.full((4,), 4), torch.full((4,), 6), torch.ones(4, 6)
    eos_block = torch.tensor([0, 2, 3, 6])
    for cap in (None, 1, torch.tensor([1, 2, 3, 4])):
        assert opened_blocks(opened, ratio, num_blocks, eos_block, 0.1, cap).tolist() == [1, 3, 4, 5]


def test_caps_may_differ_from_row_to_row():
    ratio = torch.tensor([[1.0, 0.5, 0.5, 0.0]] * 3)
    opened, num_blocks = torch.full((3,), 3), torch.full((3,), 4)
    assert opened_blocks(opened, ratio, num_blocks, num_blocks, 0.1, torch.tensor([1, 2, 3])).tolist() == [3, 3, 4]


def test_values_of_tokens_stand_where_the_tokens_are():
    where = torch.tensor([[0, 1, 0], [1, 0, 1]], dtype=torch.bool)
    row, index = where.nonzero(as_tuple=True)
    values = torch.tensor([1.0, 2.0, 3.0])
    expected = [[0.0, 1.0, 0.0], [2.0, 0.0, 3.0]]
    assert scatter_where(values, where).tolist() == scatter_rows(values, row, index, where.shape).tolist() == expected
    assert as_blocks(scatter_where(values, where), 2).tolist() == [[[0, 1], [0, 0]], [[2, 0], [3, 0]]]
    assert first_index(where).tolist() == [1, 0] and first_index(where[:, :1]).tolist() == [1, 0]

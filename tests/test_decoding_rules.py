"""The rules of decoding, against what the reference computed by hand-made numbers."""

import json

import pytest
import torch
from d2f_hf.modeling.acceptance_rules import accepted_tokens
from d2f_hf.modeling.decoding_rules import opened_blocks
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

"""Who may attend to whom, against the literal definition, transformers' own masks, and the reference's."""

import json

import pytest
import torch
from d2f_hf.modeling import block_causal_mask, positions_without_padding, predicting_positions, visible_length
from safetensors.torch import load_file
from transformers.masking_utils import create_causal_mask

import plain_models
from golden_data import GOLDEN
from tiny_models import tiny_config

# B batch, L sequence


def block_of(position: int, prompt_length: int, block_size: int) -> int:
    """The definition: the prompt is block 0, response blocks are counted from its end."""
    return 0 if position < prompt_length else 1 + (position - prompt_length) // block_size


@pytest.mark.parametrize("prompt_length", [0, 1, 3, 4, 11])
@pytest.mark.parametrize("block_size", [1, 3, 4, 32])
def test_a_token_sees_all_up_to_the_end_of_its_block(prompt_length, block_size):
    length = 11
    expected = []
    for position in range(length):
        block = block_of(position, prompt_length, block_size)
        end = position
        while block_of(end, prompt_length, block_size) == block:
            end += 1
        expected.append(end)
    position_ids, prompt_lengths = torch.arange(length)[None], torch.tensor([prompt_length])
    assert visible_length(position_ids, prompt_lengths, block_size).tolist() == [expected]
    mask = block_causal_mask(position_ids, prompt_lengths, block_size, position_ids)
    assert mask.shape == (1, 1, length, length)
    assert mask[0, 0].equal(plain_models.block_causal_mask(length, prompt_length, block_size))


def test_each_row_has_its_own_prompt_and_block_size_is_shared():
    position_ids, prompt_lengths = torch.arange(9)[None].expand(2, -1), torch.tensor([2, 5])
    mask = block_causal_mask(position_ids, prompt_lengths, 3, torch.arange(9)[None])
    for row, prompt_length in enumerate([2, 5]):
        assert mask[row, 0].equal(plain_models.block_causal_mask(9, prompt_length, 3))


def test_a_window_of_queries_gets_its_rows_of_the_whole_mask():
    whole = plain_models.block_causal_mask(9, 2, 3)
    window = torch.tensor([[4, 5, 6]])
    mask = block_causal_mask(window, torch.tensor([2]), 3, torch.arange(9)[None])
    assert mask[0, 0].equal(whole[4:7])


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_seen_by_nobody_and_no_row_of_the_mask_is_empty(side):
    """An empty row of a mask is NaN in some attention kernels, on a GPU only."""
    lengths, width, prompt_lengths = [4, 7], 7, torch.tensor([2, 3])
    attention_mask = torch.zeros(2, width, dtype=torch.long)
    for row, length in enumerate(lengths):
        attention_mask[row, width - length if side == "left" else 0 :][:length] = 1
    position_ids = positions_without_padding(attention_mask)
    mask = block_causal_mask(position_ids, prompt_lengths, 2, position_ids, attention_mask)
    assert mask.any(-1).all(), "not even padding is without keys"
    for row, length in enumerate(lengths):
        is_token = attention_mask[row].bool()
        expected = plain_models.block_causal_mask(length, int(prompt_lengths[row]), 2)
        assert mask[row, 0][is_token][:, is_token].equal(expected)
        assert not mask[row, 0][:, ~is_token].any()


def test_positions_leave_padding_out():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 1, 1, 0]])
    assert positions_without_padding(mask).tolist() == [
        [0, 0, 0, 1, 2],
        [0, 1, 2, 2, 2],
        [0, 1, 2, 3, 4],
        [0, 0, 1, 2, 2],
    ]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_the_mask_equals_the_one_that_transformers_makes_from_block_ids(implementation, side):
    config = tiny_config()
    config._attn_implementation = implementation
    length, prompt_lengths, block_size = 10, [3, 4], 3
    attention_mask = torch.ones(2, length, dtype=torch.long)
    if side == "left":
        attention_mask[0, :3] = 0
    elif side == "right":
        attention_mask[0, -3:] = 0
    position_ids = positions_without_padding(attention_mask)
    blocks = torch.tensor(
        [
            [block_of(position, prompt_length, block_size) for position in row]
            for row, prompt_length in zip(position_ids.tolist(), prompt_lengths, strict=True)
        ]
    )
    no_cache = None  # by position, for it has another name in older versions of transformers
    theirs = create_causal_mask(
        config,
        torch.zeros(2, length, 32),
        attention_mask,
        no_cache,
        position_ids=position_ids,
        block_sequence_ids=blocks,
    )
    allowed = theirs if theirs.dtype == torch.bool else theirs == 0
    ours = block_causal_mask(position_ids, torch.tensor(prompt_lengths), block_size, position_ids, attention_mask)
    is_token = attention_mask.bool()  # what padding sees does not matter
    for row in range(2):
        assert allowed[row, 0][is_token[row]].equal(ours[row, 0][is_token[row]])
    assert not ours.all()


def test_the_mask_equals_the_references_training_masks():
    cases = json.loads((GOLDEN / "training.json").read_text())["attention_masks"]["cases"]
    golden = load_file(GOLDEN / "training.safetensors")
    assert len(cases) == 3
    for case in cases:
        position_ids = torch.arange(case["seq_len"])[None].expand(case["batch"], -1)
        prompt_lengths = torch.tensor(case["prompt_lengths"])
        mask = block_causal_mask(position_ids, prompt_lengths, case["block_size"], position_ids)
        assert mask.equal(golden[case["tensor"]].bool())


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_the_mask_equals_the_references_decoding_masks(family):
    golden = load_file(GOLDEN / f"logits_{family}.safetensors")
    names = [name for name in golden if name.startswith("mask_allowed.")]
    assert len(names) >= 6
    for name in names:
        case = name.partition(".")[2]
        position_ids = torch.arange(len(golden[name]))[None]
        mask = block_causal_mask(
            position_ids, golden[f"prompt_length.{case}"], int(golden[f"block_size.{case}"]), position_ids
        )
        assert mask[0, 0].equal(golden[name].bool())


def test_logits_predict_their_own_token_or_the_next_one():
    is_masked = torch.tensor([[False, True, True, False, True], [False, False, False, False, True]])
    assert predicting_positions(is_masked, right_shift_logits=False).equal(is_masked)
    shifted = predicting_positions(is_masked, right_shift_logits=True)
    assert shifted.tolist() == [[True, True, False, True, False], [False, False, False, True, False]]
    assert (is_masked.nonzero() - shifted.nonzero()).tolist() == [[0, 1]] * 4, "in the order of the masked tokens"


@pytest.mark.parametrize("block_size", [1, 3, 4])
@pytest.mark.parametrize("prompt_length", [0, 2, 7])
def test_blocks_from_the_start_of_the_sequence_do_not_depend_on_the_prompt(block_size, prompt_length):
    position, lengths = torch.arange(10)[None], torch.tensor([prompt_length])
    visible = visible_length(position, lengths, block_size, "sequence")
    assert visible.equal((position // block_size + 1) * block_size)
    block = position[0] // block_size
    mask = block_causal_mask(position, lengths, block_size, position, block_alignment="sequence")
    assert mask[0, 0].equal(block[None, :] <= block[:, None])

import torch
from d2f_hf.modeling.block_grid import block_grid, num_further_tokens


def test_blocks_from_the_prompt_begin_with_the_response_and_end_with_it():
    lengths, limits = torch.tensor([1, 4, 7]), torch.tensor([5, 8, 1])
    starts, offsets, row_limits, ends = block_grid(lengths, limits, 4, "prompt")
    assert starts.equal(lengths) and offsets.tolist() == [0, 0, 0]
    assert row_limits.equal(limits) and ends.equal(limits)
    assert num_further_tokens(4, "prompt") == 0


def test_blocks_from_the_start_hold_the_rest_of_the_prompt_and_are_whole():
    lengths, limits = torch.tensor([1, 4, 7, 8]), torch.tensor([5, 8, 1, 1])
    starts, offsets, row_limits, ends = block_grid(lengths, limits, 4, "sequence")
    assert starts.tolist() == [0, 4, 4, 8]
    assert offsets.tolist() == [1, 0, 3, 0]
    assert row_limits.tolist() == [6, 8, 4, 1]
    assert ends.tolist() == [8, 8, 4, 4]


def test_there_is_room_for_every_row():
    for block_size in range(1, 9):
        lengths, limits = torch.cartesian_prod(torch.arange(1, 20), torch.arange(1, 20)).unbind(1)
        grid = block_grid(lengths, limits, block_size, "sequence")
        assert (grid.ends <= limits + num_further_tokens(block_size, "sequence")).all()
        assert (grid.starts + grid.ends <= lengths + limits + block_size - 1).all()

"""The cache whose rows are filled at their own pace."""

import pytest
import torch
from d2f_hf.modeling.cache_d2f import CHUNK, PADDING
from transformers.cache_utils import Cache

from d2f_hf import D2FCache

# B batch, H heads, Q fed tokens, S slots, D head dimension


def states(rows: list[list[int]], heads: int = 2, width: int = 3) -> torch.Tensor:
    """Keys `(B, H, Q, D)` that say which token they belong to; every head and dimension holds its number."""
    return torch.tensor(rows, dtype=torch.float32)[:, None, :, None].expand(-1, heads, -1, width)


def tokens(keys: torch.Tensor) -> list[list[int]]:
    assert (keys == keys[:, :1, :, :1]).all(), "heads and dimensions were mixed up"
    return keys[:, 0, :, 0].long().tolist()


def test_each_row_writes_to_its_own_slots():
    cache = D2FCache(num_layers=1, max_length=5)
    cache.set_window(torch.tensor([[0, 1, 2], [2, 3, 4]]), read_length=5)
    keys, values = cache.update(states([[1, 2, 3], [4, 5, 6]]), -states([[1, 2, 3], [4, 5, 6]]), 0)
    assert keys.shape == (2, 2, 5, 3)
    assert tokens(keys) == [[1, 2, 3, 0, 0], [0, 0, 4, 5, 6]]
    assert values.equal(-keys)


def test_a_block_in_flight_is_overwritten_and_what_is_not_fed_again_stays():
    cache = D2FCache(num_layers=1, max_length=4)
    cache.set_window(torch.tensor([[0, 1, 2, 3]]), read_length=4)
    cache.update(states([[1, 2, 9, 9]]), states([[1, 2, 9, 9]]), 0)
    cache.set_window(torch.tensor([[2, 3]]), read_length=4)
    keys, _ = cache.update(states([[3, 4]]), states([[3, 4]]), 0)
    assert tokens(keys) == [[1, 2, 3, 4]]


def test_padding_is_written_where_nobody_reads():
    cache = D2FCache(num_layers=1, max_length=3)
    cache.set_window(torch.tensor([[0, 1, PADDING]]), read_length=3)
    keys, _ = cache.update(states([[1, 2, 9]]), states([[1, 2, 9]]), 0)
    assert tokens(keys) == [[1, 2, 0]]


def test_packed_tokens_are_written_to_their_rows_and_back():
    cache = D2FCache(num_layers=1)
    cache.set_window(torch.tensor([[0, 1, PADDING], [0, PADDING, PADDING], [0, 1, 2]]), read_length=3, is_packed=True)
    packed = states([[1, 2, 3, 4, 5, 6]])
    keys, values = cache.update(packed, -packed, 0)
    assert tokens(keys) == [[1, 2, 0], [3, 0, 0], [4, 5, 6]] and values.equal(-keys)
    rows = cache.as_rows(packed)  # in the place of padding anything
    assert rows.shape == (3, 2, 3, 3)
    assert [rows[a, 0, q, 0].item() for a, q in ((0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2))] == [1, 2, 3, 4, 5, 6]
    assert cache.as_packed(rows.transpose(1, 2)).equal(packed.transpose(1, 2))


def test_layers_are_apart_and_share_the_window():
    cache = D2FCache(num_layers=2, max_length=2)
    cache.set_window(torch.tensor([[1]]), read_length=2)
    cache.update(states([[5]]), states([[5]]), 0)
    keys, _ = cache.update(states([[7]]), states([[7]]), 1)
    assert tokens(keys) == [[0, 7]]
    assert cache.layers[0].keys[0, :3, 0, 0].tolist() == [0, 0, 5], "the first slot is for padding"


def test_only_the_slots_up_to_the_longest_row_are_read():
    cache = D2FCache(num_layers=1, max_length=100)
    cache.set_window(torch.tensor([[0, 1]]), read_length=2)
    keys, values = cache.update(states([[1, 2]]), states([[1, 2]]), 0)
    assert keys.shape[2] == values.shape[2] == 2
    assert cache.get_mask_sizes(2, 0) == (2, 0)


def test_memory_is_taken_in_chunks_and_what_is_there_stays():
    cache = D2FCache(num_layers=2)
    shapes, expected, keys, values = set(), [], torch.empty(0), torch.empty(0)
    for slot in range(2 * CHUNK + 1):
        cache.set_window(torch.tensor([[slot]]), read_length=slot + 1)
        expected.append(slot + 1)
        for layer in range(2):
            keys, values = cache.update(states([[slot + 1]]), -states([[slot + 1]]), layer)
        shapes.add(cache.layers[0].keys.shape[1])
    assert shapes == {1 + CHUNK, 1 + 2 * CHUNK, 1 + 3 * CHUNK}
    assert tokens(keys) == [expected] and values.equal(-keys)


def test_no_more_memory_is_taken_than_the_longest_row_needs():
    cache = D2FCache(num_layers=1, max_length=5)
    cache.set_window(torch.tensor([[0, 1]]), read_length=2)
    cache.update(states([[1, 2]]), states([[1, 2]]), 0)
    assert cache.layers[0].keys.shape[1] == 1 + 5


def test_rows_come_and_go():
    cache = D2FCache(num_layers=1)
    cache.set_window(torch.tensor([[0], [0], [0]]), read_length=1)
    cache.update(states([[1], [2], [3]]), states([[1], [2], [3]]), 0)
    cache.move_rows(torch.tensor([2]), torch.tensor([0]))  # the first row has ended
    cache.set_window(torch.tensor([[1], [1]]), read_length=2)
    keys, _ = cache.update(states([[4], [5]]), states([[4], [5]]), 0)
    assert tokens(keys) == [[3, 4], [2, 5]]
    cache.move_rows(torch.tensor([0, 0]), torch.tensor([2, 3]))  # two copies of a row, one in a new place
    cache.set_window(torch.tensor([[2]] * 4), read_length=3)
    keys, _ = cache.update(states([[6], [7], [8], [9]]), states([[6], [7], [8], [9]]), 0)
    assert tokens(keys) == [[3, 4, 6], [2, 5, 7], [3, 4, 8], [3, 4, 9]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_keep_their_dtype_and_shape(dtype):
    cache = D2FCache(num_layers=1, max_length=2)
    cache.set_window(torch.tensor([[0]]), read_length=2)
    keys, values = cache.update(torch.ones(1, 2, 1, 3, dtype=dtype), torch.ones(1, 2, 1, 5, dtype=dtype), 0)
    assert (keys.dtype, values.dtype) == (dtype, dtype)
    assert (keys.shape[-1], values.shape[-1]) == (3, 5)


def test_it_is_a_transformers_cache_with_the_usual_questions():
    cache = D2FCache(num_layers=2)
    assert isinstance(cache, Cache) and len(cache) == 2
    assert cache.get_seq_length() == 0
    cache.set_window(torch.tensor([[0, 1]]), read_length=2)
    cache.update(states([[1, 2]]), states([[1, 2]]), 0)
    assert cache.get_seq_length() == 2
    assert cache.layers[0].get_max_length() == cache.layers[0].get_max_cache_shape() == CHUNK, "all there is room for"
    cache.reset()
    assert not cache.layers[0].keys.any()


def test_the_window_is_a_tuple_with_names():
    cache, slots = D2FCache(num_layers=1), torch.tensor([[0, 1]])
    cache.set_window(slots, read_length=2, is_packed=True)
    assert cache.window == (slots, 2, True)
    assert (cache.window.write_slots, cache.window.read_length, cache.window.is_packed) == (slots, 2, True)

"""The forward over windows: what the model is given, against the definition of block-causal attention."""

import pytest
import torch
from d2f_hf.modeling import window_forward
from d2f_hf.modeling.block_causal import block_causal_mask
from d2f_hf.modeling.window_forward import WindowForward, bucket

from tiny_models import FAMILIES, VOCAB_SIZE, tiny_model

K = 3


def random_sequences(num_rows: int, length: int) -> torch.LongTensor:
    return torch.randint(0, VOCAB_SIZE - 3, (num_rows, length), generator=torch.Generator().manual_seed(0))


def wanted(starts: list[int], ends: list[int], prompts: list[int]) -> tuple[torch.LongTensor, torch.LongTensor]:
    """Rows and positions of the response tokens in the windows."""
    pairs = [
        (row, position - prompt)
        for row, (start, end, prompt) in enumerate(zip(starts, ends, prompts, strict=True))
        for position in range(max(start, prompt), end)
    ]
    row, index = torch.tensor(pairs).T
    return row, index


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_rows", [1, 3])
def test_windows_behind_the_prompt_give_what_the_whole_sequence_gives(family, num_rows):
    """Three forwards: the prompt, windows that start with a block, and the same with a short last block."""
    model = tiny_model(family=family)
    sequences, prompts = random_sequences(4, 20), [5, 2, 7][:num_rows]
    rows, prompt_lengths = torch.tensor([2, 0, 3])[:num_rows], torch.tensor(prompts)
    feed, fed = WindowForward(model, K, 20, torch.device("cpu")), []
    model.model.register_forward_pre_hook(lambda _, __, named: fed.append(named), with_kwargs=True)
    windows = [
        ([0, 0, 0], [prompt + K for prompt in prompts]),
        ([prompt + K for prompt in prompts], [prompt + n for prompt, n in zip(prompts, (6, 9, 9), strict=False)]),
        ([prompt + 6 for prompt in prompts], [prompt + n for prompt, n in zip(prompts, (8, 9, 12), strict=False)]),
    ]
    for starts, ends in windows:
        starts, position = starts[:num_rows], torch.arange(20)[None]
        row, index = wanted(starts, ends, prompts)
        with torch.no_grad():
            logits = feed(sequences, rows, prompt_lengths, torch.tensor(starts), torch.tensor(ends), row, index)
        named = fed[-1]
        for a, (start, end) in enumerate(zip(starts, ends, strict=True)):
            first = max(start - feed.look_back, 0)
            own = slice(0, end - first)
            positions = torch.arange(first, end)
            assert named["position_ids"][a, own].equal(positions)
            assert named["input_ids"][a, own].equal(sequences[rows[a], positions])
            num_slots = named["attention_mask"].shape[-1]
            mask = block_causal_mask(positions[None], prompt_lengths[a : a + 1], K, position[:, :num_slots])
            mask = mask & (position[:, :num_slots] < end)
            assert named["attention_mask"][a, 0, own].equal(mask[0, 0])
            with torch.no_grad():
                whole = model(
                    sequences[rows[a], :end][None], prompt_lengths=prompt_lengths[a : a + 1], block_size=K
                ).logits[0]
            fed.pop()
            expected = whole[prompts[a] + index[row == a] - feed.look_back]
            torch.testing.assert_close(logits[row == a], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_window_gives_the_same_logits(family, monkeypatch):
    model, sequences = tiny_model(family=family), random_sequences(3, 40)
    prompts, starts, ends = [5, 2, 30], [0, 0, 0], [8, 8, 36]
    row, index = wanted(starts, ends, prompts)
    arguments = (sequences, torch.arange(3), torch.tensor(prompts), torch.tensor(starts), torch.tensor(ends))
    results = []
    for is_packed in (True, False):
        monkeypatch.setattr(window_forward, "is_worth_packing", lambda is_fed, is_packed=is_packed: is_packed)
        feed = WindowForward(model, K, 40, torch.device("cpu"))
        with torch.no_grad():
            results.append(feed(*arguments, row, index))
        assert feed.cache.window[2] == is_packed
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)


def test_padding_is_left_out_where_there_is_much_of_it():
    fed = torch.ones(8, 50, dtype=torch.bool)
    assert not window_forward.is_worth_packing(fed)
    fed[:, 41:] = False
    assert not window_forward.is_worth_packing(fed), "18 % of the positions"
    fed[:, 39:] = False
    assert window_forward.is_worth_packing(fed), "22 %"
    assert not window_forward.is_worth_packing(fed[:4]), "so few that it is not worth the trouble"


def test_sizes_are_rounded_up_to_a_unit_doubled():
    assert [bucket(size, 3) for size in (1, 3, 4, 6, 7, 12, 13)] == [3, 3, 6, 6, 12, 12, 24]

"""Noise schedules and masking: `d2f_hf.noising`."""

import copy
import json
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing

from d2f_hf.data import D2FDataCollator
from d2f_hf.noising import (
    D2FNoisingCollator,
    causal_attention_mask,
    mask_tokens,
    random_mask_ratio,
    rising_mask_ratios,
    token_mask_ratios,
)

# B batch, L sequence, N blocks

GOLDEN_TRAINING = Path(__file__).parent / "golden" / "training.json"
PAD, EOS, MASK = 0, 1, 3
GOLDEN_SCHEDULES = json.loads(GOLDEN_TRAINING.read_text())["noise_schedule"]["stats"]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- rising mask ratios ----


@pytest.mark.parametrize("golden", GOLDEN_SCHEDULES, ids=lambda golden: f"{golden['num_blocks']}-blocks")
def test_rising_mask_ratios_equal_the_reference_schedule(golden):
    """Same seed, same draws in the same order: the statistics agree to the six digits that were stored."""
    torch.manual_seed(golden["seed"])
    ratios = rising_mask_ratios(torch.full((golden["samples"],), golden["num_blocks"]))
    found = {"min": ratios.amin(0), "mean": ratios.mean(0), "max": ratios.amax(0), "std": ratios.std(0)}
    for name, value in found.items():
        torch.testing.assert_close(value, torch.tensor(golden[name]), atol=2e-6, rtol=0, msg=name)


def test_rising_mask_ratios_never_fall_and_stay_in_range():
    ratios = rising_mask_ratios(torch.full((500,), 7), low=0.3, high=0.7, generator=generator())
    assert (ratios.diff(dim=1) >= 0).all()
    assert ratios.min() >= 0.3
    assert ratios.max() <= 0.7


def test_the_slope_of_a_row_follows_its_own_number_of_blocks():
    """With the slope of the longest row, the last block of a two-block row would hardly be noisier than its first."""
    num_blocks = torch.full((4000,), 2)
    num_blocks[0] = 16
    ratios = rising_mask_ratios(num_blocks, generator=generator())[1:]
    assert ratios[:, 0].mean() == pytest.approx(0.45, abs=0.01)
    assert ratios[:, 1].mean() == pytest.approx(0.575, abs=0.01)


def test_ratios_behind_the_last_block_of_a_row_are_zero():
    ratios = rising_mask_ratios(torch.tensor([1, 3]), generator=generator())
    assert (ratios > 0).tolist() == [[True, False, False], [True, True, True]]


def test_equal_bounds_give_every_block_the_same_ratio():
    ratios = rising_mask_ratios(torch.tensor([3, 3]), low=0.5, high=0.5, generator=generator())
    assert ratios.tolist() == [[0.5] * 3] * 2


@pytest.mark.parametrize(
    "num_blocks", [torch.tensor([2, 0]), torch.tensor([1.0]), torch.tensor([[1]]), torch.tensor([])]
)
def test_rising_mask_ratios_reject_anything_but_a_vector_of_positive_counts(num_blocks):
    with pytest.raises(ValueError, match="`num_blocks` must be"):
        rising_mask_ratios(num_blocks)


@pytest.mark.parametrize(("low", "high"), [(-0.1, 0.5), (0.6, 0.5), (0.5, 1.1), (float("nan"), 0.5)])
def test_rising_mask_ratios_reject_bounds_outside_zero_to_one_or_out_of_order(low, high):
    with pytest.raises(ValueError, match="`low` and `high` must"):
        rising_mask_ratios(torch.tensor([2]), low=low, high=high)


# ---- one ratio per row ----


def test_stratified_ratios_cover_the_unit_interval_evenly():
    ratios = random_mask_ratio(16, generator=generator()).sort().values
    torch.testing.assert_close(ratios.diff(), torch.full((15,), 1 / 16))
    assert 0 < ratios[0] <= 1 / 16


@pytest.mark.parametrize("stratified", [True, False])
def test_the_ratio_of_every_row_is_uniform(stratified):
    draws = generator()
    ratios = torch.stack([random_mask_ratio(4, stratified=stratified, generator=draws) for _ in range(4000)])  # [., B]
    for row in ratios.T:
        histogram = torch.histc(row, bins=4, min=0, max=1) / len(row)
        torch.testing.assert_close(histogram, torch.full((4,), 0.25), atol=0.03, rtol=0)
    assert ratios.min() > 0
    assert ratios.max() <= 1


def test_random_mask_ratio_rejects_an_empty_batch():
    with pytest.raises(ValueError, match="`batch_size` must be at least 1, got 0"):
        random_mask_ratio(0)


# ---- ratios of tokens ----


def test_token_mask_ratios_spread_block_ratios_from_the_end_of_each_prompt():
    ratios = token_mask_ratios(torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.0]]), torch.tensor([1, 4]), 7, 2)
    expected = [[0, 0.1, 0.1, 0.2, 0.2, 0.3, 0.3], [0, 0, 0, 0, 0.4, 0.4, 0.5]]
    torch.testing.assert_close(ratios, torch.tensor(expected))


def test_positions_behind_the_last_block_have_ratio_zero():
    ratios = token_mask_ratios(torch.tensor([[0.5]]), torch.tensor([1]), 5, 2)
    assert ratios.tolist() == [[0, 0.5, 0.5, 0, 0]]


def test_one_wide_block_gives_the_whole_response_one_ratio():
    ratios = token_mask_ratios(torch.tensor([0.25, 0.75])[:, None], torch.tensor([1, 2]), 4, block_size=4)
    assert ratios.tolist() == [[0, 0.25, 0.25, 0.25], [0, 0, 0.75, 0.75]]


def test_token_mask_ratios_reject_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match="`mask_ratios` must have shape"):
        token_mask_ratios(torch.tensor([0.5]), torch.tensor([1]), 4, 2)
    with pytest.raises(ValueError, match="`prompt_lengths` must have one entry per row"):
        token_mask_ratios(torch.tensor([[0.5]]), torch.tensor([1, 2]), 4, 2)
    with pytest.raises(ValueError, match="`block_size` must be at least 1"):
        token_mask_ratios(torch.tensor([[0.5]]), torch.tensor([1]), 4, 0)


# ---- masking ----

MASK = 99


def test_only_maskable_tokens_are_masked():
    input_ids = torch.arange(8).reshape(2, 4)
    maskable = torch.tensor([[False, True, True, False], [False, False, True, True]])
    noisy_ids, is_masked = mask_tokens(input_ids, maskable, torch.ones(2, 4), MASK)
    assert noisy_ids.tolist() == [[0, MASK, MASK, 3], [4, 5, MASK, MASK]]
    assert torch.equal(is_masked, maskable)
    assert input_ids.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]  # left as it was


def test_tokens_are_masked_with_their_own_probability():
    ratios = torch.tensor([[0.0, 0.2, 0.7, 1.0]]).expand(5000, 4)
    noisy_ids, is_masked = mask_tokens(
        torch.zeros(5000, 4, dtype=torch.long), torch.ones(5000, 4, dtype=torch.bool), ratios, MASK, generator()
    )
    assert torch.equal(noisy_ids == MASK, is_masked)
    torch.testing.assert_close(is_masked.float().mean(0), ratios[0], atol=0.02, rtol=0)
    assert not is_masked[:, 0].any()
    assert is_masked[:, 3].all()


def test_a_generator_repeats_the_noise():
    input_ids, ratios = torch.zeros(3, 50, dtype=torch.long), torch.full((3, 50), 0.5)
    first, second, other = (
        mask_tokens(input_ids, input_ids == 0, ratios, MASK, generator(seed))[1] for seed in (1, 1, 2)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_mask_tokens_rejects_inputs_that_do_not_fit():
    ids, maskable, ratios = torch.zeros(1, 3, dtype=torch.long), torch.ones(1, 3, dtype=torch.bool), torch.ones(1, 3)
    with pytest.raises(ValueError, match="`input_ids` must have shape"):
        mask_tokens(ids[0], maskable, ratios, MASK)
    with pytest.raises(ValueError, match="`maskable` must be a bool tensor"):
        mask_tokens(ids, maskable.long(), ratios, MASK)
    with pytest.raises(ValueError, match="`token_mask_ratios` must have the shape"):
        mask_tokens(ids, maskable, ratios[:, :2], MASK)
    with pytest.raises(ValueError, match="`token_mask_ratios` must lie in"):
        mask_tokens(ids, maskable, 50 * ratios, MASK)


# ---- D2FNoisingCollator ----


def tiny_rows(count: int = 16) -> list[dict]:
    """Tokenized examples of different lengths; tokens 4 and up."""
    rng, rows = random.Random(0), []
    for _ in range(count):
        prompt_length, response_length = rng.randint(1, 5), rng.randint(2, 9)
        tokens = [rng.randrange(4, 40) for _ in range(prompt_length + response_length)]
        rows.append({"input_ids": tokens + [EOS], "prompt_length": prompt_length})
    return rows


def noising(**options) -> D2FNoisingCollator:
    collate = D2FDataCollator(block_size=4, eos_token_id=EOS, pad_token_id=PAD, eos_tail="block")
    defaults = {"objective": "distillation", "mask_ratio_low": 0.2, "mask_ratio_high": 0.7}
    return D2FNoisingCollator(collate, mask_token_id=MASK, **{**defaults, **options})


@pytest.mark.parametrize("objective", ["distillation", "masked_diffusion"])
def test_only_response_tokens_are_masked_and_labels_say_what_they_were(objective):
    rows = tiny_rows()
    clean = noising().collate(rows)
    batch = noising(objective=objective, mask_ratio_low=0.5, mask_ratio_high=1.0)(rows)
    position = torch.arange(clean["input_ids"].shape[1])
    in_response = (position >= clean["prompt_lengths"][:, None]) & clean["attention_mask"].bool()
    is_masked = batch["is_masked"]
    assert is_masked.any() and not (is_masked & ~in_response).any()
    assert (batch["input_ids"][is_masked] == MASK).all()
    assert torch.equal(batch["input_ids"][~is_masked], clean["input_ids"][~is_masked])
    counted = is_masked if objective == "distillation" else in_response
    assert torch.equal(batch["labels"], clean["input_ids"].masked_fill(~counted, -100))


def test_the_noise_of_a_row_does_not_depend_on_its_batch():
    dataset = tiny_rows()
    together = noising()([dataset[i] for i in range(6)])
    for b in range(6):
        alone = noising()([dataset[b]])
        length = alone["input_ids"].shape[1]
        for name in ("input_ids", "is_masked", "mask_ratios", "labels"):
            assert torch.equal(together[name][b, :length], alone[name][0])


def test_another_epoch_or_seed_gives_other_noise_and_the_same_gives_the_same():
    rows = tiny_rows(8)
    first = noising()(rows)["is_masked"]
    assert torch.equal(first, noising()(rows)["is_masked"])
    assert not torch.equal(first, noising(epoch=1)(rows)["is_masked"])
    assert not torch.equal(first, noising(seed=1)(rows)["is_masked"])


def test_rows_that_look_as_in_decoding_have_a_clean_part_a_block_of_noise_and_masks():
    rows = [{"input_ids": [5, *range(6, 26), EOS], "prompt_length": 1}] * 1
    for seed in range(12):
        options = {"objective": "masked_diffusion", "mask_ratio_low": 0.5, "mask_ratio_high": 0.5, "seed": seed}
        batch = noising(decoding_probability=1.0, **options)(rows)
        clean = noising().collate(rows)["input_ids"][0]
        in_loss = (batch["labels"][0] != -100).nonzero().flatten().tolist()
        start, end = in_loss[0], in_loss[-1] + 1
        assert in_loss == list(range(start, end)) and end == min(start + 4, len(clean))
        assert torch.equal(batch["input_ids"][0, :start], clean[:start])
        assert (batch["input_ids"][0, end:] == MASK).all() and not batch["is_masked"][0, end:].any()
        assert torch.equal(batch["is_masked"][0, start:end], batch["input_ids"][0, start:end] == MASK)
        assert (batch["mask_ratios"][0, start:end] == 0.5).all()


def test_distillation_rows_that_look_as_in_decoding_start_with_clean_blocks():
    row = [{"input_ids": [5, *range(6, 26), EOS], "prompt_length": 1}]
    starts = set()
    for seed in range(30):
        options = {"mask_ratio_low": 1.0, "mask_ratio_high": 1.0, "seed": seed}
        batch = noising(decoding_probability=1.0, **options)(row)
        masked = batch["is_masked"][0].nonzero().flatten().tolist()
        length = int(batch["attention_mask"].sum())
        assert masked == list(range(masked[0], length))  # everything from the first masked block on
        starts.add(masked[0])
    assert starts == {1, 5, 9, 13, 17, 21}


def test_a_row_has_the_same_noise_in_every_batch_of_evaluation():
    dataset = tiny_rows()
    for objective in ("distillation", "masked_diffusion"):
        collate = D2FDataCollator(block_size=4, eos_token_id=EOS, pad_token_id=PAD)
        options = {"objective": objective, "mask_token_id": MASK, "mask_ratio_low": 0.2, "mask_ratio_high": 0.7}
        for_training = D2FNoisingCollator(collate, decoding_probability=0.5, **options)
        for_evaluation = for_training.for_evaluation()
        for_training.epoch = 7
        together = for_evaluation([dataset[i] for i in range(6)])
        for b in range(6):
            alone = for_evaluation([dataset[b]])
            length = alone["input_ids"].shape[1]
            for name in ("input_ids", "attention_mask", "is_masked", "labels"):
                assert torch.equal(together[name][b, :length], alone[name][0])
            assert not together["attention_mask"][b, length:].any()
        assert collate.eos_tail == "batch" and for_training.stratified


@pytest.mark.parametrize("batch_size", [2, 3, 16])
def test_a_row_is_causal_or_not_whatever_its_batch(batch_size):
    """It was drawn behind the noise of the padding, so `eval_loss` moved with the batch size."""
    dataset, collate = tiny_rows(), noising(objective="masked_diffusion", causal_probability=0.5).for_evaluation()
    expected = torch.cat([collate([row])["is_causal"] for row in dataset])
    batches = [collate(dataset[start : start + batch_size]) for start in range(0, len(dataset), batch_size)]
    assert torch.equal(torch.cat([batch["is_causal"] for batch in batches]), expected)
    assert 0.2 < expected.float().mean() < 0.8


def test_the_noise_of_a_row_does_not_depend_on_how_its_tokens_are_stored():
    """A dataset `with_format("torch")` or `"numpy"` had other noise than the same one as lists."""
    row = {"input_ids": [5, *range(6, 26), EOS], "prompt_length": 1}
    expected = noising()([row])["is_masked"]
    for ids in (torch.tensor(row["input_ids"]), np.array(row["input_ids"])):
        assert torch.equal(noising()([{**row, "input_ids": ids}])["is_masked"], expected)


def _epoch_of(collator, queue, go):
    queue.put(collator.epoch)
    go.wait()
    queue.put(collator.epoch)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_another_process_sees_the_epoch_change(method):
    """As the workers of a `DataLoader`, which get the collator when they start."""
    context = torch.multiprocessing.get_context(method)
    collator, queue, go = noising(), context.Queue(), context.Event()
    process = context.Process(target=_epoch_of, args=(collator, queue, go))
    process.start()
    assert queue.get(timeout=120) == 0
    collator.epoch = 5
    go.set()
    assert queue.get(timeout=120) == 5
    process.join()


def test_a_copy_has_the_noise_of_the_original():
    rows, collator = tiny_rows(4), noising(epoch=3)
    expected = collator(rows)["input_ids"]
    for other in (copy.copy(collator), copy.deepcopy(collator), pickle.loads(pickle.dumps(collator))):
        assert other.epoch == 3 and torch.equal(other(rows)["input_ids"], expected)


@pytest.mark.parametrize("objective", ["distillation", "masked_diffusion"])
def test_a_default_device_changes_nothing(objective):
    """Batches are made on the host, and the Trainer moves them."""
    rows, options = tiny_rows(4), {"objective": objective, "decoding_probability": 0.5, "causal_probability": 0.3}
    expected = noising(**options)(rows)
    with torch.device("meta"):
        found = noising(**options)(rows)
        evaluation = noising(**options).for_evaluation()(rows)
    assert {str(value.device) for batch in (found, evaluation) for value in batch.values()} == {"cpu"}
    for name, value in expected.items():
        assert torch.equal(found[name], value)


@pytest.mark.parametrize("batch_size", [1, 5])
def test_the_ratios_of_evaluation_are_spread_over_their_range(batch_size):
    rows = [{"input_ids": [4, 5 + n, 6, 7, 8, EOS], "prompt_length": 1} for n in range(400)]
    collator = noising(objective="masked_diffusion", mask_ratio_low=0.2, mask_ratio_high=1.0).for_evaluation()
    ratios = [
        ratio
        for start in range(0, len(rows), batch_size)
        for ratio in collator(rows[start : start + batch_size])["mask_ratios"][:, 1].tolist()
    ]
    assert min(ratios) > 0.2 and max(ratios) <= 1.0 and sum(ratios) / 400 == pytest.approx(0.6, abs=0.03)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("objective", ["distillation", "masked_diffusion"])
def test_a_default_dtype_changes_nothing(objective, dtype):
    """Noise was drawn in the default dtype, so `torch.set_default_dtype(torch.bfloat16)` gave other masks."""
    options = {"objective": objective, "decoding_probability": 0.5, "causal_probability": 0.3}
    expected = noising(**options)(tiny_rows())
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        found = noising(**options)(tiny_rows())
    finally:
        torch.set_default_dtype(before)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value)


def test_causal_rows_see_what_comes_before_and_others_see_everything_but_padding():
    is_causal = torch.tensor([True, False], device="cpu")
    attention_mask = torch.tensor([[1, 1, 1], [1, 1, 0]], device="cpu")
    allowed = causal_attention_mask(is_causal, attention_mask)
    assert allowed.shape == (2, 1, 3, 3) and allowed.dtype == torch.bool
    assert allowed[0, 0].int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert allowed[1, 0].int().tolist() == [[1, 1, 0]] * 3

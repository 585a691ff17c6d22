"""Training with clean context: the mask against loops and official logits, the loss against one forward per block."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from d2f_hf import (
    D2FDataCollator,
    D2FDreamConfig,
    D2FDreamForBlockDiffusion,
    D2FQwen3Config,
    D2FQwen3ForBlockDiffusion,
    D2FTrainer,
    load_d2f_model,
)
from d2f_hf.clean_context import block_ends, clean_context_mask, clean_context_sequence, with_clean_part
from d2f_hf.noising import D2FNoisingCollator
from tiny_training import (
    EOS,
    MASK,
    PAD,
    arguments,
    changed,
    losses_of,
    tiny_dataset,
    tiny_model,
    weights_of,
    without_dropout,
)

# B batch, L sequence, K block size

GOLDEN = Path(__file__).parent / "golden" / "block_models"
ALIGNMENTS = ("prompt", "sequence")


def sequence_model(right_shift_logits: bool = False, **options):
    return tiny_model(right_shift_logits, block_alignment="sequence", **options).eval()


def aligned_model(alignment: str, right_shift_logits: bool = False):
    return tiny_model(right_shift_logits, block_alignment=alignment).eval()


def clean_arguments(folder, **options):
    return arguments(folder, **{"objective": "masked_diffusion", "clean_context": True, **options})


def batch_of(trainer: D2FTrainer, count: int = 4) -> dict[str, torch.Tensor]:
    return trainer.data_collator([trainer.train_dataset[i] for i in range(count)])


# ---- the mask ----


def block_of(position: int, prompt_length: int, block_size: int, alignment: str) -> int:
    """The number of a token's block, told from its position alone; the prompt is block -1 or has blocks of its own."""
    if alignment == "sequence":
        return position // block_size
    return -1 if position < prompt_length else (position - prompt_length) // block_size


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("num_noisy", [1, 2])
@pytest.mark.parametrize("block_size", [1, 3, 4, 20])
def test_the_mask_equals_one_written_token_by_token(alignment, num_noisy, block_size):
    length, prompt_lengths, lengths = 13, [1, 5, 8, 12], [13, 9, 11, 13]
    position = torch.arange(length).expand(4, -1)
    attention_mask = (position < torch.tensor(lengths)[:, None]).long()
    ends = block_ends(position, torch.tensor(prompt_lengths), block_size, alignment)
    found = clean_context_mask(ends, attention_mask, num_noisy)
    assert found.shape == (4, 1, (num_noisy + 1) * length, (num_noisy + 1) * length) and found.dtype == torch.bool
    for b, prompt_length in enumerate(prompt_lengths):
        for query in range((num_noisy + 1) * length):
            for key in range((num_noisy + 1) * length):
                q_part, q = divmod(query, length)
                k_part, k = divmod(key, length)
                q_block, k_block = (block_of(p, prompt_length, block_size, alignment) for p in (q, k))
                if k >= lengths[b]:
                    expected = False
                elif q_part == num_noisy:  # clean
                    expected = k_part == num_noisy and k_block <= q_block
                elif k_part == num_noisy:  # a noisy token sees what is clean
                    expected = k_block < q_block
                else:
                    expected = q_part == k_part and q_block == k_block
                assert found[b, 0, query, key].item() == expected, (b, query, key)


def golden_model(name: str, **options):
    """The tiny checkpoint of another package's official code as one of our classes, with sequence alignment."""
    original = json.loads((GOLDEN / name / "config.json").read_text())
    config_class, model_class, names = D2FDreamConfig, D2FDreamForBlockDiffusion, []
    if name == "sdar_tiny":
        config_class, model_class, names = D2FQwen3Config, D2FQwen3ForBlockDiffusion, ["head_dim"]
    names += (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
        "max_position_embeddings rope_theta rms_norm_eps tie_word_embeddings"
    ).split()
    config = config_class(
        **{key: original[key] for key in names},
        mask_token_id=93,
        eos_token_id=90,
        right_shift_logits=name != "sdar_tiny",
        block_alignment="sequence",
        **options,
    )
    model = model_class(config).eval()
    model.load_state_dict(load_file(GOLDEN / name / "model.safetensors"))
    return model


@pytest.mark.parametrize("name", ["fastdllm_v2_tiny", "sdar_tiny"])
def test_logits_of_both_halves_equal_those_of_the_official_training_code(name):
    model, tensors = golden_model(name), load_file(GOLDEN / name / "logits.safetensors")
    cases = [case for case in json.loads((GOLDEN / name / "logits.json").read_text()) if "train" in case["key"]]
    assert len(cases) >= 2
    for case in cases:
        length, part = case["length"], case["key"].removeprefix("train.")
        inputs = {
            "input_ids": tensors[f"train.noisy_ids.{part}"],
            "clean_ids": tensors[f"train.clean_ids.{part}"],
            "attention_mask": torch.ones(1, length, dtype=torch.long),
            "prompt_lengths": torch.tensor([case["prompt_length"]]),
        }
        masked = (inputs["input_ids"] == model.config.mask_token_id)[0].nonzero().flatten().tolist()
        assert masked == case["masked"] and inputs["input_ids"].shape == (1, length)
        sequence = clean_context_sequence(inputs, case["block_size"], "sequence")
        assert torch.equal(sequence["attention_mask"][0, 0], tensors[f"train.mask_allowed.{part}"])
        with torch.no_grad():
            noisy, clean = model(**sequence).logits.chunk(2, dim=1)
        torch.testing.assert_close(noisy, tensors[f"train.logits_noisy_half.{part}"], atol=1e-4, rtol=0)
        torch.testing.assert_close(clean, tensors[f"train.logits_clean_half.{part}"], atol=1e-4, rtol=0)


# ---- what a noisy block sees is what decoding shows it ----


def logits_block_by_block(model, noisy_ids, clean_ids, prompt_length: int, block_size: int, alignment: str):
    """Logits of the noisy tokens of one row, `[L, V]`, each from an ordinary forward behind a clean beginning."""
    start = prompt_length if alignment == "prompt" else 0
    first = block_size if alignment == "sequence" else prompt_length
    bounds = [0, *range(first, len(noisy_ids), block_size), len(noisy_ids)]
    parts = []
    for begin, end in zip(bounds, bounds[1:], strict=False):
        ids = torch.cat([clean_ids[:begin], noisy_ids[begin:end]])[None]
        with torch.no_grad():
            output = model(ids, prompt_lengths=torch.tensor([start]), block_size=block_size)
        parts.append(output.logits[0, begin:end])
    return torch.cat(parts)


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("complementary", [False, True])
@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
def test_a_noisy_block_has_the_logits_of_a_forward_behind_clean_blocks(
    tmp_path, alignment, complementary, attn_implementation
):
    """In a ragged batch, padded further than its longest row: padding and neighbours change nothing."""
    model = aligned_model(alignment)
    model.set_attn_implementation(attn_implementation)
    clean = D2FDataCollator(4, EOS, PAD, eos_tail="none", pad_to_multiple_of=16, block_alignment=alignment)
    args = clean_arguments(tmp_path, complementary_masks=complementary)
    trainer = D2FTrainer(model, args, train_dataset=tiny_dataset(), data_collator=clean)
    batch = batch_of(trainer, 8)
    length = batch["clean_ids"].shape[1]
    with torch.no_grad():
        logits = model(**clean_context_sequence(batch, 4, alignment)).logits
    for b, size in enumerate(batch["attention_mask"].sum(-1).tolist()):
        for part in range(1 + complementary):
            row = slice(part * length, part * length + size)
            prompt_length = int(batch["prompt_lengths"][b])
            expected = logits_block_by_block(
                model, batch["input_ids"][b, row], batch["clean_ids"][b, :size], prompt_length, 4, alignment
            )
            torch.testing.assert_close(logits[b, row], expected, atol=1e-5, rtol=0)
    assert (batch["attention_mask"].sum(-1) < length).all()


# ---- the loss ----


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("right_shift_logits", [False, True])
@pytest.mark.parametrize("complementary", [False, True])
def test_the_loss_is_that_of_one_forward_per_block(tmp_path, alignment, right_shift_logits, complementary):
    """Shifted logits of the first token of a block are those of the noisy last row of the block before."""
    model = aligned_model(alignment, right_shift_logits)
    args = clean_arguments(tmp_path, complementary_masks=complementary)
    trainer = D2FTrainer(model, args, train_dataset=tiny_dataset())
    batch = batch_of(trainer)
    loss = trainer.compute_loss(model, dict(batch)).item()

    length, total, count, masked = batch["clean_ids"].shape[1], 0.0, 0, 0
    for b, size in enumerate(batch["attention_mask"].sum(-1).tolist()):
        prompt_length, clean_ids = int(batch["prompt_lengths"][b]), batch["clean_ids"][b, :size]
        count += size - prompt_length
        for part in range(1 + complementary):
            noisy_ids = batch["input_ids"][b, part * length : part * length + size]
            logits = logits_block_by_block(model, noisy_ids, clean_ids, prompt_length, 4, alignment).log_softmax(-1)
            for i in range(size):
                if noisy_ids[i] == MASK:
                    weight = 1.0 if complementary else 1.0 / batch["mask_ratios"][b, i].item()
                    total -= weight * logits[i - right_shift_logits, clean_ids[i]].item()
                    masked += 1
    assert loss == pytest.approx(total / count, rel=1e-4)
    assert masked == count if complementary else 0 < masked < count


@pytest.mark.parametrize("options", [{}, {"complementary_masks": True}])
def test_training_lowers_the_loss_of_all_weights_and_of_an_adapter(tmp_path, options):
    for peft_config in (None, without_dropout()):
        model = sequence_model(right_shift_logits=True)
        args = clean_arguments(tmp_path, max_steps=60, logging_steps=60, **options)
        data = {"train_dataset": tiny_dataset(4), "eval_dataset": tiny_dataset(4)}
        trainer = D2FTrainer(model, args, peft_config=peft_config, **data)
        weights = weights_of(model)
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        assert trainer.evaluate()["eval_loss"] < 0.8 * before
        names = changed(model, weights)
        assert names and (peft_config is None or all("lora" in name for name in names))


@pytest.mark.parametrize("name", ["fastdllm_v2_tiny", "sdar_tiny"])
def test_released_architectures_learn_what_they_see_with_defaults_alone(tmp_path, name):
    """Nothing but the objective is given: the model says where blocks start, and whether logits are shifted."""
    rows = [{**row, "input_ids": [*row["input_ids"][:-1], 90]} for row in tiny_dataset(4)]
    args = arguments(tmp_path, objective="masked_diffusion", max_steps=20, learning_rate=3e-3, logging_steps=20)
    model = golden_model(name, block_size=4)
    trainer = D2FTrainer(model, args, train_dataset=rows, eval_dataset=rows)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.clean_context and trainer.evaluate()["eval_loss"] < 0.8 * before
    trainer.save_model(str(tmp_path / "model"))
    saved = type(model).from_pretrained(tmp_path / "model")
    assert (saved.config.block_alignment, saved.config.block_size) == ("sequence", 4)


@pytest.mark.parametrize("options", [{}, {"complementary_masks": True}])
def test_accumulation_and_gradient_checkpointing_change_nothing(tmp_path, options):
    losses = []
    for more in (
        {"per_device_train_batch_size": 8},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        {"per_device_train_batch_size": 8, "gradient_checkpointing": True},
    ):
        trainer = D2FTrainer(
            sequence_model(), clean_arguments(tmp_path, **options, **more), train_dataset=tiny_dataset()
        )
        trainer.train()
        losses.append(losses_of(trainer))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4) and losses[2] == pytest.approx(losses[0], rel=1e-4)


def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path):
    def trained(folder, max_steps, resume):
        options = {"max_steps": max_steps, "save_strategy": "steps", "save_steps": 3, "dataloader_num_workers": 1}
        args = clean_arguments(folder, train_sampling_strategy="group_by_length", **options)
        trainer = D2FTrainer(sequence_model(), args, train_dataset=tiny_dataset())
        trainer.train(resume_from_checkpoint=resume)
        return weights_of(trainer.model)

    whole = trained(tmp_path / "whole", 6, None)
    trained(tmp_path / "cut", 3, None)
    resumed = trained(tmp_path / "cut", 6, True)
    for name, weight in whole.items():
        torch.testing.assert_close(resumed[name], weight, atol=1e-6, rtol=1e-5)


def test_what_was_trained_is_saved_loaded_and_decoded(tmp_path):
    """With the block size of the training and the alignment of the model."""
    args = clean_arguments(tmp_path / "run", block_size=3, save_strategy="no")
    trainer = D2FTrainer(sequence_model(), args, train_dataset=tiny_dataset())
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    model = load_d2f_model(tmp_path / "model")
    assert (model.config.block_size, model.config.block_alignment) == (3, "sequence")
    prompt = torch.tensor([[5, 6, 7, 8]])
    found = model.generate(prompt, max_new_tokens=7)
    assert torch.equal(found[:, :4], prompt) and 4 < found.shape[1] <= 11 and not (found == MASK).any()


# ---- evaluation ----


@pytest.mark.parametrize("complementary", [False, True])
@pytest.mark.parametrize("eos_tail", ["batch", "block", "none"])
def test_the_evaluation_does_not_depend_on_the_batch_size(tmp_path, complementary, eos_tail):
    dataset, expected = tiny_dataset(11), None
    for batch_size in (1, 3, 11, 64):
        options = {"eos_tail": eos_tail, "per_device_eval_batch_size": batch_size}
        args = clean_arguments(tmp_path, complementary_masks=complementary, **options)
        metrics = D2FTrainer(sequence_model(), args, eval_dataset=dataset).evaluate()
        found = {name: metrics[name] for name in ("eval_loss", "eval_mask_ratio")}
        expected = expected or found
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("complementary", [False, True])
def test_metrics_get_logits_and_labels_of_the_masked_tokens(tmp_path, complementary):
    """With complementary masks those are all tokens of the response, each once."""
    dataset, model = tiny_dataset(5), sequence_model(right_shift_logits=True)
    args = clean_arguments(tmp_path, complementary_masks=complementary, eos_tail="none", per_device_eval_batch_size=2)
    trainer = D2FTrainer(model, args, eval_dataset=dataset)
    prediction = trainer.predict(dataset)
    for b, example in enumerate(dataset):
        size, prompt_length = len(example["input_ids"]), example["prompt_length"]
        batch = trainer.evaluation_collator([example])
        for i in range(prediction.label_ids.shape[1]):
            noisy = [batch["input_ids"][0, part * size : (part + 1) * size] for part in range(1 + complementary)]
            where = [ids for ids in noisy if i < size and ids[i] == MASK]
            if not where:
                assert prediction.label_ids[b, i] == -100 and (prediction.predictions[b, i] == -100).all()
                continue
            assert prediction.label_ids[b, i] == example["input_ids"][i]
            clean_ids = torch.tensor(example["input_ids"])
            logits = logits_block_by_block(model, where[0], clean_ids, prompt_length, 4, "sequence")
            torch.testing.assert_close(torch.tensor(prediction.predictions[b, i]), logits[i - 1], atol=1e-5, rtol=0)
        in_response = prediction.label_ids[b, prompt_length:size] != -100
        assert in_response.all() == complementary


def test_the_loss_function_of_a_user_gets_every_masked_token(tmp_path):
    """With the weights of the default one, the loss is that of the default one."""

    def by_user(outputs, labels, num_items_in_batch):
        losses = torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="none")
        return (losses / outputs.mask_ratios).sum() / num_items_in_batch

    found = [
        D2FTrainer(sequence_model(), clean_arguments(tmp_path), eval_dataset=tiny_dataset(), compute_loss_func=f)
        .evaluate()["eval_loss"]
        for f in (None, by_user)
    ]  # fmt: skip
    assert found[0] == pytest.approx(found[1], rel=1e-5)


# ---- which models and arguments ----


def test_a_model_of_blocks_from_the_start_is_trained_so_by_default_and_others_are_not(tmp_path):
    for alignment in ALIGNMENTS:
        args = arguments(tmp_path, objective="masked_diffusion")
        trainer = D2FTrainer(aligned_model(alignment), args, train_dataset=tiny_dataset())
        assert trainer.clean_context == (alignment == "sequence") == ("clean_ids" in batch_of(trainer))
        assert trainer.data_collator.collate.block_alignment == alignment


@pytest.mark.parametrize(
    ("alignment", "options", "message"),
    [
        (
            "sequence",
            {"objective": "distillation"},
            "`objective` must be 'masked_diffusion' for a model with block_al",
        ),
        ("sequence", {"clean_context": False}, "`clean_context` must be True for a model"),
        ("sequence", {"causal_probability": 0.5}, "`causal_probability` must be 0 with clean context"),
        ("sequence", {"decoding_probability": 0.5}, "`decoding_probability` must be 0 with clean context"),
        ("prompt", {"complementary_masks": True}, "`complementary_masks` needs `clean_context`"),
    ],
)
def test_a_training_that_does_not_fit_the_model_is_refused_before_it_is_touched(tmp_path, alignment, options, message):
    model = aligned_model(alignment, right_shift_logits=True)
    args = arguments(tmp_path, **{"objective": "masked_diffusion", **options})
    with pytest.raises(ValueError, match=message):
        D2FTrainer(model, args, train_dataset=tiny_dataset(), peft_config=without_dropout())
    with pytest.raises(ValueError, match=message):
        D2FTrainer(model_init=lambda: model, args=args, train_dataset=tiny_dataset())
    assert not hasattr(model, "peft_config")


def test_a_collator_with_other_blocks_and_a_teacher_of_blocks_are_refused(tmp_path):
    collator = D2FDataCollator(4, EOS, PAD)
    with pytest.raises(ValueError, match="`data_collator.block_alignment` .'prompt'. must be that of the model"):
        D2FTrainer(sequence_model(), clean_arguments(tmp_path), data_collator=collator)
    with pytest.raises(ValueError, match="`teacher_model.config.block_alignment` must be 'prompt'"):
        D2FTrainer(tiny_model(), arguments(tmp_path), teacher_model=sequence_model())


def test_the_clean_part_predicts_nothing():
    at = torch.tensor([[True, False, False, True]])
    assert with_clean_part(at, 2).tolist() == [[True, False, False, True, False, False]]


# ---- the noise ----


def noising(**options) -> D2FNoisingCollator:
    clean = D2FDataCollator(4, EOS, PAD, eos_tail="block", block_alignment=options.get("block_alignment", "prompt"))
    defaults = {"objective": "masked_diffusion", "mask_ratio_low": 0.0, "mask_ratio_high": 1.0, "clean_context": True}
    return D2FNoisingCollator(clean, mask_token_id=MASK, **{**defaults, **options})


@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_each_response_block_has_a_ratio_of_its_own_and_prompts_stay_clean(alignment):
    for example in tiny_dataset():
        batch = noising(block_alignment=alignment)([example])
        prompt_length, ratios = example["prompt_length"], batch["mask_ratios"][0].tolist()
        assert set(ratios[:prompt_length]) == {0.0} and not batch["is_masked"][0, :prompt_length].any()
        of_block = {}
        for i in range(prompt_length, len(ratios)):
            of_block.setdefault(block_of(i, prompt_length, 4, alignment), set()).add(ratios[i])
        assert all(len(found) == 1 for found in of_block.values())
        flat = sorted(ratio for (ratio,) in of_block.values())
        assert len(set(flat)) == len(of_block) and len(of_block) == max(of_block) - min(of_block) + 1
        for n, ratio in enumerate(flat):  # they cover the range evenly
            assert n / len(flat) <= ratio <= (n + 1) / len(flat) + 1e-6
        assert batch["attention_mask"].all()
        start = prompt_length if alignment == "prompt" else 0
        assert (len(ratios) - start) % 4 == 0


@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_complementary_masks_mask_each_response_token_once(alignment):
    batch = noising(block_alignment=alignment, complementary_masks=True)(list(tiny_dataset()))
    in_response = batch["labels"] != -100
    first, second = batch["is_masked"].chunk(2, dim=1)
    assert torch.equal(first ^ second, in_response) and not (first & second).any()
    for ids, masked in zip(batch["input_ids"].chunk(2, dim=1), (first, second), strict=True):
        assert torch.equal(ids, batch["clean_ids"].masked_fill(masked, MASK))
    one, other = batch["mask_ratios"].chunk(2, dim=1)
    torch.testing.assert_close(one + other, in_response.float())
    plain = noising(block_alignment=alignment)(list(tiny_dataset()))
    assert torch.equal(plain["input_ids"], batch["input_ids"].chunk(2, dim=1)[0])


def test_the_noise_of_a_row_depends_on_its_tokens_seed_and_epoch_alone():
    rows = list(tiny_dataset(6))
    together = noising(block_alignment="sequence")(rows)
    for b, row in enumerate(rows):
        alone = noising(block_alignment="sequence")([row])
        length = alone["input_ids"].shape[1]
        for name in ("input_ids", "clean_ids", "is_masked", "mask_ratios", "labels"):
            assert torch.equal(together[name][b, :length], alone[name][0])
    for other in ({"seed": 1}, {"epoch": 1}):
        assert not torch.equal(noising(block_alignment="sequence", **other)(rows)["is_masked"], together["is_masked"])


def test_a_default_device_and_dtype_change_nothing():
    rows, options = list(tiny_dataset(4)), {"block_alignment": "sequence", "complementary_masks": True}
    expected = noising(**options)(rows)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            found = noising(**options)(rows)
    finally:
        torch.set_default_dtype(before)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value)

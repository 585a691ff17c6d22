"""`D2FTrainer` on tiny models: the reference's loss, the teacher, batches however they are cut, interrupted runs."""

import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithPadding,
    DefaultDataCollator,
    LlamaConfig,
    LlamaForCausalLM,
    default_data_collator,
)

from d2f_hf import (
    D2FDataCollator,
    D2FLLaDAConfig,
    D2FLLaDAForBlockDiffusion,
    D2FTrainer,
    D2FTrainingArguments,
    load_d2f_model,
    tokenize_example,
)
from tiny_models import letter_tokenizer
from tiny_models import tiny_model as tiny_random_model

# B batch, L sequence, M masked tokens

GOLDEN = Path(__file__).parent / "golden"
PAD, EOS, MASK = 0, 1, 3


def tiny_model(right_shift_logits: bool = False, seed: int = 0) -> D2FLLaDAForBlockDiffusion:
    torch.manual_seed(seed)
    config = D2FLLaDAConfig(
        vocab_size=40,
        d_model=16,
        n_heads=2,
        n_layers=2,
        mlp_hidden_size=24,
        initializer_range=0.2,
        block_size=4,
        mask_token_id=MASK,
        eos_token_id=EOS,
        pad_token_id=PAD,
        right_shift_logits=right_shift_logits,
    )
    return D2FLLaDAForBlockDiffusion(config)


def tiny_dataset(count: int = 16, seed: int = 0) -> Dataset:
    """Rows of different lengths; tokens 4 and up."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        prompt_length, response_length = rng.randint(1, 5), rng.randint(2, 9)
        tokens = [rng.randrange(4, 40) for _ in range(prompt_length + response_length)]
        rows.append({"input_ids": tokens + [EOS], "prompt_length": prompt_length})
    return Dataset.from_list(rows)


def arguments(folder, **options) -> D2FTrainingArguments:
    defaults = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "eos_tail": "block",
    }
    return D2FTrainingArguments(**{**defaults, **options})


def without_dropout() -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "attn_out"])


def losses_of(trainer: D2FTrainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


# ---- the loss ----


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_loss_and_lora_gradients_equal_those_of_the_reference(family, tmp_path):
    tensors = load_file(GOLDEN / "training.safetensors")
    expected = json.loads((GOLDEN / "training.json").read_text())["loss"][family]
    base = load_d2f_model(GOLDEN / f"{family}_tiny", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, GOLDEN / f"{family}_adapter", is_trainable=True)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    trainer = D2FTrainer(model, arguments(tmp_path, block_size=8))
    is_masked = tensors[f"{family}.masked_indices"]
    batch = {
        "input_ids": tensors[f"{family}.noisy_batch"],
        "attention_mask": torch.ones_like(is_masked).long(),
        "prompt_lengths": tensors[f"{family}.prompt_lengths"].flatten(),
        "is_masked": is_masked,
        "mask_ratios": tensors[f"{family}.p_mask"],
        "labels": tensors[f"{family}.input_ids"].masked_fill(~is_masked, -100),
    }
    loss, outputs = trainer.compute_loss(trainer.model.train(), batch, return_outputs=True)
    torch.testing.assert_close(outputs["logits"], tensors[f"{family}.student_logits_masked"], atol=1e-4, rtol=0)
    assert loss.item() == pytest.approx(expected["distill"]["loss"], rel=1e-4)
    loss.backward()
    gradients = {n: p.grad.norm().item() for n, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == len(expected["lora_grad_norms"])
    for name, norm in expected["lora_grad_norms"].items():
        prefix, _, kind = name.rpartition(".lora_")
        peft_name = f"base_model.model.{prefix}.lora_{kind.replace('.weight', '.default.weight')}"
        assert gradients[peft_name] == pytest.approx(norm, rel=1e-3)


def test_the_label_weight_mixes_divergence_and_cross_entropy_to_the_true_tokens(tmp_path):
    losses = {}
    for weight in (0.0, 0.25, 1.0):
        model = tiny_model(seed=1)
        trainer = D2FTrainer(
            model,
            arguments(tmp_path, label_weight=weight),
            train_dataset=tiny_dataset(),
            peft_config=without_dropout(),
        )
        batch = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
        loss, outputs = trainer.compute_loss(trainer.model.train(), batch, return_outputs=True)
        losses[weight] = loss.item()
    is_masked, ratios = batch["is_masked"], batch["mask_ratios"][batch["is_masked"]]
    true = torch.nn.functional.cross_entropy(outputs["logits"], batch["labels"][is_masked], reduction="none")
    assert losses[1.0] == pytest.approx((true / ratios).mean().item(), rel=1e-5)
    assert losses[0.25] == pytest.approx(0.75 * losses[0.0] + 0.25 * losses[1.0], rel=1e-5)
    assert abs(losses[0.0] - losses[1.0]) > 0.01


def test_the_teacher_is_the_model_without_adapter_and_sees_everything(tmp_path):
    model = tiny_model()
    base_logits = {}
    trainer = D2FTrainer(model, arguments(tmp_path), train_dataset=tiny_dataset(), peft_config=without_dropout())
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)  # an adapter that changes the model
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
    seen = []
    inner = model.forward

    def recording(**kwargs):
        seen.append(("prompt_lengths" in kwargs, torch.is_grad_enabled()))
        output = inner(**kwargs)
        base_logits[len(seen)] = output.logits
        return output

    model.forward = recording
    trainer.compute_loss(trainer.model.train(), batch)
    assert seen == [(False, False), (True, True)]  # the teacher first, bidirectional; then the student
    model.forward = inner
    with torch.no_grad(), trainer.model.disable_adapter():
        expected = trainer.model.eval()(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            logits_to_keep=batch["is_masked"],
        ).logits
    torch.testing.assert_close(base_logits[1], expected, atol=1e-6, rtol=0)
    assert (base_logits[1] - base_logits[2]).abs().max() > 0.1


def test_the_teacher_has_no_dropout_while_the_student_trains(tmp_path):
    model = tiny_model()
    model.config.attention_dropout = 0.5
    trainer = D2FTrainer(model, arguments(tmp_path), train_dataset=tiny_dataset(), peft_config=without_dropout())
    batch = trainer.data_collator([trainer.train_dataset[0]])
    teacher_logits = []
    student: Any = trainer.model
    for _ in range(2):
        student.train()
        with torch.no_grad(), trainer._teacher_weights(student):
            teacher_logits.append(student(input_ids=batch["input_ids"]).logits)
        assert student.training
    assert torch.equal(*teacher_logits)


def test_with_an_unchanged_student_that_sees_everything_the_divergence_is_zero(tmp_path):
    """LoRA starts as zero; one block that holds prompt and response makes block-causal and bidirectional the same."""
    dataset = Dataset.from_list([{"input_ids": [5, 6, 7, 8, 9, 10, EOS], "prompt_length": 1}])
    options = {"block_size": 64, "divergence": "forward_kl", "eos_tail": "none", "per_device_train_batch_size": 1}
    trainer = D2FTrainer(
        tiny_model(), arguments(tmp_path, **options), train_dataset=dataset, peft_config=without_dropout()
    )
    batch = trainer.data_collator([dataset[0]])
    batch["prompt_lengths"] = torch.zeros(1, dtype=torch.long)  # no prompt block that could not see the response
    assert batch["is_masked"].any()
    assert trainer.compute_loss(trainer.model.eval(), batch).item() == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("right_shift_logits", [False, True])
def test_masked_diffusion_is_the_weighted_cross_entropy_of_masked_tokens(tmp_path, right_shift_logits):
    model = tiny_model(right_shift_logits)
    args = arguments(tmp_path, objective="masked_diffusion")
    trainer = D2FTrainer(model, args, train_dataset=tiny_dataset())
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
    loss = trainer.compute_loss(trainer.model.eval(), dict(batch)).item()

    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.log_softmax(-1)
    total, maskable = 0.0, 0
    for b in range(4):
        for i in range(batch["input_ids"].shape[1]):
            label = batch["labels"][b, i].item()
            maskable += label != -100
            if batch["is_masked"][b, i]:
                total -= logits[b, i - right_shift_logits, label].item() / batch["mask_ratios"][b, i].item()
    assert loss == pytest.approx(total / maskable, rel=1e-4)


def test_a_batch_without_masked_tokens_gives_a_zero_loss_with_gradients(tmp_path):
    trainer = D2FTrainer(tiny_model(), arguments(tmp_path), train_dataset=tiny_dataset())
    batch = trainer.data_collator([trainer.train_dataset[0]])
    batch["is_masked"] = torch.zeros_like(batch["is_masked"])
    batch["labels"] = torch.full_like(batch["labels"], -100)
    loss = trainer.compute_loss(trainer.model.train(), batch)
    loss.backward()
    assert loss.item() == 0.0


# ---- noise ----


def test_causal_rows_give_the_loss_of_an_autoregressive_model(tmp_path):
    model = tiny_model(right_shift_logits=True)
    args = arguments(tmp_path, objective="masked_diffusion", causal_probability=1.0)
    trainer = D2FTrainer(model, args, train_dataset=tiny_dataset())
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
    assert batch["is_causal"].all() and not (batch["input_ids"] == MASK).any()
    loss = trainer.compute_loss(model.eval(), dict(batch)).item()

    total, count = 0.0, 0
    for b in range(4):
        length, prompt_length = int(batch["attention_mask"][b].sum()), int(batch["prompt_lengths"][b])
        for i in range(prompt_length, length):  # each token from a sequence that ends just before it
            logits = model(input_ids=batch["input_ids"][b : b + 1, :i], attention_mask=_causal(i)).logits[0, -1]
            total -= logits.log_softmax(-1)[batch["input_ids"][b, i]].item()
            count += 1
    assert loss == pytest.approx(total / count, rel=1e-4)


def _causal(length: int) -> torch.Tensor:
    return torch.ones(1, 1, length, length, dtype=torch.bool).tril()


def test_causal_rows_need_logits_that_are_one_position_ahead(tmp_path):
    args = arguments(tmp_path, objective="masked_diffusion", causal_probability=0.5)
    with pytest.raises(ValueError, match="causal_probability"):
        D2FTrainer(tiny_model(), args, train_dataset=tiny_dataset())


def test_the_trainer_changes_the_noise_with_each_epoch(tmp_path):
    seen = []
    dataset = tiny_dataset(4)
    args = arguments(tmp_path, max_steps=-1, num_train_epochs=3)
    trainer = D2FTrainer(tiny_model(), args, train_dataset=dataset)
    collate = trainer.data_collator.collate

    def recording(features):
        seen.append(trainer.data_collator.epoch)
        return collate(features)

    trainer.data_collator.collate = recording
    recording.block_size = 4
    trainer.train()
    assert sorted(set(seen)) == [0, 1, 2]


# ---- training ----


@pytest.mark.parametrize("objective", ["distillation", "masked_diffusion"])
def test_training_lowers_the_loss_on_what_it_sees(tmp_path, objective):
    options = {"divergence": "forward_kl", "mask_ratio_low": 0.5, "mask_ratio_high": 0.9, "learning_rate": 1e-2}
    args = arguments(tmp_path, objective=objective, max_steps=80, logging_steps=80, **options)
    trainer = D2FTrainer(tiny_model(), args, train_dataset=tiny_dataset(4), eval_dataset=tiny_dataset(4))
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    trainer.data_collator.epoch = 0  # the noise of the first evaluation
    assert trainer.evaluate()["eval_loss"] < 0.7 * before


@pytest.mark.parametrize("objective", ["distillation", "masked_diffusion"])
def test_accumulated_batches_give_the_loss_of_one_batch(tmp_path, objective):
    losses = []
    for batch_size, accumulation in ((8, 1), (2, 4)):
        args = arguments(
            tmp_path,
            objective=objective,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            mask_ratio_low=0.5,  # with equal bounds the ratios of a batch need no common draw
            mask_ratio_high=0.5,
        )
        trainer = D2FTrainer(tiny_model(), args, train_dataset=tiny_dataset(), peft_config=without_dropout())
        trainer.train()
        losses.append(losses_of(trainer))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_gradient_checkpointing_changes_nothing(tmp_path):
    losses = []
    for checkpointing in (False, True):
        args = arguments(tmp_path, gradient_checkpointing=checkpointing)
        trainer = D2FTrainer(tiny_model(), args, train_dataset=tiny_dataset(), peft_config=without_dropout())
        trainer.train()
        losses.append(losses_of(trainer))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path):
    def trained(folder, max_steps, resume):
        args = arguments(
            folder, max_steps=max_steps, save_strategy="steps", save_steps=3, lr_scheduler_type="constant"
        )
        trainer = D2FTrainer(tiny_model(), args, train_dataset=tiny_dataset())
        trainer.train(resume_from_checkpoint=resume)
        return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}

    whole = trained(tmp_path / "whole", 6, None)
    trained(tmp_path / "cut", 3, None)
    resumed = trained(tmp_path / "cut", 6, True)
    for name, weight in whole.items():
        torch.testing.assert_close(resumed[name], weight, atol=1e-6, rtol=1e-5)


def test_a_separate_teacher_allows_to_train_all_weights(tmp_path):
    student = tiny_model()
    args = arguments(tmp_path)
    trainer = D2FTrainer(student, args, train_dataset=tiny_dataset(), teacher_model=tiny_model(seed=1))
    before = {name: p.detach().clone() for name, p in student.named_parameters()}
    trainer.train()
    assert not isinstance(trainer.model, PeftModel)
    moved = [name for name, p in student.named_parameters() if not torch.equal(p, before[name])]
    assert "model.transformer.wte.weight" in moved and "model.transformer.blocks.0.ff_out.weight" in moved


def test_a_plain_model_gets_the_adapter_of_the_paper(tmp_path):
    trainer = D2FTrainer(tiny_model(), arguments(tmp_path), train_dataset=tiny_dataset())
    student: Any = trainer.model
    adapter = student.peft_config["default"]
    assert (adapter.r, adapter.lora_alpha, adapter.lora_dropout) == (32, 32, 0.1)
    assert set(adapter.target_modules) == {"q_proj", "k_proj", "v_proj", "attn_out"}


def test_raw_examples_are_tokenized_with_the_tokenizer(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[EOS]", "[UNK]", "[MASK]", "one", "two", "three"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="[EOS]", pad_token="[PAD]")
    raw = Dataset.from_list([{"prompt": "one", "completion": "two three", "extra": 1}] * 4)
    trainer = D2FTrainer(tiny_model(), arguments(tmp_path), train_dataset=raw, processing_class=tokenizer)
    assert trainer.train_dataset[0] == {"input_ids": [4, 5, 6, EOS], "prompt_length": 1}
    trainer.train()
    with pytest.raises(ValueError, match="processing_class"):
        D2FTrainer(tiny_model(), arguments(tmp_path), train_dataset=raw)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "distil"}, "objective"),
        ({"divergence": "kl"}, "divergence"),
        ({"weighting": "none"}, "weighting"),
        ({"mask_ratio_low": 0.8, "mask_ratio_high": 0.5}, "mask_ratio_low"),
        ({"mask_ratio_high": 1.5}, "mask_ratio_high"),
        ({"decoding_probability": 2.0, "objective": "masked_diffusion"}, "decoding_probability"),
        ({"causal_probability": 0.5}, "causal_probability"),
        ({"label_weight": 1.5}, "label_weight"),
        ({"label_weight": 0.5, "objective": "masked_diffusion"}, "label_weight"),
        ({"block_size": 0}, "block_size"),
        ({"remove_unused_columns": True}, "remove_unused_columns"),
    ],
)
def test_arguments_out_of_range_are_refused_by_name(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, **options)


def test_models_and_teachers_that_do_not_fit_are_refused(tmp_path):
    model = tiny_model()
    with pytest.raises(ValueError, match="teacher_model"):
        D2FTrainer(model, arguments(tmp_path, objective="masked_diffusion"), teacher_model=tiny_model())
    with pytest.raises(ValueError, match="peft_config"):
        D2FTrainer(get_peft_model(model, without_dropout()), arguments(tmp_path), peft_config=without_dropout())
    with pytest.raises(ValueError, match="data_collator.block_size"):
        other = D2FDataCollator(block_size=8, eos_token_id=EOS, pad_token_id=PAD)
        D2FTrainer(tiny_model(), arguments(tmp_path), data_collator=other)
    nameless = tiny_model()
    nameless.config.mask_token_id = None
    with pytest.raises(ValueError, match="mask_token_id"):
        D2FTrainer(nameless, arguments(tmp_path))


# ---- the noise of evaluation ----


def evaluated(folder, dataset, objective="distillation", **options) -> dict:
    args = arguments(folder, objective=objective, **options)
    return D2FTrainer(tiny_model(), args, eval_dataset=dataset).evaluate()


@pytest.mark.parametrize("objective", ["distillation", "masked_diffusion"])
@pytest.mark.parametrize("eos_tail", ["batch", "block", "none"])
def test_the_evaluation_loss_does_not_depend_on_the_batch_size(tmp_path, objective, eos_tail):
    """It was the mean of the batches' losses, whose noise, EOS tails and ratios depended on what was in the batch."""
    dataset = tiny_dataset(11)
    expected = None
    for batch_size in (1, 3, 4, 11, 64):
        metrics = evaluated(tmp_path, dataset, objective, eos_tail=eos_tail, per_device_eval_batch_size=batch_size)
        found = {name: metrics[name] for name in metrics if name.startswith(AVERAGES)}
        expected = expected or found
        assert found == pytest.approx(expected, rel=1e-5)


AVERAGES = ("eval_loss", "eval_mask_ratio", "eval_agreement", "eval_divergence_block_")


def test_the_evaluation_loss_is_the_mean_over_all_tokens(tmp_path):
    """A short last batch counts by its tokens."""
    dataset = tiny_dataset(5)
    found = evaluated(tmp_path, dataset, per_device_eval_batch_size=4)["eval_loss"]
    trainer = D2FTrainer(tiny_model(), arguments(tmp_path))
    batch = trainer.evaluation_collator([dataset[i] for i in range(5)])
    assert found == pytest.approx(trainer.compute_loss(trainer.model.eval(), batch).item(), rel=1e-5)


@pytest.mark.parametrize("workers", [{}, {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}])
def test_equal_weights_give_an_equal_evaluation_loss_in_every_epoch(tmp_path, workers):
    """The noise of evaluation followed the epoch of training, so the best checkpoint was chosen by luck."""
    args = arguments(
        tmp_path, max_steps=-1, num_train_epochs=3, learning_rate=0.0, eval_strategy="steps", eval_steps=1, **workers
    )
    trainer = D2FTrainer(tiny_model(), args, train_dataset=tiny_dataset(6), eval_dataset=tiny_dataset(6))
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(losses) == 6 and set(losses) == {before}


# ---- the noise of training ----


def masks_of_training(folder, dataset, resume=None, **options) -> list[str]:
    """What was masked in each step."""
    trainer = D2FTrainer(tiny_model(), arguments(folder, **options), train_dataset=dataset)
    compute_loss, seen = trainer.compute_loss, []

    def recording(model, inputs, *args, **kwargs):
        seen.append(str(inputs["is_masked"].int().tolist()))
        return compute_loss(model, inputs, *args, **kwargs)

    trainer.compute_loss = recording
    trainer.train(resume_from_checkpoint=resume)
    return seen


ONE_ROW = [{"input_ids": [5, *range(6, 30), EOS], "prompt_length": 1}]
WORKERS = {"dataloader_num_workers": 1}


@pytest.mark.parametrize("options", [{}, WORKERS, {**WORKERS, "dataloader_persistent_workers": True}])
@pytest.mark.parametrize("kind", ["dataset", "stream"])
def test_every_pass_over_the_data_has_noise_of_its_own(tmp_path, options, kind):
    """Workers that outlive an epoch kept the first epoch's noise, and a stream's epoch is a share of `max_steps`."""
    datasets = {
        "dataset": lambda: Dataset.from_list(ONE_ROW),
        "stream": lambda: Dataset.from_list(ONE_ROW).to_iterable_dataset(),
    }
    masks = masks_of_training(tmp_path, datasets[kind](), max_steps=4, **options)
    assert len(masks) == len(set(masks)) == 4
    assert masks == masks_of_training(tmp_path, Dataset.from_list(ONE_ROW), max_steps=4)


def test_a_resumed_run_has_the_noise_of_an_uninterrupted_one(tmp_path):
    options = {"per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 3}
    for kind in (Dataset.from_list(ONE_ROW * 4), Dataset.from_list(ONE_ROW * 12).to_iterable_dataset()):
        whole = masks_of_training(tmp_path / "whole", kind, max_steps=6, **options)
        cut = masks_of_training(tmp_path / "cut", kind, max_steps=3, **options)
        resumed = masks_of_training(
            tmp_path / "cut", kind, resume=str(tmp_path / "cut" / "checkpoint-3"), max_steps=6, **options
        )
        assert cut + resumed == whole


# ---- what is trained ----


def adapted_model(**options) -> PeftModel:
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options)
    return get_peft_model(tiny_model(), config)


def weights_of(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def changed(model, before) -> set[str]:
    return {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}


def test_an_adapter_that_was_loaded_for_inference_is_trained(tmp_path):
    """`PeftModel.from_pretrained` loads it frozen. Training went on, logged a loss, and changed nothing."""
    adapted_model().save_pretrained(tmp_path / "adapter")
    model = PeftModel.from_pretrained(tiny_model(), tmp_path / "adapter")
    assert not any(p.requires_grad for p in model.parameters())
    D2FTrainer(model, arguments(tmp_path), eval_dataset=tiny_dataset()).evaluate()
    assert not any(p.requires_grad for p in model.parameters())
    before = weights_of(model)
    D2FTrainer(model, arguments(tmp_path), train_dataset=tiny_dataset()).train()
    assert changed(model, before) == {name for name in before if "lora_" in name}


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_model_with_nothing_to_train_is_refused(tmp_path, when):
    def froze(model):
        return model.requires_grad_(False)

    for model, options in (
        (adapted_model(), {}),
        (tiny_model(), {"teacher_model": tiny_model(seed=1)}),
        (tiny_model(), {"args": arguments(tmp_path, objective="masked_diffusion")}),
    ):
        options = {"args": arguments(tmp_path), **options}
        if when == "before":
            with pytest.raises(ValueError, match="`model` must have parameters to train, but all of them are frozen"):
                D2FTrainer(froze(model), train_dataset=tiny_dataset(), **options)
        else:
            trainer = D2FTrainer(model, train_dataset=tiny_dataset(), **options)
            froze(trainer.model)
            with pytest.raises(ValueError, match="`model` must have parameters to train"):
                trainer.train()


def test_merged_and_disabled_adapters_are_not_trained(tmp_path):
    merged, disabled = adapted_model(), adapted_model()
    merged.merge_adapter()
    disabled.base_model.disable_adapter_layers()
    with pytest.raises(ValueError, match=r"merged.*unmerge_adapter\(\)"):
        D2FTrainer(merged, arguments(tmp_path), train_dataset=tiny_dataset())
    with pytest.raises(ValueError, match=r"disabled.*enable_adapter_layers\(\)"):
        D2FTrainer(disabled, arguments(tmp_path), train_dataset=tiny_dataset())


def test_what_a_user_froze_stays_frozen(tmp_path):
    model = adapted_model()
    frozen = {name for name, _ in model.named_parameters() if "blocks.0." in name and "lora_" in name}
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    before = weights_of(model)
    args = arguments(tmp_path, save_strategy="steps", save_steps=2)
    D2FTrainer(model, args, train_dataset=tiny_dataset(), eval_dataset=tiny_dataset()).train()
    assert frozen and changed(model, before) == {name for name in before if "lora_" in name} - frozen
    assert not any(p.requires_grad for name, p in model.named_parameters() if name in frozen)


def test_only_the_active_one_of_several_adapters_is_trained(tmp_path):
    model = adapted_model()
    model.add_adapter("second", LoraConfig(r=3, target_modules=["k_proj", "v_proj"], init_lora_weights=False))
    model.set_adapter("second")
    before = weights_of(model)
    trainer = D2FTrainer(model, arguments(tmp_path), train_dataset=tiny_dataset())
    trainer.train()
    assert changed(model, before) == {name for name in before if ".second." in name}
    assert model.active_adapters == ["second"]
    trainer.save_model(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "second" / "config.json").read_text())["block_size"] == 4


@pytest.mark.parametrize("state", ["as it is", "disabled", "partly disabled", "frozen", "merged", "two adapters"])
def test_the_pass_of_the_teacher_leaves_no_trace(tmp_path, state):
    """peft's `disable_adapter` leaves all adapters trainable, and unmerged; `train()` reached modules in eval mode."""
    model = adapted_model(lora_dropout=0.1, modules_to_save=["ln_f"])
    layers = [module for module in model.modules() if hasattr(module, "lora_A")]
    if state == "two adapters":
        model.add_adapter("second", LoraConfig(r=3, target_modules=["k_proj"], init_lora_weights=False))
        model.base_model.set_adapter(["default", "second"])
    elif state == "disabled":
        model.base_model.disable_adapter_layers()
    elif state == "partly disabled":
        layers[0].enable_adapters(False)
    elif state == "frozen":
        layers[1].requires_grad_(False)
    elif state == "merged":
        model.merge_adapter()
    model.train()
    layers[2].eval()

    def traces():
        modules = [
            (name, m.training, getattr(m, "disable_adapters", None), getattr(m, "merged", None), _active(m))
            for name, m in model.named_modules()
        ]
        return modules, [p.requires_grad for p in model.parameters()], model.active_adapters

    def _active(module):
        active = getattr(module, "active_adapters", None)
        return list(active) if isinstance(active, (list, tuple)) else None

    trainer = D2FTrainer(model, arguments(tmp_path))
    batch = trainer.data_collator([tiny_dataset()[0]])
    model.unmerge_adapter() if state == "merged" else None
    with model.disable_adapter():
        expected = model.eval()(batch["input_ids"]).logits
    model.merge_adapter() if state == "merged" else None
    model.train()
    layers[2].eval()
    if state == "frozen":
        layers[1].requires_grad_(False)
    elif state == "partly disabled":
        layers[0].enable_adapters(False)
    before, weights = traces(), weights_of(model)
    with torch.no_grad(), trainer._teacher_weights(model) as teacher:
        found = teacher(batch["input_ids"]).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert traces() == before
    assert changed(model, weights) == set()


def test_a_teacher_of_its_own_is_not_put_into_another_mode(tmp_path):
    teacher = tiny_model(seed=1).train()
    teacher.config.attention_dropout = 0.5
    trainer = D2FTrainer(tiny_model(), arguments(tmp_path), train_dataset=tiny_dataset(), teacher_model=teacher)
    batch = trainer.data_collator([trainer.train_dataset[0]])
    losses = [trainer.compute_loss(trainer.model.train(), batch).item() for _ in range(2)]
    assert losses[0] == losses[1] and all(module.training for module in teacher.modules())


def test_a_teacher_that_would_change_with_the_student_is_refused(tmp_path):
    model = tiny_model()
    with pytest.raises(ValueError, match="`teacher_model` must not share layers with `model`"):
        D2FTrainer(model, arguments(tmp_path), teacher_model=model, peft_config=without_dropout())
    with pytest.raises(ValueError, match=r"wte.weight` must be frozen, because it is not part of an adapter"):
        adapted = adapted_model()
        adapted.get_base_model().model.transformer.wte.requires_grad_(True)
        D2FTrainer(adapted, arguments(tmp_path), train_dataset=tiny_dataset())
    other = tiny_model()
    other.config.mask_token_id = 5
    with pytest.raises(ValueError, match=r"`teacher_model.config.mask_token_id` must be that of the model \(3\)"):
        D2FTrainer(tiny_model(), arguments(tmp_path), teacher_model=other)


def test_an_optimizer_of_other_parameters_is_refused(tmp_path):
    """Made before the adapter is added, it holds frozen weights only, and training changes nothing."""
    model = tiny_model()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = D2FTrainer(model, arguments(tmp_path), train_dataset=tiny_dataset(), optimizers=(early, None))
    with pytest.raises(ValueError, match="`optimizers` must hold parameters that are trained"):
        trainer.train()
    model = adapted_model()
    before = weights_of(model)
    good = torch.optim.SGD(model.parameters(), lr=0.1)
    D2FTrainer(model, arguments(tmp_path), train_dataset=tiny_dataset(), optimizers=(good, None)).train()
    assert changed(model, before)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora"])
def test_an_adapter_that_changes_the_weights_under_it_is_refused(tmp_path, init):
    """PiSSA and its like take the adapter's first value off the model, so without the adapter it is no teacher."""
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=init)
    with pytest.raises(ValueError, match=f"`init_lora_weights` \\('{init}'\\) must leave the model's own weights"):
        D2FTrainer(tiny_model(), arguments(tmp_path), peft_config=config)
    D2FTrainer(tiny_model(), arguments(tmp_path), peft_config=config, teacher_model=tiny_model())


def test_a_refusal_leaves_the_model_without_adapter(tmp_path):
    model = tiny_model()
    for options in ({"train_dataset": RAW}, {"train_dataset": [{"input_ids": [4]}]}, {"data_collator": len}):
        with pytest.raises(ValueError):
            D2FTrainer(model, arguments(tmp_path), **options)
    assert not [name for name, _ in model.named_parameters() if "lora_" in name]


def test_models_of_another_kind_are_refused(tmp_path):
    plain = LlamaForCausalLM(LlamaConfig(vocab_size=40, hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
    for model in (plain, tiny_model().model, torch.nn.Linear(2, 2), 5):
        with pytest.raises(ValueError, match="`model` must be a block-diffusion model with its head, got a"):
            D2FTrainer(model, arguments(tmp_path), train_dataset=tiny_dataset())


def test_adapters_that_the_teacher_would_keep_are_refused(tmp_path):
    from peft import PrefixTuningConfig

    with pytest.raises(ValueError, match="`peft_config` must be the configuration of an adapter in the model's layer"):
        D2FTrainer(tiny_model(), arguments(tmp_path), peft_config=PrefixTuningConfig(num_virtual_tokens=2))
    with pytest.raises(ValueError, match="`peft_config` must be"):
        D2FTrainer(tiny_model(), arguments(tmp_path), peft_config={"r": 8})
    injected = tiny_model()
    injected._hf_peft_config_loaded = True
    with pytest.raises(ValueError, match="`model` must be a plain model or a `PeftModel`"):
        D2FTrainer(injected, arguments(tmp_path))


# ---- the arguments of Trainer ----


def accuracy(prediction) -> dict[str, float]:
    predictions, labels = np.asarray(prediction.predictions), np.asarray(prediction.label_ids)
    if predictions.ndim == 3:
        predictions = predictions.argmax(-1)
    return {"accuracy": float((predictions == labels)[labels != -100].mean())}


def best_tokens(logits, labels):
    assert logits.dim() == 3 and labels.shape == logits.shape[:2]
    return logits.argmax(-1)


@pytest.mark.parametrize("right_shift_logits", [False, True])
@pytest.mark.parametrize("objective", ["distillation", "masked_diffusion"])
def test_compute_metrics_gets_logits_and_labels_of_the_masked_tokens(tmp_path, objective, right_shift_logits):
    """It was accepted and never called, and `metric_for_best_model` failed at the end of the first epoch."""
    dataset, seen = tiny_dataset(7), []

    def metrics(prediction):
        seen.append(prediction)
        return accuracy(prediction)

    model = tiny_model(right_shift_logits)
    trainer = D2FTrainer(
        model,
        arguments(tmp_path, objective=objective, per_device_eval_batch_size=3),
        eval_dataset=dataset,
        compute_metrics=metrics,
    )
    found = trainer.evaluate()
    batch = trainer.evaluation_collator([dataset[i] for i in range(7)])
    expected = batch["labels"].masked_fill(~batch["is_masked"], -100)
    length = expected.shape[1]
    logits, labels = torch.tensor(seen[0].predictions), torch.tensor(seen[0].label_ids)
    assert logits.shape == (7, length, 40) and torch.equal(labels, expected)
    assert (logits[labels == -100] == -100).all()
    _, outputs = trainer.compute_loss(trainer.model, batch, return_outputs=True)
    torch.testing.assert_close(logits[labels != -100], outputs.logits.detach(), atol=1e-5, rtol=1e-5)
    # The same from the best tokens alone, and from `predict`.
    trainer.preprocess_logits_for_metrics = best_tokens
    assert trainer.evaluate()["eval_accuracy"] == found["eval_accuracy"]
    prediction = trainer.predict(dataset)
    assert prediction.predictions.shape == prediction.label_ids.shape == (7, length)
    assert prediction.metrics["test_accuracy"] == found["eval_accuracy"]
    assert prediction.metrics["test_loss"] == pytest.approx(found["eval_loss"])


def test_metrics_choose_the_best_of_several_evaluation_sets(tmp_path):
    args = arguments(
        tmp_path,
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="second_accuracy",
    )
    trainer = D2FTrainer(
        tiny_model(),
        args,
        train_dataset=tiny_dataset(),
        eval_dataset=DatasetDict(first=tiny_dataset(5), second=tiny_dataset(6, seed=1)),
        compute_metrics=accuracy,
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "eval_second_accuracy" in entry]
    assert len(logged) == 2 and trainer.state.best_metric == max(entry["eval_second_accuracy"] for entry in logged)
    assert {"eval_first_loss", "eval_second_loss", "eval_first_agreement"} <= trainer.evaluate().keys()
    before = weights_of(trainer.model)
    trainer.train()  # the adapter that was loaded at the end is still one that is trained
    assert changed(trainer.model, before)


def test_metrics_batch_by_batch(tmp_path):
    total = []

    def metrics(prediction, compute_result):
        total.append(accuracy(prediction)["accuracy"])
        return {"batches": len(total)} if compute_result else {}

    args = arguments(tmp_path, batch_eval_metrics=True, per_device_eval_batch_size=2)
    trainer = D2FTrainer(tiny_model(), args, eval_dataset=tiny_dataset(6), compute_metrics=metrics)
    assert trainer.evaluate()["eval_batches"] == 3


@pytest.mark.parametrize("objective", ["distillation", "masked_diffusion"])
def test_a_loss_function_of_ones_own_takes_the_place_of_the_loss(tmp_path, objective):
    """`compute_loss_func` was accepted and never called."""

    def loss_function(outputs, labels, num_items_in_batch):
        assert outputs.logits.shape == (len(labels), 40) and (outputs.teacher_logits is None) == is_masked_diffusion
        per_token = torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="none") / outputs.mask_ratios
        return per_token.sum() / num_items_in_batch

    is_masked_diffusion = objective == "masked_diffusion"
    own = {"label_weight": 0.0 if is_masked_diffusion else 1.0}  # the same loss
    logs = []
    for options, function in ((own, None), ({}, loss_function)):
        args = arguments(tmp_path, objective=objective, gradient_accumulation_steps=2, max_steps=2, **options)
        trainer = D2FTrainer(
            tiny_model(),
            args,
            train_dataset=tiny_dataset(),
            eval_dataset=tiny_dataset(5),
            compute_loss_func=function,
            peft_config=None if is_masked_diffusion else without_dropout(),
        )
        before = trainer.evaluate()
        trainer.train()
        logs.append([before["eval_loss"], *losses_of(trainer)])
    assert logs[0] == pytest.approx(logs[1], rel=1e-4)
    with pytest.raises(ValueError, match="`label_weight` .* has no effect with a `compute_loss_func`"):
        D2FTrainer(tiny_model(), arguments(tmp_path, label_weight=0.5), compute_loss_func=loss_function)


def test_label_smoothing_is_that_of_the_true_tokens(tmp_path):
    """`label_smoothing_factor` was accepted and changed nothing."""
    losses = {}
    for factor in (0.0, 0.3):
        args = arguments(tmp_path, objective="masked_diffusion", label_smoothing_factor=factor)
        trainer = D2FTrainer(tiny_model(), args, train_dataset=tiny_dataset())
        batch = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
        loss, outputs = trainer.compute_loss(trainer.model.eval(), batch, return_outputs=True)
        losses[factor] = loss.item()
    where = batch["is_masked"]
    smooth = -outputs.logits.log_softmax(-1).mean(-1) / batch["mask_ratios"][where]
    smooth = smooth.sum().item() / (batch["labels"] != -100).sum().item()
    assert losses[0.3] == pytest.approx(0.7 * losses[0.0] + 0.3 * smooth, rel=1e-5)


@pytest.mark.parametrize("objective", ["distillation", "masked_diffusion"])
def test_a_model_may_be_made_by_a_function(tmp_path, objective):
    """`model_init` ended in an AttributeError."""
    weights = []
    for model, model_init in ((tiny_model(), None), (None, lambda: tiny_model()), (None, tiny_model)):
        args = arguments(tmp_path, objective=objective, block_size=8)
        trainer = D2FTrainer(model, args, train_dataset=tiny_dataset(), model_init=model_init)
        torch.manual_seed(0)
        trainer.train()
        assert isinstance(trainer.model, PeftModel) == (objective == "distillation")
        weights.append(losses_of(trainer))
    assert weights[1] == weights[2]
    assert trainer.model.config.block_size == (8 if objective == "distillation" else 4)
    with pytest.raises(ValueError, match="`model` and `model_init`"):
        D2FTrainer(None, arguments(tmp_path))
    with pytest.raises(ValueError, match="`model` and `model_init`"):
        D2FTrainer(tiny_model(), arguments(tmp_path), model_init=tiny_model)
    with pytest.raises(ValueError, match="`model_init` must be a function of nothing, or of the trial"):
        D2FTrainer(None, arguments(tmp_path), model_init=lambda first, second: tiny_model())


def test_a_model_may_be_given_by_its_folder(tmp_path):
    tiny_model().save_pretrained(tmp_path / "base")
    tiny_model(seed=1).save_pretrained(tmp_path / "other")
    trainer = D2FTrainer(str(tmp_path / "base"), arguments(tmp_path), train_dataset=tiny_dataset())
    trainer.train()
    trainer = D2FTrainer(
        tmp_path / "base", arguments(tmp_path), train_dataset=tiny_dataset(), teacher_model=tmp_path / "other"
    )
    assert not isinstance(trainer.model, PeftModel)
    trainer.train()


@pytest.mark.parametrize(
    "collator", [default_data_collator, DefaultDataCollator(), lambda rows: {}, "noise"], ids=lambda c: str(type(c))
)
def test_a_collator_of_another_kind_is_refused(tmp_path, collator):
    if collator == "noise":
        collator = D2FTrainer(tiny_model(), arguments(tmp_path)).data_collator
    with pytest.raises(ValueError, match="`data_collator` must be a `D2FDataCollator`"):
        D2FTrainer(tiny_model(), arguments(tmp_path), train_dataset=tiny_dataset(), data_collator=collator)


def test_a_stock_collator_that_only_pads_means_the_default(tmp_path):
    """It ended in an AttributeError about `block_size`. One that pads to a length cannot be followed."""
    tokenizer, options = letter_tokenizer(), {"train_dataset": RAW, "processing_class": letter_tokenizer()}
    padding = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=16)
    trainer = D2FTrainer(letters_model(), arguments(tmp_path), data_collator=padding, **options)
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["input_ids"].shape[1] % 16 == 0 and (batch["prompt_lengths"] == 4).all()
    trainer.train()
    fixed = DataCollatorWithPadding(tokenizer, padding="max_length", max_length=32)
    with pytest.raises(ValueError, match="`data_collator` must be a `D2FDataCollator`"):
        D2FTrainer(letters_model(), arguments(tmp_path), data_collator=fixed, **options)


def test_out_of_memory_makes_the_batch_smaller(tmp_path):
    args = arguments(tmp_path, auto_find_batch_size=True, max_steps=2)
    trainer = D2FTrainer(tiny_model(), args, train_dataset=tiny_dataset())
    compute_loss, sizes = trainer.compute_loss, []

    def limited(model, inputs, *rest, **kwargs):
        sizes.append(len(inputs["input_ids"]))
        if sizes[-1] > 2:
            raise RuntimeError("CUDA out of memory.")
        return compute_loss(model, inputs, *rest, **kwargs)

    trainer.compute_loss = limited
    trainer.train()
    assert sizes[0] == 4 and sizes[-1] <= 2


def test_noise_on_embeddings_is_not_the_teachers(tmp_path):
    """NEFTune's hook adds noise where the embedding is in training mode."""
    args = arguments(tmp_path, neftune_noise_alpha=50.0)
    trainer = D2FTrainer(tiny_model(), args, train_dataset=tiny_dataset(), peft_config=without_dropout())
    compute_loss, logits = trainer.compute_loss, []

    def twice(model, inputs, **kwargs):
        for _ in range(2):
            _, outputs = compute_loss(model, inputs, return_outputs=True)
            logits.append((outputs.logits.detach(), outputs.teacher_logits))
        return compute_loss(model, inputs, **kwargs)

    trainer.compute_loss = twice
    trainer.train()
    assert torch.equal(logits[0][1], logits[1][1]) and not torch.equal(logits[0][0], logits[1][0])


def test_debugging_needs_masks_that_can_be_looked_at(tmp_path):
    """The detector of overflows fails on bool masks, in the first forward."""
    with pytest.raises(ValueError, match="`debug` .*eager"):
        D2FTrainer(tiny_model(), arguments(tmp_path, debug="underflow_overflow"), train_dataset=tiny_dataset())
    model = tiny_model()
    model.set_attn_implementation("eager")
    D2FTrainer(model, arguments(tmp_path, debug="underflow_overflow"), train_dataset=tiny_dataset()).train()


# ---- datasets ----

RAW = [{"prompt": "abc ", "completion": letters} for letters in ("hello", "you", "there my friend", "x")]


class TorchStream(torch.utils.data.IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        yield from self.rows


class TorchRows(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def a_generator(rows):
    yield from rows


KINDS = {
    "dataset": Dataset.from_list,
    "stream": lambda rows: Dataset.from_list(rows).to_iterable_dataset(),
    "generator": lambda rows: IterableDataset.from_generator(a_generator, gen_kwargs={"rows": rows}),
    "list": list,
    "torch": TorchRows,
    "torch stream": TorchStream,
}


@pytest.mark.parametrize("is_tokenized", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_dataset_trains_evaluates_and_predicts(tmp_path, kind, is_tokenized):
    """Streams failed in `map`, or were taken for tokenized; `evaluate` and `predict` did not tokenize at all."""
    tokenizer = letter_tokenizer()
    rows = [tokenize_example(row, tokenizer) for row in RAW] if is_tokenized else RAW
    options = {"max_length": 8, "max_steps": 3, "per_device_train_batch_size": 2}
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=3, **options)
    model = letters_model()
    trainer = D2FTrainer(
        model, args, train_dataset=KINDS[kind](rows), eval_dataset=KINDS[kind](rows), processing_class=tokenizer
    )
    assert next(iter(trainer.get_train_dataloader()))["input_ids"].shape[1] <= 8  # `max_length`
    trainer.train()
    metrics = trainer.evaluate()
    expected = D2FTrainer(
        trainer.model, arguments(tmp_path, max_length=8), eval_dataset=RAW, processing_class=tokenizer
    ).evaluate()
    for found in (metrics, trainer.evaluate(KINDS[kind](rows)), trainer.evaluate({"one": KINDS[kind](rows)})):
        loss = found.get("eval_loss", found.get("eval_one_loss"))
        assert loss == pytest.approx(expected["eval_loss"], rel=1e-5)
    assert len(trainer.predict(KINDS[kind](rows)).label_ids) == 4


def letters_model():
    return tiny_random_model(eos_token_id=38, mask_token_id=39, pad_token_id=37)


def test_persistent_workers_do_not_give_the_rows_of_another_dataset(tmp_path):
    """The Trainer keeps the loader of the first evaluation, whatever dataset it is asked for next."""
    args = arguments(tmp_path, dataloader_num_workers=1, dataloader_persistent_workers=True)
    trainer = D2FTrainer(tiny_model(), args, eval_dataset=tiny_dataset(6))
    first = trainer.evaluate()["eval_loss"]
    other = trainer.evaluate(tiny_dataset(6, seed=5))["eval_loss"]
    alone = D2FTrainer(tiny_model(), arguments(tmp_path), eval_dataset=tiny_dataset(6, seed=5)).evaluate()
    assert first != other == pytest.approx(alone["eval_loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (RAW, "`processing_class` must be a tokenizer"),
        (
            DatasetDict(train=Dataset.from_list(RAW)),
            r"`train_dataset` must be one dataset, got a DatasetDict of \['tr",
        ),
        ([{"input_ids": [4, 5, 6]}], "must have `input_ids` and `prompt_length`"),
        (Dataset.from_dict({"input_ids": [], "prompt_length": []}), "`train_dataset` must have examples"),
        (["text"], "The examples of `train_dataset` must be dictionaries, got a str"),
        (a_generator(RAW), "`train_dataset` must be a dataset .*from_generator"),
        (Dataset.from_list([{"text": "abc"}]), "`processing_class` must be a tokenizer"),
    ],
)
def test_datasets_that_cannot_be_used_are_refused_at_once(tmp_path, dataset, message):
    with pytest.raises(ValueError, match=message):
        D2FTrainer(tiny_model(), arguments(tmp_path), train_dataset=dataset)


def test_a_prompt_that_is_too_long_is_an_error_before_training(tmp_path):
    rows = [{"input_ids": [5] * 9, "prompt_length": 8}]
    for kind in ("dataset", "stream", "generator", "list", "torch"):
        with pytest.raises(ValueError, match=r"must be shorter than `max_length` \(8\), got 8"):
            D2FTrainer(tiny_model(), arguments(tmp_path, max_length=8), train_dataset=KINDS[kind](rows))


# ---- what is saved ----


def test_the_block_size_that_was_trained_is_saved(tmp_path):
    """It was in the arguments alone, so what was saved decoded with another one."""
    args = arguments(tmp_path / "runs", block_size=8, save_strategy="steps", save_steps=3)
    trainer = D2FTrainer(tiny_model(), args, train_dataset=tiny_dataset())
    assert trainer.model.config.block_size == 4  # until something is trained with it
    trainer.train()
    trainer.save_model(tmp_path / "by_trainer")
    trainer.model.save_pretrained(tmp_path / "by_peft")
    for folder in ("by_trainer", "by_peft", "runs/checkpoint-3"):
        assert (tmp_path / folder / "adapter_config.json").exists()
        assert json.loads((tmp_path / folder / "generation_config.json").read_text())["block_size"] == 8
        PeftModel.from_pretrained(tiny_model(), tmp_path / folder)
        tiny_model().save_pretrained(tmp_path / "base")
        assert load_d2f_model(tmp_path / "base", tmp_path / folder).config.block_size == 8
        assert load_d2f_model(tmp_path / "base", tmp_path / folder, merge=False).config.block_size == 8
    values = json.loads((tmp_path / "by_peft" / "adapter_config.json").read_text())
    values["base_model_name_or_path"] = str(tmp_path / "base")
    (tmp_path / "by_peft" / "adapter_config.json").write_text(json.dumps(values))
    # Once there was a config.json in the folder, which transformers took for a whole model.
    AutoModelForCausalLM.from_pretrained(tmp_path / "by_peft")
    trainer.model.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = load_d2f_model(tmp_path / "merged")
    assert (merged.config.block_size, merged.config.use_cache) == (8, True)


def test_the_block_size_is_saved_without_an_adapter_too(tmp_path):
    args = arguments(tmp_path / "runs", block_size=8, save_strategy="steps", save_steps=3)
    trainer = D2FTrainer(tiny_model(), args, train_dataset=tiny_dataset(), teacher_model=tiny_model())
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    for folder in ("saved", "runs/checkpoint-3"):
        assert load_d2f_model(tmp_path / folder).config.block_size == 8


def test_the_trained_block_size_replaces_that_of_a_generation_config(tmp_path):
    """A block size in the generation config wins over the configuration's, so the model decoded with another one."""
    model = tiny_model()
    model.generation_config.block_size = 4
    trainer = D2FTrainer(
        model,
        arguments(tmp_path, block_size=2, max_steps=1),
        train_dataset=tiny_dataset(),
        teacher_model=tiny_model(),
    )
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    saved = load_d2f_model(tmp_path / "saved")
    assert saved.config.block_size == saved.generation_config.block_size == 2


def test_an_adapter_is_saved_with_the_tokens_it_was_trained_with(tmp_path):
    """Only the block size was saved, so the base's own mask and EOS tokens were taken, without a word."""
    tiny_model().save_pretrained(tmp_path / "base")
    model = load_d2f_model(tmp_path / "base", mask_token_id=7, eos_token_id=[EOS, 5])
    trainer = D2FTrainer(model, arguments(tmp_path, max_steps=1), train_dataset=tiny_dataset())
    trainer.train()
    trainer.save_model(tmp_path / "adapter")
    with pytest.raises(ValueError, match="`mask_token_id` must be the one that the adapter was trained with, 7"):
        load_d2f_model(tmp_path / "base", tmp_path / "adapter")
    loaded = load_d2f_model(tmp_path / "base", tmp_path / "adapter", mask_token_id=7)
    assert loaded.config.eos_token_id == loaded.generation_config.eos_token_id == [EOS, 5]


def test_a_bidirectional_model_keeps_its_block_size(tmp_path):
    """The block size of masked diffusion shapes the noise, not the attention."""
    args = arguments(tmp_path, objective="masked_diffusion", block_size=8)
    trainer = D2FTrainer(tiny_model(), args, train_dataset=tiny_dataset())
    trainer.train()
    assert trainer.model.config.block_size == 4


# ---- what is logged ----


def averages_by_hand(trainer, batches, model) -> dict[str, float]:
    sums: dict[str, list[float]] = {}
    for batch in batches:
        _, outputs = trainer.compute_loss(model, batch, return_outputs=True)
        student, teacher = outputs.logits.detach().log_softmax(-1), outputs.teacher_logits.log_softmax(-1)
        divergence = -(teacher.exp() * student).sum(-1)
        for m, (b, i) in enumerate(batch["is_masked"].nonzero().tolist()):
            block = (i - int(batch["prompt_lengths"][b])) // 4
            sums.setdefault(f"divergence_block_{block}", []).append(divergence[m].item())
            sums.setdefault("agreement", []).append(float(student[m].argmax() == teacher[m].argmax()))
        for b in range(len(batch["input_ids"])):
            start, end = int(batch["prompt_lengths"][b]), int(batch["attention_mask"][b].sum())
            sums.setdefault("mask_ratio", []).extend(batch["mask_ratios"][b, start:end].tolist())
    return {name: sum(values) / len(values) for name, values in sums.items()}


def test_the_log_says_what_the_method_is_about(tmp_path):
    """Over all batches since the last log, those of accumulated steps too, by tokens."""
    args = arguments(
        tmp_path, max_steps=4, logging_steps=2, gradient_accumulation_steps=2, learning_rate=0.0, eval_strategy="no"
    )
    trainer = D2FTrainer(
        tiny_model(), args, train_dataset=tiny_dataset(), eval_dataset=tiny_dataset(3), peft_config=without_dropout()
    )
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    compute_loss, batches = trainer.compute_loss, []

    def recording(model, inputs, *rest, **kwargs):
        batches.append(inputs)
        return compute_loss(model, inputs, *rest, **kwargs)

    trainer.compute_loss = recording
    trainer.train()
    trainer.compute_loss = compute_loss
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(batches) == 8 and len(logs) == 2
    for n, log in enumerate(logs):
        expected = averages_by_hand(trainer, batches[4 * n : 4 * n + 4], trainer.model.eval())
        assert {name: log[name] for name in log if name in expected or "divergence" in name} == pytest.approx(expected)
    batch = trainer.evaluation_collator([trainer.eval_dataset[i] for i in range(3)])
    expected = {f"eval_{name}": v for name, v in averages_by_hand(trainer, [batch], trainer.model).items()}
    found = trainer.evaluate()
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_masked_diffusion_has_no_teacher_to_agree_with(tmp_path):
    args = arguments(tmp_path, objective="masked_diffusion", mask_ratio_low=0.5, mask_ratio_high=0.5, max_steps=2)
    trainer = D2FTrainer(tiny_model(), args, train_dataset=tiny_dataset(), eval_dataset=tiny_dataset())
    trainer.train()
    metrics = {**trainer.evaluate(), **trainer.state.log_history[0]}
    assert metrics["mask_ratio"] == metrics["eval_mask_ratio"] == pytest.approx(0.5)
    assert not [name for name in metrics if "agreement" in name or "divergence" in name]


# ---- two processes ----

TWO_PROCESSES = """
import sys
sys.path.insert(0, {tests!r})
from test_trainer import *
args = arguments({folder!r}, per_device_train_batch_size=4, per_device_eval_batch_size=2)
trainer = D2FTrainer(tiny_model(), args, train_dataset=tiny_dataset(), peft_config=without_dropout())
trainer.train()
metrics = trainer.evaluate(tiny_dataset(7, seed=3))
# Accelerate would concatenate the batches of a stream, which differ in length.
stream = D2FTrainer(
    tiny_model(), args, train_dataset=tiny_dataset(64).to_iterable_dataset(), peft_config=without_dropout()
)
stream.train()
if args.process_index == 0:
    results = [trainer.state.log_history[:3], metrics, losses_of(stream)]
    print("RESULTS", json.dumps(results), flush=True)
# gloo's threads sometimes abort a process that ends in the usual way while its peer is ending, too.
torch.distributed.barrier()
os._exit(0)
"""


@pytest.mark.slow
def test_two_processes_give_the_loss_of_one(tmp_path):
    """And its averages, in training and in an evaluation whose last batch is filled up with rows of the first."""
    args = arguments(tmp_path, per_device_train_batch_size=8)
    trainer = D2FTrainer(tiny_model(), args, train_dataset=tiny_dataset(), peft_config=without_dropout())
    trainer.train()
    stream = tiny_dataset(64).to_iterable_dataset()
    streamed = D2FTrainer(tiny_model(), args, train_dataset=stream, peft_config=without_dropout())
    streamed.train()
    script = TWO_PROCESSES.format(tests=str(Path(__file__).parent), folder=str(tmp_path / "two"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(2):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "ACCELERATE_USE_CPU": "true",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-c", script]
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    outputs = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs[0][1][-2000:] + outputs[1][1][-2000:]
    line = next(line for line in outputs[0][0].splitlines() if line.startswith("RESULTS"))
    logs, metrics, losses_of_stream = json.loads(line.removeprefix("RESULTS"))
    for log, expected in zip(logs, trainer.state.log_history[:3], strict=True):
        assert {"loss", "grad_norm", "mask_ratio", "agreement", "divergence_block_1"} <= log.keys()
        assert log["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert log == pytest.approx(expected, rel=1e-3)
    expected = trainer.evaluate(tiny_dataset(7, seed=3))
    names = [name for name in expected if name.startswith(AVERAGES)]
    assert {name: metrics[name] for name in names} == pytest.approx({name: expected[name] for name in names}, rel=1e-3)
    assert losses_of_stream == pytest.approx(losses_of(streamed), rel=1e-4)

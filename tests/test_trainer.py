"""`D2FTrainer` on tiny models: the reference's loss, the teacher, batches however they are cut, interrupted runs."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset
from peft import PeftModel
from safetensors.torch import load_file

from d2f_hf import (
    D2FTrainer,
    load_d2f_model,
    tokenize_example,
)
from tiny_models import letter_tokenizer
from tiny_training import (
    EOS,
    MASK,
    RAW,
    arguments,
    changed,
    letters_model,
    losses_of,
    tiny_dataset,
    tiny_model,
    weights_of,
    without_dropout,
)

# B batch, L sequence, M masked tokens

GOLDEN = Path(__file__).parent / "golden"


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


# ---- datasets ----


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

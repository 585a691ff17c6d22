"""`D2FTrainer` on tiny models: the reference's loss, the teacher, batches however they are cut, interrupted runs."""

import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from d2f_hf import (
    D2FDataCollator,
    D2FLLaDAConfig,
    D2FLLaDAForBlockDiffusion,
    D2FTrainer,
    D2FTrainingArguments,
    load_d2f_model,
)
from d2f_hf.noising import D2FNoisingCollator

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


def noising(**options) -> D2FNoisingCollator:
    collate = D2FDataCollator(block_size=4, eos_token_id=EOS, pad_token_id=PAD, eos_tail="block")
    defaults = {"objective": "distillation", "mask_ratio_low": 0.2, "mask_ratio_high": 0.7}
    return D2FNoisingCollator(collate, mask_token_id=MASK, **{**defaults, **options})


@pytest.mark.parametrize("objective", ["distillation", "masked_diffusion"])
def test_only_response_tokens_are_masked_and_labels_say_what_they_were(objective):
    dataset = tiny_dataset()
    rows = [dataset[i] for i in range(16)]
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
    dataset = tiny_dataset()
    together = noising()([dataset[i] for i in range(6)])
    for b in range(6):
        alone = noising()([dataset[b]])
        length = alone["input_ids"].shape[1]
        for name in ("input_ids", "is_masked", "mask_ratios", "labels"):
            assert torch.equal(together[name][b, :length], alone[name][0])


def test_another_epoch_or_seed_gives_other_noise_and_the_same_gives_the_same():
    rows = [tiny_dataset()[i] for i in range(8)]
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


# ---- two processes ----

TWO_PROCESSES = """
import sys
sys.path.insert(0, {tests!r})
from test_trainer import *
args = arguments({folder!r}, per_device_train_batch_size=4)
trainer = D2FTrainer(tiny_model(), args, train_dataset=tiny_dataset(), peft_config=without_dropout())
trainer.train()
if args.process_index == 0:
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "loss" in entry]
    print("LOSSES", json.dumps([losses_of(trainer), norms]), flush=True)
# gloo's threads sometimes abort a process that ends in the usual way while its peer is ending, too.
torch.distributed.barrier()
os._exit(0)
"""


@pytest.mark.slow
def test_two_processes_give_the_loss_of_one(tmp_path):
    args = arguments(tmp_path, per_device_train_batch_size=8)
    trainer = D2FTrainer(tiny_model(), args, train_dataset=tiny_dataset(), peft_config=without_dropout())
    trainer.train()
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
    line = next(line for line in outputs[0][0].splitlines() if line.startswith("LOSSES"))
    losses, norms = json.loads(line.removeprefix("LOSSES"))
    assert losses == pytest.approx(losses_of(trainer), rel=1e-4)
    expected_norms = [entry["grad_norm"] for entry in trainer.state.log_history if "loss" in entry]
    assert norms == pytest.approx(expected_norms, rel=1e-3)

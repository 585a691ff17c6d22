"""The averages that are logged: by hand from whole runs, and how sums and counts are put together."""

import pytest
import torch

from d2f_hf import D2FTrainer
from d2f_hf.training_log import added, means, total_of_rows
from tiny_training import arguments, tiny_dataset, tiny_model, without_dropout


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


def test_what_no_token_had_is_not_logged():
    averages = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 0.0], [1.0, 2.0], [0.0, 0.0]], device="cpu")
    assert means(averages) == {"loss": 0.0, "mask_ratio": 0.75, "divergence_block_0": 0.5}


def test_batches_with_more_blocks_add_to_those_with_fewer():
    short, long = torch.ones(4, 2, device="cpu"), torch.ones(6, 2, device="cpu")
    for first, second in ((short, long), (long, short)):
        assert added(added(None, first), second)[:, 0].tolist() == [2.0, 2.0, 2.0, 2.0, 1.0, 1.0]
    rows = [torch.ones(2, 4, 2, device="cpu"), torch.ones(1, 6, 2, device="cpu")]
    assert total_of_rows(rows, is_filtered=False)[:, 0].tolist() == [3.0, 3.0, 3.0, 3.0, 1.0, 1.0]


def test_many_batches_are_counted_exactly():
    """In float32 a count stops growing at 2 ** 24 tokens."""
    total = added(torch.full((3, 2), 2.0**24, dtype=torch.float64, device="cpu"), torch.ones(3, 2, device="cpu"))
    assert (total == 2**24 + 1).all()


def test_losses_that_are_not_finite_are_left_out_unless_all_are():
    """As the `Trainer` does it with `logging_nan_inf_filter`; the other averages of these rows stay."""
    good = torch.tensor([[[6.0, 3.0], [1.0, 2.0], [0.0, 0.0]]], device="cpu")
    bad = torch.tensor([[[float("nan"), 3.0], [1.0, 2.0], [0.0, 0.0]]], device="cpu")
    assert means(total_of_rows([good, bad], is_filtered=True)) == {"loss": 2.0, "mask_ratio": 0.5}
    for rows, is_filtered in (([good, bad], False), ([bad, bad], True)):
        assert torch.isnan(total_of_rows(rows, is_filtered)[0, 0])

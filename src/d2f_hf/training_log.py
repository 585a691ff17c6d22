"""What training and evaluation log besides the loss: averages over tokens, kept as sums and counts of each row."""

# B batch, L sequence, V vocabulary, M masked tokens of the batch, N blocks, P averages

from typing import Any

import torch
from torch import nn


def row_averages(
    inputs: dict[str, torch.Tensor],
    where: tuple[torch.Tensor, torch.Tensor],
    row_losses: torch.Tensor,
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor | None,
    divergence: torch.Tensor | None,
    block_size: int,
) -> torch.Tensor:
    """Sum and count of each average in each row, `[B, P, 2]`, in the order in which `means` names them.

    Args:
        inputs (`dict[str, torch.Tensor]`):
            The batch of [`D2FNoisingCollator`].
        where (`tuple[torch.Tensor, torch.Tensor]`):
            Rows and positions of the masked tokens, `[M]` each.
        row_losses (`torch.Tensor` of shape `[B]`):
            The sum of the loss over each row.
        student_logits, teacher_logits (`torch.Tensor` of shape `[M, V]`):
            The teacher's only for distillation.
        divergence (`torch.Tensor` of shape `[M]`, *optional*):
            That of the two, only for distillation.
        block_size (`int`):
            The number of tokens of a block.
    """
    averages = [(row_losses, (inputs["labels"] != -100).sum(-1)), _mask_ratios(inputs)]
    if teacher_logits is not None and divergence is not None:
        is_masked = inputs["is_masked"]  # [B, L]
        agrees = (student_logits.argmax(-1) == teacher_logits.argmax(-1)).float()  # [M]
        averages.append((sum_per_row(agrees, where, is_masked.shape), is_masked.sum(-1)))
        averages.extend(_divergences_per_block(divergence, where, inputs, block_size))
    return torch.stack([torch.stack(pair, dim=-1) for pair in averages], dim=1)


def _mask_ratios(inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum and number of the mask ratios of response tokens, `[B]` each. In rows with causal attention they are 0.

    Of complementary masks the first half counts: the mean of both is always a half.
    """
    length = inputs["attention_mask"].shape[1]
    position = torch.arange(length, device=inputs["input_ids"].device)
    in_response = (position >= inputs["prompt_lengths"][:, None]) & inputs["attention_mask"].bool()  # [B, L]
    ratios = inputs["mask_ratios"][:, :length].where(in_response, 0.0)
    if "is_causal" in inputs:
        ratios = ratios.masked_fill(inputs["is_causal"][:, None], 0.0)
    return ratios.sum(-1), in_response.sum(-1)


def _divergences_per_block(
    divergence: torch.Tensor,
    where: tuple[torch.Tensor, torch.Tensor],
    inputs: dict[str, torch.Tensor],
    block_size: int,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Sum and number of the divergences `[M]` in each row's block 0, 1, ..., `[B]` each."""
    batch_size, length = inputs["is_masked"].shape
    num_blocks = -(-length // block_size)
    offset = (where[1] - inputs["prompt_lengths"][where[0]]).clamp(min=0)
    where, shape = (where[0], offset), (batch_size, num_blocks * block_size)
    blocks = (batch_size, num_blocks, block_size)
    sums = _scattered(divergence, where, shape).view(blocks).sum(-1)  # [B, N]
    counts = _scattered(torch.ones_like(divergence), where, shape).view(blocks).sum(-1)
    return list(zip(sums.unbind(1), counts.unbind(1), strict=True))


def losses_of_rows(
    compute_loss_func: Any, outputs: Any, targets: torch.Tensor, row: torch.Tensor, num_items: torch.Tensor
) -> torch.Tensor:
    """`compute_loss_func` of each row, times the row's number of items, `[B]`.

    Args:
        compute_loss_func (`Callable`):
            That of the `Trainer`.
        outputs (`D2FTrainingOutput`):
            Those of the batch.
        targets, row (`torch.Tensor` of shape `[M]`):
            The true tokens, and the rows that they are in.
        num_items (`torch.Tensor` of shape `[B]`):
            The number of items of each row.
    """
    losses = []
    for b, count in enumerate(num_items):
        of_row = {name: value[row == b] for name, value in outputs.items()}
        if len(of_row["logits"]) == 0:
            losses.append(torch.zeros((), device=num_items.device))
            continue
        loss = compute_loss_func(type(outputs)(**of_row), targets[row == b], num_items_in_batch=count)
        losses.append(loss.detach().float() * count)
    return torch.stack(losses)


def sum_per_row(
    values: torch.Tensor, where: tuple[torch.Tensor, torch.Tensor], shape: tuple[int, int] | torch.Size
) -> torch.Tensor:
    """The sum of values `[M]` in each row, `[B]`. Not `index_add`, whose order of summing varies on a GPU."""
    return _scattered(values, where, shape).sum(-1)


def _scattered(
    values: torch.Tensor, where: tuple[torch.Tensor, torch.Tensor], shape: tuple[int, int] | torch.Size
) -> torch.Tensor:
    """`[B, L]` in float32, with the values `[M]` at their rows and positions and 0 elsewhere."""
    return torch.zeros(shape, dtype=torch.float32, device=values.device).index_put(where, values.float())


# ---- from rows to what is logged ----


def added(total: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
    """The sum of two `[P, 2]`, of which one may have more blocks."""
    new = new.to(torch.float32 if new.device.type == "mps" else torch.float64)  # counts pass 2 ** 24
    if total is None:
        return new
    width = max(len(total), len(new))
    return _padded(total, width, dim=0) + _padded(new, width, dim=0)


def total_of_rows(parts: list[torch.Tensor], is_filtered: bool) -> torch.Tensor:
    """The sum `[P, 2]` of the rows `[B, P, 2]` of several batches; filtered, without losses that are not finite."""
    width = max(part.shape[1] for part in parts)
    averages = torch.cat([_padded(part.cpu(), width, dim=1) for part in parts]).double()  # [rows, P, 2]
    finite = averages[:, 0, 0].isfinite()
    if is_filtered and finite.any():
        averages[~finite, 0] = 0.0
    return averages.sum(0)


def _padded(averages: torch.Tensor, width: int, dim: int) -> torch.Tensor:
    """With zeros for the averages that others have, `width` in all."""
    missing = width - averages.shape[dim]
    return nn.functional.pad(averages, (0, 0, 0, missing))


def means(averages: torch.Tensor) -> dict[str, float]:
    """Names and values of averages `[P, 2]`, without those of no tokens."""
    values = averages.tolist()
    names = ["loss", "mask_ratio", "agreement", *(f"divergence_block_{n}" for n in range(len(values) - 3))]
    return {
        name: total / max(count, 1)
        for name, (total, count) in zip(names, values, strict=False)
        if count > 0 or name == "loss"
    }

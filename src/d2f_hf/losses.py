"""The training objectives, over the masked tokens of a batch: distillation (D2F) and masked diffusion (LLaDA).

Each is made of a loss per token, a weight and a mean. `D2FTrainer` puts these parts together itself, because it logs
them too.
"""

# M masked tokens of the batch, V vocabulary

import torch
import torch.nn.functional as F

DIVERGENCES = ("cross_entropy", "forward_kl", "reverse_kl")
WEIGHTINGS = ("inverse_mask_ratio", "uniform")


def distillation_loss(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    mask_ratios: torch.Tensor,
    *,
    divergence: str = "cross_entropy",
    weighting: str = "inverse_mask_ratio",
    num_items: int | torch.Tensor | None = None,
) -> torch.Tensor:
    r"""
    The asymmetric distillation loss: weighted divergences of student and teacher, summed and divided by `num_items`.

    The defaults are those of the reference code, which the released adapters were trained with. Eq. 3 of
    arXiv 2508.09192 is `divergence="reverse_kl", weighting="uniform"`.

    Args:
        student_logits (`torch.Tensor` of shape `[M, V]`):
            Logits of the block-causal student at the masked tokens.
        teacher_logits (`torch.Tensor` of shape `[M, V]`):
            Logits of the bidirectional teacher at the same tokens. No gradient flows into them.
        mask_ratios (`torch.Tensor` of shape `[M]`):
            The mask ratio that each of these tokens was masked with, in (0, 1].
        divergence (`str`, *optional*, defaults to `"cross_entropy"`):
            See [`~losses.token_divergence`].
        weighting (`str`, *optional*, defaults to `"inverse_mask_ratio"`):
            Weight of a token: `"inverse_mask_ratio"` gives 1 / mask ratio, so that lightly masked blocks count as much
            as heavily masked ones; `"uniform"` gives 1.
        num_items (`int` or `torch.Tensor`, *optional*):
            What the sum is divided by: the number of masked tokens of the whole (accumulated, distributed) batch.
            Defaults to M. A count of 0 divides by 1.

    Returns:
        `torch.Tensor`: float32 scalar. Without any masked token it is 0 and can still be differentiated.

    Raises:
        ValueError: If shapes differ, a ratio is not above 0, or `divergence` or `weighting` is unknown.
    """
    per_token = token_divergence(student_logits, teacher_logits, divergence)  # [M]
    return mean_loss(weighted(per_token, mask_ratios, weighting), num_items)


def token_divergence(student_logits: torch.Tensor, teacher_logits: torch.Tensor, divergence: str) -> torch.Tensor:
    r"""
    How far the student's distribution is from the teacher's at each masked token, at temperature 1.

    - `"forward_kl"`: KL(teacher || student).
    - `"cross_entropy"`: -sum teacher * log student = KL(teacher || student) + entropy of the teacher. It has the
      gradient of `"forward_kl"`, and is what the reference code computes.
    - `"reverse_kl"`: KL(student || teacher), Eq. 3 of arXiv 2508.09192 as printed.

    Args:
        student_logits (`torch.Tensor` of shape `[M, V]`):
            Logits of the student, in any dtype.
        teacher_logits (`torch.Tensor` of shape `[M, V]`):
            Logits of the teacher, finite, in any dtype. No gradient flows into them.
        divergence (`str`):
            `"cross_entropy"`, `"forward_kl"` or `"reverse_kl"`.

    Returns:
        `torch.Tensor` of shape `[M]`, float32, in nats.

    Raises:
        ValueError: If the logits are not two `[M, V]` tensors of one shape, or `divergence` is unknown.
    """
    if divergence not in DIVERGENCES:
        raise ValueError(f"`divergence` must be one of {DIVERGENCES}, got {divergence!r}.")
    if student_logits.dim() != 2 or student_logits.shape != teacher_logits.shape:
        raise ValueError(
            "`student_logits` and `teacher_logits` must both have shape [M, V], "
            f"got {list(student_logits.shape)} and {list(teacher_logits.shape)}. "
            "Select the masked tokens with `logits[is_masked]`."
        )
    student_log_probs = F.log_softmax(student_logits.float(), dim=-1)  # [M, V]
    teacher_log_probs = F.log_softmax(teacher_logits.detach().float(), dim=-1)  # [M, V]
    if divergence == "cross_entropy":
        return -(teacher_log_probs.exp() * student_log_probs).sum(-1)
    if divergence == "forward_kl":
        return (teacher_log_probs.exp() * (teacher_log_probs - student_log_probs)).sum(-1)
    return (student_log_probs.exp() * (student_log_probs - teacher_log_probs)).sum(-1)


def masked_diffusion_loss(
    logits: torch.Tensor,
    targets: torch.Tensor,
    mask_ratios: torch.Tensor,
    *,
    num_items: int | torch.Tensor,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    r"""
    LLaDA's masked-diffusion objective (Eq. 3 of arXiv 2502.09992): masked tokens' cross-entropy / t over `num_items`.

    With t ~ U(0, 1] and `num_items` the number of tokens that could have been masked, its expectation bounds the
    negative log-likelihood per response token from above.

    Args:
        logits (`torch.Tensor` of shape `[M, V]`):
            Logits of the bidirectional model at the masked tokens.
        targets (`torch.Tensor` of shape `[M]`, integer):
            The tokens that were masked.
        mask_ratios (`torch.Tensor` of shape `[M]`):
            The ratio t that each of these tokens was masked with, in (0, 1].
        num_items (`int` or `torch.Tensor`):
            Number of *maskable* response tokens, masked or not, of the whole (accumulated, distributed) batch.
            A count of 0 divides by 1.
        label_smoothing (`float`, *optional*, defaults to 0.0):
            See [`~losses.token_cross_entropy`].

    Returns:
        `torch.Tensor`: float32 scalar. Without any masked token it is 0 and can still be differentiated.

    Raises:
        ValueError: If shapes do not fit together or a ratio is not above 0.
    """
    per_token = token_cross_entropy(logits, targets, label_smoothing)  # [M]
    return mean_loss(weighted(per_token, mask_ratios, "inverse_mask_ratio"), num_items)


def token_cross_entropy(logits: torch.Tensor, targets: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
    r"""
    The cross-entropy to the true token at each masked token.

    Args:
        logits (`torch.Tensor` of shape `[M, V]`):
            Logits at the masked tokens, in any dtype.
        targets (`torch.Tensor` of shape `[M]`, integer):
            The tokens that were masked.
        label_smoothing (`float`, *optional*, defaults to 0.0):
            Share of the target's probability that is spread evenly over the vocabulary.

    Returns:
        `torch.Tensor` of shape `[M]`, float32, in nats.

    Raises:
        ValueError: If the shapes do not fit together.
    """
    if logits.dim() != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(
            f"`logits` must have shape [M, V] and `targets` [M], got {list(logits.shape)} and {list(targets.shape)}. "
            "Select the masked tokens with `logits[is_masked]` and `input_ids[is_masked]`."
        )
    return F.cross_entropy(logits.float(), targets, reduction="none", label_smoothing=label_smoothing)


def weighted(per_token: torch.Tensor, mask_ratios: torch.Tensor, weighting: str) -> torch.Tensor:
    r"""
    Losses of masked tokens, weighted: divided by their mask ratios (`"inverse_mask_ratio"`) or as they are.

    Args:
        per_token (`torch.Tensor` of shape `[M]`):
            The losses.
        mask_ratios (`torch.Tensor` of shape `[M]`):
            The mask ratio that each of these tokens was masked with, in (0, 1].
        weighting (`str`):
            `"inverse_mask_ratio"` or `"uniform"`.

    Returns:
        `torch.Tensor` of shape `[M]`.

    Raises:
        ValueError: If `weighting` is unknown, shapes differ or a ratio is not above 0.
    """
    if weighting not in WEIGHTINGS:
        raise ValueError(f"`weighting` must be one of {WEIGHTINGS}, got {weighting!r}.")
    if mask_ratios.shape != per_token.shape:
        raise ValueError(
            f"`mask_ratios` must have one entry per masked token ({len(per_token)}), got {list(mask_ratios.shape)}. "
            "Select the masked tokens with `token_mask_ratios[is_masked]`."
        )
    if (mask_ratios <= 0).any():
        raise ValueError(
            f"`mask_ratios` must be above 0, got {mask_ratios.min():.4g}: a token with that ratio is never masked. "
            "Select the masked tokens with `token_mask_ratios[is_masked]`."
        )
    return per_token / mask_ratios if weighting == "inverse_mask_ratio" else per_token


def mean_loss(per_token: torch.Tensor, num_items: int | torch.Tensor | None = None) -> torch.Tensor:
    """The sum of the losses of masked tokens `[M]`, divided by `num_items`: by M if not given, and by 1 if 0."""
    if num_items is None:
        num_items = len(per_token)
    # The clamp keeps a batch without masked tokens at 0 / 1; on a tensor it needs no host sync.
    return per_token.sum() / torch.as_tensor(num_items, device=per_token.device).clamp(min=1)

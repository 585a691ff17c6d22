"""Distillation and masked-diffusion losses: `d2f_hf.losses`."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from d2f_hf.losses import (
    DIVERGENCES,
    distillation_loss,
    masked_diffusion_loss,
    mean_loss,
    token_cross_entropy,
    token_divergence,
    weighted,
)

# M masked tokens, V vocabulary

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    """The tensors of the reference's LLaDA loss, with `mask_ratios` [M] picked out at the masked positions."""
    tensors = load_file(GOLDEN / "training.safetensors")
    tensors = {name.removeprefix("llada."): value for name, value in tensors.items() if name.startswith("llada.")}
    tensors["mask_ratios"] = tensors["p_mask"][tensors["masked_indices"]]
    return tensors


@pytest.fixture(scope="module")
def golden_values() -> dict:
    return json.loads((GOLDEN / "training.json").read_text())["loss"]["llada"]


def random_logits(seed: int, tokens: int = 6, vocabulary: int = 11) -> torch.Tensor:
    return torch.randn(tokens, vocabulary, generator=torch.Generator().manual_seed(seed))


# ---- parity with the reference ----


def test_the_default_distillation_loss_equals_the_reference(golden, golden_values):
    student, teacher = golden["student_logits_masked"], golden["teacher_logits_masked"]
    cross_entropy = token_divergence(student, teacher, "cross_entropy")
    torch.testing.assert_close(cross_entropy, golden["distill.per_token_ce"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        cross_entropy / golden["mask_ratios"], golden["distill.per_token_loss"], rtol=1e-4, atol=1e-5
    )
    loss = distillation_loss(student, teacher, golden["mask_ratios"])
    assert loss.item() == pytest.approx(golden_values["distill"]["loss"], rel=1e-4)


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl"])
def test_both_kl_divergences_equal_the_decomposition_of_the_reference_loss(golden, golden_values, divergence):
    loss = distillation_loss(
        golden["student_logits_masked"],
        golden["teacher_logits_masked"],
        golden["mask_ratios"],
        divergence=divergence,
    )
    assert loss.item() == pytest.approx(golden_values[f"{divergence}_weighted_mean"], rel=1e-4)


def test_the_masked_diffusion_loss_equals_the_reference_loss_on_hard_targets(golden, golden_values):
    targets = golden["input_ids"][golden["masked_indices"]]
    loss = masked_diffusion_loss(
        golden["student_logits_masked"], targets, golden["mask_ratios"], num_items=len(targets)
    )
    assert loss.item() == pytest.approx(golden_values["hard"]["loss"], rel=1e-4)


# ---- divergences ----


def test_divergences_equal_their_definitions():
    student, teacher = random_logits(0), random_logits(1)
    p, q = teacher.softmax(-1), student.softmax(-1)
    expected = {
        "cross_entropy": -(p * q.log()).sum(-1),
        "forward_kl": (p * (p / q).log()).sum(-1),
        "reverse_kl": (q * (q / p).log()).sum(-1),
    }
    for divergence in DIVERGENCES:
        torch.testing.assert_close(token_divergence(student, teacher, divergence), expected[divergence])


def test_kl_is_zero_between_equal_distributions_and_positive_otherwise():
    logits, other = random_logits(0), random_logits(1)
    for divergence in ("forward_kl", "reverse_kl"):
        same = token_divergence(logits, logits + 3.0, divergence)  # a constant changes no distribution
        torch.testing.assert_close(same, torch.zeros(6), atol=1e-6, rtol=0)
        assert (token_divergence(logits, other, divergence) > 0.01).all()


def test_exchanging_student_and_teacher_exchanges_the_two_kls():
    a, b = random_logits(0), random_logits(1)
    torch.testing.assert_close(token_divergence(a, b, "forward_kl"), token_divergence(b, a, "reverse_kl"))


def test_cross_entropy_and_forward_kl_differ_by_the_teacher_entropy_and_share_their_gradient():
    student, teacher = random_logits(0).requires_grad_(), random_logits(1)
    cross_entropy, forward_kl = (token_divergence(student, teacher, name) for name in ("cross_entropy", "forward_kl"))
    entropy = torch.distributions.Categorical(logits=teacher).entropy()
    torch.testing.assert_close(cross_entropy - forward_kl, entropy)
    gradients = [torch.autograd.grad(value.sum(), student)[0] for value in (cross_entropy, forward_kl)]
    torch.testing.assert_close(*gradients)


def test_the_gradient_of_the_cross_entropy_is_student_minus_teacher_probabilities():
    student, teacher = random_logits(0).requires_grad_(), random_logits(1)
    token_divergence(student, teacher, "cross_entropy").sum().backward()
    torch.testing.assert_close(student.grad, (student.softmax(-1) - teacher.softmax(-1)).detach())


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_gradients_equal_finite_differences(divergence):
    """The losses compute in float32 on purpose, so the step of the difference quotient is a coarse one."""
    student, teacher = random_logits(0, tokens=1).requires_grad_(), random_logits(1, tokens=1)
    (gradient,) = torch.autograd.grad(token_divergence(student, teacher, divergence).sum(), student)
    step = 1e-2
    with torch.no_grad():
        for index in range(student.shape[1]):
            shift = step * F.one_hot(torch.tensor([index]), student.shape[1])
            up, down = (token_divergence(student + sign * shift, teacher, divergence).sum() for sign in (1, -1))
            assert gradient[0, index].item() == pytest.approx(((up - down) / (2 * step)).item(), abs=1e-3)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_no_gradient_flows_into_the_teacher(divergence):
    student, teacher = random_logits(0).requires_grad_(), random_logits(1).requires_grad_()
    token_divergence(student, teacher, divergence).sum().backward()
    assert teacher.grad is None


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_divergences_are_float32_for_half_precision_and_extreme_logits(divergence):
    student, teacher = (200 * random_logits(seed).bfloat16() for seed in (0, 1))
    value = token_divergence(student, teacher, divergence)
    assert value.dtype == torch.float32
    assert value.isfinite().all()
    torch.testing.assert_close(value, token_divergence(student.float(), teacher.float(), divergence))


# ---- weighting and normalisation ----


def test_tokens_are_weighted_by_the_inverse_of_their_mask_ratio_or_equally():
    student, teacher, ratios = random_logits(0), random_logits(1), torch.linspace(0.2, 0.7, 6)
    per_token = token_divergence(student, teacher, "reverse_kl")
    weighted = distillation_loss(student, teacher, ratios, divergence="reverse_kl")
    uniform = distillation_loss(student, teacher, ratios, divergence="reverse_kl", weighting="uniform")
    torch.testing.assert_close(weighted, (per_token / ratios).mean())
    torch.testing.assert_close(uniform, per_token.mean())


@pytest.mark.parametrize("as_tensor", [False, True])
def test_parts_of_a_batch_add_up_to_the_loss_of_the_whole(as_tensor):
    """This is what makes gradient accumulation and several processes give the loss of one big batch."""
    student, teacher, ratios = random_logits(0), random_logits(1), torch.linspace(0.2, 0.7, 6)
    targets = torch.arange(6)
    num_items = torch.tensor(6) if as_tensor else 6
    parts = [slice(0, 2), slice(2, 2), slice(2, 6)]  # the second one has no masked token
    distilled = sum(distillation_loss(student[p], teacher[p], ratios[p], num_items=num_items) for p in parts)
    diffused = sum(masked_diffusion_loss(student[p], targets[p], ratios[p], num_items=num_items) for p in parts)
    torch.testing.assert_close(distilled, distillation_loss(student, teacher, ratios))
    torch.testing.assert_close(diffused, masked_diffusion_loss(student, targets, ratios, num_items=6))


@pytest.mark.parametrize("num_items", [None, 0, torch.tensor(0)])
def test_a_batch_without_masked_tokens_has_loss_zero_and_a_zero_gradient(num_items):
    """Otherwise such a batch breaks a run: 0 / 0 is nan, and a loss without a graph cannot go backward."""
    logits = random_logits(0).requires_grad_()
    nothing = torch.zeros(6, dtype=torch.bool)
    ratios, targets = torch.empty(0), torch.empty(0, dtype=torch.long)
    for loss in (
        distillation_loss(logits[nothing], logits[nothing], ratios, num_items=num_items),
        masked_diffusion_loss(logits[nothing], targets, ratios, num_items=num_items or 0),
    ):
        assert loss.item() == 0
        (gradient,) = torch.autograd.grad(loss, logits)
        assert not gradient.any()


def test_the_masked_diffusion_loss_of_a_uniform_model_is_log_v_in_expectation():
    """Each token is masked with probability t and weighs 1/t, so every maskable token counts once on average."""
    generator = torch.Generator().manual_seed(0)
    ratio = torch.rand(20_000, generator=generator) * 0.5 + 0.5
    is_masked = torch.rand(20_000, generator=generator) < ratio
    targets = torch.randint(8, (20_000,), generator=generator)
    loss = masked_diffusion_loss(
        torch.zeros(int(is_masked.sum()), 8), targets[is_masked], ratio[is_masked], num_items=20_000
    )
    assert loss.item() == pytest.approx(torch.tensor(8.0).log().item(), rel=0.02)


# ---- errors ----


def test_unknown_names_are_rejected_with_the_known_ones():
    logits, ratios = random_logits(0), torch.full((6,), 0.5)
    with pytest.raises(ValueError, match="`divergence` must be one of .*'forward_kl'.*got 'kl'"):
        distillation_loss(logits, logits, ratios, divergence="kl")
    with pytest.raises(ValueError, match="`weighting` must be one of .*'uniform'.*got 'none'"):
        distillation_loss(logits, logits, ratios, weighting="none")


def test_shapes_that_do_not_fit_are_rejected():
    logits, ratios, targets = random_logits(0), torch.full((6,), 0.5), torch.arange(6)
    with pytest.raises(ValueError, match="`student_logits` and `teacher_logits` must both have shape"):
        distillation_loss(logits, logits[:, :5], ratios)
    with pytest.raises(ValueError, match="`student_logits` and `teacher_logits` must both have shape"):
        token_divergence(logits[None], logits[None], "forward_kl")
    with pytest.raises(ValueError, match="`mask_ratios` must have one entry per masked token"):
        distillation_loss(logits, logits, ratios[:5])
    with pytest.raises(ValueError, match="`logits` must have shape"):
        masked_diffusion_loss(logits, targets[:5], ratios, num_items=6)


def test_a_mask_ratio_of_zero_is_rejected_rather_than_divided_by():
    logits, ratios = random_logits(0), torch.tensor([0.5, 0.5, 0.0, 0.5, 0.5, 0.5])
    with pytest.raises(ValueError, match="`mask_ratios` must be above 0, got 0"):
        masked_diffusion_loss(logits, torch.arange(6), ratios, num_items=6)


def test_a_weighting_that_is_unknown_or_a_ratio_too_few_is_rejected():
    losses = torch.ones(6)
    with pytest.raises(ValueError, match="`weighting` must be one of"):
        weighted(losses, losses, "none")
    with pytest.raises(ValueError, match=r"`mask_ratios` must have one entry per masked token \(6\)"):
        weighted(losses, losses[:5], "uniform")
    with pytest.raises(ValueError, match="`mask_ratios` must be above 0"):
        weighted(losses, torch.zeros(6), "inverse_mask_ratio")


# ---- the parts that the trainer puts together ----


@pytest.mark.parametrize("weighting", ["inverse_mask_ratio", "uniform"])
def test_the_parts_give_the_loss(weighting):
    student, teacher, ratios = random_logits(0), random_logits(1), torch.linspace(0.2, 1.0, 6)
    parts = mean_loss(weighted(token_divergence(student, teacher, "reverse_kl"), ratios, weighting), 9)
    whole = distillation_loss(student, teacher, ratios, divergence="reverse_kl", weighting=weighting, num_items=9)
    assert parts.item() == whole.item()


def test_label_smoothing_spreads_probability_over_the_vocabulary():
    logits, targets = random_logits(0), torch.arange(6)
    log_probs = logits.log_softmax(-1)
    expected = -0.9 * log_probs[torch.arange(6), targets] - 0.1 * log_probs.mean(-1)
    torch.testing.assert_close(token_cross_entropy(logits, targets, label_smoothing=0.1), expected)
    ratios = torch.full((6,), 0.5)
    smooth = masked_diffusion_loss(logits, targets, ratios, num_items=12, label_smoothing=0.1)
    assert smooth.item() == pytest.approx(2 * expected.sum().item() / 12)


def test_a_default_device_changes_nothing():
    student, teacher, ratios = random_logits(0), random_logits(1), torch.full((6,), 0.5)
    expected = distillation_loss(student, teacher, ratios).item()
    with torch.device("meta"):
        assert distillation_loss(student, teacher, ratios).item() == expected
        assert masked_diffusion_loss(student, torch.arange(6, device="cpu"), ratios, num_items=6).device.type == "cpu"

"""Which tokens a step of pipelined decoding accepts (Algorithm 2, decoding a block), and which it takes back.

Pure functions of tensors: no branch depends on a tensor's values, nothing is changed in place, and no row depends on
another. What has to last from one step to the next ([`Credit`]) is passed in and returned.

`"threshold"` is the paper's rule. The others, `semi_activated_threshold` and `remask_threshold` are experimental: with
the reference student none of them gives a better score at the same speed (docs/benchmarks).
"""

# B batch, N blocks, K block size

from typing import NamedTuple

import torch
from torch.nn import functional as F

# The rules of `accept`, and which of its options each has besides `confidence_threshold`.
ACCEPTANCE_RULES = {
    "threshold": ("semi_activated_threshold", "steps_per_block"),
    "sequential": ("steps_per_block",),
    "entropy_bound": ("entropy_bound",),
    "credit": ("semi_activated_threshold", "credit_decay", "credit_strength"),
    "factor": ("confidence_factor",),
}


class Credit(NamedTuple):
    """What a token has earned by being the prediction of a position in consecutive steps.

    Args:
        tokens (`torch.LongTensor` of shape `(B, N, K)`): The token that was predicted last; -1 without a prediction.
        amount (`torch.FloatTensor` of shape `(B, N, K)`): Its credit; 0 without a prediction.
    """

    tokens: torch.LongTensor
    amount: torch.FloatTensor

    def select(self, rows: torch.LongTensor, num_new: int = 0) -> "Credit":
        """That of `rows`, in that order, and behind them `num_new` rows that have none."""
        new = (0, 0, 0, 0, 0, num_new)
        return Credit(F.pad(self.tokens[rows], new, value=-1), F.pad(self.amount[rows], new))


def accept(
    is_masked: torch.BoolTensor,
    tokens: torch.LongTensor | None,
    probability: torch.FloatTensor,
    ranking: torch.FloatTensor,
    is_fully_activated: torch.BoolTensor,
    acceptance_rule: str = "threshold",
    confidence_threshold: float | torch.Tensor = 0.9,
    semi_activated_threshold: float | torch.Tensor | None = None,
    entropy_bound: float = 0.1,
    confidence_factor: float = 1.0,
    credit_decay: float = 0.7,
    credit_strength: float = 0.65,
    credit: Credit | None = None,
    num_required: torch.LongTensor | None = None,
) -> tuple[torch.BoolTensor, Credit | None]:
    """Which masked tokens are accepted by `acceptance_rule`, and the credit for the next step.

    Args:
        is_masked (`torch.BoolTensor` of shape `(B, N, K)`): Tokens that have a prediction.
        tokens (`torch.LongTensor` of shape `(B, N, K)`, *optional*): The predicted tokens; for `"credit"`.
        probability (`torch.FloatTensor` of shape `(B, N, K)`): Their probabilities.
        ranking (`torch.FloatTensor` of shape `(B, N, K)`): What orders the tokens of a block if none is confident. For
            `"entropy_bound"` the negative entropy.
        is_fully_activated (`torch.BoolTensor` of shape `(B, N)`): Blocks that accept at least one token.
        acceptance_rule (`str`): `"threshold"`, `"sequential"`, `"entropy_bound"`, `"credit"` or `"factor"`.
        confidence_threshold (`float`, or `torch.Tensor` of shape `(B, 1, 1)`): tau_conf, for `"threshold"` and
            `"credit"`.
        semi_activated_threshold (`float`, or `torch.Tensor` of shape `(B, 1, 1)`, *optional*): The same for blocks
            that are not fully activated.
        entropy_bound (`float`): See [`entropy_bounded_tokens`].
        confidence_factor (`float`): See [`factor_accepted_tokens`].
        credit_decay, credit_strength (`float`): See [`credited_probability`].
        credit (`Credit`, *optional*): What the step before returned; for `"credit"`.
        num_required (`torch.LongTensor` of shape `(B, N)`, *optional*): How many tokens a fully activated block
            accepts, for `"threshold"` at the least; one by default. See [`required_tokens`].

    Returns:
        `torch.BoolTensor` of shape `(B, N, K)`, and [`Credit`] with `"credit"`, else `None`.
    """
    if acceptance_rule == "sequential":
        return sequential_tokens(is_masked, is_fully_activated, 1 if num_required is None else num_required), None
    if acceptance_rule == "entropy_bound":
        return entropy_bounded_tokens(is_masked, ranking, is_fully_activated, entropy_bound), None
    if acceptance_rule == "factor":
        return factor_accepted_tokens(is_masked, probability, ranking, is_fully_activated, confidence_factor), None
    if acceptance_rule == "credit":
        probability, credit = credited_probability(
            is_masked, tokens, probability, credit, credit_decay, credit_strength
        )
        ranking = probability
    else:
        credit = None
    if semi_activated_threshold is not None:
        confidence_threshold = torch.where(
            is_fully_activated[..., None], confidence_threshold, semi_activated_threshold
        )  # [B, N, 1]
    if num_required is not None:
        return at_least_tokens(
            is_masked, probability, ranking, is_fully_activated, confidence_threshold, num_required
        ), credit
    return accepted_tokens(is_masked, probability, ranking, is_fully_activated, confidence_threshold), credit


def accepted_tokens(
    is_masked: torch.BoolTensor,
    probability: torch.FloatTensor,
    ranking: torch.FloatTensor,
    is_fully_activated: torch.BoolTensor,
    confidence_threshold: float | torch.Tensor,
) -> torch.BoolTensor:
    """Which masked tokens are accepted (Algorithm 2, decoding a block): the confident ones, else a full block's best.

    Args:
        is_masked (`torch.BoolTensor` of shape `(B, N, K)`): Tokens that have a prediction.
        probability (`torch.FloatTensor` of shape `(B, N, K)`): Probability of the predicted token.
        ranking (`torch.FloatTensor` of shape `(B, N, K)`): What orders the tokens of a block if none is confident.
        is_fully_activated (`torch.BoolTensor` of shape `(B, N)`): See [`fully_activated`].
        confidence_threshold (`float`, or a tensor that can be expanded to `(B, N, K)`): tau_conf. A token is confident
            above it.

    Returns:
        `torch.BoolTensor` of shape `(B, N, K)`.
    """
    is_confident = is_masked & (probability > confidence_threshold)
    must_accept = is_fully_activated & (is_masked.any(-1) > is_confident.any(-1))  # [B, N]
    best = ranking.where(is_masked, -torch.inf).argmax(-1, keepdim=True)
    return is_confident.scatter_add(-1, best, must_accept[..., None])  # of bools: or


def required_tokens(num_steps: torch.LongTensor, block_size: int, steps_per_block: int) -> torch.LongTensor:
    """How many tokens blocks accept in their next step so that `steps_per_block` steps decode a whole one.

    SDAR's schedule (arXiv 2510.06303): K // S tokens in each of S steps, and one more in the first K % S of them.

    Args:
        num_steps (`torch.LongTensor` of shape `(B, N)`): Steps that each block has had.
        block_size (`int`): K.
        steps_per_block (`int`): S, from 1 to K.
    """
    return block_size // steps_per_block + (num_steps < block_size % steps_per_block).long()


def at_least_tokens(
    is_masked: torch.BoolTensor,
    probability: torch.FloatTensor,
    ranking: torch.FloatTensor,
    is_fully_activated: torch.BoolTensor,
    confidence_threshold: float | torch.Tensor,
    num_required: torch.LongTensor,
) -> torch.BoolTensor:
    """Which masked tokens are accepted if a full block accepts several: the confident ones, else the best so many too.

    SDAR's `low_confidence_dynamic`; its `low_confidence_static` is the same with a threshold of 1, which no
    probability is above. With `num_required` 1 it is [`accepted_tokens`].

    Args:
        is_masked, probability, ranking, is_fully_activated, confidence_threshold: See [`accepted_tokens`]. Of tokens
            with an equal ranking the earlier one comes first.
        num_required (`torch.LongTensor` of shape `(B, N)`): See [`required_tokens`]. A block with fewer masked tokens
            accepts all of them.

    Returns:
        `torch.BoolTensor` of shape `(B, N, K)`.
    """
    is_confident = is_masked & (probability > confidence_threshold)
    must_accept = is_fully_activated & (is_confident.sum(-1) < num_required)  # [B, N]
    order = ranking.masked_fill(~is_masked, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    rank = order.argsort(dim=-1)
    is_best = is_masked & (rank < num_required[..., None])
    return is_confident | (is_best & must_accept[..., None])


def sequential_tokens(
    is_masked: torch.BoolTensor, is_fully_activated: torch.BoolTensor, num_required: int | torch.LongTensor
) -> torch.BoolTensor:
    """The first `num_required` masked tokens of each fully activated block, whatever their probability (SDAR).

    Args:
        is_masked (`torch.BoolTensor` of shape `(B, N, K)`): Tokens that have a prediction.
        is_fully_activated (`torch.BoolTensor` of shape `(B, N)`): Blocks that accept. Others accept nothing.
        num_required (`int`, or `torch.LongTensor` of shape `(B, N)`): See [`required_tokens`].
    """
    required = num_required[..., None] if isinstance(num_required, torch.Tensor) else num_required
    return is_masked & (is_masked.cumsum(-1) <= required) & is_fully_activated[..., None]


def first_unfinished_sub_blocks(is_masked: torch.BoolTensor, sub_block_size: int) -> torch.BoolTensor:
    """Of the masked tokens `(B, N, K)`, those in the first sub-block of each block that has any (Fast-dLLM v2).

    Sub-blocks of `sub_block_size` tokens are counted from the start of the block.
    """
    sub_block = torch.arange(is_masked.shape[-1], device=is_masked.device) // sub_block_size  # [K]
    first = sub_block.where(is_masked, is_masked.shape[-1]).amin(-1, keepdim=True)
    return is_masked & (sub_block == first)


def first_tokens_alone(is_masked: torch.BoolTensor, is_meant: torch.BoolTensor) -> torch.BoolTensor:
    """Of the masked tokens `(B, N, K)`, only the first one of a block where it is masked (Fast-dLLM v2).

    There the first token of a block is predicted together with the last step of the block before it, and read by all
    others.

    Args:
        is_masked (`torch.BoolTensor` of shape `(B, N, K)`): Tokens that have a prediction.
        is_meant (`torch.BoolTensor` of shape `(B,)`): Rows that decode one block after the other. Of others all tokens
            stay.
    """
    is_first = torch.arange(is_masked.shape[-1], device=is_masked.device) == 0
    return is_masked & (is_first | ~(is_masked[..., :1] & is_meant[:, None, None]))


def entropy_bounded_tokens(
    is_masked: torch.BoolTensor,
    ranking: torch.FloatTensor,
    is_fully_activated: torch.BoolTensor,
    entropy_bound: float,
) -> torch.BoolTensor:
    """Which masked tokens EB-Sampler (arXiv 2505.24857) accepts: the surest ones, as far as their entropy allows.

    A block's masked tokens are taken in ascending order of their entropies `h_1 <= h_2 <= ...`, the longest prefix for
    which the sum of all but the largest, `h_1 + ... + h_(n-1)`, is at most `entropy_bound` (gamma, in nats). This sum
    bounds how much the tokens can tell about each other, which accepting them at once ignores. One token alone has
    nothing to ignore, so a fully activated block accepts one by itself; with a bound of 0 it accepts no other one,
    unless entropies are 0. transformers' `EntropyBoundSampler` (DiffusionGemma) has the same rule.

    Departure: a semi-activated block must not be made to accept, so there the whole sum, `h_1 + ... + h_n`, has to
    stay within the bound.

    Args:
        is_masked (`torch.BoolTensor` of shape `(B, N, K)`): Tokens that have a prediction.
        ranking (`torch.FloatTensor` of shape `(B, N, K)`): Negative entropy of each prediction. Of equal ones the
            earlier token comes first.
        is_fully_activated (`torch.BoolTensor` of shape `(B, N)`): Blocks that accept at least one token.
        entropy_bound (`float`): gamma; higher accepts more.

    Returns:
        `torch.BoolTensor` of shape `(B, N, K)`.
    """
    entropy = (-ranking).clamp(min=0.0).masked_fill(~is_masked, torch.inf)
    ascending, order = entropy.sort(dim=-1, stable=True)
    total = ascending.cumsum(-1)
    without_largest = F.pad(total[..., :-1], (1, 0))
    within = torch.where(is_fully_activated[..., None], without_largest, total) <= entropy_bound
    return is_masked & torch.zeros_like(is_masked).scatter(-1, order, within)


def factor_accepted_tokens(
    is_masked: torch.BoolTensor,
    probability: torch.FloatTensor,
    ranking: torch.FloatTensor,
    is_fully_activated: torch.BoolTensor,
    confidence_factor: float,
) -> torch.BoolTensor:
    """Which masked tokens Fast-dLLM's factor rule (arXiv 2505.22618) accepts: the more at once, the surer all must be.

    With a block's confidences in descending order, `c_1 >= c_2 >= ...`, the first n tokens for the largest n with
    `(n + 1) * (1 - c_n) < confidence_factor`. For the paper, under this condition with a factor of 1 the tokens that
    are best one by one are best together. With factor f one token needs a confidence above `1 - f / 2`, two need
    `1 - f / 3`. A fully activated block accepts its best token if there is none.

    Departures: the paper's strict inequality holds throughout, where the released code takes equality, and a block's
    last token in any case once all others qualify.

    Args:
        is_masked (`torch.BoolTensor` of shape `(B, N, K)`): Tokens that have a prediction.
        probability (`torch.FloatTensor` of shape `(B, N, K)`): Their confidences.
        ranking (`torch.FloatTensor` of shape `(B, N, K)`): What orders the tokens of a block if none qualifies.
        is_fully_activated (`torch.BoolTensor` of shape `(B, N)`): Blocks that accept at least one token.
        confidence_factor (`float`): f; higher accepts more.

    Returns:
        `torch.BoolTensor` of shape `(B, N, K)`.
    """
    descending, order = probability.masked_fill(~is_masked, -torch.inf).sort(dim=-1, descending=True, stable=True)
    count = torch.arange(1, is_masked.shape[-1] + 1, device=probability.device)
    # The left side grows with n, so it is small enough for the first ones.
    is_among = (count + 1) * (1 - descending) < confidence_factor
    qualifies = torch.zeros_like(is_masked).scatter(-1, order, is_among)
    return accepted_tokens(is_masked, qualifies.to(probability.dtype), ranking, is_fully_activated, 0.5)


def credited_probability(
    is_masked: torch.BoolTensor,
    tokens: torch.LongTensor,
    probability: torch.FloatTensor,
    credit: Credit | None,
    credit_decay: float,
    credit_strength: float,
    credit_exponent: float = 0.2,
) -> tuple[torch.FloatTensor, Credit]:
    """Probabilities raised by what the same predictions earned in earlier steps (CreditDecoding, arXiv 2510.06133).

    A token that a position predicts with probability p has the credit
    `C = credit_decay * C_before + p ** credit_exponent`. Its logit is raised by `credit_strength * log(1 + C)`, so
    that its probability becomes `p * g / (1 + p * (g - 1))` with `g = (1 + C) ** credit_strength`. What stays the
    prediction passes the confidence threshold earlier.

    Departure: the paper keeps the credit of the whole vocabulary for each position. Here only that of the prediction
    is kept, and another prediction starts from 0. So the raised token is always the predicted one.

    Args:
        is_masked (`torch.BoolTensor` of shape `(B, N, K)`): Tokens that have a prediction. Others lose their credit.
        tokens (`torch.LongTensor` of shape `(B, N, K)`): The predicted tokens.
        probability (`torch.FloatTensor` of shape `(B, N, K)`): Their probabilities.
        credit (`Credit`, *optional*): That of the step before.
        credit_decay (`float`): beta in [0, 1]; with 0 only this step counts.
        credit_strength (`float`): alpha; with 0 probabilities are what they are.
        credit_exponent (`float`): gamma; below 1 it lifts small probabilities.

    Returns:
        `torch.FloatTensor` of shape `(B, N, K)`, and the credit for the next step.
    """
    amount = probability**credit_exponent
    if credit is not None:
        more_blocks = tokens.shape[1] - credit.tokens.shape[1]  # fewer where negative
        earned = F.pad(credit.amount, (0, 0, 0, more_blocks))
        amount = amount + credit_decay * earned.where(F.pad(credit.tokens, (0, 0, 0, more_blocks)) == tokens, 0.0)
    amount = amount.where(is_masked, 0.0)
    gain = (1 + amount) ** credit_strength
    raised = probability * gain / (1 + probability * (gain - 1))
    return raised.clamp(max=1.0), Credit(tokens.where(is_masked, -1), amount)


def tokens_to_remask(
    may_be_masked: torch.BoolTensor,
    probability: torch.FloatTensor,
    was_remasked: torch.BoolTensor,
    remask_threshold: float,
) -> torch.BoolTensor:
    """Which decoded tokens become masks again: those that the model would not predict any more.

    That a step may take back what later context speaks against is the idea of ReMDM (arXiv 2503.00307) and WINO (arXiv
    2507.18578). WINO predicts each decoded token from a mask that stands beside it. Here a token is judged by its own
    probability in the forward that reads it, which makes no forward longer; but the training loss looks at masked
    tokens only, so what a model says of the others has to be measured. A position is remasked once at most, so that
    decoding ends.

    Args:
        may_be_masked (`torch.BoolTensor` of any shape): Decoded tokens of open blocks that are not final, and which
            nothing outside depends on.
        probability (`torch.FloatTensor` of this shape): Probability of the token that stands there.
        was_remasked (`torch.BoolTensor` of this shape): Positions where that has happened before.
        remask_threshold (`float`): A token stays at this probability or above; 0 keeps all.

    Returns:
        `torch.BoolTensor` of this shape.
    """
    return may_be_masked & ~was_remasked & (probability < remask_threshold)

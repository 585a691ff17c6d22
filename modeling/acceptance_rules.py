"""More tokens per forward: which tokens a step accepts, tries ahead, or masks again. Functions of tensors.

What `acceptance_rule`, `semi_activated_threshold`, `num_branches` and `remask_threshold` of `D2FGenerationConfig` are
for. Without them a step accepts by `accepted_tokens` alone (Algorithm 2). Nothing here holds state: what has to last
from one step to the next is passed in and returned. Nothing depends on other rows either.

What a decoding loop does for each, in steps of *open, forward, predict, accept*:

- **acceptance_rule**: Once: `options = generation_config.acceptance_options()`. In each step:
  `accepted, credit = accept(is_masked, tokens, probability, ranking, is_fully_activated, credit=credit, **options)`,
  all of them as blocks, where `is_masked` are the tokens that have a prediction in this step.
  - `"threshold"`, `"factor"`: nothing else; `ranking` is that of `token_ranking`.
  - `"entropy_bound"`: `ranking` is the negative entropy (`choose_tokens` with `token_ranking="neg_entropy"`), whatever
    `token_ranking` says. It counts the mask token's probability, as the probabilities do, and lies at most V * 1e-10
    above the true value.
  - `"credit"`: `credit` is `None` in the first step and after that what the step before returned; where rows leave,
    move or join in between, `credit = credit.select(places, num_new)`. Blocks are counted from the start of the
    response in each step; there may be more or fewer of them than before. `ranking` is not used.
- **semi_activated_threshold**: one of the options; nothing else.
- **num_branches**: A prompt has that many rows in each forward but its first: row `b * num_branches + a` is branch a
  of prompt b. All that is decided before the forward (blocks, activation, window, what the cache keeps) is decided
  from the tokens that are accepted, so it is the same for all branches; a block that is final is the same in all of
  them, and so are its keys and values: any branch's will do. From the step before, the loop keeps tokens and
  probabilities of what it has not accepted. Before the forward: `tried = lookahead_tokens(is_masked, probability,
  num_branches)` with the masked tokens that have such a prediction and are still in an open block; branch a reads its
  tokens of `tried[:, a]` in place of masks. After the forward: `winner = best_branch(is_masked, probability)` with the
  tokens that are masked in each branch and have a prediction, then the loop accepts the winner's tokens of `tried`,
  keeps the winner's predictions, and goes on with *accept*. The forward counts once for the prompt;
  `compute_weighted_tokens_per_forward` counts the branches.
- **remask_threshold**: The forward gives scores for the decoded tokens of open blocks that are not final too, and
  the loop takes the probability of the token that stands there. After *accept*, whose result cannot be among them:
  `again = tokens_to_mask_again(may_be_masked, probability, was_masked_again, remask_threshold)`; these become masks,
  and `was_masked_again |= again` is kept. `may_be_masked` leaves out the first EOS and what follows, because the
  blocks behind an EOS are gone, and whatever a stopping criterion or a streamer has been told: with this option, only
  final blocks are published. A block can lose its full activation again; the first one that is not final never does,
  so each step accepts a token and decoding ends.
"""

# B batch, A branches, N blocks, K block size, V vocabulary

from typing import NamedTuple

import torch
from torch.nn import functional as F

from .decoding_rules import accepted_tokens

# The rules of `accept`, and which of its options each has besides `confidence_threshold`.
ACCEPTANCE_RULES = {
    "threshold": ("semi_activated_threshold",),
    "entropy_bound": ("entropy_bound",),
    "credit": ("semi_activated_threshold", "credit_decay", "credit_strength"),
    "factor": ("confidence_factor",),
}


class Credit(NamedTuple):
    """What a token has earned by being the prediction of a place in consecutive steps.

    Args:
        tokens (`torch.LongTensor` of shape `(B, N, K)`): The token that was predicted last; -1 without a prediction.
        amount (`torch.FloatTensor` of shape `(B, N, K)`): Its credit; 0 without a prediction.
    """

    tokens: torch.LongTensor
    amount: torch.FloatTensor

    def select(self, places: torch.LongTensor, num_new: int = 0) -> "Credit":
        """That of the rows at `places`, in that order, and behind them `num_new` rows that have none."""
        new = (0, 0, 0, 0, 0, num_new)
        return Credit(F.pad(self.tokens[places], new, value=-1), F.pad(self.amount[places], new))


def accept(
    is_masked: torch.BoolTensor,
    tokens: torch.LongTensor | None,
    probability: torch.FloatTensor,
    ranking: torch.FloatTensor,
    is_fully_activated: torch.BoolTensor,
    acceptance_rule: str = "threshold",
    confidence_threshold: float = 0.9,
    semi_activated_threshold: float | None = None,
    entropy_bound: float = 0.1,
    confidence_factor: float = 1.0,
    credit_decay: float = 0.7,
    credit_strength: float = 0.65,
    credit: Credit | None = None,
) -> tuple[torch.BoolTensor, Credit | None]:
    """Which masked tokens are accepted by `acceptance_rule`, and the credit for the next step.

    Args:
        is_masked (`torch.BoolTensor` of shape `(B, N, K)`): Tokens that have a prediction.
        tokens (`torch.LongTensor` of shape `(B, N, K)`, *optional*): The predicted tokens; for `"credit"`.
        probability (`torch.FloatTensor` of shape `(B, N, K)`): Their probabilities.
        ranking (`torch.FloatTensor` of shape `(B, N, K)`): What orders the tokens of a block if none is confident. For
            `"entropy_bound"` the negative entropy.
        is_fully_activated (`torch.BoolTensor` of shape `(B, N)`): Blocks that accept at least one token.
        acceptance_rule (`str`): `"threshold"`, `"entropy_bound"`, `"credit"` or `"factor"`.
        confidence_threshold (`float`): tau_conf, for `"threshold"` and `"credit"`.
        semi_activated_threshold (`float`, *optional*): The same for blocks that are not fully activated.
        entropy_bound (`float`): See [`entropy_bounded_tokens`].
        confidence_factor (`float`): See [`factor_accepted_tokens`].
        credit_decay, credit_strength (`float`): See [`credited_probability`].
        credit (`Credit`, *optional*): What the step before returned; for `"credit"`.

    Returns:
        `torch.BoolTensor` of shape `(B, N, K)`, and [`Credit`] with `"credit"`, else `None`.
    """
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
    accepted = accepted_tokens(is_masked, probability, ranking, is_fully_activated, confidence_threshold)
    if semi_activated_threshold is not None:
        semi = accepted_tokens(is_masked, probability, ranking, is_fully_activated, semi_activated_threshold)
        accepted = torch.where(is_fully_activated[..., None], accepted, semi)
    return accepted, credit


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
    # The left side grows with n, so the places where it is small enough are the first ones.
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

    A token that a place predicts with probability p has credit `C = credit_decay * C_before + p ** credit_exponent`.
    Its logit is raised by `credit_strength * log(1 + C)`, so that its probability becomes `p * g / (1 + p * (g - 1))`
    with `g = (1 + C) ** credit_strength`. What stays the prediction passes the confidence threshold earlier.

    Departure: the paper keeps the credit of the whole vocabulary for each place; here only that of the prediction is
    kept, and another prediction starts from 0. So the raised token is always the predicted one.

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


def lookahead_tokens(
    is_masked: torch.BoolTensor, probability: torch.FloatTensor, num_branches: int
) -> torch.BoolTensor:
    """Which tokens each branch of the next forward reads besides the accepted ones (LoPA, arXiv 2512.16229).

    Branch 0 is the anchor and reads none. Branch a reads one more: that with the a-th highest probability of those
    that the row has not accepted. A branch that finds none left is the anchor once more.

    Args:
        is_masked (`torch.BoolTensor` of shape `(B, N, K)`): Masked tokens of open blocks that have a prediction.
        probability (`torch.FloatTensor` of shape `(B, N, K)`): Their probabilities. Of equal ones the earlier token
            comes first.
        num_branches (`int`): A, with the anchor.

    Returns:
        `torch.BoolTensor` of shape `(B, A, N, K)`.
    """
    flat = probability.masked_fill(~is_masked, -torch.inf).flatten(1)  # [B, N * K]
    order = flat.argsort(dim=-1, descending=True, stable=True)[:, : num_branches - 1]
    # Branch a, which is 1 or more, gets place a - 1 of the order.
    tried = is_masked.new_zeros(len(flat), num_branches, flat.shape[1])
    tried[:, 1 : 1 + order.shape[1]].scatter_(-1, order[..., None], True)
    return tried.view(len(flat), num_branches, *is_masked.shape[1:]) & is_masked[:, None]


def best_branch(is_masked: torch.BoolTensor, probability: torch.FloatTensor) -> torch.LongTensor:
    """The branch of each row, `(B,)`, with which decoding goes on (LoPA, arXiv 2512.16229).

    That whose remaining masked tokens have the highest mean probability, because most of them can be accepted soon;
    one that has none left has 1. Of equal ones the first, so the anchor before all.

    Departure: the mean over all remaining tokens is the paper's definition. Its released code averages the lower half
    and mixes in the probability of the token that the branch tried.

    Args:
        is_masked (`torch.BoolTensor` of shape `(B, A, N, K)`): Tokens that are masked in the branch and have a
            prediction.
        probability (`torch.FloatTensor` of shape `(B, A, N, K)`): Their probabilities.
    """
    num_masked = is_masked.flatten(2).sum(-1)  # [B, A]
    total = probability.where(is_masked, 0.0).flatten(2).sum(-1)
    confidence = torch.where(num_masked == 0, 1.0, total / num_masked.clamp(min=1))
    is_best = confidence == confidence.max(-1, keepdim=True).values
    return is_best.long().argmax(-1)


def tokens_to_mask_again(
    may_be_masked: torch.BoolTensor,
    probability: torch.FloatTensor,
    was_masked_again: torch.BoolTensor,
    remask_threshold: float,
) -> torch.BoolTensor:
    """Which decoded tokens become masks again: those that the model would not predict any more.

    That a step may take back what later context speaks against is the idea of ReMDM (arXiv 2503.00307) and WINO (arXiv
    2507.18578). WINO predicts each decoded token from a mask that stands beside it. Here a token is judged by its own
    probability in the forward that reads it, which makes no forward longer; but the training loss looks at masked
    tokens only, so what a model says of the others has to be measured. A place is masked again once at most, so that
    decoding ends.

    Args:
        may_be_masked (`torch.BoolTensor` of any shape): Decoded tokens of open blocks that are not final, and which
            nothing outside depends on.
        probability (`torch.FloatTensor` of this shape): Probability of the token that stands there.
        was_masked_again (`torch.BoolTensor` of this shape): Places where that has happened before.
        remask_threshold (`float`): A token stays at this probability or above; 0 keeps all.

    Returns:
        `torch.BoolTensor` of this shape.
    """
    return may_be_masked & ~was_masked_again & (probability < remask_threshold)

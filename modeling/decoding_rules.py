"""The rules of decoding: which blocks are open and active, which tokens are accepted. Functions of tensors.

They are apart from the forward that runs between them, so that another engine can call them with its own.
"""

# B batch, R response tokens (the limit), N blocks, K block size, V vocabulary, M masked tokens in the window, all rows

import torch
from torch.nn import functional as F


def as_blocks(values: torch.Tensor, block_size: int) -> torch.Tensor:
    """`values` of shape `(B, R)` as blocks `(B, N, K)`; what the last block lacks is 0 or `False`."""
    missing = -values.shape[1] % block_size
    if missing:
        values = F.pad(values, (0, missing))
    return values.unflatten(1, (-1, block_size))


def spread(
    values: torch.Tensor, row: torch.LongTensor, index: torch.LongTensor, shape: tuple[int, int]
) -> torch.Tensor:
    """`values` of tokens `(M,)` at their places `index` of the responses of `row`, 0 or `False` elsewhere: `shape`."""
    return values.new_zeros(shape[0] * shape[1]).index_copy_(0, row * shape[1] + index, values).view(shape)


def decoded_ratio(is_masked: torch.BoolTensor, block_size: int, limits: torch.LongTensor) -> torch.FloatTensor:
    """The share of each block that is decoded, `(B, N)`.

    Args:
        is_masked (`torch.BoolTensor` of shape `(B, R)`): The masked tokens, as far as they are looked at.
        block_size (`int`): K.
        limits (`torch.LongTensor` of shape `(B,)`): The most response tokens of each row: the last block may be short.
    """
    num_masked = as_blocks(is_masked, block_size).sum(-1)
    first = torch.arange(num_masked.shape[1], device=is_masked.device) * block_size
    sizes = (limits[:, None] - first).clamp(min=1, max=block_size)
    return (sizes - num_masked) / sizes


def first_index(condition: torch.BoolTensor) -> torch.LongTensor:
    """The index of the first `True` of each row of `(B, R)`, R where there is none."""
    length = condition.shape[1]
    return torch.where(condition, torch.arange(length, device=condition.device), length).amin(-1)


def opened_blocks(
    opened: torch.LongTensor,
    ratio: torch.FloatTensor,
    num_blocks: torch.LongTensor,
    eos_block: torch.LongTensor,
    block_add_threshold: float,
    max_active_blocks: int | None = None,
) -> torch.LongTensor:
    """How many blocks each row has in this step (Algorithm 2, adding a block; the first step opens the first one).

    A block is added, at most one a step, when the decoded ratio of the last one has reached `block_add_threshold` and
    fewer than `max_active_blocks` are in flight. With an EOS decoded no block is added, and those after the EOS's
    block are dropped.

    Args:
        opened (`torch.LongTensor` of shape `(B,)`): Blocks opened before.
        ratio (`torch.FloatTensor` of shape `(B, N)`): Decoded ratio of each block; N exceeds no row's need but covers
            all opened ones.
        num_blocks (`torch.LongTensor` of shape `(B,)`): Blocks that a row can have.
        eos_block (`torch.LongTensor` of shape `(B,)`): Block of the first EOS; `num_blocks` or more without one.
        block_add_threshold (`float`): tau_add.
        max_active_blocks (`int`, *optional*): Most blocks that are open and not final; no cap by default.
    """
    # Before the first block comes the prompt, which is decoded.
    last_ratio = F.pad(ratio, (1, 0), value=1.0).gather(1, opened[:, None]).squeeze(1)
    may_add = (opened < num_blocks) & (last_ratio >= block_add_threshold)
    if max_active_blocks is not None:
        may_add &= opened - final_blocks(ratio, opened) < max_active_blocks
    return torch.where(eos_block < num_blocks, torch.minimum(opened, eos_block + 1), opened + may_add)


def fully_activated(ratio: torch.FloatTensor, block_activation_threshold: float) -> torch.BoolTensor:
    """Which blocks, `(B, N)`, accept at least one token: those whose predecessor has reached tau_act.

    Without `remask_threshold` ratios only rise, so a block that is fully activated stays so.
    """
    return F.pad(ratio[:, :-1], (1, 0), value=1.0) >= block_activation_threshold


def final_blocks(ratio: torch.FloatTensor, opened: torch.LongTensor) -> torch.LongTensor:
    """How many blocks of each row, `(B,)`, are decoded and have only decoded blocks before them."""
    return torch.minimum(first_index(ratio < 1.0), opened)


def accepted_tokens(
    is_masked: torch.BoolTensor,
    probability: torch.FloatTensor,
    ranking: torch.FloatTensor,
    is_fully_activated: torch.BoolTensor,
    confidence_threshold: float,
) -> torch.BoolTensor:
    """Which masked tokens are accepted (Algorithm 2, decoding a block): the confident ones, else a full block's best.

    Args:
        is_masked (`torch.BoolTensor` of shape `(B, N, K)`): Tokens that have a prediction.
        probability (`torch.FloatTensor` of shape `(B, N, K)`): Probability of the predicted token.
        ranking (`torch.FloatTensor` of shape `(B, N, K)`): What orders the tokens of a block if none is confident.
        is_fully_activated (`torch.BoolTensor` of shape `(B, N)`): See [`fully_activated`].
        confidence_threshold (`float`): tau_conf; a token is confident above it.

    Returns:
        `torch.BoolTensor` of shape `(B, N, K)`.
    """
    is_confident = is_masked & (probability > confidence_threshold)
    must_accept = is_fully_activated & is_masked.any(-1) & ~is_confident.any(-1)  # [B, N]
    if not must_accept.any():
        return is_confident
    best = ranking.where(is_masked, -torch.inf).argmax(-1, keepdim=True)
    return is_confident.scatter_add(-1, best, must_accept[..., None])  # of bools: or


def choose_tokens(
    scores: torch.FloatTensor,
    do_sample: bool,
    token_ranking: str,
    never: int | None = None,
    generator: torch.Generator | None = None,
    standing: torch.LongTensor | None = None,
) -> tuple[torch.LongTensor, torch.FloatTensor, torch.FloatTensor]:
    """A token for each row of `scores` `(M, V)`, its probability, and its rank value, `(M,)` each.

    `never` is a token that is not chosen. What the model gives to it counts in the probabilities of the others, as in
    the reference. Its column of `scores` is -inf afterwards. `standing` `(M,)` are tokens that are there already and
    are taken as they are, `never` where there is none.
    """
    probabilities = scores.softmax(-1)
    if token_ranking == "neg_entropy":
        ranking = (probabilities * (probabilities + 1e-10).log()).sum(-1)
    elif token_ranking == "margin":
        top_two = probabilities.topk(2, dim=-1).values
        ranking = top_two[:, 0] - top_two[:, 1]
    elif token_ranking == "random":
        ranking = torch.rand(len(scores), generator=generator, device=scores.device)
    if never is not None:
        scores[:, never] = -torch.inf
    if do_sample:
        # What `torch.multinomial` does, without its check for NaN, which would hide where the NaN comes from.
        noise = torch.empty_like(probabilities).exponential_(generator=generator)
        tokens = _place_of_largest((probabilities / noise).masked_fill_(scores == -torch.inf, -1.0))
    else:
        tokens = _place_of_largest(scores)
    if standing is not None:
        tokens = tokens.where((standing == never)[:, None], standing[:, None])
    probability = probabilities.gather(-1, tokens).squeeze(-1)
    return tokens.squeeze(-1), probability, probability if token_ranking == "probability" else ranking


def _place_of_largest(values: torch.FloatTensor) -> torch.LongTensor:
    """`values.argmax(-1, keepdim=True)` of `values` `(M, V)`."""
    num_rows, size = values.shape
    if values.device.type != "cpu" or size < 64 * 64 or size % 64:
        return values.max(-1, keepdim=True).indices
    # A CPU finds a largest value several times faster than its place: so first that of 64 values each, then places.
    groups = values.view(num_rows, -1, 64)
    group = groups.amax(-1).max(-1, keepdim=True).indices  # [M, 1]
    inner = groups.gather(1, group[..., None].expand(-1, -1, 64)).squeeze(1).max(-1, keepdim=True).indices
    return group * 64 + inner


def vanilla_accepted_tokens(
    is_masked: torch.BoolTensor,
    ranking: torch.FloatTensor,
    step: int,
    num_steps: int,
    unmask_schedule: str,
    ranking_temperature: float | None = None,
    generator: torch.Generator | None = None,
) -> torch.BoolTensor:
    """Which masked tokens of a block the original samplers accept in a step, by `unmask_schedule`.

    Args:
        is_masked (`torch.BoolTensor` of shape `(B, K)`): The masked tokens of the block.
        ranking (`torch.FloatTensor` of shape `(B, K)`): What orders them.
        step (`int`): Steps of this block before this one.
        num_steps (`int`): Steps of this block in all.
        unmask_schedule (`str`): `"even"`, `"linear"` or `"independent"`.
        ranking_temperature (`float`, *optional*): Draws instead of taking the best.
        generator (`torch.Generator`, *optional*): Source of randomness.

    Returns:
        `torch.BoolTensor` of shape `(B, K)`.
    """
    block_size = is_masked.shape[1]
    # Time runs from 1 to almost 0; the last step leaves nothing. In float32, as the original computes it.
    times = torch.linspace(1, 1e-3, num_steps + 1)
    share = 1.0 - times[step + 1] / times[step] if step < num_steps - 1 else torch.ones(())
    if unmask_schedule == "independent":
        uniform = torch.rand(int(is_masked.sum()), generator=generator, device=is_masked.device)
        return is_masked.clone().masked_scatter_(is_masked, uniform < share.to(uniform.device))
    num_masked = is_masked.sum(-1)  # [B]
    if unmask_schedule == "linear":
        num_accepted = (num_masked.float() * share.to(num_masked.device)).long()
    else:
        # The first steps take what does not divide evenly.
        num_accepted = torch.full_like(num_masked, block_size // num_steps + (step < block_size % num_steps))
    if ranking_temperature:
        # The best of perturbed values are a draw without replacement (Gumbel top-k).
        noise = torch.empty_like(ranking).exponential_(generator=generator)
        ranking = ranking / ranking_temperature - noise.log()
    order = ranking.masked_fill(~is_masked, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    place = torch.arange(block_size, device=is_masked.device).expand_as(order)
    place = torch.empty_like(order).scatter_(-1, order, place)  # in the order of each row
    return is_masked & (place < num_accepted[:, None])


def fast_dllm_accepted_tokens(
    is_masked: torch.BoolTensor,
    probability: torch.FloatTensor,
    ranking: torch.FloatTensor,
    confidence_threshold: float,
) -> torch.BoolTensor:
    """Which masked tokens Fast-dLLM accepts: the best one of the block in any case, and each confident one.

    Args:
        is_masked (`torch.BoolTensor` of shape `(B, K)`): The masked tokens of the block.
        probability (`torch.FloatTensor` of shape `(B, K)`): Probability of the predicted token.
        ranking (`torch.FloatTensor` of shape `(B, K)`): What decides which token is the best one.
        confidence_threshold (`float`): A token is confident when it reaches this; in [`accepted_tokens`] it has to
            exceed it.

    Returns:
        `torch.BoolTensor` of shape `(B, K)`.
    """
    best = ranking.masked_fill(~is_masked, -torch.inf).argmax(-1, keepdim=True)
    is_best = torch.zeros_like(is_masked).scatter(-1, best, True)
    return is_masked & (is_best | (probability >= confidence_threshold))

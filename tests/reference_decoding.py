"""Algorithm 2 of arXiv 2508.09192, pipelined parallel decoding, written literally: the oracle of the fast loop.

One row, block objects, Python lists, no cache: each forward recomputes the whole sequence. The keys and values of a
cache are exact (a finished block never sees a later one), so `committed` here only says what a cache would hold.

Departures from the reference code, all on purpose: `max_new_tokens` is exact, so the last block may be short; the mask
token is never sampled; the row ends once everything up to its first EOS is decoded, and blocks behind that EOS are
dropped as soon as it is decoded; an empty prompt is an error.

`Rules` are not in the paper. Without them the decoding is Algorithm 2.
"""

# L sequence, V vocabulary

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import torch


@dataclass
class Block:
    """Positions `start` to `end` of the sequence. The prompt is block 0."""

    start: int
    end: int
    state: str = "active"  # "active" -> "finished" (decoded, not in the cache yet) -> "committed" (in the cache)
    fully_activated: bool = False  # until then it is semi-activated: only tokens above the confidence threshold


@dataclass(frozen=True)
class Rules:
    """What `modeling/acceptance_rules.py` adds to Algorithm 2, by the names of the generation config."""

    acceptance_rule: str = "threshold"
    semi_activated_threshold: float | None = None
    entropy_bound: float = 0.1
    confidence_factor: float = 1.0
    credit_decay: float = 0.7
    credit_strength: float = 0.65
    num_branches: int = 1
    remask_threshold: float = 0.0


@dataclass
class ReferenceResult:
    """The decoded row: `tokens` up to and including the first EOS, and one trace entry per forward.

    A trace entry is a dict of `window_start`, `window_length`, `committed_length` (positions that are in the cache
    before this forward) and `accepted`, a list of (absolute position, token) in ascending order. With
    `remask_threshold` there is also `remasked`, a list of positions.
    """

    tokens: list[int]
    num_forward_passes: int
    trace: list[dict]


def reference_decode(
    logits_fn: Callable[[list[int], int, int], torch.Tensor],
    prompt_ids: Sequence[int],
    *,
    block_size: int,
    block_add_threshold: float,
    block_activation_threshold: float,
    confidence_threshold: float,
    token_ranking: str = "probability",
    max_active_blocks: int | None = None,
    max_new_tokens: int,
    mask_token_id: int,
    eos_token_ids: int | Sequence[int],
    right_shift_logits: bool = False,
    rules: Rules | None = None,
) -> ReferenceResult:
    r"""
    Decodes one row, greedily.

    Outline:
        1. Add a block of masks if the last block is decoded far enough.
        2. Fully activate each block whose predecessor is decoded far enough.
        3. Take the window: everything that is not in the cache.
        4. Forward. Finished blocks are now in the cache.
        5. Accept tokens in every active block, all from the same logits.
        6. Drop the blocks behind the first EOS.
        7. Finish blocks that are decoded, in order.
        8. Stop if everything up to the first EOS, or to the end, is decoded.

    Args:
        logits_fn (`Callable`):
            `logits_fn(ids, prompt_length, block_size)` gives the logits `[L, V]` of the whole sequence under the
            block-causal mask.
        prompt_ids (`Sequence[int]`):
            The prompt, not empty. Mask tokens in it stay as they are.
        block_size (`int`):
            Tokens per response block.
        block_add_threshold (`float`):
            tau_add in [0, 1]: decoded ratio of the last block from which on a new one is added.
        block_activation_threshold (`float`):
            tau_act in [0, 1]: decoded ratio of the predecessor from which on a block is fully activated.
        confidence_threshold (`float`):
            tau_conf: tokens with a probability above it are accepted.
        token_ranking (`str`):
            `"probability"`, `"neg_entropy"` or `"margin"`: which token a fully activated block accepts if none is
            above the threshold.
        max_active_blocks (`int`, *optional*):
            At most so many blocks are open that are not decoded or wait for an earlier one.
        max_new_tokens (`int`):
            Number of response positions.
        mask_token_id (`int`):
            Id of a masked token.
        eos_token_ids (`int` or `Sequence[int]`):
            Ids that end the response.
        right_shift_logits (`bool`):
            Whether the logits at position i predict token i + 1 (Dream) rather than token i (LLaDA).
        rules (`Rules`, *optional*):
            Another rule for step 5; look-ahead, where the forward of step 4 reads several variants of the row and one
            of them goes on; and decoded tokens that become masks again in step 5.

    Returns:
        [`ReferenceResult`]

    Raises:
        ValueError: If the prompt is empty, or a number is out of its range.
    """
    eos_token_ids = [eos_token_ids] if isinstance(eos_token_ids, int) else list(eos_token_ids)
    prompt_length = len(prompt_ids)
    if prompt_length == 0:
        raise ValueError("`prompt_ids` must hold at least one token.")
    if block_size < 1 or max_new_tokens < 1:
        raise ValueError(f"`block_size` and `max_new_tokens` must be >= 1, got {block_size} and {max_new_tokens}.")
    if not (0 <= block_add_threshold <= 1 and 0 <= block_activation_threshold <= 1):
        raise ValueError("`block_add_threshold` and `block_activation_threshold` must be in [0, 1].")

    ids = list(prompt_ids)
    end_of_response = prompt_length + max_new_tokens
    # The prompt is block 0 and final from the start, so the first forward prefills it.
    blocks = [Block(0, prompt_length, state="finished", fully_activated=True)]
    first_eos: int | None = None
    trace: list[dict] = []
    rules = rules or Rules()
    credit_of: dict[int, tuple[int, float]] = {}  # of masked positions: the token predicted last, and its credit
    predictions: dict[int, tuple[int, float]] = {}  # of positions: the token predicted last, and its probability
    masked_again: set[int] = set()

    def decoded_ratio(block: Block) -> float:
        if block.start < prompt_length:
            return 1.0  # the prompt is text, whatever is in it
        masks_left = ids[block.start : block.end].count(mask_token_id)
        size = block.end - block.start
        return (size - masks_left) / size

    def distribution(logits: torch.Tensor, position: int) -> torch.Tensor:
        return logits[position - 1 if right_shift_logits else position].softmax(-1)  # [V]

    def prediction(p: torch.Tensor) -> tuple[int, float]:
        best = p.clone()
        best[mask_token_id] = 0
        return int(best.argmax()), float(best.max())

    while True:
        # 1. Add at most one block, and none once an EOS is decoded.
        last = blocks[-1]
        is_full = max_active_blocks is not None and sum(b.state == "active" for b in blocks) >= max_active_blocks
        if (
            first_eos is None
            and last.end < end_of_response
            and not is_full
            and decoded_ratio(last) >= block_add_threshold
        ):
            new = Block(last.end, min(last.end + block_size, end_of_response))
            blocks.append(new)
            ids += [mask_token_id] * (new.end - new.start)

        # 2. Fully activate. The predecessor need not be fully activated itself.
        for predecessor, block in zip(blocks, blocks[1:], strict=False):
            block.fully_activated = decoded_ratio(predecessor) >= block_activation_threshold

        # 3. The window: finished blocks, read once more to be committed, then active ones.
        committed_length = sum(block.end - block.start for block in blocks if block.state == "committed")
        step = {
            "window_start": committed_length,
            "window_length": len(ids) - committed_length,
            "committed_length": committed_length,
            "accepted": [],
        }

        # 4. Forward. Of several variants, which try one more token each, the surest of the others goes on.
        active_positions = [p for block in blocks if block.state == "active" for p in range(block.start, block.end)]
        candidates = [p for p in active_positions if ids[p] == mask_token_id and p in predictions]
        candidates.sort(key=lambda position: -predictions[position][1])
        highest = -inf
        for tried in [None, *candidates[: rules.num_branches - 1]]:
            variant = list(ids)
            if tried is not None:
                variant[tried] = predictions[tried][0]
            variant_logits = logits_fn(variant, prompt_length, block_size).float()  # [L, V]
            rest = [
                prediction(distribution(variant_logits, p))[1] for p in active_positions if variant[p] == mask_token_id
            ]
            confidence = sum(rest) / len(rest) if rest else 1.0
            if confidence > highest:
                highest, winner, logits, chosen_branch = confidence, variant, variant_logits, tried
        ids = winner
        if chosen_branch is not None:
            step["accepted"].append((chosen_branch, ids[chosen_branch]))
        for block in blocks:
            if block.state == "finished":
                block.state = "committed"

        # 5. Accept. What becomes a mask again was not one in this forward, so it is not predicted in it.
        to_mask_again = [
            position
            for position in active_positions
            if ids[position] != mask_token_id
            and position not in masked_again
            and (first_eos is None or position < first_eos)
            and float(distribution(logits, position)[ids[position]]) < rules.remask_threshold
        ]
        predictions, credit_before, credit_of = {}, credit_of, {}
        for block in blocks:
            masked = [position for position in range(block.start, block.end) if ids[position] == mask_token_id]
            if block.state != "active" or not masked:
                continue
            tokens, probabilities, confidences = [], [], []
            for position in masked:
                p = distribution(logits, position)
                token, probability = predictions[position] = prediction(p)
                if rules.acceptance_rule == "entropy_bound":
                    confidence = _confidence(p, "neg_entropy")
                elif rules.acceptance_rule == "credit":
                    token_before, credit = credit_before.get(position, (token, 0.0))
                    credit = rules.credit_decay * credit * (token == token_before) + probability**0.2
                    credit_of[position] = token, credit
                    p[token] *= (1 + credit) ** rules.credit_strength
                    confidence = probability = float(p[token] / p.sum())
                else:
                    confidence = probability if token_ranking == "probability" else _confidence(p, token_ranking)
                tokens.append(token)
                probabilities.append(probability)
                confidences.append(confidence)
            chosen = accepted_by_rule(
                probabilities,
                confidences,
                block.fully_activated,
                confidence_threshold=confidence_threshold,
                rules=rules,
            )
            for i in chosen:
                ids[masked[i]] = tokens[i]
                step["accepted"].append((masked[i], tokens[i]))
        if rules.remask_threshold:
            step["remasked"] = to_mask_again
        for position in to_mask_again:
            ids[position] = mask_token_id
            masked_again.add(position)
        step["accepted"].sort()
        trace.append(step)

        # 6. Drop the blocks behind the one that holds the first EOS.
        eos_positions = [position for position in range(prompt_length, len(ids)) if ids[position] in eos_token_ids]
        if eos_positions:
            first_eos = eos_positions[0]
            blocks = [block for block in blocks if block.start <= first_eos]
            ids = ids[: blocks[-1].end]

        # 7. Finish decoded blocks. One behind an unfinished block stays active and waits for it.
        for block in blocks:
            if block.state == "active":
                if decoded_ratio(block) < 1:
                    break
                block.state = "finished"

        # 8. Stop.
        end = end_of_response if first_eos is None else first_eos + 1
        response = ids[prompt_length:end]
        if len(response) == end - prompt_length and mask_token_id not in response:
            return ReferenceResult(response, len(trace), trace)


def accepted_by_rule(
    probabilities: list[float],
    confidences: list[float],
    fully_activated: bool,
    *,
    confidence_threshold: float,
    rules: Rules,
) -> list[int]:
    """Which of a block's masked tokens are accepted, from their probabilities and what ranks them."""
    chosen = []
    if rules.acceptance_rule == "entropy_bound":
        total = 0.0
        for i in sorted(range(len(confidences)), key=lambda i: -confidences[i]):
            entropy = max(0.0, -confidences[i])
            if total + (0.0 if fully_activated else entropy) > rules.entropy_bound:
                break
            total += entropy
            chosen.append(i)
    elif rules.acceptance_rule == "factor":
        for i in sorted(range(len(probabilities)), key=lambda i: -probabilities[i]):
            if (len(chosen) + 2) * (1 - probabilities[i]) >= rules.confidence_factor:
                break
            chosen.append(i)
    else:
        if not fully_activated and rules.semi_activated_threshold is not None:
            confidence_threshold = rules.semi_activated_threshold
        chosen = [i for i in range(len(probabilities)) if probabilities[i] > confidence_threshold]
    if not chosen and fully_activated:
        chosen = [confidences.index(max(confidences))]
    return chosen


def _confidence(p: torch.Tensor, token_ranking: str) -> float:
    """How sure the distribution `p` [V] is, higher for surer."""
    if token_ranking == "neg_entropy":
        return float((p * (p + 1e-10).log()).sum())
    if token_ranking == "margin":
        first, second = p.topk(2).values
        return float(first - second)
    raise ValueError(f"`token_ranking` must be 'probability', 'neg_entropy' or 'margin', got {token_ranking!r}.")

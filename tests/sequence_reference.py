"""Decoding on blocks that are counted from the start of the sequence, written literally: the oracle of the fast loop.

One row, Python lists, no cache, greedy. Each forward reads the whole sequence under the mask `j // K <= i // K`.
"""

# L sequence, V vocabulary

from collections.abc import Callable, Sequence

import torch


def sequence_logits(model) -> Callable[[list[int], int], torch.Tensor]:
    """`logits_fn(ids, block_size)` gives `[L, V]`; the mask is made here."""

    @torch.no_grad()
    def logits_fn(ids: list[int], block_size: int) -> torch.Tensor:
        block = torch.arange(len(ids)) // block_size
        allowed = block[None, :] <= block[:, None]
        return model(torch.tensor([ids]), attention_mask=allowed[None, None]).logits[0].float()

    return logits_fn


def sequence_decode(
    logits_fn: Callable[[list[int], int], torch.Tensor],
    prompt: Sequence[int],
    *,
    block_size: int,
    max_new_tokens: int,
    mask_token_id: int,
    eos_token_ids: Sequence[int],
    right_shift_logits: bool,
    confidence_threshold: float = 0.9,
    block_add_threshold: float = 1.0,
    block_activation_threshold: float = 0.95,
    max_active_blocks: int | None = None,
    acceptance_rule: str = "threshold",
    steps_per_block: int | None = None,
    sub_block_size: int | None = None,
    first_token_alone: bool = False,
) -> tuple[list[int], list[list[tuple[int, int]]]]:
    """The response, and the pairs of position and token that each forward accepted.

    A block is its first position. The first one may hold the end of the prompt, the last one is whole.
    """
    length, end = len(prompt), len(prompt) + max_new_tokens
    ids = list(prompt) + [mask_token_id] * (-(-end // block_size) * block_size - length)
    all_blocks = list(range(length // block_size * block_size, len(ids), block_size))
    num_open, steps_of, trace = 0, dict.fromkeys(all_blocks, 0), []

    def masked(block: int) -> list[int]:
        return [p for p in range(block, block + block_size) if p >= length and ids[p] == mask_token_id]

    def ratio(block: int) -> float:
        return (block_size - len(masked(block))) / block_size

    while True:
        first_eos = next((p for p in range(length, end) if ids[p] in eos_token_ids), None)
        goal = end if first_eos is None else first_eos + 1
        if mask_token_id not in ids[length:goal]:
            return ids[length:goal], trace
        # A block is added, or those behind an EOS are dropped.
        final = 0
        while final < num_open and not masked(all_blocks[final]):
            final += 1
        is_decoded_enough = num_open == 0 or ratio(all_blocks[num_open - 1]) >= block_add_threshold
        has_room = max_active_blocks is None or num_open - final < max_active_blocks
        if is_decoded_enough and has_room:
            num_open += 1
        num_open = min(num_open, len(all_blocks))
        if first_eos is not None:
            num_open = min(num_open, all_blocks.index(first_eos // block_size * block_size) + 1)
        blocks = all_blocks[:num_open]
        logits = logits_fn(ids[: blocks[-1] + block_size], block_size)
        chosen = []
        is_full = [i == 0 or ratio(blocks[i - 1]) >= block_activation_threshold for i in range(num_open)]
        for block, is_active in zip(blocks, is_full, strict=True):
            candidates = masked(block)
            if not candidates:
                continue
            if sub_block_size is not None:
                first = (candidates[0] - block) // sub_block_size
                candidates = [p for p in candidates if (p - block) // sub_block_size == first]
            if first_token_alone and block_add_threshold == 1 and candidates[0] == block:
                candidates = candidates[:1]
            tokens, probability = {}, {}
            for p in candidates:
                of_token = logits[p - right_shift_logits].softmax(-1).clone()
                of_token[mask_token_id] = 0
                tokens[p], probability[p] = int(of_token.argmax()), float(of_token.max())
            needed = 1
            if steps_per_block is not None:
                needed = block_size // steps_per_block + (steps_of[block] < block_size % steps_per_block)
            if acceptance_rule == "sequential":
                accepted = candidates[:needed] if is_active else []
            else:
                accepted = [p for p in candidates if probability[p] > confidence_threshold]
                if is_active and len(accepted) < needed:
                    accepted = sorted(candidates, key=lambda p: (-probability[p], p))[:needed]
            steps_of[block] += is_active
            chosen += [(p, tokens[p]) for p in accepted]
        for p, token in chosen:
            ids[p] = token
        trace.append(sorted(chosen))

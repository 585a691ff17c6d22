"""Prompts for `generate`."""

import torch

from tiny_models import PAD


def pad(prompts, side: str, pad_token: int = PAD) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` of prompts of different lengths."""
    width = max(map(len, prompts))
    ids, mask = [], []
    for prompt in prompts:
        missing = width - len(prompt)
        fill, ones, zeros = [pad_token] * missing, [1] * len(prompt), [0] * missing
        ids.append(fill + list(prompt) if side == "left" else list(prompt) + fill)
        mask.append(zeros + ones if side == "left" else ones + zeros)
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def random_prompts(lengths, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, PAD, (length,), generator=generator).tolist() for length in lengths]

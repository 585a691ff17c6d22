"""Clean context: noisy blocks next to the clean sequence, so that each block is denoised behind clean blocks.

This is how SDAR and Fast-dLLM v2 were trained. A row of L tokens is fed as 2 L, or with complementary masks as 3 L:

    noisy | clean                  noisy | complement | clean

A noisy block sees itself and the clean blocks before it. A clean block sees the clean blocks up to itself. All parts
have the positions 0 .. L - 1. The complement has masks where the noisy part has none, and the reverse. The two do not
see each other, so one clean part serves both.
"""

# B batch, L sequence, N noisy parts

from typing import Any

import torch

from d2f_hf.modeling import positions_without_padding, visible_length


def has_clean_context(args: Any, config: Any) -> bool:
    """Whether a model is trained with clean context: as the arguments say, otherwise if its blocks need it."""
    return block_alignment_of(config) == "sequence" if args.clean_context is None else args.clean_context


def block_alignment_of(config: Any) -> str:
    """Where the blocks of a model start; configurations of older checkpoints do not say it."""
    return getattr(config, "block_alignment", "prompt")


def check_clean_context(args: Any, clean_context: bool) -> None:
    """Refuses arguments that contradict clean context, or that need it."""
    if not clean_context:
        if args.complementary_masks:
            raise ValueError(
                "`complementary_masks` needs `clean_context`, got complementary_masks=True without it. Set "
                "clean_context=True, or leave it out."
            )
        return
    name = "complementary_masks" if args.complementary_masks else "clean_context"
    if args.objective != "masked_diffusion":
        raise ValueError(
            f"`{name}` (got True) needs objective='masked_diffusion', got {args.objective!r}: the blocks before a "
            "noisy one are noisy too in distillation. Leave it out."
        )
    for other in ("decoding_probability", "causal_probability"):
        if getattr(args, other) > 0.0:
            raise ValueError(
                f"`{other}` must be 0 with clean context, got {getattr(args, other)}: each block is trained as it is "
                "decoded already. Leave it out."
            )


def check_objective(args: Any, config: Any) -> None:
    """Refuses to train a model in a way that its blocks do not fit.

    Raises:
        ValueError: for distillation or bidirectional training of a model whose blocks start with the sequence, and for
            what [`check_clean_context`] refuses.
    """
    if block_alignment_of(config) == "sequence":
        if args.objective == "distillation":
            raise ValueError(
                "`objective` must be 'masked_diffusion' for a model with block_alignment='sequence', got "
                "'distillation': its prompt is block-causal, so it is no bidirectional teacher."
            )
        if args.clean_context is False:
            raise ValueError(
                "`clean_context` must be True for a model with block_alignment='sequence', got False: without it "
                "training is bidirectional, and the model is decoded block by block. Leave it out."
            )
    check_clean_context(args, has_clean_context(args, config))


def block_ends(
    position_ids: torch.Tensor, prompt_lengths: torch.Tensor, block_size: int, block_alignment: str
) -> torch.Tensor:
    """The position behind the block of each token, `[B, L]`. Equal ends mean the same block.

    Args:
        position_ids (`torch.Tensor` of shape `[B, L]`): Positions in the row.
        prompt_lengths (`torch.Tensor` of shape `[B]`): Number of prompt tokens of each row.
        block_size (`int`): Tokens per block.
        block_alignment (`str`): As in the model's configuration.
    """
    start = prompt_lengths if block_alignment == "prompt" else torch.zeros_like(prompt_lengths)
    return visible_length(position_ids, start, block_size)


def clean_context_mask(ends: torch.Tensor, attention_mask: torch.Tensor, num_noisy: int = 1) -> torch.Tensor:
    """Who may attend to whom in N noisy parts and a clean one behind them.

    Args:
        ends (`torch.Tensor` of shape `[B, L]`): See [`block_ends`].
        attention_mask (`torch.Tensor` of shape `[B, L]`): 0 for padding, which nobody sees.
        num_noisy (`int`): Number of noisy parts N.

    Returns:
        `torch.Tensor` of shape `[B, 1, (N + 1) L, (N + 1) L]`, bool: `True` where attention is allowed.
    """
    is_token = attention_mask.bool()[:, None, :]  # [B, 1, L]
    query, key = ends[:, :, None], ends[:, None, :]
    own, before = (query == key) & is_token, (key < query) & is_token  # [B, L, L]
    nothing = torch.zeros_like(own)
    rows = [
        torch.cat([own if other == part else nothing for other in range(num_noisy)] + [before], dim=-1)
        for part in range(num_noisy)
    ]
    rows.append(torch.cat([nothing] * num_noisy + [own | before], dim=-1))
    return torch.cat(rows, dim=1)[:, None]


def clean_context_sequence(
    inputs: dict[str, torch.Tensor], block_size: int, block_alignment: str
) -> dict[str, torch.Tensor]:
    """What the model is fed, from a batch of a [`D2FNoisingCollator`] with clean context.

    Returns:
        `dict[str, torch.Tensor]`: `input_ids` and `position_ids` `[B, (N + 1) L]`, and a finished `attention_mask`.
    """
    num_noisy = inputs["input_ids"].shape[1] // inputs["clean_ids"].shape[1]
    positions = positions_without_padding(inputs["attention_mask"])  # [B, L]
    ends = block_ends(positions, inputs["prompt_lengths"], block_size, block_alignment)
    return {
        "input_ids": torch.cat([inputs["input_ids"], inputs["clean_ids"]], dim=1),
        "position_ids": positions.repeat(1, num_noisy + 1),
        "attention_mask": clean_context_mask(ends, inputs["attention_mask"], num_noisy),
    }


def with_clean_part(at: torch.Tensor, length: int) -> torch.Tensor:
    """A bool mask of the noisy parts, `[B, N L]`, as one of what the model is fed; `False` in the clean part."""
    return torch.cat([at, torch.zeros_like(at[:, :length])], dim=1)

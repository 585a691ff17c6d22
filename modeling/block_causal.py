"""Who may attend to whom: the one definition of the block-causal structure.

A sequence is a prompt (block 0) and response blocks of `block_size` tokens that are counted from the end of the
prompt; or, with `block_alignment="sequence"`, blocks that are counted from its first token, whatever the prompt. A
token sees its own block and all earlier ones, in both directions inside a block. If a row is stored compactly (its
prompt from slot 0, no holes for padding) this is one comparison: `slot < visible_length`.
"""

# B batch, L sequence, Q queries, S key/value slots

import torch


def positions_without_padding(attention_mask: torch.Tensor) -> torch.LongTensor:
    """The position of each token in its row when padding is left out: left- and right-padded rows agree.

    Args:
        attention_mask (`torch.Tensor` of shape `(B, L)`): 0 for padding, at either end; of any dtype.

    Returns:
        `torch.LongTensor` of shape `(B, L)`. Padding gets the position of its nearest token to the left, or 0.
    """
    return ((attention_mask != 0).cumsum(-1) - 1).clamp(min=0)


def visible_length(
    position_ids: torch.LongTensor,
    prompt_lengths: torch.LongTensor,
    block_size: int,
    block_alignment: str = "prompt",
) -> torch.LongTensor:
    """How many tokens of its row, counted from the row's first, each token sees: all up to the end of its block.

    Args:
        position_ids (`torch.LongTensor` of shape `(B, Q)`): Positions in the row, padding left out.
        prompt_lengths (`torch.LongTensor` of shape `(B,)`): The size of block 0 of each row. With
            `block_alignment="sequence"` they change nothing.
        block_size (`int`): Tokens per block.
        block_alignment (`str`): Where blocks are counted from: the `"prompt"`'s end, or the `"sequence"`'s start.

    Returns:
        `torch.LongTensor` of shape `(B, Q)`.
    """
    if block_size < 1:
        raise ValueError(f"`block_size` must be at least 1, got {block_size}. Leave it out for the model's own.")
    if block_alignment == "sequence":  # as behind a prompt without a token
        prompt_lengths = torch.zeros_like(prompt_lengths)
    prompt_lengths = prompt_lengths[:, None]
    # Prompt tokens are in "block -1 or earlier" of the response, which is clamped to: up to the end of the prompt.
    blocks = (torch.div(position_ids - prompt_lengths, block_size, rounding_mode="floor") + 1).clamp(min=0)
    return prompt_lengths + blocks * block_size


def block_causal_mask(
    position_ids: torch.LongTensor,
    prompt_lengths: torch.LongTensor,
    block_size: int,
    key_positions: torch.LongTensor,
    is_key: torch.Tensor | None = None,
    block_alignment: str = "prompt",
) -> torch.BoolTensor:
    """Which keys each query sees, `True` where attention is allowed.

    Args:
        position_ids (`torch.LongTensor` of shape `(B, Q)`): Positions of the queries.
        prompt_lengths (`torch.LongTensor` of shape `(B,)`): Prompt tokens of each row.
        block_size (`int`): Tokens per response block.
        key_positions (`torch.LongTensor` of shape `(B, S)` or `(1, S)`): Positions of the keys; the slot numbers
            where rows are stored compactly.
        is_key (`torch.Tensor` of shape `(B, S)`, *optional*): 0 for keys that nobody sees (padding).
        block_alignment (`str`): See [`visible_length`].

    Returns:
        `torch.BoolTensor` of shape `(B, 1, Q, S)`. No query of a row that holds a token is without keys.
    """
    visible = visible_length(position_ids, prompt_lengths, block_size, block_alignment)
    allowed = key_positions[:, None, :] < visible[:, :, None]
    if is_key is not None:
        allowed = allowed & (is_key != 0)[:, None, :]
    return allowed[:, None]


def predicting_positions(is_masked: torch.BoolTensor, right_shift_logits: bool) -> torch.BoolTensor:
    """The positions whose logits predict the masked tokens, in the order of the masked tokens.

    Args:
        is_masked (`torch.BoolTensor` of shape `(B, L)`): Where a token is masked.
        right_shift_logits (`bool`): Logits at position i predict token i + 1 (Dream) rather than token i (LLaDA). The
            first token of a row then has no logits and must not be masked.

    Returns:
        `torch.BoolTensor` of shape `(B, L)`.
    """
    if not right_shift_logits:
        return is_masked
    return torch.cat([is_masked[:, 1:], torch.zeros_like(is_masked[:, :1])], dim=1)

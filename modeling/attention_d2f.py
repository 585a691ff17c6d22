"""Attention of the block-diffusion architectures: rotary embedding, masks, and attention on projected heads."""

# B batch, L sequence, S key/value slots, H heads, D head dimension

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs

from .block_causal import block_causal_mask, positions_without_padding
from .cache_d2f import has_packed_tokens
from .configuration_d2f import D2FConfig

# What is added to a score hides the key from here on: no score makes up for it. The lowest number of any float dtype
# is below, and so is -1e4, which is often taken, and which is -9984 in bfloat16.
HIDDEN = -9e3


def head_dim_of(config: D2FConfig) -> int:
    """D, the width of a head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


class D2FRotaryEmbedding(nn.Module):
    """Cosines and sines of the rotary embedding, in float32 as in the original (`rope_full_precision`).

    The rope types "dynamic" and "longrope" change the frequencies where a forward goes beyond the original context, as
    in transformers: by the longest row of the batch, and not for keys that are in the cache already. There, a row
    depends on its batch and on the cache.
    """

    inv_freq: torch.Tensor

    def __init__(self, config: D2FConfig, device: torch.device | None = None):
        super().__init__()
        self.config = config
        self.max_seq_len_cached = self.original_max_seq_len = config.max_position_embeddings
        self.rope_type = config.rope_parameters["rope_type"]
        self.rope_init: Callable = self.compute_default_rope_parameters
        if self.rope_type != "default":
            self.rope_init = ROPE_INIT_FUNCTIONS[self.rope_type]
        inv_freq, self.attention_scaling = self.rope_init(config, device)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(
        config: D2FConfig, device: torch.device | None = None, **kwargs
    ) -> tuple[torch.Tensor, float]:
        """Inverse frequencies `(D / 2,)` and the scaling of the result, which is 1."""
        head_dim = head_dim_of(config)
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        return 1.0 / config.rope_parameters["rope_theta"] ** exponent, 1.0

    def _apply(self, fn, *args, **kwargs):
        # `model.to(torch.bfloat16)` moves the frequencies but does not round them: at position 1000 the rounding would
        # be a shift by several tokens. `to_empty` leaves those of a meta model uninitialised; no checkpoint has them.
        exact = self.inv_freq, self.original_inv_freq
        super()._apply(fn, *args, **kwargs)
        if exact[0].is_meta and not self.inv_freq.is_meta:
            inv_freq, _ = self.rope_init(self.config, torch.device("cpu"))
            exact = inv_freq, inv_freq.clone()
        elif self.inv_freq.dtype == torch.float32:
            return self
        self.inv_freq, self.original_inv_freq = (buffer.to(self.inv_freq.device) for buffer in exact)
        return self

    @dynamic_rope_update
    def forward(self, x: torch.Tensor, position_ids: torch.LongTensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What [`rotate`] takes for the positions `(B, L)`, on the device of `x`: `(B, L, 1, D)` each."""
        angles = position_ids[..., None, None] * self.inv_freq.to(x.device, torch.float32)  # [B, L, 1, D / 2]
        cos, sin = angles.cos(), angles.sin()
        if self.attention_scaling != 1.0:
            cos, sin = cos * self.attention_scaling, sin * self.attention_scaling
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Applies the rotary embedding to `x` of shape `(B, L, H, D)`.

    `cos` and `sin` are `(B, L, 1, D)`, and the first half of `sin` is negative: (a, b) becomes
    (a cos - b sin, b cos + a sin).
    """
    return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


def full_mask(
    config: D2FConfig,
    attention_mask: torch.Tensor | None,
    position_ids: torch.LongTensor,
    inputs_embeds: torch.Tensor,
    cache: Cache | None,
    prompt_lengths: torch.LongTensor | None,
    block_size: int | None,
) -> torch.Tensor | BlockMask | None:
    """Who may attend to whom in one forward, in the form that the attention implementation takes.

    Args:
        inputs_embeds (`torch.Tensor` of shape `(B, L, hidden_size)`): The mask gets its device and its dtype.
        attention_mask, position_ids, cache, prompt_lengths, block_size: As in [`D2FForBlockDiffusion.forward`].

    Returns:
        A `BlockMask` for flex_attention, otherwise what is added to the scores, `(B, 1, L, S)`: 0, or the lowest
        number of the dtype where a key is hidden. `None` if all see all.

    Raises:
        ValueError: for a mask of another shape.
    """
    batch_size, length = inputs_embeds.shape[:2]
    is_packed = has_packed_tokens(cache)  # then the mask is of the rows of the window
    if attention_mask is not None and attention_mask.dim() == 4:
        if not is_packed:
            num_slots = length if cache is None else cache.get_mask_sizes(length, layer_idx=0)[0]
            _check_finished_mask(attention_mask, batch_size, length, num_slots)
            attention_mask = attention_mask.expand(batch_size, 1, length, -1)
        if attention_mask.is_floating_point():
            return _additive_mask(attention_mask, inputs_embeds.dtype)
        allowed = attention_mask.bool()
    else:
        allowed = _allowed(config, attention_mask, position_ids, inputs_embeds, cache, prompt_lengths, block_size)
        if allowed is None:
            return None
        allowed = allowed.expand(batch_size, 1, length, -1)
    # A query without any key, such as one of a row that is all padding, gives NaN in some kernels. Nobody reads what
    # it gives, so it may see everything.
    has_key = allowed.any(-1, keepdim=True)
    if config._attn_implementation == "flex_attention":
        return _flex_attention_mask(allowed | ~has_key)
    # In the form of an addend once for all layers: sdpa would convert a bool mask in each of them.
    is_hidden = has_key > allowed
    return torch.zeros_like(is_hidden, dtype=inputs_embeds.dtype).masked_fill_(
        is_hidden, torch.finfo(inputs_embeds.dtype).min
    )


def _allowed(
    config: D2FConfig,
    attention_mask: torch.Tensor | None,
    position_ids: torch.LongTensor,
    inputs_embeds: torch.Tensor,
    cache: Cache | None,
    prompt_lengths: torch.LongTensor | None,
    block_size: int | None,
) -> torch.BoolTensor | None:
    """Which keys each query sees, `(B or 1, 1, L or 1, S)`, from a mask of tokens; `None` if all see all."""
    length = inputs_embeds.shape[1]
    num_slots = length if cache is None else cache.get_mask_sizes(length, layer_idx=0)[0]
    slot = torch.arange(num_slots, device=inputs_embeds.device)[None]
    is_token = None if attention_mask is None else _is_token(attention_mask)
    if cache is not None and cache.is_compileable:  # preallocated: nobody sees what nothing was written to
        if is_token is None:
            is_token = slot < cache.get_seq_length() + length
        else:
            is_token = nn.functional.pad(is_token, (0, num_slots - is_token.shape[1]))
    if is_token is not None and is_token.shape[1] != num_slots:
        raise ValueError(
            f"`attention_mask` must have a column for each token of the cache and the input, {num_slots} in all, but "
            f"it has {is_token.shape[1]}."
        )
    if prompt_lengths is not None:
        block_size = config.block_size if block_size is None else block_size
        key_positions = slot if is_token is None else positions_without_padding(is_token)
        return block_causal_mask(
            position_ids, prompt_lengths, block_size, key_positions, is_token, config.block_alignment
        )
    return None if is_token is None else is_token[:, None, None, :]


def _is_token(attention_mask: torch.Tensor) -> torch.BoolTensor:
    """A mask `(B, S)` of any dtype, 0 for padding, as bool."""
    if attention_mask.dim() != 2:
        raise ValueError(
            "`attention_mask` must have shape (B, S) or (B, 1, L, S), with 0 for padding or with what each query "
            f"sees, but it has {tuple(attention_mask.shape)}."
        )
    if attention_mask.is_floating_point() and not torch.compiler.is_compiling() and (attention_mask < 0).any():
        raise ValueError(
            "`attention_mask` of shape (B, S) must be 1 for tokens and 0 for padding, but it holds negative numbers. "
            "A mask that is added to the scores has the shape (B, 1, L, S)."
        )
    return attention_mask != 0


def _check_finished_mask(attention_mask: torch.Tensor, batch_size: int, length: int, num_slots: int) -> None:
    rows, heads, queries, slots = attention_mask.shape
    if rows not in (1, batch_size) or heads != 1 or queries not in (1, length) or slots != num_slots:
        raise ValueError(
            f"`attention_mask` with four dimensions must have the shape {(batch_size, 1, length, num_slots)}, one "
            f"column for each token of the cache and the input, but it has {tuple(attention_mask.shape)}. The first "
            "and the third may be 1; all heads share a mask."
        )


def _additive_mask(attention_mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask of any float dtype that is added to the scores, so that it hides the same keys in `dtype`.

    The lowest number of one dtype may be -inf in another, or not low enough, and a query whose keys are all hidden
    would give NaN or rounded scores: it sees everything, as with a bool mask.
    """
    attention_mask = attention_mask.float()
    is_hidden = attention_mask <= HIDDEN
    has_key = ~is_hidden.all(-1, keepdim=True)
    attention_mask = attention_mask.masked_fill(is_hidden, 0.0).to(dtype)
    return attention_mask.masked_fill_(is_hidden & has_key, torch.finfo(dtype).min)


def _flex_attention_mask(allowed: torch.BoolTensor) -> BlockMask:
    """A bool mask `(B, 1, L, S)` as flex_attention takes it, which skips tiles where nothing is allowed."""
    batch_size, _, length, num_slots = allowed.shape
    return create_block_mask(
        lambda b, h, q, kv: allowed[b, 0, q, kv], batch_size, None, length, num_slots, device=allowed.device
    )


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in plain operations, which also gives the weights.

    Args:
        query (`torch.Tensor` of shape `(B, H, L, D)`), key, value (`torch.Tensor` of shape `(B, H_kv, S, D)`): The
            heads.
        attention_mask (`torch.Tensor` of shape `(B, 1, L, S)`, *optional*): Added to the scores.

    Returns:
        The output `(B, L, H, D)` and the weights `(B, H, L, S)`.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def attention_function_of(config: D2FConfig, has_options: bool = True) -> Callable:
    """The function that `attn_implementation` names; one without options of its own where `has_options` is `False`."""
    function = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager_attention_forward)
    is_grouped = config.num_key_value_heads != config.num_attention_heads
    return _plain_sdpa if function is sdpa_attention_forward and not (has_options or is_grouped) else function


def _plain_sdpa(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
) -> tuple[torch.Tensor, None]:
    """What `sdpa_attention_forward` of transformers comes to without grouped heads and options, in less time."""
    output = nn.functional.scaled_dot_product_attention(query, key, value, attention_mask, dropout, scale=scaling)
    return output.transpose(1, 2), None


class D2FAttention(nn.Module):
    """Attention on projected heads. Where the projections are is the architecture's matter."""

    is_causal = False  # otherwise scaled_dot_product_attention is causal wherever it gets no mask

    def __init__(self, config: D2FConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = head_dim_of(config)
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        cache: Cache | None,
        attention_function: Callable | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rotates, puts keys and values into the cache, and attends.

        Args:
            query (`torch.Tensor` of shape `(B, L, H * D)`), key, value (`torch.Tensor` of shape `(B, L, H_kv * D)`):
                As they leave the projections.
            attention_function (`Callable`, *optional*): That of the configuration, where it is known already.

        Returns:
            The output `(B, L, H * D)`, and the weights `(B, H, L, S)` where the implementation gives them.
        """
        batch_size, length, width = query.shape
        heads = (batch_size, length, -1, self.head_dim)
        # Queries and keys together: in a small model the number of operations is what takes the time.
        rotated = rotate(torch.cat([query, key], dim=-1).view(heads), *position_embeddings).transpose(1, 2)
        num_heads = width // self.head_dim
        query, key = rotated.tensor_split((num_heads,), dim=1)  # [B, H, L, D]
        value = value.view(heads).transpose(1, 2)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        if has_packed_tokens(cache):
            query = cache.as_rows(query)
        if attention_function is None:
            attention_function = attention_function_of(self.config)
        output, weights = attention_function(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.head_dim**-0.5,
            **kwargs,
        )
        if has_packed_tokens(cache):
            output = cache.as_packed(output)
        return output.flatten(2), weights

"""What the block-diffusion architectures share: norm, rotary embedding, attention, masks, and both forwards.

An architecture brings its configuration, its layers and the names of its parameters: `modeling_d2f_llada.py`,
`modeling_d2f_dream.py`.
"""

# B batch, L sequence, S key/value slots, H heads, D head dimension, V vocabulary, M positions whose logits are wanted

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers.cache_utils import Cache
from transformers.modeling_outputs import ModelOutput
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .block_causal import block_causal_mask, positions_without_padding
from .cache_d2f import D2FCache
from .configuration_d2f import D2FConfig
from .generation_config_d2f import D2FGenerationConfig
from .generation_d2f import D2FGenerationMixin


@dataclass
class D2FModelOutput(ModelOutput):
    """What `D2FModel.forward` returns.

    Args:
        last_hidden_state (`torch.FloatTensor` of shape `(B, L, hidden_size)`): After the last norm.
        cache (`Cache`, *optional*): The cache that was passed, updated.
        hidden_states (`tuple[torch.FloatTensor]`, *optional*): Per layer, if `output_hidden_states`.
        attentions (`tuple[torch.FloatTensor]`, *optional*): Per layer, if `output_attentions` (eager attention only).
    """

    last_hidden_state: torch.FloatTensor | None = None
    cache: Cache | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
    attentions: tuple[torch.FloatTensor, ...] | None = None


@dataclass
class D2FBlockDiffusionOutput(ModelOutput):
    """What `D2FForBlockDiffusion.forward` returns.

    Args:
        loss (`torch.FloatTensor`, *optional*): Cross-entropy at the positions with a label.
        logits (`torch.FloatTensor` of shape `(B, L, V)`, or `(M, V)` for a mask as `logits_to_keep`): As they leave
            the head. With `config.right_shift_logits`, those at position i predict token i + 1.
        cache, hidden_states, attentions: As in [`D2FModelOutput`].
    """

    loss: torch.FloatTensor | None = None
    logits: torch.FloatTensor | None = None
    cache: Cache | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
    attentions: tuple[torch.FloatTensor, ...] | None = None


class D2FRMSNorm(nn.Module):
    """Root-mean-square norm with a weight, computed in float32."""

    def __init__(self, hidden_size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(hidden_states.dtype)


class D2FRotaryEmbedding(nn.Module):
    """Cosines and sines of the rotary embedding, in float32 as in the original (`rope_full_precision`)."""

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
        head_dim = config.hidden_size // config.num_attention_heads
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        return 1.0 / config.rope_parameters["rope_theta"] ** exponent, 1.0

    def _apply(self, fn, *args, **kwargs):
        # `model.to(torch.bfloat16)` moves the frequencies but does not round them: at position 1000 the rounding would
        # be a shift by several tokens. `to_empty` leaves those of a meta model uninitialised; no checkpoint has them.
        exact = self.inv_freq, self.original_inv_freq
        super()._apply(fn, *args, **kwargs)
        if exact[0].is_meta and not self.inv_freq.is_meta:
            inv_freq, _ = self.rope_init(self.config)
            exact = inv_freq, inv_freq.clone()
        elif self.inv_freq.dtype == torch.float32:
            return self
        self.inv_freq, self.original_inv_freq = (buffer.to(self.inv_freq.device) for buffer in exact)
        return self

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x: torch.Tensor, position_ids: torch.LongTensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].float() * self.inv_freq.float().to(x.device)  # [B, L, D / 2]
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Applies the rotary embedding to `x` of shape `(B, H, L, D)`; `cos` and `sin` are `(B, L, D)`."""
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat([-second, first], dim=-1)
    return (x * cos[:, None] + rotated * sin[:, None]).to(x.dtype)


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


def _flex_attention_mask(allowed: torch.BoolTensor) -> BlockMask:
    """A bool mask `(B, 1, L, S)` as flex_attention takes it, which skips tiles where nothing is allowed."""
    batch_size, _, length, num_slots = allowed.shape
    return create_block_mask(
        lambda b, h, q, kv: allowed[b, 0, q, kv], batch_size, None, length, num_slots, device=allowed.device
    )


class D2FAttention(nn.Module):
    """Attention on projected heads. Where the projections are is the architecture's matter."""

    is_causal = False  # otherwise scaled_dot_product_attention is causal wherever it gets no mask

    def __init__(self, config: D2FConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        cache: Cache | None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rotates, puts keys and values into the cache, and attends.

        Args:
            query (`torch.Tensor` of shape `(B, L, H * D)`), key, value (`torch.Tensor` of shape `(B, L, H_kv * D)`):
                As they leave the projections.

        Returns:
            The output `(B, L, H * D)`, and the weights `(B, H, L, S)` where the implementation gives them.
        """
        heads = (*query.shape[:2], -1, self.head_dim)
        query, key, value = (states.view(heads).transpose(1, 2) for states in (query, key, value))  # [B, H, L, D]
        query, key = rotate(query, *position_embeddings), rotate(key, *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        is_packed = isinstance(cache, D2FCache) and cache.is_packed
        if is_packed:
            query = cache.as_rows(query)
        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, weights = attention(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.head_dim**-0.5,
            **kwargs,
        )
        if is_packed:
            output = cache.as_packed(output)
        return output.flatten(2), weights


class D2FPreTrainedModel(PreTrainedModel):
    """What transformers has to know about all block-diffusion models."""

    config: D2FConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = False  # it has no place for a block-causal mask
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True


class D2FModel(D2FPreTrainedModel):
    """A transformer that gives hidden states, before the head. The architecture brings the layers."""

    rotary_emb: D2FRotaryEmbedding

    def get_layers(self) -> nn.ModuleList:
        """The layers, from first to last."""
        raise NotImplementedError

    def get_final_norm(self) -> nn.Module:
        """The norm behind the last layer."""
        raise NotImplementedError

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        prompt_lengths: torch.LongTensor | None = None,
        block_size: int | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> D2FModelOutput:
        """Hidden states of a sequence. For the arguments see [`D2FForBlockDiffusion.forward`]."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of `input_ids` and `inputs_embeds`.")
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        if position_ids is None:
            if attention_mask is not None and attention_mask.dim() == 2:
                position_ids = positions_without_padding(attention_mask)[:, -inputs_embeds.shape[1] :]
            else:
                start = cache.get_seq_length() if cache is not None else 0
                position_ids = (start + torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device))[None]
        attention_mask = self._full_mask(
            attention_mask, position_ids, inputs_embeds, cache, prompt_lengths, block_size
        )
        hidden_states = inputs_embeds
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        for layer in self.get_layers():
            hidden_states = layer(hidden_states, position_embeddings, attention_mask, cache, **kwargs)
        return D2FModelOutput(last_hidden_state=self.get_final_norm()(hidden_states), cache=cache)

    def _full_mask(
        self,
        attention_mask: torch.Tensor | None,
        position_ids: torch.LongTensor,
        inputs_embeds: torch.Tensor,
        cache: Cache | None,
        prompt_lengths: torch.LongTensor | None,
        block_size: int | None,
    ) -> torch.Tensor | BlockMask | None:
        """The `(B, 1, L, S)` mask in the form that the attention implementation takes; `None` if all see all."""
        batch_size, length = inputs_embeds.shape[:2]
        if attention_mask is not None and attention_mask.dim() not in (2, 4):
            raise ValueError(
                f"`attention_mask` must have shape (B, S) or (B, 1, L, S), got {tuple(attention_mask.shape)}."
            )
        if attention_mask is not None and attention_mask.dim() == 4:
            allowed = attention_mask if attention_mask.is_floating_point() else attention_mask.bool()
        else:
            num_slots = length if cache is None else cache.get_mask_sizes(length, layer_idx=0)[0]
            slot = torch.arange(num_slots, device=inputs_embeds.device)[None]
            if cache is not None and cache.is_compileable:  # preallocated: nobody sees what nothing was written to
                if attention_mask is None:
                    attention_mask = slot < cache.get_seq_length() + length
                else:
                    attention_mask = nn.functional.pad(attention_mask, (0, num_slots - attention_mask.shape[1]))
            if attention_mask is not None and attention_mask.shape[1] != num_slots:
                raise ValueError(
                    f"`attention_mask` must have a column for each token of the cache and the input, {num_slots} in "
                    f"all, but it has {attention_mask.shape[1]}."
                )
            if prompt_lengths is not None:
                block_size = self.config.block_size if block_size is None else block_size
                key_positions = slot if attention_mask is None else positions_without_padding(attention_mask)
                allowed = block_causal_mask(position_ids, prompt_lengths, block_size, key_positions, attention_mask)
            elif attention_mask is not None:
                allowed = attention_mask.bool()[:, None, None, :]
            else:
                return None
        if not (isinstance(cache, D2FCache) and cache.is_packed):  # then the mask is of the rows of the window
            allowed = allowed.expand(batch_size, 1, length, -1)
        lowest = torch.finfo(inputs_embeds.dtype).min
        if allowed.dtype != torch.bool:
            # The lowest number of float32 would be -inf in a narrower type, and a row of -inf gives NaN.
            return allowed.clamp(min=lowest).to(inputs_embeds.dtype)
        # A query without any key, such as one of a row that is all padding, gives NaN in some kernels. Nobody reads
        # what it gives, so it may see everything.
        allowed = allowed | ~allowed.any(-1, keepdim=True)
        if self.config._attn_implementation == "flex_attention":
            return _flex_attention_mask(allowed)
        if self.config._attn_implementation == "eager":
            return torch.zeros_like(allowed, dtype=inputs_embeds.dtype).masked_fill(~allowed, lowest)
        return allowed


class D2FForBlockDiffusion(D2FPreTrainedModel, D2FGenerationMixin):
    """A transformer with its head and D2F decoding: `model.generate(**inputs)`."""

    generation_config_class = D2FGenerationConfig  # here, because the base class has the attribute too
    model: D2FModel

    def __init__(self, config: D2FConfig):
        super().__init__(config)
        # Labels stand at the masked positions; whether logits are one position ahead of them is the model's matter.
        self.loss_type = "ForCausalLM" if config.right_shift_logits else "ForMaskedLM"

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        prompt_lengths: torch.LongTensor | None = None,
        block_size: int | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor | tuple[torch.Tensor, torch.Tensor] = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> D2FBlockDiffusionOutput:
        """Logits of a sequence: bidirectional (the teacher's view), or block-causal if `prompt_lengths` are given.

        Args:
            input_ids (`torch.LongTensor` of shape `(B, L)`): Token ids, with `mask_token_id` where a token is masked.
            attention_mask (`torch.Tensor`, *optional*): `(B, L)`, 0 for padding (at either end; with a cache `(B,
                S)`), which nobody sees. Or a finished mask `(B, 1, L, S)`: bool (`True`: may attend) or float (added
                to the scores), which then decides alone who sees whom.
            position_ids (`torch.LongTensor` of shape `(B, L)`, *optional*): Positions; those without padding by
                default.
            cache (`Cache`, *optional*): Keys and values of earlier tokens; rows are stored without holes.
            inputs_embeds (`torch.FloatTensor` of shape `(B, L, hidden_size)`, *optional*): Instead of `input_ids`.
            prompt_lengths (`torch.LongTensor` of shape `(B,)`, *optional*): Prompt tokens of each row, padding left
                out. Makes the pass block-causal: the prompt is block 0, blocks of `block_size` tokens follow it.
            block_size (`int`, *optional*): Tokens per response block; `config.block_size` by default.
            labels (`torch.LongTensor` of shape `(B, L)`, *optional*): The true tokens at the positions that the loss
                is about (the masked ones), -100 elsewhere.
            use_cache (`bool`, *optional*): Of no effect: a cache is used if it is passed.
            logits_to_keep (`int`, `torch.Tensor` or a pair of them): The last so many positions (0: all), a vector of
                positions, a bool mask `(B, L)`, which gives logits `(M, V)` in row-major order, or rows and positions,
                `(M,)` each, which give `(M, V)` too and make no accelerator wait.

        Returns:
            [`D2FBlockDiffusionOutput`]
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            prompt_lengths=prompt_lengths,
            block_size=block_size,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        if isinstance(logits_to_keep, tuple) or (
            isinstance(logits_to_keep, torch.Tensor) and logits_to_keep.dtype == torch.bool
        ):
            hidden_states = hidden_states[logits_to_keep]
        elif isinstance(logits_to_keep, torch.Tensor):
            hidden_states = hidden_states[:, logits_to_keep]
        elif logits_to_keep:
            hidden_states = hidden_states[:, -logits_to_keep:]
        head: Any = self.get_output_embeddings()
        logits = head(hidden_states)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return D2FBlockDiffusionOutput(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def save_pretrained(self, *args, **kwargs):
        # Both auto classes give the model with `generate`. Written anew, so that a model that came from the Hub does
        # not keep references to the repository that it came from.
        model_class = f"{type(self).__module__.rpartition('.')[2]}.{type(self).__name__}"
        config_class = f"{type(self.config).__module__.rpartition('.')[2]}.{type(self.config).__name__}"
        self.config.auto_map = {
            "AutoConfig": config_class,
            "AutoModel": model_class,
            "AutoModelForCausalLM": model_class,
        }
        return super().save_pretrained(*args, **kwargs)

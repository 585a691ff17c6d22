"""The transformer layer of Llama, Qwen2 and Qwen3, with the parameter names that these checkpoints have.

What the architectures have different is in the properties of their configurations: `has_attention_bias`,
`has_output_bias`, `has_mlp_bias` and `has_query_key_norm`.
"""

# B batch, L sequence, H heads, D head dimension

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs

from .attention_d2f import D2FAttention, D2FRotaryEmbedding
from .configuration_d2f import D2FDecoderConfig
from .modeling_d2f import D2FModel, D2FRMSNorm


class D2FProjectedAttention(D2FAttention):
    """Grouped-query attention with its projections, and norms of queries and keys where the configuration says so."""

    def __init__(self, config: D2FDecoderConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        query_size = config.num_attention_heads * self.head_dim
        key_value_size = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.has_attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_value_size, bias=config.has_attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_value_size, bias=config.has_attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.has_output_bias)
        if config.has_query_key_norm:  # of each head, before the rotary embedding
            self.q_norm = D2FRMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = D2FRMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query, key, value = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        if self.config.has_query_key_norm:
            heads = (*query.shape[:2], -1, self.head_dim)
            query, key = self.q_norm(query.view(heads)).flatten(2), self.k_norm(key.view(heads)).flatten(2)
        output, weights = self.attend(query, key, value, position_embeddings, attention_mask, cache, **kwargs)
        return self.o_proj(output), weights


class D2FGatedMLP(nn.Module):
    """The gated feed-forward layer."""

    def __init__(self, config: D2FDecoderConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.has_mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.has_mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.has_mlp_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class D2FDecoderLayer(GradientCheckpointingLayer):
    """One transformer layer. Each architecture has its own subclass, by whose name FSDP wraps."""

    attention_class: type[D2FProjectedAttention] = D2FProjectedAttention

    def __init__(self, config: D2FDecoderConfig, layer_idx: int):
        super().__init__()
        self.self_attn = self.attention_class(config, layer_idx)
        self.mlp = D2FGatedMLP(config)
        self.input_layernorm = D2FRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = D2FRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        attended, _ = self.self_attn(
            self.input_layernorm(hidden_states), position_embeddings, attention_mask, cache, **kwargs
        )
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class D2FDecoderModel(D2FModel):
    """A transformer of these layers: `embed_tokens`, `layers`, `norm`."""

    layer_class: type[D2FDecoderLayer]

    def __init__(self, config: D2FDecoderConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([self.layer_class(config, i) for i in range(config.num_hidden_layers)])
        self.norm = D2FRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = D2FRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    def get_layers(self) -> nn.ModuleList:
        return self.layers

    def get_final_norm(self) -> D2FRMSNorm:
        return self.norm

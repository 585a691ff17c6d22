"""The transformer layer of Llama, Qwen2 and Qwen3, with the parameter names that these checkpoints have.

What the architectures have different is in the properties of their configurations: `has_attention_bias`,
`has_output_bias`, `has_mlp_bias` and `has_query_key_norm`. With `config.drafter` each layer has two adapters more in
its attention and two in its feed-forward layer, which act at the masks of a draft.
"""

# B batch, L sequence, H heads, D head dimension

from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs

from .attention_d2f import D2FAttention, D2FRotaryEmbedding
from .configuration_d2f import D2FDecoderConfig, check_drafter
from .draft_adapter import DEFAULT_RANK, DraftAdapter
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
        self.draft_input: DraftAdapter | None = None
        self.draft_output: DraftAdapter | None = None
        if config.drafter is not None:
            self.add_drafter(config.drafter)

    def add_drafter(self, drafter: dict[str, Any]) -> None:
        width, query_size = self.q_proj.in_features, self.q_proj.out_features
        outputs = (query_size, self.k_proj.out_features, self.v_proj.out_features)
        self.draft_input = DraftAdapter(drafter, width, outputs)
        self.draft_output = DraftAdapter(drafter, query_size, (width,))

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        draft_gate: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query, key, value = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        if draft_gate is not None and self.draft_input is not None:
            query, key, value = self.draft_input((query, key, value), hidden_states, draft_gate)
        if self.config.has_query_key_norm:
            heads = (*query.shape[:2], -1, self.head_dim)
            query, key = self.q_norm(query.view(heads)).flatten(2), self.k_norm(key.view(heads)).flatten(2)
        x, weights = self.attend(query, key, value, position_embeddings, attention_mask, cache, **kwargs)
        output = self.o_proj(x)
        if draft_gate is not None and self.draft_output is not None:
            (output,) = self.draft_output((output,), x, draft_gate)
        return output, weights


class D2FGatedMLP(nn.Module):
    """The gated feed-forward layer."""

    def __init__(self, config: D2FDecoderConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.has_mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.has_mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.has_mlp_bias)
        self.draft_input: DraftAdapter | None = None
        self.draft_output: DraftAdapter | None = None
        if config.drafter is not None:
            self.add_drafter(config.drafter)

    def add_drafter(self, drafter: dict[str, Any]) -> None:
        width, inner = self.gate_proj.in_features, self.gate_proj.out_features
        self.draft_input = DraftAdapter(drafter, width, (inner, inner))
        self.draft_output = DraftAdapter(drafter, inner, (width,))

    def forward(self, x: torch.Tensor, draft_gate: torch.Tensor | None = None) -> torch.Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if draft_gate is not None and self.draft_input is not None:
            gate, up = self.draft_input((gate, up), x, draft_gate)
        x = nn.functional.silu(gate) * up
        output = self.down_proj(x)
        if draft_gate is not None and self.draft_output is not None:
            (output,) = self.draft_output((output,), x, draft_gate)
        return output


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
        draft_gate: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        attended, _ = self.self_attn(
            self.input_layernorm(hidden_states), position_embeddings, attention_mask, cache, draft_gate, **kwargs
        )
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states), draft_gate)


class D2FDecoderModel(D2FModel):
    """A transformer of these layers: `embed_tokens`, `layers`, `norm`."""

    layer_class: type[D2FDecoderLayer]

    def __init__(self, config: D2FDecoderConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([self.layer_class(config, i) for i in range(config.num_hidden_layers)])
        self.norm = D2FRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = D2FRotaryEmbedding(config)
        if config.drafter is not None:
            self.draft_embedding = nn.Parameter(torch.zeros(config.hidden_size))
        self.gradient_checkpointing = False
        self.post_init()

    def add_drafter(self, drafter: dict[str, Any] | None = None) -> None:
        """Gives the model a new drafter, whose terms are zero: see `drafter` in [`D2FDecoderConfig`].

        Its embedding is that of the mask token, and its parameters are on the device and of the dtype of each layer.

        Raises:
            ValueError: if there is one already, or for a `drafter` that is none.
        """
        drafter = {"rank": DEFAULT_RANK} if drafter is None else drafter
        check_drafter(drafter)
        if self.config.drafter is not None:
            raise ValueError(
                f"`drafter` must be None for a model that has one already, got {drafter!r}. Leave it out to go on "
                "with the one that is there."
            )
        self.config.drafter = dict(drafter)
        for layer in self.layers:
            for module in (layer.self_attn, layer.mlp):
                module.add_drafter(drafter)
                for adapter in (module.draft_input, module.draft_output):
                    adapter.to(next(module.parameters()))
        embedding = self.embed_tokens.weight.detach()
        mask_token_id = self.config.mask_token_id
        mask = embedding.mean(0) if mask_token_id is None else embedding[mask_token_id]
        self.draft_embedding = nn.Parameter(mask.clone())

    def draft_inputs(
        self, inputs_embeds: torch.Tensor, is_drafted: torch.BoolTensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """With a drafter, its embedding at the masks of a draft, and the gate of its adapters."""
        if is_drafted is None or self.config.drafter is None:
            return inputs_embeds, None
        gate = is_drafted[..., None]
        return torch.where(gate, self.draft_embedding.to(inputs_embeds.dtype), inputs_embeds), gate.to(inputs_embeds)

    def get_layers(self) -> nn.ModuleList:
        return self.layers

    def get_final_norm(self) -> D2FRMSNorm:
        return self.norm

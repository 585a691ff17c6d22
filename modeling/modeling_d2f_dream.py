"""Dream with block-causal attention: Qwen2's layers, with the parameter names of the original checkpoints."""

# B batch, L sequence, H heads, D head dimension

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.output_capturing import OutputRecorder

from .attention_d2f import D2FAttention, D2FRotaryEmbedding
from .configuration_d2f_dream import D2FDreamConfig
from .modeling_d2f import D2FForBlockDiffusion, D2FModel, D2FPreTrainedModel, D2FRMSNorm


class D2FDreamAttention(D2FAttention):
    """Grouped-query attention whose query, key and value projections have biases."""

    def __init__(self, config: D2FDreamConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        key_value_size = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=True)
        self.k_proj = nn.Linear(config.hidden_size, key_value_size, bias=True)
        self.v_proj = nn.Linear(config.hidden_size, key_value_size, bias=True)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        projected = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        output, weights = self.attend(*projected, position_embeddings, attention_mask, cache, **kwargs)
        return self.o_proj(output), weights


class D2FDreamMLP(nn.Module):
    """The gated feed-forward layer."""

    def __init__(self, config: D2FDreamConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class D2FDreamDecoderLayer(GradientCheckpointingLayer):
    """One transformer layer."""

    def __init__(self, config: D2FDreamConfig, layer_idx: int):
        super().__init__()
        self.self_attn = D2FDreamAttention(config, layer_idx)
        self.mlp = D2FDreamMLP(config)
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


class D2FDreamPreTrainedModel(D2FPreTrainedModel):
    config: D2FDreamConfig
    config_class = D2FDreamConfig
    _no_split_modules = ["D2FDreamDecoderLayer"]
    _can_record_outputs = {
        "hidden_states": D2FDreamDecoderLayer,
        "attentions": OutputRecorder(D2FDreamAttention, index=1),
    }


class D2FDreamModel(D2FDreamPreTrainedModel, D2FModel):
    """The Dream transformer: hidden states, before the head."""

    def __init__(self, config: D2FDreamConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([D2FDreamDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = D2FRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = D2FRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    def get_layers(self) -> nn.ModuleList:
        return self.layers

    def get_final_norm(self) -> D2FRMSNorm:
        return self.norm


class D2FDreamForBlockDiffusion(D2FDreamPreTrainedModel, D2FForBlockDiffusion):
    """Dream with its head and D2F decoding: `model.generate(**inputs)`. `AutoModelForCausalLM` gives this class."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: D2FDreamConfig):
        super().__init__(config)
        self.model = D2FDreamModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


D2FDreamModel.register_for_auto_class("AutoModel")
D2FDreamForBlockDiffusion.register_for_auto_class("AutoModelForCausalLM")

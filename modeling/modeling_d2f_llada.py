"""LLaDA with block-causal attention: the layers and parameter names of the original checkpoints."""

# B batch, L sequence, H heads, D head dimension

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.output_capturing import OutputRecorder

from .attention_d2f import D2FAttention, D2FRotaryEmbedding
from .configuration_d2f_llada import D2FLLaDAConfig
from .modeling_d2f import D2FForBlockDiffusion, D2FModel, D2FPreTrainedModel, D2FRMSNorm


class D2FLLaDAAttention(D2FAttention):
    """Has no parameters: in LLaDA the projections belong to the block."""

    forward = D2FAttention.attend


class D2FLLaDABlock(GradientCheckpointingLayer):
    """One transformer layer, flat as in the original: `blocks.0.q_proj`, not `layers.0.self_attn.q_proj`."""

    def __init__(self, config: D2FLLaDAConfig, layer_idx: int):
        super().__init__()
        key_value_size = config.n_kv_heads * (config.d_model // config.n_heads)
        self.attn_norm = D2FRMSNorm(config.d_model, config.rms_norm_eps)
        self.q_proj = nn.Linear(config.d_model, config.d_model, bias=False)
        self.k_proj = nn.Linear(config.d_model, key_value_size, bias=False)
        self.v_proj = nn.Linear(config.d_model, key_value_size, bias=False)
        self.attention = D2FLLaDAAttention(config, layer_idx)
        self.attn_out = nn.Linear(config.d_model, config.d_model, bias=False)
        self.ff_norm = D2FRMSNorm(config.d_model, config.rms_norm_eps)
        self.ff_proj = nn.Linear(config.d_model, config.mlp_hidden_size, bias=False)
        self.up_proj = nn.Linear(config.d_model, config.mlp_hidden_size, bias=False)
        self.ff_out = nn.Linear(config.mlp_hidden_size, config.d_model, bias=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        x = self.attn_norm(hidden_states)
        attended, _ = self.attention(
            self.q_proj(x), self.k_proj(x), self.v_proj(x), position_embeddings, attention_mask, cache, **kwargs
        )
        hidden_states = hidden_states + self.attn_out(attended)
        x = self.ff_norm(hidden_states)
        return hidden_states + self.ff_out(nn.functional.silu(self.ff_proj(x)) * self.up_proj(x))


class D2FLLaDAPreTrainedModel(D2FPreTrainedModel):
    config: D2FLLaDAConfig
    config_class = D2FLLaDAConfig
    _no_split_modules = ["D2FLLaDABlock"]
    _can_record_outputs = {
        "hidden_states": D2FLLaDABlock,
        "attentions": OutputRecorder(D2FLLaDAAttention, index=1),
    }

    def get_input_embeddings(self) -> nn.Embedding:
        return self.base_model.transformer.wte

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.base_model.transformer.wte = value


class D2FLLaDAModel(D2FLLaDAPreTrainedModel, D2FModel):
    """The LLaDA transformer: hidden states, before the head."""

    _tied_weights_keys = {"transformer.ff_out.weight": "transformer.wte.weight"}

    def __init__(self, config: D2FLLaDAConfig):
        super().__init__(config)
        # The head is a member here because that is where the original checkpoints keep it.
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.d_model),
                "blocks": nn.ModuleList([D2FLLaDABlock(config, i) for i in range(config.n_layers)]),
                "ln_f": D2FRMSNorm(config.d_model, config.rms_norm_eps),
                "ff_out": nn.Linear(config.d_model, config.vocab_size, bias=False),
            }
        )
        self.rotary_emb = D2FRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    def get_layers(self) -> nn.ModuleList:
        return self.transformer["blocks"]

    def get_final_norm(self) -> D2FRMSNorm:
        return self.transformer["ln_f"]


class D2FLLaDAForBlockDiffusion(D2FLLaDAPreTrainedModel, D2FForBlockDiffusion):
    """LLaDA with its head and D2F decoding: `model.generate(**inputs)`. `AutoModelForCausalLM` gives this class."""

    _tied_weights_keys = {"model.transformer.ff_out.weight": "model.transformer.wte.weight"}
    _tp_plan = {"model.transformer.ff_out": "colwise_gather_output"}

    def __init__(self, config: D2FLLaDAConfig):
        super().__init__(config)
        self.model = D2FLLaDAModel(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        return self.model.transformer.ff_out

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.model.transformer.ff_out = new_embeddings


D2FLLaDAModel.register_for_auto_class("AutoModel")
D2FLLaDAForBlockDiffusion.register_for_auto_class("AutoModelForCausalLM")

"""Qwen3 and SDAR with block-causal attention, with the parameter names of the original checkpoints."""

from torch import nn
from transformers.utils.output_capturing import OutputRecorder

from .configuration_d2f_qwen3 import D2FQwen3Config
from .decoder_layer import D2FDecoderLayer, D2FDecoderModel, D2FProjectedAttention
from .modeling_d2f import D2FForBlockDiffusion, D2FPreTrainedModel


class D2FQwen3Attention(D2FProjectedAttention):
    """Norms the queries and keys of each head."""


class D2FQwen3DecoderLayer(D2FDecoderLayer):
    """One transformer layer."""

    attention_class = D2FQwen3Attention


class D2FQwen3PreTrainedModel(D2FPreTrainedModel):
    config: D2FQwen3Config
    config_class = D2FQwen3Config
    _no_split_modules = ["D2FQwen3DecoderLayer"]
    _can_record_outputs = {
        "hidden_states": D2FQwen3DecoderLayer,
        "attentions": OutputRecorder(D2FQwen3Attention, index=1),
    }


class D2FQwen3Model(D2FQwen3PreTrainedModel, D2FDecoderModel):
    """The Qwen3 transformer: hidden states, before the head."""

    layer_class = D2FQwen3DecoderLayer


class D2FQwen3ForBlockDiffusion(D2FQwen3PreTrainedModel, D2FForBlockDiffusion):
    """Qwen3 with its head and D2F decoding: `model.generate(**inputs)`. `AutoModelForCausalLM` gives this class."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: D2FQwen3Config):
        super().__init__(config)
        self.model = D2FQwen3Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


D2FQwen3Model.register_for_auto_class("AutoModel")
D2FQwen3ForBlockDiffusion.register_for_auto_class("AutoModelForCausalLM")

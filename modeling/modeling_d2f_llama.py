"""Llama and Mistral with block-causal attention, with the parameter names of the original checkpoints."""

from torch import nn
from transformers.utils.output_capturing import OutputRecorder

from .configuration_d2f_llama import D2FLlamaConfig
from .decoder_layer import D2FDecoderLayer, D2FDecoderModel, D2FProjectedAttention
from .modeling_d2f import D2FForBlockDiffusion, D2FPreTrainedModel


class D2FLlamaAttention(D2FProjectedAttention):
    """Without biases unless the configuration says so."""


class D2FLlamaDecoderLayer(D2FDecoderLayer):
    """One transformer layer."""

    attention_class = D2FLlamaAttention


class D2FLlamaPreTrainedModel(D2FPreTrainedModel):
    config: D2FLlamaConfig
    config_class = D2FLlamaConfig
    _no_split_modules = ["D2FLlamaDecoderLayer"]
    _can_record_outputs = {
        "hidden_states": D2FLlamaDecoderLayer,
        "attentions": OutputRecorder(D2FLlamaAttention, index=1),
    }


class D2FLlamaModel(D2FLlamaPreTrainedModel, D2FDecoderModel):
    """The Llama transformer: hidden states, before the head."""

    layer_class = D2FLlamaDecoderLayer


class D2FLlamaForBlockDiffusion(D2FLlamaPreTrainedModel, D2FForBlockDiffusion):
    """Llama with its head and D2F decoding: `model.generate(**inputs)`. `AutoModelForCausalLM` gives this class."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: D2FLlamaConfig):
        super().__init__(config)
        self.model = D2FLlamaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


D2FLlamaModel.register_for_auto_class("AutoModel")
D2FLlamaForBlockDiffusion.register_for_auto_class("AutoModelForCausalLM")

"""Dream and Qwen2 with block-causal attention, with the parameter names of the original checkpoints."""

from torch import nn
from transformers.utils.output_capturing import OutputRecorder

from .configuration_d2f_dream import D2FDreamConfig
from .decoder_layer import D2FDecoderLayer, D2FDecoderModel, D2FProjectedAttention
from .modeling_d2f import D2FForBlockDiffusion, D2FPreTrainedModel


class D2FDreamAttention(D2FProjectedAttention):
    """Its query, key and value projections have biases."""


class D2FDreamDecoderLayer(D2FDecoderLayer):
    """One transformer layer."""

    attention_class = D2FDreamAttention


class D2FDreamPreTrainedModel(D2FPreTrainedModel):
    config: D2FDreamConfig
    config_class = D2FDreamConfig
    _no_split_modules = ["D2FDreamDecoderLayer"]
    _can_record_outputs = {
        "hidden_states": D2FDreamDecoderLayer,
        "attentions": OutputRecorder(D2FDreamAttention, index=1),
    }


class D2FDreamModel(D2FDreamPreTrainedModel, D2FDecoderModel):
    """The Dream transformer: hidden states, before the head."""

    layer_class = D2FDreamDecoderLayer


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

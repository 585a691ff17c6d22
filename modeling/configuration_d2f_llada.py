"""Configuration of the LLaDA architecture, with the keys of the original checkpoints."""

from transformers.configuration_utils import strict
from transformers.modeling_rope_utils import RopeParameters

from .configuration_d2f import D2FConfig


@strict
class D2FLLaDAConfig(D2FConfig):
    """Configuration of a [`D2FLLaDAForBlockDiffusion`]. Takes the `config.json` of an original LLaDA as it is.

    Args:
        vocab_size (`int`): Rows of the embedding. The original `embedding_size`, where given, takes precedence.
        d_model (`int`): Width of the hidden states (`hidden_size`).
        n_heads (`int`): Attention heads (`num_attention_heads`).
        n_layers (`int`): Layers (`num_hidden_layers`).
        n_kv_heads (`int`, *optional*): Key/value heads; `n_heads` if not given (`num_key_value_heads`).
        mlp_hidden_size (`int`, *optional*): Width of the feed-forward layers (`intermediate_size`); `mlp_ratio *
            d_model` if not given.
        mlp_ratio (`int`): See `mlp_hidden_size`.
        max_sequence_length (`int`): Longest prompt and response together (`max_position_embeddings`).
        rope_theta (`float`, *optional*): Base of the rotary embedding; kept in `rope_parameters`.
        rms_norm_eps (`float`): Added to the variance in the norms.
        attention_dropout (`float`): Dropout on the attention weights in training.
        weight_tying (`bool`): The head is the embedding (`tie_word_embeddings`).
        initializer_range (`float`): Standard deviation of new weights (the original `init_std`).
        right_shift_logits, block_size, mask_token_id, ...: See [`D2FConfig`].

    Raises:
        ValueError: for an option of the original configuration that is not implemented, such as `alibi`.
    """

    model_type = "d2f_llada"
    attribute_map = {
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
        "num_key_value_heads": "n_kv_heads",
        "intermediate_size": "mlp_hidden_size",
        "max_position_embeddings": "max_sequence_length",
        "tie_word_embeddings": "weight_tying",
        "embedding_size": "vocab_size",
        "init_std": "initializer_range",
    }
    attention_projections = ("q_proj", "k_proj", "v_proj", "attn_out")
    fixed_options = {  # all released LLaDA checkpoints have these values
        "block_type": "llama",
        "block_group_size": 1,
        "activation_type": "silu",
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "bias_for_layer_norm": False,
        "include_bias": False,
        "include_qkv_bias": False,
        "rope": True,
        "alibi": False,
        "attention_layer_norm": False,
        "input_emb_norm": False,
        "scale_logits": False,
        "embedding_dropout": 0.0,
        "residual_dropout": 0.0,
        "multi_query_attention": False,
        "head_dim": None,  # always d_model / n_heads
    }
    ignored_options = (  # about training, other code, or the default of what is fixed
        "alibi_bias_max",
        "attention_layer_norm_with_affine",
        "flash_attention",
        "init_cutoff_factor",
        "init_device",
        "init_fn",
        "precision",
        "rope_full_precision",
    )
    base_model_tp_plan = {
        "transformer.blocks.*.q_proj": "colwise",
        "transformer.blocks.*.k_proj": "colwise",
        "transformer.blocks.*.v_proj": "colwise",
        "transformer.blocks.*.attn_out": "rowwise",
        "transformer.blocks.*.ff_proj": "colwise",
        "transformer.blocks.*.up_proj": "colwise",
        "transformer.blocks.*.ff_out": "rowwise",
    }
    base_model_fsdp_plan = {
        "transformer.wte": "free_full_weight",
        "transformer.blocks.*": "free_full_weight",
        "transformer.ln_f": "keep_full_weight",
    }

    vocab_size: int = 126464
    d_model: int = 4096
    n_heads: int = 32
    n_layers: int = 32
    n_kv_heads: int | None = None
    mlp_hidden_size: int | None = None
    mlp_ratio: int = 4
    max_sequence_length: int = 4096
    rope_parameters: RopeParameters | dict | None = None
    rms_norm_eps: float | int = 1e-5
    attention_dropout: float | int = 0.0
    weight_tying: bool = False
    initializer_range: float | int = 0.02
    default_theta = 500000.0

    def __post_init__(self, **kwargs):
        for usual, original in self.attribute_map.items():  # before the defaults that follow from them
            value = kwargs.pop(usual, None)
            if value is not None:
                setattr(self, original, value)
        if self.mlp_hidden_size is None:
            self.mlp_hidden_size = self.mlp_ratio * self.d_model
        super().__post_init__(**kwargs)


D2FLLaDAConfig.register_for_auto_class()

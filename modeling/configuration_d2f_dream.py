"""Configuration of the Dream architecture (Qwen2 with a mask token), with the keys of the original checkpoints."""

from transformers.configuration_utils import strict
from transformers.modeling_rope_utils import RopeParameters

from .configuration_d2f import D2FConfig


@strict
class D2FDreamConfig(D2FConfig):
    """Configuration of a [`D2FDreamForBlockDiffusion`]. Takes the `config.json` of an original Dream, Dream-Coder or
    DiffuCoder as it is.

    Args:
        vocab_size (`int`): Rows of the embedding.
        hidden_size (`int`): Width of the hidden states.
        intermediate_size (`int`): Width of the feed-forward layers.
        num_hidden_layers (`int`): Layers.
        num_attention_heads (`int`): Attention heads.
        num_key_value_heads (`int`, *optional*): Key/value heads; `num_attention_heads` if not given.
        max_position_embeddings (`int`): Longest prompt and response together.
        rope_theta (`float`, *optional*): Base of the rotary embedding; kept in `rope_parameters`.
        rms_norm_eps (`float`): Added to the variance in the norms.
        attention_dropout (`float`): Dropout on the attention weights in training.
        tie_word_embeddings (`bool`): The head is the embedding.
        initializer_range (`float`): Standard deviation of new weights.
        right_shift_logits (`bool`): `True`: logits at position i predict token i + 1.
        block_size, mask_token_id, ...: See [`D2FConfig`].

    Raises:
        ValueError: for an option of the original configuration that is not implemented: a sliding window, or another
            activation than SiLU.
    """

    model_type = "d2f_dream"
    attention_projections = ("q_proj", "k_proj", "v_proj", "o_proj")
    fixed_options = {"use_sliding_window": False, "hidden_act": "silu"}  # as in all released Dream checkpoints
    ignored_options = ("sliding_window", "max_window_layers", "layer_types")  # about a sliding window
    base_model_tp_plan = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    base_model_fsdp_plan = {
        "embed_tokens": "free_full_weight",
        "layers.*": "free_full_weight",
        "norm": "keep_full_weight",
    }

    vocab_size: int = 152064
    hidden_size: int = 3584
    intermediate_size: int = 18944
    num_hidden_layers: int = 28
    num_attention_heads: int = 28
    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 131072
    rope_parameters: RopeParameters | dict | None = None
    rms_norm_eps: float | int = 1e-6
    attention_dropout: float | int = 0.0
    tie_word_embeddings: bool = False
    initializer_range: float | int = 0.02
    right_shift_logits: bool = True
    default_theta = 1000000.0


D2FDreamConfig.register_for_auto_class()

"""Configuration of the Qwen3 architecture, with the keys of the original checkpoints."""

from transformers.configuration_utils import strict

from .configuration_d2f import D2FDecoderConfig


@strict
class D2FQwen3Config(D2FDecoderConfig):
    """Configuration of a [`D2FQwen3ForBlockDiffusion`]. Takes the `config.json` of an original Qwen3 or SDAR as it is.

    Args:
        head_dim (`int`, *optional*): Width of a head; 128 in all released Qwen3.
        attention_bias (`bool`): The projections of attention have biases.
        vocab_size, hidden_size, ...: See [`D2FDecoderConfig`].

    Raises:
        ValueError: for an option of the original configuration that is not implemented: a sliding window, rotary
            positions on a part of each head, or another activation than SiLU.
    """

    model_type = "d2f_qwen3"
    default_theta = 1000000.0
    has_query_key_norm = True

    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 22016
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 32
    head_dim: int | None = 128
    max_position_embeddings: int = 32768
    attention_bias: bool = False

    @property
    def has_attention_bias(self) -> bool:
        return self.attention_bias

    @property
    def has_output_bias(self) -> bool:
        return self.attention_bias


D2FQwen3Config.register_for_auto_class()

"""Configuration of the Dream architecture (Qwen2 with a mask token), with the keys of the original checkpoints."""

from transformers.configuration_utils import strict

from .configuration_d2f import D2FDecoderConfig


@strict
class D2FDreamConfig(D2FDecoderConfig):
    """Configuration of a [`D2FDreamForBlockDiffusion`]. Takes the `config.json` of an original Dream, Dream-Coder,
    DiffuCoder, Qwen2, Qwen2.5 or Fast-dLLM v2 as it is.

    Args:
        vocab_size, hidden_size, ...: See [`D2FDecoderConfig`].

    Raises:
        ValueError: for an option of the original configuration that is not implemented: a sliding window, rotary
            positions on a part of each head, or another activation than SiLU.
    """

    model_type = "d2f_dream"
    default_theta = 1000000.0
    has_attention_bias = True

    vocab_size: int = 152064
    hidden_size: int = 3584
    intermediate_size: int = 18944
    num_hidden_layers: int = 28
    num_attention_heads: int = 28
    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 131072


D2FDreamConfig.register_for_auto_class()

"""Configuration of the Llama architecture, with the keys of the original checkpoints."""

from transformers.configuration_utils import strict

from .configuration_d2f import D2FDecoderConfig


@strict
class D2FLlamaConfig(D2FDecoderConfig):
    """Configuration of a [`D2FLlamaForBlockDiffusion`]. Takes the `config.json` of an original Llama 2 or 3, SmolLM2,
    or Mistral without a sliding window as it is.

    Args:
        attention_bias (`bool`): The projections of attention have biases.
        mlp_bias (`bool`): Those of the feed-forward layers have.
        vocab_size, hidden_size, ...: See [`D2FDecoderConfig`].

    Raises:
        ValueError: for an option of the original configuration that is not implemented: a sliding window, rotary
            positions on a part of each head, or another activation than SiLU.
    """

    model_type = "d2f_llama"
    default_theta = 10000.0
    # Mistral has no `use_sliding_window`: a size is in use.
    fixed_options = {**D2FDecoderConfig.fixed_options, "sliding_window": None}
    ignored_options = tuple(name for name in D2FDecoderConfig.ignored_options if name != "sliding_window")

    attention_bias: bool = False
    mlp_bias: bool = False

    @property
    def has_attention_bias(self) -> bool:
        return self.attention_bias

    @property
    def has_output_bias(self) -> bool:
        return self.attention_bias

    @property
    def has_mlp_bias(self) -> bool:
        return self.mlp_bias


D2FLlamaConfig.register_for_auto_class()

"""What the configurations of all block-diffusion models say."""

from transformers.configuration_utils import PreTrainedConfig, strict


@strict
class D2FConfig(PreTrainedConfig):
    """The fields that block-causal attention and decoding need, whatever the architecture.

    Args:
        right_shift_logits (`bool`): Logits at position i predict token i + 1, as in Dream and in models that start
            from an autoregressive one. LLaDA's predict token i.
        block_size (`int`): Tokens per response block that the model was made for: what `generate` uses unless told
            otherwise.
        mask_token_id (`int`, *optional*): The token that stands for "not decoded yet".
        bos_token_id, eos_token_id, pad_token_id (`int`, *optional*): As everywhere in transformers.

    Raises:
        ValueError: for values that contradict each other, and for an option of the original configuration that is not
            implemented.
    """

    keys_to_ignore_at_inference = ["cache"]
    # The architecture says what the paper's LoRA adapters are on; which options of the original configuration change
    # the computation, with the only value that is implemented; and which ones are of no use here.
    attention_projections = ()
    fixed_options = {}
    ignored_options = ()

    right_shift_logits: bool = False
    block_size: int = 32
    mask_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    use_cache: bool = True

    def __post_init__(self, **kwargs):
        for option, value in self.fixed_options.items():
            given = kwargs.pop(option, None)
            if given is not None and given != value:
                raise ValueError(
                    f"`{option}` must be {value!r}, but the configuration says {given!r}. {type(self).__name__} has "
                    "the options of the released checkpoints only; such a model needs the code it was trained with."
                )
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        super().__post_init__(**kwargs)
        for option in self.ignored_options:
            self.__dict__.pop(option, None)

    def validate_architecture(self):
        """Part of the `@strict` validation of the base class."""
        for name, divisor in (
            ("hidden_size", "num_attention_heads"),
            ("num_attention_heads", "num_key_value_heads"),
        ):
            # Attributes by their usual names, messages by the names that the config file has.
            value, by = getattr(self, name), getattr(self, divisor)
            if value % by != 0:
                name, divisor = self.attribute_map.get(name, name), self.attribute_map.get(divisor, divisor)
                raise ValueError(f"`{name}` must be a multiple of `{divisor}`, but they are {value} and {by}.")
        if self.block_size < 1:
            raise ValueError(f"`block_size` must be at least 1, but it is {self.block_size}.")
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"`mask_token_id` must be an id of the vocabulary (0 .. {self.vocab_size - 1}), but it is "
                f"{self.mask_token_id}. Add the token to the tokenizer and resize the embeddings."
            )

"""What the configurations of all block-diffusion models say."""

from os import PathLike
from pathlib import Path
from typing import Any

import torch
from transformers.configuration_utils import PreTrainedConfig, strict
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

BLOCK_ALIGNMENTS = ("prompt", "sequence")
TRAINED_FOR = ("vanilla", "autoregressive")


def check_drafter(drafter: Any) -> None:
    """Refuses what the configuration says of a drafter if it is not `{"rank": ..., "alpha": ...}`."""
    if not isinstance(drafter, dict) or set(drafter) - {"rank", "alpha"} or "rank" not in drafter:
        raise ValueError(f"`drafter` must be None or a dict with `rank` and `alpha`, but it is {drafter!r}.")
    rank, alpha = drafter["rank"], drafter.get("alpha", drafter["rank"])
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ValueError(f"`rank` of `drafter` must be an integer of at least 1, but it is {rank!r}.")
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not 0 < alpha < float("inf"):
        raise ValueError(f"`alpha` of `drafter` must be a finite number above 0, but it is {alpha!r}.")


def published_class(cls: type) -> type:
    """The nearest class of `cls.__mro__` whose code goes with a checkpoint, which is the one that a folder can name.

    `cls` itself may be a class that FSDP2 has put in the place of a published one, or one that was derived from it in
    a script, a notebook or a test.

    Raises:
        ValueError: if there is none.
    """
    package = __name__.rpartition(".")[0]
    for candidate in cls.__mro__:
        is_here = candidate.__module__.rpartition(".")[0] == package
        if is_here and vars(candidate).get("_auto_class") is not None:
            return candidate
    raise ValueError(
        f"`save_pretrained` must know whose code to put into the folder, but {cls.__name__} derives from no published "
        "class. Derive it from a class such as D2FLLaDAForBlockDiffusion or D2FLLaDAConfig."
    )


def _dtype_name(name: str, value: str | torch.dtype | None) -> str | torch.dtype | None:
    """A dtype as the base class takes it: that is 'float32', not 'torch.float32' or 'auto'."""
    if not isinstance(value, str) or value == "auto":
        return None if value == "auto" else value
    value = value.removeprefix("torch.")
    if not isinstance(getattr(torch, value, None), torch.dtype):
        raise ValueError(f"`{name}` must be the name of a torch.dtype such as 'bfloat16', but it is {value!r}.")
    return value


@strict
class D2FConfig(PreTrainedConfig):
    """The fields that block-causal attention and decoding need, whatever the architecture.

    Args:
        right_shift_logits (`bool`): Logits at position i predict token i + 1, as in Dream and in models that start
            from an autoregressive one. LLaDA's predict token i.
        block_size (`int`): Tokens per response block that the model was made for: what `generate` uses unless told
            otherwise.
        block_alignment (`str`): Where blocks start. `"prompt"`: the prompt is one bidirectional block, and response
            blocks are counted from its end. `"sequence"`: blocks are counted from the first token of the sequence, so
            the prompt is block-causal too, and its last tokens may share a block with the first ones of the response.
        has_causal_mode (`bool`): Without masks and under a causal mask the model is an autoregressive one: its logits
            at position i predict token i + 1. `decoding="autoregressive"` is for such a model.
        trained_for (`str`, *optional*): The `decoding` that an original checkpoint was trained for, and nothing else:
            `"vanilla"` or `"autoregressive"`. `generate` warns once of another. `None`: it was trained for pipelined
            decoding, or nothing is known. `load_d2f_model` sets it, an adapter and training clear it.
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
    block_alignment: str = "prompt"
    has_causal_mode: bool = False
    trained_for: str | None = None
    mask_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    use_cache: bool | None = True

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
        self.dtype = _dtype_name("dtype", self.dtype)
        if "torch_dtype" in kwargs:
            kwargs["torch_dtype"] = _dtype_name("torch_dtype", kwargs["torch_dtype"])
        super().__post_init__(**kwargs)
        for option in self.ignored_options:
            self.__dict__.pop(option, None)

    def as_published(self) -> "D2FConfig":
        """The same configuration in a class that a saved folder can name: see [`published_class`].

        Raises:
            ValueError: if that class would make something else of these values.
        """
        published = published_class(type(self))
        if type(self) is published:
            return self
        not_compared = ("model_type", "transformers_version")
        values = {name: value for name, value in self.to_dict().items() if name not in not_compared}
        try:
            config = published.from_dict(dict(values))
            others = {name: value for name, value in config.to_dict().items() if name not in not_compared}
            different = sorted(name for name in values | others if values.get(name) != others.get(name))
        except Exception as error:  # its own checks, and whatever comes of values of another kind
            raise ValueError(
                f"A {type(self).__name__} is saved as {published.__name__}, which does not take its values: {error} "
                f"Use a {published.__name__}."
            ) from error
        if different:
            raise ValueError(
                f"A {type(self).__name__} is saved as {published.__name__}, whose code the folder gets, but that one "
                f"has other values for {', '.join(different)}. Use a {published.__name__}."
            )
        return config

    def save_pretrained(self, save_directory: str | PathLike, *args, **kwargs):
        config = self.as_published()
        # Of the model's classes, those whose code is in the folder: without a model there may be none.
        auto_map = {
            name: value
            for name, value in (getattr(config, "auto_map", None) or {}).items()
            if isinstance(value, str) and (Path(save_directory) / f"{value.partition('.')[0]}.py").is_file()
        }
        config.auto_map = auto_map
        return super(D2FConfig, config).save_pretrained(save_directory, *args, **kwargs)

    def validate_architecture(self):
        """Part of the `@strict` validation of the base class."""
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
            if getattr(self, name) < 1:
                name = self.attribute_map.get(name, name)
                raise ValueError(f"`{name}` must be at least 1, but it is {getattr(self, name)}.")
        rope_type = (self.rope_parameters or {}).get("rope_type", "default")
        if rope_type != "default" and rope_type not in ROPE_INIT_FUNCTIONS:
            raise ValueError(
                f"`rope_type` in `rope_parameters` must be one of default, {', '.join(ROPE_INIT_FUNCTIONS)}, but it "
                f"is {rope_type!r}."
            )
        rotated_part = (self.rope_parameters or {}).get("partial_rotary_factor")
        if rotated_part not in (None, 1):
            raise ValueError(
                f"`partial_rotary_factor` must be 1, but it is {rotated_part}: positions rotate all of each head here."
            )
        multiples = [("num_attention_heads", "num_key_value_heads")]
        if getattr(self, "head_dim", None) is None:
            multiples.insert(0, ("hidden_size", "num_attention_heads"))
        elif self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"`head_dim` must be an even number of at least 2, but it is {self.head_dim}.")
        for name, divisor in multiples:
            # Attributes by their usual names, messages by the names that the config file has.
            value, by = getattr(self, name), getattr(self, divisor)
            if value % by != 0:
                name, divisor = self.attribute_map.get(name, name), self.attribute_map.get(divisor, divisor)
                raise ValueError(f"`{name}` must be a multiple of `{divisor}`, but they are {value} and {by}.")
        if self.block_size < 1:
            raise ValueError(f"`block_size` must be at least 1, but it is {self.block_size}.")
        if self.block_alignment not in BLOCK_ALIGNMENTS:
            raise ValueError(
                f"`block_alignment` must be one of {BLOCK_ALIGNMENTS}, but it is {self.block_alignment!r}."
            )
        if self.trained_for not in (None, *TRAINED_FOR):
            raise ValueError(f"`trained_for` must be None or one of {TRAINED_FOR}, but it is {self.trained_for!r}.")
        if self.has_causal_mode and not self.right_shift_logits:
            raise ValueError(
                "`has_causal_mode` must be False where `right_shift_logits` is False, but it is True: an "
                "autoregressive model predicts the next token."
            )
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"`mask_token_id` must be an id of the vocabulary (0 .. {self.vocab_size - 1}), but it is "
                f"{self.mask_token_id}. Add the token to the tokenizer and resize the embeddings."
            )


@strict
class D2FDecoderConfig(D2FConfig):
    """The fields of Llama, Qwen2 and Qwen3, whose layers are those of `decoder_layer.py`.

    Args:
        vocab_size (`int`): Rows of the embedding.
        hidden_size (`int`): Width of the hidden states.
        intermediate_size (`int`): Width of the feed-forward layers.
        num_hidden_layers (`int`): Layers.
        num_attention_heads (`int`): Attention heads.
        num_key_value_heads (`int`, *optional*): Key/value heads; `num_attention_heads` if not given.
        head_dim (`int`, *optional*): Width of a head; `hidden_size / num_attention_heads` if not given.
        max_position_embeddings (`int`): Longest prompt and response together.
        rope_theta (`float`, *optional*): Base of the rotary embedding; kept in `rope_parameters`.
        rms_norm_eps (`float`): Added to the variance in the norms.
        attention_dropout (`float`): Dropout on the attention weights in training.
        tie_word_embeddings (`bool`): The head is the embedding.
        initializer_range (`float`): Standard deviation of new weights.
        right_shift_logits (`bool`): `True`: logits at position i predict token i + 1.
        drafter (`dict`, *optional*): The model has a drafter for `decoding="verified"`: low-rank adapters of `rank`,
            multiplied by `alpha / rank` (`alpha` is `rank` by default), which act at the masks of a draft only.
        block_size, mask_token_id, ...: See [`D2FConfig`].

    Raises:
        ValueError: for an option of the original configuration that is not implemented: a sliding window, rotary
            positions on a part of each head, or another activation than SiLU.
    """

    attention_projections = ("q_proj", "k_proj", "v_proj", "o_proj")
    fixed_options = {"use_sliding_window": False, "hidden_act": "silu", "partial_rotary_factor": 1.0}
    ignored_options = ("sliding_window", "max_window_layers", "layer_types", "pretraining_tp")
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
    # Which parts of a layer there are: see `decoder_layer.py`.
    has_attention_bias = False
    has_output_bias = False
    has_mlp_bias = False
    has_query_key_norm = False

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 4096
    rope_parameters: RopeParameters | dict | None = None
    rms_norm_eps: float | int = 1e-6
    attention_dropout: float | int = 0.0
    tie_word_embeddings: bool = False
    initializer_range: float | int = 0.02
    right_shift_logits: bool = True
    drafter: dict | None = None

    def __post_init__(self, **kwargs):
        windowed = sorted({kind for kind in kwargs.get("layer_types") or () if kind != "full_attention"})
        if windowed:
            raise ValueError(
                f"`layer_types` must be 'full_attention' for each layer, but the configuration has {windowed[0]!r}. "
                "Attention to a part of the text is not implemented."
            )
        heads = self.num_attention_heads
        if self.head_dim is None and heads > 0 and self.hidden_size % heads == 0:  # else it is refused
            self.head_dim = self.hidden_size // heads
        super().__post_init__(**kwargs)

    def validate_drafter(self):
        """Part of the `@strict` validation of the base class."""
        if self.drafter is not None:
            check_drafter(self.drafter)

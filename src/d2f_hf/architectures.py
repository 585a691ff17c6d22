"""Which of our architectures a checkpoint's config.json describes, and which one it describes that is not here.

Only the file is read. Code that a checkpoint names in its `auto_map` is never executed.
"""

from dataclasses import dataclass, field, fields
from typing import Any

from transformers import (
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from d2f_hf.modeling import (
    D2FDreamConfig,
    D2FDreamForBlockDiffusion,
    D2FLLaDAConfig,
    D2FLLaDAForBlockDiffusion,
    D2FLlamaConfig,
    D2FLlamaForBlockDiffusion,
    D2FQwen3Config,
    D2FQwen3ForBlockDiffusion,
)


@dataclass(frozen=True)
class Architecture:
    """What is known of the checkpoints of one `model_type` besides their files.

    Args:
        config_class, model_class: Ours.
        stock_config (`type`, *optional*): Whose defaults count for what config.json leaves out.
        values (`dict`): Fields of the configuration that config.json does not have.
        defaults (`dict`): The same, where config.json may have them.
        other_names (`dict`): Our names of fields by theirs.
        unused (`tuple[str, ...]`): Fields about the training or other code.
        generation (`dict`): What the generation config says at loading.
        mask_token_id, eos_token_id: Those of the released checkpoints, where no file names them.
    """

    config_class: type[PreTrainedConfig]
    model_class: type[PreTrainedModel]
    stock_config: type[PreTrainedConfig] | None = None
    values: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    other_names: dict[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    generation: dict[str, Any] = field(default_factory=dict)
    mask_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    @property
    def is_autoregressive(self) -> bool:
        """Trained to predict the next token, and nothing else."""
        return self.values.get("has_causal_mode", False)


_LLADA = (D2FLLaDAConfig, D2FLLaDAForBlockDiffusion)
_DREAM = (D2FDreamConfig, D2FDreamForBlockDiffusion)
_LLAMA = (D2FLlamaConfig, D2FLlamaForBlockDiffusion)
_QWEN3 = (D2FQwen3Config, D2FQwen3ForBlockDiffusion)
_AUTOREGRESSIVE = {"right_shift_logits": True, "has_causal_mode": True, "trained_for": "autoregressive"}
_VANILLA = {"trained_for": "vanilla"}

# By `model_type` in config.json: that of the original checkpoints, and ours. "llada" is LLaDA-1.5 too, "Dream" is
# Dream-Coder and DiffuCoder too, "llama" is SmolLM2 too, "qwen2" is Qwen2.5 too, "sdar" is TraDo too.
ARCHITECTURES = {
    "llada": Architecture(*_LLADA, values=_VANILLA),
    "d2f_llada": Architecture(*_LLADA),
    "Dream": Architecture(*_DREAM, values=_VANILLA),
    "d2f_dream": Architecture(*_DREAM),
    "llama": Architecture(*_LLAMA, LlamaConfig, _AUTOREGRESSIVE),
    "mistral": Architecture(*_LLAMA, MistralConfig, _AUTOREGRESSIVE),
    "d2f_llama": Architecture(*_LLAMA),
    "qwen2": Architecture(*_DREAM, Qwen2Config, _AUTOREGRESSIVE),
    "qwen3": Architecture(*_QWEN3, Qwen3Config, _AUTOREGRESSIVE),
    "d2f_qwen3": Architecture(*_QWEN3),
    "sdar": Architecture(
        *_QWEN3,
        Qwen3Config,
        values={"right_shift_logits": False, "has_causal_mode": False, "block_alignment": "sequence"},
        defaults={"block_size": 4},
        unused=(
            *("attn_implementation", "debug", "ep_size", "fuse_cross_entropy", "micro_forward", "skip_checkpoint"),
            "use_deepep",
        ),
        generation={"block_add_threshold": 1.0, "confidence_threshold": 0.85},
        mask_token_id=151669,
        eos_token_id=[151645, 151643],
    ),
    "Fast_dLLM_Qwen": Architecture(
        *_DREAM,
        Qwen2Config,
        values={"right_shift_logits": True, "has_causal_mode": False, "block_alignment": "sequence"},
        defaults={"block_size": 32},
        other_names={"bd_size": "block_size"},
        unused=("attn_implementation", "conplemenrary_mask", "complementary_mask"),
        generation={"block_add_threshold": 1.0, "confidence_threshold": 0.9, "first_token_alone": True},
        mask_token_id=151665,
        eos_token_id=151645,
    ),
}

_EXPERTS = "a mixture of experts, which needs layers that choose among several feed-forward layers"
_NORMS = "a model with other norms or another order of them, which needs layers of its own"
_PARTIAL = "a model that rotates a part of each head only, which needs a rotary embedding of its own"
_WINDOWS = "a model whose layers see a part of the text only, which needs a cache and masks with a sliding window"
_OTHER_LAYERS = "a model with layers of another kind, which needs an architecture of its own"
_NO_MASKS = "a diffusion model that replaces tokens by others rather than by a mask, which needs another decoding"
_IMAGES = "a model that reads images too, which needs an encoder for them"
_NOT_HERE = {
    **dict.fromkeys(
        "mixtral qwen2_moe qwen3_moe sdar_moe llada_moe lladamoe llada2_moe olmoe deepseek_v2 deepseek_v3 phimoe "
        "granitemoe jamba dbrx gpt_oss ernie4_5_moe glm4_moe jetmoe minimax hunyuan_v1_moe llama4 llama4_text".split(),
        _EXPERTS,
    ),
    **dict.fromkeys(
        "cohere cohere2 olmo olmo2 olmo3 gemma gemma2 gemma3 gemma3_text starcoder2 nemotron gpt2 opt mpt bloom "
        "falcon bert modernbert exaone4".split(),
        _NORMS,
    ),
    **dict.fromkeys("phi phi3 stablelm gpt_neox persimmon glm glm4 gptj codegen".split(), _PARTIAL),
    **dict.fromkeys("ministral mistral3 smollm3".split(), _WINDOWS),
    **dict.fromkeys(["diffusion_gemma"], _NO_MASKS),
    **dict.fromkeys(["llava_llada"], _IMAGES),
    **dict.fromkeys("qwen3_next mamba mamba2 rwkv granite recurrent_gemma".split(), _OTHER_LAYERS),
}
_NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_WINDOW_FIELDS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
# What the stock classes have a default for. Those of the rotary embedding are taken apart from them.
_WITHOUT_STOCK_DEFAULT = ("rope_parameters", "dtype", "use_cache")


def architecture_of(model_type: Any, file: str) -> Architecture:
    """The architecture of a `model_type` in `file`.

    Raises:
        ValueError: if it is not one of ours. It says what is known of it.
    """
    if isinstance(model_type, str) and model_type in ARCHITECTURES:
        return ARCHITECTURES[model_type]
    reason = f" That is {_NOT_HERE[model_type]}." if model_type in _NOT_HERE else ""
    raise ValueError(
        f"`model_type` in {file} must be one of {', '.join(ARCHITECTURES)}, but it is {model_type!r}.{reason} Pass "
        "the folder or Hub id of a LLaDA, Dream, Dream-Coder, DiffuCoder, Llama, Mistral, Qwen2, Qwen3, SDAR, "
        "Fast-dLLM v2 or D2F model; there is no code for others."
    )


def config_values(values: dict[str, Any], options: dict[str, Any], model_type: str, file: str) -> dict[str, Any]:
    """The fields of our configuration that the `values` of a config.json come to.

    `options` of the caller that replace a field which is not kept, such as `sliding_window`, are taken out of it.

    Raises:
        ValueError: for a layer of another kind: experts, sliding windows, heads that are rotated in part.
    """
    architecture = architecture_of(model_type, file)
    # `auto_map` and `architectures` are about the code that the checkpoint came with.
    left_out = {"model_type", "architectures", "auto_map", *architecture.unused}
    values = {name: value for name, value in values.items() if name not in left_out}
    for name, ours in architecture.other_names.items():
        if name in values:
            values.setdefault(ours, values.pop(name))
    values |= {name: options.pop(name) for name in _WINDOW_FIELDS if name in options}
    _refuse_other_layers(values, architecture, file)
    if architecture.stock_config is not None:
        for name in _WINDOW_FIELDS:
            values.pop(name, None)
        values = {**_stock_defaults(architecture, values), **values}
    values = {**architecture.defaults, **values, **architecture.values}
    eos_token_ids = architecture.eos_token_id
    if eos_token_ids is not None and values.get("eos_token_id") is None:
        highest = max(eos_token_ids) if isinstance(eos_token_ids, list) else eos_token_ids
        if highest < values["vocab_size"]:
            values["eos_token_id"] = eos_token_ids
    return values


def _stock_defaults(architecture: Architecture, values: dict[str, Any]) -> dict[str, Any]:
    stock: Any = architecture.stock_config
    known = stock().to_dict()
    ours = {item.name for item in fields(architecture.config_class)} - set(_WITHOUT_STOCK_DEFAULT)  # type: ignore
    defaults = {name: known[name] for name in ours if name in known}
    if "head_dim" in defaults and stock is not Qwen3Config:
        del defaults["head_dim"]  # follows from the other values
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if "rope_theta" not in values and "rope_theta" not in rope:
        defaults["rope_theta"] = getattr(stock, "default_theta", 10000.0)
    return defaults


def _refuse_other_layers(values: dict[str, Any], architecture: Architecture, file: str) -> None:
    for name in _NUMBERS_OF_EXPERTS:
        if isinstance(values.get(name), int) and values[name] > 1:
            raise ValueError(
                f"`{name}` in {file} must be 1 or left out, but it is {values[name]}. That is {_EXPERTS}."
            )
    ropes = [values, values.get("rope_parameters"), values.get("rope_scaling")]
    for rope in ropes:
        part = rope.get("partial_rotary_factor") if isinstance(rope, dict) else None
        if part not in (None, 1):
            raise ValueError(f"`partial_rotary_factor` in {file} must be 1, but it is {part}. That is {_PARTIAL}.")
    window = values.get("sliding_window")
    others = sorted({str(kind) for kind in values.get("layer_types") or ()} - {"full_attention"})
    way_out = (
        "Where prompt and response together are no longer than the window, it hides nothing. If that is so, pass to "
        "`load_d2f_model`"
    )
    if others:
        raise ValueError(
            f"`layer_types` in {file} must be 'full_attention' for all layers, but there is {', '.join(others)}. That "
            f"is {_WINDOWS}. {way_out} `layer_types=None, use_sliding_window=False, sliding_window=None`."
        )
    if values.get("layer_types") is not None or architecture.stock_config is None:
        return  # where the types of the layers are given, they decide; ours have no windows
    if architecture.stock_config in (Qwen2Config, Qwen3Config):
        first, num_layers = values.get("max_window_layers"), values.get("num_hidden_layers")
        is_used = bool(values.get("use_sliding_window")) and window is not None
        is_used = is_used and not (isinstance(first, int) and isinstance(num_layers, int) and first >= num_layers)
        name, instead = "use_sliding_window", False
    else:
        if architecture.stock_config is MistralConfig and "sliding_window" not in values:
            window = MistralConfig().sliding_window  # the class has a default
        longest = values.get("max_position_embeddings")
        is_used = window is not None and not (isinstance(longest, int) and window >= longest)
        name, instead = "sliding_window", None
    if is_used:
        raise ValueError(
            f"`{name}` in {file} must be {instead}, but there is a sliding window of {window} tokens. That is "
            f"{_WINDOWS}. {way_out} `{name}={instead}`."
        )

"""From an autoregressive checkpoint to a block-diffusion model that can be trained, in one call."""

from os import PathLike
from typing import TYPE_CHECKING, Any

from transformers import AutoModelForCausalLM, PreTrainedConfig

from d2f_hf.architectures import ARCHITECTURES, architecture_of
from d2f_hf.checkpoint_files import checked_path
from d2f_hf.loading import load_d2f_model
from d2f_hf.mask_token import MASK_TOKENS, add_mask_token, give_mask_row
from d2f_hf.modeling import D2FLLaDAConfig, D2FLLaDAForBlockDiffusion
from d2f_hf.modeling.modeling_d2f import D2FForBlockDiffusion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The parts of Llama's parameter names that are others in LLaDA, whose layers compute the same.
_LLADA_NAMES = {
    "model.embed_tokens.": "model.transformer.wte.",
    "model.norm.": "model.transformer.ln_f.",
    "lm_head.": "model.transformer.ff_out.",
    "model.layers.": "model.transformer.blocks.",
    "input_layernorm.": "attn_norm.",
    "post_attention_layernorm.": "ff_norm.",
    "self_attn.o_proj.": "attn_out.",
    "self_attn.": "",
    "mlp.gate_proj.": "ff_proj.",
    "mlp.up_proj.": "up_proj.",
    "mlp.down_proj.": "ff_out.",
}


def diffusion_model_from_autoregressive(
    base: str | PathLike,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    *,
    mask_token: str | None = None,
    as_llada: bool = False,
    **kwargs,
) -> D2FForBlockDiffusion:
    """A block-diffusion model with the weights of an autoregressive checkpoint, and a mask token for both.

    ```python
    tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B")
    model = diffusion_model_from_autoregressive("Qwen/Qwen3-0.6B", tokenizer, block_size=16)
    trainer = D2FTrainer(model, D2FTrainingArguments("runs", objective="masked_diffusion"), ...)
    ```

    Under a causal mask its logits are those of the checkpoint: no weight changes but the row of a new mask token. So
    until it is trained it is the autoregressive model, and its configuration says so (`has_causal_mode`,
    `trained_for`). When [`D2FTrainer`] starts to train it, it becomes a diffusion model with `decoding="d2f"`. After
    training with other code set `model.config.has_causal_mode = False`, `model.config.trained_for = None` and
    `model.generation_config.decoding = "d2f"`.

    Args:
        base (`str` or `os.PathLike`): Folder or Hub id of a Llama, SmolLM2, Mistral without sliding window, Qwen2,
            Qwen2.5 or Qwen3.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Its tokenizer. Is changed: the mask token becomes its
            `mask_token`. Without it the tokenizer files in `base` are read, and no tokenizer gets the token.
        mask_token (`str`, *optional*): The text of the mask token. With a `tokenizer` it may be new. By default the
            one that the tokenizer has, else a new `"<|mask|>"`.
        as_llada (`bool`): For a Llama-type checkpoint: under the parameter names of LLaDA, as a
            [`D2FLLaDAForBlockDiffusion`] whose logits predict the next token. The reference model is such a one.
        kwargs: As in [`load_d2f_model`]: `block_size`, `dtype`, `attn_implementation` and others.

    Returns:
        The model in evaluation mode: a [`D2FLlamaForBlockDiffusion`], [`D2FDreamForBlockDiffusion`] (Qwen2),
        [`D2FQwen3ForBlockDiffusion`] or, with `as_llada`, [`D2FLLaDAForBlockDiffusion`].

    Raises:
        ValueError: before any weight is loaded, for a checkpoint that is not autoregressive, or what
            [`load_d2f_model`] refuses; with `as_llada` for layers that LLaDA does not have.
    """
    base = checked_path("base", base)
    _check_base(base, as_llada, kwargs)
    if tokenizer is None:
        model = load_d2f_model(base, mask_token=mask_token, **kwargs)
        return _as_llada(model) if as_llada else model

    if kwargs.get("mask_token_id") is not None:
        raise ValueError(
            f"`mask_token_id` (got {kwargs['mask_token_id']}) and `tokenizer` both say which token is the mask. Leave "
            "one of them out, or name the token as `mask_token`."
        )
    vocabulary = tokenizer.get_vocab()
    names = (mask_token,) if mask_token is not None else (tokenizer.mask_token, *MASK_TOKENS)
    name = next((name for name in names if name in vocabulary), None)
    is_new = name is None
    mask_token_id = max(vocabulary.values(), default=-1) + 1 if is_new else vocabulary[name]
    model = load_d2f_model(base, mask_token_id=mask_token_id, **kwargs)
    if is_new:  # it may be a spare row, as Qwen has them
        give_mask_row(model, mask_token_id)
    add_mask_token(model, tokenizer, mask_token or MASK_TOKENS[0])
    return _as_llada(model) if as_llada else model


def _check_base(base: str, as_llada: bool, options: dict[str, Any]) -> None:
    """Refuses a checkpoint that is not autoregressive, and one that has more than LLaDA's layers compute."""
    hub = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
    values, _ = PreTrainedConfig.get_config_dict(base, **{name: options[name] for name in hub if name in options})
    file, model_type = f"{base}/config.json", values.get("model_type")
    is_saved_base = bool(values.get("has_causal_mode"))  # by `save_pretrained` of one of our models
    if not architecture_of(model_type, file).is_autoregressive and not is_saved_base:
        known = [name for name, architecture in ARCHITECTURES.items() if architecture.is_autoregressive]
        raise ValueError(
            f"`model_type` in {file} must be that of an autoregressive model ({', '.join(known)}), but it is "
            f"{model_type!r}. That is a diffusion model already: pass it to `load_d2f_model`."
        )
    if not as_llada or model_type == "d2f_llada":
        return
    for name in ("device_map", "quantization_config"):
        if options.get(name) is not None:
            raise ValueError(
                f"`{name}` (got {options[name]!r}) is not supported with `as_llada`, which renames whole weights. "
                "Leave it out, save the model, and load that one with it."
            )
    if model_type not in ("llama", "mistral", "d2f_llama"):
        raise ValueError(
            f"`as_llada` must be False for a checkpoint that is not of Llama's type, but {file} says {model_type!r}: "
            "LLaDA has neither biases nor norms on queries and keys. Leave it out."
        )
    for name in ("attention_bias", "mlp_bias"):
        if values.get(name):
            raise ValueError(f"`{name}` in {file} must be False with `as_llada`: LLaDA has no biases. Leave that out.")
    width, heads, head_dim = (values.get(name) for name in ("hidden_size", "num_attention_heads", "head_dim"))
    if head_dim is not None and width is not None and heads and head_dim * heads != width:
        raise ValueError(
            f"`head_dim` in {file} must be `hidden_size / num_attention_heads` ({width} / {heads}) with `as_llada`, "
            f"but it is {head_dim}. Leave that out."
        )


def _as_llada(model: D2FForBlockDiffusion) -> D2FLLaDAForBlockDiffusion:
    """The same model under LLaDA's names. Configuration and generation config go with it."""
    if isinstance(model, D2FLLaDAForBlockDiffusion):
        return model
    old: Any = model.config
    config = D2FLLaDAConfig(
        vocab_size=old.vocab_size,
        d_model=old.hidden_size,
        n_heads=old.num_attention_heads,
        n_kv_heads=old.num_key_value_heads,
        n_layers=old.num_hidden_layers,
        mlp_hidden_size=old.intermediate_size,
        max_sequence_length=old.max_position_embeddings,
        rope_parameters=old.rope_parameters,
        rms_norm_eps=old.rms_norm_eps,
        attention_dropout=old.attention_dropout,
        weight_tying=old.tie_word_embeddings,
        right_shift_logits=True,
        has_causal_mode=old.has_causal_mode,
        trained_for=old.trained_for,
        block_size=old.block_size,
        mask_token_id=old.mask_token_id,
        bos_token_id=old.bos_token_id,
        eos_token_id=old.eos_token_id,
        pad_token_id=old.pad_token_id,
    )
    weights = {}
    for name, weight in model.state_dict().items():
        for part, llada_part in _LLADA_NAMES.items():
            name = name.replace(part, llada_part)
        weights[name] = weight
    llada = AutoModelForCausalLM.from_config(config, dtype=model.dtype, attn_implementation=old._attn_implementation)
    llada.load_state_dict(weights)
    llada.generation_config = model.generation_config
    return llada.to(model.device).eval()

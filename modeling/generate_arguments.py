"""What `generate` is given besides its options: prompts, a model on some device, adapters. Refused before any forward.

The options are checked in `generation_config_d2f.py`.
"""

# B batch, P prompt tokens

import difflib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers.generation import GenerationConfig, GenerationMixin
from transformers.utils import TransformersKwargs, logging

from .generation_config_d2f import OPTIONS, D2FGenerationConfig

logger = logging.get_logger(__name__)

# Arguments that `forward` has and `generate` decides.
_OF_FORWARD = ("position_ids", "prompt_lengths", "labels", "logits_to_keep")
# Arguments of other calls, with the way out.
_OF_OTHER_CALLS = {
    **dict.fromkeys(("dtype", "torch_dtype"), "Pass it to `from_pretrained`, or call `model.to(dtype)`."),
    **dict.fromkeys(("variant", "device_map"), "Pass it to `from_pretrained`."),
    "device": "Call `model.to(device)`.",
    "seed": "Pass `generator=torch.Generator(device).manual_seed(seed)`, or call `torch.manual_seed(seed)`.",
    "adapter_names": "A peft model takes it, as `PeftModel.generate(adapter_names=...)`.",
}


def check_generation_config(name: str, config: Any) -> None:
    """Refuses what is no generation config at all."""
    if not isinstance(config, GenerationConfig):
        raise ValueError(
            f"`{name}` must be a `GenerationConfig` or `D2FGenerationConfig`, got {type(config).__name__}. "
            "`GenerationConfig.from_model_config(model.config)` makes one, `GenerationConfig(**values)` takes a dict."
        )


def check_guests(arguments: Mapping[str, Any]) -> None:
    """Refuses processors, criteria, a streamer or a generator that could not be asked once decoding has begun."""
    for name in ("logits_processor", "stopping_criteria"):
        guests = arguments.get(name)
        if guests is not None and not (isinstance(guests, (list, tuple)) and all(map(callable, guests))):
            raise ValueError(f"`{name}` must be a list of functions, got {guests!r:.80}. Put a single one in a list.")
    allowed = arguments.get("prefix_allowed_tokens_fn")
    if allowed is not None and not callable(allowed):
        raise ValueError(
            f"`prefix_allowed_tokens_fn` must be a function of a prompt's number and a text, got {allowed!r:.80}. "
            "Leave it out to allow all tokens."
        )
    streamer = arguments.get("streamer")
    if streamer is not None and not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
        raise ValueError(
            f"`streamer` must have the methods `put` and `end`, got {streamer!r:.80}. `TextStreamer(tokenizer)` "
            "prints the response."
        )
    generator = arguments.get("generator")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ValueError(
            f"`generator` must be a `torch.Generator`, got {generator!r:.80}. "
            "`torch.Generator(device).manual_seed(seed)` makes one."
        )


def as_plain_config(
    config: GenerationConfig, of_model: GenerationConfig, config_class: type[D2FGenerationConfig]
) -> GenerationConfig:
    """A `GenerationConfig` with the values of `config`, which may be of any class and version.

    What neither `config_class` nor the config of the model knows is a slip of the pen, unless it comes from a file.
    """
    known = vars(config_class()).keys() | vars(of_model).keys()
    is_from_file = getattr(config, "_original_object_hash", None) is not None
    for name, value in vars(config).items():
        if name in known or name.startswith("_") or value is None:
            continue
        if not is_from_file:
            raise ValueError(
                f"`generation_config` must hold parameters of generation only, but it has `{name}`, which is none."
                f"{_did_you_mean(name)} Check the spelling, or leave it out."
            )
        logger.warning_once(f"`{name}` of the generation config that was loaded is unknown here and has no effect.")
    plain = GenerationConfig()
    vars(plain).update(vars(config))
    return plain


def check_model_kwargs(model_kwargs: Mapping[str, Any]) -> None:
    """Refuses what is no option, and which no decoding loop reads."""
    for name, value in model_kwargs.items():
        if value is None or name == "attention_mask":
            continue
        if name in _OF_FORWARD:
            raise ValueError(
                f"`{name}` is decided by `generate` and cannot be passed to it. Leave it out; `attention_mask` says "
                "what is padding."
            )
        if name in _OF_OTHER_CALLS:
            raise ValueError(f"`{name}` is not an argument of `generate`. {_OF_OTHER_CALLS[name]}")
        if name in TransformersKwargs.__optional_keys__ and value is not False:
            raise ValueError(f"`{name}` (got {value!r}) is not supported by `generate`. Leave it out.")
        if suggestion := _did_you_mean(name):
            raise ValueError(f"`{name}` is not an argument of `generate`.{suggestion}")


def _did_you_mean(name: str) -> str:
    options = OPTIONS.keys() | vars(GenerationConfig()).keys()
    return "".join(f" Did you mean `{match}`?" for match in difflib.get_close_matches(name, options, n=1, cutoff=0.8))


def check_prompts(input_ids: Any, attention_mask: Any, vocab_size: int) -> None:
    """Refuses prompts that are not `(B, P)` ids of the vocabulary, and masks that do not say what is padding."""
    if not isinstance(input_ids, torch.Tensor):
        raise ValueError(
            f"`input_ids` must be a tensor of token ids, got {type(input_ids).__name__}. Texts are converted by "
            "`tokenizer(texts, return_tensors='pt', padding=True)`, whose result is passed as `generate(**inputs)`; "
            "lists by `torch.tensor(ids)`."
        )
    shape = tuple(input_ids.shape)
    if len(shape) != 2:
        raise ValueError(
            f"`input_ids` must have the shape (B, P) of a batch of prompts, got {shape}. One prompt (P,) is made a "
            "batch by `input_ids[None]`."
        )
    if shape[0] == 0:
        raise ValueError(f"`input_ids` must hold at least one prompt, got {shape}. Leave out empty batches.")
    if shape[1] == 0:
        raise ValueError(
            f"`input_ids` must hold at least one prompt token, got {shape}. Start an empty prompt with the BOS token."
        )
    if input_ids.dtype in (torch.bool,) or input_ids.is_floating_point() or input_ids.is_complex():
        raise ValueError(
            f"`input_ids` must hold integers, got {input_ids.dtype}. Convert token ids by `input_ids.long()`; "
            "embeddings are not supported in their place."
        )
    if input_ids.is_meta:
        raise ValueError("`input_ids` must hold values, but it is on the meta device. Make it on a real one.")
    if attention_mask is not None:
        _check_attention_mask(attention_mask, shape)
        input_ids = input_ids[attention_mask.to(input_ids.device) == 1]
    lowest, highest = torch.stack([input_ids.min(), input_ids.max()]).tolist()
    if not 0 <= lowest <= highest < vocab_size:
        raise ValueError(
            f"`input_ids` must hold ids of the model's vocabulary (0 .. {vocab_size - 1}), got {lowest} to {highest}. "
            "Take the model's own tokenizer, or mark padding in `attention_mask`."
        )


def _check_attention_mask(attention_mask: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(attention_mask, torch.Tensor):
        raise ValueError(
            f"`attention_mask` must be a tensor, got {type(attention_mask).__name__}. Convert it by "
            "`torch.tensor(attention_mask)`."
        )
    if tuple(attention_mask.shape) != shape:
        raise ValueError(
            f"`attention_mask` must have the shape of `input_ids`, {shape}, but it has "
            f"{tuple(attention_mask.shape)}. It says which of the prompt's tokens are padding."
        )
    if attention_mask.is_meta:
        raise ValueError("`attention_mask` must hold values, but it is on the meta device. Make it on a real one.")
    if not ((attention_mask == 0) | (attention_mask == 1)).all():
        raise ValueError(
            "`attention_mask` must hold 1 for tokens and 0 for padding, got other values. A mask that is added to "
            "attention scores is not supported: pass `mask == 0`."
        )
    if not (attention_mask == 1).any(-1).all():
        raise ValueError(
            "`attention_mask` must leave at least one prompt token in each row, but a row has none. "
            "Start an empty prompt with the BOS token."
        )


# What else a model does well that was trained for one `decoding`, and what makes another one of it.
_ALSO_TRAINED_FOR = {"vanilla": ("vanilla", "fast_dllm"), "autoregressive": ("autoregressive", "verified")}
_WAY_OUT = {
    "vanilla": "Take decoding='vanilla' or decoding='fast_dllm', load it with the D2F adapter that belongs to it, or "
    "distil it with `D2FTrainer`",
    "autoregressive": "Take decoding='autoregressive' or decoding='verified', or train it with `D2FTrainer` first",
}


def check_decoding(model: Any, config: D2FGenerationConfig, verifier: Any = None) -> None:
    """Refuses a `decoding` that the model cannot do, and warns once of one that it was never trained for."""
    if verifier is not None:
        _check_verifier(model, config, verifier)
        return
    if config.decoding in ("autoregressive", "verified") and not model.config.has_causal_mode:
        instead = " Or pass a `verifier`, which is one." if config.decoding == "verified" else ""
        raise ValueError(
            f"`decoding` must not be {config.decoding!r} for a model with has_causal_mode=False: under a causal mask "
            f"it is no autoregressive model. Leave it out, or load an autoregressive checkpoint.{instead}"
        )
    if model.config.block_alignment == "sequence" and config.decoding in ("vanilla", "fast_dllm"):
        raise ValueError(
            f"`decoding` must not be {config.decoding!r} for a model with block_alignment='sequence': it lets every "
            "token see every other one, and this model reads block by block from the start. Take decoding='d2f'."
        )
    trained_for = model.config.trained_for
    if config.decoding not in _ALSO_TRAINED_FOR.get(trained_for, (config.decoding,)) and not _has_adapter(model):
        logger.warning_once(
            f"This {type(model).__name__} was trained for decoding={trained_for!r} alone, and may give bad text with "
            f"decoding={config.decoding!r}. {_WAY_OUT[trained_for]}. If you have trained it in another way, set "
            "`model.config.trained_for = None`."
        )


def _check_verifier(model: Any, config: D2FGenerationConfig, verifier: Any) -> None:
    """Refuses a `verifier` that cannot verify what `model` drafts."""
    if config.decoding != "verified":
        raise ValueError(
            f"`verifier` is not used by decoding={config.decoding!r}. Leave it out, or take decoding='verified'."
        )
    for name, neutral in (("draft_layout", "linear"), ("num_draft_steps", 1)):
        if getattr(config, name) != neutral:
            raise ValueError(
                f"`{name}` must be {neutral!r} with a `verifier`, got {getattr(config, name)!r}: another model drafts "
                "then, in one forward. Leave one of them out."
            )
    if hasattr(verifier, "get_base_model"):
        raise ValueError(
            f"`verifier` must be a model of this package, got a {type(verifier).__name__} around one. Pass "
            "`verifier.get_base_model()`, which has the adapter in its layers."
        )
    if not getattr(getattr(verifier, "config", None), "has_causal_mode", False):
        raise ValueError(
            f"`verifier` must be a model of this package with has_causal_mode=True, got {type(verifier).__name__}. "
            "`load_d2f_model` gives one for an autoregressive checkpoint."
        )
    if model.config.block_alignment == "sequence":
        raise ValueError(
            "`verifier` is not supported for a model with block_alignment='sequence', whose blocks do not begin with "
            "the response. Leave it out."
        )
    for name in ("vocab_size", "mask_token_id"):
        own, other = getattr(model.config, name), getattr(verifier.config, name)
        if own != other:
            raise ValueError(
                f"`verifier` must have the `{name}` of the model that drafts, {own}, but it has {other}. Both must "
                "have the same tokenizer."
            )
    if input_device(verifier) != input_device(model):
        raise ValueError(
            f"`verifier` must be on the device of the model that drafts, {input_device(model)}, but it is on "
            f"{input_device(verifier)}. Move one of them."
        )


def check_limits(model: Any, config: D2FGenerationConfig, longest_prompt: int, prompt_width: int) -> None:
    """Refuses special tokens and lengths that the model cannot have. `prompt_width` is with padding."""
    mask_token_id, size = model.config.mask_token_id, num_embeddings(model)
    if mask_token_id is None:
        raise ValueError(
            "`config.mask_token_id` must be set to decode by diffusion, but it is None. Set it to the id of the token "
            "that the model was trained to replace."
        )
    num_logits = getattr(model.get_output_embeddings(), "out_features", size)
    if not 0 <= mask_token_id < min(size, num_logits):
        raise ValueError(
            f"`config.mask_token_id` must be an id of the vocabulary (0 .. {min(size, num_logits) - 1}), but it is "
            f"{mask_token_id}. Keep the mask token when embeddings are resized, or set the id that it has now."
        )
    for token_id in [] if config._eos_token_tensor is None else config._eos_token_tensor.tolist():
        if token_id == mask_token_id or not 0 <= token_id < size:
            raise ValueError(
                f"`eos_token_id` must be an id of the vocabulary (0 .. {size - 1}) other than the mask token's "
                f"({mask_token_id}), got {token_id}. `eos_token_id=None` decodes up to the limit."
            )
    pad_token_id = config._pad_token_tensor
    if pad_token_id is not None and not 0 <= int(pad_token_id) < size:
        raise ValueError(
            f"`pad_token_id` must be an id of the vocabulary (0 .. {size - 1}), got {int(pad_token_id)}. The EOS "
            "token is a usual choice."
        )
    positions = model.config.max_position_embeddings
    if longest_prompt >= positions:
        raise ValueError(
            f"`input_ids` must leave room for a response in the model's {positions} positions, but a prompt has "
            f"{longest_prompt} tokens. Shorten it."
        )
    longest = longest_prompt + config.max_length - prompt_width
    if longest > positions:
        logger.warning_once(
            f"Prompt and response may reach {longest} tokens, more than the {positions} positions that the model was "
            "made for. Set a smaller `max_new_tokens`."
        )


def num_embeddings(model: Any) -> int:
    """The ids that the model can read."""
    return getattr(model.get_input_embeddings(), "num_embeddings", model.config.vocab_size)


def input_device(model: Any) -> torch.device:
    """The device that the model's embeddings take ids on."""
    device = next(model.get_input_embeddings().parameters()).device
    if device.type == "meta":  # perhaps offloaded; then the model knows where it computes
        device = model.device
    head_is_meta = next(model.get_output_embeddings().parameters()).is_meta
    if device.type == "meta" or (head_is_meta and not any(hasattr(part, "_hf_hook") for part in model.modules())):
        raise ValueError(
            "The model's weights must hold values to `generate`, but some are on the meta device. Load them with "
            "`from_pretrained`, or make them by `model.to_empty(device=...)` and `load_state_dict`."
        )
    return device


# ---- adapters ----


def _has_adapter(model: nn.Module) -> bool:
    """Whether a layer has an adapter of peft that is on."""
    return any(getattr(module, "disable_adapters", None) is False for module in model.modules())


def refuse_unread_inputs(model: Any) -> None:
    """Refuses inputs that come in by `prepare_inputs_for_generation`, which no decoding loop here calls.

    peft brings in the virtual tokens of prompt-learning adapters so: it replaces the method during `generate`.
    """
    method = model.prepare_inputs_for_generation
    if getattr(method, "__func__", None) is GenerationMixin.prepare_inputs_for_generation:
        return
    adapter = getattr(getattr(method, "__self__", None), "active_peft_config", None)
    if adapter is None:
        raise ValueError(
            "`prepare_inputs_for_generation` must not be overridden: decoding by diffusion does not call it. Override "
            "`forward` instead."
        )
    if adapter.is_prompt_learning:
        raise ValueError(
            f"Adapters that learn prompts ({str(adapter.peft_type).rpartition('.')[2]}) are not supported by "
            "`generate`: their virtual tokens are no part of a block-diffusion prompt. Take an adapter of weights, "
            "such as LoRA, or generate inside `with model.disable_adapter():`."
        )


def refuse_adapters_of_rows(model: nn.Module, decoding: str | None, num_rows: int) -> None:
    """Refuses adapters that depend on the row, or on the input of the forward, where a forward has other rows.

    peft passes them to its layers by hooks that are there while its `generate` runs. In vanilla decoding and Fast-dLLM
    each forward has the rows of the call, so one adapter per row (`adapter_names`) works.
    """
    head = model.get_output_embeddings()
    for module, _, hook in _adapter_hooks(model):
        keywords = getattr(hook, "keywords", {})
        names = keywords.get("adapter_names")
        if names is None:
            what = "`alora_offsets`" if "alora_offsets" in keywords else _function(hook).__module__
            raise ValueError(
                f"Adapters whose effect depends on the input of a forward ({what}) are not supported by `generate`: "
                "a forward has a window of the text, and of other rows each time. Take an adapter of fixed weights, "
                "such as LoRA, or generate inside `with model.disable_adapter():`."
            )
        if decoding in ("d2f", "autoregressive", "verified"):
            raise ValueError(
                f"`adapter_names` is not supported with decoding={decoding!r}: rows share forwards and leave the "
                "batch, and their adapters would not go with them. Generate for one adapter at a time "
                "(`model.set_adapter(name)`), or take decoding='vanilla' or decoding='fast_dllm'."
            )
        if len(names) != num_rows:
            raise ValueError(
                f"`adapter_names` must have a name for each of the {num_rows} rows (prompts times "
                f"`num_return_sequences`), got {len(names)}."
            )
        if any(module is part for part in head.modules()):
            raise ValueError(
                "`adapter_names` is not supported for adapters on the head, which reads masked tokens of all rows at "
                "once. Generate for one adapter at a time (`model.set_adapter(name)`)."
            )


def remove_adapter_hooks(model: nn.Module) -> None:
    """Removes the hooks that peft leaves behind when its `generate` with `adapter_names` ends in an exception."""
    for module, key, hook in list(_adapter_hooks(model)):
        if isinstance(hook, functools.partial):
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def _adapter_hooks(model: nn.Module) -> Iterator[tuple[nn.Module, int, Any]]:
    """The hooks of peft that run before a forward: their module, key and function."""
    for module in model.modules():
        for key, hook in module._forward_pre_hooks.items():
            if _function(hook).__module__.partition(".")[0] == "peft":
                yield module, key, hook


def _function(hook: Any) -> Any:
    hook = hook.func if isinstance(hook, functools.partial) else hook
    return hook if hasattr(hook, "__module__") else type(hook)

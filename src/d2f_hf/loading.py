"""Original checkpoints, with or without a D2F adapter, as D2F models.

What can be wrong with the files shows in their configurations and in the headers of their safetensors files. All of it
is checked before a weight is loaded, because transformers and peft only warn about weights that do not fit.
"""

import copy
import functools
from collections.abc import Iterable
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import GenerationConfig, PreTrainedConfig

from d2f_hf.adapters import SPECIAL_TOKENS, checked_adapter, say_untied, settings_beside_adapter, untie
from d2f_hf.architectures import Architecture, architecture_of, config_values
from d2f_hf.checkpoint_files import checked_headers, checked_path, find_file, read_json, weight_files
from d2f_hf.mask_token import give_mask_row, named_mask_token, read_vocabulary
from d2f_hf.modeling import D2FGenerationConfig
from d2f_hf.modeling.modeling_d2f import D2FForBlockDiffusion

if TYPE_CHECKING:
    from peft import PeftModel

# Options of `from_pretrained`: those about files, those that go on to it, and those that change nothing here.
_HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "subfolder", "token")
_MODEL_OPTIONS = (
    *("device_mesh", "distributed_config", "tp_plan", "tp_size"),
    *("disable_mmap", "max_memory", "offload_buffers", "offload_folder", "quantization_config", "tqdm_class"),
    *("allow_all_kernels", "fusion_config", "kernel_config", "use_kernels"),
    *("generation_config", "variant"),
)
_WITHOUT_EFFECT = ("code_revision", "low_cpu_mem_usage", "offload_state_dict", "trust_remote_code", "weights_only")
_ONLY_SAFETENSORS = "only safetensors files are read. Convert the weights once, and leave it out"
_REFUSED_OPTIONS = {
    "adapter_kwargs": "pass the folder or Hub id of an adapter as `adapter`",
    "adapter_name": "the adapter of `merge=False` is named 'default'. Load others with `model.load_adapter`",
    "config": "the configuration is read from `base`. Pass the fields that you want to change by their names",
    "from_flax": _ONLY_SAFETENSORS,
    "from_tf": _ONLY_SAFETENSORS,
    "gguf_file": _ONLY_SAFETENSORS,
    "ignore_mismatched_sizes": "every weight must fit, and what does not is an error. Leave it out",
    "key_mapping": "weights must have the original names. Rename them once, in a copy of the files",
    "output_loading_info": "every weight must fit, so there is nothing to inform about. Leave it out",
    "return_unused_kwargs": "an option that is not used is an error. Leave it out",
    "state_dict": "the weights are read from `base`. Call `load_state_dict` on the model",
    "use_auth_token": "it is called `token` now",
}


def load_d2f_model(
    base: str | PathLike,
    adapter: str | PathLike | None = None,
    *,
    merge: bool = True,
    mask_token: str | None = None,
    dtype: str | torch.dtype = "auto",
    device_map: Any = None,
    revision: str = "main",
    **kwargs,
) -> "D2FForBlockDiffusion | PeftModel":
    """A D2F model from an original checkpoint, or from one of ours, with the D2F adapter that was trained for it.

    ```python
    model = load_d2f_model("GSAI-ML/LLaDA-8B-Instruct", "SJTU-Deng-Lab/D2F_LLaDA_Instruct_8B_Lora", dtype="bfloat16")
    model.save_pretrained("llada-d2f")  # weights, configs and code: loads with trust_remote_code=True alone
    ```

    1. The configurations. The checkpoint's own code is never executed, whatever its `auto_map` says.
    2. The headers of all weights, the adapter's first, against the model's parameters.
    3. The weights of the base.
    4. The adapter, on top or merged.

    Two things may not be in the files. The block size that an adapter was trained with: adapters of [`D2FTrainer`]
    bring it along, for others pass `block_size` if it is not 32. And the token that ends an answer, where it is not
    the one that ends a text: for LLaDA-Instruct pass as `eos_token_id` the ids of both, its EOS and `<|eot_id|>`.

    An autoregressive checkpoint comes as it is, with `decoding="autoregressive"`, and with a mask token, so that it
    can be trained as a diffusion model: the one that you name as `mask_token` or `mask_token_id`, else one that the
    tokenizer files name, else a new one. A new one has the id that the tokenizer gives to its next token. If the
    embedding has no row of that id, as it has in Qwen, one is appended. Its rows are the means of the others. Give it
    to the tokenizer with [`add_mask_token`]`(model, tokenizer)`. Of generation_config.json only special tokens count.

    Args:
        base (`str` or `os.PathLike`): Folder or Hub id of a LLaDA, LLaDA-1.5, Dream, Dream-Coder or DiffuCoder; of an
            SDAR, TraDo or Fast-dLLM v2; of a Llama, SmolLM2, Mistral without sliding window, Qwen2, Qwen2.5 or Qwen3;
            or of a D2F model (not of an adapter). Its weights must be safetensors files.
        adapter (`str` or `os.PathLike`, *optional*): Folder or Hub id of a LoRA adapter. Its
            `base_model_name_or_path` is ignored: it often names a folder of its authors' machine. Block size and
            special tokens are taken from its config.json or generation_config.json, if it has one. Needs peft.
        merge (`bool`): Add the adapter to the weights, in float32 and then rounded to `dtype`, which gives a plain
            model. `False` gives a `PeftModel`, whose adapter stays in float32. Where the head is tied to the
            embedding and the adapter is on either of them, both get weights of their own.
        mask_token (`str`, *optional*): A token of the vocabulary that becomes the mask token, such as
            `"<|reserved_special_token_0|>"` of Llama 3. Read from the tokenizer files; or pass `mask_token_id`.
        dtype (`str` or `torch.dtype`): Of the model that is returned; `"auto"`: what the configuration says.
            `torch_dtype` is another name for it.
        device_map (`str`, `dict` or `torch.device`, *optional*): As in `from_pretrained`. With an adapter nothing can
            be offloaded to disk: merge and save first.
        revision (`str`): Branch, tag or commit of `base` on the Hub.
        kwargs: As in `from_pretrained`: fields of the configuration, such as `block_size`, `mask_token_id` or
            `eos_token_id`, which are saved with the model; and its options, such as `attn_implementation`,
            `quantization_config`, `variant`, `cache_dir` or `token`. Those for the Hub are used for the adapter too,
            except `revision` and `subfolder`.

    Returns:
        The model in evaluation mode: a [`D2FLLaDAForBlockDiffusion`], [`D2FDreamForBlockDiffusion`] (Qwen2 too),
        [`D2FLlamaForBlockDiffusion`] or [`D2FQwen3ForBlockDiffusion`]; with `merge=False` a `PeftModel` of it.

    Raises:
        ValueError: before any weight is loaded, for an option that is not known or cannot be heeded; if `base` is
            another architecture, names no mask token, or lacks weights or has others; or if `adapter` does not belong
            to it.
        ImportError: for an adapter without peft.
        OSError: for a folder or Hub id that does not exist, or cannot be reached.
    """
    base = checked_path("base", base)
    adapter = None if adapter is None else checked_path("adapter", adapter)
    if adapter is not None and isinstance(device_map, dict) and "disk" in device_map.values():
        raise ValueError(
            "`device_map` must leave nothing on the disk with an `adapter`: peft would write into the checkpoint. "
            "Load and merge with device_map='cpu', save the model, and load that one."
        )
    dtype, torch_dtype = _checked_dtype("dtype", dtype), _checked_dtype("torch_dtype", kwargs.pop("torch_dtype", None))
    if None not in (dtype, torch_dtype) and dtype != torch_dtype:
        raise ValueError(f"`torch_dtype` ({torch_dtype}) is another name for `dtype` ({dtype}). Give one of them.")
    dtype = dtype or torch_dtype
    options = _checked_options(kwargs)
    hub = {"revision": revision, **{name: options.pop(name) for name in _HUB_OPTIONS if name in options}}
    adapter_hub = {name: value for name, value in hub.items() if name not in ("revision", "subfolder")}

    # 1. The configurations.
    config, architecture, new_mask_id, model_options = _read_settings(
        base, adapter, hub, adapter_hub, options, mask_token
    )
    model_class = architecture.model_class
    quantization_config = model_options.get("quantization_config") or getattr(config, "quantization_config", None)
    if adapter is not None and merge and quantization_config is not None:
        raise ValueError(
            "`merge` must be False for a model with a `quantization_config`, but it is True: rounding the sum again "
            "loses most of the adapter. Or merge without quantization, save the model, and quantize that one."
        )

    if new_mask_id is not None and isinstance(device_map, dict) and "disk" in device_map.values():
        raise ValueError(
            "`device_map` must leave nothing on the disk for a model that gets a new mask token, because its "
            "embedding is written to. Load it with device_map='cpu', save it, and load that one. Or name a token of "
            "the vocabulary as `mask_token` or `mask_token_id`."
        )

    # 2. What is in the files.
    try:
        with torch.device("meta"):
            empty_model = model_class(config)
    except (TypeError, ValueError, ArithmeticError, RuntimeError, ImportError) as error:
        raise ValueError(
            f"{base}/config.json, or an option that replaces a value in it, must describe a {model_class.__name__}: "
            f"{error}"
        ) from error
    parameters = dict(empty_model.state_dict())  # before the adapter's are among them
    tied = dict(empty_model.all_tied_weights_keys)
    lora_folder, lora_config, must_untie = None, None, False
    if adapter is not None:
        if new_mask_id == config.vocab_size:  # the adapter is for a model that has the row already
            with torch.device("meta"):
                empty_model = model_class(_with_vocab_size(config, new_mask_id + 1))
        lora_folder, lora_config, must_untie = checked_adapter(empty_model, adapter, adapter_hub, merge)
    weights = checked_headers(
        weight_files(base, hub, model_options.get("variant")),
        parameters,
        tied,
        way_out=f"`base` must be a whole {model_class.__name__}, and its config.json the one of these weights.",
    )

    # 3. The base. For merging no narrower than it is stored, so that the sum is rounded once.
    stored_dtype = functools.reduce(torch.promote_types, [weight.dtype for weight in weights.values()])
    if dtype is None:
        dtype = config.dtype or stored_dtype
    is_merged = lora_config is not None and merge
    hub["force_download"] = False  # the files have come by now
    model = model_class.from_pretrained(
        base,
        config=config,
        dtype=torch.promote_types(dtype, stored_dtype) if is_merged else dtype,
        device_map=device_map,
        **hub,
        **model_options,
    )
    if new_mask_id is not None:
        give_mask_row(model, new_mask_id)
    # As in `from_pretrained`: what is as it was read can be saved, and is only warned about.
    model.generation_config._original_object_hash = hash(model.generation_config)
    if lora_config is None:
        return model

    if "disk" in (getattr(model, "hf_device_map", None) or {}).values():
        raise ValueError(
            f"`device_map` ({device_map!r}) puts layers on the disk, where peft would write into the checkpoint. "
            "Load and merge with device_map='cpu', save the model, and load that one."
        )

    # 4. The adapter. peft keeps it in float32, and adds it to a narrower weight in float32.
    from peft import PeftModel

    if must_untie:
        if model.get_output_embeddings().weight.is_meta:
            raise ValueError(
                f"`device_map` ({device_map!r}) must leave the head on a device, because the adapter is on the head "
                "or the embedding, and the two are tied. Load and merge with device_map='cpu', save the model, and "
                "load that one."
            )
        untie(model)
    lora_config.base_model_name_or_path, lora_config.revision = str(base), revision
    adapted = PeftModel.from_pretrained(model, lora_folder, config=lora_config)
    if must_untie:  # only now, because peft ties its own weights where the configuration says so
        say_untied(model)
    if not merge:
        return adapted
    model = adapted.merge_and_unload()
    if model.dtype != dtype:
        model = model.to(dtype)
        model.config.dtype = dtype
    return model


def read_configurations(base: str, adapter: str | None = None) -> tuple[PreTrainedConfig, D2FGenerationConfig]:
    """What [`load_d2f_model`] would give the model as its `config` and `generation_config`. No weight is read.

    Raises:
        ValueError, OSError: as there.
    """
    config, _, new_mask_id, options = _read_settings(checked_path("base", base), adapter, {}, {}, {}, None)
    if new_mask_id is not None:
        config.vocab_size, config.mask_token_id = max(config.vocab_size, new_mask_id + 1), new_mask_id
    return config, options["generation_config"]


def _read_settings(
    base: str,
    adapter: str | None,
    hub: dict[str, Any],
    adapter_hub: dict[str, Any],
    options: dict[str, Any],
    mask_token: str | None,
) -> tuple[PreTrainedConfig, Architecture, int | None, dict[str, Any]]:
    """The configuration, the architecture, the id of a new mask token, and the options for `from_pretrained`.

    Among these is the generation config.
    """
    trained_with = {} if adapter is None else settings_beside_adapter(adapter, adapter_hub)
    replaced = {*options, *trained_with}
    config, architecture, is_original, new_mask_id, model_options = _read_config(
        base, hub, options, trained_with, mask_token
    )
    if adapter is not None:  # and what that was trained for is not known
        config.trained_for = None
    if model_options.get("generation_config") is None:
        said = architecture.generation if is_original else {}
        if architecture.is_autoregressive and config.has_causal_mode:
            said = {"decoding": "autoregressive"}
        model_options["generation_config"] = _read_generation_config(base, hub, config, is_original, replaced, said)
    return config, architecture, new_mask_id, model_options


def _checked_dtype(name: str, dtype: Any) -> torch.dtype | None:
    """The torch.dtype that an option asks for; `None`: what the checkpoint says."""
    if dtype is None or (isinstance(dtype, str) and dtype == "auto"):
        return None
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point or found.itemsize < 2:
        raise ValueError(
            f"`{name}` must be 'auto', or a floating torch.dtype of 16 bits or more, or its name such as 'bfloat16', "
            f"got {dtype!r}. Fewer bits are a matter of `quantization_config`."
        )
    return found


def _checked_options(options: dict[str, Any]) -> dict[str, Any]:
    """`options` without those that change nothing, if there is none that cannot be heeded."""
    if options.get("use_safetensors") not in (None, True):
        raise ValueError(
            f"`use_safetensors` must be True, but it is {options['use_safetensors']!r}: {_ONLY_SAFETENSORS}."
        )
    if options.get("return_dict") not in (None, True):
        raise ValueError("`return_dict` must be True, but it is False: decoding needs the names. Leave it out.")
    generation_config = options.get("generation_config")
    if generation_config is not None and not isinstance(generation_config, GenerationConfig):
        raise ValueError(
            f"`generation_config` must be a GenerationConfig, but it is a {type(generation_config).__name__}. Pass "
            "`D2FGenerationConfig(...)`."
        )
    for name, way_out in _REFUSED_OPTIONS.items():
        if options.get(name):
            raise ValueError(f"`{name}` is not supported by `load_d2f_model`: {way_out}.")
    dropped = ("use_safetensors", *_WITHOUT_EFFECT, *_REFUSED_OPTIONS)
    return {name: value for name, value in options.items() if name not in dropped}


def _read_config(
    base: str,
    hub: dict[str, Any],
    options: dict[str, Any],
    trained_with: dict[str, Any],
    mask_token: str | None,
) -> tuple[PreTrainedConfig, Architecture, bool, int | None, dict[str, Any]]:
    """What config.json says, and what of `options` is for `from_pretrained`.

    `options` replace what an adapter was `trained_with`, which replaces what the checkpoint says.

    Returns:
        The configuration, the architecture, whether the checkpoint is an original one, the id of a mask token that
        the model was not trained with, and the options for `from_pretrained`.
    """
    if find_file(base, "adapter_config.json", hub) is not None:  # from_pretrained would apply it unasked
        raise ValueError(
            f"`base` must be a model alone, but {base} holds an adapter_config.json. Pass that folder or Hub id as "
            "`adapter`, and as `base` the model that the adapter was trained on."
        )
    file = f"{base}/config.json"
    config_file = find_file(base, "config.json", hub)
    if config_file is not None:
        read_json(config_file)
    values, _ = PreTrainedConfig.get_config_dict(base, **hub)
    model_type = values.get("model_type")
    architecture = architecture_of(model_type, file)
    config_class, options = architecture.config_class, dict(options)
    values = config_values(values, options, model_type, file)
    if mask_token is not None and options.get("mask_token_id") is not None:
        raise ValueError(
            f"`mask_token` (got {mask_token!r}) and `mask_token_id` (got {options['mask_token_id']}) both say which "
            "token is the mask. Give one of them."
        )
    masks = values.get("mask_token_id"), trained_with.get("mask_token_id")
    if mask_token is None and "mask_token_id" not in options and None not in masks and masks[0] != masks[1]:
        raise ValueError(
            f"`mask_token_id` must be the one that the adapter was trained with, {masks[1]}, but in {file} it is "
            f"{masks[0]}. Pass the `base` that the adapter was trained on, or `mask_token_id`."
        )
    # What `from_dict` knows no name for is an option of `from_pretrained`, or a mistake.
    replaced = {**{name: value for name, value in trained_with.items() if name not in options}, **options}
    # The id behind the last one is that of a row which is not there yet.
    new_mask_id, was_autoregressive = None, bool(values.get("has_causal_mode"))
    is_behind = type(replaced.get("mask_token_id")) is int and replaced["mask_token_id"] == values.get("vocab_size")
    if is_behind and was_autoregressive:
        new_mask_id = replaced.pop("mask_token_id")
        values.pop("mask_token_id", None)
    try:
        config, model_options = config_class.from_dict(values, return_unused_kwargs=True, **replaced)
        config.validate()  # the options too
    except (ValueError, TypeError, ArithmeticError, AttributeError, StrictDataclassError) as error:
        raise ValueError(f"{file} or an option that replaces a value in it: {error}") from error
    unknown = [name for name in model_options if name not in _MODEL_OPTIONS]
    if unknown:
        raise ValueError(
            f"`{unknown[0]}` must be a field of {config_class.__name__} or an option of `from_pretrained`, but it is "
            "neither. Correct the name or leave it out."
        )
    if new_mask_id is None:
        is_trained_with = "mask_token_id" not in options and trained_with.get("mask_token_id") is not None
        released_id = architecture.mask_token_id
        new_mask_id = _choose_mask_token(
            base, hub, config, released_id, mask_token, is_trained_with, may_be_new=was_autoregressive
        )
    return config, architecture, model_type != config_class.model_type, new_mask_id, model_options


def _choose_mask_token(
    base: str,
    hub: dict[str, Any],
    config: Any,
    released_id: int | None,
    mask_token: str | None,
    is_trained_with: bool,
    may_be_new: bool,
) -> int | None:
    """Sets `config.mask_token_id`, and returns it if it is one that the model was not trained with.

    An id behind the last row is only returned.
    """
    if config.mask_token_id is not None and mask_token is None and not (may_be_new and is_trained_with):
        return None
    vocabulary = read_vocabulary(base, hub)
    free_id = config.vocab_size if vocabulary is None else vocabulary.next_id
    if mask_token is not None:
        found = named_mask_token(mask_token, vocabulary, base)
    elif config.mask_token_id is not None:  # an adapter was trained with it, on a row that was made as here
        return config.mask_token_id if config.mask_token_id == free_id else None
    else:
        found = None if vocabulary is None else vocabulary.mask_token_id
        if found is None and released_id is not None and released_id < config.vocab_size:
            found = released_id
    if found is not None:
        if found >= config.vocab_size:
            raise ValueError(
                f"The mask token in the tokenizer files of {base} must have a row of the embedding, but it has the id "
                f"{found}, and there are {config.vocab_size} rows. Pass another one as `mask_token_id`."
            )
        config.mask_token_id = found
        return None
    if not may_be_new:
        raise ValueError(
            f"`mask_token_id` in {base}/config.json must be the id of the mask token, which stands for what is not "
            "decoded yet, but there is none, nor in the tokenizer files. If the vocabulary has such a token, pass "
            "`mask_token_id=tokenizer.mask_token_id` to `load_d2f_model`; if not, add one to the tokenizer and resize "
            "the model's embeddings."
        )
    if free_id > config.vocab_size:
        raise ValueError(
            f"The tokenizer files of {base} must not have more tokens than the embedding has rows, but they have "
            f"{free_id}, and there are {config.vocab_size} rows. Pass the token that stands for what is not decoded "
            "yet as `mask_token_id`."
        )
    if free_id < config.vocab_size:
        config.mask_token_id = free_id
    return free_id


def _with_vocab_size(config: PreTrainedConfig, vocab_size: int) -> PreTrainedConfig:
    config = copy.deepcopy(config)
    config.vocab_size = vocab_size
    return config


def _read_generation_config(
    base: str,
    hub: dict[str, Any],
    config: PreTrainedConfig,
    is_original: bool,
    options: Iterable[str],
    said: dict[str, Any],
) -> D2FGenerationConfig:
    """What generation_config.json says, if there is one; else `said`, the configuration and the paper."""
    file = find_file(base, "generation_config.json", hub)
    saved = read_json(file) if file is not None else {}
    if is_original:  # the rest sets up a sampler that is not here, such as Dream's `alg` and `steps`
        saved = {name: saved[name] for name in SPECIAL_TOKENS if saved.get(name) is not None}
    saved = {name: value for name, value in saved.items() if name not in options}
    if saved.get("decoding") == "autoregressive" and not config.has_causal_mode:  # it has an adapter of D2F
        del saved["decoding"]
    known = D2FGenerationConfig.from_model_config(config).to_dict()
    return D2FGenerationConfig.from_dict({**known, **said, **saved})

"""Original LLaDA and Dream checkpoints, with or without a released D2F adapter, as D2F models.

What can be wrong with the files shows in their configurations and in the headers of their safetensors files. All of it
is checked before a weight is loaded, because transformers and peft only warn about weights that do not fit.
"""

import copy
import functools
import json
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import load_state_dict
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from d2f_hf.modeling import (
    D2FDreamConfig,
    D2FDreamForBlockDiffusion,
    D2FGenerationConfig,
    D2FLLaDAConfig,
    D2FLLaDAForBlockDiffusion,
)

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

# `model_type` in config.json: that of the original checkpoints (LLaDA and LLaDA-1.5; Dream, Dream-Coder and
# DiffuCoder), and ours.
_MODELS = {
    "llada": (D2FLLaDAConfig, D2FLLaDAForBlockDiffusion),
    "d2f_llada": (D2FLLaDAConfig, D2FLLaDAForBlockDiffusion),
    "Dream": (D2FDreamConfig, D2FDreamForBlockDiffusion),
    "d2f_dream": (D2FDreamConfig, D2FDreamForBlockDiffusion),
}

_HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "subfolder", "token")
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def load_d2f_model(
    base: str | PathLike,
    adapter: str | PathLike | None = None,
    *,
    merge: bool = True,
    dtype: str | torch.dtype = "auto",
    device_map: Any = None,
    revision: str = "main",
    **kwargs,
) -> "D2FLLaDAForBlockDiffusion | D2FDreamForBlockDiffusion | PeftModel":
    """A D2F model from an original checkpoint, or from one of ours, with the D2F adapter that was trained for it.

    ```python
    model = load_d2f_model("GSAI-ML/LLaDA-8B-Instruct", "SJTU-Deng-Lab/D2F_LLaDA_Instruct_8B_Lora", dtype="bfloat16")
    model.save_pretrained("llada-d2f")  # weights, configs and code: loads with trust_remote_code=True alone
    ```

    1. The configurations. The checkpoint's own code is never executed, whatever its `auto_map` says.
    2. The headers of all weights, the adapter's first, against the model's parameters.
    3. The weights of the base.
    4. The adapter, on top or merged.

    Two things are not in the files. The block size that an adapter was trained with: pass `block_size` if it is not
    32. And the token that ends an answer, where it is not the one that ends a text: for LLaDA-Instruct pass
    as `eos_token_id` the ids of both, its EOS and `<|eot_id|>`.

    Args:
        base (`str` or `os.PathLike`): Folder or Hub id of a LLaDA, LLaDA-1.5, Dream, Dream-Coder or DiffuCoder, or of
            a D2F model (not of an adapter). Its weights must be safetensors files.
        adapter (`str` or `os.PathLike`, *optional*): Folder or Hub id of a LoRA adapter. Its
            `base_model_name_or_path` is ignored: it often names a folder of its authors' machine. Needs peft.
        merge (`bool`): Add the adapter to the weights, in float32 and then rounded to `dtype`, which gives a plain
            model. `False` gives a `PeftModel`, whose adapter stays in float32.
        dtype (`str` or `torch.dtype`): Of the model that is returned; `"auto"`: what the configuration says.
        device_map (`str`, `dict` or `torch.device`, *optional*): As in `from_pretrained`. With an adapter nothing can
            be offloaded to disk: merge and save first.
        revision (`str`): Branch, tag or commit of `base` on the Hub.
        kwargs: As in `from_pretrained`: fields of the configuration, such as `block_size`, `mask_token_id` or
            `eos_token_id`, which are saved with the model; and its options, such as `attn_implementation`,
            `quantization_config`, `cache_dir` or `token`. Those for the Hub are used for the adapter too, except
            `revision` and `subfolder`.

    Returns:
        The model in evaluation mode: [`D2FLLaDAForBlockDiffusion`] or [`D2FDreamForBlockDiffusion`], or with
        `merge=False` a `PeftModel` of it.

    Raises:
        ValueError: before any weight is loaded, if `base` is another architecture, names no mask token, or lacks
            weights or has others; or if `adapter` does not belong to it.
        ImportError: for an adapter without peft.
        OSError: for a folder or Hub id that does not exist, or cannot be reached.
    """
    if adapter is not None and isinstance(device_map, dict) and "disk" in device_map.values():
        raise ValueError(
            "`device_map` must leave nothing on the disk with an `adapter`: peft would write into the checkpoint. "
            "Load and merge with device_map='cpu', save the model, and load that one."
        )
    hub = {"revision": revision, **{name: kwargs.pop(name) for name in _HUB_OPTIONS if name in kwargs}}

    # 1. The configurations.
    config, model_class, is_original, model_options = _read_config(base, hub, kwargs)
    if "generation_config" not in model_options:
        model_options["generation_config"] = _read_generation_config(base, hub, config, is_original, kwargs)
    quantization_config = model_options.get("quantization_config") or getattr(config, "quantization_config", None)
    if adapter is not None and merge and quantization_config is not None:
        raise ValueError(
            "`merge` must be False for a model with a `quantization_config`, but it is True: rounding the sum again "
            "loses most of the adapter. Or merge without quantization, save the model, and quantize that one."
        )

    # 2. What is in the files.
    try:
        with torch.device("meta"):
            empty_model = model_class(config)
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f"{base}/config.json must describe a {model_class.__name__}: {error}") from error
    parameters = dict(empty_model.state_dict())  # before the adapter's are among them
    lora_folder, lora_config = (None, None) if adapter is None else _checked_adapter(empty_model, adapter, hub)
    weights = _checked_headers(
        _weight_files(base, hub),
        parameters,
        empty_model.all_tied_weights_keys,
        way_out=f"`base` must be a whole {model_class.__name__}, and its config.json the one of these weights.",
    )

    # 3. The base. For merging no narrower than it is stored, so that the sum is rounded once.
    stored_dtype = functools.reduce(torch.promote_types, [weight.dtype for weight in weights.values()])
    if dtype is None or dtype == "auto":
        dtype = config.dtype or stored_dtype
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, dtype)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"`dtype` must be 'auto', or a torch.dtype or its name such as 'bfloat16', got {dtype!r}.")
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
    if lora_config is None:
        return model

    if "disk" in (getattr(model, "hf_device_map", None) or {}).values():
        raise ValueError(
            f"`device_map` ({device_map!r}) puts layers on the disk, where peft would write into the checkpoint. "
            "Load and merge with device_map='cpu', save the model, and load that one."
        )

    # 4. The adapter. peft keeps it in float32, and adds it to a narrower weight in float32.
    from peft import PeftModel

    lora_config.base_model_name_or_path, lora_config.revision = str(base), revision
    adapted = PeftModel.from_pretrained(model, lora_folder, config=lora_config)
    if not merge:
        return adapted
    model = adapted.merge_and_unload()
    if model.dtype != dtype:
        model = model.to(dtype)
        model.config.dtype = dtype
    return model


def _read_config(
    base: str | PathLike, hub: dict[str, Any], options: dict[str, Any]
) -> tuple[PreTrainedConfig, type[PreTrainedModel], bool, dict[str, Any]]:
    """Configuration, model class, whether the checkpoint is an original one, and the options for `from_pretrained`."""
    if _find(base, "adapter_config.json", hub) is not None:  # from_pretrained would apply it unasked
        raise ValueError(
            f"`base` must be a model alone, but {base} holds an adapter_config.json. Pass that folder or Hub id as "
            "`adapter`, and as `base` the model that the adapter was trained on."
        )
    file = f"{base}/config.json"
    config_file = _find(base, "config.json", hub)
    if config_file is not None:
        _read_json(config_file)
    values, _ = PreTrainedConfig.get_config_dict(base, **hub)
    model_type = values.get("model_type")
    if model_type not in _MODELS:
        raise ValueError(
            f"`model_type` in {file} must be one of {', '.join(_MODELS)}, but it is {model_type!r}. Pass the folder "
            "or Hub id of a LLaDA, Dream, Dream-Coder, DiffuCoder or D2F model; there is no code for others."
        )
    config_class, model_class = _MODELS[model_type]
    for name in ("model_type", "architectures", "auto_map"):  # about the code that the checkpoint came with
        values.pop(name, None)
    try:
        config, model_options = config_class.from_dict(values, return_unused_kwargs=True, **options)
        config.validate()  # the options too
    except (ValueError, TypeError, ArithmeticError, AttributeError, StrictDataclassError) as error:
        raise ValueError(f"{file} or an option that replaces a value in it: {error}") from error
    if config.mask_token_id is None:
        raise ValueError(
            f"`mask_token_id` in {file} must be the id of the mask token, which stands for what is not decoded yet, "
            "but there is none. If the vocabulary has such a token, pass `mask_token_id=tokenizer.mask_token_id` to "
            "`load_d2f_model`; if not, add one to the tokenizer and resize the model's embeddings."
        )
    return config, model_class, model_type != config_class.model_type, model_options


def _read_generation_config(
    base: str | PathLike, hub: dict[str, Any], config: PreTrainedConfig, is_original: bool, options: dict[str, Any]
) -> D2FGenerationConfig:
    """What generation_config.json says, if there is one; where it says nothing, the configuration and the paper."""
    file = _find(base, "generation_config.json", hub)
    saved = _read_json(file) if file is not None else {}
    if is_original:  # the rest sets up a sampler that is not here, such as Dream's `alg` and `steps`
        saved = {name: saved[name] for name in _SPECIAL_TOKENS if saved.get(name) is not None}
    saved = {name: value for name, value in saved.items() if name not in options}
    return D2FGenerationConfig.from_dict({**D2FGenerationConfig.from_model_config(config).to_dict(), **saved})


def _weight_files(base: str | PathLike, hub: dict[str, Any]) -> list[str]:
    """The safetensors files of a checkpoint, downloaded if need be."""
    file = _find(base, SAFE_WEIGHTS_NAME, hub)
    if file is not None:
        return [file]
    index = _find(base, SAFE_WEIGHTS_INDEX_NAME, hub)
    if index is not None:
        if not _read_json(index).get("weight_map"):
            raise ValueError(f"`weight_map` in {index} must name the file of each weight, but it is missing or empty.")
        return get_checkpoint_shard_files(base, index, **hub)[0]
    raise ValueError(
        f"The weights in {base} must be in {SAFE_WEIGHTS_NAME}, or in files named in {SAFE_WEIGHTS_INDEX_NAME}, but "
        "there is neither. Files named .bin are not loaded, because they may hold code. Convert them once: "
        '`safetensors.torch.save_file(torch.load("pytorch_model.bin", weights_only=True), "model.safetensors", '
        'metadata={"format": "pt"})`.'
    )


def _checked_headers(
    files: list[str], expected: dict[str, torch.Tensor], tied: dict[str, str], way_out: str
) -> dict[str, torch.Tensor]:
    """The tensors in safetensors files, by name and on the meta device, if they are exactly the `expected` ones.

    Args:
        files (`list[str]`): Paths. Only their headers are read.
        expected (`dict[str, torch.Tensor]`): What must be in them, by name; only shapes count.
        tied (`dict[str, str]`): Pairs of names that share a tensor, so that either may be absent.
        way_out (`str`): Ends the message of each error.
    """
    found = {}
    for file in files:
        try:
            header = load_state_dict(file, map_location="meta")
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"{file} must be a whole safetensors file, but it cannot be read: {error}. Download it again; after a "
                "`git clone`, run `git lfs pull`."
            ) from error
        for name, weight in header.items():
            if name not in expected:
                raise ValueError(f"{file} must hold nothing but the model's weights, but it has `{name}`. {way_out}")
            if weight.shape != expected[name].shape:
                raise ValueError(
                    f"`{name}` in {file} must have the shape {tuple(expected[name].shape)}, but it has "
                    f"{tuple(weight.shape)}. {way_out}"
                )
        found |= header
    missing = [name for name in expected if name not in found]
    for pair in tied.items():
        if any(name in found for name in pair):
            missing = [name for name in missing if name not in pair]
    if missing:
        raise ValueError(
            f"{', '.join(files)} must hold all {len(expected)} weights, but {len(missing)} are missing, among them "
            f"`{missing[0]}`. {way_out}"
        )
    return found


def _checked_adapter(
    empty_model: PreTrainedModel, adapter: str | PathLike, hub: dict[str, Any]
) -> tuple[Path, "LoraConfig"]:
    """The local folder of an adapter and its configuration, if it fits the model, which gets the adapter's layers."""
    try:
        from peft import LoraConfig, PeftModel, get_peft_model_state_dict
    except ImportError as error:
        raise ImportError('`adapter` needs peft: pip install "d2f-hf[train]"') from error

    hub = {name: value for name, value in hub.items() if name not in ("revision", "subfolder")}
    config_file, weights_file = (
        _find(adapter, name, hub) for name in ("adapter_config.json", "adapter_model.safetensors")
    )
    if config_file is None or weights_file is None:
        raise ValueError(
            f"{adapter} must hold adapter_config.json and adapter_model.safetensors, but "
            f"{'the first' if config_file is None else 'the second'} is missing. A whole model is passed as `base` "
            "alone; an adapter_model.bin is converted by loading and saving it with peft."
        )
    peft_type = _read_json(config_file).get("peft_type")
    if peft_type != "LORA":
        raise ValueError(
            f"`peft_type` in {config_file} must be 'LORA', but it is {peft_type!r}. Load another kind of adapter with "
            "peft, on the model that `load_d2f_model` gives without `adapter`."
        )
    folder = Path(config_file).parent
    try:
        lora_config = LoraConfig.from_pretrained(str(folder))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{config_file} must be the configuration of a LoRA adapter: {error}") from error
    way_out = f"Pass the `base` that the adapter was trained on; this one is a {type(empty_model).__name__}."

    modules = [name for name, _ in empty_model.named_modules()]
    targets = lora_config.target_modules or ()
    if not isinstance(targets, (str, list, tuple, set)):
        raise ValueError(f"`target_modules` in {config_file} must be a list or a pattern, but it is {targets!r}.")
    targets = [] if isinstance(targets, str) else sorted(targets)
    for target in targets:
        if not any(f".{module}".endswith(f".{target}") for module in modules):
            raise ValueError(
                f"`target_modules` in {config_file} must be modules of the model, but it has no {target!r}. {way_out}"
            )
    try:
        adapted = PeftModel(empty_model, copy.deepcopy(lora_config), low_cpu_mem_usage=True)
    except Exception as error:  # peft and re raise many kinds for values that make no sense
        raise ValueError(f"{config_file} does not fit the model: {error} {way_out}") from error
    expected = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    _checked_headers([weights_file], expected, tied={}, way_out=way_out)
    return folder, lora_config


def _find(folder_or_id: str | PathLike, name: str, hub: dict[str, Any]) -> str | None:
    """The path of a file of a folder or Hub repository, downloaded if need be; `None` if it has no such file."""
    return cached_file(folder_or_id, name, _raise_exceptions_for_missing_entries=False, **hub)


def _read_json(file: str | PathLike) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        values = json.loads(Path(file).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} must be a JSON file, but it cannot be read: {error}. Download it again.") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} must hold a JSON object, but it holds a {type(values).__name__}. Download it again.")
    return values

"""`d2f info`: what a model is. No weight is read."""

import importlib.metadata
import platform
from typing import Any

import torch
from d2f_hf.modeling.generate_arguments import check_decoding
from d2f_hf.modeling.generation_config_d2f import DECODING_MODES, OPTIONS
from transformers.utils import logging

from d2f_cli import console
from d2f_cli.console import Adapter, Debug, Json, Model
from d2f_cli.models import found
from d2f_hf import D2FGenerationConfig
from d2f_hf.architectures import ARCHITECTURES
from d2f_hf.checkpoint_files import find_file, read_json
from d2f_hf.loading import read_configurations

EXAMPLE = "d2f info GSAI-ML/LLaDA-8B-Instruct --adapter SJTU-Deng-Lab/D2F_LLaDA_Instruct_8B_Lora"
PACKAGES = ("d2f-hf", "torch", "transformers", "peft")


@console.ends_well
def info(*, model: Model, adapter: Adapter = None, as_json: Json = False, debug: Debug = False) -> None:
    """Says what a model is, and which decodings it can do. Reads its configuration alone."""
    facts = describe(model, adapter)
    if as_json:
        console.print_json(facts)
        return
    for name, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key}={entry}" for key, entry in value.items()) or "none"
        print(f"{name.replace('_', ' '):18} {value if value is not None else 'none'}")


def describe(name: str, adapter: str | None = None) -> dict[str, Any]:
    """What `--json` prints: see docs/cli.md."""
    base, own_adapter, _ = found(name)
    adapter = adapter or own_adapter
    config, generation_config = read_configurations(base, adapter)
    model_class = ARCHITECTURES[config.model_type].model_class
    with torch.device("meta"):
        model = model_class(config)
    return {
        "model": name,
        "architecture": model_class.__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "block_size": generation_config.block_size or config.block_size,
        "block_alignment": config.block_alignment,
        "mask_token_id": config.mask_token_id,
        "eos_token_id": generation_config.eos_token_id,
        "vocabulary": config.vocab_size,
        "adapter": None if adapter is None else describe_adapter(adapter),
        "trained_for": config.trained_for,
        "decodings": {decoding: decoding_of(model, decoding) for decoding in DECODING_MODES},
        "options": {
            name: value
            for name, option in OPTIONS.items()
            if (value := getattr(generation_config, name)) not in (None, False)
            and generation_config.decoding not in option.not_used_by
        },
        "versions": {"python": platform.python_version(), **versions()},
    }


def decoding_of(model: Any, decoding: str) -> str:
    """`"yes"`, `"untrained"` where the model was trained for another decoding alone, or `"no"`."""
    said, logger = [], logging.get_logger("d2f_hf.modeling.generate_arguments")
    warning_once, logger.warning_once = logger.warning_once, said.append
    try:
        check_decoding(model, D2FGenerationConfig(decoding=decoding))
    except ValueError:
        return "no"
    finally:
        logger.warning_once = warning_once
    return "untrained" if said else "yes"


def describe_adapter(adapter: str) -> dict[str, Any]:
    """Where an adapter is from and how large it is."""
    file = find_file(adapter, "adapter_config.json", {})
    if file is None:
        raise ValueError(f"`adapter` must be a folder or Hub id with an adapter_config.json, but {adapter} has none.")
    values = read_json(file)
    return {
        "name": adapter,
        "type": values.get("peft_type"),
        "rank": values.get("r"),
        "alpha": values.get("lora_alpha"),
    }


def versions() -> dict[str, str]:
    found_versions = {}
    for package in PACKAGES:
        try:
            found_versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found_versions

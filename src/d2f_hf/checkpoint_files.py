"""The files of a checkpoint, on the disk or on the Hub: JSON files and the headers of weights."""

import json
import os
import re
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers.modeling_utils import load_state_dict
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

# Old Llama checkpoints have the rotary frequencies of each layer. They follow from the configuration.
_COMPUTED = re.compile(r"\.rotary_emb\.inv_freq$")


def checked_path(name: str, path: str | PathLike) -> str:
    """A folder or Hub id, in which `~` is the user's home."""
    if not isinstance(path, (str, PathLike)) or not str(path):
        raise ValueError(f"`{name}` must be a folder or a Hub id, but it is {path!r}.")
    expanded = os.path.expanduser(os.fspath(path))
    if os.path.isfile(expanded):
        folder = os.path.dirname(os.path.abspath(expanded))
        raise ValueError(f"`{name}` must be a folder or a Hub id, but {path} is a file. Pass its folder, {folder}.")
    return expanded


def find_file(folder_or_id: str | PathLike, name: str, hub: dict[str, Any]) -> str | None:
    """The path of a file of a folder or Hub repository, downloaded if need be; `None` if it has no such file."""
    return cached_file(folder_or_id, name, _raise_exceptions_for_missing_entries=False, **hub)


def read_json(file: str | PathLike) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        values = json.loads(Path(file).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} must be a JSON file, but it cannot be read: {error}. Download it again.") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} must hold a JSON object, but it holds a {type(values).__name__}. Download it again.")
    return values


def weight_files(base: str, hub: dict[str, Any], variant: str | None) -> list[str]:
    """The safetensors files of a checkpoint, downloaded if need be."""
    one_file, index_file = SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME
    if variant is not None:  # model.fp16.safetensors, model.safetensors.index.fp16.json
        one_file, index_file = (f".{variant}.".join(name.rpartition(".")[::2]) for name in (one_file, index_file))
    file = find_file(base, one_file, hub)
    if file is not None:
        return [file]
    index = find_file(base, index_file, hub)
    if index is not None:
        if not read_json(index).get("weight_map"):
            raise ValueError(f"`weight_map` in {index} must name the file of each weight, but it is missing or empty.")
        return get_checkpoint_shard_files(base, index, **hub)[0]
    if variant is not None:
        raise ValueError(
            f"`variant` (got {variant!r}) must name weights in {base}, but there is neither {one_file} nor "
            f"{index_file}. Leave it out for {SAFE_WEIGHTS_NAME}."
        )
    raise ValueError(
        f"The weights in {base} must be in {SAFE_WEIGHTS_NAME}, or in files named in {SAFE_WEIGHTS_INDEX_NAME}, but "
        "there is neither. Files named .bin are not loaded, because they may hold code. Convert them once: "
        '`safetensors.torch.save_file(torch.load("pytorch_model.bin", weights_only=True), "model.safetensors", '
        'metadata={"format": "pt"})`.'
    )


def checked_headers(
    files: list[str],
    expected: dict[str, torch.Tensor],
    tied: dict[str, str],
    way_out: str,
    optional: dict[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """The tensors in safetensors files, by name and on the meta device, if they are exactly the `expected` ones.

    Args:
        files (`list[str]`): Paths. Only their headers are read.
        expected (`dict[str, torch.Tensor]`): What must be in them, by name; only shapes count.
        tied (`dict[str, str]`): Pairs of names that share a tensor, so that either may be absent.
        way_out (`str`): Ends the message of each error.
        optional (`dict[str, torch.Tensor]`, *optional*): What may be in them besides.
    """
    allowed = {**(optional or {}), **expected}
    found = {}
    for file in files:
        try:
            header = load_state_dict(file, map_location="meta")
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"{file} must be a whole safetensors file, but it cannot be read: {error}. Download it again; after a "
                "`git clone`, run `git lfs pull`."
            ) from error
        header = {name: weight for name, weight in header.items() if name in allowed or not _COMPUTED.search(name)}
        for name, weight in header.items():
            if name not in allowed:
                raise ValueError(f"{file} must hold nothing but the model's weights, but it has `{name}`. {way_out}")
            if weight.shape != allowed[name].shape:
                raise ValueError(
                    f"`{name}` in {file} must have the shape {tuple(allowed[name].shape)}, but it has "
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

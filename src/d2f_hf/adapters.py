"""LoRA adapters: what training left beside one, and whether it fits a model, before a weight is loaded."""

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from d2f_hf.checkpoint_files import checked_headers, find_file, read_json

if TYPE_CHECKING:
    from peft import LoraConfig

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# What decoding needs to know about the training of an adapter. Training saves it beside the adapter.
_DECODING_SETTINGS = ("block_size", "block_alignment", "has_causal_mode", "mask_token_id", *SPECIAL_TOKENS)

# Initial values of LoRA for which peft changes the base, by data, by chance or by packages that may not be there.
_UNREPEATABLE_INITS = ("corda", "loftq", "lora_ga", "pissa_niter")
# Kinds of LoRA that do more than add to the weights of layers, by the field of adapter_config.json that asks for them.
_REFUSED_LORA = {
    "alora_invocation_tokens": "it is active from certain tokens on, which decoding does not look for",
    "arrow_config": "it chooses among other adapters",
    "layer_replication": "it gives the model more layers",
    "megatron_config": "it is for the layers of Megatron",
    "monteclora_config": "it draws its weights at random",
}


def settings_beside_adapter(adapter: str, hub: dict[str, Any]) -> dict[str, Any]:
    """What config.json and generation_config.json in an adapter's folder say about decoding, if they are there."""
    settings = {}
    for name in ("generation_config.json", "config.json"):
        file = find_file(adapter, name, hub)
        values = read_json(file) if file is not None else {}
        settings |= {name: values[name] for name in _DECODING_SETTINGS if values.get(name) is not None}
    if "block_size" in settings:  # it was trained on masks, so it makes a diffusion model of an autoregressive one
        settings.setdefault("has_causal_mode", False)
    return settings


def checked_adapter(
    empty_model: PreTrainedModel, adapter: str, hub: dict[str, Any], merge: bool
) -> tuple[Path, "LoraConfig", bool]:
    """The local folder of an adapter that fits the model, its configuration, and whether to untie head and embedding.

    The model is used up: it is untied, gets the adapter's layers, and loses them again by merging.
    """
    try:
        from peft import LoraConfig, PeftModel, get_peft_model_state_dict
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper
    except ImportError as error:
        raise ImportError('`adapter` needs peft: pip install "d2f-hf[train]"') from error

    config_file, weights_file = (
        find_file(adapter, name, hub) for name in ("adapter_config.json", "adapter_model.safetensors")
    )
    if config_file is None or weights_file is None:
        raise ValueError(
            f"{adapter} must hold adapter_config.json and adapter_model.safetensors, but "
            f"{'the first' if config_file is None else 'the second'} is missing. A whole model is passed as `base` "
            "alone; an adapter_model.bin is converted by loading and saving it with peft."
        )
    values = read_json(config_file)
    if values.get("peft_type") != "LORA":
        raise ValueError(
            f"`peft_type` in {config_file} must be 'LORA', but it is {values.get('peft_type')!r}. Load another kind "
            "of adapter with peft, on the model that `load_d2f_model` gives without `adapter`; one of virtual tokens "
            "(prompt tuning, prefix tuning, p-tuning) cannot be decoded with."
        )
    for name, reason in _REFUSED_LORA.items():
        if values.get(name):
            raise ValueError(f"`{name}` in {config_file} is not supported, but it is {values[name]!r}: {reason}.")
    folder = Path(config_file).parent
    try:
        lora_config = LoraConfig.from_pretrained(str(folder))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{config_file} must be the configuration of a LoRA adapter: {error}") from error
    if str(lora_config.init_lora_weights).startswith(_UNREPEATABLE_INITS):
        raise ValueError(
            f"`init_lora_weights` in {config_file} is {lora_config.init_lora_weights!r}, which changes the weights of "
            "the base in a way that cannot be repeated. Save the adapter with peft's "
            "`path_initial_model_for_weight_conversion`, which makes it one for the weights as they are."
        )
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
    is_tied = bool(empty_model.all_tied_weights_keys)
    if is_tied:
        untie(empty_model)
    try:
        adapted = PeftModel(empty_model, copy.deepcopy(lora_config), low_cpu_mem_usage=True)
    except Exception as error:  # peft and re raise many kinds for values that make no sense
        raise ValueError(f"{config_file} does not fit the model: {error} {way_out}") from error
    expected = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    # peft saves the base weights of embedding and head too, where the adapter is on them or when told to.
    allowed = get_peft_model_state_dict(adapted, save_embedding_layers=True)
    checked_headers([weights_file], expected, tied={}, way_out=way_out, optional=allowed)
    layers = [(name, layer) for name, layer in adapted.named_modules() if isinstance(layer, BaseTunerLayer)]
    biases = [
        f"{name}.base_layer.bias"
        for name, layer in layers
        if getattr(layer.get_base_layer(), "bias", None) is not None
    ]
    if lora_config.bias == "lora_only" and not expected.keys() >= set(biases):
        raise ValueError(
            f"`bias` in {config_file} is 'lora_only', and peft before 0.21 neither saves nor loads these biases. Use "
            "a newer peft, for saving too."
        )
    is_on_embeddings = any(
        isinstance(layer, (BaseTunerLayer, AuxiliaryTrainingWrapper))
        for layer in (empty_model.get_input_embeddings(), empty_model.get_output_embeddings())
    )
    are_saved_as_one = bool(getattr(adapted.peft_config["default"], "modules_to_tie", None))  # ensure_weight_tying
    if merge:
        try:
            adapted.merge_and_unload()
        except Exception as error:
            raise ValueError(
                f"`merge` must be False for the adapter in {folder}, but it is True. It cannot be merged: {error}"
            ) from error
    return folder, lora_config, is_tied and is_on_embeddings and not are_saved_as_one


def untie(model: PreTrainedModel) -> None:
    """Gives the head weights of its own, so that merging an adapter on head or embedding leaves the other one alone.

    The configuration goes on to say that they are tied, see [`say_untied`].
    """
    head: Any = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)


def say_untied(model: PreTrainedModel) -> None:
    """Makes the model save and load both, embedding and head."""
    model.config.tie_word_embeddings = False
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)

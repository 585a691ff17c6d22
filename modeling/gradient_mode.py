"""Whether decoding can run in `torch.inference_mode`, in which a small model decodes a tenth faster than in `no_grad`.

A tensor that is made in that mode can never be a part of training. So it must not reach code that might keep it, or
that wants gradients: nobody else's, and none of ours that keeps tensors on the model. Such code can be anywhere round
a forward, so what is allowed is listed here rather than what is not.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import PreTrainedModel
from transformers.generation import MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .logits_process_d2f import KEEP_NOTHING

_OURS = __name__.rpartition(".")[0]  # the package of this file, wherever it is loaded from
# Modules whose layers keep nothing of a forward. DoRA's layer keeps norms of weights, quantized ones their state.
_KNOWN_LAYERS = ("torch.nn.modules", "transformers.activations", "peft.tuners.lora.layer", "peft.utils.other", _OURS)
_KNOWN_FUNCTIONS = ("torch", "transformers", "peft", _OURS)
# Frequencies of the others follow the length of the text, and stay in a buffer.
_FIXED_ROPE_TYPES = ("default", "linear", "yarn", "llama3")

# What every layer has of its own: hooks, which are looked at, and containers.
_OF_ANY_LAYER = vars(nn.Module()).keys()


def gradient_mode(
    model: PreTrainedModel, guests: Iterable[Any] = (), generator: torch.Generator | None = None
) -> Callable:
    """`torch.inference_mode` where only known code gets tensors of decoding, else `torch.no_grad`.

    It looks at every layer, so it is for once per call, not per step.

    Args:
        model (`PreTrainedModel`): The model that is called.
        guests (`Iterable`): Logits processors, stopping criteria and streamers; `None` among them is nobody.
        generator (`torch.Generator`, *optional*): Source of randomness.
    """
    is_safe = (
        type(generator) in (type(None), torch.Generator)
        and all(guest is None or keeps_nothing(guest) for guest in guests)
        and _nobody_watches()
        and model.config.rope_parameters["rope_type"] in _FIXED_ROPE_TYPES
        and _has_known_attention(model)
        and _has_known_layers(model)
    )
    return torch.inference_mode if is_safe else torch.no_grad


def keeps_nothing(guest: Any) -> bool:
    """Whether a processor, criterion or streamer is one of transformers that keeps no tensor and asks nobody else."""
    if type(guest) is StopStringCriteria:  # keeps its table on the device where it was asked last
        return guest.embedding_vec.device.type == "cpu"
    if type(guest).__module__ == "transformers.generation.streamers":
        return True
    return type(guest) in (*KEEP_NOTHING, MaxLengthCriteria, MaxTimeCriteria)


def _nobody_watches() -> bool:
    """Whether there are no global hooks, no modes round each operation, and no autocast, which keeps cast weights."""
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    return (
        not _has_any_global_hook()
        and all(_is_among(type(mode).__module__, ("torch",)) for mode in modes)
        and not any(torch.is_autocast_enabled(device_type) for device_type in ("cpu", "cuda", "mps", "xpu"))
    )


def _has_known_attention(model: PreTrainedModel) -> bool:
    implementation = ALL_ATTENTION_FUNCTIONS.get(model.config._attn_implementation)
    return implementation is None or _is_known(implementation)  # eager attention is ours


def _has_known_layers(model: PreTrainedModel) -> bool:
    """Whether all layers are known, as they were made: without hooks, patched methods or weights of another kind."""
    checked: set[type] = set()
    for layer in model.modules():
        layer_class = type(layer)
        if layer_class not in checked:
            checked.add(layer_class)
            is_own = _is_among(layer_class.__module__, _KNOWN_LAYERS)
            if not (is_own and _is_known(layer_class.forward) and _is_known(layer_class.__call__)):
                return False
        attributes = vars(layer)
        if attributes["_forward_hooks"] or attributes["_forward_pre_hooks"]:
            return False
        for name in attributes.keys() - _OF_ANY_LAYER:
            if callable(attributes[name]) and not _is_known(attributes[name]):
                return False
        for weight in (*attributes["_parameters"].values(), *attributes["_buffers"].values()):
            if type(weight) not in (nn.Parameter, torch.Tensor, type(None)):
                return False
    return True


def _is_known(function: Callable) -> bool:
    """Whether the code of a function is known: that of the outermost wrapper, which `__module__` need not tell."""
    code_globals = getattr(function, "__globals__", None)
    name = getattr(function, "__module__", None) if code_globals is None else code_globals.get("__name__")
    return _is_among(name or "", _KNOWN_FUNCTIONS)


def _is_among(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)

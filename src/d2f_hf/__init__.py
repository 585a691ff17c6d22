"""Discrete diffusion forcing (D2F) for Hugging Face transformers.

Public is what `__all__` names here and in [`d2f_hf.modeling`], and the options of `generate`, which are the fields of
[`D2FGenerationConfig`]. Everything else may change with any release.
"""

import importlib
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from d2f_hf.modeling import (
    D2FCache,
    D2FDreamConfig,
    D2FDreamForBlockDiffusion,
    D2FDreamModel,
    D2FGenerationConfig,
    D2FGenerationOutput,
    D2FLLaDAConfig,
    D2FLLaDAForBlockDiffusion,
    D2FLLaDAModel,
    D2FLlamaConfig,
    D2FLlamaForBlockDiffusion,
    D2FLlamaModel,
    D2FQwen3Config,
    D2FQwen3ForBlockDiffusion,
    D2FQwen3Model,
)

if TYPE_CHECKING:
    from d2f_hf.conversion import diffusion_model_from_autoregressive
    from d2f_hf.data import D2FDataCollator, tokenize_example
    from d2f_hf.loading import load_d2f_model
    from d2f_hf.mask_token import add_mask_token
    from d2f_hf.trainer import D2FTrainer
    from d2f_hf.training_args import D2FTrainingArguments

__version__ = "0.1.0"  # a literal, because the build reads it without importing anything

for _config, _model in (
    (D2FLLaDAConfig, D2FLLaDAForBlockDiffusion),
    (D2FDreamConfig, D2FDreamForBlockDiffusion),
    (D2FLlamaConfig, D2FLlamaForBlockDiffusion),
    (D2FQwen3Config, D2FQwen3ForBlockDiffusion),
):
    AutoConfig.register(_config.model_type, _config)
    AutoModel.register(_config, _model)
    AutoModelForCausalLM.register(_config, _model)

# Imported when first used, because training needs the packages of the extra `d2f-hf[train]` and decoding does not.
# `load_d2f_model` needs peft only for adapters, and says so itself.
_IMPORTED_WHEN_USED = {
    "D2FDataCollator": "d2f_hf.data",
    "D2FTrainer": "d2f_hf.trainer",
    "D2FTrainingArguments": "d2f_hf.training_args",
    "add_mask_token": "d2f_hf.mask_token",
    "diffusion_model_from_autoregressive": "d2f_hf.conversion",
    "load_d2f_model": "d2f_hf.loading",
    "tokenize_example": "d2f_hf.data",
}


def __getattr__(name: str) -> Any:
    if name in _IMPORTED_WHEN_USED:
        try:
            return getattr(importlib.import_module(_IMPORTED_WHEN_USED[name]), name)
        except ModuleNotFoundError as error:
            raise ImportError(f'`{name}` needs {error.name}: pip install "d2f-hf[train]"') from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "D2FCache",
    "D2FDataCollator",
    "D2FDreamConfig",
    "D2FDreamForBlockDiffusion",
    "D2FDreamModel",
    "D2FGenerationConfig",
    "D2FGenerationOutput",
    "D2FLLaDAConfig",
    "D2FLLaDAForBlockDiffusion",
    "D2FLLaDAModel",
    "D2FLlamaConfig",
    "D2FLlamaForBlockDiffusion",
    "D2FLlamaModel",
    "D2FQwen3Config",
    "D2FQwen3ForBlockDiffusion",
    "D2FQwen3Model",
    "D2FTrainer",
    "D2FTrainingArguments",
    "__version__",
    "add_mask_token",
    "diffusion_model_from_autoregressive",
    "load_d2f_model",
    "tokenize_example",
]

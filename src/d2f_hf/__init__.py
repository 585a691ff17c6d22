"""Discrete diffusion forcing (D2F) for Hugging Face transformers."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from d2f_hf.modeling import (
    D2FCache,
    D2FGenerationConfig,
    D2FGenerationOutput,
    D2FLLaDAConfig,
    D2FLLaDAForBlockDiffusion,
    D2FLLaDAModel,
)


__version__ = "0.1.0"

AutoConfig.register("d2f_llada", D2FLLaDAConfig)
AutoModel.register(D2FLLaDAConfig, D2FLLaDAForBlockDiffusion)
AutoModelForCausalLM.register(D2FLLaDAConfig, D2FLLaDAForBlockDiffusion)

__all__ = [
    "D2FCache",
    "D2FGenerationConfig",
    "D2FGenerationOutput",
    "D2FLLaDAConfig",
    "D2FLLaDAForBlockDiffusion",
    "D2FLLaDAModel",
    "__version__",
]

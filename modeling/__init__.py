"""The code that a published model carries, re-exported as `d2f_hf.modeling`. This file itself is not published."""

from .block_causal import block_causal_mask, positions_without_padding, predicting_positions, visible_length
from .cache_d2f import D2FCache
from .configuration_d2f_dream import D2FDreamConfig
from .configuration_d2f_llada import D2FLLaDAConfig
from .configuration_d2f_llama import D2FLlamaConfig
from .configuration_d2f_qwen3 import D2FQwen3Config
from .generation_config_d2f import D2FGenerationConfig
from .generation_d2f import D2FGenerationMixin
from .generation_output import D2FGenerationOutput
from .modeling_d2f_dream import D2FDreamForBlockDiffusion, D2FDreamModel
from .modeling_d2f_llada import D2FLLaDAForBlockDiffusion, D2FLLaDAModel
from .modeling_d2f_llama import D2FLlamaForBlockDiffusion, D2FLlamaModel
from .modeling_d2f_qwen3 import D2FQwen3ForBlockDiffusion, D2FQwen3Model
from .sampler import Prediction, Sampler
from .stream_decoding import StreamDecoder, StreamUpdate

__all__ = [
    "D2FCache",
    "D2FDreamConfig",
    "D2FDreamForBlockDiffusion",
    "D2FDreamModel",
    "D2FGenerationConfig",
    "D2FGenerationMixin",
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
    "Prediction",
    "Sampler",
    "StreamDecoder",
    "StreamUpdate",
    "block_causal_mask",
    "positions_without_padding",
    "predicting_positions",
    "visible_length",
]

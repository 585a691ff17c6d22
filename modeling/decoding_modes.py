"""Which decoding loop answers a call of `generate`."""

from typing import Any

from .autoregressive_decoding import AutoregressiveDecoder
from .decoding_loop import DecodingLoop
from .fast_dllm_decoding import FastDLLMDecoder
from .generation_config_d2f import D2FGenerationConfig
from .lookahead_decoding import LookAheadDecoder
from .pipelined_decoding import PipelinedDecoder
from .response import Response
from .sampler import Sampler
from .two_model_decoding import TwoModelDecoder
from .vanilla_decoding import VanillaDecoder
from .verified_decoding import VerifiedDecoder


def decoding_loop(
    model: Any,
    response: Response,
    sampler: Sampler,
    generation_config: D2FGenerationConfig,
    use_cache: bool,
    verifier: Any = None,
) -> DecodingLoop:
    """The loop that `decoding` names.

    Args:
        model, response, sampler, generation_config, use_cache: As in [`PipelinedDecoder`].
        verifier (`BlockDiffusionModel`, *optional*): For `decoding="verified"`: another model that verifies.
    """
    arguments = (response, sampler, generation_config)
    decoding = generation_config.decoding
    if decoding in ("vanilla", "fast_dllm"):
        _refuse_left_to_right(sampler, f"decoding={decoding!r}", "take decoding='d2f'")
        if decoding == "vanilla":
            return VanillaDecoder(model, *arguments)
        return FastDLLMDecoder(model, *arguments, use_cache=use_cache)
    if generation_config.compile_config is not None and not use_cache:
        raise ValueError(
            "`compile_config` is not supported with use_cache=False, where each forward has another length. Leave "
            "one of them out."
        )
    if decoding == "autoregressive":
        return AutoregressiveDecoder(model, *arguments, use_cache=use_cache)
    if decoding == "verified" and verifier is not None:
        return TwoModelDecoder(model, verifier, *arguments, use_cache=use_cache)
    if decoding == "verified":
        return VerifiedDecoder(model, *arguments, use_cache=use_cache)
    if (generation_config.num_branches or 1) > 1:
        _refuse_left_to_right(sampler, "`num_branches`", "leave out `num_branches`")
        return LookAheadDecoder(model, *arguments, use_cache=use_cache)
    if generation_config.remask_threshold:
        _refuse_left_to_right(sampler, "`remask_threshold`", "leave out `remask_threshold`")
    return PipelinedDecoder(model, *arguments, use_cache=use_cache)


def _refuse_left_to_right(sampler: Sampler, option: str, instead: str) -> None:
    if sampler.left_to_right:
        raise ValueError(
            "`prefix_allowed_tokens_fn`, `no_repeat_ngram_size`, `bad_words_ids` or `sequence_bias` of several tokens "
            "and processors of your own need the tokens right before the chosen one, which "
            f"{option} may decode later. Leave them out, or {instead}. On a processor of your own that does not need "
            "them, set `depends_on_previous_tokens = False`."
        )

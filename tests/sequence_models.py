"""The tiny models of SDAR and Fast-dLLM v2, and the decoding runs of their official code."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from d2f_hf.modeling import (
    D2FDreamConfig,
    D2FDreamForBlockDiffusion,
    D2FQwen3Config,
    D2FQwen3ForBlockDiffusion,
)
from safetensors.torch import load_file

BLOCK_MODELS = Path(__file__).parent / "golden" / "block_models"
FAMILIES = ("sdar", "fastdllm_v2")
MASK, EOS = 93, 90
# What the original configurations have besides, which is about their code or about nothing.
_UNUSED = """architectures auto_map model_type attn_implementation bd_size conplemenrary_mask debug ep_size
fuse_cross_entropy micro_forward skip_checkpoint use_deepep transformers_version""".split()


@cache
def block_model(family: str, first_token_alone: bool = True):
    folder = BLOCK_MODELS / f"{family}_tiny"
    values = json.loads((folder / "config.json").read_text())
    is_sdar = family == "sdar"
    values = {**{name: value for name, value in values.items() if name not in _UNUSED}, "mask_token_id": MASK}
    values |= {"block_alignment": "sequence", "right_shift_logits": not is_sdar}
    values.setdefault("block_size", 32)
    model_class = D2FQwen3ForBlockDiffusion if is_sdar else D2FDreamForBlockDiffusion
    config_class = D2FQwen3Config if is_sdar else D2FDreamConfig
    model = model_class(config_class(**values)).eval()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    model.generation_config.block_add_threshold = 1.0
    if not is_sdar and first_token_alone:
        model.generation_config.first_token_alone = True
    model.generation_config.pad_token_id = 91
    return model


@dataclass(frozen=True)
class OfficialRun:
    """One run of the official code.

    Args:
        prompt, response: Token ids. The response ends with its first EOS.
        options: The same setting in our words.
        accepted: What each forward accepted, up to the one that decodes all before the EOS: positions and tokens. A
            commit that accepts nothing is left out.
        forwards: All of theirs, prefill and commits included.
        denoise: Those that denoise.
        is_cut: The response ends with an EOS.
    """

    family: str
    setting: str
    prompt: tuple[int, ...]
    response: tuple[int, ...]
    options: dict
    accepted: tuple[tuple[tuple[int, int], ...], ...]
    forwards: int
    denoise: int
    is_cut: bool

    def __str__(self) -> str:
        return f"{self.family}-{self.setting}-prompt{len(self.prompt)}"


@cache
def official_runs(family: str) -> tuple[OfficialRun, ...]:
    """All runs that are to be reproduced; see `left_out`."""
    return tuple(run for run in _all_runs(family) if left_out(family, run[0], run[1]) is None for run in [_run(*run)])


def left_out(family: str, setting: str, raw: dict) -> str | None:
    """Why a run is not reproduced."""
    if setting.endswith("blockcache"):
        return "the sub-block cache is an approximation"
    if setting == "gen_b8_dynamic_topk1":
        return "S1: all confidences are 1"
    if setting == "gen_b4_dynamic_sampled":
        return "other random numbers"
    if any(step.get("overwritten") for step in raw["trace"]):
        return "S3: prompt tokens are overwritten"
    return None


def _all_runs(family: str):
    data = json.loads((BLOCK_MODELS / f"{family}_tiny" / "decode.json").read_text())
    for setting, result in data["results"].items():
        for raw in result["runs"]:
            yield setting, raw, family, result["arguments"]


def _run(setting: str, raw: dict, family: str, arguments: dict) -> OfficialRun:
    prompt = raw["prompt"]
    response = raw["sequence"][len(prompt) :]
    if family == "sdar":
        ends = arguments["stopping_criteria_idx"] or []
        threshold = arguments.get("threshold", arguments.get("confidence_threshold"))
        block_size, steps = arguments["block_length"], arguments["denoising_steps"]
        options = {"block_size": block_size, "confidence_threshold": 1.0 if threshold is None else threshold}
        if "static" in setting:
            options["confidence_threshold"] = 1.0
        if "sequential" in setting:
            options = {"block_size": block_size, "acceptance_rule": "sequential"}
        options["steps_per_block"] = steps
        max_new_tokens = len(response)
    else:
        ends = [arguments["stop_token"]]
        options = {
            "block_size": arguments["block_size"],
            "sub_block_size": arguments["small_block_size"],
            "confidence_threshold": arguments["threshold"],
        }
        max_new_tokens = len(response)
    end = next((i + 1 for i, token in enumerate(response) if token in ends), None)
    response = response[:end]
    options |= {"max_new_tokens": max_new_tokens, "eos_token_id": ends or None}
    accepted, missing = [], set(range(len(prompt), len(prompt) + len(response)))
    for step in raw["trace"]:
        tokens = tuple(sorted((position, token) for position, token in step.get("accepted", [])))
        if tokens:
            accepted.append(tokens)
            missing -= {position for position, _ in tokens}
        if not missing:
            break
    return OfficialRun(
        family=family,
        setting=setting,
        prompt=tuple(prompt),
        response=tuple(response),
        options=options,
        accepted=tuple(accepted),
        forwards=raw["forwards"],
        denoise=raw["denoise"],
        is_cut=end is not None,
    )

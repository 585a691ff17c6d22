"""Decoding runs of the reference implementation, and what our decoding has to make of them.

Ours equals the reference's up to the first EOS. After an EOS the reference decodes all blocks in flight to their end;
ours drops the blocks behind the EOS and ends the row once everything up to the EOS is decoded.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from d2f_hf import load_d2f_model

GOLDEN = Path(__file__).parent / "golden"
TOKEN_RANKINGS = {"default": "probability", "neg_entropy": "neg_entropy", "margin_confidence": "margin"}


@dataclass(frozen=True)
class GoldenRun:
    """One run of the reference: its settings in our words, and its raw outcome."""

    family: str  # "llada" or "dream"
    setting: str
    prompt_ids: tuple[int, ...]
    block_size: int
    block_add_threshold: float
    block_activation_threshold: float
    confidence_threshold: float
    token_ranking: str
    max_new_tokens: int  # as asked for; the reference rounds it down to whole blocks
    mask_token_id: int
    eos_token_id: int
    raw_tokens: tuple[int, ...]  # behind the EOS too
    raw_trace: tuple[dict, ...]

    @property
    def whole_blocks_max_new_tokens(self) -> int:
        """What the reference makes of `max_new_tokens`: whole blocks only, possibly 0."""
        return self.max_new_tokens // self.block_size * self.block_size

    @property
    def decoding(self) -> dict:
        """The decoding options, `max_new_tokens` apart, as keywords."""
        return {
            "block_size": self.block_size,
            "block_add_threshold": self.block_add_threshold,
            "block_activation_threshold": self.block_activation_threshold,
            "confidence_threshold": self.confidence_threshold,
            "token_ranking": self.token_ranking,
        }

    def __str__(self) -> str:
        return f"{self.setting}-prompt{len(self.prompt_ids)}"


@dataclass(frozen=True)
class ExpectedRun:
    """What our decoding gives for a `GoldenRun` with `whole_blocks_max_new_tokens`.

    `trace` has one dict per forward: `window_start`, `window_length`, `committed_length`, and `accepted`, a list of
    (absolute position, token) in ascending order.
    """

    tokens: list[int]
    num_forward_passes: int
    trace: list[dict]


@cache
def golden_model(family: str):
    """The tiny model, `"llada"` or `"dream"`, that the reference was run with."""
    return load_d2f_model(GOLDEN / f"{family}_tiny").eval()


def until_eos(tokens: list[int], eos: int) -> list[int]:
    """`tokens` up to and including the first EOS."""
    return tokens[: tokens.index(eos) + 1] if eos in tokens else tokens


@cache
def load_runs(filename: str) -> tuple[GoldenRun, ...]:
    """All runs of a file in `tests/golden`, e.g. `decode_llada.json`."""
    data = json.loads((GOLDEN / filename).read_text())
    runs = []
    for result in data["results"]:
        setting = data["settings"][result["setting"]]
        runs.append(
            GoldenRun(
                family=data["family"],
                setting=result["setting"],
                prompt_ids=tuple(data["prompts"][result["prompt"]]),
                block_size=setting["block_size"],
                block_add_threshold=setting["tau_add"],
                block_activation_threshold=setting["tau_act"],
                confidence_threshold=setting["tau_conf"],
                token_ranking=TOKEN_RANKINGS[setting["strategy"]],
                max_new_tokens=setting["max_new_tokens"],
                mask_token_id=data["mask_token_id"],
                eos_token_id=data["eos_token_id"],
                raw_tokens=tuple(result["tokens"]),
                raw_trace=tuple(result["trace"]),
            )
        )
    return tuple(runs)


def expected_until_eos(run: GoldenRun) -> ExpectedRun:
    """Cuts a run down to what ours does.

    An EOS counts from the forward after the one that accepted it: from then on the window ends with the block that
    holds the first EOS decoded so far. The trace ends with the forward that decodes the last token up to that EOS.
    """
    prompt_length = len(run.prompt_ids)
    first_eos: int | None = None
    decoded: set[int] = set()
    trace = []
    for step in run.raw_trace:
        window_end = step["start"] + step["len"]
        if first_eos is not None:
            eos_block = (first_eos - prompt_length) // run.block_size
            window_end = min(window_end, prompt_length + (eos_block + 1) * run.block_size)
        accepted = [(position, token) for position, token in step["commits"] if position < window_end]
        trace.append(
            {
                "window_start": step["start"],
                "window_length": window_end - step["start"],
                "committed_length": step["cache"],
                "accepted": accepted,
            }
        )
        decoded.update(position for position, _ in accepted)
        eos_positions = [position for position, token in accepted if token == run.eos_token_id]
        if eos_positions:
            first_eos = min(eos_positions if first_eos is None else [first_eos, *eos_positions])
        if first_eos is not None and decoded.issuperset(range(prompt_length, first_eos + 1)):
            break
    length = len(run.raw_tokens) if first_eos is None else first_eos + 1 - prompt_length
    return ExpectedRun(list(run.raw_tokens[:length]), len(trace), trace)

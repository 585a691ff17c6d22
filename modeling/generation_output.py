"""What `generate(return_dict_in_generate=True)` returns: `D2FGenerationOutput`."""

# B batch, V vocabulary

from dataclasses import dataclass

import torch
from transformers.modeling_outputs import ModelOutput


@dataclass
class D2FGenerationOutput(ModelOutput):
    """What `generate(return_dict_in_generate=True)` returns.

    Args:
        sequences (`torch.LongTensor` of shape `(B, prompt + response)`): The prompt as it was given, and the response:
            up to and including its first EOS, then padding.
        num_forward_passes (`torch.LongTensor` of shape `(B,)`): Forwards until the row was finished.
        tokens_per_forward (`torch.FloatTensor` of shape `(B,)`): Response tokens, including the EOS, per forward.
        trace (`list[list[dict]]`, *optional*): With `output_trace`, per row and forward: `window_start` and
            `window_length` (positions that were fed, padding left out), `committed_length` (tokens in the cache before
            it) and `accepted`, pairs of position and token; with `remask_threshold` also `remasked`, positions; with
            `decoding="verified"` also `drafted`, pairs of position and token. A streamer that has
            `put_trace` gets the entry of each forward behind what that made known, and in it `confidence`: the
            probability, after the logits processors, of each token in `accepted`.
        positions_per_forward (`torch.FloatTensor` of shape `(B,)`, *optional*): For `decoding="verified"`: tokens and
            masks that a forward read on average.
        accepted_lengths (`list[list[int]]`, *optional*): For `decoding="verified"`, per row: how many tokens of each
            draft were accepted.
        scores, logits (`tuple[torch.FloatTensor]`, *optional*): With `output_scores` or `output_logits`, per response
            token `(B, V)`: what it was chosen from when it was accepted, after the logits processors or before them;
            0 behind the end of a row.
    """

    sequences: torch.LongTensor | None = None
    num_forward_passes: torch.LongTensor | None = None
    tokens_per_forward: torch.FloatTensor | None = None
    trace: list | None = None
    positions_per_forward: torch.FloatTensor | None = None
    accepted_lengths: list | None = None
    scores: tuple[torch.FloatTensor, ...] | None = None
    logits: tuple[torch.FloatTensor, ...] | None = None

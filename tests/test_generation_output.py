"""What `generate` returns with `return_dict_in_generate=True`."""

from dataclasses import fields

import torch

from causal_models import models, prompts
from d2f_hf import D2FGenerationOutput


def test_each_decoding_says_what_it_has_to_say():
    """What no option asks for is absent, as in transformers' outputs."""
    _, own = models()
    options = {"max_new_tokens": 6, "return_dict_in_generate": True}
    common = {"sequences", "num_forward_passes", "tokens_per_forward"}
    found = own.generate(**prompts([3, 5]), decoding="autoregressive", **options)
    assert isinstance(found, D2FGenerationOutput) and set(found.keys()) == common
    found = own.generate(**prompts([3, 5]), decoding="verified", **options)
    assert set(found.keys()) == common | {"positions_per_forward", "accepted_lengths"}
    options |= {"output_trace": True, "output_scores": True, "output_logits": True}
    found = own.generate(**prompts([3, 5]), decoding="verified", **options)
    assert set(found.keys()) == {field.name for field in fields(D2FGenerationOutput)}


def test_counts_are_of_each_row():
    _, own = models()
    found = own.generate(**prompts([3, 5]), decoding="verified", max_new_tokens=6, return_dict_in_generate=True)
    for name in ("num_forward_passes", "tokens_per_forward", "positions_per_forward"):
        assert isinstance(found[name], torch.Tensor) and found[name].shape == (2,)
    assert len(found.accepted_lengths) == 2

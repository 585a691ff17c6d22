"""Each `decoding` has its loop, and what a loop cannot do is refused by name."""

import pytest
import torch
from d2f_hf.modeling import decoding_modes
from d2f_hf.modeling.generation_config_d2f import DECODING_MODES

from causal_models import models
from tiny_models import tiny_model

LOOPS = {
    "d2f": "PipelinedDecoder",
    "vanilla": "VanillaDecoder",
    "fast_dllm": "FastDLLMDecoder",
    "autoregressive": "AutoregressiveDecoder",
    "verified": "VerifiedDecoder",
}


def loop_of(model, monkeypatch, **options) -> str:
    """The class that decodes a call of `generate`."""
    made = []

    def decoding_loop(*arguments):
        made.append(decoding_modes.decoding_loop(*arguments))
        return made[-1]

    monkeypatch.setattr("d2f_hf.modeling.generation_d2f.decoding_loop", decoding_loop)
    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, **options)
    return type(made[-1]).__name__


def test_every_mode_has_its_loop(monkeypatch):
    assert LOOPS.keys() == set(DECODING_MODES)
    causal, diffusion = models()[1], tiny_model()
    for decoding, expected in LOOPS.items():
        model = causal if decoding in ("autoregressive", "verified") else diffusion
        assert loop_of(model, monkeypatch, decoding=decoding) == expected
    assert loop_of(diffusion, monkeypatch) == "PipelinedDecoder"
    assert loop_of(diffusion, monkeypatch, num_branches=2) == "LookAheadDecoder"
    assert loop_of(diffusion, monkeypatch, num_branches=1) == "PipelinedDecoder"


def test_a_verifier_makes_it_two_models(monkeypatch):
    causal = models()[1]
    model = tiny_model(vocab_size=causal.config.vocab_size, mask_token_id=causal.config.mask_token_id)
    assert loop_of(model, monkeypatch, decoding="verified", verifier=causal) == "TwoModelDecoder"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"decoding": "vanilla"}, "decoding='vanilla'"),
        ({"decoding": "fast_dllm"}, "decoding='fast_dllm'"),
        ({"num_branches": 2}, "`num_branches`"),
        ({"remask_threshold": 0.5}, "`remask_threshold`"),
    ],
    ids=str,
)
def test_loops_that_decode_out_of_order_refuse_processors_that_need_what_is_before(options, named):
    with pytest.raises(ValueError, match=f"(?s)no_repeat_ngram_size.*{named}.*depends_on_previous_tokens"):
        tiny_model().generate(torch.tensor([[5, 6]]), max_new_tokens=4, no_repeat_ngram_size=2, **options)

"""Qwen3: under a causal mask the logits are those of transformers' own class."""

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from causal_models import LONG_ROPES, SHAPES, assert_equal_to_stock
from d2f_hf import D2FQwen3ForBlockDiffusion


@pytest.mark.parametrize("options", [*SHAPES, {"attention_bias": True}], ids=str)
def test_causal_logits_are_those_of_qwen3(options):
    assert_equal_to_stock(Qwen3Config, Qwen3ForCausalLM, D2FQwen3ForBlockDiffusion, **options)


@pytest.mark.parametrize("rope", LONG_ROPES, ids=lambda rope: rope["rope_type"])
def test_scaled_rotary_positions_are_those_of_qwen3_beyond_the_original_length(rope):
    options = {"rope_parameters": rope, "max_position_embeddings": 16 if rope["rope_type"] == "dynamic" else 64}
    assert_equal_to_stock(Qwen3Config, Qwen3ForCausalLM, D2FQwen3ForBlockDiffusion, **options)

"""Llama and Mistral: under a causal mask the logits are those of transformers' own classes."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from causal_models import LONG_ROPES, SHAPES, assert_equal_to_stock
from d2f_hf import D2FLlamaForBlockDiffusion


@pytest.mark.parametrize("options", SHAPES, ids=str)
def test_causal_logits_are_those_of_llama(options):
    assert_equal_to_stock(LlamaConfig, LlamaForCausalLM, D2FLlamaForBlockDiffusion, **options)


@pytest.mark.parametrize("options", [{"attention_bias": True}, {"mlp_bias": True, "attention_bias": True}], ids=str)
def test_biases_are_where_the_configuration_says(options):
    assert_equal_to_stock(LlamaConfig, LlamaForCausalLM, D2FLlamaForBlockDiffusion, **options)


@pytest.mark.parametrize("rope", LONG_ROPES, ids=lambda rope: rope["rope_type"])
def test_scaled_rotary_positions_are_those_of_llama_beyond_the_original_length(rope):
    options = {"rope_parameters": rope, "max_position_embeddings": 16 if rope["rope_type"] == "dynamic" else 64}
    assert_equal_to_stock(LlamaConfig, LlamaForCausalLM, D2FLlamaForBlockDiffusion, **options)


@pytest.mark.parametrize("options", SHAPES, ids=str)
def test_causal_logits_are_those_of_mistral_without_a_sliding_window(options):
    options = {"sliding_window": None, **options}
    assert_equal_to_stock(MistralConfig, MistralForCausalLM, D2FLlamaForBlockDiffusion, **options)


def test_logits_in_bfloat16_stay_close():
    assert_equal_to_stock(
        LlamaConfig, LlamaForCausalLM, D2FLlamaForBlockDiffusion, dtype=torch.bfloat16, tolerance=0.2
    )

"""What is particular to Dream. What holds for every architecture is in `test_modeling_d2f.py`."""

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from causal_models import LONG_ROPES, SHAPES, assert_equal_to_stock
from d2f_hf import D2FDreamForBlockDiffusion, D2FDreamModel
from tiny_models import tiny_model


def test_queries_keys_and_values_have_biases_that_count_and_nothing_else_has():
    model, ids = tiny_model(family="dream"), torch.tensor([[1, 2, 3, 4]])
    assert isinstance(model.model, D2FDreamModel) and model.config.right_shift_logits
    with_bias = {name.split(".")[-2] for name in model.state_dict() if name.endswith(".bias")}
    assert with_bias == {"q_proj", "k_proj", "v_proj"}
    with torch.no_grad():
        expected = model(ids).logits
        for projection in ("q_proj", "k_proj", "v_proj"):
            changed = tiny_model(family="dream")
            getattr(changed.model.get_layers()[1].self_attn, projection).bias.zero_()
            assert not torch.allclose(changed(ids).logits, expected, atol=1e-3), projection


@pytest.mark.parametrize("options", [o for o in SHAPES if "head_dim" not in o], ids=str)
def test_causal_logits_are_those_of_qwen2(options):
    assert_equal_to_stock(Qwen2Config, Qwen2ForCausalLM, D2FDreamForBlockDiffusion, **options)


@pytest.mark.parametrize("rope", LONG_ROPES, ids=lambda rope: rope["rope_type"])
def test_scaled_rotary_positions_are_those_of_qwen2_beyond_the_original_length(rope):
    options = {"rope_parameters": rope, "max_position_embeddings": 16 if rope["rope_type"] == "dynamic" else 64}
    assert_equal_to_stock(Qwen2Config, Qwen2ForCausalLM, D2FDreamForBlockDiffusion, **options)

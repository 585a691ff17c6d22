"""The layers of Llama, Qwen2 and Qwen3: which parts there are is the configuration's matter."""

import pytest

from tiny_models import tiny_model

WEIGHTS = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.mark.parametrize(
    "family, options, biases, norms",
    [
        ("dream", {}, {"q_proj", "k_proj", "v_proj"}, set()),
        ("llama", {}, set(), set()),
        ("llama", {"attention_bias": True}, set(WEIGHTS), set()),
        ("llama", {"mlp_bias": True}, {"gate_proj", "up_proj", "down_proj"}, set()),
        ("qwen3", {}, set(), {"q_norm", "k_norm"}),
        ("qwen3", {"attention_bias": True}, set(WEIGHTS), {"q_norm", "k_norm"}),
    ],
)
def test_a_layer_has_the_biases_and_norms_of_its_architecture(family, options, biases, norms):
    names = [name for name, _ in tiny_model(family=family, **options).model.get_layers()[0].named_parameters()]
    assert {name.split(".")[1] for name in names if name.endswith(".bias")} == biases
    assert {name.split(".")[1] for name in names if name.startswith("self_attn") and "norm" in name} == norms


def test_the_width_of_a_head_can_be_its_own():
    attention = tiny_model(family="qwen3", head_dim=6, num_key_value_heads=2).model.get_layers()[0].self_attn
    assert attention.q_proj.weight.shape == (4 * 6, 32)
    assert attention.k_proj.weight.shape == (2 * 6, 32)
    assert attention.o_proj.weight.shape == (32, 4 * 6)
    assert attention.q_norm.weight.shape == (6,)

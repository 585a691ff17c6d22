"""The Llama configuration: what it takes from original files, and what it refuses."""

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig, MistralConfig

from d2f_hf import D2FLlamaConfig


@pytest.mark.parametrize("config_class", [LlamaConfig, MistralConfig])
def test_the_values_of_an_original_config_are_kept(config_class):
    original = config_class(hidden_size=48, num_attention_heads=4, num_key_value_heads=2)
    values = {**original.to_dict(), "sliding_window": None}
    values.pop("model_type")
    config = D2FLlamaConfig.from_dict(values)
    assert config.head_dim == 12 and config.num_key_value_heads == 2 and config.right_shift_logits
    assert config.rope_parameters["rope_theta"] == original.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 4096},
        {"hidden_act": "gelu"},
        {"partial_rotary_factor": 0.5},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"head_dim": 7},
        {"hidden_size": 30, "num_attention_heads": 4},
    ],
    ids=str,
)
def test_what_is_not_implemented_is_refused_by_name(options):
    with pytest.raises((ValueError, StrictDataclassError), match=f"`{next(iter(options))}`"):
        D2FLlamaConfig(**options)


def test_rope_scaling_in_its_old_spelling_is_taken():
    config = D2FLlamaConfig.from_dict({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 500.0})
    assert config.rope_parameters["rope_type"] == "linear" and config.rope_parameters["rope_theta"] == 500.0

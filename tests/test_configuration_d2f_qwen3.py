"""The Qwen3 configuration: what it takes from original files, and what it refuses."""

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import Qwen3Config

from d2f_hf import D2FQwen3Config


def test_the_values_of_an_original_config_are_kept():
    values = Qwen3Config(hidden_size=48, num_attention_heads=4, head_dim=16, num_hidden_layers=2).to_dict()
    values.pop("model_type")
    config = D2FQwen3Config.from_dict(values)
    assert config.head_dim == 16 and config.num_hidden_layers == 2 and config.right_shift_logits
    assert not hasattr(config, "layer_types") and not hasattr(config, "sliding_window")


@pytest.mark.parametrize(
    "options",
    [
        {"use_sliding_window": True},
        {"layer_types": ["sliding_attention", "full_attention"]},
        {"hidden_act": "relu"},
        {"head_dim": 0},
    ],
    ids=str,
)
def test_what_is_not_implemented_is_refused_by_name(options):
    with pytest.raises((ValueError, StrictDataclassError), match=f"`{next(iter(options))}`"):
        D2FQwen3Config(**options)

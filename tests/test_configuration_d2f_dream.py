"""Dream's configuration: the original keys and values, and what is refused. See also `test_configuration_d2f.py`."""

import json

import pytest

from d2f_hf import D2FDreamConfig
from golden_data import GOLDEN
from tiny_models import tiny_config


def original_config() -> dict:
    return json.loads((GOLDEN / "dream_tiny" / "config.json").read_text())


def test_the_original_names_are_kept_in_the_file_too(tmp_path):
    original = original_config()
    config = D2FDreamConfig.from_pretrained(GOLDEN / "dream_tiny")
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    same = ("hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "intermediate_size")
    same += ("max_position_embeddings", "rms_norm_eps", "vocab_size", "tie_word_embeddings", "initializer_range")
    same += ("mask_token_id", "bos_token_id", "eos_token_id", "pad_token_id", "attention_dropout")
    for name in same:
        assert getattr(config, name) == saved[name] == original[name], name
    assert config.right_shift_logits is saved["right_shift_logits"] is True


@pytest.mark.parametrize(("option", "value"), [("use_sliding_window", True), ("hidden_act", "gelu")])
def test_an_option_that_is_not_implemented_is_an_error_that_names_it(option, value):
    with pytest.raises(ValueError, match=f"`{option}`"):
        tiny_config("dream", **{option: value})
    assert option in original_config(), "the original files have it"
    D2FDreamConfig(**{option: original_config()[option]})
    D2FDreamConfig(**{option: None})


def test_options_that_change_nothing_here_are_accepted_and_forgotten():
    unused = {
        "sliding_window": 4096,
        "max_window_layers": 1,
        "layer_types": ["full_attention"] * 2,
        "use_sliding_window": False,
        "hidden_act": "silu",
    }
    config = tiny_config("dream", **unused)
    assert not set(unused) & set(config.to_dict())
    assert config.to_dict() == tiny_config("dream").to_dict()


def test_the_defaults_are_those_of_dream_7b():
    config = D2FDreamConfig()
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (3584, 28, 152064)
    assert (config.num_attention_heads, config.num_key_value_heads) == (28, 4)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1000000.0}

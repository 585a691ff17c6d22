"""LLaDA's configuration: the original keys and names, and what is refused. See also `test_configuration_d2f.py`."""

import json

import pytest

from d2f_hf import D2FLLaDAConfig
from golden_data import GOLDEN
from tiny_models import tiny_config


def test_the_original_names_are_kept_in_the_file_too(tmp_path):
    original = json.loads((GOLDEN / "llada_tiny" / "config.json").read_text())
    config = D2FLLaDAConfig.from_pretrained(GOLDEN / "llada_tiny")
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    same = ("d_model", "n_heads", "n_layers", "n_kv_heads", "mlp_hidden_size", "max_sequence_length", "rms_norm_eps")
    same += ("vocab_size", "weight_tying", "mask_token_id", "eos_token_id", "pad_token_id")
    same += ("attention_dropout", "mlp_ratio")
    for name in same:
        assert getattr(config, name) == saved[name] == original[name], name
    assert config.embedding_size == original["embedding_size"] and config.init_std == original["init_std"]
    assert config.right_shift_logits is False


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("alibi", True),
        ("rope", False),
        ("block_type", "sequential"),
        ("block_group_size", 2),
        ("activation_type", "swiglu"),
        ("layer_norm_type", "default"),
        ("layer_norm_with_affine", False),
        ("bias_for_layer_norm", True),
        ("include_bias", True),
        ("include_qkv_bias", True),
        ("attention_layer_norm", True),
        ("input_emb_norm", True),
        ("scale_logits", True),
        ("embedding_dropout", 0.1),
        ("residual_dropout", 0.1),
        ("multi_query_attention", True),
    ],
)
def test_an_option_that_is_not_implemented_is_an_error_that_names_it(option, value):
    with pytest.raises(ValueError, match=f"`{option}`"):
        tiny_config(**{option: value})
    original = json.loads((GOLDEN / "llada_tiny" / "config.json").read_text())
    assert option in original, "the original files have it"
    D2FLLaDAConfig(**{option: original[option]})


def test_options_that_change_nothing_here_are_accepted_and_forgotten():
    config = tiny_config(init_device="meta", precision="amp_bf16", flash_attention=True, alibi_bias_max=8.0)
    assert not {"init_device", "precision", "flash_attention", "alibi_bias_max", "alibi"} & set(config.to_dict())


def test_defaults_follow_the_other_values():
    """Whichever names those have."""
    config = D2FLLaDAConfig(d_model=64, n_heads=8)
    assert (config.n_kv_heads, config.mlp_hidden_size) == (8, 256)
    assert D2FLLaDAConfig(hidden_size=64, num_attention_heads=8).to_dict() == config.to_dict()
    assert D2FLLaDAConfig(d_model=64, n_heads=8, mlp_ratio=3).mlp_hidden_size == 192
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 500000.0}


def test_the_embedding_size_takes_precedence_over_the_vocabulary_size():
    assert D2FLLaDAConfig(vocab_size=100, embedding_size=128).vocab_size == 128
    assert D2FLLaDAConfig(vocab_size=100, embedding_size=None).vocab_size == 100


@pytest.mark.parametrize(
    ("usual", "original"),
    [
        ("hidden_size", "d_model"),
        ("num_attention_heads", "n_heads"),
        ("num_hidden_layers", "n_layers"),
        ("num_key_value_heads", "n_kv_heads"),
        ("intermediate_size", "mlp_hidden_size"),
        ("max_position_embeddings", "max_sequence_length"),
        ("tie_word_embeddings", "weight_tying"),
        ("init_std", "initializer_range"),
    ],
)
def test_the_usual_names_of_transformers_mean_the_original_ones(usual, original):
    config = tiny_config()
    assert getattr(config, usual) == getattr(config, original)
    value = {"tie_word_embeddings": True, "init_std": 0.5, "num_attention_heads": 8, "num_key_value_heads": 2}.get(
        usual, 64
    )
    assert getattr(tiny_config(**{original: value}), usual) == value
    setattr(config, usual, value)
    assert getattr(config, original) == value


def test_a_width_of_heads_that_the_projections_do_not_have_is_an_error():
    """The heads had that width and the projections had not, so that there were other heads than asked for."""
    with pytest.raises(ValueError, match="`head_dim`"):
        tiny_config(head_dim=16)

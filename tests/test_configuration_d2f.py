"""What the configurations of all architectures have in common: names, what cannot be, round trips."""

import json

import pytest
from d2f_hf.modeling.configuration_d2f import D2FConfig
from transformers import AutoConfig

import d2f_hf
from golden_data import GOLDEN
from tiny_models import FAMILIES, GOLDEN_FAMILIES, OTHER, tiny_config

all_families = pytest.mark.parametrize("family", FAMILIES)


@pytest.mark.parametrize("family", GOLDEN_FAMILIES)
def test_an_original_config_file_is_accepted_as_it_is(family):
    """Whatever of it is not kept, under its own name or the usual one, is of no use here."""
    config_class, _, _ = FAMILIES[family]
    original = json.loads((GOLDEN / f"{family}_tiny" / "config.json").read_text())
    config = config_class.from_pretrained(GOLDEN / f"{family}_tiny")
    assert isinstance(config, D2FConfig)
    kept = {name for name in original if name in config.to_dict() or name in config.attribute_map}
    for name in kept - {"model_type", "transformers_version", "dtype"}:
        assert getattr(config, name) == original[name], name
    assert {"attention_dropout", "eos_token_id", "mask_token_id", "pad_token_id", "vocab_size"} < kept
    assert {"rms_norm_eps", "use_cache"} < kept
    assert config.rope_parameters["rope_theta"] == original["rope_theta"]
    assert config.max_position_embeddings == {"llada": 512, "dream": 1024}[family]
    assert config.block_size == 32


@all_families
def test_the_usual_names_of_transformers_work_in_every_configuration(family):
    config = tiny_config(family)
    values = {
        "hidden_size": 48,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "num_hidden_layers": 5,
        "intermediate_size": 7,
        "max_position_embeddings": 9,
        "tie_word_embeddings": True,
        "vocab_size": 41,
        "initializer_range": 0.5,
    }
    config_class, _, _ = FAMILIES[family]
    created = config_class(**values)
    for name, value in values.items():
        assert getattr(created, name) == value
        assert getattr(config, name) != value
        setattr(config, name, value)
        assert getattr(config, name) == value
    assert config.to_dict() == {**tiny_config(family, **values).to_dict()}


@all_families
def test_without_a_number_of_key_heads_each_head_has_its_own(family):
    config_class, _, _ = FAMILIES[family]
    config = config_class(hidden_size=64, num_attention_heads=8, num_key_value_heads=None)
    assert config.num_key_value_heads == 8


@all_families
@pytest.mark.parametrize("options", [{}, OTHER, {"right_shift_logits": True}, {"right_shift_logits": False}], ids=len)
def test_a_saved_config_comes_back_equal(family, options, tmp_path):
    config_class, _, _ = FAMILIES[family]
    config = tiny_config(family, **options)
    config.save_pretrained(tmp_path)
    for reloaded in (config_class.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(reloaded) is config_class
        assert {**reloaded.to_dict(), "_name_or_path": ""} == config.to_dict()
        for name, value in options.items():
            if name != "rope_theta":
                assert getattr(reloaded, name) == value, name
    assert reloaded.rope_parameters == config.rope_parameters
    assert reloaded.rope_parameters["rope_theta"] == options.get("rope_theta", config_class.default_theta)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == f"d2f_{family}"


@all_families
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mask_token_id", 40),
        ("mask_token_id", -1),
        ("block_size", 0),
        ("block_size", -4),
        ("block_size", "4"),
        ("num_key_value_heads", 3),
        ("hidden_size", 30),
        ("hidden_size", "32"),
        ("num_hidden_layers", 2.5),
        ("right_shift_logits", "yes"),
        ("rms_norm_eps", "small"),
    ],
)
def test_a_value_that_cannot_be_is_an_error_that_names_the_parameter(family, name, value):
    config_class, _, _ = FAMILIES[family]
    options = {name: value} if family != "qwen3" else {"head_dim": None, name: value}
    with pytest.raises(Exception, match=config_class.attribute_map.get(name, name)) as error:
        tiny_config(family, **options)
    assert "trict" in type(error.value).__name__, "from the validation of the configuration, not from a later accident"


@all_families
def test_an_integer_stands_for_a_float(family):
    config = tiny_config(family, attention_dropout=0, rope_theta=10000)
    assert config.rope_parameters["rope_theta"] == 10000 and config.attention_dropout == 0


@all_families
def test_an_old_rope_scaling_is_understood(family):
    config = tiny_config(family, rope_scaling={"type": "linear", "factor": 2.0}, rope_theta=1000.0)
    assert config.rope_parameters["rope_type"] == "linear"
    assert (config.rope_parameters["factor"], config.rope_parameters["rope_theta"]) == (2.0, 1000.0)
    assert tiny_config(family, rope_scaling=None).rope_parameters["rope_type"] == "default"


@all_families
@pytest.mark.parametrize(
    "values",
    [
        {"rms_norm_eps": 1, "initializer_range": 0, "use_cache": None},
        {"dtype": "torch.float32"},
        {"torch_dtype": "torch.bfloat16"},
        {"dtype": "auto"},
        {"eos_token_id": [2, 3], "pad_token_id": None, "mask_token_id": None},
        {"return_dict": False, "output_hidden_states": True, "something_else": {"a": [1]}},
    ],
    ids=str,
)
def test_values_of_other_files_are_accepted_and_come_back(family, values, tmp_path):
    """An integer for a float, and torch's own spelling of a dtype, were errors."""
    config_class, _, _ = FAMILIES[family]
    config = tiny_config(family, **values)
    config.save_pretrained(tmp_path)
    reloaded = config_class.from_pretrained(tmp_path)
    assert {**reloaded.to_dict(), "_name_or_path": ""} == config.to_dict()


@all_families
@pytest.mark.parametrize(
    ("name", "value"),
    [("num_hidden_layers", 0), ("hidden_size", 0), ("num_attention_heads", 0), ("num_key_value_heads", 0)],
)
def test_a_size_of_zero_is_an_error(family, name, value):
    """Such a model loaded, and failed in `generate`, or divided by zero."""
    config_class, _, _ = FAMILIES[family]
    with pytest.raises(Exception, match=f"`{config_class.attribute_map.get(name, name)}` must be at least 1"):
        tiny_config(family, **{name: value})


@all_families
def test_a_rope_type_or_dtype_that_there_is_not_is_an_error(family):
    with pytest.raises(Exception, match="`rope_type`"):
        tiny_config(family, rope_parameters={"rope_type": "nonsense", "rope_theta": 1e4})
    with pytest.raises(ValueError, match="`dtype`"):
        tiny_config(family, dtype="nonsense")


class Derived(d2f_hf.D2FLLaDAConfig):
    """As in a script: with a type of its own, a default of its own, and a field of its own."""

    model_type = "derived"
    block_size: int = 7
    more: int = 3


def test_a_derived_config_is_saved_as_the_published_class(tmp_path):
    values = {
        name: value for name, value in tiny_config().to_dict().items() if name not in ("model_type", "block_size")
    }
    Derived(**values).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert (saved["model_type"], saved["block_size"], saved["more"]) == ("d2f_llada", 7, 3)
    assert saved["auto_map"] == {"AutoConfig": "configuration_d2f_llada.D2FLLaDAConfig"}
    assert {file.name for file in tmp_path.glob("*.py")} == {"configuration_d2f.py", "configuration_d2f_llada.py"}
    assert AutoConfig.from_pretrained(tmp_path).block_size == 7


@all_families
def test_a_config_alone_names_no_code_that_is_not_in_its_folder(family, tmp_path):
    """After the model had been saved, its configuration went on to name the model's code."""
    _, model_class, _ = FAMILIES[family]
    model = model_class(tiny_config(family))
    model.save_pretrained(tmp_path / "model")
    model.config.save_pretrained(tmp_path / "config")
    assert set(json.loads((tmp_path / "config" / "config.json").read_text())["auto_map"]) == {"AutoConfig"}
    model.config.block_size = 5
    model.config.save_pretrained(tmp_path / "model")
    saved = json.loads((tmp_path / "model" / "config.json").read_text())
    assert saved["block_size"] == 5


@pytest.mark.parametrize(
    "options, message",
    [
        ({"block_alignment": "row"}, "`block_alignment` must be one of"),
        ({"has_causal_mode": True, "right_shift_logits": False}, "`has_causal_mode` must be False"),
        ({"trained_for": "d2f"}, "`trained_for` must be None or one of"),
    ],
)
def test_words_about_blocks_and_the_training_are_checked(options, message):
    with pytest.raises(Exception, match=message):
        d2f_hf.D2FLLaDAConfig(**options)


@all_families
def test_heads_that_are_rotated_in_part_are_refused_wherever_the_file_says_so(family):
    """Within `rope_parameters` it was ignored, and all of each head was rotated."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    with pytest.raises(Exception, match="`partial_rotary_factor`"):
        tiny_config(family, rope_parameters=rope)
    tiny_config(family, rope_parameters={**rope, "partial_rotary_factor": 1.0})

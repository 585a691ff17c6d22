"""What is read beside an adapter, and untying. Adapters of all kinds are in `test_loading.py`."""

import json

import pytest

from d2f_hf.adapters import say_untied, settings_beside_adapter, untie
from tiny_models import FAMILIES, tiny_model


def test_the_configuration_beside_an_adapter_goes_before_its_generation_config(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"block_size": 4, "eos_token_id": [3], "steps": 9}))
    (tmp_path / "config.json").write_text(json.dumps({"block_size": 8, "has_causal_mode": False, "hidden_size": 5}))
    found = settings_beside_adapter(str(tmp_path), {})
    assert found == {"block_size": 8, "eos_token_id": [3], "has_causal_mode": False}
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}))
    assert settings_beside_adapter(str(tmp_path / "other"), {}) == {"eos_token_id": 3}
    assert settings_beside_adapter(str(tmp_path / "empty"), {}) == {}


def test_a_block_size_beside_an_adapter_says_that_its_base_is_no_longer_autoregressive(tmp_path):
    """Training saves no more than that, and the model went on to be decoded one token after the other."""
    (tmp_path / "generation_config.json").write_text(json.dumps({"block_size": 4}))
    assert settings_beside_adapter(str(tmp_path), {}) == {"block_size": 4, "has_causal_mode": False}


@pytest.mark.parametrize("family", FAMILIES)
def test_an_untied_head_has_weights_of_its_own_and_is_saved(family, tmp_path):
    model = tiny_model(family=family, tie_word_embeddings=True)
    untie(model)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert head.equal(embedding) and head is not embedding and model.config.tie_word_embeddings
    say_untied(model)
    head.data.mul_(2)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert again.get_output_embeddings().weight.equal(head) and again.get_input_embeddings().weight.equal(embedding)

"""From MODEL to a model, and from a prompt to tokens."""

import pytest
from transformers import LlamaForCausalLM

import d2f_hf
from cli_runs import ROOT, reference
from d2f_cli import models
from d2f_cli.models import Loaded, found, is_autoregressive
from d2f_hf import D2FLlamaForBlockDiffusion
from golden_data import GOLDEN
from tiny_models import letter_tokenizer, tiny_model


def test_reference_is_found_from_any_folder_of_a_clone(monkeypatch, tmp_path):
    expected = ROOT / "examples" / "reference_model"
    monkeypatch.chdir(ROOT / "tests")
    assert models.reference_folder() == expected
    monkeypatch.chdir(tmp_path)
    assert models.reference_folder() == expected, "d2f-hf is run from the clone"
    monkeypatch.setattr(d2f_hf, "__file__", str(tmp_path / "site-packages" / "d2f_hf" / "__init__.py"))
    with pytest.raises(ValueError, match="MODEL must be a folder or a Hub id here, got 'reference'.*clone"):
        models.reference_folder()
    assert found("me/model") == ("me/model", None, "me/model")


def test_a_baseline_of_another_kind_is_loaded_as_transformers_does_it():
    twin = reference("reference-twin", as_it_is=True)
    assert type(twin.model) is LlamaForCausalLM and not twin.is_block_diffusion
    ours = reference("reference-twin")
    assert type(ours.model) is D2FLlamaForBlockDiffusion and ours.is_block_diffusion
    assert is_autoregressive(found("reference-twin")[0])
    assert not is_autoregressive(found("reference")[0]) and not is_autoregressive(str(GOLDEN / "dream_tiny"))


def test_a_prompt_is_a_chat_where_there_is_a_template():
    loaded = reference()
    ids = loaded.prompt("How many?")
    assert ids.shape[0] == 1
    assert "How many?" in loaded.tokenizer.decode(ids[0]) and ids.shape[1] > len(
        loaded.tokenizer("How many?").input_ids
    )
    assert loaded.prompt([{"role": "user", "content": "How many?"}]).equal(ids)


def test_a_prompt_is_text_where_there_is_no_template():
    tokenizer = letter_tokenizer()
    loaded = Loaded(tiny_model(), tokenizer, "tiny")
    assert loaded.prompt("abc").tolist() == [tokenizer("abc").input_ids]
    with pytest.raises(ValueError, match="tiny has no chat template"):
        loaded.prompt([{"role": "user", "content": "a"}])
    with pytest.raises(ValueError, match="tiny has no chat template"):
        loaded.prompt("a", system="b")
    with pytest.raises(ValueError, match="must not be empty"):
        loaded.prompt("")

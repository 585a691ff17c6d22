"""`d2f publish`: a folder like those on the Hub."""

import pytest
from transformers import AutoTokenizer

from cli_runs import QUESTION, as_json, d2f, reference
from d2f_hf import load_d2f_model


def test_a_folder_has_the_model_its_code_and_its_tokenizer(tmp_path):
    folder = tmp_path / "model"
    assert as_json("publish", "reference", "--folder", str(folder)) == {"model": "reference", "published": str(folder)}
    loaded, again = reference(), load_d2f_model(folder)
    ids = loaded.prompt(QUESTION)
    assert again.generate(ids).equal(loaded.model.generate(ids))
    assert AutoTokenizer.from_pretrained(folder).chat_template == loaded.tokenizer.chat_template
    assert (folder / "modeling_d2f_llada.py").is_file() and (folder / "generation_config.json").is_file()


def test_the_hub_gets_model_and_tokenizer(monkeypatch):
    loaded, pushed = reference(), []
    for what in (loaded.model, loaded.tokenizer):
        monkeypatch.setattr(
            type(what), "push_to_hub", lambda self, repo, private: pushed.append((type(self), repo, private))
        )
    as_json("publish", "reference", "--repo", "me/model", "--private")
    assert pushed == [(type(what), "me/model", True) for what in (loaded.model, loaded.tokenizer)]


@pytest.mark.parametrize(
    "arguments", [[], ["--folder", "a", "--repo", "b/c"], ["--folder", "a", "--private"]], ids=str
)
def test_wrong_calls(arguments):
    assert d2f("publish", "/no/such/model", *arguments).exit_code == 2


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("mine")
    result = d2f("publish", "/no/such/model", "--folder", str(tmp_path))
    assert result.exit_code == 1 and "must be new or empty" in result.stderr

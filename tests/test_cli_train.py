"""`d2f train`: from a YAML file to a model that answers."""

import json
from pathlib import Path

import pytest
import yaml
from peft import LoraConfig

from cli_runs import ROOT, as_json, d2f, succeeds
from d2f_cli import train
from d2f_hf import load_d2f_model
from word_problems import make_problems


@pytest.fixture
def config(tmp_path) -> Path:
    lines = [json.dumps({"messages": problem.messages}) + "\n" for problem in make_problems("train", 8)]
    (tmp_path / "train.jsonl").write_text("".join(lines))
    keys = {
        "model": "reference-teacher",
        "dataset": str(tmp_path / "train.jsonl"),
        "output_dir": str(tmp_path / "out"),
    }
    keys |= {"adapter": {"rank": 4, "alpha": 8, "dropout": 0.0}, "max_steps": 2, "per_device_train_batch_size": 2}
    keys |= {"use_cpu": True, "save_steps": 1, "logging_steps": 1, "learning_rate": "1e-3", "disable_tqdm": True}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(keys))
    return tmp_path / "config.yaml"


def test_it_trains_saves_and_goes_on(config, tmp_path):
    summary = as_json("train", str(config))
    assert summary["steps"] == 2 and summary["output_dir"] == str(tmp_path / "out")
    trained = load_d2f_model(tmp_path / "out")
    before = load_d2f_model(ROOT / "examples" / "reference_model" / "teacher", dtype="float32").state_dict()
    changed = [name for name, value in trained.state_dict().items() if not value.equal(before[name])]
    assert changed and all("_proj" in name or "attn_out" in name for name in changed), (
        "the attention alone, by default"
    )
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    result = d2f("train", str(config), "--resume", "--set", "max_steps=3", "--json")
    assert json.loads(result.stdout)["steps"] == 3
    assert "'epoch'" not in result.stdout


def test_the_adapter_alone_can_be_kept(config, tmp_path):
    succeeds("train", str(config), "--set", "merge=false", "--set", "max_steps=1")
    saved = LoraConfig.from_pretrained(str(tmp_path / "out"))
    assert (saved.r, saved.lora_alpha) == (4, 8)


@pytest.mark.parametrize(
    "replaced, named",
    [
        ("learning_rat=1", "Did you mean `learning_rate`?"),
        ("objective=nonsense", "`objective` must be one of"),
        ("model=", "`model` must be in"),
        ("output_dir=", "`output_dir` must be in"),
        ("adapter=5", "`adapter` must have keys"),
        ("adapter={rnk: 3}", "Its keys are those of peft's LoraConfig"),
        ("model=reference", "Take reference-teacher"),
    ],
)
def test_a_file_that_cannot_be_is_one_line_before_anything_is_loaded(replaced, named, config, monkeypatch):
    monkeypatch.setattr(train, "read_dataset", lambda name: pytest.fail("a data set was read"))
    result = d2f("train", str(config), "--set", replaced)
    assert result.exit_code == 1 and named in result.stderr and len(result.stderr.splitlines()) == 1


def test_wrong_calls(config, tmp_path):
    assert d2f("train", str(config), "--set", "no_value").exit_code == 2
    (tmp_path / "list.yaml").write_text("- 1")
    assert "must have keys and values" in d2f("train", str(tmp_path / "list.yaml")).stderr
    (tmp_path / "bad.yaml").write_text("a: [")
    assert "must be YAML" in d2f("train", str(tmp_path / "bad.yaml")).stderr
    assert d2f("train", str(tmp_path / "none.yaml")).exit_code == 1


def test_numbers_that_yaml_takes_for_text():
    assert [train.as_number(value) for value in ("1e-4", "-2E3", "a1", "1a", ".5", 3, None)] == [
        1e-4, -2000.0, "a1", "1a", 0.5, 3, None
    ]  # fmt: skip

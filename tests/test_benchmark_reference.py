"""Scores and speeds of the reference models."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from benchmarks import reference
from benchmarks.reference import score, teacher_answers
from reference_models import HERE, load
from untrained_reference_models import save_untrained_models
from word_problems import make_problems

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def untrained_models(tmp_path_factory):
    tokenizer = AutoTokenizer.from_pretrained(HERE / "tokenizer")
    return save_untrained_models(tmp_path_factory.mktemp("models"), tokenizer)


def test_score_is_the_share_of_right_final_numbers():
    problems = [SimpleNamespace(answer=answer) for answer in (5, 6, 7, 8)]
    assert score(["#### 5", "#### 5", "7", "so 9. #### 8"], problems) == 50.0


@pytest.mark.slow
def test_the_report_is_one_json_object(untrained_models, tmp_path, capsys):
    path = tmp_path / "report.json"
    options = ["--models", str(untrained_models), "--problems", "2", "--slow-problems", "1", "--report", str(path)]
    reference.main(options)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found == json.loads(path.read_text())
    assert {key for figure in found["figures"] for key in figure} == {"name", "value", "target", "at_most", "met"}
    targets = [figure["target"] for figure in found["figures"] if figure["target"] is not None]
    assert sorted(targets) == [-2.0, 2.5, 2.5, 4.0, 20.0, 20.0, 90.0, 90.0]
    assert found["environment"]["dtype"] == "bfloat16" and found["environment"]["problems"] == 2


@pytest.mark.slow
def test_the_teacher_answers_a_batch_as_it_answers_alone(untrained_models, monkeypatch):
    models = load(untrained_models, "float32")
    monkeypatch.setattr(reference, "SCORING_LENGTH", 16)
    problems = make_problems("validation", 3)
    together = teacher_answers(models, problems, block_size=4)
    assert together == [teacher_answers(models, [problem], block_size=4)[0] for problem in problems]


@pytest.mark.slow
def test_the_search_names_the_best_block_size(untrained_models, monkeypatch, capsys):
    answers = {1: "#### 1", 2: "#### 2"}
    problems = [SimpleNamespace(answer=2)]
    monkeypatch.setattr(reference, "SEARCHED_BLOCK_SIZES", (1, 2))
    monkeypatch.setattr(reference, "make_problems", lambda split, count, seed: problems)
    monkeypatch.setattr(reference, "teacher_answers", lambda models, problems, size: [answers[size]])
    reference.main(["--models", str(untrained_models), "--search", "--problems", "1"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["teacher_scores"] == {"1": 0.0, "2": 100.0} and report["best_block_size"] == 2


@pytest.mark.slow
def test_a_benchmark_runs_as_a_module_and_says_what_makes_missing_models(tmp_path):
    command = [sys.executable, "-m", "benchmarks.reference", "--models", str(tmp_path)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "make reference-model" in done.stderr and "Traceback" not in done.stderr


def test_arguments_that_mean_nothing_end_the_script(capsys):
    for name in ("--problems", "--slow-problems", "--teacher-block-size"):
        with pytest.raises(SystemExit):
            reference.main([name, "0"])
        assert f"{name} must be at least 1, got 0" in capsys.readouterr().err

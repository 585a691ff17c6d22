"""The script that compares samplers: its rows, areas and what dominates, and its last line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoTokenizer

from benchmarks import samplers
from benchmarks.metrics import accuracy_under_parallelism
from d2f_hf import D2FGenerationConfig, D2FLLaDAForBlockDiffusion
from reference_models import HERE, ReferenceModels
from word_problems import final_number, make_problems

ROOT = Path(__file__).resolve().parents[1]
Row = samplers.Row


@pytest.fixture(scope="module")
def models():
    """Without the models that the script does not ask; of classes of the package, which is imported already here."""
    teacher = D2FLLaDAForBlockDiffusion.from_pretrained(HERE / "teacher", dtype=torch.float32)
    student = PeftModel.from_pretrained(teacher, str(HERE / "student")).merge_and_unload().eval()
    tokenizer = AutoTokenizer.from_pretrained(HERE / "tokenizer")
    return ReferenceModels(tokenizer, twin=None, own_twin=None, teacher=None, student=student)


def row(sampler="threshold", scores=(90.0, 92.0), tokens_per_forward=4.0, branches=1, block_size=5):
    weighted = tokens_per_forward / branches
    return Row(sampler, {}, block_size, sum(scores) / len(scores), list(scores), tokens_per_forward, weighted)


@pytest.mark.parametrize("sampler", samplers.SETTINGS)
def test_every_setting_is_one_that_generate_takes(sampler):
    for options in samplers.SETTINGS[sampler]:
        D2FGenerationConfig(**options).with_defaults()
    assert len(set(map(str, samplers.SETTINGS[sampler]))) == len(samplers.SETTINGS[sampler]) >= 4


def test_the_default_is_that_of_generate():
    sampler, options = samplers.DEFAULT
    assert options in samplers.SETTINGS[sampler]
    default = D2FGenerationConfig().with_defaults()
    assert D2FGenerationConfig(**options).with_defaults().to_dict() == default.to_dict()


def test_a_setting_dominates_with_no_lower_score_on_any_seed_and_more_compute_weighted_tokens_per_forward():
    default = row()
    better, equal_score = row(scores=(91.0, 93.0), tokens_per_forward=4.1), row("credit", tokens_per_forward=4.5)
    others = [
        row(scores=(89.5, 99.0), tokens_per_forward=8.0),  # worse on one seed, better in the mean
        row(scores=(99.0, 99.0), tokens_per_forward=4.0),  # no faster
        row(scores=(99.0, 99.0), tokens_per_forward=7.9, branches=2),  # faster only if branches cost nothing
    ]
    found = samplers.dominating_rows([default, better, *others, equal_score], default)
    assert found == [equal_score, better]


def test_areas_are_of_one_sampler_and_block_size_and_relative_to_the_best_score_of_all():
    rows = [
        row(scores=(90.0,), tokens_per_forward=4.0),
        row("num_branches", scores=(80.0,), tokens_per_forward=6.0, branches=2),
        row(scores=(88.0,), tokens_per_forward=5.0),
        row(scores=(96.0,), tokens_per_forward=3.0, block_size=8),
    ]
    areas = {(area["sampler"], area["block_size"]): area for area in samplers.areas_of(rows)}
    assert list(areas) == [("threshold", 5), ("num_branches", 5), ("threshold", 8)]
    expected = accuracy_under_parallelism([(4.0, 90.0), (5.0, 88.0)], best_accuracy=96.0)
    assert areas["threshold", 5]["aup"] == areas["threshold", 5]["compute_weighted_aup"] == round(expected, 2)
    assert areas["threshold", 5]["num_settings"] == 2
    assert (areas["num_branches", 5]["aup"], areas["num_branches", 5]["compute_weighted_aup"]) == (480.0, 240.0)
    assert areas["threshold", 8]["aup"] == 288.0


def test_areas_are_0_where_no_answer_is_right():
    (area,) = samplers.areas_of([row(scores=(0.0, 0.0)), row(scores=(0.0, 0.0), tokens_per_forward=2.0)])
    assert area["aup"] == area["compute_weighted_aup"] == 0.0


def test_the_script_ends_with_one_json_object_of_all_rows(models, monkeypatch, capsys, tmp_path):
    """Of two seeds with three problems each in batches of two: tokens and forwards are those of each row alone."""
    monkeypatch.setattr(samplers, "load_models", lambda folder, dtype: models)
    monkeypatch.setattr(samplers, "BATCH_SIZE", 2)
    monkeypatch.setattr(
        samplers,
        "SETTINGS",
        {**samplers.SETTINGS, "credit": [{"acceptance_rule": "credit", "confidence_threshold": 0.5}]},
    )
    options = "--problems 3 --seeds 3 4 --samplers credit --block-sizes 8"
    samplers.main([*options.split(), "--report", str(tmp_path / "report.json")])
    stdout = capsys.readouterr().out
    report = json.loads(stdout.splitlines()[-1])
    assert report == json.loads((tmp_path / "report.json").read_text())
    default, credit = report["rows"]  # the default is measured although nobody asked for it
    assert report["default"] == default
    assert (default["sampler"], default["block_size"]) == ("threshold", models.student.config.block_size)
    assert credit["block_size"] == 8 and credit["options"]["confidence_threshold"] == 0.5
    assert [area["sampler"] for area in report["areas"]] == ["threshold", "credit"]
    assert report["environment"]["dtype"] == "float32" and report["environment"]["seeds"] == [3, 4]
    assert report["environment"]["command"].startswith("python -m benchmarks.samplers --problems 3")

    eos = models.tokenizer.eos_token_id
    num_tokens = num_forward_passes = 0
    scores = []
    for seed in (3, 4):
        problems = make_problems("test", 3, seed)
        num_right = 0
        for problem in problems:
            inputs = models.prompt(problem.question)
            output = models.student.generate(
                **inputs,
                max_new_tokens=256,
                block_size=8,
                acceptance_rule="credit",
                confidence_threshold=0.5,
                return_dict_in_generate=True,
            )
            response = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
            assert response[-1] == eos and response.count(eos) == 1
            num_tokens += len(response)
            num_forward_passes += int(output.num_forward_passes)
            num_right += final_number(models.text(response)) == problem.answer
        scores.append(round(100 * num_right / 3, 4))
    assert credit["scores"] == scores and credit["score"] == pytest.approx(sum(scores) / 2, abs=1e-3)
    assert credit["tokens_per_forward"] == round(num_tokens / num_forward_passes, 4)
    assert credit["compute_weighted_tokens_per_forward"] == credit["tokens_per_forward"]


def test_forwards_of_several_branches_count_that_many_times_behind_the_first_one(models, monkeypatch):
    problems = [make_problems("test", 2, seed) for seed in (0, 1)]
    answers = [([[5, 6, 7], [8]], [1, 1]), ([[5, 6], [7, 8]], [2, 2])]
    monkeypatch.setattr(samplers, "answer", lambda models, problems, options: answers.pop(0))
    found = samplers.measure(models, problems, "num_branches", {"num_branches": 2}, 5, max_new_tokens=8)
    assert found.tokens_per_forward == (3 + 1 + 2 + 2) / 6
    assert found.compute_weighted_tokens_per_forward == (3 + 1 + 2 + 2) / (4 + 2 * 2)
    assert found.scores == [0.0, 0.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--problems", "0"], "--problems must be at least 1, got 0"),
        (["--block-sizes", "5", "0"], "--block-sizes must be at least 1, got 0"),
        (["--seeds", "1", "1"], "--seeds must be different ones, got 1 1"),
        (["--samplers", "beam"], "invalid choice: 'beam'"),
    ],
)
def test_arguments_that_mean_nothing_end_the_script(arguments, message, capsys):
    with pytest.raises(SystemExit):
        samplers.main(arguments)
    assert message in capsys.readouterr().err


def test_missing_models_are_said_to_be_missing(tmp_path):
    with pytest.raises(SystemExit, match="make reference-model"):
        samplers.main(["--models", str(tmp_path)])


@pytest.mark.slow
def test_the_script_runs_with_the_code_of_the_exported_model():
    options = "--problems 2 --seeds 0 --samplers threshold --block-sizes 5 --max-new-tokens 16"
    command = [sys.executable, "-m", "benchmarks.samplers", *options.split()]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert [row["options"] for row in report["rows"]] == samplers.SETTINGS["threshold"]
    assert {row["block_size"] for row in report["rows"]} == {5}
    assert all(row["score"] == 0.0 < row["tokens_per_forward"] for row in report["rows"])  # no solution is so short

"""The script that compares ways to decode: its figures, and its last line."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from d2f_hf import engine_benchmarking

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
benchmark_decoding = importlib.import_module("benchmark_decoding")

TINY = {"d_model": 16, "n_layers": 1, "n_heads": 1, "mlp_hidden_size": 16, "vocab_size": 64}


@pytest.fixture
def tiny_engine(monkeypatch):
    monkeypatch.setattr(benchmark_decoding, "ENGINE_SIZES", ("tiny",))
    monkeypatch.setitem(engine_benchmarking.SIZES, "tiny", TINY)
    monkeypatch.setattr(benchmark_decoding, "MEMORY_MODEL", {"size": "tiny", "vocab_size": 5000})


def figures_of(stdout):
    report = json.loads(stdout.splitlines()[-1])
    for figure in report["figures"]:
        assert set(figure) == {"name", "value", "bar", "holds"}
        assert (figure["holds"] is None) == (figure["bar"] is None)
    return report, {figure["name"]: figure for figure in report["figures"]}


def test_engine_mode_ends_with_one_json_object_of_all_figures(tiny_engine, capsys, tmp_path):
    command = ["--engine", "tiny", "--dtype", "float32", "--repetitions", "1", "--contexts", "8", "16"]
    options = ["--batch-sizes", "1", "16", "--response-length", "32", "--report", str(tmp_path / "report.json")]
    benchmark_decoding.main(command + options)
    stdout = capsys.readouterr().out
    report, figures = figures_of(stdout)
    assert report == json.loads((tmp_path / "report.json").read_text())
    assert figures["tiny, batch 1: forwards"]["value"] == 32 / 4
    assert figures["tiny, batch 16: masked positions / positions"]["bar"] == 0.6
    assert figures["tiny, EOS at token 20, limit 2048 / 64: forwards"]["value"] == 1.0
    memory = report["engine"]["memory"]
    assert figures["peak memory / logits of the masked rows, V 126464, window 128, batch 8"]["value"] == round(
        memory["peak_bytes"] / memory["logits_bytes"], 4
    )
    assert memory["logits_bytes"] == 8 * (128 - 16) * 5000 * 4  # in the second step
    for name in ("tiny, batch 16: tokens/s", "tiny, context 16: ms per step", "tiny, context 8: ms per forward"):
        assert figures[name]["value"] > 0.0 and name in stdout
    assert report["environment"]["dtype"] == "float32" and report["environment"]["threads"] >= 1
    assert report["environment"]["command"].startswith("benchmark_decoding.py --engine tiny")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "2m"], "--engine must be one of 5m, 100m, 1b, 8b, got 2m"),
        (["--problems", "0"], "--problems must be at least 1, got 0"),
        (["--batch-problems", "24"], "--batch-problems must be a multiple of each of --batch-sizes, got 24"),
        (["--engine", "5m", "--batch-sizes", "0"], "--batch-sizes must be at least 1, got [0]"),
        (["--bars", "--engine", "5m", "--batch-sizes", "3"], "--batch-problems must be a multiple"),
        (["--engine", "5m", "--contexts", "0", "8"], "--contexts must be at least 1, got [0, 8]"),
        (["--engine", "5m", "--tokens-per-forward", "1"], "--tokens-per-forward must be at least 1.25, got 1.0"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
    ],
)
def test_arguments_that_mean_nothing_end_the_script(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        benchmark_decoding.main(arguments)
    assert message in f"{end.value.code} {capsys.readouterr().err}"


@pytest.mark.slow
def test_reference_mode_compares_six_systems_on_the_same_problems():
    options = "--problems 2 --stage-problems 1 --batch-problems 4 --batch-sizes 1 4 --max-new-tokens 32"
    command = [sys.executable, str(EXAMPLES / "benchmark_decoding.py"), *options.split(), "--repetitions", "1"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report, figures = figures_of(done.stdout)
    assert list(report["systems"]) == [
        "autoregressive twin",
        "vanilla",
        "Fast-dLLM, prefix cache",
        "Fast-dLLM, dual cache",
        "block by block",
        "D2F",
    ]
    for row in report["systems"].values():
        parts = row["prefill"] + row["decode"] + row["sampling"] + row["host"]
        assert 0.0 < row["prefill"] < parts and row["TTFT"] > 0.0 and row["p50"] <= row["p95"]
        assert row["tokens"] == 32.0  # no solution is shorter
    assert report["systems"]["vanilla"]["forwards"] == report["systems"]["autoregressive twin"]["forwards"] == 32.0
    bars = {name: figure["bar"] for name, figure in figures.items() if figure["bar"] is not None}
    assert sorted(bars.values()) == [-1.0, -1.0, -1.0, 1.25, 2.5, 4.0, 50.0, 100.0]
    assert figures["student, batch 4, float32: rows as when alone, %"]["value"] == 100.0
    assert figures["D2F tokens/s, batch 4"]["value"] > 0.0


def test_missing_models_are_said_to_be_missing(tmp_path):
    with pytest.raises(SystemExit, match="make reference-model"):
        benchmark_decoding.main(["--models", str(tmp_path)])


@pytest.mark.slow
def test_all_that_has_a_bar_is_in_one_table():
    options = "--bars --engine 5m --problems 2 --slow-problems 1 --batch-problems 4 --batch-sizes 1 4 --repetitions 1"
    command = [sys.executable, str(EXAMPLES / "benchmark_decoding.py"), *options.split(), "--contexts", "16", "32"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    _, figures = figures_of(done.stdout)
    assert figures["D2F tokens/s over twin tokens/s"]["bar"] == 2.5
    bars = {name.removeprefix("engine: "): f["bar"] for name, f in figures.items() if name.startswith("engine: ")}
    assert bars["D2F tokens/s over autoregressive twin tokens/s, median over problems"] == 4.0
    assert bars["D2F at threshold 0.99 tokens/s over autoregressive twin tokens/s, median over problems"] == 4.0
    assert bars["D2F tokens/s over vanilla tokens/s, median over problems"] == 50.0
    assert bars["D2F tokens/s over Fast-dLLM, dual cache tokens/s, median over problems"] == 2.5
    assert bars["student, batch 1: generate / its forwards alone"] == 1.25
    assert bars["5m, EOS at token 20, limit 2048 / 64: time"] == 1.1
    assert bars["5m, batch 16, float32: rows as when alone, %"] == 100.0
    assert bars["D2F score less autoregressive twin score, points"] == -1.0
    assert bars["5m, batch 1: generate / its forwards alone"] == 1.25
    assert bars["5m, batch 16: generate / its forwards alone"] == 1.15
    assert bars["5m, batch 16: masked positions / positions"] == 0.6
    assert "D2F tokens/s, batch 4" in bars and "5m: tokens/s merged adapter / on top (rank 32)" in bars

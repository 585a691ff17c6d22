"""The script that compares ways to decode: its figures, and its last line."""

import json

import pytest
from transformers import AutoTokenizer, CompileConfig

from benchmarks import decoding, scripted
from benchmarks.figures import Figure, figures_in
from reference_models import HERE, OWN_TWIN, TWIN, VERIFIED
from untrained_reference_models import save_untrained_models

TINY = {"d_model": 16, "n_layers": 1, "n_heads": 1, "mlp_hidden_size": 16, "vocab_size": 64}


@pytest.fixture
def tiny_engine(monkeypatch):
    monkeypatch.setitem(scripted.SIZES, "tiny", TINY)
    monkeypatch.setattr(decoding, "MEMORY_MODEL", {"size": "tiny", "vocab_size": 5000})


@pytest.fixture(scope="module")
def untrained_models(tmp_path_factory):
    tokenizer = AutoTokenizer.from_pretrained(HERE / "tokenizer")
    return save_untrained_models(tmp_path_factory.mktemp("models"), tokenizer)


def figures_of(stdout):
    report = json.loads(stdout.splitlines()[-1])
    for figure in report["figures"]:
        assert set(figure) == {"name", "value", "target", "at_most", "met"}
        assert (figure["met"] is None) == (figure["target"] is None)
    return report, {figure["name"]: figure for figure in report["figures"]}


def test_engine_mode_ends_with_one_json_object_of_all_figures(tiny_engine, capsys, tmp_path):
    command = ["--engine", "tiny", "--dtype", "float32", "--repetitions", "1", "--contexts", "8", "16"]
    options = ["--batch-sizes", "1", "16", "--response-length", "32", "--report", str(tmp_path / "report.json")]
    decoding.main(command + options)
    stdout = capsys.readouterr().out
    report, figures = figures_of(stdout)
    assert report == json.loads((tmp_path / "report.json").read_text())
    assert figures["tiny, batch 1: forwards"]["value"] == 32 / 4
    assert figures["tiny, batch 16: masked positions / positions"]["target"] == 0.6
    assert figures["tiny, EOS at token 20, limit 2048 / 64: forwards"]["value"] == 1.0
    memory = report["engine"]["memory"]
    assert figures["peak memory / logits of the masked rows, V 126464, window 128, batch 8"]["value"] == round(
        memory["peak_bytes"] / memory["logits_bytes"], 4
    )
    assert memory["logits_bytes"] == 8 * (128 - 16) * 5000 * 4  # in the second step
    for name in ("tiny, batch 16: tokens/s", "tiny, context 16: ms per step", "tiny, context 8: ms per forward"):
        assert figures[name]["value"] > 0.0 and name in stdout
    assert report["environment"]["dtype"] == "float32" and report["environment"]["threads"] >= 1
    assert report["environment"]["command"].startswith("python -m benchmarks.decoding --engine tiny")


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
        decoding.main(arguments)
    assert message in f"{end.value.code} {capsys.readouterr().err}"


@pytest.mark.slow
def test_reference_mode_compares_seven_systems_on_the_same_problems(capsys):
    options = "--problems 2 --stage-problems 1 --batch-problems 4 --batch-sizes 1 4 --max-new-tokens 32"
    decoding.main([*options.split(), "--repetitions", "1"])
    report, figures = figures_of(capsys.readouterr().out)
    assert list(report["systems"]) == [
        "autoregressive twin",
        "autoregressive twin, our loop",
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
    for name in ("vanilla", TWIN, OWN_TWIN):
        assert report["systems"][name]["forwards"] == 32.0
    assert report["systems"][OWN_TWIN]["score"] == report["systems"][TWIN]["score"]
    assert report["systems"][OWN_TWIN]["sampling"] > 0.0
    targets = [figure["target"] for figure in figures.values() if figure["target"] is not None]
    assert sorted(targets) == [-1.0, -1.0, -1.0, 1.0, 1.25, 2.5, 4.0, 5.0, 50.0, 100.0, 100.0, 100.0]
    assert figures["student, batch 4, float32: rows as when alone, %"]["value"] == 100.0
    for name in ("D2F", TWIN, OWN_TWIN):
        assert figures[f"{name} tokens/s, batch 4"]["value"] > 0.0
    for name in (OWN_TWIN, VERIFIED):
        assert figures[f"{name}, float32, batch 4: answers as of {TWIN}, %"]["value"] == 100.0
    assert figures[f"{VERIFIED}: tokens per forward, all forwards counted"]["value"] > 2.0


def test_answers_are_the_same_if_all_their_tokens_are():
    assert decoding.same_answers([[1, 2], [3], [], [4]], [[1, 2], [3, 3], [], [5]]) == 50.0
    with pytest.raises(ValueError):
        decoding.same_answers([[1]], [])


def test_missing_models_are_said_to_be_missing(tmp_path):
    with pytest.raises(SystemExit, match="make reference-model"):
        decoding.main(["--models", str(tmp_path)])


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--targets", "--bars"])
def test_a_report_can_be_compared_with_the_committed_ones(option, tiny_engine, untrained_models, monkeypatch, capsys):
    """The same figures in the same order with the same targets, each of which says rightly whether it is met."""
    monkeypatch.setitem(scripted.SIZES, "100m", TINY)
    monkeypatch.setattr(decoding, "CompileConfig", lambda: CompileConfig(backend="eager", mode=None))
    options = "--compile --problems 2 --slow-problems 1 --max-new-tokens 8 --repetitions 1 --dtype float32"
    decoding.main([option, *options.split(), "--models", str(untrained_models)])
    report, figures = figures_of(capsys.readouterr().out)
    committed = figures_in(json.loads((HERE / "reports" / "run0.json").read_text()))
    settings = ("name", "target", "at_most")
    found = [[f[key] for key in settings] for f in report["figures"]]
    # The committed reports are from before verified decoding, and before the twin was decoded by our loop.
    of_verified = [figure for figure in found if figure[0].startswith(f"engine: {VERIFIED}")]
    assert of_verified == [
        [f"engine: {VERIFIED}: tokens per forward, all forwards counted", 5.0, False],
        [f"engine: {VERIFIED}: tokens/s over {TWIN} tokens/s, median over problems", None, False],
        [f"engine: {VERIFIED}: answers as of {TWIN}, %", None, False],
        [f"engine: {VERIFIED}, float32, batch 16: answers as of {TWIN}, %", 100.0, False],
    ]
    of_own_loop = [figure for figure in found if figure[0].startswith(f"engine: {OWN_TWIN}")]
    assert of_own_loop == [
        [f"engine: {OWN_TWIN} tokens/s over {TWIN} tokens/s, median over problems", 1.0, False],
        [f"engine: {OWN_TWIN}: answers as of {TWIN}, %", None, False],
        [f"engine: {OWN_TWIN}, float32, batch 16: answers as of {TWIN}, %", 100.0, False],
        *([f"engine: {OWN_TWIN} tokens/s, batch {size}", None, False] for size in (1, 4, 16, 64)),
    ]
    assert [figure for figure in found if figure not in of_own_loop + of_verified] == [
        [f[key] for key in settings] for f in committed
    ]
    for name in (OWN_TWIN, VERIFIED):
        assert figures[f"engine: {name}, float32, batch 16: answers as of {TWIN}, %"]["value"] == 100.0
    for figure in report["figures"]:
        assert figure["met"] == Figure(*(figure[key] for key in ("name", "value", "target", "at_most"))).met
    assert figures["engine: student, batch 16, float32: rows as when alone, %"]["value"] == 100.0
    # What is measured twice is one number, and what is compared goes into the ratio the right way round.
    ratio = "D2F tokens/s over vanilla tokens/s, median over problems"
    assert figures[ratio]["value"] == figures[f"engine: {ratio}"]["value"]
    over_twin = figures["D2F tokens/s"]["value"] / figures["twin tokens/s"]["value"]
    assert figures["D2F tokens/s over twin tokens/s"]["value"] == pytest.approx(over_twin, rel=1e-3)
    over_teacher = (
        figures["D2F student score, %"]["value"] - figures["teacher score, % (vanilla, one token per step)"]["value"]
    )
    assert figures["D2F student score less teacher score, points"]["value"] == over_teacher

"""`d2f generate` with one prompt."""

import json
import os
import pty
import subprocess

import pytest

from cli_runs import D2F, QUESTION, ROOT, as_json, d2f, in_a_process, reference, succeeds
from d2f_cli.answering import respond

SCHEMA = {
    "model": str,
    "prompt": str,
    "response": str,
    "num_tokens": int,
    "num_forward_passes": int,
    "tokens_per_forward": float,
    "seconds": float,
    "tokens_per_second": float,
    "options": dict,
}


def answer() -> str:
    loaded = reference()
    return respond(loaded, loaded.prompt(QUESTION), {})[0]["response"]


def test_piped_it_prints_the_answer_and_nothing_else():
    # The oldest peft warns of a field that the shipped adapter's file has from a newer one.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore::UserWarning"}
    done = in_a_process("generate", "reference", QUESTION, env=environment)
    assert done.returncode == 0
    assert done.stdout == answer() + "\n"
    (line,) = done.stderr.splitlines()
    assert line.startswith("d2f: ") and line.endswith(" tokens/s") and "\033" not in line


def test_json_has_the_answer_its_figures_and_the_options():
    found = as_json("generate", "reference", QUESTION, "--confidence-threshold", "0.98")
    assert {name: type(value) for name, value in found.items()} == SCHEMA
    assert found["prompt"] == QUESTION and found["options"] == {"confidence_threshold": 0.98}
    assert found["response"].endswith("#### 31") == answer().endswith("#### 31")


@pytest.mark.parametrize("arguments", [[], ["-"]], ids=str)
def test_the_prompt_comes_from_stdin(arguments):
    assert succeeds("generate", "reference", *arguments, input=f"\n{QUESTION}\n") == answer() + "\n"


def test_a_terminal_shows_the_blocks_and_then_the_answer():
    main, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24", "HF_HUB_OFFLINE": "1"}
    environment.pop("NO_COLOR", None)
    command = [*D2F, "generate", "reference", QUESTION]
    process = subprocess.Popen(command, cwd=ROOT, stdin=terminal, stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    shown = b""
    while True:
        try:
            part = os.read(main, 65536)
        except OSError:  # the other side is closed
            break
        shown += part
        if not part:
            break
    assert process.wait(60) == 0
    text = shown.decode()
    assert "░" in text and "\033[" in text and "semi-activated" in text
    assert text.rstrip().endswith("tokens/s") or "tokens/s" in text.splitlines()[-2]
    assert answer().split()[-1] in text


def test_a_trace_is_written(tmp_path):
    found = as_json("generate", "reference", QUESTION, "--trace", str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert len(trace["trace"]) == found["num_forward_passes"] and len(trace["tokens"]) == found["num_tokens"]
    assert trace["block_size"] == 5 and "".join(trace["tokens"]).split()[-1].startswith(found["response"].split()[-1])
    result = d2f("generate", "reference", QUESTION, "--trace", str(tmp_path / "x"), "--decoding", "vanilla",
                 "--max-new-tokens", "8", "--block-size", "8")  # fmt: skip
    assert result.exit_code == 1 and "--trace needs" in result.stderr


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["hello", "--input", "x"], "PROMPT and --input"),
        (["--input", "x"], "needs an --output"),
        (["--input", "x", "--output", "y", "--live"], "--trace and --live"),
        (["hello", "--output", "y"], "belong to --input"),
        (["hello", "--batch-size", "0"], "--batch-size"),
        ([""], "PROMPT must not be empty"),
    ],
    ids=str,
)
def test_wrong_calls(arguments, named):
    result = d2f("generate", "/no/such/model", *arguments)
    assert result.exit_code == 2 and named in " ".join(result.stderr.split())


def test_what_the_model_refuses_is_one_line():
    result = d2f("generate", "reference", QUESTION, "--decoding", "verified")
    assert result.exit_code == 1 and result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("d2f: error: `decoding` must not be 'verified'")


def test_a_model_that_is_not_there_is_one_line():
    result = in_a_process("generate", "no/such-model", "hello", env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert result.returncode == 1 and result.stdout == ""
    assert len(result.stderr.splitlines()) == 1 and "no/such-model" in result.stderr

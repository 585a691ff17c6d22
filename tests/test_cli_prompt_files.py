"""`d2f generate --input --output`: each answer once, whatever happens."""

import functools
import json
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from cli_runs import D2F, ROOT, as_json, d2f, load_once, write_prompts
from d2f_cli.answering import respond


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def files(tmp_path):
    records = write_prompts(tmp_path / "in.jsonl", 6)
    return records, ["generate", "reference", "--input", str(tmp_path / "in.jsonl"), "--output",
                     str(tmp_path / "out.jsonl")], tmp_path / "out.jsonl"  # fmt: skip


def test_each_prompt_gets_the_answer_that_it_gets_alone(files):
    records, command, output = files
    summary = as_json(*command, "--batch-size", "4", "--dtype", "float32")
    loaded = load_once("reference", None, "float32")
    assert sorted(row["index"] for row in rows(output)) == list(range(6))
    for row in rows(output):
        assert row["input"] == records[row["index"]], "with all that it has"
        alone, _ = respond(loaded, loaded.prompt(row["input"]["prompt"]), {})
        for name in ("response", "num_tokens", "num_forward_passes"):
            assert row[name] == alone[name]
        assert row["finish_reason"] == "eos"
    assert (summary["total"], summary["answered"], summary["resumed"], summary["failed"]) == (6, 6, 0, 0)
    assert summary["num_tokens"] == sum(row["num_tokens"] for row in rows(output))


def test_prompts_may_be_strings_and_chats(tmp_path):
    chat = [{"role": "user", "content": "How many are 3 rings and 4 rings?"}]
    lines = [json.dumps(chat[0]["content"]), "", json.dumps({"messages": chat, "id": "b"})]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    output = tmp_path / "out.jsonl"
    as_json("generate", "reference", "--input", str(tmp_path / "in.jsonl"), "--output", str(output))
    first, second = sorted(rows(output), key=lambda row: row["index"])
    assert first["response"] == second["response"] and second["input"]["id"] == "b"


def test_a_half_written_output_goes_on_and_a_torn_line_is_answered_again(files):
    _, command, output = files
    as_json(*command)
    whole = output.read_bytes()
    lines = whole.splitlines(keepends=True)
    for kept in (b"".join(lines[:2]), b"".join(lines[:3]) + lines[3][:20], lines[0][:5], b""):
        output.write_bytes(kept)
        result = d2f(*command, "--json")
        summary = json.loads(result.stdout)
        assert result.exit_code == 0 and ("torn" in result.stderr) == (not kept.endswith(b"\n") and kept != b"")
        assert summary["resumed"] == kept.count(b"\n") and summary["answered"] == 6 - summary["resumed"]
        assert sorted(output.read_bytes().splitlines()) == sorted(whole.splitlines())
    assert as_json(*command)["answered"] == 0 and sorted(output.read_bytes().splitlines()) == sorted(
        whole.splitlines()
    )


@pytest.mark.parametrize("with_signal, code", [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)], ids=str)
def test_no_finished_answer_is_lost(with_signal, code, tmp_path):
    records = write_prompts(tmp_path / "in.jsonl", 120)
    command = ["generate", "reference", "--input", str(tmp_path / "in.jsonl"), "--output",
               str(tmp_path / "out.jsonl"), "--batch-size", "2"]  # fmt: skip
    output = tmp_path / "out.jsonl"
    # A shell that runs the tests in the background lets its children ignore SIGINT.
    heed_sigint = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen([*D2F, *command], cwd=ROOT, stderr=subprocess.PIPE, text=True, preexec_fn=heed_sigint)
    while process.poll() is None and (not output.exists() or output.read_bytes().count(b"\n") < 3):
        time.sleep(0.005)
    seen = output.read_bytes()
    process.send_signal(with_signal)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code and "Traceback" not in said
    content = output.read_bytes()
    assert content.startswith(seen) and 3 <= content.count(b"\n") < 120
    summary = as_json(*command)
    assert summary["resumed"] == content.count(b"\n") and summary["resumed"] + summary["answered"] == 120
    assert sorted(row["index"] for row in rows(output)) == list(range(120))
    assert all(row["input"] == records[row["index"]] for row in rows(output))


def test_answers_of_other_options_or_prompts_are_not_mixed(files, tmp_path):
    _, command, output = files
    as_json(*command, "--confidence-threshold", "0.98")
    before = output.read_bytes()
    refused = {
        ("--confidence-threshold", "0.9"): "confidence_threshold was 0.98 and is 0.9",
        (): "confidence_threshold was 0.98 and is None",
        ("--confidence-threshold", "0.98", "--dtype", "float32"): "dtype was 'auto' and is 'float32'",
    }
    for flags, named in refused.items():
        result = d2f(*command, *flags)
        assert result.exit_code == 1 and named in result.stderr and "--overwrite" in result.stderr
    write_prompts(tmp_path / "in.jsonl", 3)
    result = d2f(*command, "--confidence-threshold", "0.98")
    assert result.exit_code == 1 and "answers a prompt that the input has not" in result.stderr
    assert output.read_bytes() == before, "a refusal leaves it as it was"
    assert as_json(*command, "--overwrite")["answered"] == 3


def test_a_file_of_something_else_is_not_written_to(files):
    _, command, output = files
    output.write_text('{"mine": 1}\n')
    assert "is of something else" in d2f(*command).stderr
    (output.parent / "out.jsonl.settings.json").write_text(
        json.dumps({"model": "reference", "adapter": None, "dtype": "auto", "system": None, "options": {}})
    )
    result = d2f(*command)
    assert result.exit_code == 1 and "is no answer of d2f" in result.stderr
    assert output.read_text() == '{"mine": 1}\n'


def test_a_prompt_that_fails_does_not_touch_the_others(tmp_path):
    lines = [{"prompt": "How many?"}, {"prompt": "many " * 2000}, {"messages": [{"role": 7}]}, {"prompt": "And now?"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    output = tmp_path / "out.jsonl"
    result = d2f("generate", "reference", "--input", str(tmp_path / "in.jsonl"), "--output", str(output), "--json")
    assert result.exit_code == 1 and json.loads(result.stdout)["failed"] == 2
    assert {row["index"] for row in rows(output)} == {0, 3}
    assert "line 2 of" in result.stderr and "must have at most 768 tokens" in result.stderr
    assert "line 3 of" in result.stderr


def test_a_sample_depends_neither_on_its_batch_nor_on_a_restart(files):
    _, command, output = files
    flags = ["--do-sample", "--temperature", "3", "--seed", "5", "--max-new-tokens", "20", "--dtype", "float32"]
    as_json(*command, *flags, "--batch-size", "1")
    alone = {row["index"]: row["response"] for row in rows(output)}
    output.write_bytes(b"".join(output.read_bytes().splitlines(keepends=True)[:2]))
    as_json(*command, *flags, "--batch-size", "4")
    assert {row["index"]: row["response"] for row in rows(output)} == alone
    assert len(set(alone.values())) > 3


@pytest.mark.parametrize(
    "content, named",
    [
        ("", "must have at least one prompt"),
        ('{"prompt": 3}\n', 'Line 1 of .* must have either a "prompt"'),
        ('"a"\n{"prompt": "a", "messages": [1]}', 'Line 2 of .* must have either a "prompt"'),
        ('"a"\n\nnot json', "Line 3 of .* must be JSON"),
        ("[1]", 'Line 1 of .* must have either a "prompt"'),
    ],
)
def test_lines_that_are_no_prompts_are_named(content, named, tmp_path):
    (tmp_path / "in.jsonl").write_text(content)
    output = tmp_path / "out.jsonl"
    result = d2f("generate", "/no/model", "--input", str(tmp_path / "in.jsonl"), "--output", str(output))
    assert result.exit_code == 1 and not output.exists()
    assert re.search(named, result.stderr)


def test_a_decoding_without_a_stream_is_refused(files):
    _, command, output = files
    result = d2f(*command, "--decoding", "vanilla")
    assert result.exit_code == 1 and "--decoding must be one of" in result.stderr and not output.exists()

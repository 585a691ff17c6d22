"""`d2f bench`: figures of answers that are those of `generate`."""

import json

import pytest

from cli_runs import as_json, d2f, reference, succeeds, write_prompts
from d2f_cli.answering import respond
from d2f_cli.bench import score, swept

COMMAND = ["bench", "reference", "--num-prompts", "3"]


def test_figures_are_those_of_the_answers(tmp_path):
    records = write_prompts(tmp_path / "in.jsonl", 3)
    report = as_json(*COMMAND, "--baseline", "reference-twin", "--output", str(tmp_path / "report.json"))
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert report["report"] == "d2f bench" and {"torch", "dtype", "hardware"} <= report["environment"].keys()
    ours, twin = report["rows"]
    assert (ours["label"], twin["label"], twin["tokens_per_forward"]) == ("default", "reference-twin", 1.0)
    loaded = reference()
    answers = [respond(loaded, loaded.prompt(record["prompt"]), {})[0] for record in records]
    num_tokens, num_forwards = (sum(a[name] for a in answers) for name in ("num_tokens", "num_forward_passes"))
    assert ours["tokens_per_forward"] == pytest.approx(num_tokens / num_forwards, abs=1e-3)
    assert ours["response_tokens"] == pytest.approx(num_tokens / 3, abs=1e-3) and ours["num_prompts"] == 3
    right = [a["response"].endswith(f"#### {record['answer']}") for a, record in zip(answers, records, strict=True)]
    assert ours["score"] == pytest.approx(100 * sum(right) / 3, abs=0.1)
    from_file = as_json("bench", "reference", "--input", str(tmp_path / "in.jsonl"))
    for name in ("score", "tokens_per_forward", "num_forward_passes"):
        assert from_file["rows"][0][name] == ours[name]


def test_a_sweep_is_a_row_for_each_pair():
    rows = swept(["confidence-threshold=0.5,0.9", "first_token_alone=true,false"], {})
    assert list(rows.values()) == [
        {"confidence_threshold": c, "first_token_alone": f} for c in (0.5, 0.9) for f in (True, False)
    ]
    assert next(iter(rows)) == "confidence_threshold=0.5 first_token_alone=True"
    output = succeeds(*COMMAND, "--sweep", "confidence_threshold=0.5,0.98")
    assert [line.split()[0] for line in output.splitlines()[1:]] == [
        "confidence_threshold=0.5", "confidence_threshold=0.98"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--sweep", "nonsense=1"], "must be NAME=VALUE"),
        (["--sweep", "confidence_threshold"], "must be NAME=VALUE"),
        (["--sweep", "confidence_threshold=2"], "must be a number in [0, 1]"),
        (["--sweep", "block_size=x"], "invalid literal"),
        (["--sweep", "first_token_alone=1"], "must be true or false"),
        (["--sweep", "block_size=4", "--block-size", "4"], "given twice"),
        ([], "--input is needed"),
    ],
    ids=str,
)
def test_wrong_calls(arguments, named):
    result = d2f("bench", "/no/such/model", *arguments)
    assert result.exit_code == 2 and named in " ".join(result.stderr.split())


def test_a_response_is_right_if_its_last_word_is_the_answer():
    records = [{"answer": 5}, {"answer": "5"}, {"answer": 5}, {"answer": 5}, {}]
    assert score(["so\n#### 5", "5", "15", "", "5"], records) == 50.0
    assert score(["5"], [{}]) is None

"""Figures and their targets, tables, and the report that a benchmark ends with."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.figures import ENGINE, Figure, figure_table, figures_in, main, markdown_table, table, write_report

ROOT = Path(__file__).resolve().parents[1]


def test_a_figure_meets_its_target_on_its_side():
    assert Figure("a", 4.0, 4.0).met is True and Figure("a", 3.99, 4.0).met is False
    assert Figure("a", 1.05, 1.05, at_most=True).met is True
    assert Figure("a", 1.06, 1.05, at_most=True).met is False
    assert Figure("a", 5.0).met is None and Figure("a", 5.0, at_most=True).met is None
    assert Figure("a", 1.23456, 1.05, at_most=True).as_dict() == {
        "name": "a",
        "value": 1.2346,
        "target": 1.05,
        "at_most": True,
        "met": False,
    }


def test_table_of_figures_says_on_which_side_the_target_is():
    figures = [Figure("overhead", 1.06, 1.05, at_most=True), Figure("speed", 4.5, 4.0), Figure("s", 0.1)]
    assert [line.split() for line in figure_table(figures).splitlines()] == [
        ["value", "target", "met"],
        ["overhead", "1.060", "<=", "1.05", "NO"],
        ["speed", "4.500", ">=", "4", "yes"],
        ["s", "0.100"],
    ]


def test_the_table_of_several_runs_has_median_spread_and_whether_all_meet_the_target(tmp_path, capsys):
    paths = []
    for number, (score, ratio) in enumerate([(91.0, 2.4), (95.0, 3.0), (93.0, 2.6)]):
        figures = [Figure("score, %", score, 90.0), Figure("ratio", ratio, 2.5), Figure("s", ratio)]
        paths.append(tmp_path / f"{number}.json")
        paths[-1].write_text(json.dumps({"figures": [figure.as_dict() for figure in figures]}))
    main([*map(str, paths)])
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| score, % | 93.00 | 91.00 to 95.00 | >= 90 | yes |",
        "| ratio | 2.60 | 2.40 to 3.00 | >= 2.5 | no |",
        "| s | 2.60 | 2.40 to 3.00 |  |  |",
    ]


def test_the_figures_of_the_engine_have_a_table_of_their_own(tmp_path, capsys):
    """From reports as they were written before figures had targets."""
    path = tmp_path / "report.json"
    figures = [
        {"name": "score, %", "value": 91.0, "bar": 90.0, "holds": True},
        {"name": "engine: overhead", "value": 1.04, "bar": 1.05, "holds": True},
        {"name": "engine: growth", "value": 1.1, "bar": 1.1, "holds": True},
        {"name": "engine: share", "value": 0.5, "bar": 0.6, "holds": False},
    ]
    path.write_text(json.dumps({"figures": figures, "at_most": ["engine: overhead", "engine: growth"]}))
    without = tmp_path / "without.json"
    without.write_text(json.dumps({"figures": [{**figures[0], "value": 91.0}]}))
    main([str(path), str(without)])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line and not line.startswith(("| |", "| ---"))] == [
        "| score, % | 91.00 | 91.00 to 91.00 | >= 90 | yes |",
        "| engine: overhead | 1.04 | 1.04 to 1.04 | <= 1.05 | yes |",
        "| engine: growth | 1.10 | 1.10 to 1.10 | <= 1.1 | yes |",
        "| engine: share | 0.50 | 0.50 to 0.50 | >= 0.6 | no |",
    ]


def test_a_table_has_texts_at_the_left_and_numbers_at_the_right():
    rows = [["", "kind", "value"], ["a", "fast", "1.0"], ["long", "s", "100.0"]]
    assert table(rows).splitlines() == ["      kind  value", "a     fast    1.0", "long     s  100.0"]
    assert table(rows, num_left=2).splitlines()[2] == "long  s     100.0"


def test_reports_of_before_say_the_same_in_todays_words():
    old = {
        "figures": [
            {"name": "speed", "value": 4.5, "bar": 4.0, "holds": True},
            {"name": "overhead", "value": 1.05, "bar": 1.05, "holds": False},  # 1.05004, rounded
            {"name": "s", "value": 0.1, "bar": None, "holds": None},
        ],
        "at_most": ["overhead"],
    }
    found = figures_in(old)
    assert found[0] == Figure("speed", 4.5, 4.0).as_dict() and found[2] == Figure("s", 0.1).as_dict()
    assert found[1] == {"name": "overhead", "value": 1.05, "target": 1.05, "at_most": True, "met": False}
    new = {"figures": [Figure("overhead", 1.0, 1.05, at_most=True).as_dict()]}
    assert figures_in(new) == new["figures"]
    assert "| overhead | 1.00 | 1.00 to 1.00 | <= 1.05 | yes |" in markdown_table([new])


def test_a_report_ends_with_one_json_object_that_is_also_in_the_file(tmp_path, capsys):
    model = SimpleNamespace(device=torch.device("cpu"), dtype=torch.bfloat16)
    report = {"figures": [Figure("speed", 4.5, 4.0)], "systems": {"a": 1}}
    write_report(report, "speed", ["--seed", "3"], model, 0.0, tmp_path / "report.json", problems=5)
    stdout = capsys.readouterr().out
    found = json.loads(stdout.splitlines()[-1])
    assert found == json.loads((tmp_path / "report.json").read_text())
    assert found["figures"] == [Figure("speed", 4.5, 4.0).as_dict()] and found["systems"] == {"a": 1}
    assert found["environment"]["command"] == "python -m benchmarks.speed --seed 3"
    assert found["environment"]["problems"] == 5 and found["environment"]["dtype"] == "bfloat16"
    assert "speed  4.500    >= 4  yes" in stdout and "problems: 5" in stdout
    write_report({"curve": []}, "curve", [], model, 0.0)
    assert "target" not in capsys.readouterr().out, "there is no table of no figures"


@pytest.mark.parametrize("path", [ROOT / "README.md", *sorted((ROOT / "docs" / "benchmarks").glob("*.md"))], ids=str)
def test_figures_in_the_documents_are_those_of_the_committed_reports(path):
    """Each table row whose first cell names a figure says what the reports say."""
    folder = ROOT / "examples" / "reference_model" / "reports"
    reports = [json.loads(file.read_text()) for file in sorted(folder.glob("run*.json"))]
    assert reports
    rows = [*markdown_table(reports).splitlines()[2:], *markdown_table(reports, of_engine=True).splitlines()[2:]]
    by_name = {row.split(" | ")[0]: row for row in rows}
    assert len(by_name) == len(rows) > 40
    told = [line for line in path.read_text().splitlines() if line.split(" | ")[0] in by_name]
    assert [line for line in told if line != by_name[line.split(" | ")[0]]] == []
    if re.fullmatch(r"2026-11-30.md", path.name):
        assert set(told) == set(rows), "that report has all of them"
    assert any(row.startswith(f"| {ENGINE}") for row in rows)

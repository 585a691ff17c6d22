"""The script for machines with a GPU, as far as one without can show."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
check_gpu = importlib.import_module("check_gpu")


def test_without_a_gpu_there_are_no_figures(monkeypatch, capsys):
    monkeypatch.setattr(check_gpu.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="No CUDA device"):
        check_gpu.main([])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("failed", [False, True])
def test_figures_of_all_sizes_come_in_one_line_and_failed_tests_are_an_error(failed, monkeypatch, capsys):
    def run(command, **options):
        if "pytest" in command:
            return subprocess.CompletedProcess(command, int(failed), stdout="tests\n")
        size = command[command.index("--engine") + 1]
        line = json.dumps({"figures": [{"name": size}], "environment": {"hardware": "a GPU"}})
        return subprocess.CompletedProcess(command, 0, stdout=f"a table\n{line}\n")

    monkeypatch.setattr(check_gpu.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(check_gpu.subprocess, "run", run)
    if failed:
        with pytest.raises(SystemExit, match="failed"):
            check_gpu.main([])
    else:
        check_gpu.main([])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["figures"] == [{"name": "100m"}, {"name": "8b"}]
    assert report["tests_passed"] is not failed and report["environment"] == {"hardware": "a GPU"}


def test_what_takes_too_long_is_stopped(monkeypatch):
    monkeypatch.setattr(check_gpu.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(check_gpu, "HERE", Path(__file__).parent / "no such folder" / "examples")
    monkeypatch.setattr(check_gpu, "run", lambda command, deadline: check_gpu.sys.exit("The time is up"))
    with pytest.raises(SystemExit, match="The time is up"):
        check_gpu.main(["--minutes", "0.01"])
    with pytest.raises(SystemExit):
        check_gpu.main(["--minutes", "0"])

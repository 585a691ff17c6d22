"""The script for machines with a GPU, as far as one without can show."""

import json
import subprocess

import pytest

from benchmarks import check_gpu


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


@pytest.mark.parametrize("slow", ["pytest", "benchmarks.decoding"])
def test_what_takes_too_long_is_stopped(slow, monkeypatch, capsys):
    seconds = []

    def run(command, timeout, **options):
        seconds.append(timeout)
        if slow in command:
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, 0, stdout="tests\n")

    monkeypatch.setattr(check_gpu.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(check_gpu.subprocess, "run", run)
    with pytest.raises(SystemExit, match=f"The time is up; .*{slow}.* was not finished. Give more --minutes."):
        check_gpu.main(["--minutes", "2"])
    assert len(seconds) == 1 + (slow != "pytest") and 60 < seconds[-1] <= seconds[0] <= 120
    assert "figures" not in capsys.readouterr().out


def test_a_command_gets_a_second_at_least_when_the_time_is_almost_up(monkeypatch):
    monkeypatch.setattr(check_gpu.torch.cuda, "is_available", lambda: True)
    seconds = []
    done = subprocess.CompletedProcess([], 1, stdout="")
    monkeypatch.setattr(check_gpu.subprocess, "run", lambda command, timeout, **_: (seconds.append(timeout), done)[1])
    with pytest.raises(SystemExit, match="benchmarks.decoding --engine 100m ended with 1"):
        check_gpu.main(["--minutes", "0.0001"])
    assert seconds == [1.0, 1.0]
    with pytest.raises(SystemExit):
        check_gpu.main(["--minutes", "0"])

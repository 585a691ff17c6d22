"""The command line as a whole: help, versions, what is missing, and what is imported when."""

import subprocess
import sys

import pytest

from cli_runs import ROOT, d2f, in_a_process
from d2f_cli.main import COMMANDS


def python(script: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["no-such-command"]], ids=" ".join)
def test_help_imports_neither_torch_nor_transformers(arguments):
    done = python(
        "import sys\n"
        "from d2f_cli.main import main\n"
        "try:\n"
        f"    main({arguments})\n"
        "except SystemExit as end:\n"
        "    print(end.code, 'torch' in sys.modules, 'transformers' in sys.modules, 'd2f_hf' in sys.modules)\n"
    )
    code = 2 if arguments == ["no-such-command"] else 0
    assert done.stdout.splitlines()[-1] == f"{code} False False False", done.stderr


def test_help_names_each_command():
    done = in_a_process("--help")
    assert done.returncode == 0
    for name, summary in COMMANDS.items():
        assert f"  {name}" in done.stdout and summary.split()[0] in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help_with_an_example_json_and_debug(name):
    result = d2f(name, "--help")
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    assert f"Example: d2f {name} " in text and "--json" in text and "--debug" in text


def test_without_typer_it_says_how_to_get_it():
    done = python(
        "import sys\nsys.modules['typer'] = None\nfrom d2f_cli.main import main\nmain(['info', 'reference'])"
    )
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.splitlines() == ['d2f needs typer: pip install "d2f-hf[cli]"']


def test_the_package_is_the_command_too():
    command = [sys.executable, "-m", "d2f_hf", "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith("d2f-hf ")


def test_an_unknown_command_or_flag_is_a_wrong_call():
    assert d2f("no-such-command").exit_code == 2
    assert d2f("info", "reference", "--no-such-flag").exit_code == 2
    assert d2f("info").exit_code == 2

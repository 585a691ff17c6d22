"""How a command ends."""

import errno
import json

import pytest
import typer
from typer.testing import CliRunner

from d2f_cli import console


def run(error: BaseException | None, *arguments: str):
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    @console.ends_well
    def command(debug: console.Debug = False) -> None:
        if error is not None:
            raise error
        console.say("to the person")
        console.print_json({"ü": 1})

    return CliRunner().invoke(app, list(arguments))


def test_answers_go_to_stdout_and_messages_to_stderr():
    result = run(None)
    assert (result.exit_code, json.loads(result.stdout), result.stderr) == (0, {"ü": 1}, "d2f: to the person\n")


def test_an_error_is_one_line_and_exit_code_1():
    result = run(ValueError("`x` must be 1,\n   got 2. Leave it out."))
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr == "d2f: error: `x` must be 1, got 2. Leave it out.\n"
    assert run(RuntimeError()).stderr == "d2f: error: RuntimeError\n"


def test_debug_shows_the_traceback():
    result = run(ValueError("wrong"), "--debug")
    assert result.exit_code == 1 and "Traceback" in result.stderr and "ValueError: wrong" in result.stderr


@pytest.mark.parametrize(
    "error, code",
    [(KeyboardInterrupt(), 130), (console.wrong_call("no"), 2), (BrokenPipeError(errno.EPIPE, ""), 1)],
    ids=repr,
)
def test_exit_codes(error, code):
    assert run(error).exit_code == code


def test_a_bar_is_for_terminals_only(capsys):
    with console.progress_bar("things", 2) as progress:
        progress(1, 2)
    with console.waiting("for something"):
        pass
    captured = capsys.readouterr()
    assert captured.out == "" and "\033" not in captured.err

"""What all commands have in common: flags, messages, progress bars, and how a command ends.

Answers go to stdout, all else to stderr. So with `--json` there is one JSON value on stdout and nothing else.
"""

import functools
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from d2f_cli.main import INTERRUPTED

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Folder, Hub id, or `reference` in a clone of d2f-hf.")]
Adapter = Annotated[str | None, typer.Option(help="Folder or Hub id of a LoRA adapter for MODEL.")]
Dtype = Annotated[str, typer.Option(help="Such as bfloat16; `auto` is that of the weights.")]
Device = Annotated[str | None, typer.Option(help="Such as cuda or cpu. By default a GPU if there is one.")]
System = Annotated[str | None, typer.Option(help="System message of the chat.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def ends_well(command: Callable) -> Callable:
    """A command whose errors are one line on stderr: exit code 1, or 2 for a wrong call, or 130 after Ctrl-C."""

    @functools.wraps(command)
    def wrapper(*args, **kwargs):
        try:
            return command(*args, **kwargs)
        except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):
            raise  # typer knows what to do; the last is `d2f ... | head`
        except KeyboardInterrupt:
            say("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:
            if kwargs.get("debug"):
                traceback.print_exc()
            say(f"error: {' '.join(str(error).split()) or type(error).__name__}")
            raise typer.Exit(1) from None

    return wrapper


def say(message: str) -> None:
    """A message to the person in front of the terminal."""
    print(f"d2f: {message}", file=sys.stderr, flush=True)


def stdout() -> Console:
    """stdout as `rich` draws on it. It heeds NO_COLOR, TERM=dumb and the width of the terminal."""
    return Console(file=sys.stdout, highlight=False)


def print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False), flush=True)


def wrong_call(message: str) -> typer.BadParameter:
    """The error of a command that was called wrongly; exit code 2."""
    return typer.BadParameter(message)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Shows on a terminal that something takes its time."""
    with Console(stderr=True).status(what):
        yield


@contextmanager
def progress_bar(what: str, total: int, done: int = 0) -> Iterator[Callable[[int, int], None]]:
    """A function of (done, total) that moves a bar, which only a terminal shows."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Seldom redrawn, as what goes on meanwhile may be timed.
    options = {"transient": True, "refresh_per_second": 2, "disable": not console.is_terminal}
    with Progress(*columns, console=console, **options) as progress:
        task = progress.add_task(what, total=total, completed=done)
        yield lambda done, total: progress.update(task, completed=done, total=total)

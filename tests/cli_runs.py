"""How tests call `d2f`: in this process, with the reference model loaded once, or in one of its own."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from d2f_cli import models
from d2f_cli.main import make_app
from d2f_cli.models import Loaded
from word_problems import make_problems

ROOT = Path(__file__).resolve().parents[1]
D2F = [sys.executable, "-m", "d2f_cli.main"]
MODULES_THAT_LOAD = ("generate", "chat", "compare", "bench", "publish")
QUESTION = make_problems("test", 1)[0].question
load_really = models.load


@cache
def load_once(name: str, adapter: str | None = None, dtype: str = "auto", device: Any = None, as_it_is: bool = False):
    return load_really(name, adapter, dtype, device, as_it_is)


def reference(name: str = "reference", as_it_is: bool = False) -> Loaded:
    return load_once(name, None, "auto", None, as_it_is)


def d2f(*arguments: str, input: str | None = None):
    """Calls a command in this process: `exit_code`, `stdout` and `stderr`."""
    app = make_app(arguments[0])
    module = sys.modules.get(f"d2f_cli.{arguments[0]}")
    if module is not None and arguments[0] in MODULES_THAT_LOAD:
        module.load = load_once  # type: ignore[attr-defined]
    return CliRunner().invoke(app, list(arguments), input=input, prog_name="d2f")


def succeeds(*arguments: str, input: str | None = None) -> str:
    """What a command prints that ends well."""
    result = d2f(*arguments, input=input)
    assert result.exit_code == 0, result.output
    return result.stdout


def as_json(*arguments: str, input: str | None = None) -> Any:
    """What a command prints with `--json`, which is JSON and nothing else."""
    return json.loads(succeeds(*arguments, "--json", input=input))


def in_a_process(*arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([*D2F, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120, **options)


def write_prompts(path: Path, number: int) -> list[dict[str, Any]]:
    """A file of prompts, and its lines as objects."""
    records = [{"prompt": p.question, "answer": p.answer} for p in make_problems("test", number)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return records

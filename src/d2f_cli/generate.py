"""`d2f generate`: answers a prompt while one looks on, or a file of prompts in batches."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from d2f_cli import console
from d2f_cli.answering import respond
from d2f_cli.console import Adapter, Debug, Device, Dtype, Json, Model, System
from d2f_cli.decoding_flags import takes_decoding_flags
from d2f_cli.main import QUESTION
from d2f_cli.models import Loaded, load
from d2f_cli.prompt_files import answer_file
from d2f_cli.terminal_view import can_be_drawn_on, speed_line
from d2f_hf.live_view import LiveResponse

EXAMPLE = f"d2f generate reference '{QUESTION}'"


@console.ends_well
@takes_decoding_flags
def generate(
    model: Model,
    options: dict[str, Any],
    prompt: Annotated[str | None, typer.Argument(help="What to answer; `-` or nothing reads it from stdin.")] = None,
    input: Annotated[
        Path | None, typer.Option(help='JSON lines with a "prompt" or "messages" each, to be answered in batches.')
    ] = None,
    output: Annotated[Path | None, typer.Option(help="JSON lines with the answers. Goes on where it stopped.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts of --input that are decoded together.")] = 8,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Begin --output anew.")] = False,
    trace: Annotated[Path | None, typer.Option(help="File for the trace of the answer, for `d2f plot`.")] = None,
    live: Annotated[
        bool | None, typer.Option(help="Show the blocks while they are decoded. By default in a terminal.")
    ] = None,
    system: System = None,
    adapter: Adapter = None,
    dtype: Dtype = "auto",
    device: Device = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Answers a prompt, or all prompts of a file."""
    if input is not None:
        if prompt is not None:
            raise console.wrong_call("PROMPT and --input are both given. Leave one of them out.")
        if output is None:
            raise console.wrong_call("--input needs an --output for the answers.")
        if trace is not None or live:
            raise console.wrong_call("--trace and --live are for one prompt. Leave them out with --input.")
        summary = answer_file(
            lambda: load(model, adapter, dtype, device),
            {"model": model, "adapter": adapter, "dtype": dtype, "system": system, "options": options},
            input,
            output,
            batch_size,
            overwrite,
        )
        if as_json:
            console.print_json(summary)
        if summary["failed"]:
            raise typer.Exit(1)
        return
    if output is not None or overwrite:
        raise console.wrong_call("--output and --overwrite belong to --input. Redirect stdout for one answer.")
    text = prompt_text(prompt)
    loaded = load(model, adapter, dtype, device)
    is_drawn = not as_json and (live is True or (live is None and can_be_drawn_on(console.stdout())))
    answer, response = respond(loaded, loaded.prompt(text, system), options, console.stdout() if is_drawn else None)
    if trace is not None:
        trace.write_text(json.dumps({**answer, **whole_trace(loaded, response)}) + "\n")
    if as_json:
        console.print_json({"model": model, "prompt": text, **answer, "options": options})
    elif not is_drawn:
        print(answer["response"], flush=True)
        console.say(speed_line(response))


def prompt_text(prompt: str | None) -> str:
    """The prompt, or what stdin has."""
    if prompt in (None, "-"):
        if sys.stdin.isatty():
            console.say("reading the prompt from the terminal; Ctrl-D ends it")
        prompt = sys.stdin.read().strip()
    if not prompt:
        raise console.wrong_call("PROMPT must not be empty. Say something, or pipe it in.")
    return prompt


def whole_trace(loaded: Loaded, response: LiveResponse) -> dict[str, Any]:
    """What `d2f plot` draws of a response."""
    if not response.trace:
        raise ValueError("--trace needs decoding='d2f', 'autoregressive' or 'verified'. Leave it out.")
    return {
        "block_size": response.block_size,
        "prompt_length": response.prompt_length,
        "is_sequence_aligned": response.is_sequence_aligned,
        "tokens": [loaded.tokenizer.decode([token]) for token in response.decoded],
        "trace": response.trace,
    }

"""`d2f chat`: a conversation in the terminal."""

import sys
from typing import Any

from d2f_cli import console
from d2f_cli.answering import respond
from d2f_cli.console import Adapter, Debug, Device, Dtype, Json, Model, System
from d2f_cli.decoding_flags import takes_decoding_flags
from d2f_cli.models import Loaded, load
from d2f_cli.terminal_view import can_be_drawn_on

EXAMPLE = "d2f chat reference"
HELP = "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer"


@console.ends_well
@takes_decoding_flags
def chat(
    model: Model,
    options: dict[str, Any],
    system: System = None,
    adapter: Adapter = None,
    dtype: Dtype = "auto",
    device: Device = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Talks to a model; each answer sees the conversation so far. Piped in, each line is what the user says next."""
    loaded = load(model, adapter, dtype, device)
    if loaded.tokenizer.chat_template is None:
        raise ValueError(f"MODEL must have a chat template, but {model} has none. Take `d2f generate`.")
    is_person = sys.stdin.isatty() and not as_json
    if is_person:
        console.say(HELP)
    messages: list[dict[str, str]] = []
    while True:
        said = next_line(is_person)
        if said is None or said == "/exit":
            return
        if said == "/reset":
            messages = []
        elif said.startswith("/") and is_person:
            console.say(HELP)
        elif said:
            messages.append({"role": "user", "content": said})
            answer = answer_turn(loaded, messages, system, options, is_person, as_json)
            if answer is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})


def next_line(is_person: bool) -> str | None:
    """What the user says; `None` at the end."""
    if is_person:
        try:
            return input("\n> ").strip()
        except EOFError:
            return None
    line = sys.stdin.readline()
    return line.strip() if line else None


def answer_turn(
    loaded: Loaded,
    messages: list[dict[str, str]],
    system: str | None,
    options: dict[str, Any],
    is_person: bool,
    as_json: bool,
) -> str | None:
    """Answers the last message, and shows the answer; `None` where the person has stopped it."""
    screen = console.stdout()
    is_drawn = is_person and can_be_drawn_on(screen)
    try:
        answer, _ = respond(loaded, loaded.prompt(messages, system), options, screen if is_drawn else None)
    except KeyboardInterrupt:
        if not is_person:
            raise
        console.say("stopped; the last message is forgotten")
        return None
    if as_json:
        console.print_json({"messages": messages, **answer})
    elif not is_drawn:
        print(answer["response"], flush=True)
    return answer["response"]

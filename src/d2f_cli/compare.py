"""`d2f compare`: the same prompt for two models, side by side."""

from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from d2f_cli import console
from d2f_cli.answering import call_generate, finish
from d2f_cli.console import Adapter, Debug, Device, Dtype, Json, Model, System
from d2f_cli.decoding_flags import OF_TRANSFORMERS, takes_decoding_flags
from d2f_cli.generate import prompt_text
from d2f_cli.main import QUESTION
from d2f_cli.models import REFERENCE, Loaded, load
from d2f_cli.terminal_view import LiveScreen, ResponseView, can_be_drawn_on
from d2f_hf.live_view import LiveResponse

EXAMPLE = f"d2f compare reference '{QUESTION}'"
WARM_UP_TOKENS = 8
NARROW = 60  # columns in which two texts have no room beside each other


@console.ends_well
@takes_decoding_flags
def compare(
    model: Model,
    options: dict[str, Any],
    prompt: Annotated[str | None, typer.Argument(help="What to answer; `-` or nothing reads it from stdin.")] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            help="Model to compare with, also an autoregressive one. By default MODEL with another decoding."
        ),
    ] = None,
    baseline_decoding: Annotated[
        str | None, typer.Option(help="Decoding of the baseline; `vanilla` where it is MODEL itself.")
    ] = None,
    system: System = None,
    adapter: Adapter = None,
    dtype: Dtype = "auto",
    device: Device = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Answers a prompt with two models and says how much faster the first one is.

    They take turns, so neither slows the other down. The first tokens of a process are slow and not counted.
    """
    text = prompt_text(prompt)
    if baseline is None and baseline_decoding is None and model == REFERENCE:
        baseline = "reference-twin"
    first = load(model, adapter, dtype, device)
    of_baseline = {name: value for name, value in options.items() if name in OF_TRANSFORMERS}
    if baseline is None:
        second = first
        baseline_decoding = baseline_decoding or "vanilla"
    else:
        second = load(baseline, None, dtype, device, as_it_is=baseline_decoding is None)
    if baseline_decoding is not None:
        of_baseline["decoding"] = baseline_decoding
    racers = [Racer(first, options, text, system), Racer(second, of_baseline, text, system)]
    with console.waiting("warming up"):
        for racer in racers:
            racer.warm_up()
    screen = console.stdout()
    if not as_json and can_be_drawn_on(screen):
        views = [racer.view for racer in racers]
        with LiveScreen(SideBySide(views), views, screen) as live:
            for racer in racers:
                racer.run(live)
    else:
        for racer in racers:
            with console.waiting(f"decoding with {racer.name}"):
                racer.run()
    ratio = racers[0].response.tokens_per_second / racers[1].response.tokens_per_second
    if as_json:
        systems = [{"model": racer.name, **racer.figures, "options": racer.options} for racer in racers]
        console.print_json({"prompt": text, "systems": systems, "speed_up": round(ratio, 3)})
        return
    if not can_be_drawn_on(screen):
        for racer in racers:
            print(f"[{racer.name}]\n{racer.figures['response']}\n")
    for racer in racers:
        figures = racer.figures
        print(
            f"{racer.name[:30]:30} {figures['num_tokens']:5} tokens {figures['num_forward_passes']:5} forwards "
            f"{figures['tokens_per_second']:8.0f} tokens/s"
        )
    print(f"{racers[0].name} is {ratio:.1f} times as fast as {racers[1].name}.")


class Racer:
    """A model that answers the prompt.

    Args:
        loaded (`Loaded`): The model.
        options (`dict`): Flags.
        text (`str`): The prompt.
        system (`str`, *optional*): System message.
    """

    def __init__(self, loaded: Loaded, options: dict[str, Any], text: str, system: str | None):
        self.loaded, self.options = loaded, options
        decoding = options.get("decoding")
        self.name = loaded.name if decoding is None else f"{loaded.name} ({decoding})"
        self.ids = loaded.prompt(text, system)
        self.response = LiveResponse.of(loaded.model, options)
        self.view = ResponseView(self.response, loaded.tokenizer, self.name)
        self.figures: dict[str, Any] = {}

    def warm_up(self) -> None:
        few = {**self.options, "max_new_tokens": WARM_UP_TOKENS}
        few.pop("min_new_tokens", None)
        if few.get("decoding") in ("vanilla", "fast_dllm"):  # these go by the length as a whole
            few["block_size"] = WARM_UP_TOKENS
            few.pop("steps", None)
        call_generate(self.loaded, self.ids, few, LiveResponse.of(self.loaded.model, few))

    def run(self, live: LiveScreen | None = None) -> None:
        if live is not None:
            self.response.changed = live.refresh
        output = call_generate(self.loaded, self.ids, self.options, self.response)
        self.figures = {**finish(self.response, output), "response": self.loaded.text(self.response.decoded)}


class SideBySide:
    """Views beside each other, or one above the other where there is no room."""

    def __init__(self, views: list[ResponseView]):
        self.views = views

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width < NARROW:
            for view in self.views:
                view.max_lines = max(3, console.size.height // len(self.views) - 8)
            yield from self.views
            return
        table = Table.grid(expand=True, padding=(0, 2))
        for _ in self.views:
            table.add_column(ratio=1)
        table.add_row(*self.views)
        yield table

"""`d2f`: which commands there are. Each is a function of the same name in a file of the same name.

Only the command that is called is imported, because all of them import torch sooner or later.
"""

import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "generate": "Answer a prompt, or a file of them.",
    "chat": "Talk to a model in the terminal.",
    "compare": "Answer a prompt with two models, side by side.",
    "bench": "Measure how fast a model is, and how often it is right.",
    "train": "Train a model as a YAML file says.",
    "publish": "Save a model as a folder like those on the Hub, or upload it.",
    "info": "What a model is, and which decodings it can do.",
    "plot": "Draw the report of `d2f bench`, or the trace of `d2f generate`.",
}
INTERRUPTED = 130
# The shipped model knows word problems of this kind, and nothing else.
QUESTION = (
    "There are 56 rings in the bag of Edgar. Cara owns 7 more than Edgar does. Gavin gives her 2 more. "
    "What is the number of rings now?"
)


def make_app(name: str | None = None):
    """The `typer.Typer` with all commands, of which `name` can be called and the others only have their help."""
    import typer

    app = typer.Typer(
        name="d2f",
        help="Diffusion language models that decode several blocks of text in parallel (D2F).",
        epilog="Example: d2f info reference. Each command has a --help with an example.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback(invoke_without_command=True)
    def options(version: bool = typer.Option(False, "--version", help="Show the version and exit.")) -> None:
        if version:
            from importlib.metadata import version as version_of

            print(f"d2f-hf {version_of('d2f-hf')}")
            raise typer.Exit()

    for command, summary in COMMANDS.items():
        if command == name:
            module = importlib.import_module(f"d2f_cli.{command}")
            app.command(command, short_help=summary, epilog=f"Example: {module.EXAMPLE}")(getattr(module, command))
        else:
            app.command(command, help=summary)(lambda: None)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command and exits: 0 if all is well, 1 if it failed, 2 if it was called wrongly, 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        import typer  # noqa: F401
    except ModuleNotFoundError as error:
        sys.exit(f'd2f needs {error.name}: pip install "d2f-hf[cli]"')
    command = next((argument for argument in arguments if not argument.startswith("-")), None)
    try:
        make_app(command)(arguments, prog_name="d2f")
    except KeyboardInterrupt:  # while something was imported
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()

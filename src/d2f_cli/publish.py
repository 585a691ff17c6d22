"""`d2f publish`: a model as a folder like those on the Hub, or on the Hub."""

from pathlib import Path
from typing import Annotated

import typer

from d2f_cli import console
from d2f_cli.console import Adapter, Debug, Dtype, Json, Model
from d2f_cli.models import load

EXAMPLE = "d2f publish reference --folder my-d2f-model"


@console.ends_well
def publish(
    *,
    model: Model,
    folder: Annotated[Path | None, typer.Option(help="Folder that gets the model.")] = None,
    repo: Annotated[str | None, typer.Option(help="Repository of the Hub that gets it.")] = None,
    private: Annotated[bool, typer.Option("--private", help="A new repository is private.")] = False,
    adapter: Adapter = None,
    dtype: Dtype = "auto",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Saves a model with its adapter merged, its code and its tokenizer: all that `AutoModelForCausalLM` needs."""
    if (folder is None) == (repo is None):
        raise console.wrong_call("Give either --folder or --repo.")
    if private and repo is None:
        raise console.wrong_call("--private belongs to --repo. Leave it out.")
    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"--folder must be new or empty, but {folder} is not. Name another one.")
    loaded = load(model, adapter, dtype, "cpu")
    if folder is not None:
        loaded.model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
    else:
        with console.waiting(f"uploading to {repo}"):
            loaded.model.push_to_hub(repo, private=private)
            loaded.tokenizer.push_to_hub(repo, private=private)
    target = str(folder or repo)
    if as_json:
        console.print_json({"model": model, "published": target})
    else:
        print(f'{target}: AutoModelForCausalLM.from_pretrained("{target}", trust_remote_code=True) loads it.')

"""`d2f train`: a training run as a YAML file describes it."""

import contextlib
import difflib
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from d2f_cli import console
from d2f_cli.console import Debug, Json
from d2f_cli.models import found

EXAMPLE = "d2f train config.yaml --set max_steps=100"
# What a file says besides the arguments of `D2FTrainingArguments`.
OWN_KEYS = {
    "model": "folder, Hub id or `reference-teacher`: what is trained",
    "tokenizer": "folder or Hub id, if it is not with the model",
    "dtype": "of the model, float32 by default",
    "dataset": "a .jsonl file, or a dataset's folder or Hub id",
    "eval_dataset": "the same, for evaluation",
    "adapter": "rank, alpha, dropout and target_modules of a new LoRA adapter, or more of peft's `LoraConfig`",
    "merge": "save the adapter merged into the model; true by default",
}
ADAPTER_NAMES = {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout"}


@console.ends_well
def train(
    *,
    config: Annotated[Path, typer.Argument(help="YAML file; docs/cli.md has its keys.")],
    set: Annotated[list[str] | None, typer.Option(help="KEY=VALUE that replaces one of the file. Repeatable.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint of output_dir.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Trains a model, and saves it with its tokenizer and code in `output_dir`."""
    keys = read_config(config, set or [])
    try:
        from d2f_hf import D2FTrainingArguments
    except ImportError as error:
        raise ImportError(f'd2f train needs {error.name or "more"}: pip install "d2f-hf[train]"') from error
    own = {name: keys.pop(name) for name in OWN_KEYS if name in keys}
    check_keys(keys, {field.name for field in fields(D2FTrainingArguments) if field.init})
    for name in ("model", "dataset"):
        if not own.get(name):
            raise ValueError(f"`{name}` must be in {config}: {OWN_KEYS[name]}.")
    if not keys.get("output_dir"):
        raise ValueError(f"`output_dir` must be in {config}: the folder that gets the model.")
    arguments = D2FTrainingArguments(**{"report_to": "none", **keys})
    with contextlib.redirect_stdout(sys.stderr):  # the trainer prints what it logs
        summary = run(own, arguments, resume)
    if as_json:
        console.print_json(summary)
    else:
        print(f"{summary['output_dir']}: {summary['steps']} steps, loss {summary['loss']:.3f}")


def read_config(file: Path, replaced: list[str]) -> dict[str, Any]:
    """The keys of a YAML file; those of `replaced`, `KEY=VALUE` each, come before them."""
    try:
        keys = yaml.safe_load(file.read_text(encoding="utf-8"))
        given = {}
        for text in replaced:
            name, separator, value = text.partition("=")
            if not separator:
                raise console.wrong_call(f"--set must be KEY=VALUE, got {text!r}.")
            given[name.strip()] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ValueError(f"{file} must be YAML: {error}") from error
    if not isinstance(keys, dict):
        raise ValueError(f"{file} must have keys and values, such as `model: reference-teacher`.")
    keys |= given
    # YAML 1.1 takes 1e-4 for text.
    return {name: as_number(value) for name, value in keys.items()}


def as_number(value: Any) -> Any:
    try:
        return float(value) if isinstance(value, str) and value.strip()[:1] in "+-.0123456789" else value
    except ValueError:
        return value


def check_keys(keys: dict[str, Any], known: set[str]) -> None:
    """Refuses what is neither a key of ours nor an argument."""
    for name in keys:
        if name not in known:
            near = difflib.get_close_matches(str(name), [*known, *OWN_KEYS], n=1)
            hint = f" Did you mean `{near[0]}`?" if near else " docs/cli.md has the keys."
            raise ValueError(f"`{name}` is no key of a training file.{hint}")


def run(own: dict[str, Any], arguments: Any, resume: bool) -> dict[str, Any]:
    """Loads, trains and saves: what `--json` prints."""
    from transformers import AutoTokenizer
    from transformers.trainer_utils import get_last_checkpoint

    from d2f_hf import D2FTrainer, load_d2f_model

    base, adapter, tokenizer_folder = found(own["model"])
    if adapter is not None:
        raise ValueError("`model` must be without an adapter, got 'reference'. Take reference-teacher.")
    peft_config = adapter_config(own["adapter"]) if own.get("adapter") else None
    model = load_d2f_model(base, dtype=own.get("dtype", "float32"))
    if peft_config is not None and peft_config.target_modules is None:
        peft_config.target_modules = list(model.config.attention_projections)
    tokenizer = AutoTokenizer.from_pretrained(own.get("tokenizer") or tokenizer_folder, config=model.config)
    evaluation = {"eval_dataset": read_dataset(own["eval_dataset"])} if own.get("eval_dataset") else {}
    trainer = D2FTrainer(
        model,
        arguments,
        train_dataset=read_dataset(own["dataset"]),
        processing_class=tokenizer,
        **evaluation,
        **({} if peft_config is None else {"peft_config": peft_config}),
    )
    checkpoint = get_last_checkpoint(arguments.output_dir) if resume and Path(arguments.output_dir).is_dir() else None
    if resume and checkpoint is None:
        console.say(f"{arguments.output_dir} has no checkpoint, so training begins anew")
    trained = trainer.train(resume_from_checkpoint=checkpoint)
    if trainer.is_world_process_zero():
        student = trainer.model
        # A drafter acts at the masks of a draft alone, so it cannot be merged.
        if hasattr(student, "merge_and_unload") and own.get("merge", arguments.objective != "drafter"):
            student = student.merge_and_unload()
        student.save_pretrained(arguments.output_dir)
        tokenizer.save_pretrained(arguments.output_dir)
    return {
        "output_dir": str(arguments.output_dir),
        "steps": trained.global_step,
        "loss": trained.training_loss,
        "metrics": json.loads(json.dumps(trained.metrics, default=str)),
    }


def read_dataset(name: str) -> Any:
    from datasets import load_dataset

    if str(name).endswith((".json", ".jsonl")):
        return load_dataset("json", data_files=str(name), split="train")
    return load_dataset(str(name), split="train")


def adapter_config(values: Any) -> Any:
    """The `LoraConfig` of the key `adapter`, by default the paper's."""
    from peft import LoraConfig

    if not isinstance(values, dict):
        raise ValueError(f"`adapter` must have keys such as `rank: 32`, got {values!r}.")
    named = {ADAPTER_NAMES.get(name, name): value for name, value in values.items()}
    try:
        return LoraConfig(**{"r": 32, "lora_alpha": 32, "lora_dropout": 0.1, **named})
    except TypeError as error:
        raise ValueError(f"`adapter`: {error}. Its keys are those of peft's LoraConfig.") from error

"""`d2f bench`: tokens per second, tokens per forward, latency and score of a model, as a table and as a report."""

import itertools
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from d2f_hf.modeling.generation_config_d2f import check_values

import d2f_hf
from d2f_cli import console
from d2f_cli.answering import generate_options
from d2f_cli.console import Adapter, Debug, Device, Dtype, Json, Model, System
from d2f_cli.decoding_flags import OF_TRANSFORMERS, flags, takes_decoding_flags
from d2f_cli.models import OF_THE_REPOSITORY, Loaded, load, reference_folder
from d2f_cli.prompt_files import read_prompts
from d2f_hf.benchmarking import Measurement, environment, measure, summarize
from d2f_hf.benchmarking import System as Measured

EXAMPLE = "d2f bench reference --sweep confidence_threshold=0.7,0.9,0.98 --output report.json"
SCORE_DIGITS, DIGITS = 1, 3


@console.ends_well
@takes_decoding_flags
def bench(
    model: Model,
    options: dict[str, Any],
    input: Annotated[
        Path | None,
        typer.Option(help='JSON lines with a "prompt" or "messages" each; with an "answer" there is a score.'),
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts that are answered, the first ones.")] = 20,
    sweep: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE,VALUE,...: a row for each value. Several of them: all pairs.")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="Model to measure beside it, also an autoregressive one.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="File for the report, for `d2f plot`.")] = None,
    system: System = None,
    adapter: Adapter = None,
    dtype: Dtype = "auto",
    device: Device = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Answers prompts one by one, with all settings and models in turns, and reports the figures of each.

    A response is right if its last word is the `answer` of its prompt. For `reference` there are word problems.
    """
    settings = swept(sweep or [], options)
    records = word_problems(num_prompts) if input is None and model in OF_THE_REPOSITORY else None
    if records is None:
        if input is None:
            raise console.wrong_call("--input is needed: a file of prompts. Only `reference` brings its own.")
        records = read_prompts(input)[:num_prompts]
    loaded = [load(model, adapter, dtype, device)]
    systems = {label: (loaded[0], {**options, **values}) for label, values in settings.items()}
    if baseline is not None:
        loaded.append(load(baseline, None, dtype, device, as_it_is=True))
        of_baseline = {name: value for name, value in options.items() if name in OF_TRANSFORMERS}
        systems[baseline] = (loaded[1], of_baseline)
    rows = measured(systems, records, system)
    report = {"report": "d2f bench", "rows": rows, "environment": environment_of(loaded[0])}
    if output is not None:
        output.write_text(json.dumps(report, indent=1) + "\n")
    if as_json:
        console.print_json(report)
        return
    width = max(len(row["label"]) for row in rows)
    print(f"{'':{width}}  tokens/s  tokens/forward  latency   p95      tokens  score")
    for row in rows:
        score = "" if row["score"] is None else f"{row['score']:4.1f} %"
        print(
            f"{row['label']:{width}}  {row['tokens_per_second']:8.0f}  {row['tokens_per_forward']:14.2f}"
            f"  {row['latency']:5.3f} s  {row['latency_p95']:5.3f} s  {row['response_tokens']:6.1f}  {score}"
        )


def swept(sweep: list[str], options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The options of each row, by its label."""
    known, values_of = flags(), {}
    for text in sweep:
        name, _, values = text.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        if name not in known or name == "stop_strings" or not values:
            raise console.wrong_call(f"--sweep must be NAME=VALUE,VALUE,... of an option of generate, got {text!r}.")
        if name in options or name in values_of:
            raise console.wrong_call(f"--sweep {name} is given twice. Leave one of them out.")
        kind = known[name][0]
        try:
            values_of[name] = [converted(value.strip(), kind) for value in values.split(",")]
            for value in values_of[name]:
                check_values({name: value})
        except ValueError as error:
            raise console.wrong_call(f"--sweep {text}: {error}") from error
    combinations = [dict(zip(values_of, values, strict=True)) for values in itertools.product(*values_of.values())]
    return {" ".join(f"{name}={value}" for name, value in own.items()) or "default": own for own in combinations}


def converted(value: str, kind: Any) -> Any:
    """A value of a flag, from text."""
    if kind is bool:
        if value.lower() not in ("true", "false"):
            raise ValueError(f"must be true or false, got {value!r}.")
        return value.lower() == "true"
    return kind(value)


def word_problems(number: int) -> list[dict[str, Any]]:
    """Problems that the reference model can answer, from its folder."""
    sys.path.insert(0, str(reference_folder()))
    from word_problems import make_problems

    return [{"prompt": problem.question, "answer": problem.answer} for problem in make_problems("test", number)]


def measured(
    systems: dict[str, tuple[Loaded, dict[str, Any]]], records: list[dict[str, Any]], system: str | None
) -> list[dict[str, Any]]:
    """A row of the report for each system. They take turns: a slow moment of the machine meets all of them."""
    by_model: dict[str, dict[str, Measured]] = {}
    for label, (loaded, options) in systems.items():
        options = generate_options(loaded, options)
        options.pop("seed", None)
        by_model.setdefault(loaded.name, {})[label] = Measured(loaded.model, options)
    models = {loaded.name: loaded for loaded, _ in systems.values()}
    measurements: dict[str, list[Measurement]] = {label: [] for label in systems}
    with console.progress_bar("prompts", len(records)) as progress:
        for number, record in enumerate(records):
            for name, own in by_model.items():
                ids = models[name].prompt(record.get("messages", record.get("prompt")), system)
                # The first prompt is answered twice: the first calls of a process are slow.
                found = measure(own, [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}], int(number == 0))
                for label, (measurement,) in found.items():
                    measurements[label].append(measurement)
            progress(number + 1, len(records))
    rows = []
    for label, (loaded, options) in systems.items():
        texts = [loaded.text(measurement.response_ids) for measurement in measurements[label]]
        row = {"label": label, "model": loaded.name, "options": options, "score": score(texts, records)}
        for name, value in vars(summarize(measurements[label])).items():
            row[name] = round(value, DIGITS) if isinstance(value, float) else value
        rows.append(row)
    return rows


def score(texts: list[str], records: list[dict[str, Any]]) -> float | None:
    """The share of right responses in percent; `None` where no answer is known."""
    pairs = [(text, record["answer"]) for text, record in zip(texts, records, strict=True) if "answer" in record]
    if not pairs:
        return None
    right = sum(text.split()[-1:] == str(answer).split()[-1:] for text, answer in pairs)
    return round(100 * right / len(pairs), SCORE_DIGITS)


def environment_of(loaded: Loaded) -> dict[str, Any]:
    """Versions, hardware, dtype, and the commit where d2f-hf is run from a clone."""
    return environment(loaded.model, Path(d2f_hf.__file__).parent)

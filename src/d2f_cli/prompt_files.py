"""A file of prompts, answered in batches: each answer is written as soon as it is there.

An input line is a JSON string, or an object with a `prompt` or `messages`; whatever else it has is kept. An output
line has the `index` of its input line, that line as `input`, the `response` and its figures. Lines come in the order
in which answers are finished. Beside the output stands a file with the options, so that no other ones are mixed in.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from d2f_cli import console
from d2f_cli.answering import MAX_NEW_TOKENS, generate_options
from d2f_cli.models import Loaded

IN_A_STREAM = ("d2f", "autoregressive", "verified")


def answer_file(
    load: Callable[[], Loaded], settings: dict[str, Any], source: Path, output: Path, batch_size: int, overwrite: bool
) -> dict[str, Any]:
    """Answers the prompts of `source` that `output` has no answer to.

    1. Read the prompts, and the answers of an earlier run.
    2. Load the model; tokenize what is left.
    3. Decode through a stream. A finished answer is written at once; a prompt that fails does not touch the others.

    Args:
        load (`Callable`): Gives the model. It is called once everything else has been checked.
        settings (`dict`): What the answers depend on; `options` and `system` are used.
        source, output (`Path`): The files.
        batch_size (`int`): Prompts that are decoded together.
        overwrite (`bool`): Forget the answers of an earlier run.

    Returns:
        `dict`: How many were `answered`, `resumed` (already there) and `failed`, and the figures of the answered ones.

    Raises:
        ValueError: for lines that are no prompts, or an output with other prompts or settings.
    """
    # 1. What is there.
    records = read_prompts(source)
    settings = json.loads(json.dumps(settings))
    settings_file = output.with_name(output.name + ".settings.json")
    if overwrite:
        output.unlink(missing_ok=True)
    done = read_answers(output, settings_file, records, settings)
    left = [index for index in range(len(records)) if index not in done]
    summary: dict[str, Any] = {
        "total": len(records),
        "resumed": len(done),
        "answered": 0,
        "failed": 0,
        "num_tokens": 0,
    }
    summary |= {"num_forward_passes": 0, "seconds": 0.0, "output": str(output)}
    if not left:
        console.say(f"all {len(records)} prompts were answered already")
        return summary
    decoding = settings["options"].get("decoding", "d2f")
    if decoding not in IN_A_STREAM:
        raise ValueError(f"--decoding must be one of {IN_A_STREAM} with --input, got {decoding!r}. Leave it out.")

    # 2. The prompts as tokens.
    loaded, failed = load(), {}
    if not loaded.is_block_diffusion:
        raise ValueError(f"MODEL must be a block-diffusion model with --input, but {loaded.name} is none.")
    prompts = {}
    for index in left:
        record = records[index]
        try:
            ids = loaded.prompt(record.get("messages", record.get("prompt")), settings["system"])[0]
            check_length(loaded, ids, settings["options"])
            prompts[index] = ids
        except Exception as error:  # a chat template may raise anything
            failed[index] = error
    options = generate_options(loaded, settings["options"])
    seed, tokenizer = options.pop("seed", None), options.pop("tokenizer", None)
    stop_strings = options.pop("stop_strings", None)
    of_each = {} if stop_strings is None else {"stop_strings": stop_strings, "tokenizer": tokenizer}

    # 3. Decoding.
    settings_file.write_text(json.dumps(settings, ensure_ascii=False, indent=1) + "\n")
    longest = max((len(ids) for ids in prompts.values()), default=1)
    stream = loaded.model.open_stream(max_batch_size=batch_size, max_prompt_length=longest, **options)
    waiting, running, start = list(prompts), {}, time.perf_counter()
    with output.open("ab") as file, console.progress_bar("prompts", len(records), len(done)) as progress:
        while waiting or stream.has_unfinished:
            while waiting and stream.num_free > 0:
                index = waiting.pop(0)
                # Each prompt has a seed of its own, so that an answer does not depend on what runs beside it.
                own = of_each if seed is None else {**of_each, "seed": seed + index}
                try:
                    running[stream.add(prompts[index], **own)] = (index, [])
                except ValueError as error:
                    failed[index] = error
            for update in stream.step():
                index, tokens = running[update.request]
                tokens += update.tokens.tolist()
                if not update.is_finished:
                    continue
                del running[update.request]
                if update.error is not None:
                    failed[index] = update.error
                    continue
                row = {
                    "index": index,
                    "input": records[index],
                    "response": loaded.text(tokens),
                    "finish_reason": update.finish_reason,
                    "num_tokens": len(tokens),
                    "num_forward_passes": update.num_forward_passes,
                }
                # In one write, so that a kill leaves whole lines, or a torn last one.
                file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
                file.flush()
                summary["answered"] += 1
                summary["num_tokens"] += len(tokens)
                summary["num_forward_passes"] += update.num_forward_passes
                progress(len(done) + summary["answered"], len(records))
    summary["seconds"] = round(time.perf_counter() - start, 4)
    summary["failed"] = len(failed)
    for index, error in sorted(failed.items()):
        console.say(f"line {index + 1} of {source} was not answered: {' '.join(str(error).split())}")
    console.say(
        f"{summary['answered']} of {summary['total']} prompts answered, {summary['resumed']} were there already, "
        f"{summary['failed']} failed; {summary['num_tokens'] / max(summary['seconds'], 1e-9):.0f} tokens/s"
    )
    return summary


def check_length(loaded: Loaded, ids: torch.LongTensor, options: dict[str, Any]) -> None:
    """Refuses a prompt `(L,)` behind which a response has no room. A stream would refuse all prompts for it."""
    limit = options.get("max_new_tokens") or loaded.model.generation_config.max_new_tokens or MAX_NEW_TOKENS
    room = loaded.model.config.max_position_embeddings - limit
    if len(ids) > room:
        raise ValueError(
            f"a prompt must have at most {room} tokens before a response of {limit} tokens, got {len(ids)}. Shorten "
            "it, or give a lower --max-new-tokens."
        )


def read_prompts(source: Path) -> list[dict[str, Any]]:
    """The objects of the input lines; empty lines are left out.

    Raises:
        ValueError: naming the line that is no prompt.
    """
    records = []
    for number, line in enumerate(source.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"Line {number} of {source} must be JSON, got {line!r:.60}: {error}") from error
        if isinstance(record, str):
            record = {"prompt": record}
        prompt = record.get("prompt") if isinstance(record, dict) else None
        messages = record.get("messages") if isinstance(record, dict) else None
        if (isinstance(prompt, str) and bool(prompt)) == (isinstance(messages, list) and bool(messages)):
            raise ValueError(
                f'Line {number} of {source} must have either a "prompt", a string, or "messages", a list, and not be '
                f"empty, got {line!r:.60}."
            )
        records.append(record)
    if not records:
        raise ValueError(f"{source} must have at least one prompt, but it is empty.")
    return records


def read_answers(
    output: Path, settings_file: Path, records: list[dict[str, Any]], settings: dict[str, Any]
) -> set[int]:
    """The indices of the prompts that are answered. What a kill left of the last line is cut off.

    Raises:
        ValueError: for an output of other prompts or settings, or a file of another kind.
    """
    if not output.exists() or output.stat().st_size == 0:
        return set()
    way_out = "Give --overwrite to begin it anew, or another --output."
    if not settings_file.is_file():
        raise ValueError(
            f"{output} exists, and {settings_file.name} is not beside it: it is of something else. {way_out}"
        )
    earlier = json.loads(settings_file.read_text(encoding="utf-8"))
    if earlier != settings:
        differing = [f"{name} was {before!r} and is {now!r}" for name, before, now in differences(earlier, settings)]
        raise ValueError(f"{output} has answers of another call: {'; '.join(differing)}. {way_out}")
    content = output.read_bytes()
    whole = content.rfind(b"\n") + 1
    done = set()
    for number, line in enumerate(content[:whole].splitlines(), start=1):
        try:
            row = json.loads(line)
            index, record = row["index"], row["input"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"Line {number} of {output} is no answer of d2f. {way_out}") from error
        if not (isinstance(index, int) and 0 <= index < len(records)) or records[index] != record:
            raise ValueError(f"Line {number} of {output} answers a prompt that the input has not. {way_out}")
        done.add(index)
    if whole < len(content):
        console.say(f"the last line of {output} is torn, so its prompt is answered again")
        os.truncate(output, whole)
    return done


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Name, earlier and present value of each setting and option that differs."""
    flat = [{**settings, **settings.get("options", {})} for settings in (before, now)]
    names = [name for name in dict.fromkeys([*flat[0], *flat[1]]) if name != "options"]
    return [(name, flat[0].get(name), flat[1].get(name)) for name in names if flat[0].get(name) != flat[1].get(name)]

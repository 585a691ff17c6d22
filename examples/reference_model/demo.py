"""Answers word problems with D2F, with an autoregressive model of the same size, and with the vanilla sampler.

    python examples/reference_model/demo.py
    python examples/reference_model/demo.py --question "Mia has 12 apples. She gives 5 of them to Tom. ..."

The models have three million parameters and know one thing: short chains of arithmetic on whole numbers up to 120,
told about people, their things, their money and their time (`word_problems.py` prints more of them). Any other
question is answered as if it were one of those, and wrongly.

The D2F model is exported as a folder like those on the Hub and loaded from there with `AutoModelForCausalLM`. In a
terminal its answer is drawn while it is decoded: several blocks at a time, each masked token as a shade. The drawing
pauses after each forward, because there is nothing to see at full speed; times are of a second call without it.
"""

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from d2f_hf.benchmarking import Measurement, System, measure, measure_one, speed_up, summarize
from reference_models import D2F, HERE, MAX_NEW_TOKENS, TWIN, VANILLA, ReferenceModels, load
from word_problems import final_number, make_problems

VANILLA_SAMPLER = "vanilla sampler"
LONGEST_QUESTION = 512  # tokens
FRAME_SECONDS = 0.12
MASKED, BOUNDARY = "░", "│"
DIM, NORMAL, CLEAR_BELOW = "\033[2m", "\033[0m", "\033[J"


class BlockStreamer(BaseStreamer):
    """Draws a response while it is decoded: its blocks, their decoded tokens, and a shade for each masked one.

    Where `stream` is not a terminal nothing is drawn.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Has a mask token.
        block_size (`int`): Tokens between two boundaries.
        stream (`TextIO`, *optional*): Where to draw; stdout by default.
        frame_seconds (`float`): How long each state stays.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        block_size: int,
        stream: TextIO | None = None,
        frame_seconds: float = FRAME_SECONDS,
    ):
        self.tokenizer = tokenizer
        self.block_size = block_size
        self.stream = stream or sys.stdout
        self.frame_seconds = frame_seconds
        self.is_prompt = True
        self.decoded: list[int] = []  # without a gap
        self.drawn_lines = 0

    def put(self, value: torch.Tensor) -> None:
        """Takes decoded tokens; the first call has the prompt."""
        if self.is_prompt:
            self.is_prompt = False
        else:
            self.decoded += value.flatten().tolist()

    def put_draft(self, value: torch.Tensor) -> None:
        """Takes what follows the decoded tokens up to the end of the last open block: tokens and mask tokens."""
        self._draw(self.decoded + value.flatten().tolist())
        time.sleep(self.frame_seconds if self.stream.isatty() else 0)

    def end(self) -> None:
        self._draw(self.decoded)

    def lines(self, token_ids: Sequence[int], width: int) -> list[str]:
        """The lines of a frame, at most `width` wide; shades and boundaries are dimmed by escape codes."""
        lines, used = [""], 0
        for index, token in enumerate(token_ids):
            pieces = []
            if index > 0 and index % self.block_size == 0:
                pieces.append((BOUNDARY, True))
            if token == self.tokenizer.mask_token_id:
                pieces.append((MASKED, True))
            elif token not in self.tokenizer.all_special_ids:
                pieces.append((self.tokenizer.decode([token]), False))
            for piece, is_dim in pieces:
                if piece.startswith("\n") or used + len(piece) > width:
                    lines.append("")
                    used = 0
                    piece = piece.lstrip("\n ") if not is_dim else piece
                lines[-1] += f"{DIM}{piece}{NORMAL}" if is_dim else piece
                used += len(piece)
        return lines

    def _draw(self, token_ids: Sequence[int]) -> None:
        if not self.stream.isatty():
            return
        size = shutil.get_terminal_size()
        # More lines than the terminal has could not be drawn over.
        lines = self.lines(token_ids, size.columns - 1)[-(size.lines - 1) :]
        up = f"\033[{self.drawn_lines - 1}A" if self.drawn_lines > 1 else ""
        start = "\r" + up + CLEAR_BELOW if self.drawn_lines else ""
        self.stream.write(start + "\n".join(lines))
        self.stream.flush()
        self.drawn_lines = len(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    logging.disable_progress_bar()
    print("Loading the models ...", flush=True)
    try:
        models = load(args.models, args.dtype)
    except FileNotFoundError as error:
        sys.exit(str(error))
    if args.question is None:
        questions = [(problem.question, problem.answer) for problem in make_problems("test", 3, seed=1)]
    else:
        questions = [(args.question, None)]
    for question, _ in questions:
        length = models.prompt(question)["input_ids"].shape[1]
        if length > LONGEST_QUESTION:
            sys.exit(f"--question must have at most {LONGEST_QUESTION} tokens, but it has {length}. Shorten it.")
    answer_all(models, questions)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--question", help="a word problem of yours, instead of the three built-in ones")
    parser.add_argument("--models", type=Path, default=HERE, help="folder of the models")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of all models")
    args = parser.parse_args(arguments)
    if args.question is not None and not args.question.strip():
        parser.error("--question must not be empty. Leave it out for the built-in problems.")
    return args


def answer_all(models: ReferenceModels, questions: Sequence[tuple[str, int | None]]) -> None:
    """Answers each question with the three systems and prints how fast each was."""
    known = models.systems()
    systems: dict[str, System] = {D2F: known[D2F], TWIN: known[TWIN], VANILLA_SAMPLER: known[VANILLA]}
    # The first calls of a process are slow. A few tokens will do for the vanilla sampler.
    prompts = [models.prompt(question) for question, _ in questions]
    measure({D2F: systems[D2F], TWIN: systems[TWIN]}, prompts[:1])
    models.teacher.generate(**prompts[0], decoding="vanilla", max_new_tokens=8)

    measurements = {name: [] for name in systems}
    for number, ((question, right), prompt) in enumerate(zip(questions, prompts, strict=True), start=1):
        print(f"\n{number}. {question}" if len(questions) > 1 else f"\n{question}")
        for name, system in systems.items():
            print(f"\n[{name}]", flush=True)
            if name == D2F and sys.stdout.isatty():
                block_size = models.student.generation_config.block_size or models.student.config.block_size
                models.student.generate(
                    **prompt, max_new_tokens=MAX_NEW_TOKENS, streamer=BlockStreamer(models.tokenizer, block_size)
                )
                print()
            measurement = measure_one(system, prompt)
            measurements[name].append(measurement)
            text = models.text(measurement.response_ids)
            if name != D2F or not sys.stdout.isatty():
                print(text)
            print(f"-> {verdict(final_number(text), right)}; {speed(measurement)}", flush=True)

    print(f"\n{'':20}  tokens/s  tokens per forward  D2F is")
    for name, of_system in measurements.items():
        summary = summarize(of_system)
        ratio = speed_up(measurements[D2F], of_system).of_totals
        compared = "" if name == D2F else f"{ratio:.1f} times as fast"
        print(f"{name:20}  {summary.tokens_per_second:8.0f}  {summary.tokens_per_forward:18.2f}  {compared}")


def verdict(answer: int | None, right: int | None) -> str:
    if answer is None:
        return "no answer"
    if right is None:
        return f"answer {answer}"
    return f"answer {answer}, right" if answer == right else f"answer {answer}, wrong: it is {right}"


def speed(measurement: Measurement) -> str:
    return (
        f"{len(measurement.response_ids)} tokens in {measurement.seconds:.2f} s: "
        f"{measurement.tokens_per_second:.0f} tokens/s, {measurement.tokens_per_forward:.2f} tokens per forward"
    )


if __name__ == "__main__":
    main()

"""Answers word problems with D2F, with an autoregressive model of the same size, and with the vanilla sampler.

    python examples/reference_model/demo.py
    python examples/reference_model/demo.py --question "Mia has 12 apples. She gives 5 of them to Tom. ..."

The models have three million parameters and know one thing: short chains of arithmetic on whole numbers up to 120,
told about people, their things, their money and their time (`word_problems.py` prints more of them). Any other
question is answered as if it were one of those, and wrongly.

The D2F model is exported as a folder like those on the Hub and loaded from there with `AutoModelForCausalLM`. In a
terminal one sees how its answer is decoded: several blocks at a time, each masked token as a shade. It is slowed down,
because there is nothing to see at full speed; times are of a second call.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from transformers import BatchEncoding
from transformers.utils import logging

from d2f_cli.terminal_view import LiveScreen, ResponseView, can_be_drawn_on
from d2f_hf.benchmarking import Measurement, System, measure, measure_one, speed_up, summarize
from d2f_hf.live_view import LiveResponse
from reference_models import D2F, HERE, MAX_NEW_TOKENS, TWIN, VANILLA, ReferenceModels, load
from word_problems import final_number, make_problems

VANILLA_SAMPLER = "vanilla sampler"
LONGEST_QUESTION = 512  # tokens


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

    console = Console(highlight=False)
    is_drawn = can_be_drawn_on(console)
    measurements = {name: [] for name in systems}
    for number, ((question, right), prompt) in enumerate(zip(questions, prompts, strict=True), start=1):
        print(f"\n{number}. {question}" if len(questions) > 1 else f"\n{question}")
        for name, system in systems.items():
            print(f"\n[{name}]", flush=True)
            if name == D2F and is_drawn:
                draw(models, prompt, console)
            measurement = measure_one(system, prompt)
            measurements[name].append(measurement)
            text = models.text(measurement.response_ids)
            if name != D2F or not is_drawn:
                print(text)
            print(f"-> {verdict(final_number(text), right)}; {speed(measurement)}", flush=True)

    print(f"\n{'':20}  tokens/s  tokens per forward  D2F is")
    for name, of_system in measurements.items():
        summary = summarize(of_system)
        ratio = speed_up(measurements[D2F], of_system).of_totals
        compared = "" if name == D2F else f"{ratio:.1f} times as fast"
        print(f"{name:20}  {summary.tokens_per_second:8.0f}  {summary.tokens_per_forward:18.2f}  {compared}")


def draw(models: ReferenceModels, prompt: BatchEncoding, console: Console) -> None:
    """Shows how the D2F model decodes its answer."""
    view = ResponseView(LiveResponse.of(models.student), models.tokenizer)
    with LiveScreen(view, [view], console) as screen:
        view.response.changed = screen.refresh
        models.student.generate(
            **prompt,
            max_new_tokens=MAX_NEW_TOKENS,
            streamer=view.response,
            return_dict_in_generate=True,
            output_trace=True,
        )


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

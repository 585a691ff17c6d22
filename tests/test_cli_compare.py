"""`d2f compare`: two models, each with the answer and the figures that it has alone."""

import io

import pytest
from rich.console import Console

from cli_runs import QUESTION, as_json, d2f, reference, succeeds
from d2f_cli.answering import respond
from d2f_cli.compare import Racer, SideBySide

FLAGS = ["--max-new-tokens", "24"]


def alone(name: str, as_it_is: bool, **options) -> dict:
    loaded = reference(name, as_it_is)
    return respond(loaded, loaded.prompt(QUESTION), {"max_new_tokens": 24, **options})[0]


@pytest.mark.parametrize(
    "arguments, names, expected",
    [
        ([], ["reference", "reference-twin"], ("reference-twin", True, {})),
        (
            ["--baseline-decoding", "fast_dllm"],
            ["reference", "reference (fast_dllm)"],
            ("reference", False, {"decoding": "fast_dllm"}),
        ),
        (
            ["--baseline", "reference-twin", "--baseline-decoding", "verified"],
            ["reference", "reference-twin (verified)"],
            ("reference-twin", False, {"decoding": "verified"}),
        ),
    ],
    ids=str,
)
def test_each_answers_as_it_does_alone(arguments, names, expected):
    found = as_json("compare", "reference", QUESTION, *FLAGS, *arguments)
    name, as_it_is, options = expected
    assert [system["model"] for system in found["systems"]] == names
    others = [alone("reference", False), alone(name, as_it_is, **options)]
    for system, other in zip(found["systems"], others, strict=True):
        for figure in ("response", "num_tokens", "num_forward_passes", "tokens_per_forward"):
            assert system[figure] == other[figure]
    first, second = (system["tokens_per_second"] for system in found["systems"])
    assert found["speed_up"] == pytest.approx(first / second, rel=0.01)


def test_piped_it_is_plain_text():
    output = succeeds("compare", "reference", QUESTION, *FLAGS)
    assert "\033" not in output and "[reference]\n" in output and "[reference-twin]\n" in output
    assert all(len(line) <= 80 for line in output.splitlines()[-3:])
    assert output.splitlines()[-1].startswith("reference is ")


def test_a_flag_that_only_one_model_has_is_for_that_one():
    found = as_json("compare", "reference", QUESTION, *FLAGS, "--confidence-threshold", "0.98")
    assert [system["options"].get("confidence_threshold") for system in found["systems"]] == [0.98, None]


@pytest.mark.parametrize("width", [30, 80, 120])
def test_the_texts_stand_beside_each_other_if_there_is_room(width):
    racers = [Racer(reference(), {}, QUESTION, None), Racer(reference("reference-twin", True), {}, QUESTION, None)]
    for racer in racers:
        racer.run()
    console = Console(file=io.StringIO(), width=width, height=40)
    console.print(SideBySide([racer.view for racer in racers]))
    lines = console.file.getvalue().splitlines()
    assert all(len(line) <= width for line in lines) and len(lines) <= 40
    titles = [line for line in lines if line.startswith("reference")]
    assert (len(titles) == 1) == (width >= 80) and "".join(titles).count("reference") == 2


def test_wrong_calls():
    assert d2f("compare", "reference", "").exit_code == 2

"""The script that draws the demo: when each token was there, where it stands, and the picture."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from transformers import AutoTokenizer

import record_demo
from record_demo import WIDTH, Moments, Recorder, Run, layout, median_run, moments, wrapped
from reference_models import HERE
from untrained_reference_models import save_untrained_models

DEMO = Path(__file__).resolve().parents[1] / "docs" / "demo.svg"
SVG = "{http://www.w3.org/2000/svg}"
MASK = 99


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(HERE / "tokenizer")


@pytest.fixture(scope="module")
def untrained_models(tokenizer, tmp_path_factory):
    return save_untrained_models(tmp_path_factory.mktemp("models"), tokenizer)


def test_a_recorder_notes_decoded_tokens_and_the_draft_behind_them():
    recorder = Recorder()
    recorder.put(torch.tensor([[1, 2, 3]]))  # the prompt
    recorder.put_draft(torch.tensor([MASK, 8]))
    recorder.put(torch.tensor([7, 8]))
    recorder.put_draft(torch.tensor([MASK]))
    recorder.put(torch.tensor([9]))
    recorder.end()
    assert [ids for _, ids in recorder.frames] == [[MASK, 8], [7, 8], [7, 8, MASK], [7, 8, 9]]
    seconds = [moment for moment, _ in recorder.frames]
    assert seconds == sorted(seconds) and seconds[0] >= 0.0


def test_a_position_is_masked_from_the_forward_before_its_first_window_until_it_is_decoded():
    """The second forward decodes out of order, the third reaches behind the end of the response."""
    frames = [(1.0, [5, MASK]), (2.0, [5, MASK, 6, MASK]), (3.0, [5, 7]), (3.1, [5, 7, 6, 8])]
    windows = [(2, [0]), (4, [2]), (6, [1, 3, 5])]
    run = Run(frames, [5, 7, 6, 8], 3, 3.2, windows)
    assert moments(run, MASK) == [
        Moments(0.0, 1.0),
        Moments(0.0, 3.0),
        Moments(1.0, 2.0),
        Moments(1.0, 3.1),
        Moments(2.0, 3.1, is_response=False),
        Moments(2.0, 3.1, is_response=False),
    ]


def test_one_token_after_the_other_is_never_masked():
    run = Run([(1.0, [5]), (2.0, [5, 6])], [5, 6], 2, 2.5, [])
    assert moments(run, MASK) == [Moments(1.0, 1.0), Moments(2.0, 2.0)]


def test_the_run_of_median_length_is_shown():
    runs = [Run([], [], 1, seconds, []) for seconds in (3.0, 1.0, 2.0, 9.0)]
    assert median_run(runs).seconds == 2.0
    assert median_run(runs[:3]).seconds == 2.0


def test_lines_are_not_wider_than_the_picture_and_words_are_whole(tokenizer):
    text = " ".join(["There are 56 rings in the bag of Edgar, Karenina and Gavin."] * 4) + "\n#### 65"
    ids = [*tokenizer(" " + text)["input_ids"], tokenizer.eos_token_id]
    places = layout(tokenizer, ids)
    lines = [""] * (places[-1][0] + 1)
    for line, column, piece in places:
        assert len(lines[line]) == column and column + len(piece) <= WIDTH
        lines[line] += piece
    assert places[-1][2] == "" and lines[-1] == "#### 65"
    assert " ".join(lines).split() == text.split()
    assert all(len(line) <= WIDTH for line in wrapped(text)) and " ".join(wrapped(text)).split() == text.split()


def texts(svg):
    """Those that stand in the picture when nothing moves."""
    root = ElementTree.fromstring(svg)
    return [element.text or "" for element in root.iter(SVG + "text") if element.get("opacity") != "0"]


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 24])
def test_the_script_draws_what_the_models_answer(length, untrained_models, tokenizer, tmp_path, capsys):
    path = tmp_path / "demo.svg"
    question = "How many <rings> & pens is that?"
    options = ["--models", untrained_models, "--output", path, "--question", question, "--dtype", "float32"]
    record_demo.main([*map(str, options), "--max-new-tokens", str(length), "--runs", "2"])
    stdout = capsys.readouterr().out
    assert f"D2F: {length} tokens in" in stdout and f"Wrote {path}" in stdout
    svg = path.read_text()
    told = texts(svg)
    assert told[0] == question
    first, second = (told.index(name) for name in ("D2F", "autoregressive twin"))
    assert told[first + 1].startswith(f"{length} tokens in") and f"{length} forwards" in told[second + 1]

    models = record_demo.load(untrained_models, "float32")
    prompt = models.prompt(question)
    output = models.student.generate(**prompt, max_new_tokens=length)[0, prompt["input_ids"].shape[1] :].tolist()
    words = [piece.strip() for _, _, piece in layout(tokenizer, output)]
    assert told[first + 2 : second] == [word for word in words if word]
    assert str(tmp_path) not in svg
    # All that appears or disappears has its rule, and no rule is left over.
    used = set(re.findall(r'class="(\w+)"', svg))
    assert used == set(re.findall(r"@keyframes (\w+)", svg)) == set(re.findall(r"\.(\w+)\{animation", svg))


@pytest.mark.parametrize("arguments", [["--runs", "0"], ["--max-new-tokens", "0"], ["--question", " "]])
def test_arguments_that_mean_nothing_end_the_script(arguments, capsys):
    with pytest.raises(SystemExit):
        record_demo.main(arguments)
    assert f"{arguments[0]} must" in capsys.readouterr().err


def test_the_committed_picture_is_small_and_says_what_was_measured():
    svg = DEMO.read_text()
    assert len(svg) < 200_000
    told = texts(svg)
    lengths = {}
    for name in ("D2F", "autoregressive twin"):
        tokens, seconds, forwards, rate = re.fullmatch(
            r"(\d+) tokens in ([\d.]+) s, (\d+) forwards: (\d+) tokens/s", told[told.index(name) + 1]
        ).groups()
        assert int(rate) == pytest.approx(int(tokens) / float(seconds), rel=0.02)
        lengths[name] = float(seconds)
        assert (int(forwards) < int(tokens)) == (name == "D2F")
    (faster,) = re.findall(r"D2F is ([\d.]+) times as fast", " ".join(told))
    assert float(faster) == pytest.approx(lengths["autoregressive twin"] / lengths["D2F"], rel=0.03)

"""`examples/generate.py`: answers a question, and shows the drafts."""

import importlib
import re
import shlex
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from word_problems import make_problems

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
REFERENCE_MODEL = EXAMPLES / "reference_model"


@pytest.fixture
def generate(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("generate")


def test_without_arguments_it_answers_a_word_problem_and_shows_the_drafts(generate, capsys):
    answer = generate.main([])
    printed = capsys.readouterr().out
    assert f"#### {make_problems('test', 1)[0].answer}" in answer
    assert float(re.search(r"([\d.]+) tokens per forward, \d+ tokens/s", printed)[1]) > 2.0
    drafts = printed.partition("tokens/s\n\n")[2].splitlines()
    assert len(drafts) > 3 and any(generate.SHADE in draft for draft in drafts[:-1])
    assert drafts[-1] == answer.replace("\n", " "), "the last draft is the answer"


def test_it_loads_a_base_with_an_adapter_and_asks_what_it_is_told(generate, tmp_path, capsys):
    base = shutil.copytree(REFERENCE_MODEL / "teacher", tmp_path / "base")
    AutoTokenizer.from_pretrained(REFERENCE_MODEL / "tokenizer").save_pretrained(base)
    adapter = REFERENCE_MODEL / "student"
    question = "There are 56 rings in the bag of Edgar. Gavin gives him 2 more. What is the number of rings now?"
    generate.main(["--model", str(base), "--adapter", str(adapter), "--question", question, "--max-new-tokens", "8"])
    assert question in capsys.readouterr().out


def test_the_command_line_in_the_docstring_can_be_parsed(generate):
    command = generate.__doc__.split("examples/generate.py \\\n")[1].replace("\\\n", " ")
    args = generate.parse_arguments(shlex.split(command))
    assert (args.model, args.dtype, args.max_new_tokens) == ("GSAI-ML/LLaDA-8B-Instruct", "bfloat16", 256)
    assert args.adapter.startswith("SJTU-Deng-Lab/")

"""The scripts in examples/ that show how the package is used."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from d2f_hf import load_d2f_model

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
TINY_RUN = (
    "--use_cpu --max_steps 2 --per_device_train_batch_size 2 --logging_steps 1 --save_strategy no --report_to none "
    "--disable_tqdm True"
)


@pytest.fixture
def distil(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("distil")


def test_distil_trains_saves_loads_and_answers(distil, tmp_path, capsys):
    answer = distil.main([*TINY_RUN.split(), "--output_dir", str(tmp_path), "--block_size", "8"])
    printed = capsys.readouterr().out
    assert answer in printed and "tokens per forward" in printed and "The right answer is" in printed
    model = load_d2f_model(tmp_path)
    assert model.config.block_size == 8
    assert {"modeling_d2f_llada.py", "tokenizer.json", "generation_config.json"} <= {
        p.name for p in tmp_path.iterdir()
    }


def test_distil_takes_a_file_of_chats_and_a_question(distil, tmp_path, capsys):
    rows = [{"messages": [{"role": "user", "content": "A pen?"}, {"role": "assistant", "content": "#### 1"}]}] * 4
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [*TINY_RUN.split(), "--dataset", str(tmp_path / "chats.jsonl"), "--question", "How many pens?"]
    distil.main([*command, "--output_dir", str(tmp_path / "out")])
    assert "How many pens?" in capsys.readouterr().out


def test_the_command_lines_in_distil_can_be_parsed(distil, tmp_path):
    """The quick run, and the real one of the docstring."""
    from transformers import HfArgumentParser

    from d2f_hf import D2FTrainingArguments

    parser = HfArgumentParser((distil.ScriptArguments, D2FTrainingArguments))
    _, quick = parser.parse_args_into_dataclasses(distil.QUICK_RUN.split())
    assert (quick.max_steps, quick.label_weight) == (40, 0.8)
    real = distil.__doc__.split("examples/distil.py \\\n")[1].split("--question")[0].replace("\\\n", " ").split()
    if "--activation_checkpointing" in real and not hasattr(quick, "activation_checkpointing"):
        real[real.index("--activation_checkpointing")] = "--gradient_checkpointing"  # its name before
    script, args = parser.parse_args_into_dataclasses([*real, "--use_cpu", "--output_dir", str(tmp_path)])
    assert (script.dtype, args.block_size, args.max_length) == ("bfloat16", 16, 512)


def test_examples_print_their_docstring_for_help(distil, capsys):
    with pytest.raises(SystemExit):
        distil.main(["--help"])
    assert "Makes a D2F student" in capsys.readouterr().out
    sys.path[:] = [path for path in sys.path if path != str(EXAMPLES)]

"""The word problems, their tokenizer, and the scripts of the reference model."""

import hashlib
import importlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from d2f_hf import D2FLLaDAConfig, D2FLLaDAForBlockDiffusion

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "reference_model"
sys.path.insert(0, str(EXAMPLE))
word_problems = importlib.import_module("word_problems")
demo = importlib.import_module("demo")
bench = importlib.import_module("bench")

# What each operation does, apart from the generator. The last one is what is left of a note.
MEANING = {
    "add": lambda value, k: value + k,
    "more": lambda value, k: value + k,
    "take": lambda value, k: value - k,
    "fewer": lambda value, k: value - k,
    "multiply": lambda value, k: value * k,
    "price": lambda value, k: value * k,
    "share": lambda value, k: value / k,
    "change": lambda value, k: k - value,
}

FIRST_TEST_PROBLEM = (
    "Grace brings 33 pens to the studio. She sorts them into 3 equal piles and keeps one pile. Erin has 2 times as "
    "many pens as Grace. Another 9 arrive by mail. How many pens is that in the end?",
    "We go through three steps, one by one. Grace comes to the studio with 33 pens. One of 3 equal piles is kept, so "
    "she has 11 pens. Erin has 2 times as many as Grace, so Erin has 22 pens. The mail brings 9 more, so the answer "
    "is\n#### 31",
    31,
    ("things", 33, (("share", 3), ("multiply", 2), ("add", 9))),
)


@pytest.fixture(scope="module")
def problems():
    return word_problems.make_problems("test", 3000)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(EXAMPLE / "tokenizer")


def values_of(chain):
    """The start value and the result of each step."""
    _, value, steps = chain
    values = [value]
    for operation, k in steps:
        values.append(MEANING[operation](values[-1], k))
    return values


def test_same_seed_gives_the_same_problems_and_another_seed_others(problems):
    assert word_problems.make_problems("test", 50) == problems[:50]
    assert word_problems.make_problem("train", 3, 7) == word_problems.make_problem("train", 3, 7)
    others = {problem.question for problem in word_problems.make_problems("test", 50, seed=1)}
    assert not others & {problem.question for problem in problems[:50]}


def test_problems_of_a_seed_do_not_change():
    """The committed models were trained on these; another draw would need other models."""
    problem = word_problems.make_problem("test", 0, 0)
    assert (problem.question, problem.solution, problem.answer, problem.chain) == FIRST_TEST_PROBLEM


def test_splits_share_no_chain(problems):
    chains = {
        split: {problem.chain for problem in word_problems.make_problems(split, 2000, seed=5)}
        for split in ("train", "validation")
    }
    chains["test"] = {problem.chain for problem in problems}
    assert not chains["train"] & chains["test"]
    assert not chains["train"] & chains["validation"]
    assert not chains["validation"] & chains["test"]
    for split, found in chains.items():
        assert all(word_problems.split_of(chain) == split for chain in found)


def test_no_chain_is_tested_twice(problems):
    assert len({problem.chain for problem in problems}) == len(problems)


def test_there_are_at_least_six_kinds_of_step(problems):
    used = {operation for problem in problems for operation, _ in problem.chain[2]}
    assert used == set(MEANING)
    assert len(used) >= 6
    assert {problem.chain[0] for problem in problems} == {"things", "dollars", "minutes"}


def test_there_are_at_least_two_hundred_names_things_and_places():
    words = [*word_problems.SHE, *word_problems.HE, *word_problems.THINGS, *word_problems.PLACES]
    assert len(words) == len(set(words)) >= 200


def test_every_problem_has_two_to_four_steps(problems):
    assert {len(problem.chain[2]) for problem in problems} == {2, 3, 4}


def test_every_number_is_whole_and_in_range(problems):
    for problem in problems:
        for value in values_of(problem.chain):
            assert value == int(value) and 1 <= value <= word_problems.LARGEST_VALUE, problem
        for number in re.findall(r"\d+", problem.question + problem.solution):
            assert 1 <= int(number) <= word_problems.LARGEST_VALUE, problem


def test_the_question_tells_the_start_value_and_each_operand_in_order(problems):
    for problem in problems:
        _, start, steps = problem.chain
        assert [int(n) for n in re.findall(r"\d+", problem.question)] == [start, *(k for _, k in steps)], problem


def test_the_solution_tells_the_right_value_after_each_step(problems):
    """Start value; then operand and result of each step, as an evaluator of its own computes them from the chain."""
    for problem in problems:
        values = values_of(problem.chain)
        expected = [values[0]]
        for (_, k), value in zip(problem.chain[2], values[1:], strict=True):
            expected += [k, value]
        assert [int(n) for n in re.findall(r"\d+", problem.solution)] == expected, problem
        told = re.findall(r", so [^,.#]*?\b(\d+)\b", problem.solution)
        assert [int(n) for n in told] == values[1:-1], problem
        assert problem.solution.endswith(f"so the answer is\n#### {values[-1]:.0f}")
        assert word_problems.final_number(problem.solution) == problem.answer == values[-1]


def test_final_number_is_the_last_one_after_the_marks():
    assert word_problems.final_number("so 3.\n#### 12") == 12
    assert word_problems.final_number("#### 4 and #### 5") == 5
    assert word_problems.final_number("the answer is 12") is None
    assert word_problems.final_number("####") is None


def test_texts_have_no_unfilled_places_and_start_with_capitals(problems):
    for problem in problems:
        text = f"{problem.question} {problem.solution}"
        assert not set("{}") & set(text)
        assert problem.question[0].isupper() or problem.question[0].isdigit()
        assert "  " not in text


def test_wording_varies(problems):
    """With names, things, places and numbers taken out, hardly any question has the words of another one."""
    words = {*word_problems.SHE, *word_problems.HE, *word_problems.THINGS, *word_problems.PLACES}
    words |= {*word_problems.ACTIVITIES, "she", "he", "her", "him", "She", "He"}
    shapes = {
        re.sub(r"\w+", lambda m: "_" if m[0] in words or m[0].isdigit() else m[0], problem.question)
        for problem in problems
    }
    assert len(shapes) > 0.8 * len(problems)


def test_solutions_have_40_to_160_tokens(problems, tokenizer):
    lengths = [len(ids) for ids in tokenizer([problem.solution for problem in problems])["input_ids"]]
    assert min(lengths) >= 40 and max(lengths) + 1 <= 160


def test_every_solution_fits_the_length_that_the_teacher_is_scored_with(problems, tokenizer):
    lengths = [len(ids) for ids in tokenizer([" " + problem.solution for problem in problems])["input_ids"]]
    assert max(lengths) + 1 <= bench.SCORING_LENGTH


def test_tokenizer_is_fast_and_small(tokenizer):
    assert tokenizer.is_fast
    assert len(tokenizer) <= 1024
    special = [tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.mask_token_id, tokenizer.unk_token_id]
    assert len(set(special)) == 4 and None not in special
    assert tokenizer.padding_side == "left"


def test_every_number_up_to_199_is_one_token(tokenizer):
    for number in range(200):
        assert len(tokenizer(f" {number}")["input_ids"]) == 1
    assert len({tokenizer(f" {number}")["input_ids"][0] for number in range(200)}) == 200


def test_tokenizer_gives_the_text_back(problems, tokenizer):
    for problem in problems[:500]:
        for text in (problem.question, problem.solution):
            ids = tokenizer(text)["input_ids"]
            assert tokenizer.unk_token_id not in ids
            assert tokenizer.decode(ids) == text


def test_prompt_of_the_chat_template_is_a_prefix_of_the_whole_chat(problems, tokenizer):
    for problem in problems[:500]:
        prompt = tokenizer.apply_chat_template(problem.messages[:1], add_generation_prompt=True)["input_ids"]
        whole = tokenizer.apply_chat_template(problem.messages)["input_ids"]
        assert whole[: len(prompt)] == prompt
        assert whole[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(whole[len(prompt) : -1]).strip() == problem.solution


class Terminal(io.StringIO):
    def isatty(self):
        return True


def without_escapes(text):
    return re.sub(r"\033\[\d*[A-Za-z]", "", text)


def test_the_drawing_shows_decoded_text_shades_and_block_boundaries(tokenizer):
    mask = tokenizer.mask_token_id
    two, has = tokenizer(" 2 has")["input_ids"]
    streamer = demo.BlockStreamer(tokenizer, block_size=2)
    (line,) = streamer.lines([two, mask, has, mask, mask], width=80)
    assert without_escapes(line) == " 2░│ has░│░"
    assert line.count(demo.DIM) == line.count(demo.NORMAL) == 5


def test_the_drawing_breaks_lines_at_the_width_and_at_line_breaks(tokenizer):
    ids = tokenizer(" Mia has 12 apples\n#### 12")["input_ids"]
    streamer = demo.BlockStreamer(tokenizer, block_size=100)
    assert streamer.lines(ids, width=80) == [" Mia has 12 apples", "#### 12"]
    narrow = streamer.lines(ids, width=10)
    assert all(len(line) <= 10 for line in narrow)
    assert "".join(narrow).replace(" ", "") == "Miahas12apples####12"


def test_each_frame_is_drawn_over_the_one_before(tokenizer):
    mask, ids = tokenizer.mask_token_id, tokenizer(" 2 3\n#### 5")["input_ids"]
    terminal = Terminal()
    streamer = demo.BlockStreamer(tokenizer, block_size=16, stream=terminal, frame_seconds=0)
    streamer.put(torch.tensor([[1, 2, 3]]))  # the prompt
    streamer.put_draft(torch.tensor([mask] * 4))
    streamer.put(torch.tensor(ids))
    streamer.put_draft(torch.tensor([mask]))
    streamer.end()
    frames = terminal.getvalue().split("\r")
    assert [without_escapes(frame) for frame in frames] == ["░░░░", " 2 3\n#### 5░", " 2 3\n#### 5"]
    assert frames[1].startswith(demo.CLEAR_BELOW)  # the first frame has one line
    assert frames[2].startswith("\033[1A" + demo.CLEAR_BELOW)


def test_nothing_is_drawn_where_there_is_no_terminal(tokenizer):
    stream = io.StringIO()
    streamer = demo.BlockStreamer(tokenizer, block_size=16, stream=stream, frame_seconds=0)
    streamer.put(torch.tensor([[1, 2]]))
    streamer.put_draft(torch.tensor([tokenizer.mask_token_id]))
    streamer.put(torch.tensor([7]))
    streamer.end()
    assert stream.getvalue() == ""


def test_score_is_the_share_of_right_final_numbers():
    problems = [SimpleNamespace(answer=answer) for answer in (5, 6, 7, 8)]
    assert bench.score(["#### 5", "#### 5", "7", "so 9. #### 8"], problems) == 50.0


def test_a_figure_holds_from_its_bar_on():
    assert bench.Figure("score", 90.0, 90.0).holds is True
    assert bench.Figure("score", 89.9, 90.0).holds is False
    assert bench.Figure("tokens/s", 100.0).as_dict() == {
        "name": "tokens/s",
        "value": 100.0,
        "bar": None,
        "holds": None,
    }


@pytest.fixture(scope="module")
def untrained_models(tokenizer, tmp_path_factory):
    """A folder like the one with the reference models, of tiny models that know nothing."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **ids)).save_pretrained(folder / "twin")
    sizes = {"d_model": 8, "mlp_hidden_size": 8, "n_layers": 1, "n_heads": 1, "block_size": 16}
    config = D2FLLaDAConfig(
        vocab_size=len(tokenizer), mask_token_id=tokenizer.mask_token_id, right_shift_logits=True, **sizes, **ids
    )
    teacher = D2FLLaDAForBlockDiffusion(config)
    teacher.save_pretrained(folder / "teacher")
    get_peft_model(teacher, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(folder / "student")
    tokenizer.save_pretrained(folder / "tokenizer")
    return folder


def run_script(name, *arguments):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(EXAMPLE / name), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_bench_ends_with_one_json_object(untrained_models, tmp_path):
    report = tmp_path / "report.json"
    done = run_script(
        "bench.py", "--models", untrained_models, "--problems", 2, "--slow-problems", 1, "--report", report
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == json.loads(report.read_text())
    assert {key for figure in found["figures"] for key in figure} == {"name", "value", "bar", "holds"}
    bars = {figure["name"]: figure["bar"] for figure in found["figures"] if figure["bar"] is not None}
    assert sorted(bars.values()) == [-2.0, 2.5, 2.5, 4.0, 20.0, 20.0, 90.0, 90.0]
    assert found["environment"]["dtype"] == "bfloat16" and found["environment"]["problems"] == 2


@pytest.mark.slow
def test_bench_draws_the_curve(untrained_models, tmp_path):
    pytest.importorskip("matplotlib")
    done = run_script("bench.py", "--models", untrained_models, "--problems", 1, "--curve", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = (tmp_path / "curve.csv").read_text().splitlines()
    assert rows[0] == "block_size,confidence_threshold,score,tokens_per_forward,tokens_per_second"
    assert len(rows) == 1 + len(bench.CURVE_THRESHOLDS) * len(bench.CURVE_BLOCK_SIZES)
    assert (tmp_path / "curve.png").stat().st_size > 0


@pytest.mark.slow
def test_demo_answers_a_question_that_is_far_from_the_task(untrained_models):
    done = run_script("demo.py", "--models", untrained_models, "--question", "Wer schrieb den Faust? Ünglaublich!")
    assert done.returncode == 0, done.stderr
    assert "Wer schrieb den Faust?" in done.stdout
    for name in ("D2F", "autoregressive twin", "vanilla sampler"):
        assert f"[{name}]" in done.stdout
    assert "tokens per forward" in done.stdout and "times as fast" in done.stdout


@pytest.mark.slow
def test_scripts_say_what_makes_missing_models(tmp_path):
    for script in ("demo.py", "bench.py"):
        done = run_script(script, "--models", tmp_path)
        assert done.returncode == 1
        assert "make reference-model" in done.stderr and "Traceback" not in done.stderr


def test_the_table_of_several_runs_has_median_spread_and_whether_all_hold(tmp_path, capsys):
    paths = []
    for number, (score, ratio) in enumerate([(91.0, 2.4), (95.0, 3.0), (93.0, 2.6)]):
        figures = [bench.Figure("score, %", score, 90.0), bench.Figure("ratio", ratio, 2.5), bench.Figure("s", ratio)]
        paths.append(tmp_path / f"{number}.json")
        paths[-1].write_text(json.dumps({"figures": [figure.as_dict() for figure in figures]}))
    bench.main(["--table", *map(str, paths)])
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| score, % | 93.00 | 91.00 to 95.00 | >= 90 | yes |",
        "| ratio | 2.60 | 2.40 to 3.00 | >= 2.5 | no |",
        "| s | 2.60 | 2.40 to 3.00 |  |  |",
    ]


def test_the_figures_of_the_engine_have_a_table_of_their_own(tmp_path, capsys):
    path = tmp_path / "report.json"
    figures = [
        {"name": "score, %", "value": 91.0, "bar": 90.0, "holds": True},
        {"name": "engine: overhead", "value": 1.04, "bar": 1.05, "holds": True},
        {"name": "engine: growth", "value": 1.1, "bar": 1.1, "holds": True},
        {"name": "engine: share", "value": 0.5, "bar": 0.6, "holds": False},
    ]
    path.write_text(json.dumps({"figures": figures, "at_most": ["engine: overhead", "engine: growth"]}))
    without = tmp_path / "without.json"
    without.write_text(json.dumps({"figures": [{**figures[0], "value": 91.0}]}))
    bench.main(["--table", str(path), str(without)])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line and not line.startswith(("| |", "| ---"))] == [
        "| score, % | 91.00 | 91.00 to 91.00 | >= 90 | yes |",
        "| engine: overhead | 1.04 | 1.04 to 1.04 | <= 1.05 | yes |",
        "| engine: growth | 1.10 | 1.10 to 1.10 | <= 1.1 | yes |",
        "| engine: share | 0.50 | 0.50 to 0.50 | >= 0.6 | no |",
    ]


# ---- what is shipped ----

WEIGHTS = ("twin/model.safetensors", "teacher/model.safetensors", "student/adapter_model.safetensors")


def shapes_and_dtypes(path):
    with safe_open(EXAMPLE / path, framework="pt") as file:
        slices = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118, it has no other iterator
        return [(piece.get_shape(), piece.get_dtype()) for piece in slices]


def test_shipped_models_are_small_and_of_one_size():
    counts = {path: sum(torch.Size(shape).numel() for shape, _ in shapes_and_dtypes(path)) for path in WEIGHTS}
    assert counts["twin/model.safetensors"] == counts["teacher/model.safetensors"] <= 8_000_000
    assert counts["teacher/model.safetensors"] + counts["student/adapter_model.safetensors"] <= 8_000_000
    assert sum((EXAMPLE / path).stat().st_size for path in WEIGHTS) <= 40e6


@pytest.mark.parametrize("path", WEIGHTS)
def test_shipped_weights_are_bfloat16(path):
    assert {dtype for _, dtype in shapes_and_dtypes(path)} == {"BF16"}


def test_shipped_files_are_those_of_the_manifest():
    lines = [line.split() for line in (EXAMPLE / "SHA256SUMS").read_text().splitlines()]
    manifest = {name: expected for expected, name in lines}
    assert set(WEIGHTS) <= set(manifest)
    for name, expected in manifest.items():
        assert hashlib.sha256((EXAMPLE / name).read_bytes()).hexdigest() == expected, name


def test_the_student_answers_at_least_four_of_five_test_problems(problems, tokenizer):
    teacher = D2FLLaDAForBlockDiffusion.from_pretrained(EXAMPLE / "teacher", dtype=torch.float32)
    student = PeftModel.from_pretrained(teacher, str(EXAMPLE / "student")).merge_and_unload().eval()
    asked = problems[:20]
    inputs = tokenizer.apply_chat_template(
        [problem.messages[:1] for problem in asked],
        add_generation_prompt=True,
        padding=True,
        return_dict=True,
        return_tensors="pt",
    )
    sequences = student.generate(**inputs, max_new_tokens=bench.SCORING_LENGTH)
    answers = tokenizer.batch_decode(sequences[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert bench.score(answers, asked) >= 80


def test_the_table_of_the_readme_is_that_of_the_committed_reports():
    reports = [json.loads(path.read_text()) for path in sorted((EXAMPLE / "reports").glob("run*.json"))]
    assert reports
    readme = (EXAMPLE.parents[1] / "README.md").read_text()
    assert bench.markdown_table(reports) in readme
    of_engine = bench.markdown_table(reports, of_engine=True).splitlines()
    headlines = [line for line in readme.splitlines() if line.startswith(f"| {bench.ENGINE}")]
    assert headlines and set(headlines) <= set(of_engine)


def test_the_teacher_starts_as_the_twin():
    """With a causal mask its logits are the twin's."""
    train = importlib.import_module("train")
    teacher = train.teacher_from_twin(train.load_tokenizer()).eval()
    twin = LlamaForCausalLM.from_pretrained(EXAMPLE / "twin", dtype=torch.float32).eval()
    input_ids = torch.randint(10, 900, (2, 24), generator=torch.Generator().manual_seed(0))
    causal = torch.ones(2, 1, 24, 24, dtype=torch.bool).tril()
    with torch.no_grad():
        expected = twin(input_ids).logits
        torch.testing.assert_close(teacher(input_ids, attention_mask=causal).logits, expected, atol=1e-4, rtol=0)

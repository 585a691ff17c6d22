"""The word problems, their tokenizer, and the scripts of the reference model."""

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoTokenizer, LlamaForCausalLM

import demo
import train
import word_problems
from benchmarks.reference import SCORING_LENGTH, score
from d2f_hf import D2FLLaDAForBlockDiffusion
from reference_models import load
from untrained_reference_models import save_untrained_models

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "reference_model"

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
    assert max(lengths) + 1 <= SCORING_LENGTH


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


@pytest.fixture(scope="module")
def untrained_models(tokenizer, tmp_path_factory):
    return save_untrained_models(tmp_path_factory.mktemp("models"), tokenizer)


def run_script(name, *arguments):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(EXAMPLE / name), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_demo_answers_a_question_that_is_far_from_the_task(untrained_models, capsys):
    demo.main(["--models", str(untrained_models), "--question", "Wer schrieb den Faust? Ünglaublich!"])
    stdout = capsys.readouterr().out
    assert "Wer schrieb den Faust?" in stdout
    for name in ("D2F", "autoregressive twin", "vanilla sampler"):
        assert f"[{name}]" in stdout
    assert "tokens per forward" in stdout and "times as fast" in stdout


@pytest.mark.slow
def test_the_demo_says_what_makes_missing_models(tmp_path):
    done = run_script("demo.py", "--models", tmp_path)
    assert done.returncode == 1
    assert "make reference-model" in done.stderr and "Traceback" not in done.stderr


def test_the_models_run_the_code_of_the_exported_folder(untrained_models):
    """They had to be loaded before d2f_hf was imported, because its classes were taken otherwise."""
    models = load(untrained_models, "float32")
    for model in (models.student, models.teacher):
        assert type(model).__module__.startswith("transformers_modules."), "and d2f_hf is imported here"
        for part in (type(model.config), type(model.generation_config), model.sampler_class):
            assert part.__module__.rpartition(".")[0] == type(model).__module__.rpartition(".")[0]
    assert isinstance(models.twin, LlamaForCausalLM)
    inputs = models.prompt("How many pens is that?")
    assert models.student.generate(**inputs, max_new_tokens=4).shape[1] <= inputs["input_ids"].shape[1] + 4


@pytest.mark.slow
def test_one_command_writes_a_folder_that_loads_without_the_package(untrained_models, tmp_path):
    done = run_script("reference_models.py", "--models", untrained_models, "--output", tmp_path / "my-d2f-model")
    assert done.returncode == 0, done.stderr
    assert "FutureWarning" not in done.stderr
    script = (
        "import sys; sys.modules['d2f_hf'] = None\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "print(model.generate(**tokenizer('pens', return_tensors='pt'), max_new_tokens=4).shape[0])\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", script, str(tmp_path / "my-d2f-model")]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "1\n", done.stderr


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
    sequences = student.generate(**inputs, max_new_tokens=SCORING_LENGTH)
    answers = tokenizer.batch_decode(sequences[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert score(answers, asked) >= 80


def test_the_teacher_starts_as_the_twin():
    """With a causal mask its logits are the twin's."""
    teacher = train.teacher_from_twin(train.load_tokenizer()).eval()
    twin = LlamaForCausalLM.from_pretrained(EXAMPLE / "twin", dtype=torch.float32).eval()
    input_ids = torch.randint(10, 900, (2, 24), generator=torch.Generator().manual_seed(0))
    causal = torch.ones(2, 1, 24, 24, dtype=torch.bool).tril()
    with torch.no_grad():
        expected = twin(input_ids).logits
        torch.testing.assert_close(teacher(input_ids, attention_mask=causal).logits, expected, atol=1e-4, rtol=0)

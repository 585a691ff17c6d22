"""README and docs: their code runs, their commands, links, names and figures are there, and their prose is wrapped.

The Python blocks of a document run in order and share one namespace, in a folder that has `examples` and, as after
`make model`, `my-d2f-model`. Hub ids become small checkpoints of the same layout, see `CHECKPOINTS`.
"""

import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
from d2f_hf.modeling.generation_config_d2f import OPTIONS
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM, TrainingArguments

import cli_runs
import d2f_hf
import reference_models
from causal_models import stock_model
from d2f_cli.main import COMMANDS
from d2f_hf import D2FTrainingArguments
from golden_data import GOLDEN
from word_problems import make_problems

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "reference_model"
README = ROOT / "README.md"
DOCUMENTS = [README, *sorted((ROOT / "docs").rglob("*.md"))]
WRAPPED = [*DOCUMENTS, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
WIDTH = 120

# What stands in for a Hub id: a folder of `golden/`, recorded from the reference implementation.
CHECKPOINTS = {
    "GSAI-ML/LLaDA-8B-Instruct": "llada_tiny",
    "SJTU-Deng-Lab/D2F_LLaDA_Instruct_8B_Lora": "llada_adapter",
    "Dream-org/Dream-v0-Base-7B": "dream_tiny",
    "SJTU-Deng-Lab/D2F_Dream_Base_7B_Lora": "dream_adapter",
}
# Commands of the documents that take a few seconds.
QUICK_COMMANDS = ("python -m benchmarks.figures",)

by_name = {"ids": lambda path: str(path.relative_to(ROOT))}


class Block(NamedTuple):
    language: str
    line: int  # of the document, where its code begins
    code: str


def blocks(path: Path, *languages: str) -> list[Block]:
    """The fenced blocks of a document in one of the languages."""
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    text = path.read_text()
    all_blocks = [Block(match[1], text.count("\n", 0, match.start(2)), match[2]) for match in found]
    return [block for block in all_blocks if block.language in languages]


def prose(path: Path) -> str:
    """A document without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


# ---- code ----


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    """What `make model` writes."""
    folder = tmp_path_factory.mktemp("model") / "my-d2f-model"
    reference_models.export(EXAMPLE, folder)
    return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """Folders by Hub id. The models have a tokenizer, so that it can be saved with them."""
    top = tmp_path_factory.mktemp("checkpoints")
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE / "tokenizer")
    folders = {}
    for hub_id, name in CHECKPOINTS.items():
        folders[hub_id] = shutil.copytree(GOLDEN / name, top / name)
        if name.endswith("_tiny"):
            tokenizer.save_pretrained(folders[hub_id])
    # An autoregressive checkpoint: transformers' own class with random weights.
    stock_model(Qwen3Config, Qwen3ForCausalLM, head_dim=12, vocab_size=len(tokenizer)).save_pretrained(top / "qwen3")
    tokenizer.save_pretrained(top / "qwen3")
    return {**folders, "Qwen/Qwen3-0.6B": top / "qwen3"}


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if blocks(path, "python")], **by_name)
def test_python_blocks_run_in_order(path, model_folder, checkpoints, tmp_path, monkeypatch):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    shutil.copytree(model_folder, tmp_path / "my-d2f-model")
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "__main__"}
    for block in blocks(path, "python"):
        code = block.code
        for hub_id, folder in checkpoints.items():
            code = code.replace(f'"{hub_id}"', f'"{folder}"')
        # Empty lines before it, so that a traceback names the line of the document.
        exec(compile("\n" * block.line + code, str(path), "exec"), namespace)


def loading_a_folder() -> list[tuple[Path, str]]:
    """The first block of each document that loads `my-d2f-model`."""
    first = [(path, blocks(path, "python")[0].code) for path in DOCUMENTS if blocks(path, "python")]
    return [(path, code) for path, code in first if "my-d2f-model" in code]


@pytest.mark.parametrize("path, code", loading_a_folder(), ids=lambda value: getattr(value, "name", ""))
def test_a_folder_is_loaded_without_this_package_and_without_a_question(path, code, model_folder, tmp_path):
    """The tokenizer was loaded without `trust_remote_code`, and transformers asked whether to run the custom code.

    Where `d2f_hf` is imported, as in the other tests, it does not ask.
    """
    shutil.copytree(model_folder, tmp_path / "my-d2f-model")
    script = f"import sys\nsys.modules['d2f_hf'] = None  # importing it now raises\n{code}"
    run = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert "custom code" not in run.stdout + run.stderr
    if path == README:
        assert "#### 65" in run.stdout and "What is the number" not in run.stdout, "the response without the prompt"


def test_the_code_of_the_readme_is_short():
    generating, _, distilling = (block.code.splitlines() for block in blocks(README, "python"))
    assert len([line for line in generating if line]) <= 8
    assert len([line for line in distilling if line]) <= 9


# ---- commands ----


def commands() -> list[tuple[Path, str]]:
    """Each line of the blocks of commands, and each command in the prose that begins with `make` or `python`."""
    found = []
    for path in DOCUMENTS:
        lines = [line for block in blocks(path, "", "bash", "sh") for line in block.code.splitlines()]
        inline = re.findall(r"`((?:make|python) [^`\n]+)`", prose(path))
        found += [(path, command) for line in [*lines, *inline] if (command := line.partition("#")[0].strip())]
    return found


def test_make_targets_are_there():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = {command.split()[1] for _, command in commands() if command.startswith("make")}
    assert {"demo", "model", "bench"} <= named <= targets, f"no target {sorted(named - targets)}"


def test_scripts_are_there_and_have_the_options():
    checked = set()
    for path, command in commands():
        words = command.split()
        if words[0] != "python":
            continue
        is_module = words[1] == "-m"
        script = ROOT / (words[2].replace(".", "/") + ".py" if is_module else words[1])
        assert script.is_file(), f"{path.name}: {command}: there is no {script.relative_to(ROOT)}"
        for option in (word.partition("=")[0] for word in words if word.startswith("--")):
            assert f'"{option}"' in script.read_text(), f"{path.name}: {command}: {script.name} has no {option}"
        checked.add(script.name)
    assert "figures.py" in checked


def test_what_pip_installs_is_there():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installed = [command for _, command in commands() if command.startswith("pip install")]
    assert len(installed) >= 2
    for command in installed:
        for names in re.findall(r"\[(.*?)\]", command):
            assert set(names.split(",")) <= extras.keys(), command


def test_quick_commands_run():
    quick = {command for _, command in commands() if command.startswith(QUICK_COMMANDS)}
    assert quick
    for command in quick:
        run = subprocess.run(
            [sys.executable, *command.split()[1:]],
            cwd=ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, f"{command}: {run.stderr}"


def test_d2f_commands_run_in_order(tmp_path, monkeypatch):
    """Those of docs/cli.md, in a folder with a file of prompts and the YAML block as config.yaml."""
    path = ROOT / "docs" / "cli.md"
    problems = make_problems("train", 8)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p.question}) + "\n" for p in problems))
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"messages": p.messages}) + "\n" for p in problems))
    (config,) = blocks(path, "yaml")
    (tmp_path / "config.yaml").write_text(config.code + "use_cpu: true\n")
    monkeypatch.chdir(tmp_path)
    lines = [line for block in blocks(path, "bash") for line in block.code.splitlines()]
    run = set()
    for line in lines:
        said, _, command = line.rpartition(" | ")
        words = shlex.split(command)
        assert words[0] == "d2f"
        result = cli_runs.d2f(*words[1:], input=" ".join(shlex.split(said)[1:]) or None)
        assert result.exit_code == 0, f"{line}: {result.output}"
        run.add(words[1])
    assert run == set(COMMANDS)
    for name in ("answers.jsonl", "report.json", "curve.svg", "curve.png", "timeline.svg", "my-published-model"):
        assert (tmp_path / name).exists(), name


def test_cli_md_has_a_section_for_each_command():
    headings = re.findall(r"^## d2f (\w+)$", (ROOT / "docs" / "cli.md").read_text(), flags=re.MULTILINE)
    assert sorted(headings) == sorted(COMMANDS)


# ---- what is named ----


@pytest.mark.parametrize("path", DOCUMENTS, **by_name)
def test_links_and_files_are_there(path):
    text = prose(path)
    links = {link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link}
    for link in links - {""}:
        assert (path.parent / link).exists(), f"{path.name} links to {link}"
    for link in re.findall(r"\]\(#([^)\s]+)\)", text):
        headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
        assert link in anchors, f"{path.name} links to #{link}"
    if path.name == "log.md" or path.parent.name == "benchmarks":
        return  # these tell of files as they were
    for name in re.findall(r"`((?:modeling|src|examples|benchmarks|tests|docs)/[\w./-]*)`", text):
        assert (ROOT / name).exists(), f"{path.name} names {name}"


def test_the_names_in_paper_to_code_are_in_the_files_beside_them():
    rows = [line.split(" | ") for line in (ROOT / "docs" / "paper_to_code.md").read_text().splitlines()]
    checked = 0
    for row in rows:
        if len(row) != 3 or ".py`" not in row[1]:
            continue
        files = [ROOT / name for name in re.findall(r"`([\w/.]+\.py)`", row[1])]
        text = "\n".join(file.read_text() for file in files)
        for name in re.findall(r"`([\w.]+)`", row[2]):
            for part in name.split("."):
                assert re.search(rf"\b{part}\b", text), f"{row[0]}: no {part} in {[file.name for file in files]}"
                checked += 1
    assert checked > 30


def test_generation_md_has_each_option_with_its_default():
    text = (ROOT / "docs" / "generation.md").read_text()
    experimental = text.partition("## Experimental options")[2]
    told = {
        name: [cell.strip() for cell in line.strip("| ").split(" | ")][1:]
        for line in reversed(text.splitlines())  # the first table has the defaults
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split(" | ")[0])
    }
    assert OPTIONS.keys() <= told.keys()
    for name, option in OPTIONS.items():
        if option.default is not None:
            assert told[name][0].strip("`").replace('"', "") == str(option.default), name
    for name in re.findall(r"^\| (`.*?) \|", experimental, flags=re.MULTILINE):
        assert name not in README.read_text(), f"{name} is experimental"


def test_training_md_has_each_argument():
    own = set(D2FTrainingArguments.__dataclass_fields__) - set(TrainingArguments.__dataclass_fields__)
    text = (ROOT / "docs" / "training.md").read_text()
    assert own and own <= set(re.findall(r"`(\w+)`", text))


def test_what_is_said_to_be_public_exists():
    assert "d2f_hf.__all__" in (ROOT / "docs" / "generation.md").read_text()
    for path in DOCUMENTS:
        for block in blocks(path, "python"):
            for names in re.findall(r"^from d2f_hf import (.*)$", block.code, flags=re.MULTILINE):
                assert set(names.split(", ")) <= set(d2f_hf.__all__), f"{path.name}: {names}"


# ---- figures and form ----


def median_of(name: str) -> float:
    """The median over the committed reports that have the figure."""
    reports = [json.loads(path.read_text()) for path in sorted((EXAMPLE / "reports").glob("run*.json"))]
    return statistics.median(f["value"] for report in reports for f in report["figures"] if f["name"] == name)


def table_of_the_readme() -> list[str]:
    """The rows as the reports have them."""
    behind = median_of("engine: D2F score less Fast-dLLM, dual cache score, points")
    over_fast_dllm = median_of("engine: D2F tokens/s over Fast-dLLM, dual cache tokens/s, median over problems")
    over_twin = median_of("D2F tokens/s over twin tokens/s")
    over_vanilla = median_of("D2F tokens/s over vanilla tokens/s at length 256")
    right = {"twin": median_of("twin score, %"), "D2F": median_of("D2F student score, %")}
    right["teacher"] = median_of("teacher score, % (vanilla, one token per step)")
    per_second = {name: f"{median_of(f'{name} tokens/s'):,.0f}" for name in ("D2F", "twin")}
    per_second["teacher"] = f"{median_of('vanilla tokens/s at length 256'):,.0f}"
    per_forward = f"{median_of('D2F tokens per forward'):.1f}"
    twin, fast_dllm, vanilla = (
        "autoregressive model, `generate` of transformers",
        "its diffusion teacher, Fast-dLLM with dual cache",
        "its diffusion teacher, original sampler",
    )
    cells = [
        ["**D2F student**", f"{right['D2F']:.1f} %", per_second["D2F"], per_forward, ""],
        [twin, f"{right['twin']:.1f} %", per_second["twin"], "1", f"{over_twin:.1f} times as fast"],
        [fast_dllm, f"{behind:.1f} points fewer than D2F", "", "", f"{over_fast_dllm:.1f} times as fast"],
        [vanilla, f"{right['teacher']:.1f} %", per_second["teacher"], "1", f"{over_vanilla:.0f} times as fast"],
    ]
    return ["| " + " | ".join(row) + " |" for row in cells]


def test_the_table_of_the_readme_is_that_of_the_committed_reports():
    text = README.read_text()
    expected = "\n".join(table_of_the_readme())
    assert expected in text, f"README.md must have these rows:\n{expected}"
    rows = text.partition("## How fast")[2].partition("## ")[0]
    assert len([line for line in rows.splitlines() if line.startswith("|")]) - 2 <= 6


def test_the_readme_is_read_in_a_minute():
    assert len(README.read_text()) <= 6500


@pytest.mark.parametrize("path", WRAPPED, **by_name)
def test_prose_is_wrapped(path):
    """Tables and what cannot be broken, such as an address, may be longer."""
    long = [line for line in prose(path).splitlines()
            if len(line) > WIDTH and not line.startswith("|") and " " in line.strip("- ")]  # fmt: skip
    assert long == []

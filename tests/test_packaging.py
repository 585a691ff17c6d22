"""What is built and published: the wheel, the sdist, the imports of the remote code, the versions, the Makefile."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import transformers
from transformers.integrations.peft import MIN_PEFT_VERSION

import d2f_hf

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MODELING_FILES = sorted((ROOT / "modeling").glob("*.py"))


def files_of_the_package() -> set[str]:
    """The paths that a wheel must hold, besides its metadata."""
    in_src = {f"d2f_hf/{path.name}" for path in (ROOT / "src" / "d2f_hf").glob("*.py")}
    in_src |= {f"d2f_cli/{path.name}" for path in (ROOT / "src" / "d2f_cli").glob("*.py")}
    in_modeling = {f"d2f_hf/modeling/{path.name}" for path in MODELING_FILES}
    return in_src | in_modeling | {"d2f_hf/py.typed"}


def wheel_files(wheel: Path) -> set[str]:
    """The paths in `wheel`, without its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def build(kind: str, source: Path, out: Path) -> Path:
    """The sdist or wheel built from `source` by the setuptools that is installed here, without the network."""
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, cwd=source, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def source_tree(tmp_path_factory) -> Path:
    """A copy of what the build reads, so that no build output lands in the repository or comes from it."""
    tree = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    for folder in ("src", "modeling"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    return tree


@pytest.fixture(scope="module")
def wheel(source_tree, tmp_path_factory) -> Path:
    return build("wheel", source_tree, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(source_tree, tmp_path_factory) -> Path:
    return build("sdist", source_tree, tmp_path_factory.mktemp("sdist"))


def test_packages_lists_every_folder_with_code():
    setuptools_options = PYPROJECT["tool"]["setuptools"]
    folders = {path.parent for top in ("src", "modeling") for path in (ROOT / top).rglob("*.py")}
    assert setuptools_options["packages"] == list(setuptools_options["package-dir"])
    assert {ROOT / folder for folder in setuptools_options["package-dir"].values()} == folders
    assert all((folder / "__init__.py").is_file() for folder in folders)


def test_wheel_holds_the_package_and_nothing_else(wheel):
    assert wheel_files(wheel) == files_of_the_package()


def test_wheel_built_from_the_sdist_equals_the_wheel_built_from_the_tree(sdist, wheel, tmp_path):
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
        if hasattr(tarfile, "data_filter"):
            archive.extractall(tmp_path, filter="data")
        else:
            archive.extractall(tmp_path)
    assert not [name for name in names if name.endswith("ruff.toml")]
    (unpacked,) = tmp_path.iterdir()
    again = build("wheel", unpacked, tmp_path / "wheel")
    with zipfile.ZipFile(again) as first, zipfile.ZipFile(wheel) as second:
        assert set(first.namelist()) == set(second.namelist())
        for name in wheel_files(wheel):
            assert first.read(name) == second.read(name), name


def test_wheel_metadata_names_the_license_and_the_extras(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (metadata_name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = archive.read(metadata_name).decode()
        entry_points = archive.read(metadata_name.replace("METADATA", "entry_points.txt")).decode()
    assert "[console_scripts]\nd2f = d2f_cli.main:main\n" in entry_points
    assert "License-Expression: Apache-2.0\n" in metadata
    assert "License-File: LICENSE\n" in metadata
    base = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", metadata, flags=re.MULTILINE)
    assert sorted(base) == ["huggingface-hub", "safetensors", "torch", "transformers"]
    assert re.findall(r"^Provides-Extra: (.*)$", metadata, flags=re.MULTILINE) == ["train", "cli", "dev"]


@pytest.mark.slow
def test_every_module_imports_from_the_wheel_alone(wheel, tmp_path):
    """In a process outside the repository, and never from the editable install that the tests themselves use."""
    installed = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(installed)]
    subprocess.run([*pip, str(wheel)], check=True, cwd=tmp_path)
    modules = sorted(
        name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for name in wheel_files(wheel)
        if name.endswith(".py") and not name.endswith("__main__.py")
    )
    script = (
        "import importlib, pathlib, sys\n"
        "installed = pathlib.Path(sys.argv[1]).resolve()\n"
        "for name in sys.argv[2:]:\n"
        "    module = importlib.import_module(name)\n"
        "    assert pathlib.Path(str(module.__file__)).resolve().is_relative_to(installed), module\n"
        "for name, module in sys.modules.items():\n"
        "    if name.split('.')[0] == 'd2f_hf':\n"
        "        assert pathlib.Path(str(module.__file__)).resolve().is_relative_to(installed), module\n"
        "print(len(sys.argv) - 2)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", script, str(installed), *modules]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(modules) > 0


def test_generation_needs_neither_peft_nor_accelerate_nor_datasets():
    script = (
        "import sys\n"
        "for name in ('peft', 'accelerate', 'datasets'):\n"
        "    sys.modules[name] = None  # importing it now raises\n"
        "import d2f_hf, d2f_hf.modeling, d2f_hf.benchmarking\n"
        "try:\n"
        "    d2f_hf.D2FTrainer\n"
        "except ImportError as error:\n"
        "    assert 'd2f-hf[train]' in str(error), error\n"
        "else:\n"
        "    raise AssertionError('imported without peft')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def forbidden_imports(source: str, siblings: set[str]) -> list[str]:
    """The imports in `source` that remote code may not have, as `line: import`, wherever in the file they stand."""
    allowed = {"torch", "transformers", *sys.stdlib_module_names}
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            if any(alias.name.split(".")[0] not in allowed for alias in node.names):
                found.append(f"{node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            # transformers finds siblings by `from .sibling import`: not `from . import sibling`, not a folder below.
            ok = module in siblings if node.level == 1 else node.level == 0 and module.split(".")[0] in allowed
            if not ok:
                found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("path", MODELING_FILES, ids=lambda path: path.name)
def test_remote_code_imports_only_torch_transformers_and_siblings(path):
    siblings = {other.stem for other in MODELING_FILES} - {"__init__"}
    assert forbidden_imports(path.read_text(), siblings) == []


def test_the_import_rule_sees_functions_and_try_blocks():
    source = """
import math, torch
from transformers.cache_utils import Cache
from .block_causal import a
import numpy as np
from . import block_causal
from ..elsewhere import b
from .folder.file import c
def f():
    try:
        from peft import d
    except ImportError:
        import modeling.block_causal
"""
    found = forbidden_imports(source, {"block_causal"})
    assert [int(line.split(":")[0]) for line in found] == [5, 6, 7, 8, 11, 13]


def test_ruff_fences_the_remote_code_folder():
    ruff = shutil.which("ruff", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    assert ruff is not None, "ruff belongs to the extra [dev]"
    source = "import peft\nimport torch\nfrom d2f_hf import x\n\nprint(peft, torch, x)\n"
    command = [ruff, "check", "--no-cache", "--output-format", "concise", "--stdin-filename"]
    outside, inside = (
        subprocess.run([*command, f"{folder}/new.py", "-"], input=source, cwd=ROOT, capture_output=True, text=True)
        for folder in ("src/d2f_hf", "modeling")
    )
    assert outside.stdout.count("TID251") == 0
    assert inside.stdout.count("TID251") == 2, inside.stdout + inside.stderr


def pinned_versions(file_name: str) -> dict[str, str]:
    lines = [line.split("#")[0].strip() for line in (ROOT / file_name).read_text().splitlines()]
    return {name.lower().replace("_", "-"): version for name, version in (line.split("==") for line in lines if line)}


def lower_bounds() -> dict[str, str]:
    """What [project] asks for at least, of the base install, [train] and [cli]."""
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"], *extras["train"], *extras["cli"]]
    bounds = {}
    for requirement in requirements:
        match = re.fullmatch(r"([\w-]+)>=([\d.]+)(?:,<\d+)?", requirement)
        assert match, requirement
        bounds[match[1]] = match[2]
    return bounds


def test_the_pinned_peft_is_enough_for_the_pinned_transformers():
    """transformers 5.24.0 asked for a peft that there was not, so `model.add_adapter` failed with the pins."""
    for file in ("constraints.txt", "constraints-floor.txt"):
        pinned = pinned_versions(file)
        if pinned["transformers"] == transformers.__version__:  # only the one that is installed says what it needs
            assert as_numbers(pinned["peft"]) >= as_numbers(MIN_PEFT_VERSION), file


def test_the_version_is_that_of_the_package(wheel, sdist):
    assert PYPROJECT["project"]["dynamic"] == ["version"] and "version" not in PYPROJECT["project"]
    assert wheel.name.startswith(f"d2f_hf-{d2f_hf.__version__}-")
    assert sdist.name == f"d2f_hf-{d2f_hf.__version__}.tar.gz"


def test_the_oldest_python_that_is_claimed_is_the_one_of_ci():
    """Python 3.10 was claimed and never run."""
    oldest = PYPROJECT["project"]["requires-python"].removeprefix(">=")
    assert f"oldest=python{oldest}\n" in (ROOT / ".ci" / "run").read_text()
    assert PYPROJECT["tool"]["ruff"]["target-version"] == f"py{oldest.replace('.', '')}"
    assert PYPROJECT["tool"]["pyright"]["pythonVersion"] == oldest
    assert f"Python {oldest} or newer" in (ROOT / "CONTRIBUTING.md").read_text()


def as_numbers(version: str) -> list[int]:
    numbers = [int(part) for part in version.split(".")]
    return numbers + [0] * (3 - len(numbers))


def test_constraints_pin_every_requirement_at_or_above_its_lower_bound():
    pinned = pinned_versions("constraints.txt")
    for name, bound in lower_bounds().items():
        assert as_numbers(pinned[name]) >= as_numbers(bound), name
    for requirement in PYPROJECT["project"]["optional-dependencies"]["dev"]:
        assert re.split(r"[^\w-]", requirement)[0] in pinned, requirement


def test_floor_constraints_are_the_lower_bounds():
    """torch alone is the same in both environments: its lower bound is the one that transformers has."""
    floor, bounds = pinned_versions("constraints-floor.txt"), lower_bounds()
    assert floor.pop("torch") == pinned_versions("constraints.txt")["torch"]
    del bounds["torch"]
    assert {name: as_numbers(version) for name, version in floor.items()} == {
        name: as_numbers(bound) for name, bound in bounds.items()
    }


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("through", ["argument", "environment"])
def test_make_demo_passes_the_question_on_as_it_was_typed(through, tmp_path):
    """`make` and the shell both like to expand what they are given: "$5" must not become ""."""
    question = """-Ann's 3 "big" bags cost $5 each; `echo no` $(echo no) \\ #1 & 100%?"""
    recorder = tmp_path / "python"
    recorder.write_text(f'#!{sys.executable}\nimport sys\nprint("\\n".join(sys.argv[1:]))\n')
    recorder.chmod(0o755)
    command = ["make", "--silent", "--old-file=.venv/.installed", f"BIN={tmp_path}", "demo"]
    environment = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    if through == "argument":
        command.append(f"QUESTION={question}")
    else:
        environment["QUESTION"] = question
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["examples/reference_model/demo.py", f"--question={question}"]

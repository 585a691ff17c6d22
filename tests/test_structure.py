"""How the code is laid out: test files, lengths, who may import and call whom, and what a default device may change.

Each rule is read off the source, so a failure says which line to change. An exception that is listed and no longer
needed fails too.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from torch import nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

ROOT = Path(__file__).resolve().parents[1]
MODELING = sorted((ROOT / "modeling").glob("*.py"))
PACKAGE = sorted((ROOT / "src" / "d2f_hf").glob("*.py"))
COMMANDS = sorted((ROOT / "src" / "d2f_cli").glob("*.py"))
MAX_LINES = 450

# From the bottom up. A file imports from lower floors only, so the walk from `generate` to a token goes downwards.
FLOORS = (
    ("acceptance_rules", "block_causal", "block_grid", "cache_d2f", "draft_adapter", "generation_options"),
    ("configuration_d2f", "decoding_loop", "decoding_rules", "generation_output"),
    (
        "attention_d2f",
        "configuration_d2f_dream",
        "configuration_d2f_llada",
        "configuration_d2f_llama",
        "configuration_d2f_qwen3",
        "generation_config_d2f",
    ),
    ("generate_arguments", "response", "window_forward"),
    ("logits_process_d2f",),
    ("gradient_mode", "sampler"),
    ("token_acceptance",),
    ("pipelined_decoding", "vanilla_decoding"),
    (
        "autoregressive_decoding",
        "fast_dllm_decoding",
        "lookahead_decoding",
        "stream_requests",
        "verified_decoding",
    ),
    ("stream_decoding", "two_model_decoding"),
    ("decoding_modes",),
    ("generation_d2f",),
    ("modeling_d2f",),
    ("decoder_layer",),
    ("modeling_d2f_dream", "modeling_d2f_llada", "modeling_d2f_llama", "modeling_d2f_qwen3"),
    ("__init__",),
)
LOOPS = sorted((ROOT / "modeling").glob("*_decoding.py"))
# What the first exports is held by test_public_api.py and test_packaging.py; the second is a line of test_cli_main.py.
WITHOUT_TEST_FILE = {"__init__", "__main__"}

# Private names of modeling/ that are used outside it. It may get shorter, not longer.
PRIVATE_NAMES_USED: dict[str, set[str]] = {}

FACTORIES = (
    *("arange", "empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randint", "randn", "randperm"),
    *("scalar_tensor", "tensor", "zeros"),
)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def where(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"  # type: ignore[attr-defined]


def siblings_imported(path: Path) -> dict[str, int]:
    """The files of modeling/ that a file of it imports, with the line."""
    return {
        (node.module or "").split(".")[0]: node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.level == 1
    }


@pytest.mark.parametrize("path", [*MODELING, *PACKAGE], ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_source_file_has_its_test_file(path):
    if path.stem not in WITHOUT_TEST_FILE:
        assert (ROOT / "tests" / f"test_{path.stem}.py").is_file(), f"{path.name} needs tests/test_{path.stem}.py"


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.name)
def test_every_file_of_the_command_line_has_its_test_file(path):
    if path.stem not in WITHOUT_TEST_FILE:
        assert (ROOT / "tests" / f"test_cli_{path.stem}.py").is_file(), f"{path.name} needs a test file"


@pytest.mark.parametrize("path", MODELING, ids=lambda path: path.name)
def test_no_file_that_goes_into_checkpoints_is_long(path):
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_LINES, f"{path.name} has {lines} lines, more than {MAX_LINES}: it does more than one job"


@pytest.mark.parametrize("path", MODELING, ids=lambda path: path.name)
def test_imports_go_down(path):
    floor = {name: i for i, names in enumerate(FLOORS) for name in names}
    assert path.stem in floor, f"give {path.name} its floor in FLOORS"
    up = [
        f"{path.name}:{line}: imports {name}, which is not below it"
        for name, line in siblings_imported(path).items()
        if floor.get(name, len(FLOORS)) >= floor[path.stem]
    ]
    assert not up, "\n".join(up)


def test_floors_name_files_that_are_there():
    names = [name for names in FLOORS for name in names]
    assert len(names) == len(set(names))
    assert set(names) == {path.stem for path in MODELING}


def foreign_private_attributes(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Private attributes of anything but `self`, `cls` and `super()`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            owner = node.value
            is_own = isinstance(owner, ast.Name) and owner.id in ("self", "cls")
            is_base = isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name) and owner.func.id == "super"
            if not (is_own or is_base):
                yield node


@pytest.mark.parametrize("path", LOOPS, ids=lambda path: path.name)
def test_decoding_loops_use_no_private_name_of_others(path):
    """They once called back up into the model: `model._predict`, `model._block_size`."""
    found = [where(path, node) for node in foreign_private_attributes(ast.parse(path.read_text()))]
    assert not found, "hand it in, or make it public:\n" + "\n".join(found)


@cache
def private_names_of_modeling() -> set[str]:
    """Private names that modeling/ defines and that are not transformers' or torch's."""
    found = set()
    for path in MODELING:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    bases = (GenerationMixin, GenerationConfig(), PreTrainedConfig(), PreTrainedModel, Cache, nn.Module())
    found -= {"_original_object_hash"}  # of a GenerationConfig that was loaded
    return {name for name in found if is_private(name) and not any(hasattr(base, name) for base in bases)}


def private_names_used(tree: ast.AST, private: set[str]) -> set[str]:
    """Those of `private` that a file reads, imports or patches, unless they are its own."""
    own, used = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            own.add(node.attr)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not is_own:
                used.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("d2f_hf.modeling"):
            imported = {alias.name for alias in node.names}
            used |= imported
            own -= imported
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
            used |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
            own -= used & private
    return (used & private) - own


def files_outside_modeling() -> list[Path]:
    folders = ("src", "benchmarks", "examples", "tests")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", files_outside_modeling(), ids=lambda path: str(path.relative_to(ROOT)))
def test_private_names_of_modeling_stay_inside(path):
    name = str(path.relative_to(ROOT))
    used = private_names_used(ast.parse(path.read_text()), private_names_of_modeling())
    more = used - PRIVATE_NAMES_USED.get(name, set())
    assert not more, f"{name} uses {sorted(more)}, private in modeling/. Use or make a public name."
    fewer = PRIVATE_NAMES_USED.get(name, set()) - used
    assert not fewer, f"{name} no longer uses {sorted(fewer)}: take it out of PRIVATE_NAMES_USED"


def test_private_names_used_names_files_that_are_there():
    assert all((ROOT / name).is_file() for name in PRIVATE_NAMES_USED)


def test_the_rule_about_private_names_sees_reads_imports_and_patches():
    source = """
from d2f_hf.modeling.cache_d2f import _a

def f(model, monkeypatch):
    model._b()
    monkeypatch.setattr(model, "_c", None)
    model.public._d = 1
    self._e
    own._g

def _g(): ...
"""
    private = {"_a", "_b", "_c", "_d", "_e", "_g", "_never"}
    assert private_names_used(ast.parse(source), private) == {"_a", "_b", "_c", "_d"}


def tensors_without_device(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls that make a tensor wherever the default device is; those that make a parameter do so on purpose."""
    parameters = {
        id(argument)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("nn.Parameter", "torch.nn.Parameter")
        for argument in node.args
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or id(node) in parameters:
            continue
        is_factory = (
            isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "torch"
            and node.func.attr in FACTORIES
        )
        if is_factory and not any(keyword.arg in ("device", None) for keyword in node.keywords):
            yield node


@pytest.mark.parametrize("path", [*MODELING, *PACKAGE], ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_new_tensor_says_its_device(path):
    """With `torch.set_default_device("cuda")` the loop's state on the host once landed elsewhere."""
    found = [where(path, node) for node in tensors_without_device(ast.parse(path.read_text()))]
    assert not found, 'give `device=`, on the host `device="cpu"`:\n' + "\n".join(found)


def test_the_rule_about_devices_sees_what_it_should():
    source = """
a = torch.arange(3)
b = torch.zeros(3, device=x.device)
c = nn.Parameter(torch.ones(3))
d = torch.zeros_like(a)
e = f(torch.tensor([1]))
g = torch.full((), 1, **options)
"""
    assert [node.lineno for node in tensors_without_device(ast.parse(source))] == [2, 6]

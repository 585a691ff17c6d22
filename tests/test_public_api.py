"""What is public: the names of `d2f_hf` and `d2f_hf.modeling` with their signatures, and the options of `generate`.

`public_api.json` is what users rely on. After a change on purpose, write it anew and put the change into CHANGELOG.md:

    python tests/test_public_api.py --write
"""

import inspect
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig, PreTrainedConfig, TrainingArguments

import d2f_hf
from d2f_hf import modeling

SNAPSHOT = Path(__file__).with_name("public_api.json")
HOW_TO_RENEW = "If this is on purpose, run `python tests/test_public_api.py --write` and say so in CHANGELOG.md."


def parameters(function: Any) -> list[str]:
    """`name` of a parameter that must be given, `name=default` of others, `*` before those by keyword only."""
    found, by_keyword = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not by_keyword:
            found.append("*")
        by_keyword = parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        found.append(f"{prefix}{parameter.name}{default}")
    return found


def is_ours(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).split(".")[0] == "d2f_hf"


def options_of(config_class: type, base: type) -> dict[str, Any]:
    """The fields that a configuration adds to those of transformers, with their defaults as text."""
    if issubclass(base, GenerationConfig):
        ours, theirs = vars(config_class().with_defaults()), vars(base())
        return {name: repr(ours[name]) for name in sorted(set(ours) - set(theirs)) if not name.startswith("_")}
    theirs = {field.name for field in fields(base)}
    return {
        field.name: repr(field.default)
        for field in sorted(fields(config_class), key=lambda field: field.name)
        if field.name not in theirs
    }


def description(value: Any) -> Any:
    """A function's parameters; a class's own fields, or parameters of its making, and those of its public methods."""
    if not inspect.isclass(value):
        return parameters(value) if callable(value) else type(value).__name__
    methods = {
        name: parameters(inspect.unwrap(member))
        for name, member in inspect.getmembers(value, inspect.isroutine)
        # What is inherited from transformers and torch is theirs to change.
        if not name.startswith("_") and is_ours(inspect.unwrap(member))
    }
    result: dict[str, Any] = {"methods": methods} if methods else {}
    for base in (PreTrainedConfig, GenerationConfig, TrainingArguments):
        if issubclass(value, base):
            return {"options": options_of(value, base), **result}
    return {"parameters": parameters(value), **result}


def public_api() -> dict[str, Any]:
    return {
        module.__name__: {
            name: description(getattr(module, name)) for name in sorted(module.__all__) if name != "__version__"
        }
        for module in (d2f_hf, modeling)
    }


@pytest.mark.parametrize("module", [d2f_hf, modeling], ids=lambda module: module.__name__)
def test_the_public_api_is_the_one_that_was_agreed(module):
    expected = json.loads(SNAPSHOT.read_text())[module.__name__]
    found = json.loads(json.dumps(public_api()[module.__name__]))
    assert sorted(found) == sorted(expected), HOW_TO_RENEW
    for name, what in expected.items():
        assert found[name] == what, f"{module.__name__}.{name}: {HOW_TO_RENEW}"


@pytest.mark.parametrize("module", [d2f_hf, modeling], ids=lambda module: module.__name__)
def test_all_names_are_sorted_and_there_and_say_what_they_are(module):
    assert list(module.__all__) == sorted(module.__all__)
    for name in set(module.__all__) - {"__version__"}:
        assert inspect.getdoc(getattr(module, name)), f"{name} needs a docstring"


def test_a_new_option_of_generate_changes_the_snapshot():
    class Config(d2f_hf.D2FGenerationConfig):
        def __init__(self, **kwargs):
            self.new_option = kwargs.pop("new_option", None)
            super().__init__(**kwargs)

    more = set(options_of(Config, GenerationConfig)) - set(options_of(d2f_hf.D2FGenerationConfig, GenerationConfig))
    assert more == {"new_option"}
    assert "confidence_threshold" in options_of(d2f_hf.D2FGenerationConfig, GenerationConfig)


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(f"usage: python {sys.argv[0]} --write")
    SNAPSHOT.write_text(json.dumps(public_api(), indent=1) + "\n")
    print(f"written: {SNAPSHOT}")

"""The options of `generate` as flags. Those of D2F come from their declarations in `D2FGenerationConfig`."""

import functools
import inspect
import re
from collections.abc import Callable
from typing import Annotated, Any, get_args

import typer
from d2f_hf.modeling.generation_config_d2f import OPTIONS, check_values

from d2f_cli.console import wrong_call
from d2f_hf import D2FGenerationConfig

# Those of transformers that are flags too.
OF_TRANSFORMERS = {
    "max_new_tokens": (int, "Most tokens of a response (256 by default)."),
    "min_new_tokens": (int, "Tokens of a response before it may end."),
    "do_sample": (bool, "Draw tokens rather than taking the most probable ones."),
    "temperature": (float, "Of sampling: higher is more random."),
    "top_k": (int, "Of sampling: among so many of the most probable tokens."),
    "top_p": (float, "Of sampling: among the most probable tokens that have this probability together."),
    "repetition_penalty": (float, "Above 1: tokens that were there already become less probable."),
    "stop_strings": (list[str], "Text that ends a response. Can be given several times."),
    "seed": (int, "Makes sampling repeatable."),
}
# A trace is what `--trace` writes.
NOT_A_FLAG = ("output_trace",)


def flags() -> dict[str, tuple[Any, str]]:
    """Type and help of each flag, by the name of its option."""
    declared = inspect.get_annotations(D2FGenerationConfig)
    told = first_sentences(D2FGenerationConfig.__doc__ or "")
    ours = {}
    for name, option in OPTIONS.items():
        if name not in NOT_A_FLAG:
            (kind, *_) = [kind for kind in get_args(get_args(declared[name])[0]) if kind is not type(None)]
            ours[name] = (kind, f"{told[name]} Must be {option.check.must_be}.")
    return {**OF_TRANSFORMERS, **ours}


def first_sentences(docstring: str) -> dict[str, str]:
    """The first sentence about each argument of a docstring in the style of transformers."""
    found = {}
    for names, text in re.findall(r"^ {8}(\w[\w, ]*) \(`[^)]*\):(.*?)(?=^ {0,8}\S|\Z)", docstring, re.DOTALL | re.M):
        # "tau_conf." alone says too little.
        sentence = re.match(r".{12,}?\.(?=\s|$)", " ".join(text.split()))[0].replace("`", "")
        for name in names.split(","):
            found[name.strip()] = sentence[:1].upper() + sentence[1:]
    return found


def takes_decoding_flags(command: Callable) -> Callable:
    """A command with a flag for each option; those that are given are its argument `options`, and are checked."""
    known = flags()

    @functools.wraps(command)
    def wrapper(**values):
        options = {name: value for name in known if (value := values.pop(name)) not in (None, [])}
        try:
            check_values({name: value for name, value in options.items() if name != "seed"})
            if "decoding" in options:  # otherwise the model says
                ours = {name: value for name, value in options.items() if name in OPTIONS}
                D2FGenerationConfig(**ours).refuse_keywords(ours)
        except ValueError as error:
            raise wrong_call(str(error)) from error
        return command(**values, options=options)

    own = [p for p in inspect.signature(command).parameters.values() if p.name != "options"]
    added = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[kind | None, typer.Option(help=text, show_default=False)],
        )
        for name, (kind, text) in known.items()
    ]
    own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
    wrapper.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in [*own, *added]}
    return wrapper

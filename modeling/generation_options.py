"""How one option of `generate` is declared: what it must be, by default, and who does not use it."""

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch


class Check(NamedTuple):
    """What a value must be, in words and as a function. `None` says nothing and is not asked about."""

    must_be: str
    is_met_by: Callable[[Any], bool]


class Option(NamedTuple):
    """How one parameter of `generate` is filled in, checked and refused.

    Args:
        check (`Check`): What a value must be.
        not_used_by (`dict[str, str]`): The values of `decoding` that do not use it, and what they have in its place.
            A parameter with a default is refused as a keyword only: in a config it may be for another decoding.
        default (`Any`): The value where nobody says anything.
    """

    check: Check
    not_used_by: Mapping[str, str] = {}
    default: Any = None


def is_integer(value: Any) -> bool:
    """Whether a value is an integer of Python or numpy; True and False are not."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and not math.isnan(value)


def _is_token_id_or_several(value: Any) -> bool:
    values = value.flatten().tolist() if isinstance(value, torch.Tensor) else value
    values = values if isinstance(values, (list, tuple)) else [values]
    return len(values) > 0 and all(is_integer(token_id) for token_id in values)


def one_of(*values: str) -> Check:
    return Check(f"one of {values}", lambda value: isinstance(value, str) and value in values)


def integer_from(smallest: int) -> Check:
    return Check(f"an integer of at least {smallest}", lambda value: is_integer(value) and value >= smallest)


def left_out(*neutral: Any) -> Check:
    must_be = "left out (no value of `decoding` supports it)"
    return Check(must_be, lambda value: isinstance(value, (bool, int, float)) and value in neutral)


SHARE = Check("a number in [0, 1]", lambda value: is_number(value) and 0.0 <= value <= 1.0)
AMOUNT = Check("a finite number of at least 0", lambda value: is_number(value) and 0.0 <= value < math.inf)
FROM_ZERO = Check("a number of at least 0", lambda value: is_number(value) and value >= 0.0)
FINITE = Check("a finite number", lambda value: is_number(value) and math.isfinite(value))
TRUE_OR_FALSE = Check("True or False", lambda value: isinstance(value, bool))
TOKEN_IDS = Check("a token id or a list of token ids, which are integers", _is_token_id_or_several)

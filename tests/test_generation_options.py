"""How an option of `generate` is declared."""

import numpy as np
import pytest
import torch
from d2f_hf.modeling.generation_options import SHARE, TOKEN_IDS, integer_from, is_integer, left_out, one_of


@pytest.mark.parametrize(
    "check, good, bad",
    [
        (one_of("a", "b"), ["a"], ["c", 1, ["a"]]),
        (integer_from(2), [2, np.int64(3)], [1, 2.0, True, "2"]),
        (SHARE, [0, 1, 0.5, np.float32(0.5)], [-0.1, 1.1, float("nan"), True, "0.5"]),
        (TOKEN_IDS, [1, [1, 2], torch.tensor([1, 2])], [[], [1.0], "1", True]),
        (left_out(0, False), [0, False], [1, "0", [0]]),
    ],
)
def test_a_check_takes_what_it_says_and_nothing_else(check, good, bad):
    assert all(check.is_met_by(value) for value in good)
    assert not any(check.is_met_by(value) for value in bad)


def test_true_is_no_integer():
    assert is_integer(1) and not is_integer(True)

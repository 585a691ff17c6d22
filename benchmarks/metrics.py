"""How good a way of decoding is when speed and score are looked at together."""

import math
from collections.abc import Sequence


def accuracy_under_parallelism(
    points: Sequence[tuple[float, float]],
    best_accuracy: float | None = None,
    alpha: float = 3.0,
    tolerance: float = 5.0,
) -> float:
    """AUP, the weighted area under the curve of accuracy over tokens per forward, as d3LLM (hao-ai-lab) defines it.

    With the points sorted by tokens per forward, `rho_1 < rho_2 < ...`, and without those whose accuracy lies more
    than `tolerance` below that of the first one, `y_1`:

    ```text
    AUP = rho_1 * y_1 + sum over i >= 2 of (rho_i - rho_(i-1)) * (y_i * W(y_i) + y_(i-1) * W(y_(i-1))) / 2
    W(y) = min(exp(-alpha * (1 - y / best_accuracy)), 1)
    ```

    So a method whose accuracy does not fall gets the plain area, and accuracy that is lost for speed counts less and
    less. Departure: their code refuses points whose fastest one has fallen below the tolerance; here it is left out
    as their definition says.

    Args:
        points (`Sequence[tuple[float, float]]`): Tokens per forward and accuracy, in percent, of one method at several
            settings. Of those with the same tokens per forward the most accurate one counts.
        best_accuracy (`float`, *optional*): The highest accuracy of any method on this task, in percent; by default
            that of these points. Methods can be compared only by the same one.
        alpha (`float`): How much lost accuracy is punished.
        tolerance (`float`): Points of accuracy that may be lost.

    Returns:
        `float`: AUP, in tokens per forward times percent.

    Raises:
        ValueError: without points, or for a number that is out of its range.
    """
    if not points:
        raise ValueError("`points` must hold at least one point, got none. Measure at least one setting.")
    for tokens_per_forward, accuracy in points:
        if not 0 < tokens_per_forward < math.inf:
            raise ValueError(f"`points` must have tokens per forward above 0, got {tokens_per_forward}.")
        if not 0 <= accuracy <= 100:
            raise ValueError(f"`points` must have accuracies in [0, 100], in percent, got {accuracy}.")
    if best_accuracy is None:
        # Where all are 0 any other number would do: nothing has a weight.
        best_accuracy = max(accuracy for _, accuracy in points) or 100.0
    if not 0 < best_accuracy <= 100:
        raise ValueError(f"`best_accuracy` must be in (0, 100], in percent, got {best_accuracy}.")
    for name, value in (("alpha", alpha), ("tolerance", tolerance)):
        if not 0 <= value < math.inf:
            raise ValueError(f"`{name}` must be a finite number of at least 0, got {value}.")

    most_accurate: dict[float, float] = {}
    for tokens_per_forward, accuracy in points:
        most_accurate[tokens_per_forward] = max(accuracy, most_accurate.get(tokens_per_forward, 0.0))
    curve = sorted(most_accurate.items())
    first_accuracy = curve[0][1]
    curve = [(rho, y) for rho, y in curve if y >= first_accuracy - tolerance]
    weighted = [y * min(math.exp(-alpha * (1 - y / best_accuracy)), 1.0) for _, y in curve]
    area = curve[0][0] * first_accuracy
    for i in range(1, len(curve)):
        area += (curve[i][0] - curve[i - 1][0]) * (weighted[i] + weighted[i - 1]) / 2
    return area


def compute_weighted_tokens_per_forward(num_tokens: int, num_forward_passes: int, num_branches: float = 1) -> float:
    """Response tokens / (forwards x branches): tokens per forward where a forward that reads more rows costs more.

    Without look-ahead it is the tokens per forward. With it, it says what is gained when the hardware is busy; the
    tokens per forward say what is gained when further rows cost nothing.

    Args:
        num_tokens (`int`): Response tokens up to and including the EOS.
        num_forward_passes (`int`): Forwards.
        num_branches (`float`): Rows that each forward reads for one prompt, the anchor included; the mean over the
            forwards if it varies.

    Raises:
        ValueError: for a number that is out of its range.
    """
    if num_tokens < 0:
        raise ValueError(f"`num_tokens` must be at least 0, got {num_tokens}.")
    if num_forward_passes < 1:
        raise ValueError(f"`num_forward_passes` must be at least 1, got {num_forward_passes}: tokens need a forward.")
    if not 1 <= num_branches < math.inf:
        raise ValueError(f"`num_branches` must be at least 1, got {num_branches}. 1 is the anchor alone.")
    return num_tokens / (num_forward_passes * num_branches)

"""The arithmetic of accuracy under parallelism and of compute-weighted tokens per forward."""

import math
import random

import pytest

from benchmarks.metrics import accuracy_under_parallelism, compute_weighted_tokens_per_forward


def test_one_point_is_tokens_per_forward_times_accuracy():
    assert accuracy_under_parallelism([(2.5, 80.0)]) == 200.0
    assert accuracy_under_parallelism([(2.5, 80.0)], best_accuracy=90.0) == 200.0, "the first term has no weight"


def test_without_lost_accuracy_it_is_the_area_under_the_curve():
    assert accuracy_under_parallelism([(1.0, 70.0), (3.0, 70.0), (4.0, 70.0)]) == pytest.approx(4 * 70)
    assert accuracy_under_parallelism([(4.0, 70.0), (1.0, 70.0)], alpha=100.0) == pytest.approx(4 * 70)


def test_lost_accuracy_weighs_less():
    """W(76) is exp(-3 * (1 - 76 / 80)) = 0.8607, so the area of the second step is 2 * (76 * 0.8607 + 80) / 2."""
    weighted = 76 * math.exp(-0.15)
    assert weighted == pytest.approx(65.41, abs=0.01)
    assert accuracy_under_parallelism([(1.0, 80.0), (3.0, 76.0)]) == pytest.approx(80 + weighted + 80)


def test_the_best_accuracy_of_all_methods_is_the_measure():
    weight = math.exp(-3 * (1 - 80 / 100))
    expected = 80 + (3 - 1) * 80 * weight
    assert accuracy_under_parallelism([(1.0, 80.0), (3.0, 80.0)], best_accuracy=100.0) == pytest.approx(expected)
    # A weight is 1 at most, even where these points are better than the best one known.
    assert accuracy_under_parallelism([(1.0, 80.0), (3.0, 80.0)], best_accuracy=60.0) == pytest.approx(3 * 80)


def test_points_too_far_below_the_first_one_are_left_out():
    kept = [(1.0, 80.0), (2.0, 75.0)]
    expected = accuracy_under_parallelism(kept)
    assert accuracy_under_parallelism([*kept, (5.0, 74.9)]) == expected
    assert accuracy_under_parallelism([*kept, (1.5, 20.0)]) == expected, "from the middle too"
    assert accuracy_under_parallelism([*kept, (5.0, 74.9)], tolerance=6.0) > expected
    # The first point is the slowest one, however accurate; it is never left out.
    rising = 60 + (60 * math.exp(-0.75) + 80) / 2
    assert accuracy_under_parallelism([(1.0, 60.0), (2.0, 80.0)]) == pytest.approx(rising)


def test_of_equal_tokens_per_forward_the_most_accurate_counts():
    expected = accuracy_under_parallelism([(1.0, 80.0), (3.0, 78.0)])
    for points in ([(1.0, 79.0), (1.0, 80.0), (3.0, 78.0), (3.0, 77.0)], [(3.0, 78.0), (1.0, 80.0)] * 2):
        assert accuracy_under_parallelism(points) == expected


def test_nothing_right_is_worth_nothing():
    assert accuracy_under_parallelism([(1.0, 0.0), (9.0, 0.0)]) == 0.0
    assert accuracy_under_parallelism([(1.0, 0.0), (9.0, 0.0)], best_accuracy=50.0) == 0.0


def test_a_faster_or_a_more_accurate_point_never_lowers_it():
    generator = random.Random(0)
    for _ in range(200):
        points = sorted((generator.uniform(1, 9), generator.uniform(70, 74)) for _ in range(4))
        area = accuracy_under_parallelism(points, best_accuracy=80.0)
        assert accuracy_under_parallelism([*points, (10.0, 72.0)], best_accuracy=80.0) > area
        better = [*points[:-1], (points[-1][0], points[-1][1] + 1)]
        assert accuracy_under_parallelism(better, best_accuracy=80.0) > area
        assert area <= points[-1][0] * 74


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"points": []}, "`points` must hold"),
        ({"points": [(0.0, 50.0)]}, "`points`.*tokens per forward"),
        ({"points": [(math.inf, 50.0)]}, "`points`.*tokens per forward"),
        ({"points": [(math.nan, 50.0)]}, "`points`.*tokens per forward"),
        ({"points": [(1.0, 101.0)]}, "`points`.*percent"),
        ({"points": [(1.0, -1.0)]}, "`points`.*percent"),
        ({"points": [(1.0, math.nan)]}, "`points`.*percent"),
        ({"points": [(1.0, 50.0)], "best_accuracy": 0.0}, "`best_accuracy`"),
        ({"points": [(1.0, 50.0)], "best_accuracy": 101.0}, "`best_accuracy`"),
        ({"points": [(1.0, 50.0)], "alpha": -1.0}, "`alpha`"),
        ({"points": [(1.0, 50.0)], "tolerance": math.nan}, "`tolerance`"),
    ],
)
def test_bad_points_and_numbers_are_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        accuracy_under_parallelism(**arguments)


def test_branches_count_as_forwards():
    assert compute_weighted_tokens_per_forward(60, 10) == 6.0
    assert compute_weighted_tokens_per_forward(60, 10, num_branches=4) == 1.5
    assert compute_weighted_tokens_per_forward(60, 10, num_branches=2.5) == 2.4
    assert compute_weighted_tokens_per_forward(0, 1) == 0.0


@pytest.mark.parametrize(
    ("arguments", "name"),
    [((-1, 1), "num_tokens"), ((1, 0), "num_forward_passes"), ((1, 1, 0.5), "num_branches")],
)
def test_numbers_out_of_range_are_errors(arguments, name):
    with pytest.raises(ValueError, match=f"`{name}`"):
        compute_weighted_tokens_per_forward(*arguments)

"""The forward of this checkout against that of another one."""

import json
from pathlib import Path

from benchmarks import forward

ROOT = Path(__file__).parents[1]


def test_a_checkout_is_compared_with_itself(capsys):
    """The last line is one JSON object, with a time per forward for each checkout and their ratio."""
    forward.main(
        [str(ROOT), "--size", "5m", "--dtypes", "float32", "--problems", "1", "--turns", "2", "--threads", "1"]
    )
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    here, there = report["forward"]["float32"]["ms"]
    assert here > 0 and there > 0 and report["forward"]["float32"]["turns"] == 2
    assert report["forward"]["float32"]["forwards"] > 1 and report["model"] == "5m"

"""Scripts that measure D2F decoding and state the figures against their targets. They are not in the wheel.

Run each as a module from the root of the repository; its docstring has the options:

    python -m benchmarks.decoding --targets --compile    # all that has a target (make bench)
    python -m benchmarks.decoding --engine 100m          # the decoding loop alone (make bench-engine)
    python -m benchmarks.reference                       # scores and speed of the reference models
    python -m benchmarks.curve                           # score against speed, as curve.csv and curve.png
    python -m benchmarks.samplers                        # D2F's acceptance rules compared
    python -m benchmarks.forward /path/to/another        # the model's forward against that of another checkout
    python -m benchmarks.check_gpu                       # tests and timings that need a GPU
    python -m benchmarks.figures report.json ...         # reports of several runs as Markdown tables

`figures.py` is how each of them states a figure, prints a table and ends with one JSON object. They measure with
`d2f_hf.benchmarking`, `scripted.py`, `engine.py`, `memory.py`, `stages.py` and `metrics.py`.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The reference models and their word problems are examples, which are scripts: they import each other by their names.
sys.path.insert(0, str(ROOT / "examples" / "reference_model"))

"""Checks and times everything that needs a GPU, on one card: the tests marked `gpu`, then the decoding loop.

    python -m benchmarks.check_gpu

The loop runs on random weights of a 100M and of an 8B model at batch 1 and 16, as it is and with compiled steps (CUDA
graphs). All has to be done within `--minutes`, eight by default; what takes longer is stopped. Prints the tables of
`decoding.py` and, as its last line on stdout, one JSON object
`{"figures": [...], "tests_passed": ..., "environment": {...}}`. Ends with an error where a test fails, and without a
GPU, where there are no figures.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence

import torch

from benchmarks import ROOT

SIZES = ("100m", "8b")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=8.0, help="for all of it")
    args = parser.parse_args(arguments)
    if args.minutes <= 0:
        parser.error(f"--minutes must be more than 0, got {args.minutes}: leave it out for eight")
    if not torch.cuda.is_available():
        sys.exit("No CUDA device was found, so there is nothing to check and no figure to give.")
    deadline = time.perf_counter() + 60 * args.minutes
    tests = run([sys.executable, "-m", "pytest", "-m", "gpu", "-q"], deadline)
    report = {"figures": [], "tests_passed": tests.returncode == 0}
    for size in SIZES:
        options = ["--device", "cuda", "--batch-sizes", "1", "16", "--repetitions", "3", "--compile"]
        done = run([sys.executable, "-m", "benchmarks.decoding", "--engine", size, *options], deadline)
        if done.returncode:
            sys.exit(f"benchmarks.decoding --engine {size} ended with {done.returncode}.")
        of_size = json.loads(done.stdout.splitlines()[-1])
        report["figures"] += of_size["figures"]
        report["environment"] = of_size["environment"]
    print(json.dumps(report))
    if not report["tests_passed"]:
        sys.exit("Tests that need a GPU failed.")


def run(command: list[str], deadline: float) -> subprocess.CompletedProcess:
    """Runs a command of the repository until the deadline, and shows what it prints."""
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            timeout=max(1.0, deadline - time.perf_counter()),
        )
    except subprocess.TimeoutExpired:
        sys.exit(f"The time is up; {' '.join(command[1:])} was not finished. Give more --minutes.")
    print(done.stdout)
    return done


if __name__ == "__main__":
    main()

"""Checks and times everything that needs a GPU, in less than eight minutes on one card.

    python examples/check_gpu.py

Runs the tests marked `gpu`, then times the decoding loop on random weights: a 100M and an 8B model at batch 1 and 16,
as it is and with compiled steps (CUDA graphs). Prints the tables of `benchmark_decoding.py` and, as its last line on
stdout, one JSON object. Without a GPU it says so and gives no figures.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import torch

HERE = Path(__file__).parent
MODELS = (("100m", "1 16"), ("8b", "1 16"))


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("No CUDA device was found, so there is nothing to check and no figure to give.")
    start = time.perf_counter()
    tests = subprocess.run([sys.executable, "-m", "pytest", "-m", "gpu", "-q"], cwd=HERE.parent)
    report = {"tests_passed": tests.returncode == 0, "figures": []}
    for size, batch_sizes in MODELS:
        for compiled in (False, True):
            command = [
                sys.executable, str(HERE / "benchmark_decoding.py"), "--engine", size, "--device", "cuda",
                "--batch-sizes", *batch_sizes.split(), "--repetitions", "3", *(["--compile"] if compiled else []),
            ]  # fmt: skip
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            print(done.stdout)
            if done.returncode:
                sys.exit(f"{' '.join(command[1:])} failed with {done.returncode}.")
            report["figures"] += json.loads(done.stdout.splitlines()[-1])["figures"]
    report["minutes"] = round((time.perf_counter() - start) / 60, 1)
    print(json.dumps(report))


if __name__ == "__main__":
    main()

"""Local calibration of three fits, and its price next to that of the fit: python -m benchmarks.calibration [poisson queue monotone]

Rows go to benchmarks/results/calibration.jsonl, the coverage curves to docs/pictures/coverage_*.png.
"""

import argparse
import json
from pathlib import Path
import time

from jax import random
import matplotlib.pyplot as plt
import numpy as np

from benchmarks.common import fitted
from numpyro_sls import calibrate, plots
from numpyro_sls.models import monotone, queue
from tests.cases import CASES

RESULTS = Path("benchmarks/results/calibration.jsonl")
TASKS = {
    "poisson": lambda: (CASES["poisson"].model, CASES["poisson"].simulate(random.key(100), 1000), {}),
    "queue": lambda: (queue.model, (queue.simulate_data(random.key(100)),), queue.SETTINGS),
    "monotone": lambda: (monotone.model, (monotone.simulate_data(random.key(100)),), {**monotone.SETTINGS, "target": "implicit"}),
}
LEVELS = np.array([0.5, 0.8, 0.95])


def main() -> None:
    """Fit, calibrate, and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", default=list(TASKS))
    parser.add_argument("--repetitions", type=int, default=200)
    options = parser.parse_args()
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    for task in options.tasks:
        model, args, settings = TASKS[task]()
        fit, cost = fitted(model, random.key(0), *args, **settings)
        start = time.perf_counter()
        found = calibrate(fit, random.key(1), num_repetitions=options.repetitions)
        seconds = time.perf_counter() - start
        row = {
            "task": task,
            "fit seconds": cost["seconds"],
            "calibration seconds": seconds,
            "dropped": found.num_dropped,
            "coverage": found.coverage(LEVELS).tolist(),
            "band": np.stack(found.band(LEVELS)).tolist(),
            "p": found.p_values.tolist(),
            "tarp": found.tarp(random.key(2), LEVELS).tolist(),
        }
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(task, row, found, sep="\n", flush=True)
        figure, axis = plt.subplots(figsize=(3.8, 3.6), layout="constrained")
        plots.calibration(found, axis)
        figure.savefig(f"docs/pictures/coverage_{task}.png", dpi=90)


if __name__ == "__main__":
    main()

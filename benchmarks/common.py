"""What the experiments share: options, a fit with what it cost, draws, distances, and rows that say where they were made."""

import argparse
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
import json
import os
from pathlib import Path
import platform
import resource
import subprocess
import time
from typing import Any
import warnings

from jax import random
import numpy as np
from numpyro.infer import MCMC

from numpyro_sls import SLS, SLSFit, SLSLangevin
from numpyro_sls.metrics import w1

__all__ = ["RESULTS", "covered", "distances", "fitted", "options", "rows", "sampled", "save"]

RESULTS = Path("benchmarks/results")


def options(description: str | None, full: int, reduced: int, **more: Any) -> argparse.Namespace:
    """--full runs as many repetitions as the table in the docs asks for; without it a few, to see that all is well."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--full", action="store_true", help=f"{full} repetitions instead of {reduced}")
    parser.add_argument("--repetitions", type=int, default=None)
    parser.add_argument("--first", type=int, default=0, help="number of the first repetition")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="where the reference data lie")
    for name, default in more.items():
        parser.add_argument(f"--{name}", default=default, nargs="*" if isinstance(default, list) else None, type=_type_of(default))
    found = parser.parse_args()
    if found.repetitions is None:
        found.repetitions = full if found.full else reduced
    return found


def _type_of(default: Any) -> Callable:
    return type(default[0]) if isinstance(default, list) else type(default)


def fitted(model: Callable, rng_key, *args, **settings) -> tuple[SLSFit, dict]:
    """A fit without its warnings, and what it cost."""
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit = SLS(model, **settings).run(rng_key, *args, progress_bar=False)
    units = sum(s.num for s in fit.simulations.values())
    cost = {
        "seconds": time.perf_counter() - start,
        "stages": fit.seconds,
        "units": units,
        "data sets": units / fit.units.num_units,
        "warned": [str(w.message)[:80] for w in caught if "trusted" in str(w.message)],
    }
    return fit, cost


def sampled(fit: SLSFit, *args, num_samples: int = 1000, num_chains: int = 8, **settings) -> tuple[dict[str, np.ndarray], float]:
    """Posterior draws and the share outside the region."""
    kernel = SLSLangevin(fit, **settings)
    mcmc = MCMC(kernel, num_warmup=500, num_samples=num_samples, num_chains=num_chains, chain_method="vectorized", progress_bar=False)
    mcmc.run(random.key(1), *args)
    return {k: np.asarray(v) for k, v in mcmc.get_samples().items()}, float(mcmc.get_extra_fields()["diverging"].mean())


def distances(ours: np.ndarray, exact: np.ndarray) -> dict[str, list[float]]:
    """W1, shift and ratio of sds of every marginal, in exact sds."""
    sd = exact.std(0)
    return {
        "w1": w1(ours, exact).tolist(),
        "shift": ((ours.mean(0) - exact.mean(0)) / sd).tolist(),
        "sd_ratio": (ours.std(0) / sd).tolist(),
    }


def covered(draws: np.ndarray, truth: np.ndarray) -> dict[str, list]:
    """Width of the 95 % interval, absolute error of the mean, and whether the interval holds the truth, by column."""
    low, high = np.quantile(draws, [0.025, 0.975], axis=0)
    return {
        "width": (high - low).tolist(),
        "error": np.abs(draws.mean(0) - truth).tolist(),
        "covered": ((low <= truth) & (truth <= high)).tolist(),
    }


def save(task: str, **row) -> None:
    """Append a row to the task's results, with where it was made, and show it."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    with (RESULTS / f"{task}.jsonl").open("a") as file:
        file.write(json.dumps({**row, "made": _made()}) + "\n")
    print(task, row, flush=True)


def rows(task: str) -> list[dict]:
    """What was saved of a task, later rows last."""
    path = RESULTS / f"{task}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


PACKAGES = ("numpyro-sls", "numpyro", "jax", "flax", "optax", "sbi", "torch")


def _made() -> dict:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "date": date.today().isoformat(),
        "commit": commit,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "versions": {k: version(k) for k in PACKAGES if _installed(k)},
        "peak megabytes": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
    }


def _installed(package: str) -> bool:
    try:
        version(package)
    except ModuleNotFoundError:
        return False
    return True

"""Localization from the prior on the paper's models, and its proposals compared, each against what is known exactly.

python -m benchmarks.localization [monotone gnk mrna queue epidemic proposals] [--data ../shared/data]
"""

import argparse
import json
from pathlib import Path
import time
from typing import Any
import warnings

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC

from numpyro_sls import SLS, FromRestarts, Localization, SLSLangevin, WorthUnits
from numpyro_sls.localization import Localized, localize
from numpyro_sls.models import epidemic, gnk, monotone, mrna, queue
from numpyro_sls.preparation import prior_moments, smoothed
from tests.cases import CASES, compare, exact_samples

RESULTS = Path("benchmarks/results/localization.jsonl")
GRID = jnp.linspace(0, 1, 21)


def restarts(model, x, settings: Localization | None = None, **kwargs) -> tuple[Localized, dict, dict, float]:
    """Localize alone: the result, centre and restarts in the parameters' own space, and seconds."""
    sls = SLS(model, **kwargs)
    units, smoothing = sls.units_of((x,), {})
    start = time.perf_counter()
    observed = smoothed(units.observed(), smoothing, units)[: units.num_units]
    found, _ = localize(random.key(1), units, observed, prior_moments(random.key(0), units), settings or Localization())
    seconds = time.perf_counter() - start
    print(found)
    constrain = units.parameters.constrain
    return found, constrain(found.centre), jax.vmap(constrain)(jnp.asarray(found.thetas)), seconds


def cost(found: Localized, seconds: float) -> dict:
    """What localization spent and kept."""
    return {
        "restarts": len(found.thetas),
        "dropped": len(found.dropped),
        "modes": len(found.modes),
        "data sets": found.num_simulated / found.num_units,
        "seconds": seconds,
    }


def run_monotone(options) -> None:
    """Largest deviation of a restart's curve from the exact posterior's, in its sds, over 21 points."""
    basis = monotone.features(GRID).T
    for seed in range(3):
        xy = monotone.simulate_data(random.key(1 + seed))
        exact = monotone.exact_posterior(random.key(2), xy) @ basis
        for settings in (Localization(), Localization(num_starts=100)):
            found, centre, params, seconds = restarts(monotone.model, xy, settings)
            deviation = np.abs((params["theta"] @ basis - exact.mean(0)) / exact.std(0))
            at_centre = np.abs((centre["theta"] @ basis - exact.mean(0)) / exact.std(0))
            save("monotone", seed=seed, worst=float(deviation.max()), centre=float(at_centre.max()), **cost(found, seconds))


def run_gnk(options) -> None:
    """Centre of localization and of the training proposal, in exact posterior sds."""
    x = jnp.asarray(np.genfromtxt(options.data / "gnk/fx_log_returns_1.csv", delimiter=",", dtype=np.float32).ravel())
    x = x[jnp.isfinite(x)]
    exact = np.load(options.data / "gnk/exact_posterior_1.npz")["posterior"]
    for seed in range(2):
        start = time.perf_counter()
        fit = SLS(gnk.model).run(random.key(seed), x, progress_bar=False)
        seconds = time.perf_counter() - start
        off = {}
        for name, theta in {"localization": fit.localization.centre, "proposal": fit.proposal.mean}.items():
            params = fit.units.parameters.constrain(theta)
            off[name] = ((np.array([params[k] for k in "abgk"]) - exact.mean(0)) / exact.std(0)).tolist()
        save("gnk", seed=seed, **off, **cost(fit.localization, seconds))


def run_queue(options) -> None:
    """M/G/1 from the prior, against the exact posteriors."""
    file = np.load(options.data / "mg1/exact_posteriors.npz")
    for i, (x, exact) in enumerate(zip(file["x"], file["posterior"], strict=True)):
        found, centre, params, seconds = restarts(queue.model, jnp.asarray(x, jnp.float32), **queue.SETTINGS)
        names = ("theta1", "theta2", "theta3")
        save(
            "queue",
            seed=i,
            centre=[float(centre[k]) for k in names],
            sd=[float(params[k].std()) for k in names],
            exact=exact.mean(0).tolist(),
            **cost(found, seconds),
        )


def run_mrna(options) -> None:
    """Twelve parameters, 200 cells at the truth: the ten identified combinations."""
    truth = mrna.identified(mrna.TRUTH)
    for seed in range(2):
        found, centre, params, seconds = restarts(mrna.model, mrna.simulate_data(random.key(1 + seed)))
        off = {k: float(v - truth[k]) for k, v in mrna.identified(centre).items()}
        save("mrna", seed=seed, off=off, sd={k: float(v.std()) for k, v in mrna.identified(params).items()}, **cost(found, seconds))


def run_epidemic(options) -> None:
    """Ten floors, the data set as one whole."""
    for seed in range(2):
        s = epidemic.simulate_data(random.key(1 + seed), 10)
        found, centre, params, seconds = restarts(epidemic.model, s, **epidemic.SETTINGS)
        off = np.asarray(centre["log_beta"]) - np.log(np.asarray(epidemic.TRUTH[10]))
        save("epidemic", seed=seed, off=off.tolist(), sd=np.asarray(params["log_beta"]).std(0).tolist(), **cost(found, seconds))


def run_proposals(options) -> None:
    """The paper's comparison, B = 100 and 30, diagonal and full, beside the default: posterior error on one model."""
    args, exact, model, names = _known(options.model)
    for num_starts in (100, 30):
        for proposal in (FromRestarts(diagonal=True), FromRestarts(diagonal=False), WorthUnits()):
            start = time.perf_counter()
            sls = SLS(model, localization=Localization(num_starts=num_starts), proposal=proposal, target=options.target)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                fit = sls.run(random.key(0), *args, progress_bar=False)
            mcmc = MCMC(SLSLangevin(fit), num_warmup=500, num_samples=1000, num_chains=8, chain_method="vectorized", progress_bar=False)
            mcmc.run(random.key(1), *args)
            ours = {k: np.asarray(v) for k, v in mcmc.get_samples().items() if k in names}
            distance = compare(ours, exact)
            ks = [_ks(a, b) for k in names for a, b in zip(_columns(ours[k]), _columns(exact[k]), strict=True)]
            save(
                "proposals",
                model=options.model,
                B=num_starts,
                proposal="worth kappa" if isinstance(proposal, WorthUnits) else "diagonal" if proposal.diagonal else "full",
                target=options.target,
                ks=float(np.mean(ks)),
                w1=float(np.mean(distance.w1)),
                warned=any("not to be trusted" in str(w.message) for w in caught),
                seconds=time.perf_counter() - start,
            )


def _known(name: str) -> tuple[tuple, dict, Any, list[str]]:
    if name == "monotone":
        xy = monotone.simulate_data(random.key(1))
        return (xy,), {"theta": np.asarray(monotone.exact_posterior(random.key(2), xy))}, monotone.model, ["theta"]
    case = CASES[name]
    args = case.simulate(random.key(100), case.n)
    exact = exact_samples(case, args)
    return args, exact, case.model, list(exact)


def _columns(draws: np.ndarray) -> np.ndarray:
    return draws.reshape(len(draws), -1).T


def _ks(a: np.ndarray, b: np.ndarray) -> float:
    points = np.sort(np.concatenate([a, b]))
    return float(
        np.abs(np.searchsorted(np.sort(a), points, "right") / len(a) - np.searchsorted(np.sort(b), points, "right") / len(b)).max()
    )


def save(task: str, **row: Any) -> None:
    """Print a row and keep it."""
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with RESULTS.open("a") as file:
        file.write(json.dumps({"task": task, **row}) + "\n")
    print(task, row, flush=True)


TASKS = {
    "monotone": run_monotone,
    "gnk": run_gnk,
    "mrna": run_mrna,
    "queue": run_queue,
    "epidemic": run_epidemic,
    "proposals": run_proposals,
}


def main() -> None:
    """Run the tasks that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", default=list(TASKS))
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with gnk/ and mg1/ of the reference data")
    parser.add_argument("--target", default="blend", help="of the proposals' comparison; the paper's is implicit")
    parser.add_argument(
        "--model", default="regression", help="of the proposals' comparison: a case of tests/cases.py, or monotone (the paper's)"
    )
    options = parser.parse_args()
    for task in options.tasks:
        TASKS[task](options)


if __name__ == "__main__":
    main()

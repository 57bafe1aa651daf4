"""The paper's experiments and two real data sets, against the exact posterior where it is known.

python -m benchmarks.experiments --tasks queue monotone gnk drift_diffusion epidemic mrna [--full] [--repetitions 2] [--first 3] [--variants ...]
"""

import argparse

from jax import random
import jax.numpy as jnp
import numpy as np

from benchmarks.common import covered, distances, fitted, options, sampled, save
from numpyro_sls import Training
from numpyro_sls.metrics import ks, w1
from numpyro_sls.models import drift_diffusion, epidemic, gnk, monotone, mrna, queue

GRID = jnp.linspace(0, 1, 101)
SITES = ("theta1", "theta2", "theta3")


def run_queue(found: argparse.Namespace) -> None:
    """Widths, errors and coverage: the five reference data sets first, then others, whose exact posterior is sampled here."""
    reference = np.load(found.data / "mg1/exact_posteriors.npz")
    truth = np.array([queue.TRUTH[k] for k in SITES])
    for i in range(found.first, found.first + found.repetitions):
        if i < len(reference["x"]):
            x, exact = jnp.asarray(reference["x"][i], jnp.float32), reference["posterior"][i]
        else:
            x = queue.simulate_data(random.key(100 + i))
            exact = np.asarray(queue.exact_posterior(random.key(2), x))
        for name, settings in {"single": queue.SETTINGS, "n-model, weight on theta1": queue.WHOLE}.items():
            if name not in found.variants:
                continue
            if found.simulations:
                settings, name = {**settings, "training": Training(num_simulations=found.simulations)}, f"{name}, {found.simulations:.0e}"
            fit, cost = fitted(queue.model, random.key(0), x, **settings)
            draws, outside = sampled(fit, x)
            ours = np.stack([draws[k] for k in SITES], axis=1)
            known = {f"exact {k}": v for k, v in covered(exact, truth).items()}
            save("queue", seed=i, variant=name, **covered(ours, truth), **known, **distances(ours, exact), outside=outside, **cost)


def run_monotone(found: argparse.Namespace) -> None:
    """The regression as a black box, against Gibbs: distances of the curve at 101 places, in its own units."""
    for seed in range(found.first, found.first + found.repetitions):
        xy = monotone.simulate_data(random.key(100 + seed))
        exact = np.asarray(monotone.exact_posterior(random.key(2), xy))
        settings = {**monotone.SETTINGS, "target": "implicit"}
        if found.simulations:
            settings["training"] = Training(num_simulations=found.simulations, num_per_theta=64)
        fit, cost = fitted(monotone.model, random.key(seed), xy, **settings)
        draws, outside = sampled(fit, xy, num_steps=16, num_chains=32)
        basis = np.asarray(monotone.features(GRID)).T
        ours, theirs = draws["theta"] @ basis, exact @ basis
        distance, true = w1(ours, theirs) * theirs.std(0), np.asarray(monotone.TRUTH["curve"](GRID))
        curve = {k: float(np.mean(v)) for k, v in covered(ours, true).items()}
        save("monotone", seed=seed, ks=float(ks(ours, theirs).mean()), w1=float(distance.mean()), **curve, outside=outside, **cost)


def run_gnk(found: argparse.Namespace) -> None:
    """W1 of every marginal on the real returns, in exact sds, with and without weights in x."""
    x = np.genfromtxt(found.data / "gnk/fx_log_returns_1.csv", delimiter=",", dtype=np.float32).ravel()
    x = jnp.asarray(x[np.isfinite(x)])
    exact = np.load(found.data / "gnk/exact_posterior_1.npz")["posterior"]
    for name, settings in {"single": gnk.SETTINGS, "no weights": {**gnk.SETTINGS, "focus": None}}.items():
        if name in found.variants:
            _against("gnk", found, gnk.model, x, exact, "abgk", name, settings)


def run_drift_diffusion(found: argparse.Namespace) -> None:
    """The same on the reaction times of one subject."""
    x = jnp.asarray(np.genfromtxt(found.data / "ddm/subject_0.csv", delimiter=",", skip_header=1, dtype=np.float32))
    exact = np.load(found.data / "ddm/exact_posterior_subject_0.npz")["posterior"]
    _against("drift_diffusion", found, drift_diffusion.model, x, exact, "vazt", "single", drift_diffusion.SETTINGS)


def _against(task: str, found: argparse.Namespace, model, x, exact: np.ndarray, names: str, variant: str, settings: dict) -> None:
    """Fit with several keys, sample, and save how far every marginal is from exact draws."""
    for seed in range(found.first, found.first + found.repetitions):
        fit, cost = fitted(model, random.key(seed), x, **settings)
        draws, outside = sampled(fit, x)
        ours = np.stack([draws[k] for k in names], axis=1)
        save(task, seed=seed, variant=variant, **distances(ours, exact), outside=outside, **cost)


PER_FIT = 10  # hospitals with five floors that one fit is used for


def run_epidemic(found: argparse.Namespace) -> None:
    """Widths, errors and coverage of the rates: five floors with one fit under the prior for ten hospitals, ten floors with a fit each."""
    for floors in found.floors:
        truth = np.asarray(epidemic.TRUTH[floors])
        for i in range(found.first, found.first + found.repetitions):
            s = epidemic.simulate_data(random.key(100 + i), floors)
            if floors != 5 or i == found.first or i % PER_FIT == 0:
                fit, cost = fitted(epidemic.model, random.key(i), s, **(epidemic.SETTINGS if floors == 5 else epidemic.TEN_FLOORS))
            draws, outside = sampled(fit, s)
            beta = np.exp(draws["log_beta"])
            quantiles = np.quantile(beta, [0.025, 0.5, 0.975], axis=0).tolist()
            save("epidemic", seed=i, floors=floors, quantiles=quantiles, **covered(beta, truth), outside=outside, **cost)


def run_mrna(found: argparse.Namespace) -> None:
    """Widths, errors and coverage of the ten identified combinations, 200 simulated cells."""
    truth = {k: float(v) for k, v in mrna.identified(mrna.TRUTH).items()}
    for i in range(found.first, found.first + found.repetitions):
        x = mrna.simulate_data(random.key(100 + i))
        settings = dict(mrna.SETTINGS)
        if found.simulations:
            settings["training"] = Training(num_simulations=found.simulations)
        fit, cost = fitted(mrna.model, random.key(i), x, **settings)
        draws, outside = sampled(fit, x)
        ours = np.stack([np.asarray(v) for v in mrna.identified(draws).values()], axis=1)
        save("mrna", seed=i, names=list(truth), **covered(ours, np.array(list(truth.values()))), outside=outside, **cost)


RUN = {
    "queue": run_queue,
    "monotone": run_monotone,
    "gnk": run_gnk,
    "drift_diffusion": run_drift_diffusion,
    "epidemic": run_epidemic,
    "mrna": run_mrna,
}


def main() -> None:
    """Run what was asked for."""
    found = options(__doc__, 20, 1, tasks=list(RUN), variants=["single"], simulations=0, floors=[5])
    for task in found.tasks:
        RUN[task](found)


if __name__ == "__main__":
    main()

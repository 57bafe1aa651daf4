"""Drift diffusion: what reaction times and choices say of how a decision was made.

    python examples/reaction_times.py [--data subject.csv] [--small] [--output examples/output]

The file has a header and two columns, reaction time in seconds and choice (0 or 1); the first subject of HDDM's example data is
one. Without a file the trials are simulated. The reaction time cannot be shorter than the parameter t, so the
support of the data moves with it; the posterior is compared with the exact one, by the series of the Wiener density.
"""

import argparse
from pathlib import Path
import time

import arviz as az
from jax import random
import jax.numpy as jnp
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from numpyro.infer import MCMC

from numpyro_sls import FromRestarts, SLSLangevin, Training, diagnose, plots, predict, to_arviz
from numpyro_sls.metrics import w1
from numpyro_sls.models import drift_diffusion

matplotlib.use("Agg")

NAMES = list(drift_diffusion.PRIOR)


def signed(trials: np.ndarray) -> np.ndarray:
    """Reaction times, negative for choice 0: how such data are usually drawn."""
    return np.where(trials[..., 1] > 0.5, trials[..., 0], -trials[..., 0])


def main() -> None:
    """Infer drift, separation, start and non-decision time."""
    parser = argparse.ArgumentParser(description="Simulation-based inference for drift diffusion.")
    parser.add_argument("--data", type=Path, default=None, help="a file of reaction times and choices")
    parser.add_argument("--small", action="store_true", help="few trials and simulations, to see that it runs")
    parser.add_argument("--output", type=Path, default=Path("examples/output"), help="folder for the pictures")
    options = parser.parse_args()
    settings = drift_diffusion.SETTINGS
    if options.small:
        settings = {**settings, "training": Training(num_simulations=60_000), "proposal": FromRestarts(widen=2.0)}

    if options.data is None:
        x = drift_diffusion.simulate_data(random.key(1), 100 if options.small else 298)
    else:
        x = jnp.asarray(np.genfromtxt(options.data, delimiter=",", skip_header=1, dtype=np.float32))
    start = time.perf_counter()
    kernel = SLSLangevin(drift_diffusion.model, **settings)
    mcmc = MCMC(kernel, num_warmup=500, num_samples=1000, num_chains=4, chain_method="vectorized")
    mcmc.run(random.key(0), x)
    print(f"fitted and sampled in {time.perf_counter() - start:.0f} s")
    print(az.summary(to_arviz(mcmc)))
    if not options.small:
        print(diagnose(mcmc.sampler.fit, random.key(3), mcmc=mcmc))

    exact = np.asarray(drift_diffusion.exact_posterior(random.key(2), x, num_samples=100 if options.small else 2000))
    ours = np.stack([mcmc.get_samples()[k] for k in NAMES], axis=1)
    print("W1 to the exact posterior, in its sds:", dict(zip(NAMES, np.round(w1(ours, exact), 2).tolist(), strict=True)))

    options.output.mkdir(parents=True, exist_ok=True)
    axes = plots.compare({"numpyro_sls": mcmc.get_samples(), "exact": dict(zip(NAMES, exact.T, strict=True))}, NAMES)
    axes[0].figure.savefig(options.output / "reaction_times.png", dpi=150)
    drawn, seen = signed(predict(mcmc, random.key(4), 100)["x"]), signed(np.asarray(x))
    edges = np.linspace(-1, 1, 61) * np.quantile(np.abs(seen), 0.99)
    figure, axis = plt.subplots(figsize=(5, 3), layout="constrained")
    counts = np.array([np.histogram(row, edges)[0] for row in drawn])
    axis.stairs(np.quantile(counts, 0.975, axis=0), edges, baseline=np.quantile(counts, 0.025, axis=0), fill=True, alpha=0.4, label="95 %")
    axis.stairs(np.histogram(seen, edges)[0], edges, color="k", label="data")
    axis.set(xlabel="reaction time, negative for choice 0", ylabel="trials")
    axis.legend(frameon=False)
    figure.savefig(options.output / "reaction_times_predictive.png", dpi=150)
    print("pictures:", options.output / "reaction_times.png", options.output / "reaction_times_predictive.png")


if __name__ == "__main__":
    main()

"""Monotonic regression as a black box: the curve, its band, and the same by Gibbs sampling.

    python examples/monotone_regression.py [--small] [--output examples/output]

Eleven coefficients, ten of them between 0 and 1 and most of those pushed against an end. The likelihood is an ordinary
normal one, so that the exact posterior is known; `target="implicit"` keeps the fit from looking at it. In full it
simulates 9 x 10^4 data sets of 1000 rows, which took 11 to 17 minutes on two cores that did other work too.
"""

import argparse
from pathlib import Path
import time

from jax import random
import jax.numpy as jnp
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from numpyro.infer import MCMC

from numpyro_sls import FromRestarts, SLSLangevin, Training
from numpyro_sls.metrics import ks, w1
from numpyro_sls.models import monotone

matplotlib.use("Agg")

GRID = jnp.linspace(0, 1, 101)


def band(axis, curves: np.ndarray, color: str, label: str) -> None:
    """The middle 95 % of posterior curves, less the true one."""
    low, high = np.quantile(curves - np.asarray(monotone.TRUTH["curve"](GRID)), [0.025, 0.975], axis=0)
    axis.fill_between(GRID, low, high, color=color, alpha=0.35, label=label)


def main() -> None:
    """Simulate rows of (x, y), infer the curve, and compare with Gibbs."""
    parser = argparse.ArgumentParser(description="Bayesian monotonic regression without its likelihood.")
    parser.add_argument("--small", action="store_true", help="few rows and simulations, to see that it runs")
    parser.add_argument("--output", type=Path, default=Path("examples/output"), help="folder for the picture")
    options = parser.parse_args()
    settings = {**monotone.SETTINGS, "target": "implicit"}
    if options.small:
        settings |= {"training": Training(num_simulations=60_000), "proposal": FromRestarts(widen=2.0)}

    xy = monotone.simulate_data(random.key(101), 100 if options.small else 1000)
    start = time.perf_counter()
    kernel = SLSLangevin(monotone.model, num_steps=4 if options.small else 16, **settings)
    mcmc = MCMC(kernel, num_warmup=500, num_samples=500, num_chains=8, chain_method="vectorized")
    mcmc.run(random.key(0), xy)
    print(f"fitted and sampled in {time.perf_counter() - start:.0f} s")
    mcmc.print_summary()

    exact = np.asarray(monotone.exact_posterior(random.key(2), xy, num_samples=2000, num_sweeps=200 if options.small else 1000))
    basis = np.asarray(monotone.features(GRID)).T
    ours, theirs = np.asarray(mcmc.get_samples()["theta"]) @ basis, exact @ basis
    distance = w1(ours, theirs) * theirs.std(0)  # in the curve's own units
    print(f"against Gibbs, averaged over the curve: KS {ks(ours, theirs).mean():.3f}, W1 {distance.mean():.4f}")

    figure, axes = plt.subplots(1, 2, figsize=(8.5, 3.2), layout="constrained")
    axes[0].scatter(*np.asarray(xy).T, s=3, color="0.6", label="data")
    axes[0].plot(GRID, ours.mean(0), color="C0", label="posterior mean")
    axes[0].plot(GRID, monotone.TRUTH["curve"](GRID), color="C3", linewidth=1, label="truth")
    band(axes[1], ours, "C0", "numpyro_sls")
    band(axes[1], theirs, "C1", "Gibbs")
    axes[1].axhline(0, color="C3", linewidth=1)
    axes[1].set_title("95 % bands, less the truth")
    for axis in axes:
        axis.set_xlabel("x")
        axis.legend(frameon=False, fontsize="small")
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "monotone.png"
    figure.savefig(path, dpi=150)
    print("picture:", path)


if __name__ == "__main__":
    main()

"""The M/G/1 queue from data to posterior: localization, training, four chains, a summary and a picture.

    python examples/mg1_queue.py [--small] [--output examples/output]

The likelihood of a queue is awkward enough that it is a standard test of simulation-based inference; here it is simulated
away. Because this one can be written down after all (`queue.log_likelihood`), the picture shows the exact posterior too.
"""

import argparse
from pathlib import Path
import time

import arviz as az
from jax import random
import matplotlib
import numpy as np
from numpyro.infer import MCMC

from numpyro_sls import Debias, SLSLangevin, Training, diagnose, plots, to_arviz
from numpyro_sls.models import queue

matplotlib.use("Agg")

NAMES = ("theta1", "theta2", "theta3")


def main() -> None:
    """Simulate 500 rows at the truth, infer the three parameters, and compare with the exact posterior."""
    parser = argparse.ArgumentParser(description="Simulation-based inference for the M/G/1 queue.")
    parser.add_argument("--small", action="store_true", help="few rows and simulations under the prior, to see that it runs")
    parser.add_argument("--output", type=Path, default=Path("examples/output"), help="folder for the picture")
    options = parser.parse_args()
    num_rows, settings = 500, queue.SETTINGS
    if options.small:
        few = {"training": Training(num_simulations=60_000), "localization": None, "debias": Debias(near=False)}
        num_rows, settings = 100, {**queue.SETTINGS, **few}

    x = queue.simulate_data(random.key(1), num_rows)
    start = time.perf_counter()
    kernel = SLSLangevin(queue.model, **settings)
    mcmc = MCMC(kernel, num_warmup=500, num_samples=1000, num_chains=4, chain_method="vectorized")
    mcmc.run(random.key(0), x)
    print(f"fitted and sampled in {time.perf_counter() - start:.0f} s")

    print(az.summary(to_arviz(mcmc), var_names=list(NAMES)))
    print("truth:", queue.TRUTH)
    if not options.small:
        print(diagnose(mcmc.sampler.fit, random.key(3), mcmc=mcmc))

    print("computing the exact posterior for comparison ...")
    exact = np.asarray(queue.exact_posterior(random.key(2), x, num_samples=160 if options.small else 1600))
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "queue.png"
    axes = plots.compare({"numpyro_sls": mcmc.get_samples(), "exact": dict(zip(NAMES, exact.T, strict=True))}, NAMES)
    for axis, name in zip(axes, NAMES, strict=True):
        axis.axvline(queue.TRUTH[name], color="C3", linewidth=1)
    axes[0].figure.savefig(path, dpi=150)
    print("picture:", path)


if __name__ == "__main__":
    main()

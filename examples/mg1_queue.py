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

from numpyro_sls import SLSLangevin, Training
from numpyro_sls.models import queue

matplotlib.use("Agg")
import matplotlib.pyplot as plt

NAMES = ("theta1", "theta2", "theta3")


def main() -> None:
    """Simulate 500 rows at the truth, infer the three parameters, and compare with the exact posterior."""
    parser = argparse.ArgumentParser(description="Simulation-based inference for the M/G/1 queue.")
    parser.add_argument("--small", action="store_true", help="few rows and simulations, to see that it runs")
    parser.add_argument("--output", type=Path, default=Path("examples/output"), help="folder for the picture")
    options = parser.parse_args()
    num_rows, training = (100, Training(num_simulations=60_000)) if options.small else (500, Training())

    x = queue.simulate_data(random.key(1), num_rows)
    start = time.perf_counter()
    kernel = SLSLangevin(queue.model, training=training, **queue.SETTINGS)
    mcmc = MCMC(kernel, num_warmup=500, num_samples=1000, num_chains=4, chain_method="vectorized")
    mcmc.run(random.key(0), x)
    print(f"fitted and sampled in {time.perf_counter() - start:.0f} s")

    by_chain = {k: np.asarray(mcmc.get_samples(group_by_chain=True)[k]) for k in NAMES}
    print(az.summary(az.from_dict({"posterior": by_chain}) if int(az.__version__[0]) else az.from_dict(posterior=by_chain)))
    print("truth:", queue.TRUTH)

    print("computing the exact posterior for comparison ...")
    exact = np.asarray(queue.exact_posterior(random.key(2), x, num_samples=160 if options.small else 1600))
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "queue.png"
    draw(by_chain, exact, path)
    print("picture:", path)


def draw(samples: dict[str, np.ndarray], exact: np.ndarray, path: Path) -> None:
    """Marginals of the learned posterior over those of the exact one."""
    figure, axes = plt.subplots(1, 3, figsize=(10, 3), layout="constrained")
    for axis, name, reference in zip(axes, NAMES, exact.T, strict=True):
        ours = samples[name].ravel()
        axis.hist(reference, bins=40, density=True, color="0.8", label="exact")
        axis.hist(ours, bins=60, density=True, histtype="step", color="C0", label="numpyro_sls")
        axis.axvline(queue.TRUTH[name], color="C3", linewidth=1, label="truth")
        axis.set(xlabel=name, yticks=[])
    axes[0].legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()

"""Forty cells light up after transfection: a stochastic differential equation with random effects, and twelve unknowns.

    python examples/mrna_transfection.py --data egfp_40ind_log_observations.csv [--small] [--output examples/output]

The file has a header, a column of times and a column of log fluorescence for every cell, 180 of them from 10 minutes to 30 hours; the
cells of Froehlich et al. (2018) are at Zenodo, 10.5281/zenodo.1228898. Without a file forty cells are simulated. The rates at which
mRNA and protein are lost, delta and gamma, nearly exchange roles in what is seen; where localization finds both ways, it says so. On the real
cells the fit warns that it is not to be trusted (docs/experiments.md): take its posterior for a start, not for a result.
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

from numpyro_sls import SLS, Debias, SLSLangevin, Training, predict, to_arviz
from numpyro_sls.models import mrna

matplotlib.use("Agg")

HOURS = mrna.INTERVAL * np.arange(1, mrna.NUM_TIMES + 1)


def main() -> None:
    """Infer what is common to the cells and how they differ."""
    parser = argparse.ArgumentParser(description="Simulation-based inference for mRNA transfection.")
    parser.add_argument("--data", type=Path, default=None, help="a file of cells")
    parser.add_argument("--small", action="store_true", help="few simulations under the prior, to see that it runs")
    parser.add_argument("--output", type=Path, default=Path("examples/output"), help="folder for the pictures")
    options = parser.parse_args()
    settings = dict(mrna.SETTINGS)
    if options.small:
        settings |= {"training": Training(num_simulations=41_000, num_epochs=3), "localization": None, "debias": Debias(near=False)}

    if options.data is None:
        x = mrna.simulate_data(random.key(1), 40)
    else:
        x = jnp.asarray(np.genfromtxt(options.data, delimiter=",", skip_header=1)[:, 1:].T, jnp.float32)
    start = time.perf_counter()
    fit = SLS(mrna.real_model, **settings).run(random.key(0), x)
    mcmc = MCMC(SLSLangevin(fit), num_warmup=500, num_samples=1000, num_chains=4, chain_method="vectorized")
    mcmc.run(random.key(2), x)
    print(f"fitted and sampled in {time.perf_counter() - start:.0f} s")
    if fit.localization is not None:
        print(fit.localization)
    print(az.summary(to_arviz(mcmc), var_names=["log_offset", "log_sigma", "mu", "log_tau"]))

    draws = {k: np.asarray(v) for k, v in mcmc.get_samples().items()}
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    left.plot(*draws["mu"][:, :2].T, ".", markersize=2, alpha=0.4)
    left.set(xlabel="mu_delta", ylabel="mu_gamma", title="loss of mRNA and of protein")
    cells = np.asarray(predict(mcmc, random.key(3), 5 if options.small else 50)["x"]).reshape(-1, mrna.NUM_TIMES)
    low, middle, high = np.quantile(cells, [0.025, 0.5, 0.975], axis=0)
    right.plot(HOURS, np.asarray(x).T, "k", linewidth=0.4, alpha=0.5)
    right.fill_between(HOURS, low, high, alpha=0.3, label="95 % of cells simulated from the posterior")
    right.plot(HOURS, middle)
    right.set(xlabel="hours", ylabel="log fluorescence")
    right.legend(frameon=False, fontsize=8)
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "mrna_transfection.png"
    figure.savefig(path, dpi=150)
    print("picture:", path)


if __name__ == "__main__":
    main()

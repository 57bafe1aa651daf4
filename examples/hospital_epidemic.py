"""An infection on the floors of a hospital: data that are one dependent whole, seen through weekly summaries.

    python examples/hospital_epidemic.py [--data summaries.csv] [--small] [--output examples/output]

Nobody can write the likelihood down: who infected whom is not seen, and most of the infected are never found. The score of the
whole data set is learnt from eight thousand simulated hospitals, and then serves any hospital of that size. The file has a header and 52 rows
of weekly summaries: all patients, every floor, rooms with both found; without one a hospital is simulated.
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

from numpyro_sls import SLS, SLSLangevin, Training, predict, to_arviz
from numpyro_sls.models import epidemic

matplotlib.use("Agg")

RATES = ["everywhere", *(f"floor {j}" for j in range(1, 6)), "room"]


def main() -> None:
    """Infer seven rates of transmission."""
    parser = argparse.ArgumentParser(description="Simulation-based inference for an epidemic in a hospital.")
    parser.add_argument("--data", type=Path, default=None, help="a file of weekly summaries")
    parser.add_argument("--small", action="store_true", help="few simulations, to see that it runs")
    parser.add_argument("--output", type=Path, default=Path("examples/output"), help="folder for the pictures")
    options = parser.parse_args()
    settings = epidemic.SETTINGS
    if options.small:
        settings = {**settings, "training": Training(num_simulations=1500, num_thetas=32, num_per_theta=1, num_epochs=5)}

    s = epidemic.simulate_data(random.key(1)) if options.data is None else jnp.asarray(np.loadtxt(options.data, delimiter=",", skiprows=1))
    start = time.perf_counter()
    fit = SLS(epidemic.model, **settings).run(random.key(0), s)
    mcmc = MCMC(SLSLangevin(fit), num_warmup=500, num_samples=1000, num_chains=4, chain_method="vectorized")
    mcmc.run(random.key(2), s)
    print(f"fitted and sampled in {time.perf_counter() - start:.0f} s")
    print(az.summary(to_arviz(mcmc)))

    rates, truth = np.exp(np.asarray(mcmc.get_samples()["log_beta"])), np.asarray(epidemic.TRUTH[5])
    prior = np.exp(-3.0 + np.random.default_rng(0).normal(size=len(rates)))
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    left.boxplot([*rates.T, prior], tick_labels=[*RATES, "prior"], whis=(2.5, 97.5), showfliers=False)
    if options.data is None:
        left.plot(1 + np.arange(7), truth, "C3_", markersize=14, label="truth")
        left.legend(frameon=False)
    left.tick_params(axis="x", rotation=45)
    left.set(ylabel="rate", ylim=(0, 0.35))
    drawn = np.asarray(predict(mcmc, random.key(3), 20 if options.small else 200)["s"])[..., 0]
    low, middle, high = np.quantile(drawn, [0.025, 0.5, 0.975], axis=0)
    weeks = np.arange(len(middle))
    right.fill_between(weeks, low, high, alpha=0.3, label="95 % of hospitals simulated from the posterior")
    right.plot(weeks, middle, linewidth=1)
    right.plot(weeks, np.asarray(s)[:, 0], "k.", markersize=4, label="data")
    right.set(xlabel="week", ylabel="share of patients found")
    right.legend(frameon=False, fontsize=8)
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "hospital_epidemic.png"
    figure.savefig(path, dpi=150)
    print("picture:", path)


if __name__ == "__main__":
    main()

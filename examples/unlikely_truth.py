"""Why the region is looked for first: a truth that the prior hardly allows.

    python examples/unlikely_truth.py [--small] [--output examples/output]

Counts of 100 trials each with theta = 0.93, under a Beta(5, 5) prior whose density there is a two-hundredth of that at
its middle. A score learnt under the prior has hardly seen such parameters; one that is learnt where simulations look like the
data has seen little else. Both spend the same budget, and the exact posterior is a Beta distribution.
"""

import argparse
from pathlib import Path

from jax import random
import matplotlib
import numpy as np
from numpyro.infer import MCMC

from numpyro_sls import SLS, FromRestarts, Localization, SLSLangevin, Training, plots
from numpyro_sls.metrics import w1
from numpyro_sls.models import beta_binomial

matplotlib.use("Agg")

THETA = 0.93


def main() -> None:
    """Fit under the prior and around the restarts, and compare."""
    parser = argparse.ArgumentParser(description="Localization on a beta-binomial model.")
    parser.add_argument("--small", action="store_true", help="few simulations, to see that it runs")
    parser.add_argument("--output", type=Path, default=Path("examples/output"), help="folder for the picture")
    options = parser.parse_args()
    training = Training(num_simulations=41_000 if options.small else 200_000)

    x = beta_binomial.simulate_data(random.key(1), 20, THETA)
    exact = np.asarray(beta_binomial.exact_posterior(random.key(2), x))
    regions = {
        "under the prior": {"localization": None},
        "localized": {"localization": Localization(), "proposal": FromRestarts(widen=3.0)},
    }
    posteriors = {"exact": {"theta": exact}}
    for name, settings in regions.items():
        # The likelihood is known, and not used; nothing is mended near the posterior, which would hide the difference.
        fit = SLS(beta_binomial.model, target="implicit", debias=None, focus=None, training=training, **settings).run(random.key(0), x)
        mcmc = MCMC(SLSLangevin(fit), num_warmup=300, num_samples=500, num_chains=4, chain_method="vectorized")
        mcmc.run(random.key(3), x)
        theta = np.asarray(mcmc.get_samples()["theta"])
        outside = float(np.mean(mcmc.get_extra_fields()["diverging"]))
        print(f"{name}: W1 to the exact posterior {w1(theta, exact):.2f} of its sds; {outside:.0%} of the draws outside the region")
        posteriors[name] = {"theta": theta}

    options.output.mkdir(parents=True, exist_ok=True)
    axes = plots.compare(posteriors)
    axes[0].axvline(THETA, color="C3", linewidth=1)
    path = options.output / "unlikely_truth.png"
    axes[0].figure.savefig(path, dpi=150)
    print("picture:", path)


if __name__ == "__main__":
    main()

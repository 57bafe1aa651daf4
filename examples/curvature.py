"""What the second Bartlett identity buys: three categories, one network, with and without the curvature penalty.

    python examples/curvature.py [--small] [--output examples/output]

The posterior is a Dirichlet distribution, so that everything can be checked. Two fits spend the same simulations under the
prior; one goes on training with a penalty on E[s s^T] + E[grad s], whose weight the held-out loss chooses. `diagnose` looks at the same
identity on fresh simulations, and the picture shows both posteriors beside the exact one.
"""

import argparse
from pathlib import Path

from jax import random
import matplotlib
import numpy as np
from numpyro.infer import MCMC

from numpyro_sls import SLS, CurvaturePenalty, Debias, MLPScore, SLSLangevin, Training, diagnose, plots
from numpyro_sls.metrics import w1
from numpyro_sls.models import dirichlet

matplotlib.use("Agg")


def main() -> None:
    """Fit twice, sample twice, compare."""
    parser = argparse.ArgumentParser(description="The curvature penalty on a Dirichlet-multinomial model.")
    parser.add_argument("--small", action="store_true", help="few simulations, to see that it runs")
    parser.add_argument("--output", type=Path, default=Path("examples/output"), help="folder for the picture")
    options = parser.parse_args()
    settings = {
        "network": MLPScore(width=32, depth=2),
        "target": "implicit",  # the likelihood is known, and not used
        "localization": None,
        "focus": None,
        "debias": Debias(near=False),  # nothing is mended near the posterior, which would hide the difference
        "training": Training(num_simulations=100_000 if options.small else 400_000, num_per_theta=4),
    }
    ladder = (1.0,) if options.small else (1e-2, 1e-1, 1.0)

    x = dirichlet.simulate_data(random.key(1))
    exact = np.asarray(dirichlet.exact_posterior(random.key(2), x))
    posteriors = {"exact": {"theta": exact}}
    for name, curvature in {"without": None, "with the penalty": CurvaturePenalty(ladder=ladder)}.items():
        fit = SLS(dirichlet.model, curvature=curvature, **settings).run(random.key(0), x)
        mcmc = MCMC(SLSLangevin(fit), num_warmup=300, num_samples=500, num_chains=4, chain_method="vectorized")
        mcmc.run(random.key(3), x)
        theta = np.asarray(mcmc.get_samples()["theta"])
        print(f"{name}: W1 to the exact posterior, in its sds: {np.round(w1(theta, exact), 2)}")
        if not options.small:
            print(next(check for check in diagnose(fit, random.key(4), mcmc=mcmc).checks if check.name == "curvature"))
        posteriors[name] = {"theta": theta}

    options.output.mkdir(parents=True, exist_ok=True)
    axes = plots.compare(posteriors)
    for axis, value in zip(axes, dirichlet.TRUTH["theta"], strict=True):
        axis.axvline(float(value), color="C3", linewidth=1)
    path = options.output / "curvature.png"
    axes[0].figure.savefig(path, dpi=150)
    print("picture:", path)


if __name__ == "__main__":
    main()

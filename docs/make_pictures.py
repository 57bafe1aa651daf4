"""Draws the example pictures of docs/diagnostics.md: python docs/make_pictures.py"""

from pathlib import Path

from jax import random
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

from numpyro_sls import SLS, Simulated, SLSLangevin, calibrate, diagnose, plots, predict

matplotlib.use("Agg")
OUTPUT = Path(__file__).parent / "pictures"


def model(x):
    """A location and a scale, the noise simulated away."""
    a = numpyro.sample("a", dist.Normal(0, 5))
    b = numpyro.sample("b", dist.HalfNormal(5))
    with numpyro.plate("units", x.shape[0]):
        z = numpyro.sample("z", dist.Normal())
        numpyro.sample("x", Simulated(a + b * z), obs=x)


def written_down(x):
    """The same with its likelihood."""
    a = numpyro.sample("a", dist.Normal(0, 5))
    b = numpyro.sample("b", dist.HalfNormal(5))
    with numpyro.plate("units", x.shape[0]):
        numpyro.sample("x", dist.Normal(a, b), obs=x)


def run(kernel, x) -> MCMC:
    """Four chains."""
    mcmc = MCMC(kernel, num_warmup=500, num_samples=2000, num_chains=4, chain_method="vectorized", progress_bar=False)
    mcmc.run(random.key(0), x)
    return mcmc


def main() -> None:
    """Fit once and draw everything."""
    x = 1 + 2 * random.normal(random.key(3), (200,))
    fit = SLS(model).run(random.key(0), x, progress_bar=False)
    mcmc, exact = run(SLSLangevin(fit), x), run(NUTS(written_down), x)
    report = diagnose(fit, random.key(1), mcmc=mcmc)
    print(report)
    found = calibrate(fit, random.key(2))
    print(found)
    samples = mcmc.get_samples()
    pictures = {
        "training": plots.training_curves(fit),
        "pairs": plots.pairs(fit, samples),
        "field": plots.score_field(fit),
        "bartlett": plots.bartlett_residuals(report.bartlett),
        "calibration": plots.calibration(found),
        "bands": plots.predictive_bands(predict(mcmc, random.key(4), 200)["x"], np.asarray(x)),
        "compare": plots.compare({"ours": samples, "exact": exact.get_samples()}),
    }
    OUTPUT.mkdir(exist_ok=True)
    for name, axes in pictures.items():
        np.ravel(np.asarray(axes))[0].figure.savefig(OUTPUT / f"{name}.png", dpi=90)


if __name__ == "__main__":
    main()

"""Draws the example pictures of docs/diagnostics.md: python -m docs.make_pictures"""

from pathlib import Path

from jax import random
import matplotlib
import numpy as np
from numpyro.infer import MCMC

from numpyro_sls import SLS, SLSLangevin, calibrate, diagnose, plots, predict
from tests.cases import CASES, exact_samples

matplotlib.use("Agg")
OUTPUT = Path(__file__).parent / "pictures"


def main() -> None:
    """Fit once and draw everything."""
    case = CASES["location_scale"]
    (x,) = case.simulate(random.key(3), 200)
    fit = SLS(case.model).run(random.key(0), x, progress_bar=False)
    mcmc = MCMC(SLSLangevin(fit), num_warmup=500, num_samples=2000, num_chains=4, chain_method="vectorized", progress_bar=False)
    mcmc.run(random.key(0), x)
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
        "compare": plots.compare({"ours": samples, "exact": exact_samples(case, (x,))}),
    }
    OUTPUT.mkdir(exist_ok=True)
    for name, axes in pictures.items():
        np.ravel(np.asarray(axes))[0].figure.savefig(OUTPUT / f"{name}.png", dpi=90)


if __name__ == "__main__":
    main()

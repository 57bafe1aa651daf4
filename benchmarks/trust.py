"""Ten ways to break a fit, one of them at two strengths, and what `diagnose` says of each: python -m benchmarks.trust [cause ...]

The ten well-trained fits are those of benchmarks.foundation, which reports what `diagnose` says of them too.
"""

import argparse
from collections.abc import Callable
from functools import cache, partial
import json
from pathlib import Path
from unittest.mock import patch
import warnings

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

from numpyro_sls import SLS, Simulated, SLSFit, SLSLangevin, Training, diagnose
from numpyro_sls.diagnostics import Report
from numpyro_sls.joint import JointValidity
from tests.cases import CASES, compare, exact_samples, only_its_size

RESULTS = Path("benchmarks/results/trust.jsonl")
CASE = CASES["normal_exponential"]
DATA = CASE.simulate(random.key(100), 500)
DEFAULT_UNITS = 11_000_000  # that the default learns from


def fitted(model=CASE.model, args=DATA, **settings) -> SLSFit:
    """A fit without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return SLS(model, **settings).run(random.key(0), *args, progress_bar=False)


@cache
def good() -> SLSFit:
    """What the broken runs share."""
    return fitted()


def sampled(fit: SLSFit, args=DATA, num_warmup: int = 500, num_samples: int = 1000, init_params=None, **settings) -> MCMC:
    """Four chains."""
    kernel = SLSLangevin(fit, **settings)
    mcmc = MCMC(kernel, num_warmup=num_warmup, num_samples=num_samples, num_chains=4, chain_method="vectorized", progress_bar=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mcmc.run(random.key(1), *args, init_params=init_params)
    return mcmc


def checked(fit: SLSFit, args=DATA, **settings) -> tuple[Report, MCMC]:
    """The report of a fit and a run of it."""
    mcmc = sampled(fit, args, **settings)
    return diagnose(fit, random.key(2), mcmc=mcmc), mcmc


def no_debiasing():
    """The mean of the score left in, n = 10^4."""
    return checked(fitted(args=(args := CASE.simulate(random.key(101), 10_000)), debias=None), args)


def part_of_the_training(share: float):
    """So much of the simulations, all of them learnt from the implicit target."""
    return checked(fitted(target="implicit", training=Training(num_simulations=int(share * DEFAULT_UNITS))))


def invalid_joint_target():
    """The joint score trained on where it does not hold."""

    def all_valid(rng_key, simulator, thetas):
        d = thetas.shape[1]
        return JointValidity(np.ones(d, bool), np.zeros(d, bool), np.zeros(d))

    def model(x):
        theta = numpyro.sample("theta", dist.HalfNormal(3))
        with numpyro.plate("units", x.shape[0]):
            u = numpyro.sample("u", dist.Uniform(0, theta))
            numpyro.sample("x", dist.Normal(u, 0.3), obs=x)

    x = 2 * random.uniform(random.key(3), (500,)) + 0.3 * random.normal(random.key(4), (500,))
    with patch("numpyro_sls.fit.joint_validity", all_valid):
        fit = fitted(model, (x,), target="joint", smoothing=False)
    return checked(fit, (x,))


def wrong_proposal():
    """The region of other data."""
    return checked(good(), (DATA[0] + 6.0,))


def data_of_another_model():
    """Two clumps instead of a normal with an exponential tail."""
    sign = jnp.where(random.bernoulli(random.key(5), 0.5, (500,)), 1.0, -1.0)
    args = (1.4 + 2 * sign + 0.2 * random.normal(random.key(6), (500,)),)
    return checked(fitted(args=args), args)


def two_modes():
    """Only |t| is known."""
    args = (2 + random.normal(random.key(7), (300,)),)
    return checked(fitted(only_its_size, args), args)


def failing_simulations():
    """A fifth of the simulations are not finite."""

    def model(x):
        a = numpyro.sample("a", dist.Normal(0, 5))
        b = numpyro.sample("b", dist.HalfNormal(5))
        with numpyro.plate("units", x.shape[0]):
            z = numpyro.sample("z", dist.Normal())
            u = numpyro.sample("u", dist.Uniform())
            numpyro.sample("x", Simulated(jnp.where(u < 0.2, jnp.nan, a + b * z)), obs=x)

    args = CASES["location_scale"].simulate(random.key(8), 300)
    return checked(fitted(model, args), args)


def large_steps():
    """Ten times the usual size, not adapted."""
    return checked(good(), num_warmup=0, step_size=9.0)


def chains_apart():
    """Starts far apart, short steps, no warm-up."""
    starts = {
        k: jnp.asarray(v) for k, v in {"loc": [-1.0, 0.0, 0.5, 1.0], "scale": [-1.5, -0.5, 0.0, 0.5], "rate": [-1.5, 0.0, 0.5, 1.0]}.items()
    }
    return checked(good(), num_warmup=0, num_samples=500, step_size=0.02, init_params=starts)


def two_hundred_simulations():
    """A table of 200 units."""
    return checked(fitted(training=Training(num_simulations=200, num_thetas=5, num_per_theta=1)))


BROKEN: dict[str, tuple[Callable, set[str]]] = {  # and the checks of which at least one names the cause
    "no debiasing": (no_debiasing, {"mean zero"}),
    "a quarter of the training": (partial(part_of_the_training, 1 / 4), {"training", "curvature", "mean zero"}),
    "a hundredth of the training": (partial(part_of_the_training, 1 / 100), {"training", "curvature", "mean zero", "readout"}),
    "an invalid joint target": (invalid_joint_target, {"target"}),
    "a wrong proposal": (wrong_proposal, {"region"}),
    "data of another model": (data_of_another_model, {"the data"}),
    "two modes": (two_modes, {"modes"}),
    "failing simulations": (failing_simulations, {"simulations"}),
    "steps ten times too large": (large_steps, {"acceptance"}),
    "chains that have not met": (chains_apart, {"R-hat"}),
    "a table of 200 simulations": (two_hundred_simulations, {"simulations spent"}),
}


def main() -> None:
    """Break what was asked for and print the reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("causes", nargs="*", default=list(BROKEN))
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    for cause in parser.parse_args().causes:
        break_it, expected = BROKEN[cause]
        report, mcmc = break_it()
        named = bool(expected & set(report.failed))
        row = {"cause": cause, "failed": report.failed, "named": named}
        if mcmc._args[0] is DATA[0]:  # how wrong the posterior is, where it is known
            row["w1"] = compare(mcmc.get_samples(), exact_samples(CASE, DATA)).w1.tolist()
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"== {cause}: {'named' if named else 'NOT NAMED'} {row}\n{report}\n", flush=True)


if __name__ == "__main__":
    main()

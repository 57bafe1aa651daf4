"""How time and error grow with the rows of the data and with the parameters, ours and sbi's NLE, on a family whose posterior is known.

python -m benchmarks.growth [--tasks rows parameters] [--sizes 100 1000]
.venv-rivals/bin/python -m benchmarks.growth --methods nle     (made by `make rivals`)
python -m benchmarks.growth --tasks                            (only the table of all rows so far)

A unit has d / 2 numbers x_j = loc_j + sd_j (z + e_j) / sqrt 2 with one z for all of them, all standard normal; loc_j and log sd_j have
standard normal priors. With z integrated out the rows are normal, so that NUTS on two sums over them gives the exact posterior.
"""

import argparse
import time

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

from benchmarks.common import distances, fitted, options, sampled, save
from benchmarks.report import growth_table
from benchmarks.rivals import METHODS, make_problem

ROWS = (100, 1000, 10_000, 100_000, 1_000_000)  # with 4 parameters
PARAMETERS = (2, 4, 10, 20, 50)  # with 200 rows
FEW = {"rows": 4, "parameters": 200}
NLE_MOST = {"rows": 1000, "parameters": 20}  # a draw needs the flow at every row, and the slice sampler goes through every parameter


def model(x):
    """The family; d is twice the numbers in a row."""
    dim = x.shape[1]
    loc = numpyro.sample("loc", dist.Normal().expand([dim]).to_event(1))
    log_sd = numpyro.sample("log_sd", dist.Normal().expand([dim]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        z = numpyro.sample("z", dist.Normal())
        mean = loc + jnp.exp(log_sd) * z[..., None] / jnp.sqrt(2.0)
        numpyro.sample("x", dist.Normal(mean, jnp.exp(log_sd) / jnp.sqrt(2.0)).to_event(1), obs=x)


def simulate_data(rng_key, num: int, dim: int):
    """Rows at one truth, which does not depend on how many there are."""
    key_theta, key_z, key_e = random.split(rng_key, 3)
    loc, log_sd = 0.5 * random.normal(key_theta, (2, dim))
    z, e = random.normal(key_z, (num, 1)), random.normal(key_e, (num, dim))
    return loc + jnp.exp(log_sd) * (z + e) / jnp.sqrt(2.0)


def exact_posterior(x) -> np.ndarray:
    """4 x 2000 draws, a column for every loc, then for every log sd."""
    num, dim = x.shape
    x = np.asarray(x, float)
    mean, second = jnp.asarray(x.mean(0)), jnp.asarray(np.cov(x.T, bias=True).reshape(dim, dim))
    inverse = jnp.linalg.inv((jnp.eye(dim) + 1) / 2)

    def marginal():
        loc = numpyro.sample("loc", dist.Normal().expand([dim]).to_event(1))
        log_sd = numpyro.sample("log_sd", dist.Normal().expand([dim]).to_event(1))
        scaled = inverse / jnp.exp(log_sd) / jnp.exp(log_sd)[:, None]
        off = mean - loc
        numpyro.factor("x", -num * (jnp.sum(log_sd) + 0.5 * (jnp.sum(scaled * second) + off @ scaled @ off)))

    mcmc = MCMC(NUTS(marginal), num_warmup=1000, num_samples=2000, num_chains=4, chain_method="vectorized", progress_bar=False)
    mcmc.run(random.key(2))
    draws = mcmc.get_samples()
    return np.concatenate([draws["loc"], draws["log_sd"]], axis=1)


def run_ours(x, exact: np.ndarray) -> dict:
    """Defaults only."""
    fit, cost = fitted(model, random.key(0), x)
    start = time.perf_counter()
    draws, outside = sampled(fit, x)
    ours = np.concatenate([draws["loc"], draws["log_sd"]], axis=1)
    return {**distances(ours, exact), "outside": outside, "sampling": time.perf_counter() - start, **cost}


def run_nle(x, exact: np.ndarray, num_rows: int) -> dict:
    """sbi's NLE as in `rivals`."""
    problem = make_problem(
        model, x, lambda params: jnp.concatenate([params["loc"], params["log_sd"]]), exact, lambda draws: distances(draws, exact)
    )
    start = time.perf_counter()
    theta = METHODS["nle"](problem, 0, num_rows, 1000)
    draws = np.asarray(problem.constrain(jnp.asarray(theta, jnp.float32)))
    return {**problem.report(draws), "seconds": time.perf_counter() - start, "units": num_rows}


def run(found: argparse.Namespace) -> None:
    """One key; what grows, at every size."""
    for what in found.tasks:
        for size in found.sizes or {"rows": ROWS, "parameters": PARAMETERS}[what]:
            num, d = (size, FEW[what]) if what == "rows" else (FEW[what], size)
            x = simulate_data(random.key(1), num, d // 2)
            exact = exact_posterior(x)
            for method in found.methods:
                if method == "nle" and size > NLE_MOST[what]:
                    continue
                figures = run_ours(x, exact) if method == "ours" else run_nle(x, exact, found.simulations)
                save("growth", what=what, size=size, num=num, dim=d, method=method, **figures)


def main() -> None:
    """Run what was asked for, then print the table."""
    found = options(__doc__, 1, 1, tasks=["rows", "parameters"], methods=["ours"], simulations=200_000, sizes=[0])
    found.sizes = [s for s in found.sizes if s]
    run(found)
    print(growth_table())


if __name__ == "__main__":
    main()

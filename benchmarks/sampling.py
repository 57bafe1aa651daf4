"""What a draw costs as the data grow, against NUTS on the likelihood written down, and what unadjusted steps cost in accuracy.

python -m benchmarks.sampling cost bias large

Rows go to benchmarks/results/sampling.jsonl. All times of a table are from one run on one machine; compilation is not counted."""

import argparse
import json
from pathlib import Path
import resource
import time

import jax
from jax import random
import jax.numpy as jnp
from jax.scipy.special import logsumexp
import numpy as np
import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

from numpyro_sls import SLS, SLSLangevin
from tests.cases import CASES, compare
from tests.exact import exact_fit, exact_location_fit

RESULTS = Path("benchmarks/results/sampling.jsonl")
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(61)  # with 21 the posterior mean of sd is off by half a posterior sd at n = 1000


def quadrature(x):
    """Poisson random effects with the effect of every row integrated out, as one would write it for NUTS."""
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    sd = numpyro.sample("sd", dist.HalfNormal(2))
    z = mu + sd * jnp.asarray(NODES)
    terms = jnp.sum(x, axis=1)[:, None] * z - x.shape[1] * jnp.exp(z) + jnp.log(jnp.asarray(WEIGHTS))
    numpyro.factor("x", jnp.sum(logsumexp(terms, axis=1)))


def drawn(kernel, args: tuple, num_chains: int, num_warmup: int, num_samples: int) -> tuple[dict[str, np.ndarray], float]:
    """Draws by chain after warm-up, and the seconds that they took, compiled."""
    keys = random.split(random.key(1), num_chains)
    state = kernel.init(keys if num_chains > 1 else keys[0], num_warmup, None, args, {})

    def run(state, length):
        def step(state, _):
            state = kernel.sample(state, args, {})
            return state, state.z

        return jax.lax.scan(step, state, length=length)

    warm = jax.jit(lambda s: run(s, num_warmup)[0])(state)
    sample = jax.jit(lambda s: run(s, num_samples)).lower(warm).compile()
    start = time.perf_counter()
    _, z = jax.block_until_ready(sample(warm))
    seconds = time.perf_counter() - start
    by_chain = {k: np.asarray(v).swapaxes(0, 1) if num_chains > 1 else np.asarray(v)[None] for k, v in z.items()}
    return by_chain, seconds


def run_cost() -> None:
    """Seconds a draw and effective samples a second for n = 10^3, 10^5, 10^6."""
    start = time.perf_counter()
    (x,) = CASES["poisson"].simulate(random.key(100), 100_000)
    fit = SLS(CASES["poisson"].model).run(random.key(0), x, progress_bar=False)
    save("fit", n=100_000, seconds=time.perf_counter() - start)
    sizes = {1000: (4, 500, 1000), 100_000: (1, 200, 300), 1_000_000: (1, 60, 60)}
    data, ours, theirs = {}, {}, {}
    for n in sizes:
        (data[n],) = CASES["poisson"].simulate(random.key(200), n)
        start = time.perf_counter()
        fit.condition(data[n])
        save("terms of new data", n=n, seconds=time.perf_counter() - start)
    for n in [*sizes, *reversed(sizes)]:  # there and back, so that a slow minute does not count for one n alone
        z, seconds = drawn(SLSLangevin(fit), (data[n],), 4, 500, 5000)
        ours.setdefault(n, []).append((seconds, z))
    for n, (chains, warmup, samples) in sizes.items():
        z, seconds = drawn(NUTS(quadrature), (data[n],), chains, warmup, samples)
        theirs[n] = (seconds, z)
    for n in sizes:
        seconds, (_, z) = min(s for s, _ in ours[n]), ours[n][0]
        ess = min(float(effective_sample_size(v)) for v in z.values())
        nuts_seconds, nuts_z = theirs[n]
        nuts_ess = min(float(effective_sample_size(v)) for v in nuts_z.values())
        distance = compare({k: np.exp(v.ravel()) if k == "sd" else v.ravel() for k, v in z.items()}, _constrained(nuts_z))
        save(
            "cost",
            n=n,
            microseconds_a_draw=1e6 * seconds / (4 * 5000),
            ess_a_second=ess / seconds,
            nuts_ess_a_second=nuts_ess / nuts_seconds,
            nuts_draws=next(iter(nuts_z.values())).size,
            shift=distance.shift.tolist(),
            sd_ratio=distance.sd_ratio.tolist(),
        )


def _constrained(z: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {k: np.exp(v.ravel()) if k == "sd" else v.ravel() for k, v in z.items()}


def run_bias() -> None:
    """The sd of unadjusted draws by step size, as estimated by step halving and against adjusted draws, on an exact score."""
    (x,) = CASES["location_scale"].simulate(random.key(3), 200)
    fit = exact_location_fit(x)
    reference = MCMC(SLSLangevin(fit), num_warmup=500, num_samples=5000, num_chains=40, chain_method="vectorized", progress_bar=False)
    reference.run(random.key(0), x)
    exact = {k: np.asarray(v) for k, v in reference.get_samples().items()}
    for size in (0.2, 0.4, 0.8, 1.2):
        kernel = SLSLangevin(fit, adjusted=False, step_size=size)
        bias = kernel.discretization_bias(random.key(0), x)
        fixed = SLSLangevin(fit, adjusted=False, step_size=size, num_steps=int(np.ceil(4 / size**2)))
        mcmc = MCMC(fixed, num_warmup=0, num_samples=2000, num_chains=100, chain_method="vectorized", progress_bar=False)
        mcmc.run(random.key(1), x)
        draws = {k: np.asarray(v).reshape(100, -1)[:, 100:].ravel() for k, v in mcmc.get_samples(group_by_chain=True).items()}
        found = compare(draws, exact)
        save(
            "bias",
            step_size=size,
            w1=found.w1.tolist(),
            sd_ratio=found.sd_ratio.tolist(),
            estimated_sd_ratio=bias.sd_ratio.tolist(),
            estimated_shift=bias.shift.tolist(),
        )


def gaussian_rows(x):
    """Five numbers a row, their means unknown."""
    loc = numpyro.sample("loc", dist.Normal(0, 3).expand([5]).to_event(1))
    with numpyro.plate("units", x.shape[0]):
        numpyro.sample("x", dist.Normal(loc, 1).to_event(1), obs=x)


def run_large() -> None:
    """Ten million rows of five numbers: seconds and memory for their sums, and the posterior that they give."""
    x = np.random.default_rng(0).normal(1.0, 1.0, (10_000_000, 5)).astype(np.float32)
    small = jnp.asarray(x[:1000])

    def statistics(x):
        return jnp.concatenate([x, jnp.ones_like(x[:, :1])], axis=1)

    def natural(t):
        return jnp.append(t, -0.5 * t @ t)

    fit = exact_fit(gaussian_rows, (small,), statistics, natural, jnp.ones(5), 0.1 * jnp.ones(5))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    data = fit.condition(jnp.asarray(x))
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    error = (np.asarray(data.mode) - x.mean(0, dtype=np.float64)) * np.sqrt(len(x))
    save(
        "large",
        n=len(x),
        megabytes_of_data=x.nbytes / 1e6,
        more_megabytes=(after - before) / 1e3,
        seconds=seconds,
        error_in_sds=error.tolist(),
    )


def save(task: str, **row) -> None:
    """Print a row and keep it."""
    print(task, row, flush=True)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with RESULTS.open("a") as file:
        file.write(json.dumps({"task": task, **row}) + "\n")


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description="What sampling costs.")
    parser.add_argument("tasks", nargs="*", default=["cost", "bias", "large"])
    for task in parser.parse_args().tasks:
        {"cost": run_cost, "bias": run_bias, "large": run_large}[task]()


if __name__ == "__main__":
    main()

"""Models whose posterior is known: each with its data, and the same model with the nuisances integrated out."""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import random
import jax.numpy as jnp
from jax.scipy.special import logsumexp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

from numpyro_sls import Simulated
from numpyro_sls.metrics import w1


class Case(NamedTuple):
    model: Callable
    marginal: Callable  # the likelihood written down, for NUTS
    simulate: Callable  # rng_key, n -> model arguments
    n: int


def gaussian_mean(x):
    loc = numpyro.sample("loc", dist.Normal(0, 3).expand([3]).to_event(1))
    with numpyro.plate("units", x.shape[0]):
        numpyro.sample("x", dist.Normal(loc, 1).to_event(1), obs=x)


def gaussian_mean_data(rng_key, n):
    return (jnp.array([1.0, -0.5, 2.0]) + random.normal(rng_key, (n, 3)),)


def gaussian(x):
    loc = numpyro.sample("loc", dist.Normal(0, 5))
    log_sd = numpyro.sample("log_sd", dist.Normal(0, 1))
    with numpyro.plate("units", x.shape[0]):
        numpyro.sample("x", dist.Normal(loc, jnp.exp(log_sd)), obs=x)


def gaussian_data(rng_key, n):
    return (1 + 2 * random.normal(rng_key, (n,)),)


def hierarchy(x):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfNormal(2))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2))
    with numpyro.plate("units", x.shape[0]):
        z = numpyro.sample("z", dist.Normal(mu, tau))
        numpyro.sample("x", dist.Normal(z[..., None] + jnp.zeros(3), sigma).to_event(1), obs=x)


def hierarchy_marginal(x):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfNormal(2))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2))
    covariance = sigma**2 * jnp.eye(3) + tau**2
    with numpyro.plate("units", x.shape[0]):
        numpyro.sample("x", dist.MultivariateNormal(mu * jnp.ones(3), covariance), obs=x)


def hierarchy_data(rng_key, n):
    key_z, key_x = random.split(rng_key)
    return (1 + random.normal(key_z, (n, 1)) + 0.7 * random.normal(key_x, (n, 3)),)


def poisson(x):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    sd = numpyro.sample("sd", dist.HalfNormal(2))
    with numpyro.plate("units", x.shape[0]):
        z = numpyro.sample("z", dist.Normal(mu, sd))
        numpyro.sample("x", dist.Poisson(jnp.exp(z)[..., None] + jnp.zeros(5)).to_event(1), obs=x)


NODES = jnp.linspace(-6, 6, 121)


def poisson_log_likelihood(total, mu, sd):
    """log of int Poisson(total | 5 e^z) N(z | mu, sd) dz by the trapezoid rule, up to a constant."""
    z = mu + sd * NODES
    return logsumexp(-0.5 * NODES**2 + total[:, None] * z - 5 * jnp.exp(z), axis=1)


def poisson_marginal(x):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    sd = numpyro.sample("sd", dist.HalfNormal(2))
    totals, counts = np.unique(np.asarray(x).sum(1), return_counts=True)  # few distinct ones, even for large n
    numpyro.factor("x", jnp.sum(counts * poisson_log_likelihood(jnp.asarray(totals, float), mu, sd)))


def poisson_data(rng_key, n):
    key_z, key_x = random.split(rng_key)
    rate = jnp.exp(0.7 + 0.6 * random.normal(key_z, (n, 1)))
    return (random.poisson(key_x, jnp.broadcast_to(rate, (n, 5))),)


def regression(c, y):
    beta = numpyro.sample("beta", dist.Normal(0, 3).expand([4]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2))
    with numpyro.plate("units", y.shape[0]):
        c = numpyro.subsample(c, event_dim=1)
        weight = numpyro.sample("weight", dist.Gamma(2, 2))
        numpyro.sample("y", dist.Normal(c @ beta, sigma / jnp.sqrt(weight)), obs=y)


def regression_marginal(c, y):
    beta = numpyro.sample("beta", dist.Normal(0, 3).expand([4]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2))
    with numpyro.plate("units", y.shape[0]):
        numpyro.sample("y", dist.StudentT(4, c @ beta, sigma), obs=y)


def regression_data(rng_key, n):
    key_c, key_y = random.split(rng_key)
    c = jnp.concatenate([jnp.ones((n, 1)), random.normal(key_c, (n, 3))], axis=1)
    return c, c @ jnp.array([0.5, 1.0, -1.0, 0.3]) + 0.8 * random.t(key_y, 4, (n,))


def mixture(x):
    p = numpyro.sample("p", dist.Beta(2, 2))
    low = numpyro.sample("low", dist.Normal(0, 3))
    gap = numpyro.sample("gap", dist.HalfNormal(4))
    with numpyro.plate("units", x.shape[0]):
        z = numpyro.sample("z", dist.Bernoulli(p))
        numpyro.sample("x", dist.Normal(low + gap * z, 0.8), obs=x)


def mixture_marginal(x):
    p = numpyro.sample("p", dist.Beta(2, 2))
    low = numpyro.sample("low", dist.Normal(0, 3))
    gap = numpyro.sample("gap", dist.HalfNormal(4))
    parts = [jnp.log1p(-p) + dist.Normal(low, 0.8).log_prob(x), jnp.log(p) + dist.Normal(low + gap, 0.8).log_prob(x)]
    numpyro.factor("x", jnp.sum(jnp.logaddexp(*parts)))


def mixture_data(rng_key, n):
    key_z, key_x = random.split(rng_key)
    return (-1 + 3 * random.bernoulli(key_z, 0.3, (n,)) + 0.8 * random.normal(key_x, (n,)),)


def normal_exponential(x):
    loc = numpyro.sample("loc", dist.Normal(0, 3))
    scale = numpyro.sample("scale", dist.HalfNormal(3))
    rate = numpyro.sample("rate", dist.Gamma(2, 2))
    with numpyro.plate("units", x.shape[0]):
        z = numpyro.sample("z", dist.Normal(loc, scale))
        e = numpyro.sample("e", dist.Exponential(rate))
        numpyro.sample("x", Simulated(z + e), obs=x)


def normal_exponential_log_likelihood(x, loc, scale, rate):
    """The exponentially modified Gaussian."""
    shift = (x - loc) / scale - rate * scale
    return jnp.log(rate) + rate * (loc - x) + 0.5 * (rate * scale) ** 2 + jax.scipy.stats.norm.logcdf(shift)


def normal_exponential_marginal(x):
    loc = numpyro.sample("loc", dist.Normal(0, 3))
    scale = numpyro.sample("scale", dist.HalfNormal(3))
    rate = numpyro.sample("rate", dist.Gamma(2, 2))
    numpyro.factor("x", jnp.sum(normal_exponential_log_likelihood(x, loc, scale, rate)))


def normal_exponential_data(rng_key, n):
    key_z, key_e = random.split(rng_key)
    return (0.7 * random.normal(key_z, (n,)) + random.exponential(key_e, (n,)) / 0.7,)


def location_scale(x):
    a = numpyro.sample("a", dist.Normal(0, 5))
    b = numpyro.sample("b", dist.HalfNormal(5))
    with numpyro.plate("units", x.shape[0]):
        z = numpyro.sample("z", dist.Normal())
        numpyro.sample("x", Simulated(a + b * z), obs=x)


def location_scale_marginal(x):
    a = numpyro.sample("a", dist.Normal(0, 5))
    b = numpyro.sample("b", dist.HalfNormal(5))
    with numpyro.plate("units", x.shape[0]):
        numpyro.sample("x", dist.Normal(a, b), obs=x)


def only_its_size(x):
    t = numpyro.sample("t", dist.Normal(0, 3))
    with numpyro.plate("units", x.shape[0]):
        z = numpyro.sample("z", dist.Normal())
        numpyro.sample("x", Simulated(jnp.abs(t) + z), obs=x)


CENTRES = jnp.array([-2.0, 0.0, 2.5])


def simplex(x):
    probs = numpyro.sample("probs", dist.Dirichlet(jnp.ones(3)))
    with numpyro.plate("units", x.shape[0]):
        k = numpyro.sample("k", dist.Categorical(probs))
        numpyro.sample("x", dist.Normal(CENTRES[k], 0.8), obs=x)


def simplex_marginal(x):
    probs = numpyro.sample("probs", dist.Dirichlet(jnp.ones(3)))
    numpyro.factor("x", jnp.sum(logsumexp(jnp.log(probs) + dist.Normal(CENTRES, 0.8).log_prob(x[:, None]), axis=1)))


def simplex_data(rng_key, n):
    key_k, key_x = random.split(rng_key)
    k = random.categorical(key_k, jnp.log(jnp.array([0.2, 0.5, 0.3])), shape=(n,))
    return (CENTRES[k] + 0.8 * random.normal(key_x, (n,)),)


CASES = {
    "gaussian_mean": Case(gaussian_mean, gaussian_mean, gaussian_mean_data, 100),
    "gaussian": Case(gaussian, gaussian, gaussian_data, 500),
    "hierarchy": Case(hierarchy, hierarchy_marginal, hierarchy_data, 200),
    "poisson": Case(poisson, poisson_marginal, poisson_data, 1000),
    "regression": Case(regression, regression_marginal, regression_data, 300),
    "mixture": Case(mixture, mixture_marginal, mixture_data, 500),
    "normal_exponential": Case(normal_exponential, normal_exponential_marginal, normal_exponential_data, 500),
    "location_scale": Case(location_scale, location_scale_marginal, gaussian_data, 500),
    "simplex": Case(simplex, simplex_marginal, simplex_data, 300),
    "poisson_large": Case(poisson, poisson_marginal, poisson_data, 100_000),
}


def exact_samples(case: Case, args: tuple, num_samples: int = 2000) -> dict[str, np.ndarray]:
    """Draws by NUTS on the likelihood written down, four chains."""
    mcmc = MCMC(NUTS(case.marginal), num_warmup=500, num_samples=num_samples, num_chains=4, chain_method="vectorized", progress_bar=False)
    mcmc.run(random.key(7), *args)
    return {k: np.asarray(v) for k, v in mcmc.get_samples().items()}


class Distance(NamedTuple):
    w1: np.ndarray  # by scalar component, in exact sds
    sd_ratio: np.ndarray
    shift: np.ndarray  # of the mean, in exact sds


def compare(ours: dict[str, np.ndarray], exact: dict[str, np.ndarray]) -> Distance:
    """One-dimensional distances of every scalar component that both have."""
    names = [k for k in exact if k in ours]
    a, b = (np.concatenate([np.asarray(s[k]).reshape(len(s[k]), -1) for k in names], axis=1) for s in (ours, exact))
    sd = b.std(0)
    return Distance(w1(a, b), a.std(0) / sd, (a.mean(0) - b.mean(0)) / sd)

r"""A binomial count with a Beta prior: how the score's error grows where the prior has little mass (paper, appendix on localization).

theta ~ Beta(5, 5),    x ~ Binomial(100, theta).
"""

from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float
import numpyro
import numpyro.distributions as dist

__all__ = ["SETTINGS", "TRUTH", "exact_posterior", "log_likelihood", "model", "simulate_data"]

NUM_TRIALS = 100
PRIOR = (5.0, 5.0)
TRUTH = {"theta": 0.5}
SETTINGS: dict[str, Any] = {}


def model(x: Float[Array, " n"]) -> None:
    """Independent counts; the paper has one."""
    theta = numpyro.sample("theta", dist.Beta(*PRIOR))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("x", dist.Binomial(NUM_TRIALS, theta), obs=x)


def log_likelihood(params: dict[str, Array], x: Float[Array, "m 1"]) -> Float[Array, " m"]:
    """Of every row, up to a constant."""
    theta = params["theta"]
    return x[:, 0] * jnp.log(theta) + (NUM_TRIALS - x[:, 0]) * jnp.log1p(-theta)


def simulate_data(rng_key: Array, n: int = 1, theta: float = TRUTH["theta"]) -> Float[Array, " n"]:
    """n counts at theta."""
    return jax.random.binomial(rng_key, NUM_TRIALS, theta, (n,))


def exact_posterior(rng_key: Array, x: Float[Array, " n"], num_samples: int = 10_000) -> Float[Array, " s"]:
    """Draws of theta."""
    a, b = PRIOR
    return jax.random.beta(rng_key, a + x.sum(), b + NUM_TRIALS * x.shape[0] - x.sum(), (num_samples,))

r"""Categories with a Dirichlet prior: three of them, two free parameters (paper, appendix on curvature matching).

    theta ~ Dirichlet(3, 3, 3),    x_i ~ Categorical(theta),

each x_i given as its three indicators. The posterior is Dirichlet(3 + counts).
"""

from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float
import numpyro
import numpyro.distributions as dist

__all__ = ["SETTINGS", "TRUTH", "exact_posterior", "log_likelihood", "model", "simulate_data"]

CONCENTRATION = 3.0
TRUTH = {"theta": jnp.array([0.2, 0.3, 0.5])}
SETTINGS: dict[str, Any] = {}


def model(x: Float[Array, "n 3"]) -> None:
    """Rows of indicators, one category each."""
    theta = numpyro.sample("theta", dist.Dirichlet(CONCENTRATION * jnp.ones(3)))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("x", dist.Multinomial(1, theta), obs=x)


def log_likelihood(params: dict[str, Array], x: Float[Array, "m 3"]) -> Float[Array, " m"]:
    """Of every row."""
    return x @ jnp.log(params["theta"])


def simulate_data(rng_key: Array, n: int = 100) -> Float[Array, "n 3"]:
    """n rows at the truth."""
    return jax.nn.one_hot(jax.random.categorical(rng_key, jnp.log(TRUTH["theta"]), shape=(n,)), 3)


def exact_posterior(rng_key: Array, x: Float[Array, "n 3"], num_samples: int = 10_000) -> Float[Array, "s 3"]:
    """Draws of theta."""
    return jax.random.dirichlet(rng_key, CONCENTRATION + x.sum(0), (num_samples,))

r"""The g-and-k distribution, given by its quantile function, on daily log returns of an exchange rate.

    Q(z) = a + b (1 + 0.8 tanh(g z / 2)) (1 + z^2)^k z,    z ~ N(0, 1),

with the prior a ~ U[-0.1, 0.1], b ~ U[0, 0.05], g ~ U[-1, 1], k ~ U[-0.2, 0.5].
"""

from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float
import numpyro
import numpyro.distributions as dist

from numpyro_sls.model import Simulated

__all__ = ["SETTINGS", "TRUTH", "model", "quantile", "simulate_data"]

TRUTH = {"a": 0.0, "b": 0.005, "g": -0.1, "k": 0.2}  # of simulated data: of the size that the returns have
SETTINGS: dict[str, Any] = {}


def model(x: Float[Array, " n"]) -> None:
    """Independent rows of the g-and-k distribution."""
    a = numpyro.sample("a", dist.Uniform(-0.1, 0.1))
    b = numpyro.sample("b", dist.Uniform(0.0, 0.05))
    g = numpyro.sample("g", dist.Uniform(-1.0, 1.0))
    k = numpyro.sample("k", dist.Uniform(-0.2, 0.5))
    with numpyro.plate("rows", x.shape[0]):
        z = numpyro.sample("z", dist.Normal())
        numpyro.sample("x", Simulated(quantile(z, a, b, g, k)), obs=x)


def quantile(z: Float[Array, "*batch"], a: Array, b: Array, g: Array, k: Array) -> Float[Array, "*batch"]:
    """The value at the standard normal quantile z."""
    return a + b * (1 + 0.8 * jnp.tanh(g * z / 2)) * (1 + z**2) ** k * z


def simulate_data(rng_key: Array, n: int = 1651) -> Float[Array, " n"]:
    """n rows at the truth."""
    z = jax.random.normal(rng_key, (n,))
    return quantile(z, *(jnp.asarray(v) for v in TRUTH.values()))

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

from numpyro_sls.debias import Debias
from numpyro_sls.model import Simulated
from numpyro_sls.models.reference import uniform_prior_posterior

__all__ = ["SETTINGS", "TRUTH", "exact_posterior", "log_likelihood", "model", "quantile", "simulate_data"]

TRUTH = {"a": 0.0, "b": 0.005, "g": -0.1, "k": 0.2}  # of simulated data: of the size that the returns have
# Returns as far out as two of the real ones hang on simulations near the posterior.
SETTINGS: dict[str, Any] = {"debias": Debias(max_simulations=40_000_000)}
PRIOR = {"a": (-0.1, 0.1), "b": (0.0, 0.05), "g": (-1.0, 1.0), "k": (-0.2, 0.5)}


def model(x: Float[Array, " n"]) -> None:
    """Independent rows of the g-and-k distribution."""
    a, b, g, k = (numpyro.sample(name, dist.Uniform(*ends)) for name, ends in PRIOR.items())
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


FARTHEST, NUM_HALVINGS = 12.0, 40  # of the latent normal, and of the interval in which it is sought


def log_likelihood(params: dict[str, Array], x: Float[Array, "m 1"]) -> Float[Array, " m"]:
    """Log density of every row: Q is inverted by bisection, then phi(z) / Q'(z)."""
    a, b, g, k = (jnp.asarray(params[name]) for name in PRIOR)
    value = x[:, 0]

    def halve(_, ends):
        low, high = ends
        middle = 0.5 * (low + high)
        below = quantile(middle, a, b, g, k) < value
        return jnp.where(below, middle, low), jnp.where(below, high, middle)

    low, high = jax.lax.fori_loop(0, NUM_HALVINGS, halve, (jnp.full_like(value, -FARTHEST), jnp.full_like(value, FARTHEST)))
    z = jax.lax.stop_gradient(0.5 * (low + high))
    slope = jax.vmap(jax.grad(lambda u: quantile(u, a, b, g, k)))
    z = z - (quantile(z, a, b, g, k) - value) / slope(z)  # a Newton step, through which z follows the parameters
    return -0.5 * z**2 - 0.5 * jnp.log(2 * jnp.pi) - jnp.log(slope(z))


def exact_posterior(rng_key: Array, x: Float[Array, " n"], num_samples: int = 2000) -> Float[Array, "draws 4"]:
    """Draws of (a, b, g, k), by NUTS on the density, four chains."""
    return uniform_prior_posterior(rng_key, PRIOR, lambda params: log_likelihood(params, x[:, None]).sum(), num_samples)

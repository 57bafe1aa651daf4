"""Exact posteriors of models whose density can be written down after all."""

from collections.abc import Callable, Mapping

from jax import Array
import jax.numpy as jnp
from jaxtyping import Float
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

__all__ = ["uniform_prior_posterior"]


def uniform_prior_posterior(
    rng_key: Array,
    ends: Mapping[str, tuple[float, float]],
    log_likelihood: Callable[[dict[str, Array]], Float[Array, ""]],
    num_samples: int,
) -> Float[Array, "draws d"]:
    """Draws of the parameters, in the order of their intervals, by NUTS on the density; four chains of ``num_samples``."""

    def model():
        params = {name: numpyro.sample(name, dist.Uniform(*interval)) for name, interval in ends.items()}
        numpyro.factor("data", log_likelihood(params))

    mcmc = MCMC(NUTS(model), num_warmup=500, num_samples=num_samples, num_chains=4, chain_method="vectorized", progress_bar=False)
    mcmc.run(rng_key)
    return jnp.stack([mcmc.get_samples()[name] for name in ends], axis=1)

"""Data whose support moves with a parameter: Gaussian smoothing of the data (paper, appendix on the boundary, solution 2)."""

from dataclasses import dataclass

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float

__all__ = ["Smoothing", "smoothing_sd"]


@dataclass(frozen=True)
class Smoothing:
    """Add Gaussian noise to every observation, simulated and real, so that the likelihood has no jump in the parameters.

    :param scale: sd of the noise, in robust sds of the data. The posterior is that of the noised data: less noise is
        nearer to the data, more is easier to learn.

    **Example:**

    >>> from numpyro_sls import Smoothing
    >>> Smoothing(0.02).scale
    0.02
    """

    scale: float = 0.01

    def __post_init__(self):
        if not self.scale > 0:
            raise ValueError(f"Smoothing(scale={self.scale}) must be positive; leave smoothing=None for none.")

    def apply(self, rng_key: Array, x: Float[Array, "n p"], num_observed: int) -> Float[Array, "n p"]:
        """The data with noise on the observed columns; covariates stay as they are."""
        sd = smoothing_sd(self, x[:, :num_observed])
        noised = x[:, :num_observed] + sd * jax.random.normal(rng_key, (x.shape[0], num_observed))
        return jnp.concatenate([noised, x[:, num_observed:]], axis=1)


def smoothing_sd(smoothing: Smoothing, x: Float[Array, "n p"]) -> Float[Array, " p"]:
    """The sd of the noise in each column."""
    low, high = jnp.quantile(x, jnp.array([0.25, 0.75]), axis=0)
    return smoothing.scale * (high - low) / 1.35

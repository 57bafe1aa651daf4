"""Where a sampler moves if the posterior leans on the ends of intervals: in the parameters' own values."""

from typing import NamedTuple

from jax import Array
import jax.numpy as jnp
from jax.scipy.special import ndtr, ndtri
from jaxtyping import Float

__all__ = ["Chart"]


class Chart(NamedTuple):
    """Coordinates of the sampler in the parameters' own values, v = centre + factor @ delta, of which theta is known.

    Where a posterior leans on the ends of intervals it has no shape on the line that a step could be fitted to. In the values
    themselves it is smooth up to the ends, beyond which nothing is possible.
    """

    centre: Float[Array, " d"]
    factor: Float[Array, "d d"]
    inverse: Float[Array, "d d"]
    low: Float[Array, " d"]
    width: Float[Array, " d"]  # of the intervals; infinite: theta itself

    def theta(self, delta: Float[Array, " d"]) -> Float[Array, " d"]:
        """Not a number beyond the ends."""
        values, (bounded, low, width) = self.centre + self.factor @ delta, self._ends()
        return jnp.where(bounded, ndtri(jnp.where(bounded, (values - low) / width, 0.5)), values)

    def delta(self, theta: Float[Array, " d"]) -> Float[Array, " d"]:
        bounded, low, width = self._ends()
        return self.inverse @ (jnp.where(bounded, low + width * ndtr(theta), theta) - self.centre)

    def log_slope(self, theta: Float[Array, " d"]) -> Float[Array, ""]:
        """log det dv / dtheta."""
        bounded, _, width = self._ends()
        return jnp.sum(jnp.where(bounded, jnp.log(width) - 0.5 * theta**2 - 0.5 * jnp.log(2 * jnp.pi), 0.0))

    def _ends(self) -> tuple[Array, Array, Array]:
        bounded = jnp.isfinite(self.width)
        return bounded, jnp.where(bounded, self.low, 0.0), jnp.where(bounded, self.width, 1.0)

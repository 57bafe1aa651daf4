"""How a network sees its inputs: units standardized, in several views, and parameters in their own values."""

from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jax.scipy.special import ndtr, ndtri
from jaxtyping import Float, Int
import numpy as np

__all__ = ["NUM_VIEWS", "Layout", "Standardizer", "embedded_standardizer", "make_layout", "make_standardizer"]


class Standardizer(NamedTuple):
    """Centre and scale of every number of a unit, robust to heavy tails; covariates are whitened."""

    centre: Float[Array, " p"]
    scale: Float[Array, " p"]
    mix: Float[Array, "c c"]  # the covariates', the last of the numbers
    pairs: Int[Array, "2 k"]  # whose products are shown too

    def __call__(self, x: Float[Array, "m p"]) -> Float[Array, "m q"]:
        """Views of x: near linear and bounded, logarithmic, the square and the signed square of the first, and products of two."""
        z, num_responses = (x - self.centre) / self.scale, self.centre.shape[0] - self.mix.shape[0]
        z = jnp.concatenate([z[..., :num_responses], z[..., num_responses:] @ self.mix], axis=-1)
        clip = jnp.where(np.arange(z.shape[-1]) < num_responses, CLIP, COVARIATE_CLIP)
        u = z / jnp.sqrt(1 + (z / clip) ** 2)
        views = [u, jnp.arcsinh(2 * z), 0.3 * u**2, 0.3 * u * jnp.abs(u)]
        if self.pairs.shape[-1]:
            views.append(u[..., self.pairs[0]] * u[..., self.pairs[1]])
        return jnp.concatenate(views, axis=-1)


NUM_VIEWS = 4
CLIP, COVARIATE_CLIP = 10.0, 30.0  # scales, up to which a number is shown about linearly
MAX_PAIRS = 80
LEAST_SHARE = 1e-10  # of a direction in the variance of the covariates, below which rounding is all there is


def make_standardizer(x: Float[Array, "m p"], covariates: Float[np.ndarray, "n c"] | None = None) -> Standardizer:
    """Median and interquartile range over 1.35, which is the sd of a Gaussian; the sd where the quartiles coincide.

    Covariates, the last numbers of a unit, are known beforehand. They are made uncorrelated: where they are nearly collinear
    (polynomials), the small differences between them are what weakly identified parameters hang on. Their products with each
    other and with the responses are shown too, if few: what a regression keeps of its data is made of these.
    """
    low, centre, high = jnp.quantile(x, jnp.array([0.25, 0.5, 0.75]), axis=0)
    sd = jnp.std(x, axis=0)
    scale = jnp.where(high > low, (high - low) / 1.35, jnp.where(sd > 0, sd, 1.0))
    if covariates is None or covariates.shape[1] == 0:
        return Standardizer(centre, scale, jnp.zeros((0, 0)), jnp.zeros((2, 0), int))
    c, p, num_responses = np.asarray(covariates, float), x.shape[1], x.shape[1] - covariates.shape[1]
    spread = np.where(c.std(0) > 0, c.std(0), 1.0)
    centre = jnp.concatenate([centre[:num_responses], jnp.asarray(c.mean(0), x.dtype)])
    scale = jnp.concatenate([scale[:num_responses], jnp.asarray(spread, x.dtype)])
    values, vectors = np.linalg.eigh(np.atleast_2d(np.cov(((c - c.mean(0)) / spread).T, bias=True)))
    values = np.where(values > LEAST_SHARE * values[-1], values, np.inf)
    i, j = np.triu_indices(p, 1)
    chosen = j >= num_responses  # j > i: a covariate with a response or with another
    if chosen.sum() > MAX_PAIRS:
        chosen &= i < num_responses
    if chosen.sum() > MAX_PAIRS:
        chosen &= False
    pairs = np.stack([i[chosen], j[chosen]])
    return Standardizer(centre, scale, jnp.asarray((vectors / np.sqrt(values))[:, ::-1], x.dtype), jnp.asarray(pairs))


def embedded_standardizer(x: Float[Array, "m p"]) -> Standardizer:
    """Mean and sd of every number without its outermost hundredths, for an embedding that shares its weights between numbers.

    Quartiles of counts jump from one number to the next, and would make alike what is not, and the other way round.
    """
    low, high = jnp.quantile(x, jnp.array([0.01, 0.99]), axis=0)
    x = jnp.clip(x, low, high)
    scale = jnp.std(x, axis=0)
    return Standardizer(x.mean(0), jnp.where(scale > 0, scale, 1.0), jnp.zeros((0, 0)), jnp.zeros((2, 0), int))


class Layout(NamedTuple):
    """Parameters in their own values: from the whitened eta to intervals as they are, whitened again.

    What a likelihood is made of is often simple there (linear, quadratic), and not where an interval is stretched to a line.
    """

    mean: Float[Array, " d"]  # theta = mean + factor @ eta
    factor: Float[Array, "d d"]
    low: Float[Array, " d"]
    width: Float[Array, " d"]  # of the intervals; infinite: theta itself
    centre: Float[Array, " d"]
    mix: Float[Array, "d d"]

    def __call__(self, eta: Float[Array, " d"]) -> Float[Array, " d"]:
        return self.mix @ (self.values(self.mean + self.factor @ eta) - self.centre)

    def values(self, theta: Float[Array, " d"]) -> Float[Array, " d"]:
        bounded = jnp.isfinite(self.width)
        return jnp.where(bounded, jnp.where(bounded, self.low, 0.0) + jnp.where(bounded, self.width, 1.0) * ndtr(theta), theta)

    def theta(self, values: Float[Array, " d"]) -> Float[Array, " d"]:
        """The way back from a parameter's own values to theta."""
        bounded = jnp.isfinite(self.width)
        share = (values - jnp.where(bounded, self.low, 0.0)) / jnp.where(bounded, self.width, 1.0)
        return jnp.where(bounded, ndtri(jnp.where(bounded, share, 0.5)), values)

    def slopes(self, eta: Float[Array, " d"]) -> Float[Array, " d"]:
        """Of every value in its own theta."""
        theta, bounded = self.mean + self.factor @ eta, jnp.isfinite(self.width)
        return jnp.where(bounded, jnp.where(bounded, self.width, 1.0) * jnp.exp(-0.5 * theta**2) / jnp.sqrt(2 * jnp.pi), 1.0)

    def derivatives(self, eta: Float[Array, " d"]) -> tuple[Float[Array, "d d"], Float[Array, "d d"]]:
        """First derivatives, (i, j) of the i-th by eta_j, and the second ones by each eta_j alone."""
        slope, theta = self.slopes(eta), self.mean + self.factor @ eta
        change = jnp.where(jnp.isfinite(self.width), -theta * slope, 0.0)
        return (self.mix * slope) @ self.factor, (self.mix * change) @ self.factor**2


def make_layout(
    theta: Float[Array, "k d"], mean: Float[Array, " d"], factor: Float[Array, "d d"], low: np.ndarray, high: np.ndarray
) -> Layout:
    """Whitened by the values at some draws of theta."""
    d = len(low)
    layout = Layout(mean, factor, jnp.asarray(low, mean.dtype), jnp.asarray(high - low, mean.dtype), jnp.zeros(d), jnp.eye(d))
    values = jax.vmap(layout.values)(theta)
    centre, sd = values.mean(0), values.std(0) + 1e-12
    values, vectors = jnp.linalg.eigh(jnp.cov(((values - centre) / sd).T).reshape(d, d))
    mix = (vectors / jnp.sqrt(jnp.maximum(values, 1e-6))).T / sd
    return layout._replace(centre=centre, mix=mix)

"""The Gaussian that parameters are trained under: where it is, how wide, and the whitened coordinates it gives."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jax.scipy.special import ndtr, ndtri
from jaxtyping import Bool, Float
import numpy as np

__all__ = ["FromRestarts", "Proposal", "WorthUnits", "default_kappa", "from_restarts", "in_box", "worth_units"]


@dataclass(frozen=True)
class WorthUnits:
    """Train under N(centre, (prior precision + kappa I_1)^-1), as wide as a posterior from kappa units of data.

    :param kappa: how many units; None: from the budget and the targets.
    :param num_rounds: short rounds, at most, in which centre and information are learnt before.

    **Example:**

    >>> from numpyro_sls import WorthUnits
    >>> WorthUnits(kappa=3.0).num_rounds
    3
    """

    kappa: float | None = None
    num_rounds: int = 3

    def __post_init__(self):
        if self.kappa is not None and not self.kappa > 0:
            raise ValueError(f"WorthUnits(kappa={self.kappa}) must be positive; leave kappa=None to choose it by the budget.")
        if self.num_rounds < 1:
            raise ValueError(f"WorthUnits(num_rounds={self.num_rounds}) must be at least 1.")


@dataclass(frozen=True)
class FromRestarts:
    """Train under a Gaussian about as wide as the posterior, as the paper does: (prior precision + n I_1)^-1, I_1 from the scatter of the restarts.

    :param diagonal: only the variances (the paper's choice), or the whole covariance.
    :param widen: factor on the sds.

    **Example:**

    >>> from numpyro_sls import FromRestarts
    >>> FromRestarts(diagonal=False).widen
    1.0
    """

    diagonal: bool = True
    widen: float = 1.0

    def __post_init__(self):
        if not self.widen > 0:
            raise ValueError(f"FromRestarts(widen={self.widen}) must be positive.")


class Proposal(NamedTuple):
    """l = mean + factor @ eta with eta standard normal; all learning happens in eta.

    l is theta itself, or where there are bounds, l_j = low_j + (high_j - low_j) Phi(theta_j): an interval as it is, and eta
    is then normal where that falls between the bounds.
    """

    mean: Float[Array, " d"]
    factor: Float[Array, "d d"]
    inverse: Float[Array, "d d"]  # of the factor
    low: Float[Array, " d"] | None = None
    high: Float[Array, " d"] | None = None

    @property
    def dim(self) -> int:
        return self.mean.shape[-1]

    @property
    def covariance(self) -> Float[Array, "d d"]:
        return self.factor @ self.factor.T

    @property
    def bounds(self) -> tuple[Float[Array, " d"], Float[Array, " d"]]:
        """Of eta, where the factor is diagonal; infinite where there are none."""
        if self.low is None or self.high is None:
            return jnp.full(self.dim, -jnp.inf), jnp.full(self.dim, jnp.inf)
        sd = jnp.diag(self.factor)
        return (self.low - self.mean) / sd, (self.high - self.mean) / sd

    def learnt(self, theta: Float[Array, " d"]) -> Float[Array, " d"]:
        """l, the coordinates that are whitened."""
        if self.low is None or self.high is None:
            return theta
        bounded = jnp.isfinite(self.low)
        low, width = jnp.where(bounded, self.low, 0.0), jnp.where(bounded, self.high - self.low, 1.0)
        return jnp.where(bounded, low + width * ndtr(theta), theta)

    def slopes(self, theta: Float[Array, " d"]) -> Float[Array, " d"]:
        """dl / dtheta."""
        if self.low is None or self.high is None:
            return jnp.ones_like(theta)
        width = jnp.where(jnp.isfinite(self.low), self.high - self.low, 1.0)
        return jnp.where(jnp.isfinite(self.low), width * jnp.exp(-0.5 * theta**2) / jnp.sqrt(2 * jnp.pi), 1.0)

    def whiten(self, theta: Float[Array, " d"]) -> Float[Array, " d"]:
        return self.inverse @ (self.learnt(theta) - self.mean)

    def unwhiten(self, eta: Float[Array, " d"]) -> Float[Array, " d"]:
        place = self.mean + self.factor @ eta
        if self.low is None or self.high is None:
            return place
        bounded = jnp.isfinite(self.low)
        low, width = jnp.where(bounded, self.low, 0.0), jnp.where(bounded, self.high - self.low, 1.0)
        return jnp.where(bounded, ndtri(jnp.clip((place - low) / width, EDGE, 1 - EDGE)), place)

    def score_in_eta(self, theta: Float[Array, " d"], score: Float[Array, "m d"]) -> Float[Array, "m d"]:
        """A gradient in theta as one in eta."""
        return (score if self.low is None else score / self.slopes(theta)) @ self.factor

    def score_in_theta(self, theta: Float[Array, " d"], score: Float[Array, "*m d"]) -> Float[Array, "*m d"]:
        """A gradient in eta as one in theta."""
        return score @ self.inverse * self.slopes(theta)

    def frame(self) -> tuple[Float[Array, " d"], Float[Array, "d d"]]:
        """Centre and factor of about the same Gaussian in theta."""
        centre = self.unwhiten(jnp.zeros_like(self.mean))
        return centre, self.factor / self.slopes(centre)[:, None]

    def sample(self, rng_key: Array, num: int) -> Float[Array, "num d"]:
        if self.low is None:
            return self.mean + jax.random.normal(rng_key, (num, self.dim)) @ self.factor.T
        eta = jax.random.truncated_normal(rng_key, *self.bounds, (num, self.dim))
        return jax.vmap(self.unwhiten)(eta)


EDGE = 1e-6  # of an interval, which single precision cannot tell from its end


def worth_units(
    centre: Float[Array, " d"],
    prior_covariance: Float[Array, "d d"],
    information: Float[Array, "d d"],
    kappa: float,
    joint_valid: Bool[np.ndarray, " d"],
) -> Proposal:
    """N(centre, (prior precision + kappa I_1)^-1): as wide as a posterior from kappa units would be.

    The coordinates without a valid joint score come first in the Cholesky order. Then the last directions of eta are
    made of coordinates with a valid one only, and the joint target holds there as it stands.
    """
    precision = np.linalg.inv(np.asarray(prior_covariance, float)) + kappa * np.asarray(information, float)
    return _gaussian(centre, np.linalg.inv((precision + precision.T) / 2), joint_valid)


def from_restarts(
    centre: Float[Array, " d"], covariance: Float[Array, "d d"], settings: FromRestarts, joint_valid: Bool[np.ndarray, " d"]
) -> Proposal:
    """The paper's proposal: the Gaussian of the restarts, diagonal or full."""
    wide = settings.widen**2 * np.asarray(covariance, float)
    return _gaussian(centre, np.diag(np.diag(wide)) if settings.diagonal else wide, joint_valid)


def _gaussian(centre: Float[Array, " d"], covariance: np.ndarray, joint_valid: Bool[np.ndarray, " d"]) -> Proposal:
    order = np.argsort(joint_valid, kind="stable")
    factor = np.zeros_like(covariance)
    factor[order] = np.linalg.cholesky(covariance[np.ix_(order, order)])
    return Proposal(jnp.asarray(centre), jnp.asarray(factor), jnp.asarray(np.linalg.inv(factor)))


def in_box(proposal: Proposal, low: Float[np.ndarray, " d"], high: Float[np.ndarray, " d"]) -> Proposal:
    """The same Gaussian, its variances only, on intervals as they are instead of laid out on the whole line."""
    laid = Proposal(
        proposal.mean, proposal.factor, proposal.inverse, jnp.asarray(low, proposal.mean.dtype), jnp.asarray(high, proposal.mean.dtype)
    )
    draws = jax.vmap(laid.learnt)(proposal.sample(jax.random.key(0), 4000))
    centre, sd = np.asarray(laid.learnt(proposal.mean)), np.asarray(draws.std(0))
    return laid._replace(mean=jnp.asarray(centre), factor=jnp.diag(jnp.asarray(sd)), inverse=jnp.diag(jnp.asarray(1 / sd)))


def default_kappa(num_simulations: int, num_units: int, all_joint: bool) -> float:
    """How many units the proposal is worth: narrow enough for the network, wide enough for the implicit target.

    The implicit target's error grows as kappa / N, the network's falls with kappa. The joint target's noise has no kappa in
    it: where it holds in every coordinate, the proposal is narrower. Never more than a ninth of the data, so that the
    posterior lies well inside.
    """
    kappa = np.clip(num_simulations / 8e5, 1.0, 30.0) * (4.0 if all_joint else 1.0)
    return float(min(kappa, num_units / 9))

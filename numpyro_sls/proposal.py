"""The Gaussian that parameters are trained under: where it is, how wide, and the whitened coordinates it gives."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jax.scipy.special import ndtr, ndtri
from jaxtyping import Bool, Float
import numpy as np

__all__ = ["FromRestarts", "Proposal", "WorthUnits", "default_kappa", "from_restarts", "in_box", "information_of", "worth_units"]


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
    is then normal where l falls between the bounds.
    """

    mean: Float[Array, " d"]
    factor: Float[Array, "d d"]
    inverse: Float[Array, "d d"]  # of the factor
    low: Float[Array, " d"] | None = None
    high: Float[Array, " d"] | None = None
    pool: Float[Array, "s d"] | None = None  # draws of eta between the bounds

    @property
    def dim(self) -> int:
        return self.mean.shape[-1]

    @property
    def covariance(self) -> Float[Array, "d d"]:
        return self.factor @ self.factor.T

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
        return (score if self.low is None else score / jnp.maximum(self.slopes(theta), 1e-30)) @ self.factor

    def score_in_theta(self, theta: Float[Array, " d"], score: Float[Array, "*m d"]) -> Float[Array, "*m d"]:
        """A gradient in eta as one in theta."""
        return score @ self.inverse * self.slopes(theta)

    def frame(self) -> tuple[Float[Array, " d"], Float[Array, "d d"]]:
        """Centre and factor of about the same Gaussian in theta."""
        centre = self.unwhiten(jnp.zeros_like(self.mean))
        if self.low is None:
            return centre, self.factor
        # On the line an interval has a standard normal prior: near an end, where a step in theta is hardly one in l, that counts.
        rows = jnp.concatenate([self.inverse * self.slopes(centre), jnp.diag(jnp.isfinite(self.low).astype(centre.dtype))])
        return centre, jnp.linalg.inv(jnp.linalg.qr(rows, mode="r"))

    def sample(self, rng_key: Array, num: int) -> Float[Array, "num d"]:
        if self.pool is None:
            return self.mean + jax.random.normal(rng_key, (num, self.dim)) @ self.factor.T
        return jax.vmap(self.unwhiten)(self.pool[jax.random.randint(rng_key, (num,), 0, len(self.pool))])


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


def information_of(factor: Float[Array, "d d"], prior_covariance: Float[Array, "d d"], num_units: int) -> Float[Array, "d d"]:
    """What one of n units must know for their posterior to have the covariance F F^T; none where it is wider than the prior."""
    root = np.linalg.cholesky(np.asarray(prior_covariance, float))
    whitened = np.linalg.solve(root, np.asarray(factor, float))
    values, vectors = np.linalg.eigh(whitened @ whitened.T)
    directions = np.linalg.solve(root.T, vectors)
    return jnp.asarray((directions * (np.maximum(1 / values - 1, 0.0) / num_units)) @ directions.T)


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


POOL = 32_768
SWEEPS = 200


def in_box(
    proposal: Proposal, prior_covariance: Float[Array, "d d"], low: Float[np.ndarray, " d"], high: Float[np.ndarray, " d"]
) -> Proposal:
    """The same information on intervals as they are, instead of laid out on the whole line, with their own uniform prior."""
    dtype = proposal.mean.dtype
    ends = jnp.asarray(low, dtype), jnp.asarray(high, dtype)
    laid = proposal._replace(low=ends[0], high=ends[1])
    slopes = np.asarray(laid.slopes(proposal.mean), float)
    prior = np.linalg.inv(np.asarray(prior_covariance, float))
    values, vectors = np.linalg.eigh(np.linalg.inv(np.asarray(proposal.covariance, float)) - prior)
    information = (vectors * np.maximum(values, 0.0)) @ vectors.T / np.outer(slopes, slopes)
    bounded = np.isfinite(low)
    precision = np.where(np.outer(~bounded, ~bounded), prior, 0.0) + information
    precision[bounded, bounded] += 12 / (high - low)[bounded] ** 2
    mean = np.asarray(laid.learnt(proposal.mean), float)
    # Coordinate by coordinate, so that the weight of each vanishes at its own two ends only.
    variance = np.diag(np.linalg.inv((precision + precision.T) / 2))
    factor = np.diag(np.sqrt(variance))
    draws = truncated_normal(jax.random.key(0), jnp.asarray(mean, dtype), jnp.asarray(np.diag(1 / variance), dtype), *ends)
    inverse = np.linalg.inv(factor)
    pool = (np.asarray(draws, float) - mean) @ inverse.T
    mean_l, factor_l, inverse_l, pool_l = (jnp.asarray(a, dtype) for a in (mean, factor, inverse, pool))
    return Proposal(mean_l, factor_l, inverse_l, *ends, pool_l)


def truncated_normal(
    rng_key: Array, mean: Float[Array, " d"], precision: Float[Array, "d d"], low: Float[Array, " d"], high: Float[Array, " d"]
) -> Float[Array, "s d"]:
    """Draws of a Gaussian between bounds, by Gibbs sampling from many starts at its mean."""

    def move(x, key_j):
        key, j = key_j
        # given the others, x_j is normal around mean_j - sum_{k != j} P_jk (x_k - mean_k) / P_jj
        off = (x - mean) @ precision[j] - precision[j, j] * (x[:, j] - mean[j])
        centre, sd = mean[j] - off / precision[j, j], 1 / jnp.sqrt(precision[j, j])
        ends = (low[j] - centre) / sd, (high[j] - centre) / sd
        z = jax.random.truncated_normal(key, *ends)
        # Far out in a tail single precision gives up, and the nearest end is as good.
        z = jnp.where(jnp.isfinite(z), z, jnp.clip(0.0, *ends))
        return x.at[:, j].set(jnp.clip(centre + sd * z, low[j], high[j])), None

    @jax.jit
    def run(rng_key):
        d = mean.shape[0]
        x = jnp.broadcast_to(mean, (POOL, d))
        return jax.lax.scan(move, x, (jax.random.split(rng_key, SWEEPS * d), jnp.tile(jnp.arange(d), SWEEPS)))[0]

    return run(rng_key)


def default_kappa(num_simulations: int, num_units: int, all_joint: bool) -> float:
    """How many units the proposal is worth: narrow enough for the network, wide enough for the implicit target.

    The implicit target's error grows as kappa / N, the network's falls with kappa. The joint target's noise has no kappa in
    it: where it holds in every coordinate, the proposal is narrower. Never more than a ninth of the data, so that the
    posterior lies well inside.
    """
    kappa = np.clip(num_simulations / 8e5, 1.0, 30.0) * (4.0 if all_joint else 1.0)
    return float(min(kappa, num_units / 9))

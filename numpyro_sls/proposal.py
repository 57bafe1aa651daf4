"""The Gaussian that parameters are trained under: where it is, how wide, and the whitened coordinates it gives."""

from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Bool, Float
import numpy as np

__all__ = ["Proposal", "default_kappa", "worth_units"]


class Proposal(NamedTuple):
    """theta = mean + factor @ eta with eta standard normal; all learning happens in eta."""

    mean: Float[Array, " d"]
    factor: Float[Array, "d d"]
    inverse: Float[Array, "d d"]  # of the factor

    @property
    def dim(self) -> int:
        return self.mean.shape[-1]

    @property
    def covariance(self) -> Float[Array, "d d"]:
        return self.factor @ self.factor.T

    def whiten(self, theta: Float[Array, " d"]) -> Float[Array, " d"]:
        return self.inverse @ (theta - self.mean)

    def unwhiten(self, eta: Float[Array, " d"]) -> Float[Array, " d"]:
        return self.mean + self.factor @ eta

    def sample(self, rng_key: Array, num: int) -> Float[Array, "num d"]:
        return self.mean + jax.random.normal(rng_key, (num, self.dim)) @ self.factor.T


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
    covariance = np.linalg.inv((precision + precision.T) / 2)
    order = np.argsort(joint_valid, kind="stable")
    factor = np.zeros_like(covariance)
    factor[order] = np.linalg.cholesky(covariance[np.ix_(order, order)])
    return Proposal(jnp.asarray(centre), jnp.asarray(factor), jnp.asarray(np.linalg.inv(factor)))


def default_kappa(num_simulations: int, num_units: int, all_joint: bool) -> float:
    """How many units the proposal is worth: narrow enough for the network, wide enough for the implicit target.

    The implicit target's error grows as kappa / N, the network's falls with kappa. The joint target's noise has no kappa in
    it: where it holds in every coordinate, the proposal is narrower. Never more than a ninth of the data, so that the
    posterior lies well inside.
    """
    kappa = np.clip(num_simulations / 8e5, 1.0, 30.0) * (4.0 if all_joint else 1.0)
    return float(min(kappa, num_units / 9))

"""The posterior score: prior score plus the sum over units of the debiased learned score, and its potential."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float

from numpyro_sls.debias import MeanNetwork
from numpyro_sls.networks import Network, SeparablePotential, Standardizer
from numpyro_sls.proposal import Proposal

__all__ = ["DataTerms", "LearnedScore", "Mode", "PosteriorScore", "UnitScore", "find_mode"]


class UnitScore(NamedTuple):
    """A trained network with the coordinates that it was trained in; arrays only, so that it can be saved and traced."""

    weights: Any
    proposal: Proposal
    standardizer: Standardizer
    mean_weights: Any  # of the network that learnt E[s | theta]; None before debiasing


class DataTerms(NamedTuple):
    """What the posterior of one data set needs beside the network.

    With eta whitened by the proposal and delta = factor^-1 (eta - centre) by the posterior, the local part of the
    debiasing subtracts num_units (offset + slope delta) from the score in delta.
    """

    summary: Array  # sum_i c(x_i) of a separable network; else the units themselves, standardized
    num_units: Float[Array, ""]
    centre: Float[Array, " d"]
    factor: Float[Array, "d d"]
    inverse: Float[Array, "d d"]  # of the factor
    offset: Float[Array, " d"]
    slope: Float[Array, "d d"]
    radius: Float[Array, ""]  # of the trained region, in eta
    wall: Float[Array, ""]  # how steeply the potential rises outside it


@dataclass(frozen=True, eq=False)
class LearnedScore:
    """The functions that go with a `UnitScore`, in whitened coordinates eta."""

    network: Network
    mean_network: MeanNetwork

    def mean(self, unit: UnitScore, eta: Float[Array, " d"]) -> Float[Array, " d"]:
        """h(eta) = E[s | theta], in the coordinates eta."""
        return jnp.zeros_like(eta) if unit.mean_weights is None else self.mean_network.mean(unit.mean_weights, eta)

    def raw(self, unit: UnitScore, eta: Float[Array, " d"], x: Float[Array, "m p"]) -> Float[Array, "m d"]:
        """The network's own score of each unit, not debiased."""
        return self.network.score(unit.weights, eta, unit.standardizer(x))

    def units(self, unit: UnitScore, eta: Float[Array, " d"], x: Float[Array, "m p"]) -> Float[Array, "m d"]:
        """The score of each unit, debiased over the whole region."""
        return self.raw(unit, eta, x) - self.mean(unit, eta)

    def summarize(self, unit: UnitScore, x: Float[Array, "n p"], size: int = 50_000) -> Array:
        """What all later work needs of the data: the sum of c(x_i), in pieces, or the units themselves."""
        if not isinstance(self.network, SeparablePotential):
            return unit.standardizer(x)
        network, dim = self.network, unit.proposal.dim
        total = jax.jit(lambda u, x: network.summary(u.weights, u.standardizer(x), dim).sum(0))
        return sum((total(unit, x[i : i + size]) for i in range(size, len(x), size)), total(unit, x[:size]))

    def data_log_likelihood(self, unit: UnitScore, eta: Float[Array, " d"], data: DataTerms) -> Float[Array, ""]:
        """sum_i c(x_i) . phi(theta) - n A(theta), up to a constant."""
        assert isinstance(self.network, SeparablePotential)
        log_likelihood = data.summary @ self.network.basis(unit.weights, eta)
        if unit.mean_weights is not None:
            log_likelihood -= data.num_units * self.mean_network.log_partition(unit.mean_weights, eta)
        delta = data.inverse @ (eta - data.centre)
        return log_likelihood - data.num_units * (data.offset @ delta + 0.5 * delta @ data.slope @ delta)

    def data_score(self, unit: UnitScore, eta: Float[Array, " d"], data: DataTerms) -> Float[Array, " d"]:
        """The score of the whole data set."""
        if self.network.has_potential:
            return jax.grad(self.data_log_likelihood, argnums=1)(unit, eta, data)
        total = self.network.score(unit.weights, eta, data.summary).sum(0)
        delta = data.inverse @ (eta - data.centre)
        local = data.inverse.T @ (data.offset + data.slope @ delta)
        return total - data.num_units * (self.mean(unit, eta) + local)


@dataclass(frozen=True, eq=False)
class PosteriorScore:
    """Potential and score of the posterior as functions of theta and of the data's terms."""

    learned: LearnedScore
    unit: UnitScore
    log_prior: Callable[[Array], Array]

    def potential(self, theta: Float[Array, " d"], data: DataTerms) -> Float[Array, ""]:
        """Negative log posterior density, up to a constant; outside the trained region a wall is added."""
        eta = self.unit.proposal.whiten(theta)
        return -self.log_prior(theta) - self.learned.data_log_likelihood(self.unit, eta, data) + _wall(eta, data)

    def score(self, theta: Float[Array, " d"], data: DataTerms) -> Float[Array, " d"]:
        """Gradient of the log posterior density in theta."""
        return self.unit.proposal.inverse.T @ self.score_eta(self.unit.proposal.whiten(theta), data)

    def score_eta(self, eta: Float[Array, " d"], data: DataTerms) -> Float[Array, " d"]:
        """The same in the coordinates eta."""
        prior = jax.grad(lambda e: self.log_prior(self.unit.proposal.unwhiten(e)) - _wall(e, data))(eta)
        return prior + self.learned.data_score(self.unit, eta, data)

    def outside(self, theta: Float[Array, " d"], data: DataTerms) -> Array:
        """Whether theta has left the region that the score was trained on."""
        return jnp.sum(self.unit.proposal.whiten(theta) ** 2) > data.radius**2


class Mode(NamedTuple):
    """Where the posterior score vanishes, in eta, the Cholesky factor of the inverse information there, and how near it came."""

    eta: Float[Array, " d"]
    factor: Float[Array, "d d"]
    gap: Float[Array, ""]  # length of the last Newton step, in posterior sds


MAX_STEP = 0.5  # of Newton's method, in sds of the proposal
NUM_NEWTON = 60


def find_mode(posterior: PosteriorScore, data: DataTerms) -> Mode:
    """Newton's method on the posterior score from the centre of the proposal, with steps of bounded length."""

    def newton(eta):
        score = posterior.score_eta(eta, data)
        jacobian = jax.jacfwd(posterior.score_eta)(eta, data)
        values, vectors = jnp.linalg.eigh(-(jacobian + jacobian.T) / 2)
        # A direction without information has at least a tenth of the proposal's own.
        values = jnp.maximum(jnp.abs(values), 0.1)
        return score, values, vectors

    def step(eta, _):
        score, values, vectors = newton(eta)
        move = vectors @ (vectors.T @ score / values)
        length = jnp.linalg.norm(move)
        move = jnp.where(jnp.all(jnp.isfinite(move)), move * jnp.minimum(1.0, MAX_STEP / jnp.maximum(length, 1e-12)), 0.0)
        eta = eta + move
        # Outside the region the score was never trained, and whatever vanishes there is not a mode.
        return eta * jnp.minimum(1.0, (data.radius - 1.0) / jnp.maximum(jnp.linalg.norm(eta), 1e-12)), None

    eta, _ = jax.lax.scan(step, data.centre, length=NUM_NEWTON)
    score, values, vectors = newton(eta)
    covariance = (vectors / values) @ vectors.T
    return Mode(eta, jnp.linalg.cholesky((covariance + covariance.T) / 2), jnp.sqrt(jnp.sum((vectors.T @ score) ** 2 / values)))


def _wall(eta: Float[Array, " d"], data: DataTerms) -> Float[Array, ""]:
    excess = jnp.maximum(jnp.sum(eta**2) / data.radius**2 - 1, 0.0)
    return data.wall * excess**2

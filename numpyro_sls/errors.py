"""Which stage is to blame: the error of a learned score where the true one is known (paper, appendix on the monotonic regression)."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float
import numpy as np
from numpyro.distributions import biject_to

from numpyro_sls.score import DataTerms, PosteriorScore
from numpyro_sls.units import Units

__all__ = ["ScoreErrors", "score_errors"]


class Loss(NamedTuple):
    """Mean squared error in the coordinates of the proposal, the same over the mean square of the true score, and by direction."""

    loss: float
    relative: float
    by_coordinate: Float[np.ndarray, " d"]  # relative, in whitened coordinates of the true score


class ScoreErrors(NamedTuple):
    """Errors of a learned score: on one unit, on n units at once, and on the data over draws of their posterior."""

    unit: Loss  # loss-1, theta from the proposal
    data_set: Loss  # loss-n, theta from the proposal
    posterior: Loss | None  # loss-n on the data, theta from the posterior; None without draws
    unit_near: Loss | None  # loss-1, theta from the posterior

    def __str__(self) -> str:
        rows = {
            "one unit": self.unit,
            "n units": self.data_set,
            "the data, posterior draws": self.posterior,
            "one unit, posterior draws": self.unit_near,
        }
        lines = [f"{'score error':28s} {'loss':>10s} {'relative':>10s}"]
        return "\n".join(lines + [f"{k:28s} {v.loss:10.4g} {v.relative:10.4f}" for k, v in rows.items() if v is not None])


def score_errors(
    rng_key: Array,
    log_likelihood: Callable[[dict[str, Array], Array], Array],
    posterior: PosteriorScore,
    data: DataTerms,
    units: Units,
    observed: Float[Array, "n p"],
    draws: Mapping[str, Array] | None,
    num_thetas: int,
) -> ScoreErrors:
    """Compare at thetas from the proposal and, if there are draws, from the posterior."""
    proposal, n = posterior.unit.proposal, units.num_units
    key_theta, key_units = jax.random.split(rng_key)

    def exact(theta, x):
        def at(t, row):
            return log_likelihood(units.parameters.constrain(t), row[None])[0]

        return proposal.score_in_eta(theta, jax.vmap(jax.grad(at), (None, 0))(theta, x))

    def ours(theta, x):
        return posterior.learned.units(posterior.unit, proposal.whiten(theta), x, data.local)

    @jax.jit
    def at_simulated(args):
        key, theta = args
        x = units.simulate_x(key, theta, n)
        true = exact(theta, x)
        error = ours(theta, x) - true
        # Of single units, as many as data sets would do; all are there.
        return error.sum(0), true.sum(0), error.T @ error / n, true.T @ true / n

    def simulated(thetas):
        keys = jax.random.split(key_units, len(thetas))
        e, t, ee, tt = jax.lax.map(at_simulated, (keys, thetas))
        return _loss(ee.mean(0), tt.mean(0)), _loss(e.T @ e / len(e), t.T @ t / len(t))

    unit, data_set = simulated(proposal.sample(key_theta, num_thetas))
    if draws is None:
        return ScoreErrors(unit, data_set, None, None)
    thetas = _thetas(units, draws, num_thetas)

    @jax.jit
    def at_data(theta):
        true = exact(theta, observed).sum(0) * (n / observed.shape[0])
        return posterior.learned.data_score(posterior.unit, proposal.whiten(theta), data) - true, true

    e, t = jax.lax.map(at_data, thetas)
    near, _ = simulated(thetas)
    return ScoreErrors(unit, data_set, _loss(e.T @ e / len(e), t.T @ t / len(t)), near)


def _loss(error: Float[Array, "d d"], true: Float[Array, "d d"]) -> Loss:
    e, t = np.asarray(error, float), np.asarray(true, float)
    whiten = np.linalg.inv(np.linalg.cholesky(t + 1e-9 * np.trace(t) * np.eye(len(t))))
    return Loss(float(np.trace(e)), float(np.trace(e) / np.trace(t)), np.diag(whiten @ e @ whiten.T))


def _thetas(units: Units, draws: Mapping[str, Array], num: int) -> Float[Array, "num d"]:
    supports = units.traced.supports

    def flat(params):
        return units.parameters.flatten({k: biject_to(supports[k]).inv(params[k]) for k in units.traced.parameters})

    every = jnp.linspace(0, len(next(iter(draws.values()))) - 1, num).astype(int)
    return jax.vmap(flat)({k: jnp.asarray(draws[k])[every] for k in units.traced.parameters})

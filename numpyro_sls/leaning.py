"""Posteriors that lean on the ends of intervals: on the line they are far from normal, and their mean is removed over draws.

Elsewhere a score is mended around the mode of the posterior. Against the end of an interval there is no mode on the line, but
in the parameters' own values the mean of the score is as smooth there as anywhere: it is measured over draws of the posterior
that the score gives so far, affine in those values, and again over the draws of the posterior that this gives.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float
import numpy as np

from numpyro_sls.chart import Chart
from numpyro_sls.dynamics import acceptance, inside, langevin_step, point_at, to_delta, to_theta
from numpyro_sls.score import DataTerms, Local, Mode, PosteriorScore, UnitScore

__all__ = ["MeanSums", "affine_terms", "around_draws", "draw_posterior", "first_places", "make_mean_sums", "solve_mean"]

NUM_CHAINS, NUM_KEPT = 128, 16
NUM_STEPS = 400  # of a turn's chains, which go on where those of the turn before ended
RATE = 0.1  # how fast the size of the steps follows their acceptance
SMALLEST = 1e-7  # eigenvalue of the terms, relative to their size, that single precision resolves


def draw_posterior(
    rng_key: Array, posterior: PosteriorScore, data: DataTerms, start: Float[Array, "c d"] | None = None
) -> Float[Array, "k d"]:
    """Draws of theta from many short chains, the later states of each; the last chains' ends come last."""
    key_start, key_run = jax.random.split(rng_key)
    start = first_places(key_start, data) if start is None else start

    def chain(key, theta):
        point = point_at(posterior, data, inside(posterior, data, to_delta(data, theta)))

        def step(carry, key):
            point, log_size = carry
            point, accept_prob = langevin_step(key, point, jnp.exp(log_size), posterior, data)
            return (point, log_size + RATE * (accept_prob - acceptance(data))), to_theta(data, point.delta)

        return jax.lax.scan(step, (point, jnp.log(0.3)), jax.random.split(key, NUM_STEPS))[1][NUM_STEPS // 2 :: NUM_STEPS // 2 // NUM_KEPT]

    draws = jax.vmap(chain)(jax.random.split(key_run, len(start)), start)  # (c, k, d)
    return draws.transpose(1, 0, 2).reshape(-1, data.mode.shape[0])


def first_places(rng_key: Array, data: DataTerms) -> Float[Array, "c d"]:
    """Where chains start that do not go on from others."""
    return data.mode + jax.random.normal(rng_key, (NUM_CHAINS, data.mode.shape[0])) @ data.factor.T


def around_draws(posterior: PosteriorScore, data: DataTerms, theta: Float[Array, "k d"]) -> tuple[DataTerms, Mode]:
    """Local coordinates, in the parameters' own values, and those of the sampler laid around draws; nothing mended yet."""
    unit, d = posterior.unit, theta.shape[1]
    layout = posterior.learned.layout(unit)
    assert layout is not None, "parameters in intervals have a layout"
    eta = jax.vmap(unit.proposal.whiten)(theta)
    centre, factor = _moments(jax.vmap(layout.__call__)(eta))
    before = data.local
    zero = jnp.zeros_like(before.readout)
    local = Local(centre, factor, jnp.linalg.inv(factor), before.marginals, zero, jnp.zeros(d), jnp.zeros((d, d)), layout)
    # The mean in the parameters' own values: on the line it would follow the few draws at the very end of an interval.
    middle = layout.theta(jax.vmap(layout.values)(theta).mean(0))
    outside = jax.vmap(posterior.outside, (0, None))(theta, data).mean()
    mode = Mode(middle, _moments(theta)[1], unit.proposal.whiten(middle), _moments(eta)[1], jnp.zeros(()), outside)
    values, spread = _moments(jax.vmap(layout.values)(theta))
    chart = Chart(values, spread, jnp.linalg.inv(spread), layout.low, layout.width)
    return data._replace(local=local, mode=mode.theta, factor=mode.factor, inverse=jnp.linalg.inv(mode.factor), chart=chart), mode


def _moments(draws: Float[Array, "k d"]) -> tuple[Float[Array, " d"], Float[Array, "d d"]]:
    """Mean and Cholesky factor of the covariance, by a QR decomposition, which single precision can do where that is stiff."""
    centre = draws.mean(0)
    lower = jnp.linalg.qr((draws - centre) / np.sqrt(len(draws)), mode="r").T
    return centre, lower * jnp.where(jnp.diag(lower) < 0, -1.0, 1.0)


class MeanSums(NamedTuple):
    """What one batch adds to the normal equations of the mean."""

    gram: Float[Array, "q q"]
    cross: Float[Array, " q"]
    num_failed: Array


def affine_terms(local: Local, eta: Float[Array, " d"]) -> Float[Array, "d q"]:
    """What each entry of the offset, and of the upper half of a symmetric slope, adds to the mean of the score in eta."""
    delta, jacobian = local.delta(eta), jax.jacfwd(local.delta)(eta)
    i, j = np.triu_indices(len(delta))
    both = jnp.where(i == j, 0.5, 1.0)
    slopes = both * (delta[j] * jnp.eye(len(delta))[:, i] + delta[i] * jnp.eye(len(delta))[:, j])
    return jacobian.T @ jnp.concatenate([jnp.eye(len(delta)), slopes], axis=1)


def make_mean_sums(score_fn: Callable[[Array, Array, UnitScore], tuple[Array, Array]]) -> Callable[..., MeanSums]:
    """Compile the sums of one batch; ``score_fn(rng_key, theta, unit)`` gives the mean score at each theta in eta, and failures."""

    @jax.jit
    def sums_fn(rng_key, theta, unit, local, metric) -> MeanSums:
        mean, failed = score_fn(rng_key, theta, unit)
        terms = jax.vmap(lambda t: metric.T @ affine_terms(local, unit.proposal.whiten(t)))(theta)
        return MeanSums(jnp.einsum("kdq,kdr->qr", terms, terms), jnp.einsum("kdq,kd->q", terms, mean @ metric), failed)

    return sums_fn


def solve_mean(sums: MeanSums, dim: int) -> tuple[Float[np.ndarray, " d"], Float[np.ndarray, "d d"]]:
    """Offset and symmetric slope of the mean."""
    scale = np.sqrt(np.diag(sums.gram))
    values, vectors = np.linalg.eigh(sums.gram / np.outer(scale, scale))
    kept = values > SMALLEST * values[-1]
    basis = (vectors[:, kept] / np.sqrt(values[kept])) / scale[:, None]
    found = basis @ (basis.T @ sums.cross)
    slope = np.zeros((dim, dim))
    i, j = np.triu_indices(dim)
    slope[i, j] = slope[j, i] = found[dim:]
    return found[:dim], slope

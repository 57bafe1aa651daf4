"""Posteriors that lean on the ends of intervals: on the line they are far from normal, and their mean is removed over draws.

Elsewhere a score is mended around the mode of the posterior. Against the end of an interval there is no mode on the line, but
in the parameters' own values the mean of the score is as smooth there as anywhere: it is measured over draws of the posterior
that the score gives so far, affine in those values and quadratic where the simulations suffice, and again over the draws of the
posterior that this gives.
"""

from collections.abc import Callable
from itertools import combinations_with_replacement, permutations
from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float
import numpy as np

from numpyro_sls.chart import Chart
from numpyro_sls.dynamics import acceptance, inside, langevin_step, point_at, to_delta, to_theta
from numpyro_sls.networks import products
from numpyro_sls.score import DataTerms, Local, Mode, PosteriorScore, UnitScore

__all__ = ["MeanSums", "around_draws", "draw_posterior", "first_places", "make_mean_sums", "mean_terms", "num_third", "solve_mean"]

NUM_CHAINS, NUM_KEPT = 128, 16
NUM_STEPS = 400  # of a turn's chains, which go on where those of the turn before ended
RATE = 0.1  # how fast the size of the steps follows their acceptance, in the half that is dropped
SMALLEST = 1e-7  # eigenvalue of the terms, relative to their size, that single precision resolves


def draw_posterior(
    rng_key: Array, posterior: PosteriorScore, data: DataTerms, start: Float[Array, "c d"], inverse_temperature: Float[Array, " c"]
) -> Float[Array, "k d"]:
    """Draws of theta from many short chains, the later states of each; the last chains' ends come last."""

    def chain(key, theta, colder):
        point = point_at(posterior, data, inside(posterior, data, to_delta(data, theta)))

        def step(carry, now):
            (point, log_size), (key, rate) = carry, now
            point, accept_prob = langevin_step(key, point, jnp.exp(log_size), posterior, data, colder)
            return (point, log_size + rate * (accept_prob - acceptance(data))), to_theta(data, point.delta)

        # Steps that went on shrinking where many are refused would keep chains there: at the ends of intervals.
        rates = jnp.where(jnp.arange(NUM_STEPS) < NUM_STEPS // 2, RATE, 0.0)
        path = jax.lax.scan(step, (point, jnp.log(0.3)), (jax.random.split(key, NUM_STEPS), rates))[1]
        return path[NUM_STEPS // 2 :: NUM_STEPS // 2 // NUM_KEPT]

    draws = jax.vmap(chain)(jax.random.split(rng_key, len(start)), start, inverse_temperature)  # (c, k, d)
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


def mean_terms(delta: Float[Array, " d"]) -> Float[Array, "d q"]:
    """What each entry of the offset, of the upper half of the slope, and of the third tensor adds to the mean of the score in delta."""

    def potentials(delta):
        parts = [delta, products(delta)]
        if num_third(len(delta)):
            i, j, k = _triples(len(delta))
            parts.append(delta[i] * delta[j] * delta[k])
        return jnp.concatenate(parts)

    return jax.jacfwd(potentials)(delta).T


MOST_THIRD = 12  # parameters, up to which the mean has second-order terms


def num_third(dim: int) -> int:
    """Coefficients of those terms."""
    return len(_triples(dim)[0]) if dim <= MOST_THIRD else 0


def _triples(dim: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All i <= j <= k."""
    i, j, k = np.array(list(combinations_with_replacement(range(dim), 3))).T
    return i, j, k


def make_mean_sums(score_fn: Callable[[Array, Array, UnitScore], tuple[Array, Array]]) -> Callable[..., MeanSums]:
    """Compile the sums of one batch; ``score_fn(rng_key, theta, unit)`` gives the mean score at each theta in eta, and failures."""

    @jax.jit
    def sums_fn(rng_key, theta, unit, local) -> MeanSums:
        mean, failed = score_fn(rng_key, theta, unit)
        layout, across = local.layout, jnp.linalg.inv((local.inverse @ local.layout.mix).T)  # from the values' gradients to delta's

        def rows(theta, mean):
            eta = unit.proposal.whiten(theta)
            slope, least = layout.slopes(eta), LEAST_SLOPE * layout.width
            weight = jnp.where(jnp.isfinite(least), jnp.minimum(slope / least, 1.0), 1.0)
            weight *= jnp.sum(local.place(eta) ** 2) < local.reach**2  # farther out delta stays where it is
            terms = across @ (weight[:, None] * jnp.linalg.solve(across, mean_terms(local.place(eta))))
            return terms, across @ (weight / slope * jnp.linalg.solve(layout.factor.T, mean))

        # In delta, not in eta: noise is the same everywhere there, and near the end of an interval a score in eta vanishes.
        terms, target = jax.vmap(rows)(theta, mean)
        return MeanSums(jnp.einsum("kdq,kdr->qr", terms, terms), jnp.einsum("kdq,kd->q", terms, target), failed)

    return sums_fn


LEAST_SLOPE = 1e-3  # of an interval on the line, relative to its width, below which a score there says little


def solve_mean(sums: MeanSums, dim: int, third: bool) -> tuple[Float[np.ndarray, " d"], Float[np.ndarray, "d d"], np.ndarray | None]:
    """Offset, symmetric slope and symmetric third tensor of the mean: zero unless it is asked for, None where there are too many entries."""
    num = dim + dim * (dim + 1) // 2 + third * num_third(dim)
    gram, cross = sums.gram[:num, :num], sums.cross[:num]
    scale = np.sqrt(np.diag(gram))
    values, vectors = np.linalg.eigh(gram / np.outer(scale, scale))
    kept = values > SMALLEST * values[-1]
    basis = (vectors[:, kept] / np.sqrt(values[kept])) / scale[:, None]
    found = basis @ (basis.T @ cross)
    i, j = np.triu_indices(dim)
    slope, tensor = np.zeros((dim, dim)), np.zeros((dim, dim, dim))
    slope[i, j] = slope[j, i] = found[dim : dim + len(i)]
    for index, value in zip(zip(*_triples(dim), strict=True), found[dim + len(i) :], strict=False):
        places = set(permutations(index))
        for place in places:
            tensor[place] = 6 * value / len(places)
    return found[:dim], slope, tensor if num_third(dim) else None

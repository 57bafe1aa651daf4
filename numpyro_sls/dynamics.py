"""Langevin dynamics as pure functions: the step, and the coordinates delta in which the posterior has about unit sd."""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float
import numpy as np

from numpyro_sls.score import DataTerms, PosteriorScore

__all__ = [
    "DiscretizationBias",
    "Point",
    "acceptance",
    "discretization_bias",
    "inside",
    "langevin_step",
    "line_integral",
    "point_at",
    "score_in_delta",
    "to_delta",
    "to_theta",
]


class Point(NamedTuple):
    """Where a chain is; the score is that in delta."""

    delta: Float[Array, " d"]
    potential: Array
    score: Float[Array, " d"]


def langevin_step(
    rng_key: Array,
    point: Point,
    step_size: Array,
    posterior: PosteriorScore,
    data: DataTerms,
    inverse_temperature: Array | float = 1.0,
    adjusted: bool = True,
) -> tuple[Point, Array]:
    """One Langevin step in the whitened coordinates delta, adjusted by Metropolis or not; with g the score there and b the inverse temperature,

    delta' = delta + e^2/2 g(delta) + e / sqrt(b) xi,
    log ratio = b (log pi(delta') - log pi(delta)) + log q(delta | delta') - log q(delta' | delta).
    """
    key_noise, key_accept = jax.random.split(rng_key)
    noise = jax.random.normal(key_noise, point.delta.shape)
    half, width = 0.5 * step_size**2, step_size / jnp.sqrt(inverse_temperature)
    proposed = point.delta + half * point.score + width * noise
    new = point_at(posterior, data, proposed)
    back = point.delta - proposed - half * new.score
    change = inverse_temperature * _log_density_ratio(posterior, data, point, new)
    log_ratio = change + 0.5 * jnp.sum(noise**2) - 0.5 * jnp.sum(back**2) / width**2
    possible = jnp.isfinite(log_ratio) & posterior.possible(to_theta(data, proposed), data)
    accept_prob = jnp.where(possible, jnp.exp(jnp.minimum(log_ratio, 0.0)), 0.0)
    accept = jax.random.uniform(key_accept) < accept_prob if adjusted else possible
    return jax.tree.map(lambda a, b: jnp.where(accept, a, b), new, point), accept_prob


GAUSS_LEGENDRE = ((0.1127016654, 0.5, 0.8872983346), (5 / 18, 8 / 18, 5 / 18))  # three nodes on [0, 1]


def _log_density_ratio(posterior: PosteriorScore, data: DataTerms, old: Point, new: Point) -> Array:
    """By the potential; where there is none, by the line integral of the score between the two points."""
    if posterior.learned.network.has_potential:
        return old.potential - new.potential
    return line_integral(lambda delta: score_in_delta(posterior, data, delta), old.delta, new.delta - old.delta)


def line_integral(score_fn: Callable[[Array], Array], start: Float[Array, " d"], move: Float[Array, " d"]) -> Float[Array, ""]:
    """int_0^1 s(start + a move) . move da, by Gauss-Legendre."""
    nodes, weights = GAUSS_LEGENDRE
    return jnp.stack([w * score_fn(start + a * move) @ move for a, w in zip(nodes, weights, strict=True)]).sum()


def point_at(posterior: PosteriorScore, data: DataTerms, delta: Float[Array, " d"]) -> Point:
    """Potential and score at delta."""
    if not posterior.learned.network.has_potential:
        return Point(delta, jnp.zeros(()), score_in_delta(posterior, data, delta))

    def potential(e):
        theta = to_theta(data, e)
        value = posterior.potential(theta, data)
        return value if data.chart is None else value + data.chart.log_slope(theta)

    value, gradient = jax.value_and_grad(potential)(delta)
    return Point(delta, value, -gradient)


def score_in_delta(posterior: PosteriorScore, data: DataTerms, delta: Float[Array, " d"]) -> Float[Array, " d"]:
    """Gradient of the log posterior density in delta."""
    if data.chart is None:
        return data.factor.T @ posterior.score(to_theta(data, delta), data)
    theta, pull = jax.vjp(data.chart.theta, delta)
    return pull(posterior.score(theta, data) - jax.grad(data.chart.log_slope)(theta))[0]


def to_theta(data: DataTerms, delta: Float[Array, " d"]) -> Float[Array, " d"]:
    """theta of delta."""
    return data.mode + data.factor @ delta if data.chart is None else data.chart.theta(delta)


def to_delta(data: DataTerms, theta: Float[Array, " d"]) -> Float[Array, " d"]:
    """delta of theta."""
    return data.inverse @ (theta - data.mode) if data.chart is None else data.chart.delta(theta)


def acceptance(data: DataTerms) -> float:
    """What the acceptance of adjusted steps is to be: less where many are refused for the ends of intervals, not for their length."""
    return 0.65 if data.chart is None else 0.3


def inside(posterior: PosteriorScore, data: DataTerms, delta: Float[Array, " d"]) -> Float[Array, " d"]:
    """The last place inside the trained region on the way from the mode to delta: outside nothing was learnt that could lead back."""

    def halve(ends, _):
        low, high = ends
        middle = (low + high) / 2
        theta = to_theta(data, middle * delta)
        out = posterior.outside(theta, data) | ~posterior.possible(theta, data)
        return (jnp.where(out, low, middle), jnp.where(out, middle, high)), None

    (share, _), _ = jax.lax.scan(halve, (jnp.zeros(()), jnp.ones(())), length=20)
    theta = to_theta(data, delta)
    fine = jnp.all(jnp.isfinite(delta)) & ~posterior.outside(theta, data) & posterior.possible(theta, data)
    return jnp.where(fine, delta, share * jnp.nan_to_num(delta))


class DiscretizationBias(NamedTuple):
    """What unadjusted steps of one size do to the draws, by direction of delta, in posterior sds; print it."""

    step_size: float
    shift: Float[np.ndarray, " d"]  # of the mean
    shift_se: Float[np.ndarray, " d"]
    sd_ratio: Float[np.ndarray, " d"]

    def __str__(self) -> str:
        worst = int(np.argmax(np.abs(self.shift)))
        return (
            f"unadjusted steps of {self.step_size:.2g}: the mean is off by at most {abs(self.shift[worst]):.3f} posterior sds "
            f"(standard error {self.shift_se[worst]:.3f}), sds by a factor of {self.sd_ratio.min():.3f} to {self.sd_ratio.max():.3f}"
        )


def discretization_bias(
    rng_key: Array, posterior: PosteriorScore, data: DataTerms, step_size: float, num_chains: int = 1000
) -> DiscretizationBias:
    """By step halving: the bias falls as the square of the step size, so that it is 4/3 of the change when the steps are halved."""
    d = data.mode.shape[0]

    def chain(key, size, num):
        key_start, key_run = jax.random.split(key)
        start = point_at(posterior, data, inside(posterior, data, jax.random.normal(key_start, (d,))))

        def step(carry, key):
            point, i, total, square = carry
            point, _ = langevin_step(key, point, jnp.asarray(size, point.delta.dtype), posterior, data, adjusted=False)
            counts = i >= num // 2
            return (point, i + 1, total + counts * point.delta, square + counts * point.delta**2), None

        carry, _ = jax.lax.scan(step, (start, 0, jnp.zeros(d), jnp.zeros(d)), jax.random.split(key_run, num))
        return carry[2] / (num - num // 2), carry[3] / (num - num // 2)

    found = []
    for halving in (1, 2):
        size = step_size / halving
        keys = jax.random.split(jax.random.fold_in(rng_key, halving), num_chains)
        num = int(np.ceil(RELAXATIONS / size**2))
        mean, square = (np.asarray(a, float) for a in jax.jit(jax.vmap(lambda k, s=size, n=num: chain(k, s, n)))(keys))
        found.append((mean.mean(0), mean.std(0) / np.sqrt(num_chains), np.sqrt(square.mean(0) - mean.mean(0) ** 2)))
    (mean, se, sd), (half_mean, half_se, half_sd) = found
    sd_limit = half_sd - (sd - half_sd) / 3
    return DiscretizationBias(step_size, 4 / 3 * (mean - half_mean), 4 / 3 * np.hypot(se, half_se), sd / sd_limit)


RELAXATIONS = 40.0  # times the posterior's own relaxation, half of them before anything counts

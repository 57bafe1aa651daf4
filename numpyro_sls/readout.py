"""The best linear readout of the network's features near the posterior: score matching solved there exactly.

With f the features of a unit, s the score so far and s* the true one, all at one theta, the best s + R^T f has

    R = E[w f f^T]^-1 (E[w f s*^T] - E[w f s^T]),    E[w f s*^T] = d E[w f] / d theta,

the last by the score identity: the true score is not needed, only how the mean of the features moves with theta. That is
measured on pairs of simulations at theta + step and theta - step with the same random numbers, and by the joint score where
there is one. The weight w depends on x alone.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Bool, Float
import numpy as np

__all__ = ["BendSums", "Readout", "ReadoutSums", "ReadoutUnits", "make_bend_sums", "make_readout_sums", "solve_bend", "solve_readout"]


class ReadoutUnits(NamedTuple):
    """Units simulated at k places in delta; failed ones have no weight."""

    delta: Float[Array, "k d"]
    features: Float[Array, "k m f"]
    score: Float[Array, "k m d"]  # so far, in delta
    joint_score: Float[Array, "k m d"]
    weight: Float[Array, "k m"]


class ReadoutSums(NamedTuple):
    """What one batch adds."""

    num_units: Array
    num_pairs: Array
    outer: Float[Array, "f f"]  # w f f^T
    cross: Float[Array, "f d"]  # w f s^T
    joint: Float[Array, "f d"]  # w f t^T
    score_square: Float[Array, " d"]
    joint_square: Float[Array, " d"]
    moved: Float[Array, "f d"]  # differences of mean w f over a pair, times those of delta
    moved_square: Float[Array, "f f"]
    delta_square: Float[Array, "d d"]


class Readout(NamedTuple):
    """The readout with its share of the score's variance, and that of its noise, for a unit worth 1 / n in every coordinate."""

    readout: Float[Array, "f d"]
    gain: Float[np.ndarray, " d"]
    noise: Float[np.ndarray, " d"]


def make_readout_sums(
    units_fn: Callable[[Array, Array, Any], tuple[ReadoutUnits, Array]], num_thetas: int, dim: int
) -> Callable[[Array, Array, Any], tuple[ReadoutSums, Array]]:
    """Compile the sums of one batch, and how many of its simulations failed.

    ``units_fn(keys, step, context)`` simulates at every step from the mode with its key.
    """

    @jax.jit
    def sums_fn(rng_key, width, context):
        key_step, key_units = jax.random.split(rng_key)
        half = width * jax.random.normal(key_step, (num_thetas // 2, dim))
        keys = jax.random.split(key_units, num_thetas // 2)
        u, failed = units_fn(jnp.concatenate([keys, keys]), jnp.concatenate([half, -half]), context)
        f = jnp.concatenate([jnp.ones_like(u.features[..., :1]), u.features], axis=-1)
        weighted = u.weight[..., None] * f
        flat = [a.reshape(-1, a.shape[-1]) for a in (weighted, f, u.score, u.joint_score)]
        at = weighted.mean(1)
        moved, delta = at[: num_thetas // 2] - at[num_thetas // 2 :], u.delta[: num_thetas // 2] - u.delta[num_thetas // 2 :]
        sums = ReadoutSums(
            jnp.array(u.weight.size),
            jnp.array(num_thetas // 2),
            flat[0].T @ flat[1],
            flat[0].T @ flat[2],
            flat[0].T @ flat[3],
            jnp.sum(u.weight[..., None] * u.score**2, axis=(0, 1)),
            jnp.sum(u.weight[..., None] * u.joint_score**2, axis=(0, 1)),
            moved.T @ delta,
            moved.T @ moved,
            delta.T @ delta,
        )
        return sums, failed

    return sums_fn


SMALLEST = 1e-6  # eigenvalue of the features' second moments, relative to the largest, that single precision resolves
SHRINKAGE = 2.0  # times its noise variance is taken off the square of every coefficient


def solve_readout(parts: Sequence[ReadoutSums], joint_valid: Bool[np.ndarray, " d"], num_units: int, num_tails: int = 0) -> Readout:
    """Solve for R, of two parts in turn.

    The second holds units out of the model's reach, at thetas nearer to the mode; the second half of the features, and the tails
    that follow, are theirs alone, so that their noise stays with them. The tails come first and are not shrunk: they are few,
    and what is shrunk leaves the farthest units to the network, which has seen none.
    """
    if len(parts) == 1:
        return _solve(parts[0], joint_valid, num_units)
    total = parts[0].outer.shape[0]
    size = (total - 1 - num_tails) // 2
    common, rare, tails = np.split(np.arange(total), [size + 1, 2 * size + 1])
    first = _solve(_some(parts[0], common), joint_valid, num_units)
    done = np.concatenate([np.zeros((1, len(joint_valid))), np.asarray(first.readout, float)])
    second, found = parts[1]._replace(cross=parts[1].cross + parts[1].outer[:, common] @ done), [first]
    # Their constant is not among these features: the first row stands in for it, and is left out.
    for rows, shrinkage in ((tails, 0.0), (rare, SHRINKAGE)):
        found.append(_solve(_some(second, np.concatenate([common[:1], rows])), joint_valid, num_units, False, shrinkage))
        second = second._replace(cross=second.cross + second.outer[:, rows] @ np.asarray(found[-1].readout, float))
    order = (found[0], found[2], found[1])
    gain, noise = (np.sum([getattr(f, k) for f in order], axis=0) for k in ("gain", "noise"))
    return Readout(jnp.concatenate([f.readout for f in order]), gain, noise)


def _some(sums: ReadoutSums, rows: np.ndarray) -> ReadoutSums:
    """The sums of some of the features."""
    both = np.ix_(rows, rows)
    by_row = {k: getattr(sums, k)[rows] for k in ("cross", "joint", "moved")}
    return sums._replace(outer=sums.outer[both], moved_square=sums.moved_square[both], **by_row)


def _solve(
    sums: ReadoutSums, joint_valid: Bool[np.ndarray, " d"], num_units: int, constant: bool = True, shrinkage: float = SHRINKAGE
) -> Readout:
    """R in the principal directions of the features, each coefficient shrunk by what its noise can explain."""
    sums = jax.tree.map(lambda a: np.asarray(a, float), sums)
    outer = sums.outer / sums.num_units
    if not constant:
        outer = outer * np.outer(*[np.arange(len(outer)) > 0] * 2)
    basis = _whitening(np.asarray(outer))
    missing, variance = _wanted(sums, basis, joint_valid)
    shrink = np.maximum(0.0, 1 - shrinkage * variance / np.maximum(missing**2, 1e-30))
    coefficients = shrink * missing
    return Readout(
        jnp.asarray((basis @ coefficients)[1:]),
        num_units * np.sum(coefficients**2, axis=0),
        num_units * np.sum(shrink**2 * variance, axis=0),
    )


def _whitening(outer: Float[np.ndarray, "f f"]) -> Float[np.ndarray, "f k"]:
    """The principal directions of the features, in which they have unit second moments."""
    scale = np.sqrt(np.maximum(np.diag(outer), 1e-30))
    values, vectors = np.linalg.eigh(outer / np.outer(scale, scale))
    kept = values > SMALLEST * values[-1]
    return (vectors[:, kept] / np.sqrt(values[kept])) / scale[:, None]


def _wanted(sums: ReadoutSums, basis: np.ndarray, joint_valid: Bool[np.ndarray, " d"]) -> tuple[np.ndarray, np.ndarray]:
    """E[w f s*^T] - E[w f s^T] of one part, and its variance."""
    n, precision = sums.num_units, np.linalg.inv(sums.delta_square)
    slope = basis.T @ sums.moved @ precision
    left = basis.T @ sums.moved_square @ basis - slope @ sums.delta_square @ slope.T
    slope_variance = np.maximum(np.diag(left), 0.0)[:, None] / sums.num_pairs * np.diag(precision)
    joint = basis.T @ sums.joint / n
    joint_variance = np.broadcast_to(np.where(joint_valid, sums.joint_square / n**2, np.inf), slope.shape)
    weight = np.where(joint_valid, slope_variance / (slope_variance + np.where(joint_valid, joint_variance, 1.0) + 1e-30), 0.0)
    wanted = slope + weight * (joint - slope)
    variance = np.where(weight > 0, (1 - weight) * slope_variance, slope_variance) + sums.score_square / n**2
    return wanted - basis.T @ sums.cross / n, variance


class BendSums(NamedTuple):
    """Means over one batch, for the same few features at places beside the mode."""

    outer: Float[Array, "qd qd"]  # of w g g^T, with g = f times delta
    missing: Float[Array, "qd d"]  # of w g (s* - s)^T


def make_bend_sums(
    units_fn: Callable[[Array, Array, Any], tuple[ReadoutUnits, Array]], num_thetas: int, dim: int, num_features: int
) -> Callable[[Array, Array, Array, Any], tuple[BendSums, Array]]:
    """Compile what one batch tells of how the score of rare units changes with theta, and how many simulations failed.

    The readout sets the score right at the mode. Beside it, at delta, E[w f s*^T] is the derivative of E[w f] there: pairs lie
    around places with the given spread instead of around the mode, and what is found is regressed on delta.
    """
    half = num_thetas // 2

    @jax.jit
    def sums_fn(rng_key, spread, width, context):
        key_place, key_step, key_units = jax.random.split(rng_key, 3)
        place, step = spread * jax.random.normal(key_place, (half, dim)), width * jax.random.normal(key_step, (half, dim))
        keys = jax.random.split(key_units, half)
        u, failed = units_fn(jnp.concatenate([keys, keys]), jnp.concatenate([place + step, place - step]), context)
        f = u.features[..., -num_features:]
        weighted = u.weight[..., None] * f
        g = jnp.einsum("kmf,kd->kmfd", f, u.delta).reshape(*f.shape[:2], -1)
        at = weighted.mean(1)
        apart, middle = u.delta[:half] - u.delta[half:], 0.5 * (u.delta[:half] + u.delta[half:])
        # apart is 2 width times standard normal numbers: the mean of (J apart) apart^T is J times that squared.
        moved = jnp.einsum("kf,kj,kl->fjl", at[:half] - at[half:], middle, apart) / (half * (2 * width) ** 2)
        weight = u.weight[..., None] / u.weight.size
        outer = jnp.einsum("kma,kmb->ab", weight * g, g)
        return BendSums(outer, moved.reshape(-1, dim) - jnp.einsum("kma,kmd->ad", weight * g, u.score)), failed

    return sums_fn


def solve_bend(batches: Sequence[BendSums], dim: int) -> Float[Array, "q d d"]:
    """In the principal directions of f times delta, each coefficient shrunk by what its noise over the batches can explain."""
    basis = _whitening(np.mean([b.outer for b in batches], axis=0))
    found = np.stack([basis.T @ b.missing for b in batches])
    missing, variance = found.mean(0), found.var(0, ddof=1) / len(found)
    bend = (basis @ (np.maximum(0.0, 1 - SHRINKAGE * variance / np.maximum(missing**2, 1e-30)) * missing)).reshape(-1, dim, dim)
    return jnp.asarray(0.5 * (bend + bend.swapaxes(1, 2)))

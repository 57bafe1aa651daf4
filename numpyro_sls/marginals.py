"""The score of each number of a unit by itself, counted in bins near the posterior: sharp where an edge is, with no network to blunt it.

How often x_j falls into a bin moves with theta as the bin's probability times the marginal score of x_j there,

    d P(x_j in bin) / d theta = P(x_j in bin) E[s* | x_j in bin],

so that counts at theta + step and theta - step tell the score. As features for the linear readout they add what is
additive over the numbers of a unit.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int
import numpy as np

__all__ = ["MAX_COLUMNS", "NUM_BINS", "MarginalSums", "MarginalUnits", "Marginals", "make_marginal_sums", "no_marginals", "solve_marginals"]

NUM_BINS = 400
MAX_COLUMNS = 12  # numbers of a unit, with more of which each tells little and the tables grow


class Marginals(NamedTuple):
    """A table of scores by bin for every number of a unit."""

    edges: Float[Array, "p e"]
    values: Float[Array, "p b d"]

    def __call__(self, x: Float[Array, "m q"]) -> Float[Array, "m k"]:
        index = bins(self.edges, x)
        return jax.vmap(lambda table, i: table[i], (0, 1), 1)(self.values, index).reshape(x.shape[0], -1)


def bins(edges: Float[Array, "p e"], x: Float[Array, "m q"]) -> Int[Array, "m p"]:
    """In which bin every number lies."""
    return jax.vmap(jnp.searchsorted, (0, 1), 1)(edges, x[:, : edges.shape[0]])


def no_marginals(num_columns: int, dim: int) -> Marginals:
    """Nothing counted yet."""
    return Marginals(jnp.zeros((num_columns, NUM_BINS - 1)), jnp.zeros((num_columns, NUM_BINS, dim)))


class MarginalUnits(NamedTuple):
    """Units simulated at k places in delta."""

    delta: Float[Array, "k d"]
    x: Float[Array, "k m q"]
    joint_score: Float[Array, "k m d"]  # in delta
    ok: Bool[Array, "k m"]


class MarginalSums(NamedTuple):
    """What one batch adds."""

    counts: Float[Array, "p b"]
    moved: Float[Array, "p b d"]  # differences of counts over a pair, times those of delta
    joint: Float[Array, "p b d"]
    joint_square: Float[Array, "p b d"]
    delta_square: Float[Array, "d d"]


def make_marginal_sums(
    units_fn: Callable[[Array, Array, Any], MarginalUnits], num_thetas: int, dim: int
) -> Callable[[Array, Array, Any, Array], tuple[MarginalSums, Array]]:
    """Compile the sums of one batch, and how many of its simulations failed."""
    half = num_thetas // 2

    @jax.jit
    def sums_fn(rng_key, width, context, edges):
        key_step, key_units = jax.random.split(rng_key)
        step = width * jax.random.normal(key_step, (half, dim))
        # Counts are compared, not values: the same random numbers at both ends help them too, where they are smooth in theta.
        keys = jax.random.split(key_units, half)
        u = units_fn(jnp.concatenate([keys, keys]), jnp.concatenate([step, -step]), context)
        m = u.ok.shape[1]
        index = bins(edges, u.x.reshape(-1, u.x.shape[-1]))
        delta = u.delta[:half] - u.delta[half:]
        ok = u.ok.reshape(-1).astype(delta.dtype)
        signed = ok[:, None] * jnp.concatenate([jnp.repeat(delta, m, axis=0), -jnp.repeat(delta, m, axis=0)])
        t = jnp.where(u.ok[..., None], u.joint_score, 0.0).reshape(-1, dim)
        table = jnp.concatenate([ok[:, None], signed, t, t**2], axis=1)
        summed = jax.vmap(lambda i: jax.ops.segment_sum(table, i, NUM_BINS), 1)(index)
        parts = jnp.split(summed, [1, 1 + dim, 1 + 2 * dim], axis=-1)
        counts, moved, joint, joint_square = parts
        return MarginalSums(counts[..., 0], moved, joint, joint_square, m * delta.T @ delta), (~u.ok).sum()

    return sums_fn


def solve_marginals(edges: Float[Array, "p e"], sums: MarginalSums, joint_valid: Bool[np.ndarray, " d"]) -> Marginals:
    """Scores by bin, by the joint score where there is one, shrunk by what their noise can explain."""
    count = np.maximum(np.asarray(sums.counts, float), 1.0)[..., None]
    precision = np.linalg.inv(np.asarray(sums.delta_square, float))
    total = count[0].sum()
    # With c the counts at the two ends of a pair, E[c+ - c-] is m times slope times delta; a bin's probability is count / total.
    score = np.asarray(sums.moved, float) @ precision * total / count
    variance = 2 * total * np.diag(precision) / count  # as if the two ends were independent
    mean = np.asarray(sums.joint, float) / count
    mean_variance = np.maximum(np.asarray(sums.joint_square, float) / count - mean**2, 0.0) / count
    score, variance = np.where(joint_valid, mean, score), np.where(joint_valid, mean_variance, variance)
    shrink = np.maximum(0.0, 1 - variance / np.maximum(score**2, 1e-30))
    return Marginals(edges, jnp.asarray(shrink * score, edges.dtype))

"""The score of each number of a unit by itself, counted in bins near the posterior: sharp where an edge is, with no network to blunt it.

How often x_j falls into a bin moves with theta as the bin's probability times the marginal score of x_j there,

    d P(x_j in bin) / d theta = P(x_j in bin) E[s* | x_j in bin],

so that counts at theta + step and theta - step tell the score. As features for the linear readout they add what is
additive over the numbers of a unit.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int
import numpy as np

from numpyro_sls.focus import HALVINGS, halving_edges, passed, tail_edges

__all__ = [
    "MAX_COLUMNS",
    "NUM_BINS",
    "NUM_TAILS",
    "MarginalSums",
    "MarginalUnits",
    "Marginals",
    "make_edges",
    "make_marginal_sums",
    "no_marginals",
    "solve_marginals",
]

MIDDLE, TAIL = 400, 24  # bins with as many units in each; beyond the outer ones, bins that hold 0.7 of the one before
NUM_BINS = MIDDLE + 2 * TAIL
BEYOND = 4.0  # halvings, to which the last one is extrapolated
NUM_TAILS = 6  # features of every number that only units out of the model's reach have: three on either side
MAX_COLUMNS = 12  # numbers of a unit, with more of which each tells little and the tables grow


class Marginals(NamedTuple):
    """A table of scores by bin for every number of a unit."""

    edges: Float[Array, "p e"]
    values: Float[Array, "p b d"]
    low: Float[Array, "t p"]  # below which 1/4, 1/8, ... of the units lie
    high: Float[Array, "t p"]
    rare: Float[Array, ""] | None = None  # halvings beyond which units have a readout of their own, where the data go that far

    def __call__(self, x: Float[Array, "m q"]) -> Float[Array, "m k"]:
        """The scores of the bins, and how rare each number is on either side, with its square: scores grow about so in the tails."""
        index = bins(self.edges, x)
        scores = jax.vmap(lambda table, i: table[i], (0, 1), 1)(self.values, index).reshape(x.shape[0], -1)
        rare = self._rarity(x)
        return jnp.concatenate([scores, rare, rare**2], axis=1)

    def is_rare(self, x: Float[Array, "m q"]) -> Float[Array, " m"]:
        """From 0 to 1 over one halving."""
        assert self.rare is not None
        return jnp.clip(self._rarity(x).max(1) - self.rare, 0.0, 1.0)

    def tails(self, x: Float[Array, "m q"]) -> Float[Array, "m k"]:
        """Whether, by how much and by how much squared every number has passed those halvings on either side."""
        assert self.rare is not None
        beyond = jnp.maximum(self._rarity(x) - self.rare, 0.0)
        return jnp.concatenate([jnp.minimum(beyond, 1.0), beyond, beyond**2], axis=1)

    def _rarity(self, x: Float[Array, "m q"]) -> Float[Array, "m r"]:
        y = x[:, None, : self.edges.shape[0]]
        return jnp.concatenate([passed(-y, -self.low, BEYOND), passed(y, self.high, BEYOND)], axis=1)


def bins(edges: Float[Array, "p e"], x: Float[Array, "m q"]) -> Int[Array, "m p"]:
    """In which bin every number lies."""
    return jax.vmap(jnp.searchsorted, (0, 1), 1)(edges, x[:, : edges.shape[0]])


def no_marginals(num_columns: int, dim: int) -> Marginals:
    """Nothing counted yet."""
    ends = jnp.full((HALVINGS, num_columns), jnp.inf, float)  # else weakly typed, and all that uses it is compiled twice
    return Marginals(jnp.zeros((num_columns, NUM_BINS - 1)), jnp.zeros((num_columns, NUM_BINS, dim)), -ends, ends)


def make_edges(x: Float[Array, "m p"], weight: Float[Array, " m"], blank: Marginals) -> Marginals:
    """The ends of the bins for every number of a unit, infinite where too few units are left to fill them."""
    w = np.asarray(weight, float) / np.asarray(weight, float).sum()
    tails = np.concatenate([2.0 ** (-np.arange(TAIL, 0, -1) / 2) / MIDDLE, np.arange(1, MIDDLE // 2 + 1) / MIDDLE])
    sides = [np.stack([tail_edges(s * column, w, tails) for column in np.asarray(x).T]) for s in (1, -1)]
    low, high = halving_edges(np.asarray(x), w)
    edges = np.concatenate([sides[0], -sides[1][:, -2::-1]], axis=1)
    return blank._replace(edges=jnp.asarray(edges, x.dtype), low=jnp.asarray(low, x.dtype), high=jnp.asarray(high, x.dtype))


class MarginalUnits(NamedTuple):
    """Units simulated at k places in delta."""

    delta: Float[Array, "k d"]
    x: Float[Array, "k m q"]
    joint_score: Float[Array, "k m d"]  # in delta
    weight: Float[Array, "k m"]  # failed ones have none


class MarginalSums(NamedTuple):
    """What one batch adds."""

    counts: Float[Array, "p b"]
    squares: Float[Array, "p b"]  # of the weights
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
        m = u.weight.shape[1]
        index = bins(edges, u.x.reshape(-1, u.x.shape[-1]))
        delta = u.delta[:half] - u.delta[half:]
        w = u.weight.reshape(-1, 1)
        signed = w * jnp.concatenate([jnp.repeat(delta, m, axis=0), -jnp.repeat(delta, m, axis=0)])
        t = w * u.joint_score.reshape(-1, dim)
        table = jnp.concatenate([w, w**2, signed, t, t**2], axis=1)
        summed = jax.vmap(lambda i: jax.ops.segment_sum(table, i, NUM_BINS), 1)(index)
        counts, squares, moved, joint, joint_square = jnp.split(summed, [1, 2, 2 + dim, 2 + 2 * dim], axis=-1)
        return MarginalSums(counts[..., 0], squares[..., 0], moved, joint, joint_square, m * delta.T @ delta), (u.weight == 0).sum()

    return sums_fn


def solve_marginals(blank: Marginals, parts: Sequence[MarginalSums], joint_valid: Bool[np.ndarray, " d"]) -> Marginals:
    """Scores by bin; of two parts the second tells those in the tails."""
    values = [_solve(part, joint_valid) for part in parts]
    middle = (np.arange(NUM_BINS) >= TAIL) & (np.arange(NUM_BINS) < TAIL + MIDDLE)
    return blank._replace(values=jnp.asarray(np.where(middle[:, None], values[0], values[-1]), blank.values.dtype))


def _solve(sums: MarginalSums, joint_valid: Bool[np.ndarray, " d"]) -> Float[np.ndarray, "p b d"]:
    """By the joint score where there is one, shrunk by what their noise can explain."""
    count = np.maximum(np.asarray(sums.counts, float), 1e-6)[..., None]
    squares = np.asarray(sums.squares, float)[..., None]
    precision = np.linalg.inv(np.asarray(sums.delta_square, float))
    total = count[0].sum()
    # With c the counts at the two ends of a pair, E[c+ - c-] is m times slope times delta; a bin's probability is count / total.
    score = np.asarray(sums.moved, float) @ precision * total / count
    variance = 2 * total * np.diag(precision) * squares / count**2  # as if the two ends were independent
    mean = np.asarray(sums.joint, float) / count
    mean_variance = np.maximum(np.asarray(sums.joint_square, float) - squares * mean**2, 0.0) / count**2
    score, variance = np.where(joint_valid, mean, score), np.where(joint_valid, mean_variance, variance)
    shrink = np.maximum(0.0, 1 - variance / np.maximum(score**2, 1e-30))
    return shrink * score

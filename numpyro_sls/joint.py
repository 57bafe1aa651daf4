"""Which coordinates have a joint score, and which a second one to steady it: read off the trace, and checked on simulations."""

from dataclasses import replace
from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Bool, Float
import numpy as np

from numpyro_sls.objectives import mean_zero_z
from numpyro_sls.simulate import Simulator

__all__ = ["JointValidity", "joint_validity", "with_steady"]


class JointValidity(NamedTuple):
    """Where the gradient of the joint log density may be trained on."""

    valid: Bool[np.ndarray, " d"]
    moves: Bool[np.ndarray, " d"]  # a support or a density-free value moves with the coordinate, or the density jumps
    z: Float[np.ndarray, " d"]  # of the test that the joint score has mean zero
    carried: tuple[str, ...] = ()  # nuisances that are carried along for the second joint score
    steady: tuple[int, ...] = ()  # coordinates in which it differs from the first to some use

    @property
    def fails_mean_zero(self) -> Bool[np.ndarray, " d"]:
        return ~self.moves & (self.z > MAX_Z)


NUM_THETAS = 128
NUM_UNITS = 128
NUM_MOVED = 16
STEP = 0.02  # in proposal sds, over which the change of the density is compared with its gradient
MAX_Z = 8.0


def joint_validity(rng_key: Array, simulator: Simulator, thetas: Float[Array, "k d"], most: int | None = None) -> JointValidity:
    """Test every coordinate at the given thetas, exchanging one coordinate at a time with a neighbour's, with ``most`` units at most.

    A value that jumps (`z > theta`) has no gradient but moves, so the test compares values, not derivatives. A density that
    jumps has a gradient, but not one that integrates to its change.
    """
    d = thetas.shape[1]
    num_thetas, num_moved, num_units = _sizes(d, most)
    thetas = thetas[:num_thetas]
    key_moves, key_means = jax.random.split(rng_key)
    keys = jax.random.split(key_moves, len(thetas))

    def moved_in(j):
        others = thetas.at[:, j].set(jnp.roll(thetas[:, j], 1))
        moved = jax.vmap(simulator.units.anchors_moved, (0, 0, 0, None))(keys, thetas, others, num_moved)
        near = thetas.at[:, j].add(STEP * jnp.std(thetas[:, j]))
        jumped = jax.vmap(jax.vmap(simulator.units.density_jumped, (0, None, None)))(_each(keys, num_moved), thetas, near)
        return jnp.any(moved) | _jumps(jumped)

    if simulator.units.density == "none":
        return JointValidity(np.zeros(d, bool), np.ones(d, bool), np.zeros(d))
    moves = np.asarray(jax.jit(lambda: jax.lax.map(moved_in, jnp.arange(d)))())
    batch = jax.jit(simulator.batch, static_argnums=2)(key_means, thetas, num_units)
    simulator.count("joint score test", len(thetas) * (2 * num_moved * d + num_units), int((~batch.ok).sum()))
    z = np.asarray(mean_zero_z(batch.joint_score))
    return JointValidity(~moves & (z <= MAX_Z), moves, z)


MAX_KINKS = 0.02  # of units, whose density changes otherwise than its gradient says, but does not jump


def _each(keys: Array, num: int) -> Array:
    """Keys for as many units at every theta."""
    return jax.vmap(lambda key: jax.random.split(key, num))(keys)


def _jumps(found: tuple[Array, Array]) -> Bool[Array, ""]:
    """A unit with a jump, or many whose gradient is not that of their density."""
    whole, worst = found
    return jnp.any(worst) | (jnp.mean(whole) > MAX_KINKS)


LEAST_THETAS, LEAST_MOVED, LEAST_UNITS = 8, 2, 16


def _sizes(dim: int, most: int | None) -> tuple[int, int, int]:
    """How many thetas, units moved at each and units for the mean: all, or what the budget allows."""
    share = 1.0 if most is None else min(1.0, most / (NUM_THETAS * (2 * NUM_MOVED * dim + NUM_UNITS))) ** (1 / 3)
    num_moved, num_units = max(LEAST_MOVED, int(share * NUM_MOVED)), max(LEAST_UNITS, int(share * NUM_UNITS))
    fit_in = NUM_THETAS if most is None else most // (2 * num_moved * dim + num_units)
    return max(LEAST_THETAS, min(NUM_THETAS, fit_in)), num_moved, num_units


STEADY_THETAS, STEADY_UNITS = 64, 64
STEADY_MOVED = 32  # thetas at which a chosen coordinate is moved
MIN_GAIN = 0.8  # of a variance: what is left of it, for a second joint score to be worth its time
MAX_LOSS = 1.1  # of it, by leaving a coordinate out


def with_steady(
    rng_key: Array, simulator: Simulator, thetas: Float[Array, "k d"], joint: JointValidity, most: int | None = None
) -> JointValidity:
    """Find the coordinates in which carrying the nuisances along gives a second joint score that holds and steadies the first."""
    units, thetas = simulator.units, thetas[:STEADY_THETAS]
    coordinates = np.flatnonzero(joint.valid)
    cost = STEADY_THETAS * STEADY_UNITS
    if units.density != "traced" or not units.traced.nuisances or not len(coordinates) or (most is not None and cost > most):
        return joint
    key_sites, key_units, key_moved = jax.random.split(rng_key, 3)
    carried = _carried_sites(key_sites, simulator, thetas)
    if not carried:
        return joint
    units = replace(units, carriers=carried, steady=tuple(int(j) for j in coordinates))
    found = jax.jit(jax.vmap(lambda key, t: units.simulate(key, t, STEADY_UNITS)))(jax.random.split(key_units, len(thetas)), thetas)
    difference = np.asarray(found.difference)
    used = np.isfinite(difference).all((0, 1)) & (np.abs(difference).max((0, 1)) > 0)
    used &= np.asarray(mean_zero_z(jnp.asarray(np.where(used, difference, 0.0)))) <= MAX_Z
    simulator.count("joint score test", difference.shape[0] * difference.shape[1])
    t = np.where(np.isfinite(found.joint_score), found.joint_score, 0.0)[..., joint.valid]
    t, difference = t.reshape(-1, t.shape[-1]), difference.reshape(-1, difference.shape[-1])
    some, keys = thetas[:STEADY_MOVED], jax.random.split(key_moved, STEADY_MOVED)

    @jax.jit
    def moves(j):
        near = some.at[:, j].add(STEP * jnp.std(some[:, j]))
        moved, jumped = jax.vmap(jax.vmap(units.carried_moved, (0, None, None)))(_each(keys, NUM_MOVED), some, near)
        return jnp.any(moved) | _jumps(jumped)

    tested: dict[int, bool] = {}
    while True:
        chosen = _worth(t, difference, np.flatnonzero(used))
        for i in chosen:
            if i not in tested:
                tested[i] = bool(moves(coordinates[i]))
                simulator.count("joint score test", 2 * len(some) * NUM_MOVED)
        wrong = [i for i in chosen if tested[i]]
        if not wrong:
            break
        used[wrong] = False
    return joint._replace(carried=carried, steady=tuple(int(coordinates[i]) for i in chosen)) if chosen else joint


def _carried_sites(rng_key: Array, simulator: Simulator, thetas: Float[Array, "k d"]) -> tuple[str, ...]:
    """Nuisances of which the parameters decide how their noise becomes them."""
    units, index = simulator.units, jnp.zeros(2, jnp.int32)

    @jax.jit
    def noise(theta, other):
        values = units.traced.run(rng_key, index, units.parameters.unflatten(theta)).values
        return [units.residuals(rng_key, t, index, values) for t in (theta, other)]

    names: set[str] = set()
    for theta, other in zip(thetas[:4], thetas[4:8], strict=True):
        before, after = noise(theta, other)
        names |= {k for k in before if np.max(np.abs(before[k] - after[k])) > 1e-4 * np.max(np.abs(before[k]))}
    return tuple(sorted(names))


def _worth(t: np.ndarray, difference: np.ndarray, columns: np.ndarray) -> list[int]:
    """The fewest columns that take away what all of them take away of the variance of t, by halves; none if that is little."""

    def left(some: list[int]) -> np.ndarray:
        halves = [(t[i::2], difference[i::2][:, some]) for i in (0, 1)]
        fits = [np.linalg.lstsq(b, a, rcond=None)[0] for a, b in halves]
        return np.mean([((a - b @ fits[1 - i]) ** 2).mean(0) for i, (a, b) in enumerate(halves)], axis=0)

    chosen, without = [int(c) for c in columns], (t**2).mean(0)
    if not chosen:
        return []
    best = left(chosen)
    for j in list(columns):
        rest = [c for c in chosen if c != j]
        if rest and np.all(left(rest) <= MAX_LOSS * best):
            chosen = rest
    return chosen if np.any(left(chosen) < MIN_GAIN * without) else []

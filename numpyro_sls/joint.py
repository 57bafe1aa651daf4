"""Which coordinates have a joint score: read off the trace, and checked on simulations."""

from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Bool, Float
import numpy as np

from numpyro_sls.objectives import mean_zero_z
from numpyro_sls.simulate import Simulator

__all__ = ["JointValidity", "joint_validity"]


class JointValidity(NamedTuple):
    """Where the gradient of the joint log density may be trained on."""

    valid: Bool[np.ndarray, " d"]
    moves: Bool[np.ndarray, " d"]  # a support or a density-free value moves with the coordinate, or the density jumps
    z: Float[np.ndarray, " d"]  # of the test that the joint score has mean zero

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
        jumped = jax.vmap(simulator.units.density_jumped, (0, 0, 0, None))(keys, thetas, near, num_moved)
        return jnp.any(moved) | jnp.any(jumped)

    if simulator.units.density == "none":
        return JointValidity(np.zeros(d, bool), np.ones(d, bool), np.zeros(d))
    moves = np.asarray(jax.jit(lambda: jax.lax.map(moved_in, jnp.arange(d)))())
    batch = jax.jit(simulator.batch, static_argnums=2)(key_means, thetas, num_units)
    simulator.count("joint score test", len(thetas) * (2 * num_moved * d + num_units), int((~batch.ok).sum()))
    z = np.asarray(mean_zero_z(batch.joint_score))
    return JointValidity(~moves & (z <= MAX_Z), moves, z)


LEAST_THETAS, LEAST_MOVED, LEAST_UNITS = 8, 2, 16


def _sizes(dim: int, most: int | None) -> tuple[int, int, int]:
    """How many thetas, units moved at each and units for the mean: all, or what the budget allows."""
    share = 1.0 if most is None else min(1.0, most / (NUM_THETAS * (2 * NUM_MOVED * dim + NUM_UNITS))) ** (1 / 3)
    num_moved, num_units = max(LEAST_MOVED, int(share * NUM_MOVED)), max(LEAST_UNITS, int(share * NUM_UNITS))
    fit_in = NUM_THETAS if most is None else most // (2 * num_moved * dim + num_units)
    return max(LEAST_THETAS, min(NUM_THETAS, fit_in)), num_moved, num_units

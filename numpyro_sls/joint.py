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
    moves: Bool[np.ndarray, " d"]  # a support or a density-free value moves with the coordinate
    z: Float[np.ndarray, " d"]  # of the test that the joint score has mean zero

    @property
    def fails_mean_zero(self) -> Bool[np.ndarray, " d"]:
        return ~self.moves & (self.z > MAX_Z)


NUM_THETAS = 128
NUM_UNITS = 128
MAX_Z = 8.0


def joint_validity(rng_key: Array, simulator: Simulator, thetas: Float[Array, "k d"]) -> JointValidity:
    """Test every coordinate at the given thetas, exchanging one coordinate at a time with a neighbour's.

    A value that jumps (`z > theta`) has no gradient but moves, so the test compares values, not derivatives.
    """
    thetas = thetas[:NUM_THETAS]
    d = thetas.shape[1]
    key_moves, key_means = jax.random.split(rng_key)
    keys = jax.random.split(key_moves, len(thetas))

    def moved_in(j):
        others = thetas.at[:, j].set(jnp.roll(thetas[:, j], 1))
        moved = jax.vmap(simulator.units.anchors_moved, (0, 0, 0, None))(keys, thetas, others, 8)
        return jnp.any(moved)

    moves = np.asarray(jax.jit(lambda: jax.lax.map(moved_in, jnp.arange(d)))())
    batch = jax.jit(simulator.batch, static_argnums=2)(key_means, thetas, NUM_UNITS)
    simulator.count("joint score test", len(thetas) * (8 * d + NUM_UNITS), int((~batch.ok).sum()))
    z = np.asarray(mean_zero_z(batch.joint_score))
    return JointValidity(~moves & (z <= MAX_Z), moves, z)

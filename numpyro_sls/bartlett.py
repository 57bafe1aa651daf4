"""The identities that a likelihood score obeys at every theta, measured on fresh simulations: E s = 0 and E s s^T + E grad s = 0."""

from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float
import numpy as np

from numpyro_sls.score import DataTerms, LearnedScore, UnitScore
from numpyro_sls.simulate import Simulator

__all__ = ["Bartlett", "bartlett"]

NUM_THETAS, NUM_UNITS = 64, 64
MIN_BATCHES, MAX_BATCHES = 16, 1000


class Bartlett(NamedTuple):
    """Both residuals in delta, where n units carry about unit information: in posterior sds, and relative to the information."""

    mean: Float[np.ndarray, " d"]  # n E s: by how much the posterior mean is off
    mean_se: Float[np.ndarray, " d"]
    information: Float[np.ndarray, "d d"]  # n E s s^T
    curvature: Float[np.ndarray, "d d"]  # n (E s s^T + E grad s)
    curvature_se: Float[np.ndarray, "d d"]
    asymmetry: float  # |J - J^T| / |J| of the mean Jacobian
    num_simulated: int
    num_failed: int

    @property
    def relative(self) -> tuple[Float[np.ndarray, " d"], Float[np.ndarray, " d"]]:
        """The curvature's residual by direction, relative to the information there, and its standard error."""
        size = np.maximum(np.diag(self.information), 1e-12)
        return np.diag(self.curvature) / size, np.diag(self.curvature_se) / size


def bartlett(
    rng_key: Array,
    learned: LearnedScore,
    unit: UnitScore,
    simulator: Simulator,
    data: DataTerms,
    theta: Float[Array, "k d"],
    tolerance: float,
) -> Bartlett:
    """Measure both at these thetas until the mean's standard error is ``tolerance`` posterior sds, or a thousand batches are spent."""
    n = float(data.num_units)

    @jax.jit
    def batch_fn(key, unit, data, theta):
        batch = simulator.batch(key, theta, NUM_UNITS)

        def at(theta, x, ok):
            share = ok / jnp.maximum(ok.sum(), 1)

            def score(t):
                s = learned.units(unit, unit.proposal.whiten(t), x, data.local)
                return unit.proposal.score_in_theta(t, s) @ data.factor

            s = score(theta)
            jacobian = jax.jacfwd(lambda t: share @ score(t))(theta) @ data.factor
            return share @ s, (share[:, None] * s).T @ s, jacobian

        found = jax.vmap(at)(batch.theta, batch.x, batch.ok.astype(batch.x.dtype))
        return tuple(a.mean(0) for a in found), (~batch.ok).sum()

    rows, failed, num = [], 0, 0
    for i in range(MAX_BATCHES):
        key_rows, key_batch = jax.random.split(jax.random.fold_in(rng_key, i))
        at = theta[jax.random.randint(key_rows, (NUM_THETAS,), 0, len(theta))]
        found, bad = batch_fn(key_batch, unit, data, at)
        rows.append([n * np.asarray(a, float) for a in found])
        failed, num = failed + int(bad), i + 1
        if num >= MIN_BATCHES and num % 8 == 0:
            means = np.stack([r[0] for r in rows])
            if (means.std(0) / np.sqrt(num)).max() <= tolerance:
                break
    mean, outer, jacobian = (np.stack(a) for a in zip(*rows, strict=True))
    residual = outer + (jacobian + jacobian.transpose(0, 2, 1)) / 2
    total = jacobian.mean(0)
    simulator.count("diagnosis", num * NUM_THETAS * NUM_UNITS, failed)
    return Bartlett(
        mean.mean(0),
        mean.std(0) / np.sqrt(num),
        outer.mean(0),
        residual.mean(0),
        residual.std(0) / np.sqrt(num),
        float(np.linalg.norm(total - total.T)) / max(float(np.linalg.norm(total)), 1e-12),
        num * NUM_THETAS * NUM_UNITS,
        failed,
    )

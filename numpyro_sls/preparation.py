"""What a fit needs before it learns: the data as the score sees them, the prior's moments, the first proposal, a clock."""

from collections.abc import Sequence
import hashlib
from itertools import pairwise
from pathlib import Path
import time
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float
import numpy as np

from numpyro_sls.boundary import Smoothing
from numpyro_sls.localization import Localized
from numpyro_sls.proposal import Proposal, worth_units
from numpyro_sls.units import Units

__all__ = ["Clock", "fingerprint", "first_proposal", "key_of", "make_room", "moving_supports", "prior_moments", "smoothed"]


class Clock:
    """Seconds by stage."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def mark(self, stage: str) -> None:
        """The time since the last mark was spent on this stage."""
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now


def make_room() -> None:
    """Forget compiled programs before there is no room for more: each holds memory maps, of which a process may have 65 530.

    JAX keeps the programs of models that were fitted before; past that number, after some eight fits, XLA fails to compile or crashes.
    """
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()


MOST_MAPS = 30_000


def fingerprint(tree: Any) -> str:
    """A hash of arrays and settings, to know data again without tracing the model."""
    leaves, structure = jax.tree.flatten(tree)
    seen = hashlib.blake2b(str(structure).encode(), digest_size=16)
    for leaf in leaves:
        is_array = isinstance(leaf, (np.ndarray, jax.Array))
        seen.update(f"{leaf.dtype}{leaf.shape}".encode() if is_array else repr(leaf).encode())
        if is_array:  # not as bytes, which would be another copy of the data
            seen.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
    return seen.hexdigest()


def key_of(x: Float[Array, "n p"]) -> Array:
    """A key that follows from the data."""
    return jax.random.key(int(fingerprint(x)[:8], 16))


def smoothed(x: Float[Array, "n p"], smoothing: Smoothing | None, units: Units) -> Float[Array, "r p"]:
    """The data as the score sees them; the noise follows from the data, so that a fit knows them again."""
    if smoothing is None or units.noise_sd is None:
        return x
    return smoothing.apply(key_of(x), x, units.noise_sd)


def moving_supports(units: Units) -> list[str]:
    """Sites inside the plate whose support moves with a parameter, where the data have no density that would smooth that."""
    if units.traced.num_simulated == 0 and not _any_moves(units, units.traced.observations):
        return []
    return _any_moves(units, (*units.traced.nuisances, *units.traced.observations))


def _any_moves(units: Units, sites: Sequence[str]) -> list[str]:
    keys = jax.random.split(jax.random.key(0), 5)
    thetas = [units.parameters.sample_prior(k) for k in keys]
    moved = [units.supports_moved(keys[0], a, b) for a, b in pairwise(thetas)]
    return [k for k in sites if any(bool(m.get(k, False)) for m in moved)]


def prior_moments(rng_key: Array, units: Units) -> tuple[Float[Array, " d"], Float[Array, "d d"]]:
    """Median and covariance of the prior in unconstrained space, the draws pulled in to five robust sds."""
    draws = np.asarray(jax.jit(jax.vmap(units.parameters.sample_prior))(jax.random.split(rng_key, 4000)))
    low, centre, high = np.nanquantile(draws, [0.25, 0.5, 0.75], axis=0)
    sd = np.maximum((high - low) / 1.35, 1e-6)
    pulled = np.clip(np.nan_to_num(draws, nan=0.0), centre - 5 * sd, centre + 5 * sd)
    covariance = np.atleast_2d(np.cov(pulled.T))
    return jnp.asarray(centre), jnp.asarray(covariance + 1e-9 * np.diag(sd**2))


def first_proposal(prior: tuple, localized: Localized | None, joint_valid: np.ndarray | None = None) -> Proposal:
    """Wide enough for a first look: the prior, and one unit where localization says what that leaves open."""
    valid = np.ones(len(prior[0]), bool) if joint_valid is None else joint_valid
    if localized is None:
        return worth_units(prior[0], prior[1], jnp.zeros_like(prior[1]), 1.0, valid)
    return worth_units(localized.centre, prior[1], localized.information, 1.0, valid)

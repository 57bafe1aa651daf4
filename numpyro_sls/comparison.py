"""Simulations compared with the data: unit by unit along random slices, or a whole data set by its summary."""

from collections.abc import Callable
from dataclasses import dataclass
import math

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float
import numpyro.distributions as dist

from numpyro_sls.descent import Problem
from numpyro_sls.distances import directions, make_frame, quantile_slices, slice_residuals
from numpyro_sls.model import Sampler
from numpyro_sls.reparametrize import Reparametrized, draw, reparametrization
from numpyro_sls.units import Units

__all__ = ["NUM_NOISE", "Comparison", "reparametrize"]

BINS = 32  # of neighbouring quantiles on every slice
COARSE_UNITS = 256
FINE_UNITS = 4096
WHOLE_UNITS = 8  # data sets averaged in a fine comparison, where the data are one whole
NUM_NOISE = 64  # data sets simulated to see the noise of a summary
MAX_ROWS = 20_000  # of the data that a comparison looks at


def reparametrize(units: Units, steepness: float | None) -> tuple[Sampler, dict[str, Reparametrized]]:
    """A sampler for every site of the model, differentiable where that is possible, and what it does in words."""
    integers: set[str] = set()
    sites: dict[str, Reparametrized] = {}

    def sampler(name: str, fn: dist.Distribution, rng_key: Array) -> Array:
        sites[name] = reparametrization(fn, name in integers)
        value = draw(fn, rng_key, steepness)
        return value if name not in integers else value.astype(jax.eval_shape(fn.sample, rng_key).dtype)

    def run() -> bool:
        index, theta = jnp.zeros(1, jnp.int32), jnp.zeros(units.parameters.dim)
        try:
            jax.eval_shape(lambda key, t: units.pushforward(key, t, index, sampler), jax.random.key(0), theta)
        except (TypeError, IndexError, ValueError):
            return False
        return True

    # A model may index with a discrete site, which only integers can. One site is tried at a time, then all that were seen.
    while not run():
        discrete = [name for name, site in sites.items() if "stand-in" in site.map and name not in integers]
        if not discrete:
            break
        before = set(integers)
        for name in discrete:
            integers = before | {name}
            if run():
                return sampler, dict(sites)
        integers = before | set(discrete)
    return sampler, dict(sites)


@dataclass(frozen=True, eq=False)
class Comparison:
    """The data and the simulator, to be compared with few units or with as many as asked for."""

    units: Units
    observed: Float[Array, "n p"]
    sampler: Sampler
    prior: tuple[Float[Array, " d"], Float[Array, " d"]]  # centre and sds
    num_units: int | None
    num_directions: int
    summary: Callable[[Array], Array] | None

    @property
    def is_whole(self) -> bool:
        return self.units.traced.unit_plate is None

    def problem(self, rng_key: Array, thetas: Float[Array, "k d"], coarse: bool) -> Problem:
        """``thetas`` are where the noise of a whole data set's summary is measured."""
        if self.is_whole:
            return self._whole(rng_key, thetas, 1 if coarse else self.num_units or WHOLE_UNITS)
        n = self.observed.shape[0]
        num_units = self.num_units or max(8, min(4 * n, FINE_UNITS))
        num_units = min(COARSE_UNITS, n, num_units) if coarse else num_units
        return self._by_unit(rng_key, num_units // _bins(num_units) * _bins(num_units))

    def _by_unit(self, rng_key: Array, num_units: int) -> Problem:
        """Units with units, covariates beside their responses, along slices of the data."""
        n, num_covariates = self.observed.shape[0], self.units.covariates.shape[1]
        key_rows, key_data = jax.random.split(rng_key)
        # Simulated units take the covariates of as many observed rows, each as often as the others.
        rows = jnp.concatenate([jax.random.permutation(k, n) for k in jax.random.split(key_rows, -(-num_units // n))])[:num_units]
        data = self.observed[rows[:n] if num_covariates else jax.random.permutation(key_data, n)[:MAX_ROWS]]
        frame = make_frame(self.observed, self.observed.shape[1] - num_covariates)

        def view(rng_key):
            w = directions(rng_key, self.num_directions, frame)
            # Along the one direction of one response the slices are constants, and XLA would sort those itself, at length.
            return w, quantile_slices(jax.lax.optimization_barrier(data - frame.centre), w, num_units)

        def residuals(theta, rng_key, view):
            x = _fill_failed(self.units.pushforward(rng_key, theta, rows, self.sampler))
            return slice_residuals(x - frame.centre, view[0], view[1], _bins(num_units), _squash).ravel()

        return Problem(view, residuals, *self.prior, math.sqrt(1 / n + 1 / num_units), num_units)

    def _whole(self, rng_key: Array, thetas: Float[Array, "k d"], num_sets: int) -> Problem:
        """The data set with the mean of a few simulated ones, number by number, each in units of its noise at the thetas."""
        summary = self.summary or (lambda x: x)
        target = jnp.asarray(summary(self.observed[0]))
        first = jnp.zeros(1, jnp.int32)

        def simulate(rng_key, theta):
            return summary(self.units.pushforward(rng_key, theta, first, self.sampler)[0])

        def residuals(theta, rng_key, view):
            s = jax.vmap(simulate, (0, None))(jax.random.split(rng_key, num_sets), theta)
            ok = jnp.all(jnp.isfinite(s), axis=1, keepdims=True)
            return (jnp.sum(jnp.where(ok, s, 0.0), axis=0) / jnp.sum(ok) - target) / noise

        thetas = jnp.repeat(thetas, -(-NUM_NOISE // len(thetas)), axis=0)[:NUM_NOISE]
        keys = jax.random.split(rng_key, len(thetas))
        seen = jax.jit(lambda: jax.lax.map(lambda a: simulate(*a), (keys, thetas), batch_size=16))()
        noise = jnp.nanstd(jnp.where(jnp.isfinite(seen), seen, jnp.nan), axis=0)
        usual = jnp.where(jnp.any(noise > 0), jnp.nanmean(noise), 1.0)
        noise = jnp.maximum(jnp.nan_to_num(noise, nan=usual), 0.05 * usual)
        return Problem(lambda key: (), residuals, *self.prior, math.sqrt(1 + 1 / num_sets), num_sets)


def _bins(num_units: int) -> int:
    return min(BINS, max(1, num_units // 4))


def _squash(t: Float[Array, "..."]) -> Float[Array, "..."]:
    """Linear within three robust sds, logarithmic beyond."""
    return 3 * jnp.arcsinh(t / 3)


def _fill_failed(x: Float[Array, "m p"]) -> Float[Array, "m p"]:
    """A failed unit is replaced by the last one that did not fail; if all failed, the distance is not finite."""
    ok = jnp.all(jnp.isfinite(x), axis=1)
    return x[jnp.where(ok, jnp.arange(len(x)), jax.lax.cummax(jnp.where(ok, jnp.arange(len(x)), jnp.argmax(ok))))]

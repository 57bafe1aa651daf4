"""The mean of the score, which should be zero: learnt over the whole region, then measured near the posterior."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float
import numpy as np
from tqdm.auto import tqdm

from numpyro_sls.networks import MLP

__all__ = ["Debias", "LocalMean", "LocalSums", "MeanNetwork", "local_mean", "make_local_sums", "mean_loss"]


@dataclass(frozen=True)
class Debias:
    """How the mean of the score is removed.

    :param tolerance: the bias left in the posterior mean, in posterior sds, that the simulations near the posterior
        are to resolve as a standard error.
    :param max_simulations: units simulated near the posterior at most; a data set of n units needs about n / tolerance^2.
    :param width: units in the hidden layers of the regression over the whole region.

    **Example:**

    >>> from numpyro_sls import Debias
    >>> Debias(tolerance=0.02).max_simulations
    20000000
    """

    tolerance: float = 0.03
    max_simulations: int = 20_000_000
    width: int = 64


@dataclass(frozen=True)
class MeanNetwork:
    """h(eta) = E[s | theta]: the gradient of a log-partition A where the score has a potential, so that it keeps one."""

    has_potential: bool
    dim: int
    width: int

    def _mlp(self) -> MLP:
        return MLP(1 if self.has_potential else self.dim, self.width, 2, nn.tanh)

    def init(self, rng_key: Array) -> Any:
        return self._mlp().init(rng_key, jnp.zeros(self.dim))

    def log_partition(self, weights: Any, eta: Float[Array, " d"]) -> Float[Array, ""]:
        return jnp.asarray(self._mlp().apply(weights, eta))[0]

    def mean(self, weights: Any, eta: Float[Array, " d"]) -> Float[Array, " d"]:
        if self.has_potential:
            return jax.grad(self.log_partition, argnums=1)(weights, eta)
        return jnp.asarray(self._mlp().apply(weights, eta))


def mean_loss(mean: Float[Array, "k d"], score: Float[Array, "k m d"], ok: Array) -> Float[Array, ""]:
    """1/2 |h(theta) - mean of the m scores at theta|^2, averaged over theta (paper, eq. 5)."""
    count = jnp.maximum(ok.sum(1), 1)[:, None]
    target = jnp.where(ok[..., None], score, 0.0).sum(1) / count
    return 0.5 * jnp.mean(jnp.sum((mean - target) ** 2, axis=-1))


class LocalMean(NamedTuple):
    """Mean of the score near the posterior, affine in delta: offset + slope delta, with the offset's standard error."""

    offset: Float[Array, " d"]
    slope: Float[Array, "d d"]
    offset_se: Float[Array, " d"]
    num_simulated: int
    num_failed: int


class LocalSums(NamedTuple):
    """What one batch adds to the local mean."""

    num_ok: Array
    score: Float[Array, " d"]
    square: Float[Array, " d"]
    cross: Float[Array, "d d"]


WIDTH = 1.0  # sds of the posterior: the local mean is right on average over the posterior, and in slope


def make_local_sums(
    score_fn: Callable[[Array, Array, Any], tuple[Array, Array]], num_thetas: int, dim: int
) -> Callable[[Array, Any], tuple[LocalSums, Array]]:
    """Compile the sums of one batch, and how many of its simulations failed.

    ``score_fn(rng_key, delta, context)`` simulates units at each delta and returns their scores in delta with an ok mask.
    The deltas come in pairs (delta, -delta), so that offset and slope are estimated apart.
    """

    @jax.jit
    def sums_fn(rng_key, context):
        key_delta, key_units = jax.random.split(rng_key)
        half = WIDTH * jax.random.normal(key_delta, (num_thetas // 2, dim))
        delta = jnp.concatenate([half, -half])
        score, ok = score_fn(key_units, delta, context)
        s = jnp.where(ok[..., None], score, 0.0)
        by_theta = s.sum(1)
        return LocalSums(ok.sum(), by_theta.sum(0), (s**2).sum((0, 1)), by_theta.T @ delta), (~ok).sum()

    return sums_fn


def local_mean(
    rng_key: Array,
    sums_fn: Callable[[Array, Any], tuple[LocalSums, Array]],
    context: Any,
    dim: int,
    tolerance: Float[Array, " d"],
    max_simulations: int,
    size: int,
    progress_bar: bool = False,
) -> LocalMean:
    """Measure E[s] on delta ~ N(0, WIDTH^2) until every coordinate's standard error is below ``tolerance``.

    ``sums_fn(rng_key, context)``, made by `make_local_sums`, simulates one batch.

        offset = E[s],   slope = E[s delta^T] / WIDTH^2, its symmetric part.
    """

    most = max(1, max_simulations // size)
    sums, failed = jax.tree.map(lambda a: np.zeros(a.shape), jax.eval_shape(sums_fn, rng_key, context)[0]), 0
    bar = tqdm(total=most, desc="debiasing near the posterior", disable=not progress_bar)
    for i in range(most):
        new, bad = sums_fn(jax.random.fold_in(rng_key, i), context)
        sums = jax.tree.map(lambda a, b: a + np.asarray(b, dtype=float), sums, new)
        failed += int(bad)
        bar.update()
        offset = sums.score / sums.num_ok
        se = np.sqrt(np.maximum(sums.square / sums.num_ok - offset**2, 0.0) / sums.num_ok)
        if i >= 4 and np.all(se <= np.asarray(tolerance)):
            break
    bar.close()
    slope = sums.cross / sums.num_ok / WIDTH**2
    return LocalMean(jnp.asarray(offset), jnp.asarray((slope + slope.T) / 2), jnp.asarray(se), (i + 1) * size, failed)

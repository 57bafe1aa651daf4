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

from numpyro_sls.inputs import NUM_VIEWS, Layout
from numpyro_sls.perceptron import MLP

__all__ = ["METHODS", "Debias", "LocalMean", "LocalSums", "MeanNetwork", "MeanZero", "local_mean", "make_local_sums", "mean_loss"]

METHODS = ("regression", "simplified", "projected")


@dataclass(frozen=True)
class Debias:
    """How the mean of the score is removed.

    :param tolerance: the bias left in the posterior mean, in posterior sds, that the simulations near the posterior
        are to resolve as a standard error.
    :param max_simulations: units simulated near the posterior at most; a data set of n units needs about n / tolerance^2.
    :param width: units in the hidden layers of the regression over the whole region.
    :param method: of the regression over the region: "regression" (the paper, eq. 5 and its curvature-aware form), "simplified"
        (its alternative 1, another penalty) or "projected" (alternative 2: score and mean trained together and projected in turns).
    :param ladder: weights lambda_2 of the curvature penalty to try after the plain regression; the least held-out regression loss wins.
    :param num_turns: of the projected method.
    :param near: measure the mean once more near the posterior, and solve for the best linear readout of the network's features there.

    **Example:**

    >>> from numpyro_sls import Debias
    >>> Debias(tolerance=0.02).max_simulations
    20000000
    """

    tolerance: float = 0.03
    max_simulations: int = 20_000_000
    width: int = 64
    method: str = "regression"
    ladder: tuple[float, ...] = ()
    num_turns: int = 3
    near: bool = True

    def __post_init__(self):
        if self.method not in METHODS:
            raise ValueError(f"Debias(method={self.method!r}) is not known; use one of {METHODS}.")
        if any(weight < 0 for weight in self.ladder):
            raise ValueError(f"Debias(ladder={self.ladder}) must not hold negative weights.")


@dataclass(frozen=True)
class MeanNetwork:
    """h = E[s | theta], given the covariates of a unit where there are any.

    Where the score has a potential, h is the gradient of a log-partition, A(theta) or with covariates c, a(c) . A(theta), so
    that the debiased score keeps a potential, and its sum over the data costs the same for any number of units.
    """

    has_potential: bool
    dim: int
    width: int
    num_inputs: int = 0  # numbers of a unit, of which the last are covariates
    num_covariates: int = 0

    @property
    def _num_outputs(self) -> int:
        if not self.has_potential:
            return self.dim
        return NUM_COVARIATE_FEATURES if self.num_covariates else 1

    def _mlp(self) -> MLP:
        return MLP(self._num_outputs, self.width, 2, nn.tanh)

    def _given(self) -> MLP:
        return MLP(NUM_COVARIATE_FEATURES - 1, self.width, 1, nn.tanh)

    def init(self, rng_key: Array, layout: Layout | None = None) -> Any:
        key_mlp, key_given = jax.random.split(rng_key)
        if not self.has_potential:
            return {"mlp": self._mlp().init(key_mlp, jnp.zeros(self.dim + NUM_VIEWS * self.num_covariates))}
        weights: dict[str, Any] = {"mlp": self._mlp().init(key_mlp, jnp.zeros(self.dim))}
        if self.num_covariates:
            weights["given"] = self._given().init(key_given, jnp.zeros(NUM_VIEWS * self.num_covariates))
        return {**weights, "share": jnp.ones(())} | ({} if layout is None else {"layout": layout})

    def covariates(self, z: Float[Array, "m q"]) -> Float[Array, "m r"]:
        """The columns of the standardized units that are covariates, in every view."""
        views = z[:, : NUM_VIEWS * self.num_inputs].reshape(z.shape[0], NUM_VIEWS, -1)
        return views[:, :, views.shape[2] - self.num_covariates :].reshape(z.shape[0], -1)

    def features(self, weights: Any, z: Float[Array, "m q"]) -> Float[Array, "m f"]:
        one = jnp.ones((z.shape[0], 1))
        if not self.num_covariates:
            return one
        return jnp.concatenate([one, jnp.asarray(self._given().apply(weights["given"], self.covariates(z)))], axis=1)

    def summary(self, weights: Any, z: Float[Array, "n q"]) -> Float[Array, " f"]:
        """What the log-partition of a data set needs of it."""
        return self.features(weights, z).sum(0) if self.has_potential else jnp.zeros(0)

    def log_partition(self, weights: Any, eta: Float[Array, " d"], summary: Float[Array, " f"]) -> Float[Array, ""]:
        """n A(theta), or sum_i a(c_i) . A(theta)."""
        return weights["share"] * summary @ self._partitions(weights, eta)

    def _partitions(self, weights: Any, eta: Float[Array, " d"]) -> Float[Array, " f"]:
        values = jax.lax.stop_gradient(weights["layout"])(eta) if "layout" in weights else eta
        return jnp.asarray(self._mlp().apply(weights["mlp"], values))

    def mean(self, weights: Any, eta: Float[Array, " d"], z: Float[Array, "m q"]) -> Float[Array, "m d"]:
        """h at one theta for each unit."""
        if self.has_potential:
            slopes = jax.jacfwd(lambda e: self._partitions(weights, e))(eta)
            return jax.lax.stop_gradient(weights["share"]) * self.features(weights, z) @ slopes
        mlp = self._mlp()
        if not self.num_covariates:
            return jnp.broadcast_to(jnp.asarray(mlp.apply(weights["mlp"], eta)), (z.shape[0], self.dim))
        given = self.covariates(z)
        joined = jnp.concatenate([jnp.broadcast_to(eta, (z.shape[0], self.dim)), given], axis=1)
        return jnp.asarray(mlp.apply(weights["mlp"], joined))

    def total(self, weights: Any, eta: Float[Array, " d"], z: Float[Array, "n q"]) -> Float[Array, " d"]:
        """The sum of h over the units."""
        if self.num_covariates:
            return self.mean(weights, eta, z).sum(0)
        return z.shape[0] * self.mean(weights, eta, z[:1])[0]


NUM_COVARIATE_FEATURES = 16


def mean_loss(
    mean_fn: Callable[[Array], Array],
    eta: Float[Array, " d"],
    score: Float[Array, "m d"],
    share: Float[Array, " m"],
    penalty: Array,
    method: str,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The regression at one theta (paper, eq. 5), and with it lambda_2 times the curvature penalty of its appendix.

    With b the mean of the m scores at theta, h = ``mean_fn(eta)`` at each unit and its average in the penalties:

        |h - s|^2 / 2;    "regression": |h h^T - grad h - b h^T - h b^T|^2,    "simplified": |h h^T + grad h|^2.
    """
    weight = share / jnp.maximum(share.sum(), 1e-12)
    each = mean_fn(eta)
    # With one h for all units the regression on their mean is the same up to a constant, and less noisy to watch.
    b = weight @ score
    shared = 0.5 * jnp.sum((weight @ each - b) ** 2)
    around = 0.5 * weight @ jnp.sum((each - weight @ each - (score - b)) ** 2, axis=-1)
    fit = shared + jnp.where(jnp.max(jnp.abs(each - each[0])) > 0, around, 0.0)

    def average(e):
        return weight @ mean_fn(e)

    h, jacobian = average(eta), jax.jacfwd(average)(eta)
    outer = jnp.outer(h, h)
    residual = outer + jacobian if method == "simplified" else outer - jacobian - jnp.outer(b, h) - jnp.outer(h, b)
    return fit, fit + penalty * jnp.sum(residual**2)


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
    delta: Float[Array, " d"]
    delta_square: Float[Array, "d d"]


WIDTH = 1.0  # sds of the posterior: the local mean is right on average over the posterior, and in slope


def make_local_sums(
    score_fn: Callable[[Array, Array, Any], tuple[Array, Array, Array]], num_thetas: int, dim: int
) -> Callable[[Array, Any], tuple[LocalSums, Array]]:
    """Compile the sums of one batch, and how many of its simulations failed.

    ``score_fn(rng_key, step, context)`` simulates units at each step of the sampler from the mode, and returns their scores in
    delta, an ok mask and the deltas. The steps come in pairs (step, -step), so that offset and slope are estimated apart.
    """

    @jax.jit
    def sums_fn(rng_key, context):
        key_delta, key_units = jax.random.split(rng_key)
        half = WIDTH * jax.random.normal(key_delta, (num_thetas // 2, dim))
        score, ok, delta = score_fn(key_units, jnp.concatenate([half, -half]), context)
        s = jnp.where(ok[..., None], score, 0.0)
        by_theta, count = s.sum(1), ok.sum(1)
        weighted = count[:, None] * delta
        return LocalSums(ok.sum(), by_theta.sum(0), (s**2).sum((0, 1)), by_theta.T @ delta, weighted.sum(0), weighted.T @ delta), (
            ~ok
        ).sum()

    return sums_fn


def local_mean(
    rng_key: Array,
    sums_fn: Callable[[Array, Any], tuple[LocalSums, Array]],
    context: Any,
    tolerance: Float[Array, " d"],
    max_simulations: int,
    size: int,
    progress_bar: bool = False,
) -> LocalMean:
    """Measure E[s] near the posterior until every coordinate's standard error is below ``tolerance``.

    ``sums_fn(rng_key, context)``, made by `make_local_sums`, simulates one batch. Offset and slope are those of the least
    squares regression of s on delta, the slope made symmetric.
    """

    most = max(1, max_simulations // size)
    sums, failed = jax.tree.map(lambda a: np.zeros(a.shape), jax.eval_shape(sums_fn, rng_key, context)[0]), 0
    bar = tqdm(total=most, desc="debiasing near the posterior", disable=not progress_bar)
    for i in range(most):
        new, bad = sums_fn(jax.random.fold_in(rng_key, i), context)
        sums = jax.tree.map(lambda a, b: a + np.asarray(b, dtype=float), sums, new)
        failed += int(bad)
        bar.update()
        mean = sums.score / sums.num_ok
        se = np.sqrt(np.maximum(sums.square / sums.num_ok - mean**2, 0.0) / sums.num_ok)
        if i >= 4 and np.all(se <= np.asarray(tolerance)):
            break
    bar.close()
    centre = sums.delta / sums.num_ok
    spread = sums.delta_square / sums.num_ok - np.outer(centre, centre)
    slope = np.linalg.solve(spread, (sums.cross / sums.num_ok - np.outer(mean, centre)).T).T
    slope = (slope + slope.T) / 2
    return LocalMean(jnp.asarray(mean - slope @ centre), jnp.asarray(slope), jnp.asarray(se), (i + 1) * size, failed)


class MeanZero(NamedTuple):
    """The mean of the score over the posterior, which should be zero, as the shift that it gives the posterior mean, in posterior sds."""

    labels: tuple[str, ...]
    raw: Float[np.ndarray, " d"]
    region: Float[np.ndarray, " d"]  # after the regression over the whole region
    final: Float[np.ndarray, " d"]  # after the measurement near the posterior too
    se: Float[np.ndarray, "3 d"]
    num_simulated: int

    @property
    def demand(self) -> Float[np.ndarray, " 3"]:
        """n |h|^2 in units of the information, which must be small against 1, at each of the three stages; noise taken off."""
        return np.array([np.sum(b**2 - s**2) for b, s in zip((self.raw, self.region, self.final), self.se, strict=True)])

    def __str__(self) -> str:
        lines = [f"shift of the posterior mean by E[s] != 0, in posterior sds (standard error), {self.num_simulated} units:"]
        lines += [f"  {'direction':12s} {'network':>16s} {'region':>16s} {'near':>16s}"]
        for j, label in enumerate(self.labels):
            cells = [f"{b[j]:8.3f} ({s[j]:.3f})" for b, s in zip((self.raw, self.region, self.final), self.se, strict=True)]
            lines.append(f"  {label:12s} " + " ".join(f"{c:>16s}" for c in cells))
        return "\n".join([*lines, "  n |h|^2      " + " ".join(f"{d:16.4f}" for d in self.demand)])

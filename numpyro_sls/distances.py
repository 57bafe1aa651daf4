"""Sliced Wasserstein distance between two samples, on plain arrays."""

from collections.abc import Callable
import math
from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float, Int

__all__ = ["Frame", "directions", "make_frame", "order", "quantile_slices", "slice_residuals", "sliced_wasserstein"]


MAX_RATIO = 100.0  # of covariates to responses in a direction: from their marginal to units of nearly the same covariates


UNITS_PER_COMPONENT = 20


class Frame(NamedTuple):
    """Axes of unit size for data with responses first and covariates behind; a direction is a combination of their columns."""

    centre: Float[Array, " p"]
    components: Float[Array, "p q"]  # principal components of the responses
    axes: Float[Array, "p o"]  # the responses themselves, where an edge of the support stays an edge
    covariates: Float[Array, "p c"]


def make_frame(x: Float[Array, "n p"], num_responses: int) -> Frame:
    """Robustly centred and scaled axes.

    The linear regression of the responses on the covariates is taken out, so that each block is measured in its own noise.
    Components of the responses are made equal, since what matters may hide in a small one; among covariates a small
    component is a detail of the large ones.
    """
    centre, o = jnp.median(x, axis=0), num_responses
    z, identity = x - centre, jnp.eye(x.shape[1])
    raw, covariates = identity[:, :o], identity[:, o:]
    if o < x.shape[1]:
        vectors, values, scale = _principal(z[:, o:])
        covariates = covariates @ (vectors / scale[:, None]) / jnp.sqrt(jnp.mean(values))
        c = z @ covariates
        slope = jnp.linalg.solve(c.T @ c + 1e-5 * len(x) * jnp.eye(c.shape[1]), c.T @ z[:, :o])
        raw = raw - covariates @ slope
    vectors, values, scale = _principal(z @ raw)
    # The size of a small component is underestimated unless there are many units for each; and below a thousandth of the mean
    # variance nothing is in it.
    largest = slice(-min(o, max(2, len(x) // UNITS_PER_COMPONENT)), None)
    sizes = jnp.sqrt(jnp.maximum(values, 1e-3 * jnp.mean(values)))[largest]
    return Frame(centre, raw @ (vectors / scale[:, None])[:, largest] / sizes, raw / scale, covariates)


def _principal(z: Float[Array, "n p"]) -> tuple[Float[Array, "p p"], Float[Array, " p"], Float[Array, " p"]]:
    """Principal components of the columns in units of their scale, outliers drawn in; with variances and scales."""
    low, high = jnp.quantile(z, jnp.array([0.25, 0.75]), axis=0)
    sd = jnp.std(z, axis=0)
    scale = jnp.where(high > low, (high - low) / 1.35, jnp.where(sd > 0, sd, 1.0))
    values, vectors = jnp.linalg.eigh(jnp.atleast_2d(jnp.cov(jnp.clip(z / scale, -5.0, 5.0).T, ddof=0)))
    return vectors, jnp.maximum(values, 1e-12), scale


def directions(rng_key: Array, num: int, frame: Frame) -> Float[Array, "k p"]:
    """Random directions in a frame; one response alone has only one.

    A third of them are dense in the components, a third combine two components and a third two of the responses: in many
    dimensions a dense direction averages everything away. With covariates every direction keeps a share of the responses,
    since covariates alone are the same in both samples.
    """
    o, q, c = frame.axes.shape[1], frame.components.shape[1], frame.covariates.shape[1]
    key_dense, key_pairs, key_axes, key_covariates, key_ratio = jax.random.split(rng_key, 5)
    if o == 1:
        w = jnp.broadcast_to(frame.axes.T, (1 if c == 0 else num, frame.axes.shape[0]))
    else:
        third = -(-num // 3)
        dense = _unit_vectors(key_dense, (third, q), None) @ frame.components.T
        pairs = _unit_vectors(key_pairs, (third, q), 2) @ frame.components.T
        axes = _unit_vectors(key_axes, (third, o), 2) @ frame.axes.T
        w = jnp.concatenate([axes, pairs, dense])[:num]
    if c == 0:
        return w
    ratio = jnp.exp(jax.random.uniform(key_ratio, (num, 1), maxval=math.log(MAX_RATIO)))
    beside = jnp.where(
        jnp.arange(num)[:, None] % 2 == 0, _unit_vectors(key_covariates, (num, c), None), _unit_vectors(key_ratio, (num, c), 2)
    )
    return (w + ratio * beside @ frame.covariates.T) / jnp.sqrt(1 + ratio**2)


def _unit_vectors(rng_key: Array, shape: tuple[int, int], num_nonzero: int | None) -> Float[Array, "k o"]:
    num, dim = shape
    key_value, key_place = jax.random.split(rng_key)
    w = jax.random.normal(key_value, shape)
    if num_nonzero is not None:
        place = jax.random.randint(key_place, (num, num_nonzero), 0, dim)
        w = jnp.where(jnp.any(place[:, :, None] == jnp.arange(dim), axis=1), w, 0.0)
    return w / jnp.linalg.norm(w, axis=1, keepdims=True)


def order(t: Float[Array, "*k m"]) -> Int[Array, "*k m"]:
    """Indices that sort the last axis, near ties in any order.

    XLA sorts one operand on a CPU several times faster than two, so value and index are packed in one integer: as a signed
    integer a float keeps its order (negative ones reversed), and its lowest bits make room for the index.
    """
    m = t.shape[-1]
    if m > 1 << 13:
        return jnp.argsort(t, axis=-1)
    low = (1 << max(1, math.ceil(math.log2(m)))) - 1
    bits = jax.lax.bitcast_convert_type(t.astype(jnp.float32), jnp.int32)
    packed = (jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits) & ~low) | jnp.arange(m, dtype=jnp.int32)
    return jax.lax.sort(packed, dimension=-1, is_stable=False) & low


def quantile_slices(x: Float[Array, "n p"], w: Float[Array, "k p"], num: int) -> Float[Array, "k num"]:
    """The projections of x on every direction, as ``num`` evenly spaced quantiles."""
    ordered = jnp.sort(w @ x.T, axis=1)
    if num == x.shape[0]:
        return ordered
    place = (jnp.arange(num) + 0.5) / num * x.shape[0] - 0.5
    return jax.vmap(lambda row: jnp.interp(place, jnp.arange(x.shape[0]), row))(ordered)


def slice_residuals(
    x: Float[Array, "m p"], w: Float[Array, "k p"], slices: Float[Array, "k m"], num_bins: int, squash: Callable[[Array], Array]
) -> Float[Array, "k num_bins"]:
    """g(F^-1) - g(G^-1) on every direction, averaged over bins of neighbouring quantiles; differentiable in x.

    g is increasing; one that grows slowly keeps a few outliers from deciding everything.

    The derivative of a quantile is the mean derivative of the units near it. Single units in sorted order carry that mean and
    a noise as large as they differ, which shortens every step that is regressed on them; the bins take the noise out.
    """
    t = w @ x.T
    r = squash(jnp.take_along_axis(t, order(jax.lax.stop_gradient(t)), axis=1)) - squash(slices)
    return r.reshape(len(w), num_bins, -1).mean(-1)


def sliced_wasserstein(x: Float[Array, "m p"], w: Float[Array, "k p"], slices: Float[Array, "k m"]) -> Float[Array, ""]:
    """SW_1 of x from a sample given by its quantile slices: the mean over directions of int |F^-1 - G^-1|."""
    return jnp.mean(jnp.abs(slice_residuals(x, w, slices, x.shape[0], lambda t: t)))

"""Sliced Wasserstein distance between two samples, on plain arrays."""

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float

__all__ = ["directions", "quantile_slices", "sliced_wasserstein"]


def directions(rng_key: Array, num: int, dim: int) -> Float[Array, "num dim"]:
    """Random unit vectors; in one dimension there is only one."""
    if dim == 1:
        return jnp.ones((1, 1))
    w = jax.random.normal(rng_key, (num, dim))
    return w / jnp.linalg.norm(w, axis=1, keepdims=True)


def quantile_slices(x: Float[Array, "n p"], w: Float[Array, "k p"], num: int) -> Float[Array, "k num"]:
    """The projections of x on every direction, as ``num`` evenly spaced quantiles."""
    ordered = jnp.sort(w @ x.T, axis=1)
    if num == x.shape[0]:
        return ordered
    place = (jnp.arange(num) + 0.5) / num * x.shape[0] - 0.5
    return jax.vmap(lambda row: jnp.interp(place, jnp.arange(x.shape[0]), row))(ordered)


def sliced_wasserstein(x: Float[Array, "m p"], w: Float[Array, "k p"], slices: Float[Array, "k q"]) -> Float[Array, ""]:
    """SW_1 of x from a sample given by its quantile slices: the mean over directions of int |F^-1 - G^-1|."""
    return jnp.mean(jnp.abs(quantile_slices(x, w, slices.shape[1]) - slices))

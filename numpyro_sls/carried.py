"""A joint score has as many versions as nuisances have parametrizations: what two of them differ by steadies the first.

Where a nuisance is c = loc(theta) + scale(theta) z, both grad log p(x, c | theta) with c held and grad log p(x, z | theta) with z
held have the marginal score for their mean given x. Their difference D has mean zero given x, so that t - B D is as good a target
as t for every matrix B, and the least squares of t on D give the one with the least noise. With c held a parameter that the data
only know together with the mean of c is hardly seen; with z held it is.
"""

from jax import Array
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Bool, Float
import numpyro.distributions as dist

__all__ = ["is_carried", "residual", "steadied", "value_at"]

LOC_SCALE = (dist.Normal, dist.Laplace, dist.Logistic, dist.Cauchy, dist.Gumbel)


def is_carried(fn: dist.Distribution) -> bool:
    """Whether a draw is a function of the distribution's parameters and of noise that does not know them."""
    if isinstance(fn, (dist.Independent, dist.ExpandedDistribution, dist.TransformedDistribution)):
        return is_carried(fn.base_dist)
    return isinstance(fn, (*LOC_SCALE, dist.Exponential, dist.MultivariateNormal))


def residual(fn: dist.Distribution, value: Array) -> Array:
    """The noise that a draw was made of."""
    if isinstance(fn, (dist.Independent, dist.ExpandedDistribution)):
        return residual(fn.base_dist, value)
    if isinstance(fn, dist.TransformedDistribution):
        for transform in reversed(fn.transforms):
            value = transform.inv(value)
        return residual(fn.base_dist, value)
    if isinstance(fn, dist.MultivariateNormal):
        off = value - fn.loc
        root = jnp.broadcast_to(fn.scale_tril, (*off.shape, off.shape[-1]))
        return solve_triangular(root, off[..., None], lower=True)[..., 0]
    if isinstance(fn, dist.Exponential):
        return value * fn.rate
    return (value - fn.loc) / fn.scale


def value_at(fn: dist.Distribution, noise: Array) -> Array:
    """The draw that is made of this noise; the inverse of `residual`."""
    if isinstance(fn, (dist.Independent, dist.ExpandedDistribution)):
        return value_at(fn.base_dist, noise)
    if isinstance(fn, dist.TransformedDistribution):
        value = value_at(fn.base_dist, noise)
        for transform in fn.transforms:
            value = transform(value)
        return value
    if isinstance(fn, dist.MultivariateNormal):
        return fn.loc + (fn.scale_tril @ noise[..., None])[..., 0]
    if isinstance(fn, dist.Exponential):
        return noise / fn.rate
    return fn.loc + fn.scale * noise


LEAST_ROWS = 16  # units for every column of D, for least squares to be worth its noise
RIDGE = 1e-4


def steadied(joint_score: Float[Array, "k m d"], difference: Float[Array, "k m q"], ok: Bool[Array, "k m"]) -> Float[Array, "k m d"]:
    """t - B D. Each half of the units has the B of the other, so that no unit's noise bears on its own target."""
    k, m, q = difference.shape
    if k * m < 2 * LEAST_ROWS * q:
        return joint_score
    # By the place of a unit at its theta: thetas that share a key then lie in one half.
    place = jnp.arange(m) if m > 1 else jnp.arange(k)[:, None]
    first = jnp.broadcast_to(place % 2 == 0, (k, m))
    scale = jnp.sqrt(jnp.mean(jnp.where(ok[..., None], difference, 0.0) ** 2, axis=(0, 1))) + 1e-30
    scaled = jnp.where(ok[..., None], difference / scale, 0.0)
    t = jnp.where(ok[..., None], joint_score, 0.0)

    def best(chosen):
        some = jnp.where(chosen[..., None], scaled, 0.0)
        gram = jnp.einsum("kmi,kmj->ij", some, some) + RIDGE * k * m * jnp.eye(q)
        return jnp.linalg.solve(gram, jnp.einsum("kmi,kmd->id", some, t))

    return joint_score - jnp.where(first[..., None], scaled @ best(~first), scaled @ best(first))

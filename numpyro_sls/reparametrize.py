"""Sites as base noise pushed through a map that has a derivative, for the search by gradient (paper, section 3.1).

A continuous site is already such a map: NumPyro's sampler under a fixed key. A discrete site keeps its exact value and gets the
derivative of a smooth stand-in, so that what is simulated never changes, only what a gradient sees.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Float
import numpyro.distributions as dist

from numpyro_sls.sites import is_fixed, unwrapped

__all__ = ["Reparametrized", "draw", "indicator", "reparametrization"]


class Reparametrized(NamedTuple):
    """How a site was made a differentiable map of base noise, or why not."""

    base: str
    map: str
    differentiable: bool


BERNOULLI = (dist.BernoulliProbs, dist.BernoulliLogits)
BINOMIAL = (dist.BinomialProbs, dist.BinomialLogits)
CATEGORICAL = (dist.CategoricalProbs, dist.CategoricalLogits)
STAND_INS: tuple[Any, ...] = (*BERNOULLI, *BINOMIAL, *CATEGORICAL, dist.Poisson, dist.GammaPoisson, dist.BetaBinomial)

LOCATION_SCALE = {dist.Normal: "N(0, 1)", dist.Laplace: "Laplace(0, 1)", dist.Logistic: "Logistic(0, 1)", dist.Cauchy: "Cauchy(0, 1)"}
SCALE = {dist.Exponential: "Exponential(1)", dist.HalfNormal: "|N(0, 1)|", dist.HalfCauchy: "|Cauchy(0, 1)|"}


def reparametrization(fn: dist.Distribution, as_integer: bool = False) -> Reparametrized:
    """What `draw` makes of a site, in words."""
    base, name = unwrapped(fn), type(unwrapped(fn)).__name__
    if is_fixed(fn):
        return Reparametrized("none", "the value that the model computes", True)
    if type(base) in LOCATION_SCALE:
        return Reparametrized(LOCATION_SCALE[type(base)], "loc + scale z", True)
    if type(base) in SCALE:
        return Reparametrized(SCALE[type(base)], "scale z", True)
    if isinstance(base, dist.Uniform):
        return Reparametrized("U(0, 1)", "low + (high - low) z", True)
    if isinstance(base, dist.TransformedDistribution):
        inner = reparametrization(base.base_dist)
        chain = " then ".join([inner.map, *(type(t).__name__ for t in base.transforms)])
        return inner._replace(map=chain)
    if isinstance(base, STAND_INS):
        if as_integer:
            return Reparametrized("U(0, 1)", f"{name} drawn as integers, which the model needs: no derivative", False)
        return Reparametrized("U(0, 1)", f"{name} with the derivative of a smooth stand-in", True)
    if base.has_rsample:
        return Reparametrized("the sampler's own", f"NumPyro's {name} sampler under a fixed key", True)
    return Reparametrized("the sampler's own", f"NumPyro's {name} sampler: no derivative", False)


def draw(fn: dist.Distribution, rng_key: Array, steepness: float | None = None) -> Array:
    """A draw whose derivative in the site's arguments exists: pathwise, or by the smooth stand-in of a discrete site."""
    base, shape = unwrapped(fn), fn.shape()
    if not isinstance(base, STAND_INS):
        return fn.sample(rng_key)
    key_value, key_place, key_rate = jax.random.split(rng_key, 3)
    place = jax.random.uniform(key_place, shape)
    if isinstance(base, CATEGORICAL):
        return _categorical(jax.random.uniform(key_value, shape), base.probs, steepness)
    if isinstance(base, (dist.Poisson, dist.GammaPoisson)):
        rate = base.rate if isinstance(base, dist.Poisson) else base._gamma.expand(shape).sample(key_rate)
        count = jax.random.poisson(key_value, jax.lax.stop_gradient(rate), shape).astype(jnp.result_type(float))
        return _poisson(count, jnp.broadcast_to(rate, shape), place, steepness)
    if isinstance(base, dist.BetaBinomial):
        probs, total = base._beta.expand(shape).sample(key_rate), base.total_count
    else:
        probs, total = base.probs, 1 if isinstance(base, BERNOULLI) else base.total_count
    probs = jnp.broadcast_to(probs, shape)
    if isinstance(base, BERNOULLI):
        u = jax.random.uniform(key_value, shape)
        value = (u > 1 - jax.lax.stop_gradient(probs)).astype(probs.dtype)
        p = jnp.clip(jax.lax.stop_gradient(probs), 1e-7, 1 - 1e-7)
        place = jnp.where(value > 0, (u - (1 - p)) / p, u / (1 - p))
    else:
        sampled = dist.BinomialProbs(jax.lax.stop_gradient(probs), total_count=total)
        value = jnp.broadcast_to(sampled.sample(key_value), shape).astype(probs.dtype)
    return _binomial(value, probs, jnp.broadcast_to(jnp.asarray(total, probs.dtype), shape), place, steepness)


# With F the distribution function and k = F^-1(u), u a fraction `place` of the way from F(k - 1) to F(k), the inverse of the
# linearly interpolated F moves by -((1 - place) dF(k - 1) + place dF(k)) / p(k): its mean is dE[k], exactly. A steepness
# K puts the weight of sigmoid(K (u - F)) on the two neighbouring steps instead, as the paper does.


def _neighbours(place: Array, mass: Array, steepness: float | None) -> tuple[Array, Array]:
    """Weights of the derivatives at the lower and upper step, in units of 1 / p(k)."""
    if steepness is None:
        return 1 - place, place

    def slope(gap):
        s = jax.nn.sigmoid(steepness * gap)
        return steepness * s * (1 - s)

    return mass * slope(place * mass), mass * slope((1 - place) * mass)


def _with_slope(value: Array, moving: Array, slope: Array) -> Array:
    """The value as it is, with the derivative ``slope`` in ``moving``."""
    slope = jax.lax.stop_gradient(slope)
    return jax.lax.stop_gradient(value) + slope * (moving - jax.lax.stop_gradient(moving))


def _binomial(value: Array, probs: Array, total: Array, place: Array, steepness: float | None) -> Array:
    p = jnp.clip(jax.lax.stop_gradient(probs), 1e-7, 1 - 1e-7)
    mass = jnp.exp(dist.BinomialProbs(p, total_count=total).log_prob(value)) if steepness is not None else p
    low, high = _neighbours(place, mass, steepness)
    return _with_slope(value, probs, low * value / p + high * (total - value) / (1 - p))


def _poisson(value: Array, rate: Array, place: Array, steepness: float | None) -> Array:
    fixed = jnp.maximum(jax.lax.stop_gradient(rate), 1e-10)
    mass = jnp.exp(dist.Poisson(fixed).log_prob(value)) if steepness is not None else fixed
    low, high = _neighbours(place, mass, steepness)
    return _with_slope(value, rate, low * value / fixed + high)


def _categorical(u: Array, probs: Array, steepness: float | None) -> Array:
    steps = jnp.cumsum(probs, axis=-1)
    fixed = jax.lax.stop_gradient(steps)
    value = jnp.clip(jnp.sum(u[..., None] > fixed, axis=-1), 0, probs.shape[-1] - 1)
    steps, fixed = (jnp.broadcast_to(a, (*u.shape, probs.shape[-1])) for a in (steps, fixed))

    def at(a, k):
        taken = jnp.take_along_axis(a, jnp.maximum(k, 0)[..., None], -1)[..., 0]
        return jnp.where(k >= 0, taken, 0.0)

    mass = jnp.maximum(at(fixed, value) - at(fixed, value - 1), 1e-7)
    place = jnp.clip((u - at(fixed, value - 1)) / mass, 0.0, 1.0)
    low, high = (jax.lax.stop_gradient(a / mass) for a in _neighbours(place, mass, steepness))
    moving = -(low * at(steps, value - 1) + high * at(steps, value))
    return value + moving - jax.lax.stop_gradient(moving)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _indicator(t: Array, steepness: float) -> Array:
    return (t > 0).astype(jnp.result_type(float))


@_indicator.defjvp
def _indicator_jvp(steepness, primals, tangents):
    (t,), (dt,) = primals, tangents
    s = jax.nn.sigmoid(steepness * t)
    return _indicator(t, steepness), steepness * s * (1 - s) * dt


def indicator(t: ArrayLike, steepness: float = 500.0) -> Float[Array, "..."]:
    """1 where t > 0, else 0: a comparison that a search by gradient can see through.

    The value is the hard one, in simulations too. Its derivative, which ``t > 0`` does not have, is that of
    sigmoid(steepness t); only localization uses it.

    **Example:**

    >>> import jax
    >>> from numpyro_sls import indicator
    >>> float(indicator(0.01)), float(jax.grad(indicator)(0.0))
    (1.0, 125.0)
    """
    return _indicator(jnp.asarray(t, jnp.result_type(float)), float(steepness))

"""Draws with a derivative: exact values, and a derivative whose mean is that of the mean."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_sls import SLS, Simulated, indicator
from numpyro_sls.comparison import reparametrize
from numpyro_sls.reparametrize import draw, reparametrization

NUM = 100_000

SITES = {
    "bernoulli": (lambda t: dist.Bernoulli(probs=t), 0.3, 1.0),
    "bernoulli logits": (lambda t: dist.Bernoulli(logits=t), 0.3, 0.2445),  # p (1 - p)
    "binomial": (lambda t: dist.Binomial(10, t), 0.3, 10.0),
    "beta-binomial": (lambda t: dist.BetaBinomial(t, 3.0, 10), 4.0, 30 / 49),
    "poisson": (lambda t: dist.Poisson(t), 4.0, 1.0),
    "negative binomial": (lambda t: dist.NegativeBinomial2(t, 3.0), 4.0, 1.0),
    "categorical": (lambda t: dist.Categorical(probs=jnp.array([t, 0.5 - t / 2, 0.5 - t / 2])), 0.3, -1.5),
    "expanded": (lambda t: dist.Bernoulli(t).expand([2]).to_event(1), 0.3, 1.0),
    "gamma": (lambda t: dist.Gamma(t, 2.0), 3.0, 0.5),
}


@pytest.mark.parametrize("steepness", [None, 500.0])
@pytest.mark.parametrize("name", SITES)
def test_values_are_draws_and_their_derivative_is_that_of_the_mean(name, steepness):
    make, at, slope = SITES[name]
    value, derivative = jax.jvp(lambda t: draw(make(t).expand([NUM]), random.key(0), steepness), (at,), (1.0,))
    exact = make(at).sample(random.key(1), (NUM,))
    se = np.sqrt(2 * exact.astype(float).var() / NUM)
    assert abs(value.mean() - exact.mean()) < 5 * se
    assert abs(derivative.mean() - slope) < 5 * derivative.std() / np.sqrt(derivative.size)


def test_an_even_spread_has_less_noise_than_a_steep_sigmoid():
    def noise(steepness):
        return jax.jvp(lambda p: draw(dist.Bernoulli(p).expand([NUM]), random.key(0), steepness), (0.3,), (1.0,))[1].std()

    assert noise(None) < 0.2 * noise(500.0)


def test_an_indicator_is_hard_in_value_and_smooth_in_derivative():
    t = jnp.array([-0.1, 0.0, 0.001, 0.1])
    np.testing.assert_array_equal(indicator(t), [0, 0, 1, 1])
    s = jax.nn.sigmoid(1000 * t)
    np.testing.assert_allclose(jax.vmap(jax.grad(lambda u: indicator(u, 1000.0)))(t), 1000 * s * (1 - s), rtol=1e-5)


@pytest.mark.parametrize(
    ("fn", "base", "differentiable"),
    [
        (dist.Normal(0, 1).expand([3]).to_event(1), "N(0, 1)", True),
        (dist.LogNormal(0, 1), "N(0, 1)", True),
        (dist.Uniform(0, 1), "U(0, 1)", True),
        (dist.Gamma(2, 2), "the sampler's own", True),
        (dist.Poisson(2), "U(0, 1)", True),
        (dist.Geometric(0.3), "the sampler's own", False),
        (Simulated(jnp.zeros(3)), "none", True),
    ],
)
def test_what_is_said_of_a_site(fn, base, differentiable):
    said = reparametrization(fn)
    assert (said.base, said.differentiable) == (base, differentiable)


def test_a_site_that_the_model_indexes_with_stays_an_integer():
    def model(x):
        loc = numpyro.sample("loc", dist.Normal(0, 3).expand([2]).to_event(1))
        with numpyro.plate("units", x.shape[0]):
            k = numpyro.sample("k", dist.Categorical(probs=jnp.array([0.3, 0.7])))
            count = numpyro.sample("count", dist.Poisson(3.0))
            numpyro.sample("x", dist.Normal(loc[k] + count, 1), obs=x)

    units = SLS(model).units_of((jnp.zeros(5),), {})[0]
    sampler, sites = reparametrize(units, None)
    assert [sites[k].differentiable for k in ("k", "count", "x")] == [False, True, True]
    assert "integers" in sites["k"].map
    x = units.pushforward(random.key(0), jnp.array([-50.0, 50.0]), jnp.zeros(1000, jnp.int32), sampler)
    share = float((x > 0).mean())
    assert abs(share - 0.7) < 5 * np.sqrt(0.21 / 1000)

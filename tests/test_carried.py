"""The second joint score: it holds where it is used, it is left out where it does not, and it takes noise away."""

from dataclasses import replace

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_sls import SLS, Simulated
from numpyro_sls.carried import is_carried, residual, steadied, value_at
from numpyro_sls.joint import joint_validity, with_steady
from numpyro_sls.reparametrize import indicator
from numpyro_sls.simulate import Simulator

FAMILIES = {
    "normal": dist.Normal(jnp.array([1.0, 2.0]), 0.5).to_event(1).expand([4]),
    "laplace": dist.Laplace(-1.0, jnp.array([1.0, 2.0])).expand([4, 2]),
    "log-normal": dist.LogNormal(0.3, 0.7).expand([4]),
    "exponential": dist.Exponential(3.0).expand([4]),
    "multivariate": dist.MultivariateNormal(jnp.array([1.0, -1.0]), jnp.array([[2.0, 0.5], [0.5, 1.0]])).expand([4]),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_draw_is_made_again_of_its_noise(name):
    fn = FAMILIES[name]
    value = fn.sample(random.key(0))
    assert is_carried(fn)
    assert residual(fn, value).shape == value.shape
    np.testing.assert_allclose(value_at(fn, residual(fn, value)), value, rtol=1e-5, atol=1e-6)


def offset_cells(x):
    """Cells with a level of their own and a common shift: the data only know mu + shift, and each alone would be noisy."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    log_tau = numpyro.sample("log_tau", dist.Normal(0, 0.5))
    shift = numpyro.sample("shift", dist.Normal(0, 1))
    with numpyro.plate("cells", x.shape[0]):
        c = numpyro.sample("c", dist.Normal(mu, jnp.exp(log_tau)))
        numpyro.sample("x", dist.Normal((c + shift)[..., None], jnp.full(6, 0.2)).to_event(1), obs=x)


def exact_score(theta, x):
    """Of one cell, by its Gaussian likelihood."""

    def log_density(t):
        covariance = 0.04 * jnp.eye(6) + jnp.exp(2 * t[1])
        return dist.MultivariateNormal(t[0] + t[2], covariance).log_prob(x)

    return jax.grad(log_density)(theta)


def jumping(x):
    """Levels that count only above a threshold: the derivative of that is not what it changes by."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    shift = numpyro.sample("shift", dist.Normal(0, 1))
    with numpyro.plate("cells", x.shape[0]):
        c = numpyro.sample("c", dist.Normal(mu, 1.0))
        numpyro.sample("x", dist.Normal((c + shift + indicator(c))[..., None], jnp.full(6, 0.2)).to_event(1), obs=x)


def without_density(x):
    """Levels that reach the data through a simulator."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("cells", x.shape[0]):
        c = numpyro.sample("c", dist.Normal(mu, 1.0))
        numpyro.sample("x", Simulated(jnp.stack([c, c**2], axis=-1), event_dim=1), obs=x)


def tried(model, p):
    """Units, and what is found of their joint scores under the prior."""
    units, _ = SLS(model, smoothing=False).units_of((jnp.zeros((20, p)),), {})
    thetas = jax.vmap(units.parameters.sample_prior)(random.split(random.key(1), 128))
    simulator = Simulator(units)
    return units, thetas, with_steady(random.key(3), simulator, thetas, joint_validity(random.key(2), simulator, thetas))


def test_the_noise_of_what_is_known_in_sum_only_goes():
    units, thetas, found = tried(offset_cells, 6)
    assert found.carried == ("c",)
    assert found.steady == (0,)
    steady = replace(units, carriers=found.carried, steady=found.steady)
    batches = [jax.jit(Simulator(u).batch, static_argnums=2)(random.key(4), thetas, 64) for u in (units, steady)]
    np.testing.assert_allclose(batches[0].x, batches[1].x, rtol=1e-6)
    exact = jax.vmap(lambda t, x: jax.vmap(lambda row: exact_score(t, row))(x))(thetas, batches[0].x)
    raw, left = (np.asarray(b.joint_score - exact).reshape(-1, 3) for b in batches)
    # of mu, log_tau and shift; the shift's own joint score has a sd of 12
    assert raw[:, 2].std() > 10
    assert np.all(left.std(0) < 0.8)
    for noise in (raw, left):
        assert np.all(np.abs(noise.mean(0)) < 5 * noise.std(0) / np.sqrt(len(noise)))
        # whatever it is, of a unit it knows nothing
        x = np.asarray(batches[0].x.mean(-1)).ravel()
        products = noise * np.tanh(x)[:, None]
        assert np.all(np.abs(products.mean(0)) < 5 * products.std(0) / np.sqrt(len(x)))


@pytest.mark.parametrize(("model", "p"), [(jumping, 6), (without_density, 2)])
def test_where_the_density_of_carried_nuisances_has_no_gradient_it_is_not_used(model, p):
    assert tried(model, p)[2].steady == ()


def test_no_unit_bears_on_its_own_matrix():
    difference = random.normal(random.key(0), (8, 16, 2))
    score = 3 * difference @ jnp.array([[1.0], [2.0]]) + random.normal(random.key(1), (8, 16, 1))
    ok = jnp.ones((8, 16), bool)
    jacobian = jax.jacfwd(lambda s: steadied(s, difference, ok))(score)[..., 0, :, :, 0]
    same_half = (np.arange(16)[:, None] - np.arange(16)) % 2 == 0
    own = np.asarray(jacobian)[0, :, 0, :]
    np.testing.assert_allclose(own[same_half], np.eye(16)[same_half], atol=1e-6)
    assert np.all(np.abs(own[~same_half]) > 0)
    assert steadied(score, difference, ok).std() < 1.2
    few = steadied(score[:1, :4], difference[:1, :4], ok[:1, :4])
    np.testing.assert_array_equal(few, score[:1, :4])

"""Sliced Wasserstein on plain arrays, and localization on a Gaussian."""

from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_sls import Localization
from numpyro_sls.distances import directions, quantile_slices, sliced_wasserstein
from numpyro_sls.localization import localize


@pytest.mark.parametrize("num", [500, 123])
def test_distance_of_shifted_samples_is_the_shift(num):
    x = random.normal(random.key(0), (500, 1))
    w = directions(random.key(1), 10, 1)
    slices = quantile_slices(x + 3.0, w, num)
    np.testing.assert_allclose(sliced_wasserstein(x, w, slices), 3.0, rtol=1e-3)


def test_directions_are_unit_vectors():
    np.testing.assert_allclose(jnp.linalg.norm(directions(random.key(0), 7, 4), axis=1), 1.0, rtol=1e-5)


@pytest.mark.parametrize("differentiable", [True, False])
def test_localization_finds_the_region_from_a_wide_prior(differentiable):
    """Prior 200 times wider than the posterior; the second simulator has no gradient."""
    truth = jnp.array([30.0, 0.7])

    def simulate(rng_key, theta, num):
        x = theta[0] + jnp.exp(theta[1]) * random.normal(rng_key, (num, 1))
        return x if differentiable else jnp.round(x * 100) / 100

    prior_sd = jnp.array([20.0, 2.0])
    sample_prior = lambda key: prior_sd * random.normal(key, (2,))  # noqa: E731
    observed = simulate(random.key(5), truth, 400)
    found = localize(random.key(0), simulate, sample_prior, observed, prior_sd, Localization())
    sd = np.array([2.0, 1 / np.sqrt(2)]) * np.sqrt(1 / 400 + 1 / 200)
    assert np.all(np.abs(found.centre - truth) < 5 * sd)
    assert found.num_simulated == 200 * (500 * 8 + 16 * 151)

"""Sliced Wasserstein on plain arrays."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_sls.distances import directions, make_frame, order, quantile_slices, slice_residuals, sliced_wasserstein


@pytest.mark.parametrize(("num_data", "num_simulated"), [(500, 500), (400, 123), (123, 400)])
def test_distance_of_shifted_samples_is_the_shift(num_data, num_simulated):
    """One dimension, equal sizes and not: the quantiles of a uniform grid are known."""
    grid = lambda num: ((jnp.arange(num) + 0.5) / num)[:, None]  # noqa: E731
    w = jnp.ones((1, 1))
    slices = quantile_slices(grid(num_data) + 3.0, w, num_simulated)
    np.testing.assert_allclose(sliced_wasserstein(grid(num_simulated), w, slices), 3.0, rtol=1e-3)


def test_distance_in_two_dimensions_is_the_mean_over_directions():
    x = random.normal(random.key(0), (300, 2))
    shift, w = jnp.array([1.0, -2.0]), jnp.array([[1.0, 0.0], [0.6, 0.8]])
    distance = sliced_wasserstein(x, w, quantile_slices(x + shift, w, 300))
    np.testing.assert_allclose(distance, np.mean(np.abs(w @ shift)), rtol=1e-4)


@pytest.mark.parametrize("m", [2, 100, 1000, 10_000])
def test_order_sorts(m):
    t = random.normal(random.key(0), (3, m)) * jnp.array([[1e-3], [1.0], [1e4]])
    ordered = jnp.take_along_axis(t, order(t), axis=1)
    # packed, values within a thousandth of each other may change places
    np.testing.assert_allclose(ordered, jnp.sort(t, axis=1), rtol=2e-3, atol=1e-6)
    np.testing.assert_array_equal(jnp.sort(order(t), axis=1), jnp.broadcast_to(jnp.arange(m), (3, m)))


def test_binned_residuals_have_the_derivative_of_quantiles():
    """x = theta z: the derivative of a quantile is the quantile of z, bin by bin."""
    z = random.normal(random.key(0), (4096, 1))
    w = jnp.ones((1, 1))
    data = quantile_slices(z, w, 4096)
    jacobian = jax.jacfwd(lambda t: slice_residuals(t * z, w, data, 32, lambda r: r))(1.0)
    np.testing.assert_allclose(jacobian, data.reshape(1, 32, -1).mean(-1), rtol=1e-3, atol=1e-4)


def test_the_frame_gives_every_axis_unit_size():
    key_c, key_y = random.split(random.key(0))
    c = 5 + 10 * random.normal(key_c, (2000, 2))
    y = c @ jnp.array([[1.0], [2.0]]) + 0.1 * random.normal(key_y, (2000, 1))
    x = jnp.concatenate([y, c], axis=1)
    frame = make_frame(x, 1)
    z = x - frame.centre
    # the regression on the covariates is taken out, so the noise is what has unit size
    np.testing.assert_allclose(jnp.std(z @ frame.axes), 1.0, rtol=0.1)
    np.testing.assert_allclose(jnp.corrcoef((z @ frame.axes)[:, 0], c[:, 1])[0, 1], 0.0, atol=0.1)
    np.testing.assert_allclose(jnp.std(z @ frame.covariates, axis=0).mean(), 1.0, rtol=0.1)
    w = directions(random.key(1), 9, frame)
    assert w.shape == (9, 3)
    assert jnp.all(jnp.abs(w[:, 0]) > 0), "every direction sees the response"


def test_directions_of_many_responses_have_unit_size():
    x = random.normal(random.key(0), (3000, 4)) * jnp.array([1.0, 10.0, 100.0, 0.1])
    frame = make_frame(x, 4)
    size = jnp.std((x - frame.centre) @ directions(random.key(1), 30, frame).T, axis=0)
    np.testing.assert_allclose(size, 1.0, rtol=0.15)

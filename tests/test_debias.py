"""The local mean on a known bias, and the proposal's coordinates."""

from jax import random
import jax.numpy as jnp
import numpy as np

from numpyro_sls.debias import local_mean, make_local_sums
from numpyro_sls.proposal import default_kappa, worth_units


def test_local_mean_recovers_an_affine_bias():
    offset, slope = jnp.array([0.3, -0.2]), jnp.array([[0.2, 0.1], [0.1, -0.3]])

    def score_fn(rng_key, delta, context):
        noise = random.normal(rng_key, (delta.shape[0], 32, 2))
        return context + offset + (delta @ slope)[:, None] + noise, jnp.ones((delta.shape[0], 32), bool), delta

    found = local_mean(random.key(0), make_local_sums(score_fn, 64, 2), 0.0, jnp.full(2, 0.005), 10**6, 64 * 32)
    assert np.all(found.offset_se <= 0.005), "it stops when it is sure enough"
    assert found.num_simulated < 10**5
    np.testing.assert_allclose(found.offset, offset, atol=5 * 0.005)
    np.testing.assert_allclose(found.slope, slope, atol=5 * 0.006)


def test_directions_with_a_joint_score_are_pure():
    covariance = jnp.array([[2.0, 0.8, 0.3], [0.8, 1.0, 0.2], [0.3, 0.2, 1.5]])
    proposal = worth_units(jnp.zeros(3), covariance, jnp.zeros((3, 3)), 1.0, np.array([True, False, True]))
    np.testing.assert_allclose(proposal.covariance, covariance, rtol=1e-5)
    np.testing.assert_allclose(proposal.factor[1, 1:], 0.0, atol=1e-7)  # the last two do not involve coordinate 1
    theta = jnp.array([1.0, 2.0, 3.0])
    np.testing.assert_allclose(proposal.unwhiten(proposal.whiten(theta)), theta, rtol=1e-5)


def test_kappa_follows_the_budget_and_the_data():
    assert default_kappa(10_000, 10**6, False) == 1.0
    assert default_kappa(4_000_000, 10**6, True) == 4 * default_kappa(4_000_000, 10**6, False)
    assert default_kappa(4_000_000, 9, True) == 1.0

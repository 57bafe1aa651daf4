"""Networks against automatic differentiation, and inputs with heavy tails."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_sls import MLPScore, SeparablePotential
from numpyro_sls.networks import make_standardizer

THETA, X = jnp.array([0.3, -0.5, 1.0]), random.normal(random.key(1), (5, 2))


@pytest.mark.parametrize("network", [SeparablePotential(num_features=6, width=8), MLPScore(width=8, depth=2)])
def test_terms_are_the_score_and_the_diagonal_of_its_jacobian(network):
    weights = network.init(random.key(0), 3, 2)
    terms = network.terms(weights, THETA, X)
    np.testing.assert_allclose(terms.score, network.score(weights, THETA, X), rtol=1e-4, atol=1e-6)
    jacobian = jax.jacrev(lambda t: network.score(weights, t, X))(THETA)
    np.testing.assert_allclose(terms.diagonal, jnp.diagonal(jacobian, axis1=1, axis2=2), rtol=1e-3, atol=1e-5)


def test_separable_score_is_the_gradient_of_a_potential():
    network = SeparablePotential(num_features=6, width=8)
    weights = network.init(random.key(0), 3, 2)
    gradient = jax.grad(lambda t: (network.summary(weights, X, 3) @ network.basis(weights, t)).sum())(THETA)
    np.testing.assert_allclose(network.score(weights, THETA, X).sum(0), gradient, rtol=1e-4, atol=1e-6)


def test_standardization_survives_heavy_tails_and_constants():
    x = jnp.column_stack([random.cauchy(random.key(0), (4000,)), 5 + 2 * random.normal(random.key(1), (4000,)), jnp.full(4000, 7.0)])
    standardizer = make_standardizer(x)
    np.testing.assert_allclose(standardizer.scale[1], 2.0, atol=5 * 2 * 1.6 / np.sqrt(4000))
    z = standardizer(x)
    assert z.shape == (4000, 6)
    assert jnp.abs(z).max() < 20, "a Cauchy outlier does not blow up the inputs"
    np.testing.assert_allclose(z[:, 2], 0.0)

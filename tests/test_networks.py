"""Networks against automatic differentiation, and inputs with heavy tails."""

import itertools

import flax.linen as nn
import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_sls import Ensemble, MLPScore, SeparablePotential
from numpyro_sls.inputs import NUM_VIEWS, embedded_standardizer, make_standardizer

THETA, X = jnp.array([0.3, -0.5, 1.0]), random.normal(random.key(1), (5, 2))


NETWORKS = [
    SeparablePotential(num_features=6, width=8),
    MLPScore(width=8, depth=2),
    MLPScore(width=8, depth=2, separate=True),
    Ensemble(SeparablePotential(num_features=6, width=8), num_members=2),
    SeparablePotential(num_features=6, width=8, embedding=nn.Dense(3)),
    SeparablePotential(num_features=6, width=8, embedding=nn.Dense(3), moments=True),
]
NAMES = ["separable", "mlp", "mlp a coordinate", "ensemble", "embedded", "taught"]
INPUTS = make_standardizer(X)(X)


@pytest.mark.parametrize("along", [jnp.array([1.0, 0.5, 0.0]), random.uniform(random.key(3), (5, 3))], ids=["shared", "by unit"])
@pytest.mark.parametrize("network", NETWORKS, ids=NAMES)
def test_terms_are_the_score_and_the_weighted_trace_of_its_jacobian(network, along):
    for member, weights in network.each(network.init(random.key(0), 3, INPUTS.shape[1])):
        terms = member.terms(weights, THETA, INPUTS, along)
        np.testing.assert_allclose(terms.score, member.score(weights, THETA, INPUTS), rtol=1e-4, atol=1e-6)
        jacobian = jax.jacrev(lambda t, w=weights, m=member: m.score(w, t, INPUTS))(THETA)
        divergence = jnp.sum(along * jnp.diagonal(jacobian, axis1=1, axis2=2), axis=1)
        np.testing.assert_allclose(terms.divergence, divergence, rtol=1e-3, atol=1e-5)
        # all sign patterns together give the trace exactly
        probes = jnp.array(list(itertools.product([-1.0, 1.0], repeat=3)))
        probed = jax.vmap(lambda v, w=weights, m=member: m.probed(w, THETA, INPUTS, along, v).divergence)(probes)
        np.testing.assert_allclose(probed.mean(0), divergence, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("network", NETWORKS, ids=NAMES)
def test_curvature_terms_are_moments_and_mean_jacobian(network):
    weights = network.init(random.key(0), 3, INPUTS.shape[1])
    ok = jnp.array([1.0, 1.0, 0.0, 1.0, 0.0])
    found = network.curvature(weights, THETA, INPUTS, ok)
    s = network.score(weights, THETA, INPUTS)[ok > 0]
    np.testing.assert_allclose(found.outer, s.T @ s / 3, rtol=1e-3, atol=1e-6)
    jacobian = jax.jacrev(lambda t: network.score(weights, t, INPUTS)[ok > 0].mean(0))(THETA)
    np.testing.assert_allclose(found.jacobian, jacobian, rtol=1e-3, atol=1e-5)


def test_an_embedding_must_give_a_row_a_unit():
    class Flat(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x).sum(0)

    with pytest.raises(ValueError, match="one row of features a unit"):
        SeparablePotential(embedding=Flat()).init(random.key(0), 3, INPUTS.shape[1])


def test_moments_are_taught_to_an_embedding_only():
    with pytest.raises(ValueError, match="embedding="):
        SeparablePotential(moments=True)


def test_moments_are_least_where_they_are_those_of_theta_given_x():
    """x = theta + noise, one parameter: E[theta | x] = x / 2 and E[theta^2 | x] = 1 / 2 + x^2 / 4."""

    class Powers(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jnp.concatenate([x, x**2], axis=1)

    network = SeparablePotential(embedding=Powers(), moments=True)
    weights = network.init(random.key(0), 1, NUM_VIEWS)
    theta, noise = random.normal(random.key(1), (2, 4000))
    x = (theta + noise)[:, None] * jnp.ones(NUM_VIEWS)

    def loss(kernel, bias):
        own = {**weights, "moments": {"params": {"kernel": kernel, "bias": bias}}}
        return jnp.mean(network.moment_loss(own, jnp.stack([theta, (theta**2 - 1) / 2**0.5], axis=1), x))

    true = jnp.array([[0.5, 0.0], [0.0, 0.25 / 2**0.5]]), jnp.array([0.0, -0.5 / 2**0.5])
    least = loss(*true)
    for key in random.split(random.key(2), 4):
        key_kernel, key_bias = random.split(key)
        off = 0.3 * random.normal(key_kernel, (2, 2)), 0.3 * random.normal(key_bias, (2,))
        assert least < loss(true[0] + off[0], true[1] + off[1])


def test_features_span_what_the_network_makes_of_x():
    network = SeparablePotential(num_features=6, width=8)
    weights = network.init(random.key(0), 3, 8)
    z = make_standardizer(X)(random.normal(random.key(2), (200, 2)))
    c, f = network.summary(weights, z, 3), jnp.concatenate([jnp.ones((200, 1)), network.features(weights, z)], axis=1)
    left = c - f @ jnp.linalg.lstsq(f, c)[0]
    assert jnp.abs(left).max() < 1e-4 * jnp.abs(c).max()


def test_separable_score_is_the_gradient_of_a_potential():
    network = SeparablePotential(num_features=6, width=8)
    weights = network.init(random.key(0), 3, INPUTS.shape[1])
    gradient = jax.grad(lambda t: (network.summary(weights, INPUTS, 3) @ network.basis(weights, t)).sum())(THETA)
    np.testing.assert_allclose(network.score(weights, THETA, INPUTS).sum(0), gradient, rtol=1e-4, atol=1e-6)


def test_standardization_survives_heavy_tails_and_constants():
    x = jnp.column_stack([random.cauchy(random.key(0), (4000,)), 5 + 2 * random.normal(random.key(1), (4000,)), jnp.full(4000, 7.0)])
    standardizer = make_standardizer(x)
    np.testing.assert_allclose(standardizer.scale[1], 2.0, atol=5 * 2 * 1.6 / np.sqrt(4000))
    z = standardizer(x)
    assert z.shape == (4000, 12)
    assert jnp.abs(z).max() <= 30, "a Cauchy outlier does not blow up the inputs"
    np.testing.assert_allclose(z[:, 2::3], 0.0)


def test_alike_counts_are_standardized_alike_for_an_embedding():
    """Two columns of the same counts, a few units apart: their quartiles may differ by a step of the lattice, and these may not."""
    x = random.bernoulli(random.key(0), 0.1, (4000, 60, 2)).mean(1)
    found = embedded_standardizer(x)
    np.testing.assert_allclose(found.scale[0], found.scale[1], rtol=0.05)
    np.testing.assert_allclose(found.centre[0], found.centre[1], atol=5 * 0.039 / 4000**0.5 * 2**0.5)

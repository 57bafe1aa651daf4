"""Targets on Gaussian closed forms, and which coordinates have a joint score."""

from functools import partial

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_sls import Simulated, indicator
from numpyro_sls.joint import joint_validity
from numpyro_sls.model import trace_model
from numpyro_sls.networks import Curvature, ScoreTerms
from numpyro_sls.objectives import blend_loss, curvature_loss, joint_weights, mean_zero_z
from numpyro_sls.simulate import Simulator
from numpyro_sls.units import make_units
from tests.cases import CASES


@pytest.mark.parametrize("weight", [0.0, 0.4, 1.0])
def test_every_blend_is_least_at_the_true_score(weight):
    """x = theta + z + N(0, 1), z ~ N(0, 1): the score is (x - theta) / 2, the joint score x - z - theta... of N(z; theta, 1)."""
    k, m = 4000, 8
    keys = random.split(random.key(0), 3)
    eta = random.normal(keys[0], (k, 1))
    z = eta[:, None] + random.normal(keys[1], (k, m, 1))
    x = z + random.normal(keys[2], (k, m, 1))
    t = z - eta[:, None]

    def loss(a):  # s = a (x - theta)
        def at(e, x, t):
            w = jnp.array([weight])
            return blend_loss(ScoreTerms(a * (x - e), -a * (1 - w) * jnp.ones(m)), t, w, jnp.ones(1), -e, jnp.full(m, 1 / m))

        return jax.vmap(at)(eta, x, t).mean()

    best = jax.grad(loss)(0.0) / (jax.grad(loss)(0.0) - jax.grad(loss)(1.0))  # the loss is quadratic in a
    # the sd of the estimate is below 0.02 for each weight (measured over keys)
    assert abs(float(best) - 0.5) < 0.1


def test_units_count_by_their_share():
    terms = ScoreTerms(jnp.ones((4, 1)), jnp.arange(4.0))
    args = terms, jnp.zeros((4, 1)), jnp.zeros(1), jnp.ones(1), jnp.zeros(1)
    assert blend_loss(*args, jnp.array([0.5, 0.5, 0.0, 0.0])) == 0.5 + 0.5


def test_curvature_loss_has_the_right_mean():
    """For s of mean zero with E[s s^T] = -E[grad s] the two halves give a penalty of mean zero, noise or not."""
    keys = random.split(random.key(0), 4000)

    def half(key):
        s = random.normal(key, (8, 2))
        return Curvature(s.mean(0), s.T @ s / 8, -jnp.eye(2))

    losses = jax.vmap(lambda k: curvature_loss(*map(half, random.split(k))))(keys)
    assert abs(losses.mean()) < 5 * losses.std() / np.sqrt(4000)
    wrong = jax.vmap(lambda k: curvature_loss(*(half(q)._replace(jacobian=-2 * jnp.eye(2)) for q in random.split(k))))(keys)
    np.testing.assert_allclose(wrong.mean(), 2.0, atol=5 * float(wrong.std()) / np.sqrt(4000))


def test_joint_weights_follow_the_variance():
    t = random.normal(random.key(0), (10_000, 2)) * jnp.array([1.0, 11.0])
    weights = joint_weights("blend", np.array([True, True]), t)
    np.testing.assert_allclose(weights, [1 / 2, 1 / 122], rtol=0.1)
    np.testing.assert_allclose(joint_weights("blend", np.array([True, False]), t), [0.0, 1 / 122], rtol=0.1)
    np.testing.assert_allclose(joint_weights("implicit", np.array([True, True]), t), 0.0)


def test_mean_zero_check_sees_a_shift():
    t = random.normal(random.key(0), (128, 128, 2)) + jnp.array([0.0, 0.2])
    z = mean_zero_z(t)
    assert abs(float(z[0])) < 5
    assert float(z[1]) > 10


def threshold(x):
    a = numpyro.sample("a", dist.Normal(0, 1))
    b = numpyro.sample("b", dist.HalfNormal(1))
    with numpyro.plate("units", x.shape[0]):
        z = numpyro.sample("z", dist.Normal(0, b))
        numpyro.sample("x", Simulated((z > a).astype(float)), obs=x)


def uniform(x):
    a = numpyro.sample("a", dist.Normal(0, 1))
    b = numpyro.sample("b", dist.HalfNormal(1))
    with numpyro.plate("units", x.shape[0]):
        u = numpyro.sample("u", dist.Uniform(a, a + 1))
        numpyro.sample("x", dist.Normal(u, b), obs=x)


def shifted(x):
    a = numpyro.sample("a", dist.Normal(0, 1))
    b = numpyro.sample("b", dist.HalfNormal(1))
    with numpyro.plate("units", x.shape[0]):
        u = numpyro.sample("u", dist.TransformedDistribution(dist.Uniform(-1, 1), dist.transforms.AffineTransform(a, 1.0)))
        numpyro.sample("x", dist.Normal(u, b), obs=x)


def jumping(x, step=lambda t: (t > 0).astype(float)):
    a = numpyro.sample("a", dist.Normal(0, 1))
    b = numpyro.sample("b", dist.HalfNormal(1))
    with numpyro.plate("units", x.shape[0]):
        z = numpyro.sample("z", dist.Normal())
        numpyro.sample("x", dist.Normal(3 * step(z - a), b), obs=x)


@pytest.mark.parametrize(
    ("model", "valid"),
    [
        (CASES["location_scale"].model, [False, False]),
        (CASES["normal_exponential"].model, [True, True, True]),
        (threshold, [False, True]),
        (uniform, [False, True]),
        (shifted, [False, True]),
        (jumping, [False, True]),
        (partial(jumping, step=indicator), [False, True]),
    ],
    ids=["location_scale", "normal_exponential", "threshold", "uniform", "shifted", "jumping", "jumping smoothly"],
)
def test_validity_of_the_joint_score_is_read_off_the_trace(model, valid):
    simulator = Simulator(make_units(trace_model(model, (np.zeros(10),))))
    thetas = random.normal(random.key(0), (64, len(valid)))
    found = joint_validity(random.key(1), simulator, thetas)
    assert found.valid.tolist() == valid

"""The paper's models: what the NumPyro model simulates at the truth is what `simulate_data` does."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
import pytest

from numpyro_sls import SLS
from numpyro_sls.models import drift_diffusion, epidemic, gnk, mrna, queue

QUEUE = {"theta1": queue.TRUTH["theta1"], "width": queue.TRUTH["theta2"] - queue.TRUTH["theta1"], "theta3": queue.TRUTH["theta3"]}


def _moments(x):
    x = np.asarray(x, np.float64)
    return np.concatenate([x.mean(0), (x**2).mean(0)]), np.concatenate([x.var(0), (x**2).var(0)]) / len(x)


@pytest.mark.parametrize(
    ("module", "truth", "n"),
    [(queue, QUEUE, 4000), (gnk, gnk.TRUTH, 4000), (mrna, mrna.TRUTH, 1000), (drift_diffusion, drift_diffusion.TRUTH, 4000)],
    ids=["queue", "gnk", "mrna", "drift_diffusion"],
)
def test_model_simulates_its_data(module, truth, n):
    data = module.simulate_data(random.key(0), n)

    @jax.jit
    def simulate(key):
        with handlers.seed(rng_seed=key), handlers.substitute(data=truth), handlers.uncondition(), handlers.trace() as trace:
            module.model(data)
        return trace["x"]["value"]

    (a, var_a), (b, var_b) = _moments(data.reshape(n, -1)), _moments(simulate(random.key(1)).reshape(n, -1))
    assert np.max(np.abs(a - b) / np.sqrt(var_a + var_b)) < 5


def test_epidemic_is_one_whole():
    s = epidemic.simulate_data(random.key(0))
    traced = SLS(epidemic.model, **epidemic.SETTINGS).trace((s,), {})
    assert traced.unit_plate is None
    assert traced.parameters == ("log_beta",)
    theta = {"log_beta": jnp.log(epidemic.TRUTH[5])}
    keys = random.split(random.key(1), 200)
    simulated = jax.jit(jax.vmap(lambda k: traced.run(k, jnp.zeros(1, jnp.int32), theta).features[0]))(keys)
    data = jax.jit(jax.vmap(lambda k: epidemic.simulate_data(k).reshape(-1)))(random.split(random.key(2), 200))
    (a, var_a), (b, var_b) = _moments(simulated), _moments(data)
    assert np.max(np.abs(a - b) / np.sqrt(var_a + var_b + 1e-12)) < 5


def test_other_floors_move_rates_and_columns_together():
    rates = jnp.arange(7.0)
    s = jnp.broadcast_to(rates, (2, epidemic.NUM_WEEKS, 7)).reshape(2, -1)  # every column says whose it is
    seen = set()
    for key in random.split(random.key(0), 5):
        theta, turned = epidemic.other_floors(key, rates, s)
        np.testing.assert_array_equal(turned.reshape(2, -1, 7), np.broadcast_to(theta, (2, epidemic.NUM_WEEKS, 7)))
        assert theta[0] == 0
        assert theta[-1] == 6
        assert sorted(theta.tolist()) == rates.tolist()
        seen.add(tuple(theta.tolist()))
    assert len(seen) > 1


def test_infections_have_the_density_that_they_are_drawn_from():
    """Both Bartlett identities of the score of the rates, on simulated courses."""
    key_start, key_leaves, key_ill = random.split(random.key(0), 3)
    start, leaves, ill = (
        random.bernoulli(k, p, s).astype(float)
        for k, p, s in ((key_start, 0.1, (300,)), (key_leaves, 0.05, (51, 300)), (key_ill, 0.1, (51, 300)))
    )

    def log_prob(beta, value):
        return epidemic.Infections(beta, start, leaves, ill).log_prob(value)

    drawn = epidemic.Infections(epidemic.TRUTH[5], start, leaves, ill).sample(random.key(1), (2000,))
    assert set(np.unique(drawn)) == {0.0, 1.0}
    scores = np.asarray(jax.jit(jax.vmap(jax.grad(log_prob), (None, 0)))(epidemic.TRUTH[5], drawn), float)
    slopes = np.asarray(jax.jit(jax.vmap(jax.hessian(log_prob), (None, 0)))(epidemic.TRUTH[5], drawn[:500]), float)
    assert np.max(np.abs(scores.mean(0)) / scores.std(0)) * np.sqrt(len(scores)) < 4.5
    np.testing.assert_allclose(np.diag(-slopes.mean(0)) / np.diag(np.cov(scores.T)), 1.0, atol=0.2)


def test_the_density_of_returns_is_that_of_their_quantiles():
    z = jnp.linspace(-4, 4, 2001)
    x = gnk.quantile(z, *(jnp.asarray(v) for v in gnk.TRUTH.values()))
    density = np.exp(np.asarray(gnk.log_likelihood(gnk.TRUTH, x[:, None]), float))
    below = np.concatenate([[0.0], np.cumsum(0.5 * (density[1:] + density[:-1]) * np.diff(np.asarray(x, float)))])
    np.testing.assert_allclose(below, jax.scipy.stats.norm.cdf(z) - jax.scipy.stats.norm.cdf(-4.0), atol=2e-4)


@pytest.mark.parametrize(("v", "a", "z"), [(1.0, 2.0, 0.5), (-2.0, 1.2, 0.3), (0.0, 1.0, 0.8)])
def test_reaction_times_follow_the_wiener_density(v, a, z):
    n, params = 50_000, {"v": v, "a": a, "z": z, "t": 0.0}
    side, pace = random.uniform(random.key(0), (n, drift_diffusion.NUM_STEPS)), random.normal(random.key(1), (n, drift_diffusion.NUM_STEPS))
    seconds, choice = (np.asarray(q) for q in jax.jit(drift_diffusion.first_passage)(v, a, z, side, pace))
    at = np.linspace(1e-3, 15, 15_000)
    for end in (0.0, 1.0):
        rows = jnp.stack([jnp.asarray(at), jnp.full(len(at), end)], axis=1)
        density = np.exp(np.asarray(drift_diffusion.log_likelihood(params, rows), float))
        below = np.cumsum(density) * (at[1] - at[0])
        share = (choice == end).mean()
        np.testing.assert_allclose(share, below[-1], atol=5 * np.sqrt(0.25 / n) + 1e-3)
        found = np.sort(seconds[choice == end])
        far = np.abs(np.interp(found, at, below / below[-1]) - (np.arange(len(found)) + 0.5) / len(found)).max()
        assert far < 2.0 / np.sqrt(len(found)) + 1e-3  # Kolmogorov-Smirnov, p = 0.0007

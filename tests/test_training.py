"""The loop on plain arrays, and a small table that must not be over-fitted in silence."""

from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_sls import SLS, CurvaturePenalty, Training
from numpyro_sls.training import make_trainer, train
from tests.cases import CASES


def _regression(noise):
    def next_batch(rng_key, context):
        x = random.normal(rng_key, (32, 3))
        return (x, x @ jnp.array([1.0, -2.0, 0.5]) + noise * random.normal(rng_key, (32,))), jnp.array(1)

    def loss_fn(weights, batch, context):
        x, y = batch
        return jnp.mean((x @ weights["w"] - y) ** 2)

    return make_trainer(loss_fn, next_batch), next_batch(random.key(9), None)[0]


def test_train_finds_the_minimum_and_counts():
    trainer, held_out = _regression(noise=0.0)
    weights, curve = train(trainer, random.key(0), {"w": jnp.zeros(3)}, held_out, None, 400, learning_rate=0.1)
    np.testing.assert_allclose(weights["w"], [1.0, -2.0, 0.5], atol=0.02)
    assert curve.steps[-1] == 400 == curve.tally
    assert curve.outcome == "ran its full length"


def test_early_stopping_keeps_the_best():
    trainer, held_out = _regression(noise=0.0)
    start = {"w": jnp.array([1.0, -2.0, 0.5])}
    _, curve = train(trainer, random.key(0), start, held_out, None, 5000, learning_rate=0.5, patience=3)
    assert curve.outcome.startswith("stopped early")
    assert curve.best == int(np.argmin(curve.held_out))


def test_a_loss_that_is_not_finite_stops_training():
    trainer = make_trainer(lambda w, b, c: jnp.log(w["w"]).sum(), lambda k, c: (None, jnp.array(0)))
    _, curve = train(trainer, random.key(0), {"w": jnp.array([0.5])}, None, None, 1000, learning_rate=1.0)
    assert "not finite" in curve.outcome


def test_small_budgets_are_refused_and_few_simulations_become_a_table():
    with pytest.raises(ValueError, match="a table needs at least"):
        Training(num_simulations=1000)
    assert not Training(num_simulations=100_000).is_fresh
    assert Training().is_fresh
    with pytest.raises(ValueError, match="a fresh stream needs at least"):
        Training(num_simulations=100_000, fresh=True)
    with pytest.raises(ValueError, match="in batches of 32 x 64"):  # before anything is trained
        SLS(CASES["location_scale"].model, training=Training(num_simulations=60_000), curvature=CurvaturePenalty())


def test_a_small_table_stops_before_it_is_over_fitted(table_fit):
    curve = table_fit.curves["training"]
    assert curve.outcome.startswith("stopped early")
    assert curve.held_out[curve.best] <= curve.held_out[-1]
    assert curve.held_out[curve.best] < 0, "better than the zero score"


def test_the_budget_is_kept(table_fit):
    learning = {k: s.num for k, s in table_fit.simulations.items() if k not in ("localization", "joint score test")}
    assert 0.5 * 60_000 < sum(learning.values()) <= 60_000

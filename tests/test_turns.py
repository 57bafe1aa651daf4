"""The mean of a score removed over draws of a posterior that leans on the end of an interval, where there is no mode on the line."""

from dataclasses import replace
import json

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_sls import Simulated, calibrate
from numpyro_sls.checkpoint import _Reader, _Writer
from numpyro_sls.dynamics import point_at, score_in_delta, to_delta, to_theta
from numpyro_sls.inputs import make_layout
from numpyro_sls.leaning import around_draws
from numpyro_sls.metrics import w1
from numpyro_sls.score import Mode, PosteriorScore
from numpyro_sls.turns import Turns
from tests.exact import exact_fit

SD, BIAS, CUBIC = 0.5, 0.3, 4.0


def coin(x):
    """A location that cannot leave (0, 1)."""
    p = numpyro.sample("p", dist.Uniform(0, 1))
    with numpyro.plate("units", x.shape[0]):
        u = numpyro.sample("u", dist.Normal())
        numpyro.sample("x", Simulated(p + SD * u), obs=x)


@pytest.fixture(scope="module", params=[0.0, CUBIC], ids=["affine", "quadratic"])
def leaning(request):
    """The exact score of p with a constant, a slope and a square added, at data that pull p out of its interval."""
    x = -0.03 + SD * random.normal(random.key(0), (100,))

    def statistics(x):
        return jnp.concatenate([x, jnp.ones_like(x)], axis=1) / SD**2

    def natural(theta):
        p = jax.scipy.special.ndtr(theta[0])
        return jnp.stack([p, -0.5 * p**2 + BIAS * p + 0.5 * BIAS * p**2 + request.param * p**3 / 3])

    fit = exact_fit(coin, (x,), statistics, natural, jnp.array([-1.5]), jnp.array([0.8]))
    unit, (low, high) = fit.posterior.unit, fit.units.parameters.box
    layout = make_layout(unit.proposal.sample(random.key(1), 500), unit.proposal.mean, unit.proposal.factor, low, high)
    return fit, unit._replace(weights={**unit.weights, "layout": layout}), x


def test_steps_in_the_parameters_own_values(leaning):
    """There and back, nothing beyond the ends, and the score of a density that has the slope of the map in it."""
    fit, unit, x = leaning
    posterior = PosteriorScore(fit.posterior.learned, unit, fit.posterior.log_prior)
    theta = unit.proposal.sample(random.key(1), 500)
    data, _ = around_draws(posterior, fit.conditioner.terms(unit, x[:, None], len(x)), theta)
    np.testing.assert_allclose(jax.vmap(lambda t: to_theta(data, to_delta(data, t)))(theta), theta, rtol=1e-3, atol=1e-3)
    assert not posterior.possible(to_theta(data, jnp.array([-50.0])), data)
    delta = jnp.array([0.3])
    np.testing.assert_allclose(score_in_delta(posterior, data, delta), point_at(posterior, data, delta).score, rtol=1e-3, atol=1e-3)
    writer = _Writer()
    again = _Reader(writer.arrays).decode(json.loads(json.dumps(writer.encode(data))))
    np.testing.assert_array_equal(again.chart.factor, data.chart.factor)  # a saved fit keeps them
    # under the uniform prior alone the density of p is flat
    flat = data._replace(summary=0 * data.summary)
    np.testing.assert_allclose(point_at(posterior, flat, delta).score, 0.0, atol=1e-3)


def test_turns_remove_a_mean_that_is_quadratic_in_the_parameter(leaning):
    fit, unit, x = leaning
    turns = Turns(fit.conditioner.learner)
    before = fit.conditioner.learner.simulator.spent.get("debiasing near the posterior")
    assert before is None
    start = fit.conditioner.terms(unit, x[:, None], len(x))
    data, _ = turns(random.key(2), unit, start, 500_000)
    exact = dist.TruncatedNormal(x.mean(), SD / 10, low=0.0, high=1.0).sample(random.key(3), (20_000,))
    for terms, near in ((start, False), (data, True)):
        draws = turns.draws(random.key(4), unit, terms, None)
        p = np.asarray(jax.vmap(fit.units.parameters.constrain)(draws)["p"])
        distance = w1(p[:, None], np.asarray(exact)[:, None])[0]
        assert (distance < 0.1) == near, distance
    spent = fit.conditioner.learner.simulator.spent["debiasing near the posterior"]
    assert 450_000 < spent.num <= 500_000
    mended = replace(fit, posterior=PosteriorScore(fit.posterior.learned, unit, fit.posterior.log_prior), data=data)
    found = calibrate(mended, random.key(5), width=1.0)
    levels = np.array([0.5, 0.8, 0.95])
    low, high = found.band(levels, 0.999)
    coverage = found.coverage(levels)[:, 0]
    assert np.all((coverage > low) & (coverage < high)), coverage
    assert found.num_dropped == 0


def test_a_posterior_as_wide_as_its_interval_goes_to_the_turns(leaning):
    """Of p in (0, 1), 0.5 on the line is much, 0.1 is not; without a layout there is nothing to go to."""
    fit, unit, _ = leaning
    one = jnp.ones(1)
    wide, narrow = (Mode(0 * one, sd * jnp.eye(1), 0 * one, jnp.eye(1), jnp.zeros(())) for sd in (0.5, 0.1))
    assert fit.conditioner._leans(unit, wide)
    assert not fit.conditioner._leans(unit, narrow)
    assert not fit.conditioner._leans(fit.posterior.unit, wide)

"""Checks that pass on a right score and name the cause on wrong ones; runs in ArviZ."""

import arviz as az
from jax import random
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from numpyro.infer import MCMC, NUTS
import pytest

from numpyro_sls import SLSLangevin, calibrate, diagnose, plots, predict, to_arviz
from numpyro_sls.metrics import c2st, coverage, interval_width, ks, mmd, w1
from tests.cases import CASES
from tests.exact import exact_fit, exact_location_fit, normal_natural, normal_statistics


def _wrong(x, natural):
    return exact_fit(CASES["location_scale"].model, (x,), normal_statistics, natural, jnp.array([1.0, 0.7]), jnp.ones(2))


def _run(fit, x, warmup=300, samples=500, chains=4, fields=(), **settings):
    mcmc = MCMC(
        SLSLangevin(fit, **settings),
        num_warmup=warmup,
        num_samples=samples,
        num_chains=chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), x, extra_fields=fields)
    return mcmc


@pytest.fixture(scope="module")
def x(location_data):
    return location_data[0]


@pytest.fixture(scope="module")
def exact(x):
    return exact_location_fit(x)


@pytest.fixture(scope="module")
def run(exact, x):
    return _run(exact, x, fields=("accept_prob", "step_size"))


@pytest.fixture(scope="module")
def report(exact, run):
    return diagnose(exact, random.key(1), mcmc=run)


@pytest.fixture(scope="module")
def calibrated(exact):
    return calibrate(exact, random.key(1), num_repetitions=200)


def test_nothing_speaks_against_an_exact_score(report):
    assert report.ok, str(report)
    assert "Nothing speaks against" in str(report)
    assert np.all(np.abs(report.bartlett.mean) < 4 * report.bartlett.mean_se + 0.02)


def test_nothing_speaks_against_a_learned_score(location_fit):
    report = diagnose(location_fit, random.key(1))
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("natural", "cause"),
    [
        (lambda t: 0.6 * normal_natural(t), "curvature"),
        (lambda t: normal_natural(t) + jnp.array([0.0, 0.0, 0.05]) * t[0], "mean zero"),
    ],
)
def test_a_wrong_score_is_named(x, natural, cause):
    report = diagnose(_wrong(x, natural), random.key(1))
    assert not report.ok
    assert report.failed == (cause,), str(report)


def test_data_of_another_model_are_seen(x):
    other = jnp.where(random.bernoulli(random.key(5), 0.5, x.shape), 1.0, -1.0) * 4 + 0.1 * random.normal(random.key(6), x.shape)
    fit = exact_fit(CASES["location_scale"].model, (other,), normal_statistics, normal_natural, jnp.array([0.0, 1.4]), jnp.ones(2))
    report = diagnose(fit, random.key(1))
    assert report.failed == ("the data",), str(report)


def test_chains_that_have_not_met_and_steps_that_are_too_large(exact, x):
    short = _run(exact, x, warmup=0, samples=10, step_size=0.02)
    assert {"R-hat", "effective samples"} <= set(diagnose(exact, random.key(1), mcmc=short).failed)
    assert "acceptance" in diagnose(exact, random.key(1), mcmc=_run(exact, x, warmup=0, step_size=9.0)).failed
    large = _run(exact, x, warmup=0, adjusted=False, step_size=1.5)
    assert "discretization" in diagnose(exact, random.key(1), mcmc=large).failed


def test_a_run_on_other_data_is_checked_where_it_was(exact, x):
    with pytest.warns(UserWarning, match="outside the region"):
        far = _run(exact, x + 40.0)
    report = diagnose(exact, random.key(1), mcmc=far)
    assert "region" in report.failed
    with pytest.raises(ValueError, match="another fit"):
        diagnose(exact_location_fit(x), random.key(1), mcmc=far)


def test_diagnose_refuses_what_it_cannot_read(exact, x):
    with pytest.raises(TypeError, match="SLSFit"):
        diagnose(exact.sls, random.key(0))
    nuts = MCMC(NUTS(CASES["location_scale"].marginal), num_warmup=5, num_samples=5, progress_bar=False)
    with pytest.raises(TypeError, match="NUTS"):
        diagnose(exact, random.key(0), mcmc=nuts)
    with pytest.raises(TypeError, match="from_numpyro"):
        to_arviz(nuts)


def test_an_exact_score_is_calibrated_and_a_flat_one_is_not(exact, calibrated, x):
    found = calibrated
    assert found.p_values.min() > 0.001, str(found)
    levels = np.linspace(0.1, 0.9, 9)
    low, high = found.band(levels, 0.9999)
    tarp = found.tarp(random.key(2), levels)
    assert np.all((tarp >= low) & (tarp <= high))
    flat = calibrate(_wrong(x, lambda t: 0.4 * normal_natural(t)), random.key(1), num_repetitions=200)
    assert flat.p_values.min() < 0.001, "too wide by 1.6"
    assert flat.coverage(np.array([0.5])).mean() > 0.6
    with pytest.raises(ValueError, match="at least 10"):
        calibrate(exact, random.key(1), num_repetitions=1)


def test_a_run_in_arviz(run, x):
    data = to_arviz(run, random.key(1), posterior_predictive=50, prior=20)
    assert {"posterior", "sample_stats", "observed_data", "posterior_predictive", "prior", "prior_predictive"} <= set(_groups(data))
    assert data["posterior"]["a"].shape == (4, 500)
    assert {"acceptance_rate", "diverging", "step_size"} <= set(data["sample_stats"].data_vars)
    np.testing.assert_allclose(data["observed_data"]["x"], x, rtol=1e-6)
    assert data["posterior_predictive"]["x"].shape == (1, 50, 200)
    assert len(az.summary(data, kind="stats") if int(az.__version__[0]) == 0 else az.summary(data)) == 2


def test_plain_from_numpyro_does_not_crash(run):
    data = az.from_numpyro(run)
    assert data["posterior"]["a"].shape == (4, 500)


def test_predictions_redraw_the_nuisances(run, x):
    drawn = predict(run, random.key(1), 200)["x"]
    assert drawn.shape == (200, 200)
    np.testing.assert_allclose(drawn.std(1).mean(), np.asarray(x).std(), rtol=0.1)
    assert np.abs(drawn[0] - drawn[1]).max() > 0.1


def _groups(data) -> set[str]:
    return set(data.groups()) if callable(data.groups) else {g.strip("/") for g in data.groups}


def test_every_picture_has_axes(location_fit, exact, run, report, calibrated, x):
    samples = run.get_samples()
    assert len(plots.training_curves(location_fit)) == sum(len(c.held_out) > 1 for c in location_fit.curves.values())
    assert plots.pairs(location_fit, samples).shape == (2, 2)
    assert plots.score_field(exact).get_xlabel() == "a"
    assert len(plots.bartlett_residuals(report.bartlett)) == 2
    assert len(plots.calibration(calibrated).lines) == 3
    assert len(plots.predictive_bands(predict(run, random.key(1), 20)["x"], np.asarray(x)).lines) == 1
    assert len(plots.compare({"one": samples, "two": samples})) == 2
    with pytest.raises(ValueError, match="200 numbers and 10"):
        plots.predictive_bands(np.zeros((5, 200)), np.zeros(10))
    plt.close("all")


def test_distances_between_draws():
    a, b = (np.asarray(random.normal(random.key(i), (4000, 2))) for i in (0, 1))
    moved = a + np.array([1.0, 0.0])
    np.testing.assert_allclose(w1(moved, b), [1.0, 0.0], atol=0.06)
    np.testing.assert_allclose(ks(moved, b), [0.383, 0.0], atol=0.04)  # 2 Phi(1/2) - 1
    assert abs(mmd(a, b)) < 0.01 < mmd(moved, b)
    same, apart = c2st(random.key(2), a, b), c2st(random.key(2), moved, b)
    assert abs(same - 0.5) < 0.03
    assert abs(apart - 0.691) < 0.03  # Phi(1/2)
    np.testing.assert_allclose(interval_width(b), [3.92, 3.92], rtol=0.05)
    repeated = np.asarray(random.normal(random.key(3), (500, 200, 1)))
    truth = np.asarray(random.normal(random.key(4), (500, 1)))
    np.testing.assert_allclose(coverage(repeated, truth, np.array([0.5, 0.9]))[:, 0], [0.5, 0.9], atol=0.06)

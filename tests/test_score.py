"""The structured score on whole data sets, series and boundaries, against exact posteriors."""

import warnings

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
import pytest

from numpyro_sls import SLS, CurvaturePenalty, Debias, Focus, MLPScore, Simulated, SLSLangevin, Smoothing, Training, transitions
from numpyro_sls.boundary import make_boundary
from numpyro_sls.model import trace_model
from numpyro_sls.models import beta_binomial, dirichlet
from numpyro_sls.preparation import moving_supports
from numpyro_sls.proposal import in_box, truncated_normal, worth_units
from numpyro_sls.units import make_units
from tests.cases import CASES


def _draws(fit, args, num_samples=2000):
    mcmc = MCMC(SLSLangevin(fit), num_warmup=300, num_samples=num_samples, num_chains=4, chain_method="vectorized", progress_bar=False)
    mcmc.run(random.key(1), *args)
    return {k: np.asarray(v) for k, v in mcmc.get_samples().items()}


def _w1_to_normal(draws, mean, sd):
    grid = (np.arange(1000) + 0.5) / 1000
    return np.abs((np.quantile(draws, grid) - mean) / sd - np.asarray(dist.Normal().icdf(jnp.asarray(grid)))).mean()


def ar1(series):
    phi = numpyro.sample("phi", dist.Normal(0, 1))
    before, after = transitions(series)
    with numpyro.plate("steps", after.shape[0]) as step:
        e = numpyro.sample("e", dist.Normal())
        numpyro.sample("x", Simulated(phi * jnp.asarray(before)[step, 0] + e), obs=after[:, 0])


def ar1_data(rng_key, length):
    return jax.lax.scan(lambda x, e: (0.6 * x + e, 0.6 * x + e), 0.0, random.normal(rng_key, (length,)))[1]


@pytest.mark.slow
def test_ar1_by_transitions():
    """The exact posterior of phi is normal. W1 at most 0.2 of its sd; nothing is used of the density."""
    series = ar1_data(random.key(2), 301)
    fit = SLS(ar1).run(random.key(0), series, progress_bar=False)
    before, after = (a[:, 0] for a in transitions(series))
    precision = 1 + jnp.sum(before**2)
    mean, sd = jnp.sum(before * after) / precision, precision**-0.5
    assert _w1_to_normal(_draws(fit, (series,))["phi"], float(mean), float(sd)) < 0.2


RICKER_NOISE = 0.3


def ricker(series):
    """A population that grows and crowds itself out, x' = x exp(a - b x + noise): a nonlinear map, chaotic for large a."""
    a = numpyro.sample("a", dist.Normal(1, 1))
    b = numpyro.sample("b", dist.Normal(1, 1))
    before, after = transitions(series)
    with numpyro.plate("years", after.shape[0]) as year:
        x = jnp.asarray(before)[year, 0]
        e = numpyro.sample("e", dist.Normal())
        numpyro.sample("x", Simulated(x * jnp.exp(a - b * x + RICKER_NOISE * e)), obs=after[:, 0])


@pytest.mark.slow
def test_a_nonlinear_map_by_transitions():
    """log(x' / x) is linear in a and b: their exact posterior is normal, which the fit, given x alone, does not know."""
    grow = lambda x, e: (x * jnp.exp(2.2 - x + RICKER_NOISE * e),) * 2  # noqa: E731
    series = jax.lax.scan(grow, 1.0, random.normal(random.key(4), (301,)))[1]
    fit = SLS(ricker).run(random.key(0), series, progress_bar=False)
    before, after = (np.asarray(a[:, 0], float) for a in transitions(series))
    design = np.stack([np.ones_like(before), -before], axis=1) / RICKER_NOISE
    covariance = np.linalg.inv(np.eye(2) + design.T @ design)
    mean = covariance @ (np.ones(2) + design.T @ (np.log(after / before) / RICKER_NOISE))
    draws = _draws(fit, (series,))
    for j, name in enumerate("ab"):
        assert _w1_to_normal(draws[name], mean[j], covariance[j, j] ** 0.5) < 0.2


def test_transitions_cut_series_of_any_order_and_number():
    x = jnp.arange(24.0).reshape(2, 6, 2)
    before, after = transitions(x, order=2)
    assert before.shape == (8, 4)
    np.testing.assert_allclose(before[4], [12, 13, 14, 15])
    np.testing.assert_allclose(after[4], [16, 17])
    with pytest.raises(ValueError, match="order=6"):
        transitions(x, order=6)
    with pytest.raises(ValueError, match=r"\(T,\), \(T, p\) or \(S, T, p\)"):
        transitions(jnp.zeros((2, 2, 2, 2)))


NUM_TOGETHER = 10


def exchangeable(x):
    """Rows that share one effect are not independent: their covariance is I + 1 1'."""
    loc = numpyro.sample("loc", dist.Normal(0, 3))
    effect = numpyro.sample("effect", dist.Normal())
    e = numpyro.sample("e", dist.Normal().expand([NUM_TOGETHER]).to_event(1))
    numpyro.sample("x", Simulated(loc + effect + e, event_dim=1), obs=x)


@pytest.mark.slow
def test_exchangeable_gaussian_as_one_whole():
    """W1 at most 0.2 exact sds, with the curvature identity asked for on several data sets at each theta."""
    x = 1 + random.normal(random.key(5), ()) + random.normal(random.key(6), (NUM_TOGETHER,))
    settings = {"params": ["loc"], "units": "whole", "curvature": CurvaturePenalty(ladder=(0.1,), num_simulations=400_000)}
    fit = SLS(exchangeable, **settings).run(random.key(0), x, progress_bar=False)
    variance = 1 + 1 / NUM_TOGETHER
    precision = 1 / 9 + 1 / variance
    assert _w1_to_normal(_draws(fit, (x,))["loc"], float(x.mean() / variance / precision), precision**-0.5) < 0.2
    assert {"curvature, lambda 0", "curvature, lambda 0.1"} <= set(fit.curves)


@pytest.mark.slow
def test_the_n_model_matches_sums(location_data):
    """An additive score trained on whole data sets; rough, at a small budget."""
    x = location_data[0][:40]
    sls = SLS(CASES["location_scale"].model, units="additive", debias=None, training=Training(num_simulations=2_000_000, num_thetas=32))
    fit = sls.run(random.key(0), x, progress_bar=False)
    draws = _draws(fit, (x,), 1000)
    # the prior is wide: the posterior of a is nearly N(mean, s^2 / n)
    assert abs(draws["a"].mean() - x.mean()) < 0.5 * x.std() / np.sqrt(40)
    assert 0.7 < draws["a"].std() / (x.std() / np.sqrt(40)) < 1.4
    with pytest.raises(ValueError, match="data sets of 40 units"):
        fit.condition(location_data[0])


def uniform(x):
    end = numpyro.sample("end", dist.Uniform(0, 10))
    with numpyro.plate("units", x.shape[0]):
        u = numpyro.sample("u", dist.Uniform(0, end))
        numpyro.sample("x", Simulated(u), obs=x)


def test_a_moving_support_is_named_and_smoothed():
    units = make_units(trace_model(uniform, (jnp.ones(5),)))
    assert moving_supports(units) == ["u"]
    assert moving_supports(make_units(trace_model(CASES["location_scale"].model, (jnp.ones(5),)))) == []
    assert moving_supports(make_units(trace_model(CASES["normal_exponential"].model, (jnp.ones(5),)))) == []
    with pytest.warns(UserWarning, match="support of 'u' moves with a parameter"):
        units, smoothing = SLS(uniform).units_of((jnp.arange(5.0),), {})
    assert smoothing == Smoothing()
    assert units.noise_sd is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert SLS(uniform, smoothing=False).units_of((jnp.arange(5.0),), {})[1] is None
    with pytest.raises(ValueError, match="does not say how much"):
        SLS(uniform, smoothing=True)
    with pytest.raises(ValueError, match="cannot be debiased"):
        SLS(uniform, support={"end": lambda x: (x.max(), None)})


def test_the_weight_vanishes_where_the_data_end():
    """theta with a factor that is not diagonal, bounds from the data: g is 0 at them, 1 far away, and its slope is its derivative."""
    parameters = make_units(trace_model(uniform, (jnp.ones(5),))).parameters
    boundary = make_boundary(parameters, {"end": lambda x: (x.max(), None)}, 1)
    low, high = boundary.bounds(jnp.array([[2.0], [-1.0]]), 1)
    np.testing.assert_allclose(parameters.constrain(low[0])["end"], 2.0, rtol=1e-5)
    assert jnp.isneginf(low[1, 0])
    assert jnp.isposinf(high).all()
    proposal = worth_units(jnp.zeros(1), jnp.eye(1), jnp.zeros((1, 1)), 1.0, np.zeros(1, bool))
    at = jnp.array([[0.5 * float(low[0, 0])], [float(low[0, 0])], [3.0]])
    g, change = jax.vmap(lambda e: boundary(proposal, e, jnp.array([[2.0]])))(at)
    np.testing.assert_allclose(g[:, 0, 0], [min(1.0, 0.5 * abs(float(low[0, 0]))), 0.0, 1.0], atol=1e-6)
    derivative = jax.grad(lambda e: boundary(proposal, e, jnp.array([[2.0]]))[0][0, 0])(at[0])
    np.testing.assert_allclose(change[0, 0], derivative, rtol=1e-5)
    with pytest.raises(ValueError, match="not a parameter"):
        make_boundary(parameters, {"start": lambda x: (None, None)}, 1)


@pytest.mark.slow
def test_a_stated_support_is_learnt_from_whole_data_sets():
    """x ~ U(0, end), prior U(0, 10): the posterior of end is max x times a Pareto, cut at 10."""
    x = 4 * random.uniform(random.key(1), (20,))
    sls = SLS(uniform, units="additive", support={"end": lambda x: (x.max(), None)}, debias=None, network=MLPScore())
    fit = sls.run(random.key(0), x, progress_bar=False)
    draws = _draws(fit, (x,))["end"]
    assert draws.min() >= x.max()
    exact = float(x.max()) * (1 - np.linspace(0.025, 0.975, 200)) ** (-1 / 19)
    assert np.abs(np.quantile(draws, np.linspace(0.025, 0.975, 200)) - exact).mean() < 0.3 * exact.std()


@pytest.mark.slow
def test_intervals_as_they_are():
    """coordinates="constrained": a coin's bias near the end of its interval, against the Beta posterior."""

    def model(x):
        p = numpyro.sample("p", dist.Uniform(0, 1))
        with numpyro.plate("units", x.shape[0]):
            u = numpyro.sample("u", dist.Normal())
            numpyro.sample("x", Simulated(p + 0.5 * u), obs=x)

    x = 0.02 + 0.5 * random.normal(random.key(0), (100,))
    draws = _draws(SLS(model, coordinates="constrained").run(random.key(0), x, progress_bar=False), (x,))["p"]
    grid = (np.arange(1000) + 0.5) / 1000
    exact = dist.TruncatedNormal(x.mean(), 0.05, low=0.0, high=1.0)
    assert np.abs(np.quantile(draws, grid) - exact.icdf(jnp.asarray(grid))).mean() < 0.15 * float(exact.variance) ** 0.5


def test_a_gaussian_between_bounds():
    precision = jnp.array([[2.0, 0.9], [0.9, 1.0]])
    draws = truncated_normal(random.key(0), jnp.array([0.2, 0.1]), precision, jnp.zeros(2), jnp.array([1.0, jnp.inf]))
    wide = np.random.default_rng(0).multivariate_normal([0.2, 0.1], np.linalg.inv(precision), 400_000)
    kept = wide[(wide[:, 0] > 0) & (wide[:, 0] < 1) & (wide[:, 1] > 0)]
    se = np.sqrt(kept.var(0) * (1 / len(kept) + 1 / len(draws)))
    assert np.all(np.abs(np.asarray(draws).mean(0) - kept.mean(0)) < 5 * se)


def test_a_proposal_in_a_box_goes_there_and_back():
    proposal = worth_units(jnp.array([-1.0, 0.5]), jnp.eye(2), 3 * jnp.eye(2), 1.0, np.zeros(2, bool))
    boxed = in_box(proposal, jnp.eye(2), np.array([0.0, -np.inf]), np.array([2.0, np.inf]))
    theta = boxed.sample(random.key(0), 50)
    np.testing.assert_allclose(jax.vmap(lambda t: boxed.unwhiten(boxed.whiten(t)))(theta), theta, rtol=1e-3, atol=1e-3)
    place = jax.vmap(boxed.learnt)(theta)
    assert (place[:, 0] > 0).all()
    assert (place[:, 0] < 2).all()
    s = random.normal(random.key(1), (4, 2))
    np.testing.assert_allclose(boxed.score_in_theta(theta[0], boxed.score_in_eta(theta[0], s)), s, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["regression", "simplified", "projected"])
def test_debiasing_over_the_region(location_data, method):
    """Each of the paper's ways brings n |h|^2 down; what is left is reported with its standard error."""
    debias = Debias(method=method, ladder=(1e-2,), near=False, num_turns=2)
    sls = SLS(CASES["location_scale"].model, debias=debias, training=Training(num_simulations=3_000_000), focus=None)
    fit = sls.run(random.key(0), *location_data, progress_bar=False)
    found = fit.mean_zero(random.key(1), 600_000)
    assert found.demand[1] < max(found.demand[0], 0.05), str(found)
    assert found.se.max() < 0.1
    np.testing.assert_allclose(found.region, found.final, atol=5 * 1.5 * found.se.max())


def test_nothing_is_left_of_the_mean_near_the_posterior(location_fit):
    found = location_fit.mean_zero(random.key(1), 600_000)
    # its own standard error, and that of the offset that was subtracted
    assert np.all(np.abs(found.final) < 5 * np.hypot(found.se[2], 0.03)), str(found)
    assert "n |h|^2" in str(found)


def test_errors_by_stage(location_fit):
    def log_likelihood(params, x):
        return dist.Normal(params["a"], params["b"]).log_prob(x[:, 0])

    draws = {"a": random.normal(random.key(0), (100,)) * 0.1 + 1.0, "b": jnp.full(100, 2.0)}
    errors = location_fit.errors(log_likelihood, random.key(0), draws, num_thetas=50)
    assert 0 < errors.unit_near.relative < 0.02
    assert errors.posterior.relative < 0.05
    assert "one unit" in str(errors)


def test_the_state_before_is_a_covariate():
    units = make_units(trace_model(ar1, (ar1_data(random.key(0), 20),)))
    assert units.covariates.shape == (19, 1)


def test_focus_is_refused_out_of_range():
    with pytest.raises(ValueError, match="between 0 and 1"):
        Focus(flatten=2.0)


@pytest.mark.parametrize(("module", "n"), [(dirichlet, 50), (beta_binomial, 5)])
def test_scores_that_are_written_down(module, n):
    """The exact log likelihood of a row is that of the NumPyro model up to a constant in theta."""
    x = module.simulate_data(random.key(0), n)
    traced = trace_model(module.model, (x,))
    run = [traced.run(random.key(0), jnp.arange(n), traced.run(random.key(s), jnp.arange(n)).unconstrained, {"x": x}) for s in (1, 2)]
    ours = [module.log_likelihood(r.params, x.reshape(n, -1)) for r in run]
    np.testing.assert_allclose(ours[0] - ours[1], run[0].log_density - run[1].log_density, rtol=1e-3, atol=1e-3)

"""Localization from wide priors: with and without derivatives, covariates, failures, modes, whole data sets."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_sls import SLS, Localization, Simulated
from numpyro_sls.localization import Localized, localize
from numpyro_sls.models import monotone
from numpyro_sls.preparation import prior_moments
from tests.cases import only_its_size

SMALL = dict(num_starts=8, population=128, num_steps=(12, 10))


def _localize(model, *args, settings=None, **kwargs) -> tuple[Localized, dict]:
    """Localize and give the kept restarts in the parameters' own space."""
    units = SLS(model, **kwargs).units_of(args, {})[0]
    found, resemblance = localize(
        random.key(1), units, units.observed(), prior_moments(random.key(0), units), settings or Localization(**SMALL)
    )
    centre = jnp.asarray(found.centre)
    np.testing.assert_allclose(resemblance.ratio(centre), 1.0, rtol=1e-5)
    # five prior sds away, simulations look like other data
    assert resemblance.ratio(centre + 5 * jnp.sqrt(jnp.diag(prior_moments(random.key(0), units)[1]))) > 1.5
    return found, {k: np.asarray(v) for k, v in jax.vmap(units.parameters.constrain)(jnp.asarray(found.thetas)).items()}


def location_scale(simulator):
    """x = simulator(loc, scale, z) under a prior 200 times wider than the posterior."""

    def model(x):
        loc = numpyro.sample("loc", dist.Normal(0, 20))
        scale = numpyro.sample("scale", dist.LogNormal(0, 2))
        with numpyro.plate("units", x.shape[0]):
            z = numpyro.sample("z", dist.Normal())
            numpyro.sample("x", Simulated(simulator(loc, scale, z)), obs=x)

    return model


def _numpy_simulator(loc, scale, z):
    def simulate(loc, scale, z):
        return (np.asarray(loc) + np.asarray(scale) * np.asarray(z)).astype(np.float32)

    shape = jax.ShapeDtypeStruct(z.shape, jnp.float32)
    return jax.pure_callback(simulate, shape, loc, scale, z, vmap_method="sequential")


SIMULATORS = {
    "traced": lambda loc, scale, z: loc + scale * z,
    "failing": lambda loc, scale, z: jnp.where(jnp.abs(z) < 0.1, jnp.nan, loc + scale * z),
    "rounded": lambda loc, scale, z: jnp.round(100 * (loc + scale * z)) / 100,
    "stopped": lambda loc, scale, z: jax.lax.stop_gradient(loc) + scale * z,
    "numpy": _numpy_simulator,
}


@pytest.mark.parametrize("name", [pytest.param(k, marks=pytest.mark.slow) if k in ("rounded", "stopped") else k for k in SIMULATORS])
def test_restarts_find_the_region_with_and_without_derivatives(name):
    x = 30 + 2 * random.normal(random.key(5), (400,))
    if name == "failing":
        x = x[jnp.abs(x - 30) > 0.2]
    found, params = _localize(location_scale(SIMULATORS[name]), x)
    no_derivative = {"rounded": ("loc", "scale"), "stopped": ("loc",), "numpy": ("loc", "scale")}.get(name, ())
    assert (found.method, found.no_derivative) == ("search" if no_derivative else "gauss-newton", no_derivative)
    assert found.sites["z"].map == "loc + scale z"
    # n = 400 observed and m = 1600 simulated units; slices are not efficient, so twice the exact sds
    sd = 2 * np.sqrt(1 / 400 + 1 / 1600)
    assert len(found.thetas) >= 6
    assert abs(np.median(params["loc"]) - 30) < 5 * 2 * sd
    assert abs(np.median(np.log(params["scale"] / 2))) < 5 * sd / np.sqrt(2)
    assert np.all(np.diff(found.distances) >= 0)
    assert "restarts kept" in str(found)


@pytest.mark.slow
def test_adam_goes_where_gauss_newton_goes():
    x = 30 + 2 * random.normal(random.key(5), (400,))
    found, params = _localize(location_scale(SIMULATORS["traced"]), x, settings=Localization(num_starts=8, method="adam"))
    assert found.method == "adam"
    assert abs(np.median(params["loc"]) - 30) < 5 * 4 * np.sqrt(1 / 400 + 1 / 1600)
    # 8 restarts, 300 steps with 256 units and 100 with 1600, and the comparisons before and after
    assert found.num_simulated >= 8 * (300 * 256 + 100 * 1600)


def test_a_method_that_needs_a_derivative_says_so():
    x = 30 + random.normal(random.key(5), (50,))
    with pytest.raises(ValueError, match="it has none"):
        _localize(location_scale(_numpy_simulator), x, settings=Localization(method="gauss-newton"))


def test_two_modes_are_reported_as_such():
    """Only |t| is identified."""
    found, params = _localize(only_its_size, 2 + random.normal(random.key(3), (200,)), settings=Localization(num_starts=16, population=128))
    assert len(found.modes) == 2
    assert sum(m.num_restarts for m in found.modes) == len(found.thetas)
    np.testing.assert_allclose(sorted(float(m.centre[0]) for m in found.modes), [-2, 2], atol=5 * np.sqrt(1 / 200 + 1 / 800))
    assert np.all(np.abs(np.abs(params["t"]) - 2) < 0.5)
    # the centre belongs to the first of them
    assert np.sign(found.centre[0]) == np.sign(found.modes[0].centre[0])


@pytest.mark.slow
def test_failed_restarts_are_dropped_by_their_distance():
    """Two wells, the second not as deep: who ends there is not kept."""

    def model(x):
        t = numpyro.sample("t", dist.Uniform(-10, 10))
        with numpyro.plate("units", x.shape[0]):
            z = numpyro.sample("z", dist.Normal())
            numpyro.sample("x", Simulated(jnp.minimum(jnp.abs(t + 5), 2 + jnp.abs(t - 5)) + z), obs=x)

    x = random.normal(random.key(3), (200,))
    found, params = _localize(model, x, settings=Localization(num_starts=32, population=32, num_steps=(12, 10)))
    assert len(found.dropped) >= 5
    assert len(found.dropped) + len(found.thetas) == 32
    assert found.dropped_distances.min() > 5 * found.distances.max()
    assert np.all(np.abs(params["t"] + 5) < 0.5)


def test_discrete_sites_are_searched_by_gradient():
    """A mixture whose weight acts through a discrete site only."""

    def model(x):
        p = numpyro.sample("p", dist.Uniform(0, 1))
        shift = numpyro.sample("shift", dist.LogNormal(0, 2))
        with numpyro.plate("units", x.shape[0]):
            on = numpyro.sample("on", dist.Bernoulli(p))
            z = numpyro.sample("z", dist.Normal())
            numpyro.sample("x", Simulated(shift * on + z), obs=x)

    key_on, key_z = random.split(random.key(2))
    x = 5.0 * random.bernoulli(key_on, 0.6, (500,)) + random.normal(key_z, (500,))
    found, params = _localize(model, x)
    assert found.method == "gauss-newton"
    assert "smooth stand-in" in found.sites["on"].map
    # exact sds are about sqrt(0.24 / 500) = 0.022 and 1 / sqrt(300) = 0.06; m adds a quarter, slices are not efficient
    assert abs(np.median(params["p"]) - 0.6) < 5 * 0.03
    assert abs(np.median(params["shift"]) - 5) < 5 * 0.1


@pytest.mark.slow
def test_monotone_regression_is_found_in_function_space():
    """11 parameters, covariates: every restart within 3 sds of the exact posterior's marginals, from the prior."""
    xy = monotone.simulate_data(random.key(1))
    found, params = _localize(monotone.model, xy, settings=Localization(num_starts=12))
    basis = monotone.features(jnp.linspace(0, 1, 21)).T
    exact = monotone.exact_posterior(random.key(2), xy, num_samples=4000) @ basis
    deviation = (params["theta"] @ basis - exact.mean(0)) / exact.std(0)
    assert np.abs(deviation).max() <= 3
    assert len(found.thetas) >= 10
    assert found.num_simulated / 1000 <= 50_000


@pytest.mark.parametrize("summary", [pytest.param(None, marks=pytest.mark.slow), lambda x: jnp.stack([jnp.mean(x), jnp.log(jnp.std(x))])])
def test_a_whole_data_set_is_compared_by_its_summary(summary):
    """A random walk with drift that fails at times: level and spread of one series, by default compared number by number."""

    def model(x):
        drift = numpyro.sample("drift", dist.Normal(0, 3))
        noise = numpyro.sample("noise", dist.Normal().expand([50]).to_event(1))
        numpyro.sample("x", Simulated(jnp.where(noise[0] > 2, jnp.inf, jnp.cumsum(drift + noise)), event_dim=1), obs=x)

    x = jnp.cumsum(2 + random.normal(random.key(0), (50,)))
    settings = Localization(**SMALL, summary=summary)
    found, params = _localize(model, x, settings=settings, units="whole", params=["drift"])
    assert found.method == "gauss-newton"
    # the exact sd of the drift is 1 / sqrt(50) = 0.14; number by number the level at every time counts, which is not efficient
    assert abs(np.median(params["drift"]) - 2) < 5 * 0.2


def test_what_the_data_do_not_decide_keeps_the_width_of_the_prior():
    def model(x):
        a = numpyro.sample("a", dist.Normal(0, 3))
        b = numpyro.sample("b", dist.Normal(0, 3))
        with numpyro.plate("units", x.shape[0]):
            z = numpyro.sample("z", dist.Normal())
            numpyro.sample("x", Simulated(a + z + 0 * b), obs=x)

    found, _ = _localize(model, 1 + random.normal(random.key(0), (100,)))
    assert (found.method, found.no_derivative) == ("gauss-newton", ())
    sd = np.sqrt(np.diag(found.covariance))
    assert abs(sd[1] / 3 - 1) < 0.1
    # 8 restarts tell a variance to a factor of two or so
    assert 0.3 < sd[0] / (1 / np.sqrt(100)) < 3
    assert np.isclose(found.information[1, 1], 0, atol=1e-3)


def test_a_simulator_that_always_fails_is_an_error():
    x = random.normal(random.key(0), (20,))
    with pytest.raises(ValueError, match="No restart of localization has a finite distance"):
        _localize(location_scale(lambda loc, scale, z: loc + jnp.log(-scale) + z), x)


def test_settings_are_checked():
    with pytest.raises(ValueError, match="population=16"):
        Localization(num_starts=8, population=16)
    with pytest.raises(ValueError, match="'newton'"):
        Localization(method="newton")
    with pytest.raises(ValueError, match="num_starts=1"):
        Localization(num_starts=1)
    with pytest.raises(ValueError, match="plate 'units'"):
        _localize(location_scale(SIMULATORS["traced"]), jnp.zeros(5), settings=Localization(**SMALL, summary=jnp.mean))

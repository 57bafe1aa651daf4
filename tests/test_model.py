"""What one trace finds, what it runs, and what it refuses."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import Predictive
from numpyro.infer.reparam import LocScaleReparam
import pytest

from numpyro_sls import SLS, Simulated
from numpyro_sls.model import trace_model
from numpyro_sls.models import queue
from numpyro_sls.units import make_units

X = np.asarray(random.normal(random.key(0), (12,)))


def plain(x, scale=1.0):
    loc = numpyro.sample("loc", dist.Normal(0, 3))
    numpyro.deterministic("twice", 2 * loc)
    with numpyro.plate("units", x.shape[0]):
        z = numpyro.sample("z", dist.Normal(loc, 1))
        numpyro.deterministic("inside", z + 1)
        numpyro.sample("x", dist.Normal(z, scale), obs=x)
    numpyro.deterministic("mean_z", z.mean())


def test_roles_of_the_sites():
    traced = trace_model(plain, (X,), {"scale": 0.5})
    assert traced.parameters == ("loc",)
    assert traced.nuisances == ("z",)
    assert traced.observations == ("x",)
    assert (traced.unit_plate, traced.plate_dim, traced.num_units) == ("units", -1, 12)
    assert traced.deterministics == ("twice",), "those inside the plate, or made of nuisances, are not decided by the parameters"
    assert not traced.tractable
    np.testing.assert_allclose(traced.observed()[:, 0], X)


def nested(x, y):
    a = numpyro.sample("a", dist.Normal(0, 1))
    with numpyro.plate("people", x.shape[0], dim=-2):
        z = numpyro.sample("z", dist.Normal(a, 1))
        k = numpyro.sample("k", dist.Poisson(3.0))
        with numpyro.plate("visits", x.shape[1], dim=-1):
            numpyro.sample("x", dist.Normal(z, 1), obs=x)
        numpyro.sample("y", dist.Normal(k[..., None] + jnp.zeros(4), 1).to_event(1), obs=y)


def test_nested_plates_and_several_observed_sites():
    traced = trace_model(nested, (np.zeros((7, 3)), np.zeros((7, 1, 4))))
    assert traced.unit_plate == "people"
    assert traced.nuisances == ("z", "k")
    units = make_units(traced)
    assert units.observed().shape == (7, 3 + 4)
    simulated = units.simulate(random.key(0), jnp.array([2.0]), 4000)
    assert simulated.x.shape == (4000, 7)
    # x = a + N(0, 2), y = Poisson(3) + N(0, 1)
    np.testing.assert_allclose(simulated.x.mean(0), [2.0] * 3 + [3.0] * 4, atol=5 * 2 / np.sqrt(4000))
    # t = z - a, of variance one
    np.testing.assert_allclose(simulated.joint_score.std(0), 1.0, atol=0.06)


def matrix(x):
    with numpyro.plate("groups", 2):
        scale = numpyro.sample("scale", dist.HalfNormal(1))
    corr = numpyro.sample("corr", dist.LKJCholesky(2))
    with numpyro.plate("units", x.shape[0]):
        numpyro.sample("x", dist.MatrixNormal(jnp.zeros((2, 2)), scale[:, None] * corr, jnp.eye(2)), obs=x)


def test_matrix_events_and_parameters_in_another_plate():
    units = make_units(trace_model(matrix, (np.zeros((9, 2, 2)),)))
    assert units.parameters.labels == ["scale[0]", "scale[1]", "corr[0]"]
    assert units.simulate(random.key(0), jnp.zeros(3), 5).x.shape == (5, 4)


def constrained(x):
    low = numpyro.sample("low", dist.Normal(0, 1))
    between = numpyro.sample("between", dist.Uniform(low, 10))  # its support moves with a parameter
    probs = numpyro.sample("probs", dist.Dirichlet(jnp.ones(3)))
    cuts = numpyro.sample(
        "cuts", dist.TransformedDistribution(dist.Normal(0, 1).expand([3]).to_event(1), dist.transforms.OrderedTransform())
    )
    hyper = numpyro.sample("hyper", dist.HalfCauchy(1))
    positive = numpyro.sample("positive", dist.Gamma(2, hyper))
    with numpyro.plate("units", x.shape[0]):
        numpyro.sample("x", dist.Normal(between + probs[0] + cuts[1], positive), obs=x)


def test_every_kind_of_prior_goes_there_and_back():
    traced = trace_model(constrained, (X,))
    parameters = make_units(traced).parameters
    theta = parameters.sample_prior(random.key(5))
    assert theta.shape == (1 + 1 + 2 + 3 + 1 + 1,)
    params = parameters.constrain(theta)
    assert params["low"] < params["between"] < 10
    np.testing.assert_allclose(params["probs"].sum(), 1, rtol=1e-5)
    assert np.all(np.diff(params["cuts"]) > 0)
    np.testing.assert_allclose(parameters.flatten(parameters.unflatten(theta)), theta, rtol=1e-4, atol=1e-5)
    # the same density as NumPyro's own potential of the prior, but that an interval is laid out by the normal quantile
    potential = numpyro.infer.util.potential_energy(handlers.block(constrained, hide=["x"]), (X,), {}, parameters.unflatten(theta))
    np.testing.assert_allclose(parameters.log_prior(theta), -potential + parameters.log_jacobian(theta), rtol=1e-4)


def test_a_uniform_prior_is_a_standard_normal():
    def model(x):
        a = numpyro.sample("a", dist.Uniform(-5, jnp.array([3.0, 4.0])).to_event(1))
        with numpyro.plate("units", x.shape[0]):
            numpyro.sample("x", dist.Normal(a.sum(), 1), obs=x)

    parameters = make_units(trace_model(model, (X,))).parameters
    theta = jnp.array([[0.0, 1.0], [-6.0, 6.0], [-12.0, 9.0]])
    np.testing.assert_allclose(jax.vmap(parameters.log_prior)(theta), dist.Normal().log_prob(theta).sum(1), rtol=1e-4)
    np.testing.assert_allclose(jax.vmap(lambda t: parameters.flatten(parameters.unflatten(t)))(theta), theta, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(jax.vmap(parameters.prior_score)(theta), -theta, rtol=1e-3, atol=1e-4)


def test_reparametrized_model():
    def centred(x):
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        mu = numpyro.sample("mu", dist.Normal(0, tau))
        with numpyro.plate("units", x.shape[0]):
            numpyro.sample("x", dist.Normal(mu, 1), obs=x)

    traced = trace_model(handlers.reparam(centred, config={"mu": LocScaleReparam(0)}), (X,))
    assert traced.parameters == ("tau", "mu_decentered")
    assert traced.deterministics == ("mu",)


C = np.asarray(random.normal(random.key(1), (12, 2)))
GROUP = np.array([0, 1, 2] * 4)


def by_subsample(c, x):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("units", x.shape[0]):
        rows = numpyro.subsample(c, event_dim=1)
        numpyro.sample("x", dist.Normal(rows @ beta, 1), obs=x)


def by_index(c, x):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("units", x.shape[0]) as idx:
        numpyro.sample("x", dist.Normal(jnp.asarray(c)[idx] @ beta, 1), obs=x)


@pytest.mark.parametrize("model", [by_subsample, by_index])
@pytest.mark.parametrize("num", [3, 12, 50])
def test_covariates_are_found_and_follow_their_rows(model, num):
    units = make_units(trace_model(model, (C, X)))
    np.testing.assert_allclose(units.observed(), np.column_stack([X, C]), rtol=1e-6)
    simulated = units.simulate(random.key(0), jnp.array([100.0, -100.0]), num)
    residual = simulated.x[:, 0] - simulated.x[:, 1:] @ np.array([100.0, -100.0])
    assert np.all(np.abs(residual) < 6), "every unit is simulated with the covariates that the score sees"


def test_integer_covariates_get_a_column_a_level():
    def model(x):
        effect = numpyro.sample("effect", dist.Normal(0, 1).expand([3]))
        with numpyro.plate("units", x.shape[0]) as idx:
            numpyro.sample("x", dist.Normal(effect[jnp.asarray(GROUP)[idx]], 1), obs=x)

    observed = make_units(trace_model(model, (X,))).observed()
    np.testing.assert_allclose(observed[:, 1:], np.column_stack([GROUP, np.eye(3)[GROUP]]))


def test_overrides_of_parameters_and_units():
    traced = trace_model(nested, (np.zeros((7, 3)), np.zeros((7, 1, 4))), units="whole", params=["a"])
    assert traced.unit_plate is None
    assert traced.nuisances == ("z", "k")
    assert make_units(traced).observed().shape == (1, 7 * 3 + 7 * 4)
    crossed = lambda x: nested(x, np.zeros((7, 1, 4)))  # noqa: E731
    with pytest.raises(ValueError, match="does not enclose every observed site"):
        trace_model(crossed, (np.zeros((7, 3)),), unit_plate="visits")


@pytest.mark.parametrize("fixed", [lambda v: Simulated(v, event_dim=1), lambda v: dist.Delta(v, event_dim=1)])
def test_simulated_and_delta_observations(fixed):
    def model(x):
        a = numpyro.sample("a", dist.Normal(0, 1))
        with numpyro.plate("units", x.shape[0]):
            z = numpyro.sample("z", dist.Normal(0, 1).expand([2]).to_event(1))
            numpyro.sample("x", fixed(a + z), obs=x)

    traced = trace_model(model, (np.zeros((4, 2)),))
    assert traced.num_simulated == 1
    x = make_units(traced).simulate_x(random.key(0), jnp.array([3.0]), 6)
    assert x.shape == (6, 2)
    drawn = Predictive(model, {"a": jnp.full(2, 3.0)})(random.key(0), np.zeros((4, 2)))
    assert drawn["z"].shape == (2, 4, 2)


def test_simulated_has_no_density():
    with pytest.raises(NotImplementedError, match="SLSLangevin"):
        Simulated(jnp.zeros(3)).log_prob(jnp.zeros(3))
    assert Simulated(jnp.zeros(3)).expand([2, 3]).sample(random.key(0)).shape == (2, 3)
    with pytest.raises(ValueError, match="event_dim must lie between 0 and 1"):
        Simulated(jnp.zeros(3), event_dim=2)


def _site(name="x", in_plate=True, loc=None, discrete=False, latent=True, plate_size=12):
    """A model with one thing wrong."""

    def model(x=None):
        a = 0.0
        if latent:
            a = numpyro.sample("a", dist.Poisson(2.0) if discrete else dist.Normal(0, 1))
        if not in_plate:
            return numpyro.sample(name, dist.Normal(a, 1).expand([12]).to_event(1), obs=x)
        with numpyro.plate("units", plate_size):
            return numpyro.sample(name, dist.Normal(a if loc is None else a + loc, 1), obs=x)

    return model


@pytest.mark.parametrize(
    ("model", "x", "message"),
    [
        (_site(), None, "no observed site"),
        (_site(latent=False), X, "no latent parameter"),
        (_site(discrete=True), X, "'a' is discrete"),
        (_site(in_plate=False), X, r"numpyro.plate\('units'.*units='whole'"),
        (_site(loc=np.arange(12.0)), X, "numpyro.subsample"),
        (_site(), np.where(np.arange(12) == 3, np.nan, X), "hold 1 values that are NaN"),
        (_site(plate_size=12), X[:5], r"shape \(5,\), but the site has shape \(12,\)"),
        (_site(), X[0], r"shape \(\), but the site has shape \(12,\)"),
    ],
)
def test_bad_models_get_clear_errors_before_tracing(model, x, message):
    with pytest.raises(ValueError, match=message):
        SLS(model).run(random.key(0), x, progress_bar=False)


def test_only_nuisances_is_an_error():
    def model(x):
        with numpyro.plate("units", x.shape[0]):
            z = numpyro.sample("z", dist.Normal())
            numpyro.sample("x", dist.Normal(z, 1), obs=x)

    with pytest.raises(ValueError, match="every latent site"):
        trace_model(model, (X,))


def test_unsupported_sites_are_refused():
    def masked(x):
        a = numpyro.sample("a", dist.Normal())
        with numpyro.plate("units", x.shape[0]), handlers.mask(mask=x > 0):
            numpyro.sample("x", dist.Normal(a, 1), obs=x)

    def factored(x):
        a = numpyro.sample("a", dist.Normal())
        with numpyro.plate("units", x.shape[0]):
            numpyro.sample("x", dist.Normal(a, 1), obs=x)
            numpyro.factor("extra", -(x**2))

    with pytest.raises(ValueError, match="is masked"):
        trace_model(masked, (X,))
    with pytest.raises(ValueError, match="cannot be simulated"):
        trace_model(factored, (X,))
    with pytest.raises(ValueError, match="not latent sites"):
        trace_model(plain, (X,), params=["nothing"])


def test_queue_matches_its_exact_likelihood():
    """Rows of the simulator have the density that the formula gives: the score of theta3 has mean zero."""
    x = queue.simulate_data(random.key(0), 4000)
    assert np.all(x >= queue.TRUTH["theta1"])
    rows = jax.vmap(lambda row: jax.grad(lambda t3: queue.log_likelihood(row[None], 1.0, 5.0, t3))(0.2))(x)
    assert abs(float(rows.mean())) < 5 * float(rows.std()) / np.sqrt(4000)
    assert queue.log_likelihood(x, 1.01 + float(x.min()), 5.0, 0.2) == -np.inf


def test_covariates_in_double_precision():
    def model(x, c):
        slope = numpyro.sample("slope", dist.Normal(0, 3))
        with numpyro.plate("units", x.shape[0]) as index:
            numpyro.sample("x", dist.Normal(slope * c[index], 1), obs=x)

    with jax.enable_x64(True):
        c = jnp.linspace(0, 1, 7)
        units = make_units(trace_model(model, (jnp.zeros(7), c)))
        assert units.observed().dtype == jnp.float64
        np.testing.assert_allclose(units.covariates[:, 0], c)

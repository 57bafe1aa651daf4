"""SLSLangevin with a learned score: one training, no new compilation, pickling, ways to sample; what NumPyro asks is in test_kernel."""

import pickle

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.infer import MCMC, NUTS
import pytest

from numpyro_sls import SLS, SLSLangevin, Training
from numpyro_sls.dynamics import line_integral, point_at, score_in_delta
from numpyro_sls.sites import whole
from tests.cases import CASES, compare
from tests.exact import exact_fit, exact_location_fit, normal_natural, normal_statistics


def _mcmc(kernel, chains=2, method="vectorized", samples=100, warmup=100, **kwargs):
    return MCMC(kernel, num_warmup=warmup, num_samples=samples, num_chains=chains, chain_method=method, progress_bar=False, **kwargs)


def test_state_and_fields(location_fit, location_data):
    kernel = SLSLangevin(location_fit)
    assert whole(kernel.model) is CASES["location_scale"].model
    assert (kernel.sample_field, kernel.default_fields) == ("z", ("z", "diverging"))
    mcmc = _mcmc(kernel)
    mcmc.run(random.key(0), *location_data, extra_fields=("accept_prob", "potential_energy", "z.b"))
    fields = mcmc.get_extra_fields()
    assert not fields["diverging"].any()
    assert 0.4 < float(fields["accept_prob"].mean()) < 0.95
    np.testing.assert_allclose(jnp.exp(fields["z.b"]), mcmc.get_samples()["b"], rtol=1e-4)
    assert "acc. prob" in kernel.get_diagnostics_str(jax.tree.map(lambda a: a[0], mcmc.last_state._replace(data=None)))
    mcmc.print_summary()


def test_init_params_start_the_chain(location_fit, location_data):
    kernel = SLSLangevin(location_fit)
    state = kernel.init(random.key(0), 10, {"a": jnp.array(1.5), "b": jnp.array(0.3)}, location_data, {})
    np.testing.assert_allclose([state.z["a"], state.z["b"]], [1.5, 0.3], rtol=1e-4)
    far = kernel.init(random.key(0), 10, {"a": jnp.array(500.0), "b": jnp.array(0.3)}, location_data, {})
    assert bool(far.diverging), "outside the trained region"


@pytest.fixture(scope="module")
def counted(location_data):
    """A kernel that fits by itself, run twice, with the number of fits and of new compilations in the second run."""
    fits = []

    class Counting(SLS):
        def run(self, *args, **kwargs):
            fits.append(args)
            return exact_fit(self.model, args[1:], normal_statistics, normal_natural, jnp.array([1.0, 0.7]), jnp.ones(2))

    def model(x):
        CASES["location_scale"].model(x)
        numpyro.deterministic("constant", jnp.array(2.0))

    kernel = SLSLangevin(model, progress_bar=False)
    kernel._sls = Counting(kernel.model)
    with pytest.MonkeyPatch.context() as patch:
        # Without its progress bar, NumPyro compiles its own loop anew in every run, whatever the kernel.
        patch.delenv("CI", raising=False)
        patch.delenv("PYTEST_XDIST_WORKER", raising=False)
        mcmc = MCMC(kernel, num_warmup=100, num_samples=100, num_chains=2, chain_method="vectorized")
    mcmc.run(random.key(0), *location_data)
    first = mcmc.get_samples()
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    )
    mcmc.run(random.key(0), *location_data)
    num_compiled = len(compiled)
    return kernel, mcmc, first, fits, num_compiled


def test_running_again_neither_trains_nor_compiles(counted):
    _, mcmc, first, fits, num_compiled = counted
    assert len(fits) == 1
    assert num_compiled == 0
    np.testing.assert_array_equal(first["a"], mcmc.get_samples()["a"])


@pytest.mark.parametrize("method", [pytest.param(m, marks=pytest.mark.slow) for m in ("sequential", "parallel")])
def test_training_happens_once_and_outside_any_trace(table_fit, location_data, method):
    again = SLSLangevin(CASES["location_scale"].model, progress_bar=False, training=Training(num_simulations=60_000))
    mcmc = _mcmc(again, method=method)
    mcmc.run(random.key(0), *location_data)
    assert again.fit is not None
    np.testing.assert_allclose(again.fit.data.mode, table_fit.data.mode, atol=1e-2)
    assert mcmc.get_samples()["a"].shape == (200,)


@pytest.mark.slow
def test_new_data_with_a_given_fit_are_not_trained_on(location_fit):
    x = CASES["location_scale"].simulate(random.key(11), 900)[0]
    mcmc = _mcmc(SLSLangevin(location_fit), samples=1000)
    mcmc.run(random.key(0), x)
    samples = mcmc.get_samples()
    # the posterior sd of a is b / sqrt(n)
    assert abs(samples["a"].mean() - x.mean()) < 0.3 * x.std() / 30
    np.testing.assert_allclose(samples["a"].std(), x.std() / 30, rtol=0.15)


def test_new_data_with_jitted_arguments_are_refused_by_a_kernel_that_fits(counted, location_data):
    kernel, _, _, _, _ = counted
    mcmc = _mcmc(kernel, chains=1, jit_model_args=True)
    mcmc.run(random.key(0), *location_data)
    with pytest.raises(ValueError, match="jit_model_args"):
        mcmc.run(random.key(0), location_data[0] + 1.0)


def test_the_line_integral_of_the_score_is_the_difference_of_potentials(location_fit):
    posterior, data = location_fit.posterior, location_fit.data
    old, new = (point_at(posterior, data, jnp.array(d)) for d in ([0.5, -1.0], [-0.3, 0.4]))
    move = new.delta - old.delta
    by_score = line_integral(lambda d: score_in_delta(posterior, data, d), old.delta, move)
    np.testing.assert_allclose(by_score, old.potential - new.potential, rtol=1e-2, atol=1e-2)


def test_a_network_without_a_potential_is_sampled(mlp_fit, location_data):
    """The fit is rough (60 000 simulations, implicit); what is tested is that the adjusted chain runs on a score alone."""
    mcmc = _mcmc(SLSLangevin(mlp_fit), samples=500)
    mcmc.run(random.key(0), *location_data, extra_fields=("accept_prob",))
    assert 0.4 < float(mcmc.get_extra_fields()["accept_prob"].mean()) < 0.95
    assert all(np.isfinite(draws).all() and draws.std() > 0 for draws in mcmc.get_samples().values())


def test_deterministic_sites_are_collected(counted, location_data):
    mcmc = _mcmc(SLSLangevin(counted[0].fit), chains=1)
    mcmc.run(random.key(0), *location_data, extra_fields=("~z.a",))
    assert set(mcmc.get_samples()) == {"b", "constant"}


def test_pickling(table_fit, location_data):
    kernel = SLSLangevin(table_fit)
    mcmc = _mcmc(kernel, chains=1)
    mcmc.run(random.key(0), *location_data)
    again = pickle.loads(pickle.dumps(mcmc))
    np.testing.assert_array_equal(again.get_samples()["a"], mcmc.get_samples()["a"])
    again.run(random.key(0), *location_data)
    np.testing.assert_allclose(again.get_samples()["a"], mcmc.get_samples()["a"], rtol=1e-4)


def test_settings_are_checked(table_fit):
    with pytest.raises(TypeError, match="has its settings already"):
        SLSLangevin(table_fit, target="implicit")
    with pytest.raises(ValueError, match="num_steps=0"):
        SLSLangevin(table_fit, num_steps=0)
    with pytest.raises(ValueError, match="target_accept_prob"):
        SLSLangevin(table_fit, target_accept_prob=2.0)


def test_ways_to_sample_agree(location_fit, location_data):
    """Adjusted, annealed, and NUTS on the potential: the same posterior to W1 0.05 sds."""
    draws = {}
    for name, settings in {"adjusted": {}, "annealed": {"annealed": True}}.items():
        mcmc = _mcmc(SLSLangevin(location_fit, **settings), chains=40, samples=1000, warmup=300)
        mcmc.run(random.key(0), *location_data)
        draws[name] = mcmc.get_samples()
    nuts = _mcmc(NUTS(potential_fn=location_fit.potential_fn(*location_data)), chains=10, samples=2000, warmup=300)
    start = {k: jnp.full(10, v) for k, v in location_fit.units.parameters.unflatten(location_fit.data.mode).items()}
    nuts.run(random.key(0), init_params=start)
    z = nuts.get_samples()
    draws["nuts"] = {"a": z["a"], "b": jnp.exp(z["b"])}
    for name in ("annealed", "nuts"):
        assert compare(draws[name], draws["adjusted"]).w1.max() < 0.05, name


@pytest.mark.slow
def test_the_bias_of_unadjusted_steps(location_fit, location_data):
    """On a Gaussian with precision H the stationary covariance is (H - e^2 H^2 / 4)^-1; step halving finds it."""
    size = 0.9
    kernel = SLSLangevin(location_fit, adjusted=False, step_size=size)
    bias = kernel.discretization_bias(random.key(0), *location_data)
    posterior, data = location_fit.posterior, location_fit.data
    h = np.asarray(jax.hessian(lambda d: posterior.potential(data.mode + data.factor @ d, data))(jnp.zeros(2)), float)
    wanted = np.sqrt(np.diag(np.linalg.inv(h - size**2 / 4 * h @ h)) / np.diag(np.linalg.inv(h)))
    np.testing.assert_allclose(bias.sd_ratio, wanted, atol=0.04)
    assert np.all(np.abs(bias.shift) < 0.1)
    assert "0.9" in str(bias)
    smaller = kernel.discretization_bias(random.key(0), *location_data, step_size=0.45)
    assert np.all(smaller.sd_ratio < 1.05)


def test_a_start_far_outside_ends_in_the_same_posterior(location_fit, location_data):
    usual, far = _mcmc(SLSLangevin(location_fit), chains=20, samples=500), _mcmc(SLSLangevin(location_fit), chains=20, samples=500)
    usual.run(random.key(0), *location_data)
    far.run(random.key(0), *location_data, init_params={"a": jnp.full(20, 500.0), "b": jnp.full(20, -30.0)})
    assert not far.get_extra_fields()["diverging"].any()
    assert compare(far.get_samples(), usual.get_samples()).w1.max() < 0.1


def test_new_data_that_leave_the_region_are_refitted_if_asked(location_data, monkeypatch):
    fit = exact_location_fit(*location_data)
    near, far = location_data[0] + 0.2, location_data[0] * 3 + 40
    assert fit.covers(near)
    assert not fit.covers(far)
    asked = []
    monkeypatch.setattr(type(fit), "refit", lambda self, key, *args, **kwargs: asked.append(args) or fit)
    kernel = SLSLangevin(fit, refit=True)
    kernel.init(random.key(0), 10, None, (near,), {})
    assert not asked
    with pytest.warns(UserWarning, match="outside the region"):
        kernel.init(random.key(0), 10, None, (far,), {})
    assert asked[0][0] is far

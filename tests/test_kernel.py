"""What NumPyro asks of a kernel, with an exact score and with a learned one."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.diagnostics import split_gelman_rubin
import numpyro.distributions as dist
from numpyro.distributions import biject_to, constraints
from numpyro.infer import MCMC
import pytest

from numpyro_sls import SLS, SLSLangevin
from tests.cases import CASES, compare, exact_samples
from tests.exact import exact_fit, exact_location_fit, normal_natural, normal_statistics

both = pytest.mark.parametrize("score", ["exact", "learned"])


@pytest.fixture(scope="module")
def exact(location_data):
    return exact_location_fit(*location_data)


@pytest.fixture
def fit(score, request):
    return request.getfixturevalue({"exact": "exact", "learned": "location_fit"}[score])


def _mcmc(kernel, chains=2, method="vectorized", samples=100, warmup=100, **kwargs):
    return MCMC(kernel, num_warmup=warmup, num_samples=samples, num_chains=chains, chain_method=method, progress_bar=False, **kwargs)


@both
@pytest.mark.parametrize("method", ["sequential", "parallel", "vectorized", jax.vmap])
def test_chain_i_is_the_solo_run_with_its_key(fit, location_data, method):
    keys = random.split(random.key(0), 2)
    solo = _mcmc(SLSLangevin(fit), chains=1, samples=5, warmup=3)
    solo.run(keys[1], *location_data)
    mcmc = _mcmc(SLSLangevin(fit), method=method, samples=5, warmup=3)
    mcmc.run(keys, *location_data)
    samples = mcmc.get_samples(group_by_chain=True)
    assert samples["a"].shape == (2, 5)
    # Few draws: rounding differs between the ways to compile, and in the end flips an acceptance.
    np.testing.assert_allclose(samples["a"][1], solo.get_samples()["a"], rtol=5e-3, atol=5e-3)


def test_an_exact_score_gives_the_exact_posterior(exact, location_data):
    mcmc = _mcmc(SLSLangevin(exact), chains=20, samples=1000, warmup=300)
    mcmc.run(random.key(0), *location_data)
    ours = {k: np.asarray(v) for k, v in mcmc.get_samples().items()}
    assert np.all(compare(ours, exact_samples(CASES["location_scale"], location_data)).w1 < 0.06)


@both
def test_the_same_key_gives_the_same_draws(fit, location_data):
    draws = []
    for _ in range(2):
        mcmc = _mcmc(SLSLangevin(fit), samples=20, warmup=20)
        mcmc.run(random.key(3), *location_data)
        draws.append(mcmc.get_samples()["b"])
    np.testing.assert_array_equal(*draws)


@both
def test_thinning_keeps_every_third_draw(fit, location_data):
    every, third = _mcmc(SLSLangevin(fit), samples=30, warmup=20), _mcmc(SLSLangevin(fit), samples=30, warmup=20, thinning=3)
    every.run(random.key(0), *location_data)
    third.run(random.key(0), *location_data)
    kept = third.get_samples(group_by_chain=True)["a"]
    assert kept.shape == (2, 10)
    np.testing.assert_allclose(kept, every.get_samples(group_by_chain=True)["a"][:, 2::3], rtol=5e-3, atol=5e-3)


@both
def test_fields_are_added_and_sites_removed(fit, location_data):
    mcmc = _mcmc(SLSLangevin(fit), samples=20)
    mcmc.run(random.key(0), *location_data, extra_fields=("accept_prob", "step_size", "~z.b"))
    assert set(mcmc.get_samples()) == {"a"}
    assert mcmc.get_extra_fields(group_by_chain=True)["step_size"].shape == (2, 20)
    assert set(mcmc.get_extra_fields()) == {"diverging", "accept_prob", "step_size"}


@both
def test_warm_up_is_done_once_and_a_run_goes_on(fit, location_data):
    mcmc = _mcmc(SLSLangevin(fit), samples=10, warmup=40)
    mcmc.warmup(random.key(0), *location_data, collect_warmup=True)
    assert mcmc.get_samples()["a"].shape == (80,)
    mcmc.run(random.key(1), *location_data)
    size, last = mcmc.last_state.step_size, mcmc.get_samples(group_by_chain=True)["a"][:, -1]
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(mcmc.post_warmup_state.rng_key, *location_data)
    np.testing.assert_array_equal(mcmc.last_state.step_size, size)
    assert np.asarray(mcmc.last_state.i).tolist() == [60, 60]
    first = mcmc.get_samples(group_by_chain=True)["a"][:, 0]
    assert np.all(np.abs(first - last) < 6 * np.asarray(fit.data.factor)[0, 0]), "goes on from where it was"


@pytest.mark.parametrize("score", ["exact", pytest.param("learned", marks=pytest.mark.slow)])
def test_jitted_arguments_take_new_data_of_the_same_shape(fit, location_data):
    mcmc = _mcmc(SLSLangevin(fit), samples=300, jit_model_args=True)
    mcmc.run(random.key(0), *location_data)
    before = mcmc.get_samples()["a"].mean()
    moved = location_data[0] + 0.3
    mcmc.run(random.key(0), moved)
    np.testing.assert_allclose(mcmc.get_samples()["a"].mean() - before, 0.3, atol=0.05)


@both
def test_a_whole_run_inside_jit(fit, location_data):
    @jax.jit
    def run(key):
        mcmc = _mcmc(SLSLangevin(fit), chains=1, samples=10, warmup=5)
        mcmc.run(key, *location_data)
        return mcmc.get_samples()["a"]

    outside = _mcmc(SLSLangevin(fit), chains=1, samples=10, warmup=5)
    outside.run(random.key(0), *location_data)
    np.testing.assert_allclose(run(random.key(0)), outside.get_samples()["a"], rtol=5e-3, atol=5e-3)


@both
def test_a_progress_bar_tells_step_size_and_acceptance(fit, location_data, capsys, monkeypatch):
    for name in ("CI", "PYTEST_XDIST_WORKER"):  # where NumPyro shows none
        monkeypatch.delenv(name, raising=False)
    mcmc = MCMC(SLSLangevin(fit), num_warmup=10, num_samples=10, progress_bar=True)
    mcmc.run(random.key(0), *location_data)
    shown = capsys.readouterr().err
    assert "step size" in shown
    assert "acc. prob" in shown


@both
def test_thousands_of_short_chains(fit, location_data):
    mcmc = _mcmc(SLSLangevin(fit), chains=2000, samples=5, warmup=60)
    mcmc.run(random.key(0), *location_data)
    few = _mcmc(SLSLangevin(fit), chains=4, samples=3000, warmup=300)
    few.run(random.key(1), *location_data)
    for name in "ab":
        many, long = (np.asarray(m.get_samples()[name]) for m in (mcmc, few))
        assert abs(many.mean() - long.mean()) < 0.1 * long.std()
        assert abs(many.std() / long.std() - 1) < 0.06


@pytest.mark.parametrize("method", ["sequential", "vectorized", jax.vmap])
def test_a_run_whose_draws_leave_the_region_says_so(location_data, method):
    narrow = exact_fit(
        CASES["location_scale"].model, location_data, normal_statistics, normal_natural, jnp.array([4.0, 0.7]), jnp.full(2, 0.1)
    )
    mcmc = _mcmc(SLSLangevin(narrow), method=method)
    with pytest.warns(UserWarning, match="of the draws after warm-up") as caught:
        mcmc.run(random.key(0), *location_data)
    assert mcmc.get_extra_fields()["diverging"].mean() > 0.05
    assert len([w for w in caught if "of the draws" in str(w.message)]) == (2 if method == "sequential" else 1)  # each run its own
    assert "refit=True" in str(caught[0].message)


def test_a_run_inside_the_region_says_nothing(exact, location_data, recwarn):
    _mcmc(SLSLangevin(exact)).run(random.key(0), *location_data)
    assert not [w for w in recwarn if "of the draws" in str(w.message)]


def test_double_precision():
    with jax.enable_x64(True):
        (x,) = CASES["location_scale"].simulate(random.key(3), 200)
        fit = exact_location_fit(x.astype(np.float64))
        mcmc = _mcmc(SLSLangevin(fit), chains=8, samples=1000, warmup=200)
        mcmc.run(random.key(0), x.astype(np.float64))
        a = np.asarray(mcmc.get_samples()["a"])
    assert a.dtype == np.float64
    assert abs(a.mean() - float(x.mean())) < 0.1 * a.std()


COVARIANCE = np.array([[1.0, 0.9998], [0.9998, 1.0]])  # eigenvalues 1.9998 and 0.0002


def correlated(x):
    loc = numpyro.sample("loc", dist.Normal(0, 10).expand([2]).to_event(1))
    with numpyro.plate("units", x.shape[0]):
        numpyro.sample("x", dist.MultivariateNormal(loc, COVARIANCE), obs=x)


def _in_directions(fit, x):
    """Draws of correlated locations along both eigenvectors, with their exact mean and sds."""
    mcmc = _mcmc(SLSLangevin(fit), chains=4, samples=1000, warmup=500)
    mcmc.run(random.key(0), x)
    turn = np.array([[1.0, 1.0], [1.0, -1.0]]) / np.sqrt(2)
    loc = np.asarray(mcmc.get_samples(group_by_chain=True)["loc"])
    return loc @ turn, np.asarray(x).mean(0) @ turn, np.sqrt(np.array([1.9998, 0.0002]) / len(x))


@pytest.mark.slow
def test_a_condition_number_of_ten_thousand_learned():
    x = random.multivariate_normal(random.key(1), jnp.zeros(2), jnp.asarray(COVARIANCE), (100,))
    with pytest.warns(UserWarning, match="tractable"):
        draws, mean, sd = _in_directions(SLS(correlated).run(random.key(0), x, progress_bar=False), x)
    assert split_gelman_rubin(draws).max() < 1.01
    np.testing.assert_allclose(draws.std((0, 1)), sd, rtol=0.1)
    assert np.all(np.abs(draws.mean((0, 1)) - mean) < 0.15 * sd)


def test_a_condition_number_of_ten_thousand():
    precision = jnp.asarray(np.linalg.inv(COVARIANCE), jnp.float32)
    x = random.multivariate_normal(random.key(1), jnp.zeros(2), jnp.asarray(COVARIANCE), (100,))
    fit = exact_fit(
        correlated,
        (x,),
        lambda x: jnp.concatenate([x, jnp.ones_like(x[:, :1])], axis=1),
        lambda t: jnp.append(precision @ t, -0.5 * t @ precision @ t),
        jnp.zeros(2),
        jnp.ones(2),
    )
    draws, mean, sd = _in_directions(fit, x)
    assert split_gelman_rubin(draws).max() < 1.01
    np.testing.assert_allclose(draws.std((0, 1)), sd, rtol=0.08)
    assert np.all(np.abs(draws.mean((0, 1)) - mean) < 0.1 * sd)


def categories(x):
    probs = numpyro.sample("probs", dist.Dirichlet(jnp.ones(3)))
    with numpyro.plate("units", x.shape[0]):
        numpyro.sample("x", dist.Multinomial(1, probs), obs=x)


def _on_the_edge(fit, x):
    mcmc = _mcmc(SLSLangevin(fit, num_steps=16), chains=4, samples=1000, warmup=500)
    mcmc.run(random.key(0), x)
    return np.asarray(mcmc.get_samples(group_by_chain=True)["probs"])


NEVER_THE_THIRD = jnp.repeat(jnp.eye(3)[:2], jnp.array([60, 40]), axis=0, total_repeat_length=100)


@pytest.mark.slow
def test_the_edge_of_a_simplex_learned():
    with pytest.warns(UserWarning, match="tractable"):
        draws = _on_the_edge(SLS(categories).run(random.key(0), NEVER_THE_THIRD, progress_bar=False), NEVER_THE_THIRD)
    assert split_gelman_rubin(draws).max() < 1.01
    exact = np.asarray(random.dirichlet(random.key(2), jnp.array([61.0, 41.0, 1.0]), (100_000,)))
    assert np.all(compare({"probs": draws.reshape(-1, 3)}, {"probs": exact}).w1 < 0.2)


def test_the_edge_of_a_simplex():
    """A category that never occurred: Dirichlet(61, 41, 1)."""
    x = NEVER_THE_THIRD
    probs = biject_to(constraints.simplex)
    fit = exact_fit(categories, (x,), lambda x: x, lambda t: jnp.log(probs(t)), jnp.array([0.0, 3.0]), jnp.array([1.0, 3.0]))
    draws = _on_the_edge(fit, x)
    assert split_gelman_rubin(draws).max() < 1.01
    exact = np.asarray(random.dirichlet(random.key(2), jnp.array([61.0, 41.0, 1.0]), (100_000,)))
    assert np.all(compare({"probs": draws.reshape(-1, 3)}, {"probs": exact}).w1 < 0.1)

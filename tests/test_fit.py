"""Fits against exact posteriors and exact scores."""

from dataclasses import replace
import warnings

import flax.linen as nn
import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
import pytest

from numpyro_sls import SLS, FromRestarts, SeparablePotential, Simulated, SLSLangevin, Training, WorthUnits
from numpyro_sls import fit as fit_module
from numpyro_sls.notices import warn_of_resemblance
from tests.cases import CASES, compare, exact_samples


def _posterior(fit, args, num_samples=2000):
    mcmc = MCMC(SLSLangevin(fit), num_warmup=300, num_samples=num_samples, num_chains=4, chain_method="vectorized", progress_bar=False)
    mcmc.run(random.key(1), *args)
    return {k: np.asarray(v) for k, v in mcmc.get_samples().items()}


@pytest.mark.parametrize("name", ["location_scale", pytest.param("mixture", marks=pytest.mark.slow)])
def test_posterior_is_within_the_bars(name, request):
    """W1 at most 0.15 exact sds, sd ratio within 0.9-1.1: implicit in every coordinate, and joint in every one."""
    short = name.split("_")[0]
    fit, args = request.getfixturevalue(f"{short}_fit"), request.getfixturevalue(f"{short}_data")
    distance = compare(_posterior(fit, args), exact_samples(CASES[name], args))
    assert distance.w1.max() <= 0.15, distance
    assert 0.9 <= distance.sd_ratio.min() <= distance.sd_ratio.max() <= 1.1, distance


class Groups(nn.Module):
    """Of three groups of eight numbers in a row, the mean of each, by weights that they share."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(x.reshape(len(x), 8, 3).swapaxes(1, 2)).reshape(len(x), -1)


def _groups(x):
    loc = numpyro.sample("loc", dist.Normal(0, 1).expand([3]).to_event(1))
    numpyro.sample("x", dist.Normal(jnp.broadcast_to(loc, (8, 3)), 2.0).to_event(2), obs=x)


def _other_groups(rng_key, theta, x):
    order = random.permutation(rng_key, 3)
    return theta[order], x.reshape(-1, 8, 3)[..., order].reshape(x.shape)


def test_a_taught_embedding_and_a_symmetry_learn_a_whole_from_few_simulations():
    """Eight numbers with sd 2 a group: N(2 mean / 3, 1/3), from three thousand data sets of 24 numbers."""
    x = 0.5 + 2 * random.normal(random.key(5), (8, 3))
    fit = SLS(
        _groups,
        units="whole",
        target="implicit",
        localization=None,
        debias=None,
        symmetry=_other_groups,
        network=SeparablePotential(num_features=4, width=8, depth=1, embedding=Groups(), moments=True),
        training=Training(num_simulations=3000, num_thetas=32, num_per_theta=1, num_epochs=20),
    ).run(random.key(0), x, progress_bar=False)
    assert sum(s.num for s in fit.simulations.values()) == 3000
    draws = _posterior(fit, (x,))["loc"]
    off = (draws.mean(0) - 2 * np.asarray(x).mean(0) / 3) * 3**0.5
    assert np.abs(off).max() < 0.25, off
    assert 0.85 < draws.std(0).min() * 3**0.5 <= draws.std(0).max() * 3**0.5 < 1.15, draws.std(0)


def test_a_symmetry_goes_with_the_prior_only():
    with pytest.raises(ValueError, match="localization=None"):
        SLS(_groups, symmetry=_other_groups, target="implicit")
    with pytest.raises(ValueError, match="target='implicit'"):
        SLS(_groups, symmetry=_other_groups, localization=None)


def test_score_of_a_unit_is_the_exact_one(location_fit):
    """x ~ N(a, b) with theta = (a, log b)."""
    theta = location_fit.data.mode
    x = location_fit.units.simulate_x(random.key(7), theta, 4000)
    exact = jax.vmap(jax.grad(lambda t, x: dist.Normal(t[0], jnp.exp(t[1])).log_prob(x[0])), (None, 0))(theta, x)
    error = location_fit.score(theta, x) - exact
    relative = jnp.mean(error**2, axis=0) / jnp.mean(exact**2, axis=0)
    assert relative.max() < 0.02, relative


def test_nuts_on_the_learned_potential_agrees(location_fit, location_data):
    mcmc = MCMC(NUTS(potential_fn=location_fit.potential_fn(*location_data)), num_warmup=300, num_samples=1000, progress_bar=False)
    mcmc.run(random.key(0), init_params={"a": jnp.array(1.0), "b": jnp.array(0.7)})
    ours = _posterior(location_fit, location_data)
    theirs = mcmc.get_samples()
    # about 500 effective draws of NUTS: a standard error of 0.045 sds
    assert abs(theirs["a"].mean() - ours["a"].mean()) < 5 * 0.05 * ours["a"].std()
    assert abs(jnp.exp(theirs["b"]).mean() - ours["b"].mean()) < 5 * 0.05 * ours["b"].std()


def test_what_a_fit_reports(location_fit):
    assert location_fit.joint.valid.tolist() == [False, False]
    stages = location_fit.simulations
    assert {"localization", "round 1", "training", "debiasing", "debiasing near the posterior"} <= set(stages)
    assert all(s.num_failed == 0 for s in stages.values())
    curve = location_fit.curves["training"]
    assert len(curve.train) == len(curve.held_out) == len(curve.steps)
    assert np.all(location_fit.local_mean.offset_se * 200 <= 0.03)


def test_networks_without_a_potential_say_so(mlp_fit, location_data):
    with pytest.raises(ValueError, match="has a score but no potential"):
        mlp_fit.potential_fn(*location_data)


def test_the_same_key_gives_the_same_fit(table_fit, location_data):
    again = table_fit.sls.run(random.key(0), *location_data, progress_bar=False)
    for a, b in zip(jax.tree.leaves(table_fit.posterior.unit), jax.tree.leaves(again.posterior.unit), strict=True):
        np.testing.assert_array_equal(a, b)


class _StopError(Exception):
    pass


def test_tractable_models_are_told_that_nuts_would_do(monkeypatch):
    def model(x):
        loc = numpyro.sample("loc", dist.Normal(0, 3))
        with numpyro.plate("units", x.shape[0]):
            numpyro.sample("x", dist.Normal(loc, 1), obs=x)

    def stop(*_):
        raise _StopError  # the fit itself is not what is tested

    monkeypatch.setattr("numpyro_sls.fit.prior_moments", stop)
    with pytest.warns(UserWarning, match="NUTS") as caught, pytest.raises(_StopError):
        SLS(model).run(random.key(0), 1 + random.normal(random.key(0), (50,)), progress_bar=False)
    assert sum("NUTS" in str(w.message) for w in caught) == 1


def test_failed_simulations_are_counted():
    def model(x):
        loc = numpyro.sample("loc", dist.Normal(0, 3))
        with numpyro.plate("units", x.shape[0]):
            z = numpyro.sample("z", dist.Normal())
            numpyro.sample("x", Simulated(jnp.where(z > 2.0, jnp.nan, loc + z)), obs=x)

    x = 1 + random.normal(random.key(0), (50,)).clip(-1.8, 1.8)  # within reach of the model
    fit = SLS(model, localization=None, debias=None, training=Training(num_simulations=60_000)).run(random.key(0), x, progress_bar=False)
    spent = fit.simulations["training"]
    assert abs(spent.num_failed / spent.num - 0.0228) < 5 * np.sqrt(0.0228 / spent.num)

    # A stream keeps the units that the focus chooses, never a failed one; those count all the same.
    learner, proposal, key = replace(fit.conditioner.learner, training=Training()), fit.proposal, random.key(1)
    focus = learner.focus_terms(key, proposal.sample(key, 256), jnp.ones(1), "diagnosis")
    batch, failed = learner.next_batch(key, proposal, None, focus)
    num = Training().num_thetas * learner.num_simulated_per_theta
    assert batch.ok.all()
    assert batch.ok.size < num
    assert abs(failed / num - 0.0228) < 5 * np.sqrt(0.0228 / num)


def _two_level(x):
    loc = numpyro.sample("loc", dist.Normal(0, 3))
    with numpyro.plate("units", x.shape[0]):
        z = numpyro.sample("z", dist.Normal(loc, 1))
        numpyro.sample("x", dist.Normal(z, 1), obs=x)


@pytest.mark.slow
@pytest.mark.parametrize("shift", [0.0, 5.0])
def test_a_region_that_the_posterior_leaves_is_moved(shift, monkeypatch, recwarn):
    """The paper's proposal, put some of its sds off: the score is trained again around the mode, and that is said and counted."""
    monkeypatch.setattr(fit_module, "DEFAULT_BUDGET", {"first rounds": 0, "training": 500_000, "debiasing": 50_000})
    localize = fit_module.localize

    def off(*args):
        found, resemblance = localize(*args)
        return found._replace(centre=found.centre + shift * jnp.sqrt(jnp.diag(found.covariance))), resemblance

    monkeypatch.setattr(fit_module, "localize", off)
    x = 1 + np.sqrt(2) * random.normal(random.key(0), (100,))
    fit = SLS(_two_level, proposal=FromRestarts(widen=2.0)).run(random.key(0), x, progress_bar=False)
    said = [str(w.message) for w in recwarn if "training once more" in str(w.message)]
    again = [k for k in fit.simulations if k.startswith("training, re-centred")]
    assert len(said) == len(again) <= 2
    assert bool(said) == (shift > 0)
    theta = fit.data.mode
    # the exact posterior is N(sum x / (n + 2/9), 2 / (n + 2/9)); a short training under a narrow proposal leaves half an sd
    assert abs(float(theta[0]) - float(x.sum()) / (100 + 2 / 9)) < np.sqrt(2 / 100)


def test_a_mode_whose_simulations_do_not_look_like_the_data_is_reported():
    with pytest.warns(UserWarning, match="3.0 times as far from the data"):
        warn_of_resemblance(3.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_resemblance(1.2)


def test_what_localization_did_can_be_asked(location_fit):
    found = location_fit.localization
    assert found.method == "gauss-newton"
    assert set(found.sites) == {"z", "x"}
    assert location_fit.simulations["localization"].num >= found.num_simulated
    assert f"{len(found.thetas)} restarts kept" in str(found)


@pytest.mark.slow
def test_a_numpy_simulator_is_fitted():
    """Random numbers and all behind a callback: no derivative, no joint score, and the posterior of a normal sample."""

    def simulate(loc, scale, seed, shape):
        rng = np.random.default_rng(np.asarray(seed, np.uint32))
        return (np.asarray(loc) + np.asarray(scale) * rng.normal(size=shape)).astype(np.float32)

    def model(x):
        loc = numpyro.sample("loc", dist.Normal(0, 5))
        scale = numpyro.sample("scale", dist.LogNormal(0, 1))
        with numpyro.plate("units", x.shape[0]) as index:
            seed = jax.random.key_data(numpyro.prng_key())
            shape = jax.ShapeDtypeStruct(index.shape, jnp.float32)
            y = jax.pure_callback(lambda *args: simulate(*args, index.shape), shape, loc, scale, seed, vmap_method="sequential")
            numpyro.sample("x", Simulated(y), obs=x)

    x = 1 + 2 * random.normal(random.key(3), (200,))
    fit = SLS(model).run(random.key(0), x, progress_bar=False)
    assert fit.localization.method == "search"
    assert not fit.joint.valid.any()
    draws = _posterior(fit, (x,), 1000)
    # the prior is wide: the posterior is nearly N(mean, s^2 / n), and of log scale N(log s, 1 / (2 n))
    assert abs(draws["loc"].mean() - x.mean()) < 0.15 * x.std() / np.sqrt(200)
    assert abs(np.log(draws["scale"]).mean() - np.log(x.std())) < 0.15 / np.sqrt(400)
    assert 0.9 < draws["loc"].std() / (x.std() / np.sqrt(200)) < 1.1


def test_settings_are_checked_before_anything_runs():
    with pytest.raises(ValueError, match="'explicit' is not known"):
        SLS(CASES["gaussian"].model, target="explicit")
    with pytest.raises(ValueError, match="kappa=-1"):
        SLS(CASES["gaussian"].model, proposal=WorthUnits(kappa=-1.0))
    with pytest.raises(ValueError, match="needs the restarts"):
        SLS(CASES["gaussian"].model, proposal=FromRestarts(), localization=None)

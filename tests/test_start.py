"""First weights that are solved for, and rounds of learning from the prior on, against exact posteriors."""

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
import pytest

from numpyro_sls import SLS, FromRestarts, Localization, Simulated, SLSLangevin, Training, WorthUnits
from numpyro_sls.metrics import w1
from numpyro_sls.start import StartSums, choose

NOISE = 0.3


def location(x):
    loc = numpyro.sample("loc", dist.Normal(0, 2).expand([3]).to_event(1))
    e = numpyro.sample("e", dist.Normal().expand([3]).to_event(1))
    numpyro.sample("x", Simulated(loc + NOISE * e, event_dim=1), obs=x)


@pytest.fixture(scope="module")
def fit():
    """One observation, 4000 simulations in all, two rounds from the prior on."""
    sls = SLS(
        location,
        params=["loc"],
        units="whole",
        target="implicit",
        localization=Localization(method="rounds"),
        proposal=WorthUnits(num_rounds=2),
        debias=None,
        training=Training(num_simulations=4000, num_thetas=32, num_per_theta=1, num_epochs=20),
    )
    return sls.run(random.key(0), jnp.array([2.5, -1.0, 0.4]), progress_bar=False)


def test_a_gaussian_score_is_solved_for_with_few_simulations(fit):
    theta = fit.data.mode
    x = fit.units.simulate_x(random.key(1), theta, 500)
    exact = (x - theta) / NOISE**2
    relative = jnp.mean((fit.score(theta, x) - exact) ** 2) / jnp.mean(exact**2)
    assert relative < 0.05, relative
    assert sum(s.num for s in fit.simulations.values()) <= 4000


def test_rounds_end_around_the_posterior(fit):
    wide, narrow = 2.0, NOISE
    sd = (1 / wide**2 + 1 / narrow**2) ** -0.5
    mean = np.array([2.5, -1.0, 0.4]) * sd**2 / narrow**2
    spread = np.sqrt(np.diag(fit.proposal.covariance))
    assert np.all(np.abs(np.asarray(fit.proposal.mean) - mean) < spread)
    assert np.all(spread < 1.3), "much narrower than the prior"
    mcmc = MCMC(SLSLangevin(fit), num_warmup=300, num_samples=1000, num_chains=4, chain_method="vectorized", progress_bar=False)
    mcmc.run(random.key(1), jnp.array([2.5, -1.0, 0.4]))
    exact = mean + sd * np.random.default_rng(0).normal(size=(20_000, 3))
    assert np.all(w1(np.asarray(mcmc.get_samples()["loc"]), exact) < 0.25)


def test_what_the_simulations_cannot_carry_is_left_out_or_shrunk():
    """Two groups: in the second one only noise."""
    rng, folds, num = np.random.default_rng(0), [], 60
    groups = [(np.arange(1), np.arange(1)), (np.arange(1, 41), np.arange(1))]
    for _ in range(5):
        f = np.concatenate([np.ones((num, 1)), rng.normal(size=(num, 40))], axis=1)
        y = 2.0 + rng.normal(size=num)
        folds.append(StartSums(f.T @ f / num, f.T @ y / num))
    found = choose(folds, groups, (41, 1))
    assert abs(found.solved[0, 0] - 2.0) < 5 / np.sqrt(5 * num)
    assert np.sum(found.solved[1:] ** 2) < 0.02, "of least squares it would be 40 / 300"


def test_rounds_are_not_for_restarts():
    with pytest.raises(ValueError, match="needs the restarts"):
        SLS(location, proposal=FromRestarts(), localization=Localization(method="rounds"))

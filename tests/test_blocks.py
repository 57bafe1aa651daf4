"""SLSLangevin as a block of NumPyro's Gibbs, and the learned likelihood inside another model, against exact posteriors."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, Gibbs
import pytest

from numpyro_sls import Simulated, SLSLangevin, Training
from tests.cases import CASES

NUM_GROUPS, EACH = 3, 60
GROUP = np.repeat(np.arange(NUM_GROUPS), EACH)


def hierarchy(x):
    """Group means under a common normal; only the rows are simulated, their noise drawn from a key and so no site."""
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.LogNormal(0, 0.5))
    theta = numpyro.sample("theta", dist.Normal(mu, tau).expand([NUM_GROUPS]).to_event(1))
    with numpyro.plate("rows", x.shape[0]) as row:
        noise = random.normal(numpyro.prng_key(), row.shape)
        numpyro.sample("x", Simulated(theta[jnp.asarray(GROUP)[row]] + noise), obs=x)


def tractable(x):
    """The same with a density."""
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.LogNormal(0, 0.5))
    theta = numpyro.sample("theta", dist.Normal(mu, tau).expand([NUM_GROUPS]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("x", dist.Normal(theta[jnp.asarray(GROUP)], 1), obs=x)


@pytest.mark.slow
def test_a_hierarchy_in_gibbs():
    """Simulator per group by SLSLangevin, hyper-parameters by NUTS; means within 0.2 and sds within 15 % of NUTS on the exact model."""
    x = jnp.asarray([1.0, -0.5, 2.0])[GROUP] + random.normal(random.key(1), GROUP.shape)
    kernel = Gibbs([(SLSLangevin(hierarchy, progress_bar=False), ["theta"]), (NUTS(hierarchy), ["mu", "tau"])])
    mcmc = MCMC(kernel, num_warmup=500, num_samples=4000, progress_bar=False)
    mcmc.run(random.key(0), x)
    exact = MCMC(NUTS(tractable), num_warmup=500, num_samples=4000, progress_bar=False)
    exact.run(random.key(0), x)
    ours, theirs = mcmc.get_samples(), exact.get_samples()
    for name in ("mu", "tau", "theta"):
        sd = np.asarray(theirs[name]).std(0)
        assert np.all(np.abs(np.asarray(ours[name]).mean(0) - np.asarray(theirs[name]).mean(0)) < 0.2 * sd), name
        np.testing.assert_allclose(np.asarray(ours[name]).std(0), sd, rtol=0.15)


def test_a_simulator_that_sees_another_block_is_refused():
    def direct(x):
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        theta = numpyro.sample("theta", dist.Normal(mu, 1))
        with numpyro.plate("rows", x.shape[0]) as row:
            numpyro.sample("x", Simulated(theta + mu + random.normal(numpyro.prng_key(), row.shape)), obs=x)

    kernel = Gibbs(
        [(SLSLangevin(direct, progress_bar=False, training=Training(num_simulations=50_000)), ["theta"]), (NUTS(direct), ["mu"])]
    )
    with pytest.raises(ValueError, match=r"depend on .'mu'. directly"):
        MCMC(kernel, num_warmup=5, num_samples=5, progress_bar=False).run(random.key(0), jnp.zeros(20))


def test_outside_gibbs_a_simulated_site_still_has_no_density():
    with pytest.raises(NotImplementedError, match="no density"):
        MCMC(NUTS(hierarchy), num_warmup=5, num_samples=5, progress_bar=False).run(random.key(0), jnp.zeros(len(GROUP)))


def test_a_fit_cannot_be_a_block(table_fit):
    with pytest.raises(ValueError, match="cannot be a block"):
        SLSLangevin(table_fit).wrap_model(lambda model: model)


def test_the_learned_likelihood_in_another_model(location_fit, location_data):
    """Under the same prior NUTS with the factor gives the posterior of the kernel; its gradient is the learned score."""

    def other():
        a = numpyro.sample("a", dist.Normal(0, 3))
        b = numpyro.sample("b", dist.LogNormal(0, 1))
        numpyro.factor("likelihood", location_fit.log_likelihood({"a": a, "b": b}, *location_data))

    mcmc = MCMC(NUTS(other), num_warmup=300, num_samples=2000, progress_bar=False)
    mcmc.run(random.key(0))
    x = np.asarray(location_data[0])
    assert abs(float(mcmc.get_samples()["a"].mean()) - x.mean()) < 0.3 * x.std() / np.sqrt(len(x))
    with pytest.raises(ValueError, match=r"needs a value for \['b'\]"):
        location_fit.log_likelihood({"a": 1.0}, *location_data)


@pytest.mark.parametrize("which", ["location_fit", "mlp_fit"])
def test_its_gradient_is_the_learned_score(which, request, location_data):
    fit = request.getfixturevalue(which)
    theta = fit.data.mode + 0.3 * fit.data.factor.sum(1)
    slope = jax.grad(lambda t: fit.posterior.log_likelihood(t, fit.data))(theta)
    np.testing.assert_allclose(slope, fit.posterior.likelihood_score(theta, fit.data), rtol=1e-3, atol=1e-2)


def test_logdensity_is_minus_the_potential(location_fit, location_data):
    z = {"a": jnp.array(0.9), "b": jnp.array(0.1)}
    assert float(location_fit.logdensity_fn(*location_data)(z)) == -float(location_fit.potential_fn(*location_data)(z))
    assert CASES["location_scale"].model is location_fit.sls.model

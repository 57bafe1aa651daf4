"""The linear corrections near the posterior, on units whose true score is written down: x = delta + z, s* = x - delta."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

from numpyro_sls.marginals import no_marginals
from numpyro_sls.readout import ReadoutUnits, make_bend_sums, make_readout_sums, solve_bend, solve_readout
from numpyro_sls.score import DataTerms, local_log_likelihood, no_local

NUM_THETAS, NUM_UNITS = 256, 64


def _units(score_fn):
    """Two features, x and 1, and a score that is wrong."""

    def units(keys, delta, context):
        x = delta[:, :1] + jax.vmap(lambda key: random.normal(key, (NUM_UNITS,)))(keys)
        score = score_fn(x, delta)[..., None]
        features = jnp.stack([x, jnp.ones_like(x)], axis=-1)
        return ReadoutUnits(delta, features, score, jnp.zeros_like(score), jnp.ones_like(x)), jnp.zeros((), int)

    return units


def test_the_readout_finds_what_is_missing_at_the_mode():
    sums_fn = make_readout_sums(_units(lambda x, delta: 0.3 * x - delta), NUM_THETAS, 1)
    batches = [sums_fn(random.key(i), jnp.asarray(0.5), None)[0] for i in range(30)]
    total = jax.tree.map(lambda *a: np.sum(a, axis=0), *batches)
    found = solve_readout([total], np.zeros(1, bool), 1)
    np.testing.assert_allclose(found.readout[:, 0], [0.7, 0.0], atol=0.05)


def test_the_bend_finds_how_the_score_changes_beside_the_mode():
    sums_fn = make_bend_sums(_units(lambda x, delta: x), NUM_THETAS, 1, 2)
    batches = [jax.tree.map(np.asarray, sums_fn(random.key(i), jnp.asarray(1.0), jnp.asarray(0.5), None)[0]) for i in range(40)]
    np.testing.assert_allclose(solve_bend(batches, 1)[:, 0, 0], [0.0, -1.0], atol=0.05)


def test_the_local_score_with_a_bend_is_the_gradient_of_the_local_likelihood():
    d, key = 3, random.key(0)
    factor = jnp.eye(d) + 0.1 * random.normal(key, (d, d))
    bend = random.normal(key, (2, d, d))
    local = no_local(jnp.full(d, 0.2), factor, no_marginals(0, d), 4)
    local = local._replace(readout=random.normal(key, (4, d)), slope=jnp.eye(d), bend=bend + bend.swapaxes(1, 2))
    features, eta = random.normal(key, (5, 4)), jnp.array([0.3, -0.5, 0.9])
    none, ends, one = jnp.zeros(0), jnp.full(d, jnp.inf), jnp.ones(())
    frame = (jnp.zeros(d), jnp.eye(d), jnp.eye(d))
    data = DataTerms(none, none, features.sum(0), one * len(features), local, *frame, -ends, ends, one, one)
    gradient = jax.grad(local_log_likelihood)(eta, data)
    np.testing.assert_allclose(local.units(eta, features).sum(0), gradient, rtol=1e-4, atol=1e-4)
    assert np.abs(gradient - jax.grad(local_log_likelihood)(eta, data._replace(local=local._replace(bend=None)))).max() > 0.1

"""The paper's models: what the NumPyro model simulates at the truth is what `simulate_data` does."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
import pytest

from numpyro_sls.model import trace_model
from numpyro_sls.models import epidemic, gnk, mrna, queue

QUEUE = {"theta1": queue.TRUTH["theta1"], "width": queue.TRUTH["theta2"] - queue.TRUTH["theta1"], "theta3": queue.TRUTH["theta3"]}


def _moments(x):
    x = np.asarray(x, np.float64)
    return np.concatenate([x.mean(0), (x**2).mean(0)]), np.concatenate([x.var(0), (x**2).var(0)]) / len(x)


@pytest.mark.parametrize(
    ("module", "truth", "n"), [(queue, QUEUE, 4000), (gnk, gnk.TRUTH, 4000), (mrna, mrna.TRUTH, 1000)], ids=["queue", "gnk", "mrna"]
)
def test_model_simulates_its_data(module, truth, n):
    data = module.simulate_data(random.key(0), n)

    @jax.jit
    def simulate(key):
        with handlers.seed(rng_seed=key), handlers.substitute(data=truth), handlers.uncondition(), handlers.trace() as trace:
            module.model(data)
        return trace["x"]["value"]

    (a, var_a), (b, var_b) = _moments(data.reshape(n, -1)), _moments(simulate(random.key(1)).reshape(n, -1))
    assert np.max(np.abs(a - b) / np.sqrt(var_a + var_b)) < 5


def test_epidemic_is_one_whole():
    s = epidemic.simulate_data(random.key(0))
    traced = trace_model(epidemic.model, (s,), **epidemic.SETTINGS)
    assert traced.unit_plate is None
    assert traced.parameters == ("log_beta",)
    theta = {"log_beta": jnp.log(epidemic.TRUTH[5])}
    keys = random.split(random.key(1), 200)
    simulated = jax.jit(jax.vmap(lambda k: traced.run(k, jnp.zeros(1, jnp.int32), theta).features[0]))(keys)
    data = jax.jit(jax.vmap(lambda k: epidemic.simulate_data(k).reshape(-1)))(random.split(random.key(2), 200))
    (a, var_a), (b, var_b) = _moments(simulated), _moments(data)
    assert np.max(np.abs(a - b) / np.sqrt(var_a + var_b + 1e-12)) < 5

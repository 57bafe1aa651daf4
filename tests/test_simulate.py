"""The one door of simulations: what it makes does not depend on how much of it is made at once."""

import jax
from jax import random
import numpy as np

from numpyro_sls import SLS
from numpyro_sls import simulate as simulate_module
from numpyro_sls.simulate import Simulator
from tests.cases import CASES


def test_simulating_in_pieces_gives_the_same_units(monkeypatch):
    case = CASES["mixture"]
    units, _ = SLS(case.model).units_of(case.simulate(random.key(0), 50), {})
    thetas = jax.vmap(units.parameters.sample_prior)(random.split(random.key(1), 7))
    whole = jax.jit(lambda t: Simulator(units).batch(random.key(2), t, 3))(thetas)
    monkeypatch.setattr(simulate_module, "MEMORY", 2 * 3 * units.size)  # two thetas at once
    pieces = jax.jit(lambda t: Simulator(units).batch(random.key(2), t, 3))(thetas)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), whole, pieces)


def test_the_size_of_a_unit_is_what_the_model_draws_for_it():
    case = CASES["mixture"]
    few, many = (SLS(case.model).units_of(case.simulate(random.key(0), n), {})[0] for n in (20, 50))
    assert few.size == many.size == sum(1 for k in (*few.traced.nuisances, *few.traced.observations))

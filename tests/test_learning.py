"""What an embedding is taught, on a model whose joint score is known."""

import flax.linen as nn
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_sls import SLS, SeparablePotential, Training
from numpyro_sls.joint import JointValidity
from numpyro_sls.proposal import worth_units
from tests.cases import CASES


@pytest.mark.parametrize(("target", "num"), [("blend", 6), ("implicit", 4)])
def test_targets_of_an_embedding_are_moments_and_the_joint_score(target, num):
    """x ~ N(loc, sd): eta, its square and, unless the model is a black box, the score of a unit; all with mean zero and sd one."""
    case = CASES["gaussian"]
    sls = SLS(case.model, target=target, network=SeparablePotential(embedding=nn.Dense(3), moments=True), training=Training(num_thetas=8))
    units, _ = sls.units_of(case.simulate(random.key(0), 50), {})
    joint = JointValidity(np.array([True, True]), np.array([False, False]), np.zeros(2))
    learner = sls.learner_of(units, None, joint, {})
    proposal = worth_units(jnp.zeros(2), jnp.diag(jnp.array([25.0, 1.0])), jnp.eye(2), 5.0, joint.valid)
    pilot = learner.draw(random.key(1), proposal, 2000, "pilot")
    context, weights = learner.prepare(random.key(2), pilot, proposal)
    assert weights["moments"]["params"]["bias"].shape == (num,)
    found = np.stack([learner.moment_targets(t, s, context) for t, s in zip(pilot.theta[:500], pilot.joint_score[:500], strict=True)])
    assert found.shape == (500, 16, num)
    # 500 parameters; squares have an sd of the mean of the same size
    np.testing.assert_allclose(found.mean((0, 1)), 0, atol=5 / 500**0.5)
    np.testing.assert_allclose(found.std((0, 1)), 1, atol=0.3)
    np.testing.assert_allclose(found[..., 2:4], (found[..., :2] ** 2 - 1) / 2**0.5, rtol=1e-4, atol=1e-5)

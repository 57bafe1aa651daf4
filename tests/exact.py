"""Fits whose score is written down: what a kernel does with one is then its own doing."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from numpyro_sls import SLS, SLSFit
from numpyro_sls.conditioning import Conditioner
from numpyro_sls.inputs import Standardizer
from numpyro_sls.joint import JointValidity
from numpyro_sls.networks import Network
from numpyro_sls.preparation import fingerprint
from numpyro_sls.proposal import Proposal
from numpyro_sls.score import PosteriorScore, UnitScore


@dataclass(frozen=True)
class Family(Network):
    """An exponential family, log p(x | theta) = c(x) . phi(theta); the constant is among the statistics."""

    statistics: Callable[[Array], Array]  # of a unit's numbers, (m, p) to (m, k)
    natural: Callable[[Array], Array]  # of theta, (d,) to (k,)
    has_potential = True

    def summary(self, weights, x, dim):
        p = x.shape[1] // 4
        return self.statistics(jnp.sinh(x[:, p : 2 * p]) / 2)  # undo the standardizer's second view

    def basis(self, weights, theta):
        return self.natural(weights["mean"] + weights["factor"] @ theta)

    def score(self, weights, theta, x):
        return self.summary(weights, x, len(theta)) @ jax.jacfwd(lambda t: self.basis(weights, t))(theta)


def exact_fit(model: Callable, args: tuple, statistics: Callable, natural: Callable, centre: Array, width: Array) -> SLSFit:
    """A fit of these data with the true score, its region N(centre, width^2)."""
    sls = SLS(model, network=Family(statistics, natural), debias=None, focus=None, smoothing=False)
    units, _ = sls.units_of(args, {})
    p, d = units.observed().shape[1], units.parameters.dim
    joint = JointValidity(np.zeros(d, bool), np.ones(d, bool), np.zeros(d))  # nothing was trained on it
    conditioner = Conditioner(sls.learner_of(units, None, joint, {}))
    factor = jnp.diag(jnp.broadcast_to(jnp.asarray(width, float), (d,)))
    proposal = Proposal(jnp.asarray(centre, float), factor, jnp.linalg.inv(factor))
    standardizer = Standardizer(jnp.zeros(p), jnp.ones(p), jnp.zeros((0, 0)), jnp.zeros((2, 0), int))
    unit = UnitScore({"mean": proposal.mean, "factor": factor}, proposal, standardizer, None)
    learner = conditioner.learner
    found = conditioner(jax.random.key(0), unit, learner.observed, units.num_units, None, 0)
    posterior = PosteriorScore(learner.learned, unit, units.parameters.log_prior)
    return SLSFit(
        sls, units, proposal, posterior, found.data, fingerprint((args, {})), None, joint, None, None, None, {}, {}, {}, conditioner
    )


def normal_statistics(x: Array) -> Array:
    return jnp.concatenate([x, x**2, jnp.ones_like(x)], axis=1)


def normal_natural(theta: Array) -> Array:
    """Of a normal with mean theta_1 and log sd theta_2."""
    a, precision = theta[0], jnp.exp(-2 * theta[1])
    return jnp.stack([a * precision, -0.5 * precision, -0.5 * a**2 * precision - theta[1]])


def exact_location_fit(x: Array) -> SLSFit:
    """The case "location_scale"."""
    from tests.cases import CASES

    return exact_fit(CASES["location_scale"].model, (x,), normal_statistics, normal_natural, jnp.array([1.0, 0.7]), jnp.ones(2))

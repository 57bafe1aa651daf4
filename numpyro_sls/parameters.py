"""Named parameter sites and one flat unconstrained vector theta.

NumPyro's transforms, with one change: a site on an interval [a, b], which NumPyro takes to the whole line by the logit, is
laid out by the normal quantile, a + (b - a) Phi(theta). A uniform prior is then a standard normal, and a posterior that
leans on an end of the interval has the tail of a normal there instead of an exponential one.
"""

from dataclasses import dataclass, replace

import jax
from jax import Array
import jax.numpy as jnp
from jax.scipy.special import log_ndtr, ndtri
from jaxtyping import Float
import numpy as np
from numpyro.distributions import biject_to, constraints

from numpyro_sls.model import TracedModel, pruned

__all__ = ["Parameters", "bare", "make_parameters"]


@dataclass(frozen=True, eq=False)
class Parameters:
    """The parameter sites of a traced model as a vector, and their prior there."""

    traced: TracedModel
    shapes: dict[str, tuple[int, ...]]  # unconstrained
    normal: frozenset[str] = frozenset()  # sites on an interval, laid out by the normal quantile
    prune: bool = False  # the model holds code without a derivative, which the prior does not need

    @property
    def dim(self) -> int:
        return sum(int(np.prod(s)) for s in self.shapes.values())

    @property
    def labels(self) -> list[str]:
        """A name for every coordinate of theta, as ArviZ writes them."""
        labels = []
        for name, shape in self.shapes.items():
            labels += [name + (f"[{', '.join(map(str, i))}]" if shape else "") for i in np.ndindex(*shape)]
        return labels

    def flatten(self, unconstrained: dict[str, Array]) -> Float[Array, " d"]:
        """theta from the sites in NumPyro's unconstrained space."""
        return jnp.concatenate([jnp.ravel(_from_logit(unconstrained[k]) if k in self.normal else unconstrained[k]) for k in self.shapes])

    def unflatten(self, theta: Float[Array, " d"]) -> dict[str, Array]:
        """The sites in NumPyro's unconstrained space from theta."""
        return {k: _to_logit(v) if k in self.normal else v for k, v in self._split(theta).items()}

    def log_jacobian(self, theta: Float[Array, " d"]) -> Float[Array, ""]:
        """Log determinant of the map from theta to NumPyro's unconstrained space."""
        return sum((_log_slope(v).sum() for k, v in self._split(theta).items() if k in self.normal), jnp.zeros(()))

    def _split(self, theta: Float[Array, " d"]) -> dict[str, Array]:
        out, start = {}, 0
        for name, shape in self.shapes.items():
            size = int(np.prod(shape))
            out[name] = theta[start : start + size].reshape(shape)
            start += size
        return out

    def place(self, name: str, value: Float[Array, ""]) -> Float[Array, ""]:
        """theta of a scalar site at a value; infinite at the ends of its support and beyond."""
        support = bare(self.traced.supports[name])
        low, high = getattr(support, "lower_bound", -jnp.inf), getattr(support, "upper_bound", jnp.inf)
        inside = (value > low) & (value < high)
        # any value inside will do for the branch that is not taken
        middle = biject_to(support)(jnp.zeros(()))
        z = biject_to(support).inv(jnp.where(inside, value, middle))
        theta = _from_logit(z) if name in self.normal else z
        return jnp.where(inside, theta, jnp.where(value <= low, -jnp.inf, jnp.inf))

    @property
    def box(self) -> tuple[Float[np.ndarray, " d"], Float[np.ndarray, " d"]]:
        """Ends of the intervals on which sites lie, by coordinate of theta; infinite for the others."""
        low, high = [], []
        for name, shape in self.shapes.items():
            support = bare(self.traced.supports[name])
            ends = (support.lower_bound, support.upper_bound) if name in self.normal else (-np.inf, np.inf)
            low.append(np.broadcast_to(np.asarray(ends[0], float), shape).ravel())
            high.append(np.broadcast_to(np.asarray(ends[1], float), shape).ravel())
        return np.concatenate(low), np.concatenate(high)

    def log_prior(self, theta: Float[Array, " d"]) -> Float[Array, ""]:
        """Log prior density of theta, the Jacobian of the transform included."""
        log_prior = pruned(lambda t: self._run(t).log_prior, theta) if self.prune else lambda t: self._run(t).log_prior
        return log_prior(theta) + self.log_jacobian(theta)

    def prior_score(self, theta: Float[Array, " d"]) -> Float[Array, " d"]:
        return jax.grad(self.log_prior)(theta)

    def constrain(self, theta: Float[Array, " d"]) -> dict[str, Array]:
        """Parameters in their own space, with the deterministic sites that they decide."""
        run = self._run(theta)
        return {**run.params, **run.deterministics}

    def unconstrain(self, params: dict[str, Array]) -> dict[str, Array]:
        """The sites in NumPyro's unconstrained space from their own values."""
        return {k: biject_to(self.traced.supports[k]).inv(params[k]) for k in self.shapes}

    def sample_prior(self, rng_key: Array) -> Float[Array, " d"]:
        return self.flatten(self.traced.run(rng_key, self._one_unit()).unconstrained)

    def _run(self, theta: Float[Array, " d"]):
        return self.traced.run(jax.random.key(0), self._one_unit(), self.unflatten(theta))

    def _one_unit(self) -> Array:
        return jnp.zeros(1, jnp.int32)


def make_parameters(traced: TracedModel) -> Parameters:
    """The flat vector of a traced model's parameters."""
    run = jax.eval_shape(lambda key: traced.run(key, jnp.zeros(1, jnp.int32)), jax.random.key(0))
    normal = frozenset(k for k in traced.parameters if isinstance(bare(traced.supports[k]), INTERVALS))
    parameters = Parameters(traced, {k: tuple(run.unconstrained[k].shape) for k in traced.parameters}, normal)
    try:
        jax.eval_shape(parameters.prior_score, jnp.zeros(parameters.dim))
    except (ValueError, TypeError, NotImplementedError):
        return replace(parameters, prune=True)
    return parameters


INTERVALS = (type(constraints.interval(0, 1)), type(constraints.unit_interval))


def bare(support: constraints.Constraint) -> constraints.Constraint:
    """What holds for every number of a support."""
    while isinstance(support, type(constraints.independent(constraints.real, 1))):
        support = support.base_constraint
    return support


def _to_logit(theta: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """logit(Phi(theta)), with all its digits in both tails."""
    return log_ndtr(theta) - log_ndtr(-theta)


def _from_logit(z: Float[Array, "*s"]) -> Float[Array, "*s"]:
    return -jnp.sign(z) * ndtri(jax.nn.sigmoid(-jnp.abs(z)))


def _log_slope(theta: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """Log derivative of logit(Phi(theta)): phi / (Phi(theta) Phi(-theta))."""
    return -0.5 * theta**2 - 0.5 * jnp.log(2 * jnp.pi) - log_ndtr(theta) - log_ndtr(-theta)

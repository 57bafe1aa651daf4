"""Named parameter sites and one flat unconstrained vector theta, with NumPyro's own transforms."""

from dataclasses import dataclass, replace

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float
import numpy as np

from numpyro_sls.model import TracedModel, pruned

__all__ = ["Parameters", "make_parameters"]


@dataclass(frozen=True, eq=False)
class Parameters:
    """The parameter sites of a traced model as a vector, and their prior there."""

    traced: TracedModel
    shapes: dict[str, tuple[int, ...]]  # unconstrained
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
        return jnp.concatenate([jnp.ravel(unconstrained[k]) for k in self.shapes])

    def unflatten(self, theta: Float[Array, " d"]) -> dict[str, Array]:
        out, start = {}, 0
        for name, shape in self.shapes.items():
            size = int(np.prod(shape))
            out[name] = theta[start : start + size].reshape(shape)
            start += size
        return out

    def log_prior(self, theta: Float[Array, " d"]) -> Float[Array, ""]:
        """Log prior density of theta in unconstrained space, the Jacobian of the transform included."""
        if self.prune:
            return pruned(lambda t: self._run(t).log_prior, theta)(theta)
        return self._run(theta).log_prior

    def prior_score(self, theta: Float[Array, " d"]) -> Float[Array, " d"]:
        return jax.grad(self.log_prior)(theta)

    def constrain(self, theta: Float[Array, " d"]) -> dict[str, Array]:
        """Parameters in their own space, with the deterministic sites that they decide."""
        run = self._run(theta)
        return {**run.params, **run.deterministics}

    def sample_prior(self, rng_key: Array) -> Float[Array, " d"]:
        return self.flatten(self.traced.run(rng_key, self._one_unit()).unconstrained)

    def _run(self, theta: Float[Array, " d"]):
        return self.traced.run(jax.random.key(0), self._one_unit(), self.unflatten(theta))

    def _one_unit(self) -> Array:
        return jnp.zeros(1, jnp.int32)


def make_parameters(traced: TracedModel) -> Parameters:
    """The flat vector of a traced model's parameters."""
    run = jax.eval_shape(lambda key: traced.run(key, jnp.zeros(1, jnp.int32)), jax.random.key(0))
    parameters = Parameters(traced, {k: tuple(run.unconstrained[k].shape) for k in traced.parameters})
    try:
        jax.eval_shape(parameters.prior_score, jnp.zeros(parameters.dim))
    except (ValueError, TypeError, NotImplementedError):
        return replace(parameters, prune=True)
    return parameters

"""Score networks on one unit: s(theta, x) and the diagonal of its Jacobian, many x sharing one theta."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float

__all__ = ["MLPScore", "Network", "ScoreTerms", "SeparablePotential", "Standardizer", "make_standardizer"]

Weights = Any  # a pytree of arrays, as flax makes them


class Standardizer(NamedTuple):
    """Centre and scale of every input, robust to heavy tails."""

    centre: Float[Array, " p"]
    scale: Float[Array, " p"]

    def __call__(self, x: Float[Array, "m p"]) -> Float[Array, "m q"]:
        """Two views of x: near linear up to ten scales and bounded there, and logarithmic."""
        z = (x - self.centre) / self.scale
        return jnp.concatenate([z / jnp.sqrt(1 + (z / CLIP) ** 2), jnp.arcsinh(2 * z)], axis=-1)


CLIP = 10.0


def make_standardizer(x: Float[Array, "m p"]) -> Standardizer:
    """Median and interquartile range over 1.35, which is the sd of a Gaussian; the sd where the quartiles coincide."""
    low, centre, high = jnp.quantile(x, jnp.array([0.25, 0.5, 0.75]), axis=0)
    sd = jnp.std(x, axis=0)
    scale = jnp.where(high > low, (high - low) / 1.35, jnp.where(sd > 0, sd, 1.0))
    return Standardizer(centre, scale)


class ScoreTerms(NamedTuple):
    """What the objectives need of a network at one theta: s_j and d s_j / d theta_j for every x."""

    score: Float[Array, "m d"]
    diagonal: Float[Array, "m d"]


class MLP(nn.Module):
    """A plain multilayer perceptron."""

    num_outputs: int
    width: int
    depth: int
    activation: Callable[[Array], Array]

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for _ in range(self.depth):
            x = self.activation(nn.Dense(self.width)(x))
        return nn.Dense(self.num_outputs)(x)


class Network:
    """What the stages below ask of a network; theta is whitened, x standardized."""

    has_potential: bool

    def init(self, rng_key: Array, dim: int, num_inputs: int) -> Weights:
        raise NotImplementedError

    def terms(self, weights: Weights, theta: Float[Array, " d"], x: Float[Array, "m q"]) -> ScoreTerms:
        raise NotImplementedError

    def score(self, weights: Weights, theta: Float[Array, " d"], x: Float[Array, "m q"]) -> Float[Array, "m d"]:
        raise NotImplementedError


@dataclass(frozen=True)
class SeparablePotential(Network):
    """u(theta, x) = c(x) . phi(theta), s = grad_theta u: an exponential family in disguise.

    The sum over n units is the sum of c(x_i), done once, so that a draw costs the same for any n.

    :param num_features: length of c and phi, beyond the d linear ones.
    :param width: units in each hidden layer.
    :param depth: hidden layers of each of the two networks.

    **Example:**

    >>> from numpyro_sls import SeparablePotential
    >>> SeparablePotential(num_features=16).has_potential
    True
    """

    num_features: int = 32
    width: int = 64
    depth: int = 2
    has_potential = True

    def _summary(self, dim: int) -> MLP:
        return MLP(self.num_features + dim, self.width, self.depth, nn.silu)

    def _basis(self) -> MLP:
        # Smooth on purpose: the Laplacian of a kinked activation trains wrongly in silence.
        return MLP(self.num_features, self.width, self.depth, nn.tanh)

    def init(self, rng_key: Array, dim: int, num_inputs: int) -> Weights:
        key_c, key_phi, key_skip = jax.random.split(rng_key, 3)
        return {
            "c": self._summary(dim).init(key_c, jnp.zeros(num_inputs)),
            "phi": self._basis().init(key_phi, jnp.zeros(dim)),
            "skip": 0.01 * jax.random.normal(key_skip, (num_inputs, self.num_features + dim)),
        }

    def summary(self, weights: Weights, x: Float[Array, "m q"], dim: int) -> Float[Array, "m k"]:
        """c(x): what the score keeps of a unit."""
        return self._summary(dim).apply(weights["c"], x) + x @ weights["skip"]

    def basis(self, weights: Weights, theta: Float[Array, " d"]) -> Float[Array, " k"]:
        """phi(theta), its last d entries theta itself."""
        return jnp.concatenate([jnp.asarray(self._basis().apply(weights["phi"], theta)), theta])

    def terms(self, weights: Weights, theta: Float[Array, " d"], x: Float[Array, "m q"]) -> ScoreTerms:
        first, second = _derivatives(lambda t: self.basis(weights, t), theta)
        c = self.summary(weights, x, theta.shape[0])
        return ScoreTerms(c @ first.T, c @ second.T)

    def score(self, weights: Weights, theta: Float[Array, " d"], x: Float[Array, "m q"]) -> Float[Array, "m d"]:
        return self.summary(weights, x, theta.shape[0]) @ jax.jacfwd(lambda t: self.basis(weights, t))(theta)


@dataclass(frozen=True)
class MLPScore(Network):
    """One multilayer perceptron on (theta, x) for the whole score, as the paper has it; no potential.

    :param width: units in each hidden layer.
    :param depth: hidden layers.

    **Example:**

    >>> from numpyro_sls import MLPScore
    >>> MLPScore(width=64, depth=3).has_potential
    False
    """

    width: int = 64
    depth: int = 3
    has_potential = False

    def _mlp(self, dim: int) -> MLP:
        return MLP(dim, self.width, self.depth, nn.elu)

    def init(self, rng_key: Array, dim: int, num_inputs: int) -> Weights:
        return self._mlp(dim).init(rng_key, jnp.zeros(dim + num_inputs))

    def score(self, weights: Weights, theta: Float[Array, " d"], x: Float[Array, "m q"]) -> Float[Array, "m d"]:
        joined = jnp.concatenate([jnp.broadcast_to(theta, (x.shape[0], *theta.shape)), x], axis=-1)
        return jnp.asarray(self._mlp(theta.shape[0]).apply(weights, joined))

    def terms(self, weights: Weights, theta: Float[Array, " d"], x: Float[Array, "m q"]) -> ScoreTerms:
        def along(direction):
            score, change = jax.jvp(lambda t: self.score(weights, t, x), (theta,), (direction,))
            return score, change @ direction

        score, diagonal = jax.vmap(along, out_axes=(None, -1))(jnp.eye(theta.shape[0]))
        return ScoreTerms(score, diagonal)


def _derivatives(fn: Callable[[Array], Array], theta: Float[Array, " d"]) -> tuple[Float[Array, "d k"], Float[Array, "d k"]]:
    """First derivatives of fn and the pure second ones, forward mode only."""

    def along(direction):
        return jax.jvp(lambda t: jax.jvp(fn, (t,), (direction,))[1], (theta,), (direction,))

    return jax.vmap(along)(jnp.eye(theta.shape[0]))

"""Multilayer perceptrons, their last hidden layer, and their derivatives in one pass forward."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float

__all__ = ["MLP", "forward_laplacian", "hidden_layer"]


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


def hidden_layer(weights: Any, x: Float[Array, "m q"], activation: Callable[[Array], Array]) -> Float[Array, "m w"]:
    """What the last layer of a perceptron sees."""
    layers = [weights["params"][f"Dense_{i}"] for i in range(len(weights["params"]))]
    for layer in layers[:-1]:
        x = activation(x @ layer["kernel"] + layer["bias"])
    return x


def forward_laplacian(weights: Any, start: tuple[Array, Array, Array], along: Float[Array, " d"] | None) -> tuple[Array, Array]:
    """First derivatives, (d, k), of a tanh perceptron, and sum_j a_j d_jj of it, (k,), in one pass forward.

    It starts from the values that the perceptron sees, their Jacobian (d, q) and their Laplacian, (q,). Each layer carries its Jacobian J and its Laplacian L: L of h(a) is h''(a) sum_j a_j (d_j a)^2 + h'(a) L(a).
    Without ``along``, every pure second derivative by itself, (d, k).
    """
    layers = [weights["params"][f"Dense_{i}"] for i in range(len(weights["params"]))]
    value, first, second = start
    for i, layer in enumerate(layers):
        value = value @ layer["kernel"] + layer["bias"]
        first, second = first @ layer["kernel"], second @ layer["kernel"]
        if i < len(layers) - 1:
            value = jnp.tanh(value)
            slope = 1 - value**2
            squares = along @ first**2 if along is not None else first**2
            second = slope * (second - 2 * value * squares)
            first = slope * first
    return first, second

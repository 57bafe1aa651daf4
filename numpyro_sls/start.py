"""Where a network starts on a table: the best score that is linear in the inputs, solved for instead of trained.

The score-matching loss is quadratic in the coefficients W of s = sum_ab W_ab f_a(x) grad phi_b(theta), with f the inputs of the
network and phi the parameters' values and their products: an exponential family, of which Gaussian posteriors are a part. With
g_ab = f_a grad phi_b, w the weight of the joint target t and q standard normal,

    1/2 W' E[g g'] W - W' E[g (w t + (1 - w) theta) - (1 - w) lap(phi) f].

How many of the coefficients the simulations can carry, and how far they are shrunk, is chosen by cross-validation.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float
import numpy as np

__all__ = ["MOST", "Choice", "StartSums", "choose", "make_start_sums"]

MOST = 1500  # coefficients: the solution costs their cube
NUM_FOLDS = 5
RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # relative to the coefficients' own scales


class StartSums(NamedTuple):
    """What some rows of a table add."""

    gram: Float[Array, "k k"]
    cross: Float[Array, " k"]


class Choice(NamedTuple):
    """The coefficients, how many of them were used, and the ridge."""

    solved: Float[np.ndarray, "r b"]
    num: int
    ridge: float


def make_start_sums(terms_fn: Callable) -> Callable:
    """Compile the sums over rows; ``terms_fn(row, context)`` gives g (m, k, d), its target (m, d), Laplacians (m, k) and shares (m,)."""

    @jax.jit
    def sums(rows, context) -> StartSums:
        g, target, laplacian, share = jax.vmap(terms_fn, (0, None))(rows, context)
        weighted = share[..., None, None] * g
        gram = jnp.einsum("nmkd,nmld->kl", weighted, g)
        return StartSums(gram, jnp.einsum("nmkd,nmd->k", weighted, target) - jnp.einsum("nm,nmk->k", share, laplacian))

    return sums


def choose(folds: Sequence[StartSums], groups: Sequence[tuple[np.ndarray, np.ndarray]], shape: tuple[int, int]) -> Choice:
    """The nested groups and the ridge with the least held-out loss over the folds, solved on all rows."""
    gram, cross = (np.stack([np.asarray(a, float) for a in parts]) for parts in zip(*folds, strict=True))
    sizes = np.cumsum([len(a) * len(b) for a, b in groups])
    scale = np.sqrt(np.maximum(np.einsum("fkk->k", gram) / len(folds), 1e-30))
    gram, cross = gram / np.outer(scale, scale), cross / scale
    free = np.arange(sizes[-1]) < sizes[0]  # the part that no unit's numbers enter is not shrunk
    found = []
    for size in sizes:
        for ridge, loss in zip(RIDGES, _held_out(gram[:, :size, :size], cross[:, :size], free[:size]), strict=True):
            found.append((loss, int(size), ridge))
    _, size, ridge = min(found)
    total = gram.sum(0)[:size, :size] / len(folds) + ridge * np.diag(~free[:size])
    flat = np.zeros(sizes[-1])
    flat[:size] = np.linalg.solve(total + TINY * np.eye(size), cross.sum(0)[:size] / len(folds))
    solved = np.zeros(shape)
    for (a, b), end in zip(groups, sizes, strict=True):
        solved[np.ix_(a, b)] = (flat / scale)[end - len(a) * len(b) : end].reshape(len(a), len(b))
    return Choice(solved, size, ridge)


TINY = 1e-7


def _held_out(gram: np.ndarray, cross: np.ndarray, free: np.ndarray) -> list[float]:
    """Of every ridge, the loss on the fold left out, averaged."""
    losses = np.zeros(len(RIDGES))
    for out in range(len(gram)):
        rest, wanted = np.delete(gram, out, 0).mean(0), np.delete(cross, out, 0).mean(0)
        for i, ridge in enumerate(RIDGES):
            w = np.linalg.solve(rest + ridge * np.diag(~free) + TINY * np.eye(len(rest)), wanted)
            losses[i] += 0.5 * w @ gram[out] @ w - w @ cross[out]
    return losses.tolist()

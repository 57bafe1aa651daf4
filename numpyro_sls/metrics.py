"""How far two sets of draws are apart: by marginal, and jointly."""

import flax.linen as nn
import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float
import numpy as np
import optax

from numpyro_sls.perceptron import MLP

__all__ = ["c2st", "coverage", "interval_width", "ks", "mmd", "w1"]

GRID = (np.arange(2000) + 0.5) / 2000


def w1(a: Float[np.ndarray, "s d"], b: Float[np.ndarray, "r d"]) -> Float[np.ndarray, " d"]:
    """1-Wasserstein distance of every marginal, in the sds of b."""
    return np.abs(np.quantile(a, GRID, axis=0) - np.quantile(b, GRID, axis=0)).mean(0) / np.std(b, axis=0)


def ks(a: Float[np.ndarray, "s d"], b: Float[np.ndarray, "r d"]) -> Float[np.ndarray, " d"]:
    """Kolmogorov-Smirnov distance of every marginal."""
    found = []
    for u, v in zip(np.sort(a, axis=0).T, np.sort(b, axis=0).T, strict=True):
        at = np.concatenate([u, v])
        found.append(np.abs(np.searchsorted(u, at, "right") / len(u) - np.searchsorted(v, at, "right") / len(v)).max())
    return np.array(found)


def mmd(a: Float[np.ndarray, "s d"], b: Float[np.ndarray, "r d"], max_draws: int = 2000) -> float:
    """Squared maximum mean discrepancy, unbiased, with a Gaussian kernel as wide as the median distance within b."""
    a, b = _thinned(a, max_draws), _thinned(b, max_draws)
    scale = np.median(_squared_distances(b, b)[np.triu_indices(len(b), 1)])

    def kernel(u, v):
        return np.exp(-_squared_distances(u, v) / (2 * scale))

    aa, bb, ab = kernel(a, a), kernel(b, b), kernel(a, b)
    within = [(k.sum() - np.trace(k)) / (len(k) * (len(k) - 1)) for k in (aa, bb)]
    return float(sum(within) - 2 * ab.mean())


def c2st(rng_key: Array, a: Float[np.ndarray, "s d"], b: Float[np.ndarray, "r d"], num_folds: int = 5, num_steps: int = 1000) -> float:
    """Accuracy of a classifier that tells the two apart, cross-validated: 0.5 if it cannot, 1 if it always can."""
    num = min(len(a), len(b))
    a, b = _thinned(a, num), _thinned(b, num)
    x = np.concatenate([a, b])
    x = (x - b.mean(0)) / b.std(0)
    labels = np.repeat([0.0, 1.0], num)
    order = np.random.default_rng(np.asarray(jax.random.key_data(rng_key)).ravel()).permutation(2 * num)
    folds = np.array_split(order, num_folds)
    size = min(len(f) for f in folds)
    folds = [f[:size] for f in folds]
    network = MLP(1, max(20, 10 * x.shape[1]), 2, nn.relu)
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, num_steps))

    @jax.jit
    def accuracy(key, x, y, x_test, y_test):
        weights = network.init(key, x[:1])

        def loss_fn(w, rows):
            return optax.sigmoid_binary_cross_entropy(jnp.asarray(network.apply(w, x[rows]))[:, 0], y[rows]).mean()

        def step(carry, key):
            w, state = carry
            updates, state = optimizer.update(jax.grad(loss_fn)(w, jax.random.randint(key, (256,), 0, len(x))), state)
            return (optax.apply_updates(w, updates), state), None

        (weights, _), _ = jax.lax.scan(step, (weights, optimizer.init(weights)), jax.random.split(key, num_steps))
        return jnp.mean((jnp.asarray(network.apply(weights, x_test))[:, 0] > 0) == (y_test > 0))

    found = []
    for i, test in enumerate(folds):
        train = np.concatenate([f for j, f in enumerate(folds) if j != i])
        arrays = (jnp.asarray(v, jnp.float32) for v in (x[train], labels[train], x[test], labels[test]))
        found.append(float(accuracy(jax.random.fold_in(rng_key, i), *arrays)))
    return float(np.mean(found))


def coverage(
    draws: Float[np.ndarray, "r s d"], truth: Float[np.ndarray, "r d"], levels: Float[np.ndarray, " l"]
) -> Float[np.ndarray, "l d"]:
    """Share of r repetitions whose central interval of each level holds the truth, by coordinate."""
    low = np.quantile(draws, (1 - levels) / 2, axis=1)
    high = np.quantile(draws, (1 + levels) / 2, axis=1)
    return ((low <= truth) & (truth <= high)).mean(1)


def interval_width(draws: Float[np.ndarray, "s d"], level: float = 0.95) -> Float[np.ndarray, " d"]:
    """Width of the central interval of every marginal."""
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return high - low


def _thinned(draws: np.ndarray, num: int) -> np.ndarray:
    return draws[np.linspace(0, len(draws) - 1, min(num, len(draws))).round().astype(int)]


def _squared_distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.maximum((a**2).sum(1)[:, None] + (b**2).sum(1) - 2 * a @ b.T, 0.0)

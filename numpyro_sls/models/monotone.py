r"""Bayesian monotonic regression with Bernstein polynomials of order 10 (paper, section 4.2).

    y = sum_j theta_j sum_{k >= j} C(10, k) x^k (1 - x)^(10 - k) + N(0, 0.1^2),    theta ~ U[-5, 5] x U[0, 1]^10.

The increments theta_1, ..., theta_10 are non-negative, so the curve is monotone. The data come from y = tanh(4 x - 2) + noise.
"""

from math import comb
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from jax.scipy.special import ndtr, ndtri
from jaxtyping import Float
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_sls.proposal import WorthUnits
from numpyro_sls.training import Training

__all__ = ["SETTINGS", "TRUTH", "curve", "exact_posterior", "features", "model", "simulate_data"]

ORDER = 10
NOISE = 0.1
LOW = jnp.array([-5.0] + [0.0] * ORDER)
HIGH = jnp.array([5.0] + [1.0] * ORDER)
TRUTH: dict[str, Any] = {"curve": lambda x: jnp.tanh(4 * x - 2)}  # not a Bernstein polynomial: theta has no true value
# Weakly identified directions need a narrow proposal, and that many rows: about 10^5 data sets in all.
SETTINGS: dict[str, Any] = {"proposal": WorthUnits(kappa=30.0), "training": Training(num_simulations=92_000_000, num_per_theta=64)}


def model(xy: Float[Array, "n 2"]) -> None:
    """The regression as a NumPyro model; rows of (x, y), x a covariate."""
    theta = numpyro.sample("theta", dist.Uniform(LOW, HIGH).to_event(1))
    with numpyro.plate("rows", xy.shape[0]) as index:
        x = jnp.asarray(xy)[index, 0]
        numpyro.sample("y", dist.Normal(curve(theta, x), NOISE), obs=xy[:, 1])


def features(x: Float[Array, " n"]) -> Float[Array, "n 11"]:
    """Row i holds sum_{k >= j} C(10, k) x_i^k (1 - x_i)^(10 - k) for j = 0, ..., 10."""
    k = jnp.arange(ORDER + 1)
    binomial = jnp.array([comb(ORDER, j) for j in range(ORDER + 1)], float)
    terms = binomial * x[:, None] ** k * (1 - x[:, None]) ** (ORDER - k)
    return jnp.cumsum(terms[:, ::-1], axis=1)[:, ::-1]


def curve(theta: Float[Array, " 11"], x: Float[Array, " n"]) -> Float[Array, " n"]:
    """The regression function at x."""
    return features(x) @ theta


def simulate_data(rng_key: Array, n: int = 1000) -> Float[Array, "n 2"]:
    """n rows of (x, y) from the true curve."""
    key_x, key_y = jax.random.split(rng_key)
    x = jax.random.uniform(key_x, (n,))
    y = TRUTH["curve"](x) + NOISE * jax.random.normal(key_y, (n,))
    return jnp.stack([x, y], axis=1)


def exact_posterior(
    rng_key: Array, xy: Float[Array, "n 2"], num_samples: int = 10_000, num_sweeps: int = 1000, num_chains: int = 100
) -> Float[Array, "s 11"]:
    """Draws from the exact posterior, a normal truncated to the box, by Gibbs sampling.

    A sweep goes along the coordinates and along the eigenvectors of the precision: coordinates alone mix too slowly.
    """
    d = np.asarray(features(xy[:, 0]), np.float64)
    gram = d.T @ d
    axes = np.concatenate([np.eye(ORDER + 1), np.linalg.eigh(gram)[1].T])
    q = np.sum(d @ axes.T * (d @ axes.T), axis=0)  # |D v|^2
    least_squares = jnp.asarray(np.linalg.solve(gram, d.T @ np.asarray(xy[:, 1], np.float64)))
    lines = tuple(jnp.asarray(a) for a in (axes, axes @ gram / q[:, None], NOISE / np.sqrt(q)))
    kept = -(-num_samples // num_chains)
    thin = max(1, num_sweeps // kept)

    def move(theta, line_key):
        (v, pull, sd), key = line_key
        # theta + t v with t ~ N(v . D'D (theta_LS - theta) / q, noise^2 / q), where it stays in the box
        mean = pull @ (least_squares - theta)
        to_low, to_high = (LOW - theta) / v, (HIGH - theta) / v
        still = jnp.abs(v) < 1e-6
        low = jnp.max(jnp.where(still, -jnp.inf, jnp.minimum(to_low, to_high)))
        high = jnp.min(jnp.where(still, jnp.inf, jnp.maximum(to_low, to_high)))
        t = mean + sd * _truncated_normal(key, (low - mean) / sd, (high - mean) / sd)
        return jnp.clip(theta + jnp.clip(t, low, high) * v, LOW, HIGH), None

    def sweep(theta, key):
        return jax.lax.scan(move, theta, (lines, jax.random.split(key, len(axes))))[0], None

    def draw(theta, key):
        theta, _ = jax.lax.scan(sweep, theta, jax.random.split(key, thin))
        return theta, theta

    def chain(key):
        key_start, key_warm, key_draw = jax.random.split(key, 3)
        start = jnp.concatenate([jnp.zeros(1), jax.random.uniform(key_start, (ORDER,), maxval=0.3)])
        theta, _ = jax.lax.scan(sweep, start, jax.random.split(key_warm, num_sweeps // 2))
        return jax.lax.scan(draw, theta, jax.random.split(key_draw, kept))[1]

    draws = jax.jit(jax.vmap(chain))(jax.random.split(rng_key, num_chains))
    return draws.reshape(-1, ORDER + 1)[:num_samples]


def _truncated_normal(rng_key: Array, low: Float[Array, ""], high: Float[Array, ""]) -> Float[Array, ""]:
    """A standard normal between two bounds, mirrored to the left tail, where small probabilities keep their digits."""
    mirrored = low + high > 0
    low, high = jnp.where(mirrored, -high, low), jnp.where(mirrored, -low, high)
    p_low, p_high = ndtr(low), ndtr(high)
    t = ndtri(p_low + jax.random.uniform(rng_key) * (p_high - p_low))
    t = jnp.where(p_high > 1e-37, jnp.clip(t, low, high), high)
    return jnp.where(mirrored, -t, t)

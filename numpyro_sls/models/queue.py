r"""M/G/1 queue: rows of five inter-departure times (paper, section 4.1).

Service times u_k ~ U[theta1, theta2], inter-arrival times w_k ~ Exp(theta3), arrivals v = cumsum(w), departures D:

    x_k = u_k + max(0, v_k - D_{k-1}),    D_k = x_1 + ... + x_k.

The prior is uniform on (theta1, theta2 - theta1, theta3) in [0, 10] x [0, 10] x [0.01, 0.5].
"""

from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Float
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_sls.boundary import Smoothing
from numpyro_sls.model import Simulated
from numpyro_sls.networks import MLPScore
from numpyro_sls.training import Training

__all__ = ["SETTINGS", "TRUTH", "WHOLE", "departures", "exact_posterior", "log_likelihood", "model", "simulate_data"]

NUM_STEPS = 5
TRUTH = {"theta1": 1.0, "theta2": 5.0, "theta3": 0.2}
SETTINGS: dict[str, Any] = {"smoothing": Smoothing(0.01)}  # theta1 and theta2 move the support of x
# The paper's n-model: whole data sets, and what is known of their support, theta1 <= min x, instead of noise.
WHOLE: dict[str, Any] = {
    "units": "additive",
    "support": {"theta1": lambda x: (None, x.min())},
    "debias": None,
    "network": MLPScore(width=64, depth=2),
    "training": Training(num_thetas=8),
}


def model(x: Float[Array, "n 5"]) -> None:
    """The queue as a NumPyro model, one row of the data a unit."""
    theta1 = numpyro.sample("theta1", dist.Uniform(0, 10))
    width = numpyro.sample("width", dist.Uniform(0, 10))
    theta3 = numpyro.sample("theta3", dist.Uniform(0.01, 0.5))
    theta2 = numpyro.deterministic("theta2", theta1 + width)
    with numpyro.plate("rows", x.shape[0]):
        u = numpyro.sample("u", dist.Uniform(theta1, theta2).expand([NUM_STEPS]).to_event(1))
        w = numpyro.sample("w", dist.Exponential(theta3).expand([NUM_STEPS]).to_event(1))
        numpyro.sample("x", Simulated(departures(u, w), event_dim=1), obs=x)


def departures(u: Float[Array, "*batch 5"], w: Float[Array, "*batch 5"]) -> Float[Array, "*batch 5"]:
    """Inter-departure times from service and inter-arrival times."""
    arrivals = jnp.cumsum(w, axis=-1)
    out, departed = [], jnp.zeros(u.shape[:-1])
    for k in range(u.shape[-1]):
        gap = u[..., k] + jnp.maximum(0.0, arrivals[..., k] - departed)
        departed = departed + gap
        out.append(gap)
    return jnp.stack(out, axis=-1)


def simulate_data(rng_key: Array, n: int = 500) -> Float[Array, "n 5"]:
    """n rows at the truth."""
    key_u, key_w = jax.random.split(rng_key)
    u = jax.random.uniform(key_u, (n, NUM_STEPS), minval=TRUTH["theta1"], maxval=TRUTH["theta2"])
    w = jax.random.exponential(key_w, (n, NUM_STEPS)) / TRUTH["theta3"]
    return departures(u, w)


def log_likelihood(x: Float[Array, "n 5"], theta1: ArrayLike, theta2: ArrayLike, theta3: ArrayLike) -> Float[Array, ""]:
    """The exact log likelihood, by piecewise polynomials in the arrival times.

    With U_k = D_k - theta1 and L_k = 0 if x_k <= theta2, else D_k - theta2, the density of a row is zero if one of its
    x_k is below theta1, and otherwise, with f_1 = 1[L_1, U_1] and f_k(v) = 1[L_k <= v <= U_k] int_{-inf}^v f_{k-1},

        (theta3 / (theta2 - theta1))^5 int f_5(v) exp(-theta3 v) dv.
    """
    return jnp.sum(jax.vmap(_row_log_likelihood, (0, None, None, None))(x, theta1, theta2, theta3))


THINNING = 10
NODES, WEIGHTS = np.polynomial.legendre.leggauss(8)


def _row_log_likelihood(x, theta1, theta2, theta3):
    departed = jnp.cumsum(x)
    upper = departed - theta1
    lower = jnp.where(x <= theta2, 0.0, departed - theta2)
    knots = jnp.sort(jnp.concatenate([lower, upper]))
    left, length = knots[:-1], jnp.diff(knots)
    middle = left + 0.5 * length
    powers = jnp.arange(NUM_STEPS)
    # On each piece a polynomial in (v - left) / length, coefficients by rising power.
    f = jnp.zeros((len(left), NUM_STEPS)).at[:, 0].set((middle >= lower[0]) & (middle <= upper[0]))
    for k in range(1, NUM_STEPS):
        area = length * jnp.sum(f / (powers + 1), axis=1)
        before = jnp.cumsum(area) - area
        rising = (length[:, None] * f / (powers + 1))[:, :-1]
        f = jnp.concatenate([before[:, None], rising], axis=1) * ((middle >= lower[k]) & (middle <= upper[k]))[:, None]
    at = 0.5 * (jnp.asarray(NODES) + 1)
    values = f @ (at ** powers[:, None])
    integral = jnp.sum(0.5 * length[:, None] * jnp.asarray(WEIGHTS) * values * jnp.exp(-theta3 * (left[:, None] + at * length[:, None])))
    inside = (jnp.min(x) >= theta1) & (theta2 > theta1) & (integral > 0)
    log_density = NUM_STEPS * jnp.log(theta3 / (theta2 - theta1)) + jnp.log(jnp.where(inside, integral, 1.0))
    return jnp.where(inside, log_density, -jnp.inf)


def exact_posterior(rng_key: Array, x: Float[Array, "n 5"], num_samples: int = 1600, num_chains: int = 16) -> Float[Array, "draws 3"]:
    """Draws of (theta1, theta2, theta3) from the exact posterior, by random-walk Metropolis from near the truth."""
    low, high = jnp.array([0.0, 0.0, 0.01]), jnp.array([10.0, 10.0, 0.5])

    def log_density(t):
        inside = jnp.all((t > low) & (t < high))
        t = jnp.where(inside, t, 0.5 * (low + high))
        return jnp.where(inside, log_likelihood(x, t[0], t[0] + t[1], t[2]), -jnp.inf)

    # theta1 and theta2 are known to 1/n, theta3 to 1/sqrt(n).
    n = x.shape[0]
    scale = jnp.array([2.0 / n, 5.0 / n, 0.08 / n**0.5])
    first = jnp.min(x) - 1.0 / n
    start = jnp.array([first, TRUTH["theta2"] - first, TRUTH["theta3"]])

    def step(carry, key):
        t, value = carry
        key_move, key_accept = jax.random.split(key)
        move = scale * jax.random.normal(key_move, t.shape)
        # theta2 = theta1 + width is what the data see: a move of theta1 leaves it where it is.
        proposed = t + move - jnp.array([0.0, move[0], 0.0])
        new = log_density(proposed)
        accept = jnp.log(jax.random.uniform(key_accept)) < new - value
        carry = jnp.where(accept, proposed, t), jnp.where(accept, new, value)
        return carry, carry[0]

    num_steps = THINNING * num_samples // num_chains

    def chain(key):
        _, draws = jax.lax.scan(step, (start, log_density(start)), jax.random.split(key, num_steps + num_steps // 2))
        return draws[num_steps // 2 :: THINNING]

    draws = jax.jit(jax.vmap(chain))(jax.random.split(rng_key, num_chains)).reshape(-1, 3)
    return draws.at[:, 1].add(draws[:, 0])

r"""M/G/1 queue: rows of five inter-departure times (paper, section 4.1).

Service times u_k ~ U[theta1, theta2], inter-arrival times w_k ~ Exp(theta3), arrivals v = cumsum(w), departures D:

    x_k = u_k + max(0, v_k - D_{k-1}),    D_k = x_1 + ... + x_k.

The prior is uniform on (theta1, theta2 - theta1, theta3) in [0, 10] x [0, 10] x [0.01, 0.5].
"""

from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float
import numpyro
import numpyro.distributions as dist

from numpyro_sls.model import Simulated

__all__ = ["SETTINGS", "TRUTH", "departures", "model", "simulate_data"]

NUM_STEPS = 5
TRUTH = {"theta1": 1.0, "theta2": 5.0, "theta3": 0.2}
SETTINGS: dict[str, Any] = {}


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

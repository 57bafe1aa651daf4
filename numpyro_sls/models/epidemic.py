r"""Stochastic epidemic in a hospital with floors and rooms, seen through weekly summaries (paper, section 4.4).

60 J patients, two a room, floor of i = i mod J, room of i = i mod 30 J; X_i infected, Y_i known to be. From week to week

    lam_i = beta_0 mean(X) + beta_floor(i) mean_floor(X) + beta_room mean_room(X),

a susceptible becomes infected with probability 1 - exp(-lam_i), an infected one is found with probability eta, and with
probability gamma a patient is replaced by one who is infected, and known to be, with probability alpha. The data are 52
weeks of mean Y, mean Y on every floor, and the fraction of rooms with both found. They are one dependent whole.
"""

from typing import Any

import flax.linen as nn
import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float
import numpyro
import numpyro.distributions as dist

from numpyro_sls.model import Simulated
from numpyro_sls.networks import SeparablePotential
from numpyro_sls.reparametrize import indicator
from numpyro_sls.training import Training

__all__ = ["SETTINGS", "TRUTH", "Blocks", "model", "simulate_data", "summaries"]

ALPHA, GAMMA, ETA = 0.1, 0.05, 0.1
NUM_WEEKS = 52
PER_FLOOR = 60
TRUTH: dict[int, Float[Array, " b"]] = {  # by the number of floors: beta_0, the floors, the rooms
    5: jnp.array([0.05, 0.02, 0.04, 0.06, 0.08, 0.1, 0.05]),
    10: jnp.array([0.05, 0.02, 0.04, 0.06, 0.08, 0.1, 0.12, 0.14, 0.16, 0.18, 0.2, 0.05]),
}


class Blocks(nn.Module):
    """Every column averaged over stretches of weeks: a rate shows in how an epidemic grows, not in single weeks."""

    num_blocks: int = 4

    @nn.compact
    def __call__(self, s: Float[Array, "m q"]) -> Float[Array, "m r"]:
        return s.reshape(s.shape[0], self.num_blocks, NUM_WEEKS // self.num_blocks, -1).mean(2).reshape(s.shape[0], -1)


# Eight thousand hospitals under the prior, as in the paper; what is learnt serves every hospital of that size.
SETTINGS: dict[str, Any] = {
    "units": "whole",
    "params": ("log_beta",),
    "target": "implicit",
    "localization": None,
    "debias": None,
    "network": SeparablePotential(embedding=Blocks()),
    "training": Training(num_simulations=8000, num_thetas=32, num_per_theta=1),
}


def model(s: Float[Array, "52 k"]) -> None:
    """The summaries of one hospital, a column for all, one a floor, one for the rooms; log beta ~ N(-3, 1), with ten floors N(-3, 2)."""
    num_floors = s.shape[1] - 2
    log_beta = numpyro.sample("log_beta", dist.Normal(-3.0, 1.0 if num_floors == 5 else 2.0).expand([num_floors + 2]).to_event(1))
    n = PER_FLOOR * num_floors
    start = numpyro.sample("start", dist.Uniform().expand([n]).to_event(1))
    u = numpyro.sample("u", dist.Uniform().expand([NUM_WEEKS - 1, 4, n]).to_event(3))
    numpyro.sample("s", Simulated(summaries(jnp.exp(log_beta), start, u, num_floors), event_dim=2), obs=s)


def summaries(beta: Float[Array, " b"], start: Float[Array, " n"], u: Float[Array, "w 4 n"], num_floors: int) -> Float[Array, "52 b"]:
    """What is seen of an epidemic driven by uniform numbers: at the start, and four a week and patient."""
    n = start.shape[0]
    spread, on_floor, in_room = beta[0], jnp.tile(beta[1:-1], PER_FLOOR), beta[-1]

    def floors(x):
        return x.reshape(PER_FLOOR, num_floors).mean(0)

    def rooms(x):
        return x.reshape(2, n // 2)

    def see(y):
        both = rooms(y)
        return jnp.concatenate([y.mean()[None], floors(y), jnp.mean(both[0] * both[1])[None]])

    def week(state, u):
        x, y = state
        lam = spread * x.mean() + on_floor * jnp.tile(floors(x), PER_FLOOR) + in_room * jnp.tile(rooms(x).mean(0), 2)
        x = x + (1 - x) * indicator(-jnp.expm1(-lam) - u[0])
        y = y + (1 - y) * x * (u[1] < ETA)
        replaced, ill = u[2] < GAMMA, (u[3] < ALPHA).astype(x.dtype)
        x, y = jnp.where(replaced, ill, x), jnp.where(replaced, ill, y)
        return (x, y), see(y)

    x = (start < ALPHA).astype(start.dtype)
    _, seen = jax.lax.scan(week, (x, x), u)
    return jnp.concatenate([see(x)[None], seen])


def simulate_data(rng_key: Array, num_floors: int = 5) -> Float[Array, "52 b"]:
    """A hospital at the truth."""
    key_start, key_weeks = jax.random.split(rng_key)
    n = PER_FLOOR * num_floors
    u = jax.random.uniform(key_weeks, (NUM_WEEKS - 1, 4, n))
    return summaries(TRUTH[num_floors], jax.random.uniform(key_start, (n,)), u, num_floors)

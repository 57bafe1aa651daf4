r"""Stochastic epidemic in a hospital with floors and rooms, seen through weekly summaries (paper, section 4.4).

60 J patients, two a room, floor of i = i mod J, room of i = i mod 30 J; X_i infected, Y_i known to be. From week to week

    lam_i = beta_0 mean(X) + beta_floor(i) mean_floor(X) + beta_room mean_room(X),

a susceptible becomes infected with probability 1 - exp(-lam_i), an infected one is found with probability eta, and with
probability gamma a patient is replaced by one who is infected, and known to be, with probability alpha. The data are 52
weeks of mean Y, mean Y on every floor, and the fraction of rooms with both found. They are one dependent whole.

Who is infected in which week has a density given the weeks before (`Infections`), so that the score of the whole course, which
nobody sees, is known; its mean given the summaries is their score.
"""

import math
from typing import Any

import flax.linen as nn
import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_sls.localization import Localization
from numpyro_sls.model import Simulated
from numpyro_sls.networks import Ensemble, SeparablePotential
from numpyro_sls.proposal import WorthUnits
from numpyro_sls.reparametrize import indicator
from numpyro_sls.training import Training

__all__ = ["SETTINGS", "TEN_FLOORS", "TRUTH", "Floors", "Infections", "model", "other_floors", "simulate_data", "summaries"]

ALPHA, GAMMA, ETA = 0.1, 0.05, 0.1
NUM_WEEKS = 52
PER_FLOOR = 60
TRUTH: dict[int, Float[Array, " b"]] = {  # by the number of floors: beta_0, the floors, the rooms
    5: jnp.array([0.05, 0.02, 0.04, 0.06, 0.08, 0.1, 0.05]),
    10: jnp.array([0.05, 0.02, 0.04, 0.06, 0.08, 0.1, 0.12, 0.14, 0.16, 0.18, 0.2, 0.05]),
}


class Floors(nn.Module):
    """What the weeks say of every floor and of the whole: floors are alike, so that what is learnt of one serves all."""

    num_blocks: int = 13  # stretches of weeks: a rate shows in how an epidemic grows, not in single weeks
    width: int = 32

    @nn.compact
    def __call__(self, s: Float[Array, "m q"]) -> Float[Array, "m r"]:
        m = s.shape[0]
        weeks = s.reshape(m, self.num_blocks, NUM_WEEKS // self.num_blocks, -1).mean(2)
        floors, rooms = jnp.moveaxis(weeks[..., 1:-1], 1, 2), weeks[..., -1]
        whole = jnp.concatenate([floors.mean(1), rooms], axis=-1)
        h = self._layers(jnp.concatenate([floors, _beside(whole, floors)], axis=-1))
        h = self._layers(jnp.concatenate([h, _beside(h.mean(1), h)], axis=-1))
        g = self._layers(jnp.concatenate([h.mean(1), (h**2).mean(1), whole], axis=-1))
        return jnp.concatenate([nn.Dense(2)(h).reshape(m, -1), nn.Dense(4)(g)], axis=-1)

    def _layers(self, x: Array) -> Array:
        return nn.silu(nn.Dense(self.width)(nn.silu(nn.Dense(self.width)(x))))


def _beside(of_all: Float[Array, "m q"], floors: Float[Array, "m j r"]) -> Float[Array, "m j q"]:
    return jnp.broadcast_to(of_all[:, None], (*floors.shape[:2], of_all.shape[-1]))


def other_floors(rng_key: Array, theta: Float[Array, " b"], s: Float[Array, "m q"]) -> tuple[Float[Array, " b"], Float[Array, "m q"]]:
    """The same hospitals with their floors in another order, which prior and model do not know."""
    num = len(theta)
    floors = 1 + jax.random.permutation(rng_key, num - 2)
    order = jnp.concatenate([jnp.zeros(1, floors.dtype), floors, jnp.full(1, num - 1, floors.dtype)])
    return theta[order], s.reshape(-1, NUM_WEEKS, num)[:, :, order].reshape(s.shape)


# Eight thousand hospitals under the prior, as in the paper; what is learnt serves every hospital of that size.
SETTINGS: dict[str, Any] = {
    "units": "whole",
    "params": ("log_beta",),
    "target": "implicit",
    "localization": None,
    "debias": None,
    "symmetry": other_floors,
    "network": Ensemble(SeparablePotential(num_features=16, width=32, depth=1, embedding=Floors(), moments=True)),
    "training": Training(num_simulations=8000, num_thetas=32, num_per_theta=1, learning_rate=5e-3, num_epochs=40, patience=40),
}


# Ten floors under a prior twice as wide, nearly all of whose hospitals are full of infected: two rounds from the prior on find where
# to look, and what is learnt there is for one hospital.
TEN_FLOORS: dict[str, Any] = {
    **{k: v for k, v in SETTINGS.items() if k != "symmetry"},
    "localization": Localization(method="rounds"),
    "proposal": WorthUnits(num_rounds=2),
    "training": Training(num_simulations=20_000, num_thetas=32, num_per_theta=1, learning_rate=5e-3, num_epochs=30, patience=40),
}


class Infections(dist.Distribution):
    """Who is infected after a week's infections, before patients are replaced, for every week but the first.

    :param beta: rates of transmission: everywhere, on every floor, in a room.
    :param start: who is infected in the first week.
    :param leaves: who is replaced, by week.
    :param ill: whether the one who comes is infected, by week.
    """

    has_rsample = True  # of infections by `indicator`
    support = constraints.independent(constraints.boolean, 2)

    def __init__(
        self, beta: Float[Array, " b"], start: Float[Array, " n"], leaves: Float[Array, "w n"], ill: Float[Array, "w n"], **kwargs
    ):
        self.beta, self.start, self.leaves, self.ill = beta, start, leaves, ill
        super().__init__(batch_shape=(), event_shape=leaves.shape, **kwargs)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Float[Array, "*s w n"]:
        def week(x, now):
            u, leaves, ill = now
            infected = x + (1 - x) * indicator(-jnp.expm1(-self._force(x)) - u)
            return jnp.where(leaves > 0, ill, infected), infected

        def course(k):
            u = jax.random.uniform(k, self.event_shape)
            return jax.lax.scan(week, self.start, (u, self.leaves, self.ill))[1]

        if not sample_shape:
            return course(key)
        keys = jax.random.split(key, math.prod(sample_shape))
        return jax.vmap(course)(keys).reshape(*sample_shape, *self.event_shape)

    def log_prob(self, value: Float[Array, "w n"]) -> Float[Array, ""]:
        before = jnp.concatenate([self.start[None], jnp.where(self.leaves > 0, self.ill, value)[:-1]])
        force = jax.vmap(self._force)(before)
        force = jnp.where(force > 0, force, TINY)  # where nobody is infected nobody becomes so
        return jnp.sum((1 - before) * (value * jnp.log(-jnp.expm1(-force)) - (1 - value) * force))

    def _force(self, x: Float[Array, " n"]) -> Float[Array, " n"]:
        """lam of every patient."""
        floors, rooms = floor_means(x, len(self.beta) - 2), room_sums(x)
        return self.beta[0] * x.mean() + jnp.tile(self.beta[1:-1] * floors, PER_FLOOR) + self.beta[-1] * jnp.tile(rooms, 2) / 2


TINY = 1e-12


def floor_means(x: Float[Array, " n"], num_floors: int) -> Float[Array, " j"]:
    """Patient i lies on floor i mod J."""
    return x.reshape(PER_FLOOR, num_floors).mean(0)


def room_sums(x: Float[Array, " n"]) -> Float[Array, " r"]:
    """And in room i mod n / 2."""
    return x.reshape(2, -1).sum(0)


def model(s: Float[Array, "52 k"]) -> None:
    """The summaries of one hospital, a column for all, one a floor, one for the rooms; log beta ~ N(-3, 1), with ten floors N(-3, 2)."""
    num_floors = s.shape[1] - 2
    n, weeks = PER_FLOOR * num_floors, NUM_WEEKS - 1
    log_beta = numpyro.sample("log_beta", dist.Normal(-3.0, 1.0 if num_floors == 5 else 2.0).expand([num_floors + 2]).to_event(1))
    start = numpyro.sample("start", dist.Bernoulli(ALPHA).expand([n]).to_event(1))
    found, leaves, ill = (numpyro.sample(k, dist.Bernoulli(p).expand([weeks, n]).to_event(2)) for k, p in WEEKLY.items())
    start, found, leaves, ill = (jnp.asarray(a, float) for a in (start, found, leaves, ill))
    infected = numpyro.sample("infected", Infections(jnp.exp(log_beta), start, leaves, ill))
    numpyro.sample("s", Simulated(summaries(start, infected, found, leaves, ill, num_floors), event_dim=2), obs=s)


WEEKLY = {"found": ETA, "leaves": GAMMA, "ill": ALPHA}  # of every patient, if infected, and of whoever comes instead


def summaries(
    start: Float[Array, " n"],
    infected: Float[Array, "w n"],
    found: Float[Array, "w n"],
    leaves: Float[Array, "w n"],
    ill: Float[Array, "w n"],
    num_floors: int,
) -> Float[Array, "v k"]:
    """What is seen of an epidemic."""

    def see(y):
        return jnp.concatenate([y.mean()[None], floor_means(y, num_floors), jnp.mean(room_sums(y) > 1)[None]])

    def week(y, now):
        infected, found, leaves, ill = now
        y = y + (1 - y) * infected * found
        y = jnp.where(leaves > 0, ill, y)
        return y, see(y)

    _, seen = jax.lax.scan(week, start, (infected, found, leaves, ill))
    return jnp.concatenate([see(start)[None], seen])


def simulate_data(rng_key: Array, num_floors: int = 5, beta: Float[Array, " b"] | None = None) -> Float[Array, "52 b"]:
    """A hospital at the truth, or with other rates."""
    key_start, key_infected, *keys = jax.random.split(rng_key, 5)
    n = PER_FLOOR * num_floors
    start = jax.random.bernoulli(key_start, ALPHA, (n,)).astype(float)
    found, leaves, ill = (jax.random.bernoulli(k, p, (NUM_WEEKS - 1, n)).astype(float) for k, p in zip(keys, WEEKLY.values(), strict=True))
    infected = Infections(TRUTH[num_floors] if beta is None else beta, start, leaves, ill).sample(key_infected)
    return summaries(start, infected, found, leaves, ill, num_floors)

"""The one door through which every simulation goes, and is counted."""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Bool, Float

from numpyro_sls.carried import steadied
from numpyro_sls.units import Units

__all__ = ["Batch", "Simulations", "Simulator"]


MEMORY = 200_000_000  # numbers of simulated units that are held at once, beside their results


class Batch(NamedTuple):
    """k parameter vectors with m units each; a failed simulation is zeroed, not ok and without weight."""

    theta: Float[Array, "k d"]
    x: Float[Array, "k m p"]
    joint_score: Float[Array, "k m d"]
    weight: Float[Array, "k m"]
    ok: Bool[Array, "k m"]
    probe: Float[Array, "k d"]  # a random sign for every coordinate, along which a divergence may be estimated


class Simulations(NamedTuple):
    """What a stage spent, in units, and how many of those failed."""

    num: int
    num_failed: int


@dataclass(frozen=True, eq=False)
class Simulator:
    """Simulates units of a model in vectorized batches and keeps the account by stage."""

    units: Units
    spent: dict[str, Simulations] = field(default_factory=dict)

    def batch(self, rng_key: Array, theta: Float[Array, "k d"], num_per_theta: int, spread: Float[Array, ""] | None = None) -> Batch:
        """Pure: simulate units at each theta. Whoever calls it enters the cost with `count`."""
        return self.batch_of(jax.random.split(rng_key, theta.shape[0]), theta, num_per_theta, spread)

    def batch_of(self, keys: Array, theta: Float[Array, "k d"], num_per_theta: int, spread: Float[Array, ""] | None = None) -> Batch:
        """The same with a key for every theta: two thetas with one key get the same random numbers."""
        at_once = max(1, MEMORY // (num_per_theta * self.units.size))

        def simulate(key, t):
            return self.units.simulate(key, t, num_per_theta, spread)

        if theta.shape[0] <= at_once:
            simulated = jax.vmap(simulate)(keys, theta)
        else:
            simulated = jax.lax.map(lambda pair: simulate(*pair), (keys, theta), batch_size=at_once)
        ok = jnp.all(jnp.isfinite(simulated.x), -1)
        if self.units.density != "none":  # else it is zero, and XLA would take half a minute to fold that away
            ok &= jnp.all(jnp.isfinite(simulated.joint_score), -1)
        if simulated.difference is not None:
            ok &= jnp.all(jnp.isfinite(simulated.difference), -1)
        x, joint_score = (jnp.where(ok[..., None], a, 0.0) for a in simulated[:2])
        if simulated.difference is not None:
            joint_score = steadied(joint_score, simulated.difference, ok)
        probe = jax.random.rademacher(jax.random.fold_in(keys[0], 1), theta.shape, theta.dtype)
        return Batch(theta, x, joint_score, jnp.where(ok, simulated.weight, 0.0).astype(x.dtype), ok, probe)

    def count(self, stage: str, num: int, num_failed: int | Array = 0) -> None:
        before = self.spent.get(stage, Simulations(0, 0))
        self.spent[stage] = Simulations(before.num + num, before.num_failed + int(num_failed))

    @property
    def num_spent(self) -> int:
        return sum(s.num for s in self.spent.values())

    def report(self) -> str:
        """One line on what was spent, in units and in data sets."""
        n = self.units.num_units
        total = self.num_spent
        stages = ", ".join(f"{k} {_short(s.num)}" for k, s in self.spent.items())
        failed = sum(s.num_failed for s in self.spent.values())
        tail = f"; {failed} failed" if failed else ""
        return f"{_short(total)} units simulated ({_short(total / n)} data sets of {n}): {stages}{tail}"


def _short(number: float) -> str:
    return f"{number:.3g}" if number < 1e4 else f"{number:.2e}".replace("e+0", "e")

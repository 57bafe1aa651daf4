"""Data whose support moves with a parameter: a weight that vanishes at the boundary, or noise on the data (paper, appendix on the boundary)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float

from numpyro_sls.parameters import Parameters
from numpyro_sls.proposal import Proposal

__all__ = ["BoundaryWeight", "Smoothing", "make_boundary", "smoothing_sd"]

Bounds = tuple[Array | float | None, Array | float | None]


@dataclass(frozen=True)
class Smoothing:
    """Add Gaussian noise to every observation, simulated and real, so that the likelihood has no jump in the parameters.

    :param scale: sd of the noise, in robust sds of the data. The posterior is that of the noised data: less noise is
        nearer to the data, more is easier to learn.
    :param num_replicates: noised copies of the data whose scores are averaged, so that the posterior does not hang on one draw of the noise.

    **Example:**

    >>> from numpyro_sls import Smoothing
    >>> Smoothing(0.02).num_replicates
    16
    """

    scale: float = 0.01
    num_replicates: int = 16

    def __post_init__(self):
        if not self.scale > 0:
            raise ValueError(f"Smoothing(scale={self.scale}) must be positive; smoothing=False leaves the data as they are.")
        if self.num_replicates < 1:
            raise ValueError(f"Smoothing(num_replicates={self.num_replicates}) must be at least 1.")

    def apply(self, rng_key: Array, x: Float[Array, "n p"], sd: Float[Array, " o"]) -> Float[Array, "r p"]:
        """Copies of the data, one below the other, with noise on the observed columns; covariates stay as they are."""
        x = jnp.tile(x, (self.num_replicates, 1))
        num_observed = sd.shape[0]
        noised = x[:, :num_observed] + sd * jax.random.normal(rng_key, (x.shape[0], num_observed))
        return jnp.concatenate([noised, x[:, num_observed:]], axis=1)


def smoothing_sd(smoothing: Smoothing, x: Float[Array, "n p"]) -> Float[Array, " p"]:
    """The sd of the noise in each column; a column that hardly varies has the noise of the others."""
    low, high = jnp.quantile(x, jnp.array([0.25, 0.75]), axis=0)
    spread = (high - low) / 1.35
    return smoothing.scale * jnp.where(spread > 0, spread, jnp.mean(spread))


@dataclass(frozen=True, eq=False)
class BoundaryWeight:
    """g_j(theta, x): the distance of theta from the ends of its support along coordinate j, at most 1.

    The ends are those of the prior's own box, where the parameters are learnt as they are, and what is stated of the data:
    ``stated`` holds for a coordinate of theta a function from x to its bounds. Distances are in sds of the proposal.
    """

    stated: tuple[tuple[int, Callable[[Array], tuple[Array, Array]]], ...] = ()

    def bounds(self, x: Float[Array, "m p"], dim: int) -> tuple[Float[Array, "m d"], Float[Array, "m d"]]:
        """Of theta, given each unit by itself."""
        low, high = jnp.full((x.shape[0], dim), -jnp.inf, float), jnp.full((x.shape[0], dim), jnp.inf, float)
        for j, fn in self.stated:
            at_low, at_high = jax.vmap(fn)(x)
            low, high = low.at[:, j].set(at_low), high.at[:, j].set(at_high)
        return low, high

    def __call__(
        self, proposal: Proposal, eta: Float[Array, " d"], x: Float[Array, "m p"]
    ) -> tuple[Float[Array, "m d"], Float[Array, "m d"]]:
        """g and d g_j / d eta_j for every unit."""
        place, sd = proposal.mean + proposal.factor @ eta, jnp.linalg.norm(proposal.factor, axis=1)
        low, high = (jax.vmap(proposal.learnt)(b) for b in self.bounds(x, proposal.dim))
        if proposal.low is not None and proposal.high is not None:
            low, high = jnp.maximum(low, proposal.low), jnp.minimum(high, proposal.high)
        below, above = (place - low) / sd, (high - place) / sd
        distance = jnp.clip(jnp.minimum(below, above), 0.0, MOST)
        slope = jnp.where((distance > 0) & (distance < MOST), jnp.where(below < above, 1.0, -1.0), 0.0)
        # A step along eta_j moves every theta_k with factor_kj != 0, and must not carry any of them over its end.
        share = proposal.factor / sd[:, None]
        concerned = jnp.where(jnp.abs(share) > 1e-6, distance[:, :, None], MOST)  # (m, k, j)
        nearest = jnp.argmin(concerned, axis=1)
        g = jnp.min(concerned, axis=1)
        change = jnp.take_along_axis(slope, nearest, axis=1) * share[nearest, jnp.arange(share.shape[1])]
        return g, jnp.where(g < MOST, change, 0.0)


MOST = 1.0


def make_boundary(parameters: Parameters, support: Mapping[str, Callable[[Array], Bounds]] | None, num_responses: int) -> BoundaryWeight:
    """From what the user states of scalar sites, in their own values, to bounds of theta."""
    stated = []
    for name, fn in (support or {}).items():
        if name not in parameters.shapes:
            raise ValueError(f"support= names {name!r}, which is not a parameter; the parameters are {list(parameters.shapes)}.")
        if parameters.shapes[name] != ():
            raise ValueError(
                f"support={{{name!r}: ...}}: bounds can be stated of scalar sites, and {name!r} has shape {parameters.shapes[name]}."
            )
        index = parameters.labels.index(name)

        def bounds(x, name=name, fn=fn):
            low, high = fn(x[:num_responses])
            ends = [-jnp.inf if low is None else low, jnp.inf if high is None else high]
            return tuple(parameters.place(name, jnp.asarray(end, x.dtype)) for end in ends)

        stated.append((index, bounds))
    return BoundaryWeight(tuple(stated))

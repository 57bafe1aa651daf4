"""Where in x to train: any weight that depends on x alone leaves every target unbiased, since all of them hold given x."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float
import numpy as np

from numpyro_sls.simulate import Batch

__all__ = ["HALVINGS", "Focus", "FocusTerms", "focused", "halving_edges", "make_focus", "out_of_reach", "passed", "tail_edges"]


@dataclass(frozen=True)
class Focus:
    """Train more on units far out, as far as observed ones lie: there simulated units are rare and their scores large.

    :param flatten: 0 trains on units as often as they are simulated, 1 on each halving of their number alike.
    :param oversample: units simulated for each that is trained on, the others left out by chance according to their weight;
        1 weights the units instead, at no cost in simulations. A budget, ``Training(num_simulations=...)``, means 1.

    **Example:**

    >>> from numpyro_sls import Focus
    >>> Focus(flatten=0.3).oversample
    4
    """

    flatten: float = 0.5
    oversample: int = 4

    def __post_init__(self):
        if not 0 <= self.flatten <= 1:
            raise ValueError(f"Focus(flatten={self.flatten}) must lie between 0 and 1.")
        if self.oversample < 1:
            raise ValueError(f"Focus(oversample={self.oversample}) must be at least 1.")


class FocusTerms(NamedTuple):
    """The weight of a unit by how rare the most extreme of its responses is, in halvings."""

    low: Float[Array, "t p"]  # below which, response by response, 1/4, 1/8, ... of the simulated units lie
    high: Float[Array, "t p"]
    gains: Float[Array, " t1"]
    spread: Float[Array, ""]  # share of the units to simulate with their nuisances spread out

    def weight(self, x: Float[Array, "*m q"]) -> Float[Array, "*m"]:
        """1 on average over the simulated units."""
        return jnp.interp(rarity(x, self.low, self.high), jnp.arange(HALVINGS + 1.0), self.gains)

    def split(self, rare: int) -> "tuple[FocusTerms, FocusTerms]":
        """The weights of units that have passed fewer halvings, and of the others, there every halving alike."""
        k = np.arange(HALVINGS + 1)
        flat = self.gains[rare] * 2.0 ** (k - rare)
        return self._replace(gains=jnp.where(k < rare, self.gains, 0.0)), self._replace(gains=jnp.where(k < rare, 0.0, flat))


def rarity(x: Float[Array, "*m q"], low: Float[Array, "t p"], high: Float[Array, "t p"]) -> Float[Array, "*m"]:
    """How many edges the most extreme response has passed, counted continuously: a weight that jumps would add noise."""
    x = x[..., None, : low.shape[1]]
    return jnp.max(jnp.maximum(passed(-x, -low), passed(x, high)), axis=-1)


def passed(x: Float[Array, "*m 1 p"], edges: Float[Array, "t p"], beyond: float = 0.0) -> Float[Array, "*m p"]:
    """How many edges lie below x, the one above it in part, and so on behind the last for at most so many ``beyond``."""
    following = jnp.concatenate([edges[1:], jnp.full_like(edges[:1], jnp.inf)])
    last = jnp.isfinite(edges) & ~jnp.isfinite(following)
    before = jnp.concatenate([jnp.full_like(edges[:1], -jnp.inf), edges[:-1]])
    gap = jnp.maximum(jnp.where(last, edges - before, following - edges), 1e-30)
    part = jnp.clip((x - edges) / gap, 0.0, jnp.where(last, beyond, 1.0))
    return jnp.where(jnp.isfinite(edges), part, 0.0).sum(-2)


HALVINGS = 24
MIN_COUNT = 4  # simulated units beyond the last edge
MAX_EXCESS = 4.0  # times that observed units are more frequent than simulated ones, which their weight follows
HARDLY_EVER = 0.1  # units expected in a data set as far out as its farthest, for that to be out of the model's reach


def out_of_reach(simulated: Float[Array, "m p"], observed: Float[Array, "n p"], num_responses: int) -> bool:
    """Whether some observed unit lies where the model would hardly ever put one of n."""
    x, seen = np.asarray(simulated)[:, :num_responses], np.asarray(observed)[:, :num_responses]
    beyond = np.minimum((x <= seen.min(0)).sum(0), (x >= seen.max(0)).sum(0))
    return bool(len(seen) * (beyond.min() + 1) / len(x) < HARDLY_EVER)


def make_focus(
    simulated: Float[Array, "m p"],
    weight: Float[Array, " m"],
    observed: Float[Array, "n p"],
    num_responses: int,
    settings: Focus,
    spread: float = 0.0,
) -> FocusTerms:
    """Edges where the share of simulated units beyond halves, up to the farthest observed unit; the gain rises at each.

    The gain is 2^(flatten k) after k halvings, and more where observed units are more frequent than simulated ones.
    """
    x, seen = np.asarray(simulated)[:, :num_responses], np.asarray(observed)[:, :num_responses]
    w = np.asarray(weight, float) / np.asarray(weight, float).sum()
    low, high = halving_edges(x, w)
    low, high = np.where(low > seen.min(0), low, -np.inf), np.where(high < seen.max(0), high, np.inf)
    terms = FocusTerms(jnp.asarray(low, x.dtype), jnp.asarray(high, x.dtype), jnp.ones(HALVINGS + 1), jnp.asarray(spread, x.dtype))
    passed, found = (np.asarray(rarity(jnp.asarray(a), terms.low, terms.high)) for a in (x, seen))
    passed, found = np.floor(passed).astype(int), np.floor(found).astype(int)
    share, found = np.bincount(passed, w, HALVINGS + 1), np.bincount(found, minlength=HALVINGS + 1)
    # One observed unit more or less is no excess.
    excess = np.clip((found - np.sqrt(found)) / len(seen) / np.maximum(share, 1e-12), 1.0, MAX_EXCESS)
    terms = terms._replace(gains=jnp.asarray(2.0 ** (settings.flatten * np.arange(HALVINGS + 1)) * excess, x.dtype))
    return terms._replace(gains=terms.gains / (w @ np.asarray(terms.weight(jnp.asarray(x)))))


def halving_edges(x: Float[np.ndarray, "m p"], weight: Float[np.ndarray, " m"]) -> tuple[np.ndarray, np.ndarray]:
    """Below and above which 1/4, 1/8, ... of the units lie, number by number."""
    tails = 0.5 ** np.arange(2, HALVINGS + 2)
    ends = np.array([[tail_edges(s * column, weight, tails) for column in x.T] for s in (1, -1)])
    return ends[0].T, -ends[1].T


def tail_edges(column: Float[np.ndarray, " m"], weight: Float[np.ndarray, " m"], tails: Float[np.ndarray, " t"]) -> Float[np.ndarray, " t"]:
    """Below which the tails lie, -inf where too few units are left to say."""
    order = np.argsort(column)
    at = np.searchsorted(np.cumsum(weight[order]), tails)
    return np.where(at >= MIN_COUNT, column[order][np.minimum(at, len(column) - 1)], -np.inf)


def focused(rng_key: Array, batch: Batch, focus: FocusTerms, num_per_theta: int) -> Batch:
    """Weight the units, or keep some of them by chance.

    Of the M units at a theta m are kept with probabilities in proportion to their weight w, and each then weighs the mean
    of w at that theta: together a weight w(x), as if all had been kept.
    """
    w = batch.weight * focus.weight(batch.x)
    if batch.ok.shape[1] == num_per_theta:
        return batch._replace(weight=w)
    mean = w.mean(1)
    start = jax.random.uniform(rng_key, (w.shape[0], 1))
    at = (jnp.arange(num_per_theta) + start) / num_per_theta
    share = jnp.cumsum(w, axis=1) / jnp.maximum(w.sum(1, keepdims=True), 1e-30)
    index = jnp.clip(jax.vmap(jnp.searchsorted)(share, at), 0, w.shape[1] - 1)

    def kept(a):
        return jax.vmap(lambda rows, i: rows[i])(a, index)

    ok = kept(batch.ok)
    return Batch(batch.theta, kept(batch.x), kept(batch.joint_score), ok * mean[:, None], ok, batch.probe)

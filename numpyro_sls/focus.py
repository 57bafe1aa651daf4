"""Where in x to train: any weight that depends on x alone leaves every target unbiased, since all of them hold given x."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float, Int
import numpy as np

from numpyro_sls.simulate import Batch

__all__ = ["Focus", "FocusTerms", "focused", "make_focus"]


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

    def weight(self, x: Float[Array, "*m q"]) -> Float[Array, "*m"]:
        """1 on average over the simulated units."""
        return self.gains[rarity(x, self.low, self.high)]


def rarity(x: Float[Array, "*m q"], low: Float[Array, "t p"], high: Float[Array, "t p"]) -> Int[Array, "*m"]:
    """How many edges the most extreme response has passed."""
    x = x[..., None, : low.shape[1]]
    return jnp.max(jnp.maximum((x < low).sum(-2), (x > high).sum(-2)), axis=-1)


MOST_HALVINGS = 14
MIN_COUNT = 4  # simulated units beyond the last edge
MAX_EXCESS = 4.0  # times that observed units are more frequent than simulated ones, which their weight follows


def make_focus(simulated: Float[Array, "m p"], observed: Float[Array, "n p"], num_responses: int, settings: Focus) -> FocusTerms:
    """Edges where the number of simulated units beyond halves, up to the farthest observed unit; the gain rises at each.

    The gain is 2^(flatten k) after k halvings, and more where observed units are more frequent than simulated ones.
    """
    x, seen = np.asarray(simulated)[:, :num_responses], np.asarray(observed)[:, :num_responses]
    halvings = max(0, min(MOST_HALVINGS, int(np.log2(max(len(x) / MIN_COUNT, 1)) - 1)))
    tails = 0.5 ** np.arange(2, halvings + 2)
    low, high = np.quantile(x, tails, axis=0), np.quantile(x, 1 - tails, axis=0)
    low, high = np.where(low > seen.min(0), low, -np.inf), np.where(high < seen.max(0), high, np.inf)
    terms = FocusTerms(jnp.asarray(low), jnp.asarray(high), jnp.ones(halvings + 1))
    share, found = (np.bincount(np.asarray(rarity(jnp.asarray(a), terms.low, terms.high)), minlength=halvings + 1) for a in (x, seen))
    # One observed unit more or less is no excess.
    excess = np.clip((found - np.sqrt(found)) / len(seen) / np.maximum(share / len(x), 1e-12), 1.0, MAX_EXCESS)
    gains = 2.0 ** (settings.flatten * np.arange(halvings + 1)) * excess
    return terms._replace(gains=jnp.asarray(gains / (gains @ share / len(x)), x.dtype))


def focused(rng_key: Array, batch: Batch, focus: FocusTerms, num_per_theta: int) -> Batch:
    """Weight the units, or keep some of them by chance.

    Of the M units at a theta m are kept with probabilities in proportion to their weight w, and each then weighs the mean
    of w at that theta: together a weight w(x), as if all had been kept.
    """
    w = batch.ok * focus.weight(batch.x)
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

"""Local simulation-based calibration: does the learned likelihood, near the posterior, give posteriors that are as sure as they should be?

Parameters are drawn from a reference prior around the posterior, data simulated at each, and the posterior of each data set under
that same reference prior sampled with the one learned score. If the score is right, the truth is a draw like the others. Nothing
is said of places far from the data: calibration over the whole prior is not valid for a score that was learnt near one posterior.
"""

from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float, Int
import numpy as np
from scipy import stats

from numpyro_sls.dynamics import acceptance, inside, langevin_step, point_at, to_delta, to_theta
from numpyro_sls.fitted import SLSFit
from numpyro_sls.score import DataTerms, PosteriorScore, find_mode

__all__ = ["Calibration", "calibrate"]

NUM_WARMUP, NUM_BETWEEN = 200, 8  # Langevin steps before the first draw, and between two
IN_VALUES = (1000, 32)  # the same in the parameters' own values, where many steps are refused
RATE = 0.1
CHUNK = 20_000  # units summed at once


class Calibration(NamedTuple):
    """Ranks of the truth among posterior draws over repetitions; print it."""

    labels: tuple[str, ...]
    truth: Float[np.ndarray, "r d"]
    draws: Float[np.ndarray, "r s d"]
    num_dropped: int  # repetitions whose truth or mode lay outside the trained region

    @property
    def ranks(self) -> Int[np.ndarray, "r d"]:
        """How many of the draws lie below the truth."""
        return (self.draws < self.truth[:, None]).sum(1)

    @property
    def p_values(self) -> Float[np.ndarray, " d"]:
        """Of Kolmogorov-Smirnov tests that the ranks are uniform (a shift) and their distances from the middle are (a width), by coordinate."""
        num = self.draws.shape[1]
        jitter = np.random.default_rng(0).uniform(size=self.ranks.shape)
        place = ((self.ranks + jitter) / (num + 1)).T
        both = [[stats.kstest(a, "uniform").pvalue for a in (p, np.abs(2 * p - 1))] for p in place]
        return np.minimum(1.0, 2 * np.min(both, axis=1))

    def coverage(self, levels: Float[np.ndarray, " l"]) -> Float[np.ndarray, "l d"]:
        """Share of the repetitions whose central interval of each level holds the truth."""
        place = (self.ranks + 0.5) / (self.draws.shape[1] + 1)
        return (np.abs(2 * place - 1) <= levels[:, None, None]).mean(1)

    def band(self, levels: Float[np.ndarray, " l"], level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
        """Between what the coverage would lie if all were right, by chance alone."""
        low, high = stats.binom.interval(level, len(self.truth), levels)
        return low / len(self.truth), high / len(self.truth)

    def tarp(self, rng_key: Array, levels: Float[np.ndarray, " l"]) -> Float[np.ndarray, " l"]:
        """Coverage of all coordinates at once: by distance from reference points drawn at random (TARP)."""
        scale = self.draws.std((0, 1))
        reference = np.asarray(jax.random.normal(rng_key, self.truth.shape)) * scale + self.truth.mean(0)
        far = (((self.truth - reference) / scale) ** 2).sum(1)
        nearer = ((((self.draws - reference[:, None]) / scale) ** 2).sum(-1) < far[:, None]).mean(1)
        return (nearer[:, None] <= levels).mean(0)

    def __str__(self) -> str:
        levels = np.array([0.5, 0.8, 0.95])
        found, (low, high) = self.coverage(levels), self.band(levels)
        lines = [f"local calibration, {len(self.truth)} data sets near the posterior ({self.num_dropped} dropped):"]
        lines.append(
            f"  {'':12s} " + " ".join(f"{100 * a:.0f} % ({b:.2f}-{c:.2f})" for a, b, c in zip(levels, low, high, strict=True)) + "  p"
        )
        for j, label in enumerate(self.labels):
            lines.append(f"  {label:12s} " + " ".join(f"{c:16.3f}" for c in found[:, j]) + f"  {self.p_values[j]:.3f}")
        return "\n".join(lines)


def calibrate(fit: SLSFit, rng_key: Array, num_repetitions: int = 200, num_draws: int = 99, width: float = 2.0) -> Calibration:
    """Simulate data sets at draws of N(mode, (width posterior sds)^2), and sample the posterior of each with this one fit.

    Where the posterior leans on the ends of intervals, that normal is one in the parameters' own values, cut off at the ends.

    **Example:**

    >>> from numpyro_sls import calibrate
    >>> print(calibrate(fit, random.key(1)))  # doctest: +SKIP
    """
    if num_repetitions < 10 or num_draws < 9:
        raise ValueError(f"calibrate needs at least 10 repetitions and 9 draws; got {num_repetitions} and {num_draws}.")
    data, simulator, learned, unit = fit.data, fit.conditioner.learner.simulator, fit.posterior.learned, fit.posterior.unit
    if not learned.network.has_potential:
        raise ValueError(
            "calibrate reuses the sums over the data, which a network without a potential does not have; fit with SeparablePotential()."
        )
    num_units, d = int(data.num_units), data.mode.shape[0]
    chart = data.chart
    num_warmup, num_between = (NUM_WARMUP, NUM_BETWEEN) if chart is None else IN_VALUES

    def log_reference(theta):
        normal = -0.5 * jnp.sum(to_delta(data, theta) ** 2) / width**2
        return normal if chart is None else normal + chart.log_slope(theta)

    posterior = PosteriorScore(learned, unit, log_reference)

    def summed(key, theta) -> tuple[DataTerms, Array]:
        """The terms of a data set simulated at theta, in pieces; the local corrections are those of the fit."""
        size = min(num_units, CHUNK)
        num = -(-num_units // size)

        def piece(carry, i):
            batch = simulator.batch(jax.random.fold_in(key, i), theta[None], size)
            x = batch.x[0]
            keep = (i * size + jnp.arange(size) < num_units) & batch.ok[0]
            z = unit.standardizer(x)
            parts = (
                learned.network.summary(unit.weights, z, d),
                learned.mean_network.features(unit.mean_weights, z) if unit.mean_weights is not None else jnp.zeros((size, 0)),
                learned.features(unit, x, data.local.marginals),
            )
            return jax.tree.map(lambda total, new: total + keep.astype(x.dtype) @ new, carry, parts), (~batch.ok).sum()

        zero = (data.summary * 0, data.mean_summary * 0, data.features * 0)
        (summary, mean_summary, features), failed = jax.lax.scan(piece, zero, jnp.arange(num))
        return data._replace(summary=summary, mean_summary=mean_summary, features=features), failed.sum()

    def started(key, terms, elsewhere):
        """Around the mode of the data set, or at another draw of the reference."""
        if chart is not None:
            return terms, to_delta(data, elsewhere), jnp.array(True)
        found = find_mode(posterior, terms, 10.0)
        terms = terms._replace(mode=found.theta, factor=found.factor, inverse=jnp.linalg.inv(found.factor))
        return terms, jax.random.normal(key, (d,)), jnp.all(jnp.isfinite(found.theta)) & (found.gap < 1.0)

    def sampled(key, theta, elsewhere):
        key_data, key_start, key_run = jax.random.split(key, 3)
        terms, failed = summed(key_data, theta)
        terms, start, found = started(key_start, terms, elsewhere)
        point = point_at(posterior, terms, inside(posterior, terms, start))

        def step(carry, key):
            point, log_size, i = carry
            point, accept_prob = langevin_step(key, point, jnp.exp(log_size), posterior, terms)
            rate = jnp.where(i < num_warmup, RATE, 0.0)  # no adaptation once draws count
            return (point, log_size + rate * (accept_prob - acceptance(data)), i + 1), to_theta(terms, point.delta)

        keys = jax.random.split(key_run, num_warmup + num_between * num_draws)
        _, path = jax.lax.scan(step, (point, jnp.log(0.7), 0), keys)
        return path[num_warmup + num_between - 1 :: num_between], found & ~posterior.outside(theta, data), failed

    key_theta, key_runs = jax.random.split(rng_key)
    theta, elsewhere = np.split(_reference(key_theta, posterior, data, 2 * num_repetitions, width), 2)
    # Some at a time: a data set of each is in memory at once.
    group = max(1, min(num_repetitions, 4_000_000 // min(num_units, CHUNK)))
    run = jax.jit(jax.vmap(sampled))
    draws, fine, failed = [], [], 0
    keys = jax.random.split(key_runs, num_repetitions)
    for i in range(0, num_repetitions, group):
        rows = (np.arange(i, i + group)) % num_repetitions  # the last group is filled up, so that there is one compilation
        new, ok, bad = run(keys[rows], theta[rows], elsewhere[rows])
        keep = min(group, num_repetitions - i)
        draws.append(np.asarray(new[:keep]))
        fine.append(np.asarray(ok[:keep]))
        failed += int(bad[:keep].sum())
    simulator.count("calibration", num_repetitions * num_units, failed)
    kept = np.concatenate(fine)
    return Calibration(tuple(fit.units.parameters.labels), np.asarray(theta)[kept], np.concatenate(draws)[kept], int((~kept).sum()))


def _reference(rng_key: Array, posterior: PosteriorScore, data: DataTerms, num: int, width: float) -> np.ndarray:
    """Draws of the normal around the posterior; in the parameters' own values those that are possible."""
    draw = jax.jit(jax.vmap(lambda delta: to_theta(data, delta)))
    kept: list[np.ndarray] = []
    for i in range(MOST_TRIES):
        theta = np.asarray(draw(width * jax.random.normal(jax.random.fold_in(rng_key, i), (max(num, TRIED), len(data.mode)))))
        kept.append(theta[np.isfinite(theta).all(1)])
        if sum(map(len, kept)) >= num:
            return np.concatenate(kept)[:num]
    raise ValueError(
        f"Of {MOST_TRIES * max(num, TRIED)} draws around the posterior {sum(map(len, kept))} lay within the prior's intervals, and {num} are needed: "
        "it leans on too many ends at once to be calibrated so. Try a smaller width: calibrate(fit, rng_key, width=1.0)."
    )


TRIED, MOST_TRIES = 100_000, 20

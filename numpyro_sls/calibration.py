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

from numpyro_sls.dynamics import inside, langevin_step, point_at, to_theta
from numpyro_sls.fitted import SLSFit
from numpyro_sls.score import DataTerms, PosteriorScore, find_mode

__all__ = ["Calibration", "calibrate"]

NUM_WARMUP, NUM_BETWEEN = 200, 8  # Langevin steps before the first draw, and between two
TARGET, RATE = 0.65, 0.1
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
    mode, factor, inverse = data.mode, data.factor, data.inverse

    def log_reference(theta):
        return -0.5 * jnp.sum((inverse @ (theta - mode)) ** 2) / width**2

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

    def sampled(key, theta):
        key_data, key_start, key_run = jax.random.split(key, 3)
        terms, failed = summed(key_data, theta)
        found = find_mode(posterior, terms, 10.0)
        terms = terms._replace(mode=found.theta, factor=found.factor, inverse=jnp.linalg.inv(found.factor), chart=None)
        point = point_at(posterior, terms, inside(posterior, terms, jax.random.normal(key_start, (d,))))

        def step(carry, key):
            point, log_size, i = carry
            point, accept_prob = langevin_step(key, point, jnp.exp(log_size), posterior, terms)
            rate = jnp.where(i < NUM_WARMUP, RATE, 0.0)  # no adaptation once draws count
            return (point, log_size + rate * (accept_prob - TARGET), i + 1), to_theta(terms, point.delta)

        keys = jax.random.split(key_run, NUM_WARMUP + NUM_BETWEEN * num_draws)
        _, path = jax.lax.scan(step, (point, jnp.log(0.7), 0), keys)
        fine = ~posterior.outside(theta, data) & jnp.all(jnp.isfinite(found.theta)) & (found.gap < 1.0)
        return path[NUM_WARMUP + NUM_BETWEEN - 1 :: NUM_BETWEEN], fine, failed

    key_theta, key_runs = jax.random.split(rng_key)
    theta = mode + width * jax.random.normal(key_theta, (num_repetitions, d)) @ factor.T
    # Some at a time: a data set of each is in memory at once.
    group = max(1, min(num_repetitions, 4_000_000 // min(num_units, CHUNK)))
    run = jax.jit(jax.vmap(sampled))
    draws, fine, failed = [], [], 0
    keys = jax.random.split(key_runs, num_repetitions)
    for i in range(0, num_repetitions, group):
        rows = (np.arange(i, i + group)) % num_repetitions  # the last group is filled up, so that there is one compilation
        new, ok, bad = run(keys[rows], theta[rows])
        keep = min(group, num_repetitions - i)
        draws.append(np.asarray(new[:keep]))
        fine.append(np.asarray(ok[:keep]))
        failed += int(bad[:keep].sum())
    simulator.count("calibration", num_repetitions * num_units, failed)
    kept = np.concatenate(fine)
    return Calibration(tuple(fit.units.parameters.labels), np.asarray(theta)[kept], np.concatenate(draws)[kept], int((~kept).sum()))

"""Turns of drawing from a posterior that leans on the ends of intervals and removing the mean of the score over the draws."""

from dataclasses import dataclass, fields
from functools import cached_property

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from numpyro_sls.leaning import NUM_CHAINS, NUM_KEPT, MeanSums, around_draws, draw_posterior, first_places, make_mean_sums, solve_mean
from numpyro_sls.learning import Learner
from numpyro_sls.score import DataTerms, Local, Mode, PosteriorScore, UnitScore

__all__ = ["LARGE", "Turns"]

LARGE = (256, 64)  # thetas and units in a batch near the posterior, where there is room for ten
NUM_TURNS = 24  # fewer where the simulations do not reach for them
NUM_POOLED = 4  # turns whose draws are taken together: one turn's alone overshoot
LAST_SHARE = 0.4  # of the simulations for the last turn


@dataclass(frozen=True, eq=False)
class Turns:
    """Compiled once for a learner and used for every data set."""

    learner: Learner

    def __getstate__(self) -> dict:
        return {f.name: getattr(self, f.name) for f in fields(self)}  # without what was compiled

    def __call__(self, rng_key: Array, unit: UnitScore, data: DataTerms, max_simulations: int) -> tuple[DataTerms, Mode]:
        """Remove the mean of the score over draws of the posterior that it gives, and over those of the posterior that this gives."""
        theta = None
        num_batches = max(2, max_simulations // (LARGE[0] * LARGE[1]))
        num_before = min(NUM_TURNS - 1, int((1 - LAST_SHARE) * num_batches))
        each = int((1 - LAST_SHARE) * num_batches) // num_before
        num_each = [each] * num_before + [num_batches - each * num_before]
        recent: list[Array] = []
        for i, num in enumerate(num_each):
            key_draw, key_sums, key_rows = jax.random.split(jax.random.fold_in(rng_key, i), 3)
            if i == 0:
                # First over the middle of the region: with its mean still in it, a score can send the posterior anywhere.
                middle = 0.5 * jax.random.normal(key_draw, (NUM_CHAINS * NUM_KEPT, unit.proposal.dim))
                drawn = jax.vmap(unit.proposal.unwhiten)(middle)
            else:
                drawn = theta = self.draws(key_draw, unit, data, None if theta is None else theta[-NUM_CHAINS:])
            recent = [*recent, drawn][-NUM_POOLED:]
            pool = jnp.concatenate(recent)
            data, mode = around_draws(self._posterior(unit), data, pool)
            totals = self._totals(key_sums, key_rows, pool, unit, data.local, mode, num)
            offset, slope = (jnp.asarray(a, pool.dtype) for a in solve_mean(totals, unit.proposal.dim))
            data = data._replace(local=data.local._replace(offset=offset, slope=slope))
        assert theta is not None
        # Where the sampler starts, and in which coordinates, follows the last posterior.
        theta = self.draws(jax.random.fold_in(rng_key, len(num_each)), unit, data, theta[-NUM_CHAINS:])
        last, mode = around_draws(self._posterior(unit), data, theta)
        return last._replace(local=data.local), mode

    def _totals(self, key_sums: Array, key_rows: Array, pool: Array, unit: UnitScore, local: Local, mode: Mode, num: int) -> MeanSums:
        """The normal equations of the mean over the pooled draws, in double precision; what that cost is entered."""
        totals = None
        for j in range(num):
            rows = jax.random.randint(jax.random.fold_in(key_rows, j), (LARGE[0],), 0, len(pool))
            new = self._mean_sums(jax.random.fold_in(key_sums, j), pool[rows], unit, local, mode.eta_factor)
            new = jax.tree.map(lambda a: np.asarray(a, float), new)
            totals = new if totals is None else jax.tree.map(np.add, totals, new)
        assert totals is not None
        self.learner.simulator.count("debiasing near the posterior", num * LARGE[0] * LARGE[1], int(totals.num_failed))
        return totals

    def _posterior(self, unit: UnitScore) -> PosteriorScore:
        return PosteriorScore(self.learner.learned, unit, self.learner.simulator.units.parameters.log_prior)

    def draws(self, rng_key: Array, unit: UnitScore, data: DataTerms, start: Array | None) -> Array:
        """Draws of the posterior that a unit score and a data set's terms give, from the ends of chains before or from the mode."""
        # The start is made outside, so that there is one program to compile, which takes long.
        return self._draws(rng_key, unit, data, first_places(jax.random.split(rng_key)[0], data) if start is None else start)

    @cached_property
    def _draws(self):
        return jax.jit(lambda rng_key, unit, data, start: draw_posterior(rng_key, self._posterior(unit), data, start))

    @cached_property
    def _mean_sums(self):
        def mean_score(rng_key, theta, unit):
            batch = self.learner.simulator.batch(rng_key, theta, LARGE[1])

            def at(theta, x, ok):
                return (ok / jnp.maximum(ok.sum(), 1)) @ self.learner.learned.units(unit, unit.proposal.whiten(theta), x)

            return jax.vmap(at)(batch.theta, batch.x, batch.ok.astype(batch.x.dtype)), (~batch.ok).sum()

        return make_mean_sums(mean_score)

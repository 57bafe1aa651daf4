"""Turns of drawing from a posterior that leans on the ends of intervals and removing the mean of the score over the draws."""

from dataclasses import dataclass, fields
from functools import cached_property

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from numpyro_sls.leaning import (
    NUM_CHAINS,
    NUM_KEPT,
    MeanSums,
    around_draws,
    draw_posterior,
    first_places,
    make_mean_sums,
    num_third,
    solve_mean,
)
from numpyro_sls.learning import Learner
from numpyro_sls.score import DataTerms, Local, Mode, PosteriorScore, UnitScore

__all__ = ["LARGE", "Turns"]

LARGE = (256, 64)  # thetas and units in a batch near the posterior, where there is room for ten
NUM_TURNS = 24  # fewer where the simulations do not reach for them
NUM_POOLED = 4  # turns whose draws are taken together: one turn's alone overshoot
NUM_SEARCHING = 12  # turns until the place is about right; what is measured in the others is added up
LAST_SHARE = 0.4  # of the simulations for the last turn
SEARCHING_SHARE, FIRST_SHARE = 0.2, 0.15  # for all turns of the search, and for the first one with second-order terms, where there are such
THIRD_NOISE = 0.1  # in squared posterior sds, all coordinates together, that second-order terms of the mean may bring
# Beyond the places where those are measured a cubic potential can have modes of its own, or hide the right one: chains at
# temperatures up to this, and before the last turn as many places again from the region, in sds of the training.
HOTTEST, WIDE = 4.0, 0.7


def _plan(num_batches: int, second_order: bool) -> list[int]:
    """Batches for every turn."""
    if not second_order:
        num_before = min(NUM_TURNS - 1, int((1 - LAST_SHARE) * num_batches))
        each = int((1 - LAST_SHARE) * num_batches) // num_before
        return [each] * num_before + [num_batches - each * num_before]
    num_wide = NUM_TURNS - NUM_SEARCHING - 2
    shares = [SEARCHING_SHARE / NUM_SEARCHING] * NUM_SEARCHING + [FIRST_SHARE]
    shares += [(1 - LAST_SHARE - SEARCHING_SHARE - FIRST_SHARE) / num_wide] * num_wide
    before = [max(1, int(share * num_batches)) for share in shares]
    return [*before, max(1, num_batches - sum(before))]


@dataclass(frozen=True, eq=False)
class Turns:
    """Compiled once for a learner and used for every data set."""

    learner: Learner

    def __getstate__(self) -> dict:
        return {f.name: getattr(self, f.name) for f in fields(self)}  # without what was compiled

    def __call__(self, rng_key: Array, unit: UnitScore, data: DataTerms, max_simulations: int) -> tuple[DataTerms, Mode]:
        """Remove the mean of the score over draws of the posterior that it gives, and over those of the posterior that this gives."""
        theta, d = None, unit.proposal.dim
        num_batches = max(2, max_simulations // (LARGE[0] * LARGE[1]))
        second_order = (
            num_batches > NUM_TURNS and num_third(d) * float(data.num_units) <= THIRD_NOISE * (1 - SEARCHING_SHARE) * max_simulations
        )
        num_each = _plan(num_batches, second_order)
        recent: list[Array] = []
        totals, frame, third = None, None, False
        for i, num in enumerate(num_each):
            key_draw, key_sums, key_rows = jax.random.split(jax.random.fold_in(rng_key, i), 3)
            if i == 0:
                # First over the middle of the region: with its mean still in it, a score can send the posterior anywhere.
                drawn = self._over_region(key_draw, unit, 0.5)
            else:
                drawn = theta = self.draws(key_draw, unit, data, None if theta is None else theta[-NUM_CHAINS:], HOTTEST if third else 1.0)
            recent = [*recent, drawn][-(i - NUM_SEARCHING if third else NUM_POOLED) :]
            pool = jnp.concatenate(recent)
            data, _ = around_draws(self._posterior(unit), data, pool)
            if i <= NUM_SEARCHING:
                totals, frame = None, data.local
            assert frame is not None
            third = second_order and i >= NUM_SEARCHING
            if third and i < len(num_each) - 1:
                pool = jnp.concatenate([pool, self._over_region(key_draw, unit, WIDE, len(pool))])
            totals = self._totals(totals, key_sums, key_rows, pool, unit, frame, num)
            offset, slope, tensor = jax.tree.map(jnp.asarray, solve_mean(totals, d, third))
            data = data._replace(local=frame._replace(offset=offset, slope=slope, third=tensor))
        assert theta is not None
        # Where the sampler starts, and in which coordinates, follows the last posterior.
        theta = self.draws(jax.random.fold_in(rng_key, len(num_each)), unit, data, theta[-NUM_CHAINS:])
        last, mode = around_draws(self._posterior(unit), data, theta)
        return last._replace(local=data.local), mode

    def _over_region(self, rng_key: Array, unit: UnitScore, width: float, num: int = NUM_CHAINS * NUM_KEPT) -> Array:
        """Draws of a normal, relative to that of the training."""
        return jax.vmap(unit.proposal.unwhiten)(width * jax.random.normal(rng_key, (num, unit.proposal.dim)))

    def _totals(
        self, totals: MeanSums | None, key_sums: Array, key_rows: Array, pool: Array, unit: UnitScore, local: Local, num: int
    ) -> MeanSums:
        """The normal equations of the mean with those over the pooled draws, in double precision; what that cost is entered."""
        num_failed = 0
        for j in range(num):
            rows = jax.random.randint(jax.random.fold_in(key_rows, j), (LARGE[0],), 0, len(pool))
            new = self._mean_sums(jax.random.fold_in(key_sums, j), pool[rows], unit, local)
            new = jax.tree.map(lambda a: np.asarray(a, float), new)
            num_failed += int(new.num_failed)
            totals = new if totals is None else jax.tree.map(np.add, totals, new)
        assert totals is not None
        self.learner.simulator.count("debiasing near the posterior", num * LARGE[0] * LARGE[1], num_failed)
        return totals

    def _posterior(self, unit: UnitScore) -> PosteriorScore:
        return PosteriorScore(self.learner.learned, unit, self.learner.simulator.units.parameters.log_prior)

    def draws(self, rng_key: Array, unit: UnitScore, data: DataTerms, start: Array | None, hottest: float = 1.0) -> Array:
        """Draws of the posterior that a unit score and a data set's terms give, from the ends of chains before or from the mode.

        The chains' temperatures go from 1 to ``hottest``; which chain goes on at which one is left to chance.
        """
        # The start is made outside, so that there is one program to compile, which takes long.
        key_start, key_run = jax.random.split(rng_key)
        start = first_places(key_start, data) if start is None else jax.random.permutation(key_start, start)
        return self._draws(key_run, unit, data, start, 1 / jnp.linspace(1.0, hottest, NUM_CHAINS))

    @cached_property
    def _draws(self):
        return jax.jit(lambda key, unit, data, *chains: draw_posterior(key, self._posterior(unit), data, *chains))

    @cached_property
    def _mean_sums(self):
        def mean_score(rng_key, theta, unit):
            batch = self.learner.simulator.batch(rng_key, theta, LARGE[1])

            def at(theta, x, ok):
                return (ok / jnp.maximum(ok.sum(), 1)) @ self.learner.learned.units(unit, unit.proposal.whiten(theta), x)

            return jax.vmap(at)(batch.theta, batch.x, batch.ok.astype(batch.x.dtype)), (~batch.ok).sum()

        return make_mean_sums(mean_score)

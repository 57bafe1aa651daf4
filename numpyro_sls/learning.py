"""One round of learning: the score of a unit under a proposal, its mean, and what one data set makes of it."""

from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Bool, Float
import numpy as np

from numpyro_sls.debias import Debias, LocalMean, local_mean, make_local_sums, mean_loss
from numpyro_sls.networks import Standardizer, make_standardizer
from numpyro_sls.objectives import blend_loss, joint_weights
from numpyro_sls.proposal import Proposal
from numpyro_sls.score import DataTerms, LearnedScore, Mode, PosteriorScore, UnitScore, find_mode
from numpyro_sls.simulate import Batch, Simulator
from numpyro_sls.training import LossCurve, Trainer, Training, make_trainer, train

__all__ = ["Learner"]


class ScoreContext(NamedTuple):
    """What one round of score training has that another does not."""

    proposal: Proposal
    standardizer: Standardizer
    joint_weights: Float[Array, " d"]
    table: Batch | None


class MeanContext(NamedTuple):
    """The score whose mean is learnt, and how much of the joint score to subtract from it as a control variate."""

    unit: UnitScore
    control: Float[Array, " d"]
    table: Batch | None = None


class LocalContext(NamedTuple):
    """The same around one data set."""

    mean: MeanContext
    data: DataTerms


HELD_OUT_THETAS = 256
CENTRE_UNITS = 100_000  # simulated at most to debias the middle of the region
MAX_MOVE = 0.3  # of the mode by debiasing, in posterior sds, for the place where the mean was measured to be right
MAX_SLOPE_SE = 0.1  # of the local mean's slope, relative to the information, for it to be used
INFORMATION_UNITS = 4096  # simulated at most to estimate one unit's information
LARGE = (256, 64)  # thetas and units in a batch of the local debiasing, where there is room for ten


def _around(data: DataTerms, centre: Float[Array, " d"], factor: Float[Array, "d d"]) -> DataTerms:
    """The same data with the local coordinates delta laid elsewhere, and no local mean yet."""
    zero = jnp.zeros_like(centre)
    return data._replace(centre=centre, factor=factor, inverse=jnp.linalg.inv(factor), offset=zero, slope=jnp.zeros_like(factor))


@dataclass(frozen=True, eq=False)
class Learner:
    """The stages of learning on one simulator; each is compiled once and used for every round."""

    simulator: Simulator
    learned: LearnedScore
    training: Training
    target: str
    joint_valid: Bool[np.ndarray, " d"]
    progress_bar: bool

    def __getstate__(self) -> dict:
        return {f.name: getattr(self, f.name) for f in fields(self)}  # without what was compiled

    def score(self, rng_key: Array, proposal: Proposal, num_simulations: int, stage: str) -> tuple[UnitScore, LossCurve]:
        """Train the score of one unit under a proposal with so many simulated units."""
        key_source, key_init, key_train = jax.random.split(rng_key, 3)
        pilot, held_out, table, num_steps = self._source(key_source, proposal, num_simulations, stage)
        context, weights = self._prepare(key_init, pilot, proposal)
        context = context._replace(table=table)
        weights, curve = train(
            self._score_trainer,
            key_train,
            weights,
            held_out,
            context,
            num_steps,
            learning_rate=self.training.learning_rate,
            patience=None if table is None else self.training.patience,
            description=stage,
            progress_bar=self.progress_bar,
        )
        self._count_stream(stage, table, curve)
        return UnitScore(weights, proposal, context.standardizer, None), curve

    def mean(self, rng_key: Array, unit: UnitScore, num_simulations: int) -> tuple[UnitScore, LossCurve]:
        """Learn the mean of the score over the whole region (paper, 3.2.2)."""
        key_source, key_init, key_train = jax.random.split(rng_key, 3)
        stage = "debiasing"
        pilot, held_out, table, num_steps = self._source(key_source, unit.proposal, num_simulations, stage)
        weights, curve = train(
            self._mean_trainer,
            key_train,
            jax.jit(self.learned.mean_network.init)(key_init),
            held_out,
            MeanContext(unit, self._control(unit, pilot), table),
            num_steps,
            learning_rate=self.training.learning_rate,
            patience=None if table is None else self.training.patience,
            description=stage,
            progress_bar=self.progress_bar,
        )
        self._count_stream(stage, table, curve)
        return unit._replace(mean_weights=weights), curve

    def information(
        self, rng_key: Array, unit: UnitScore, eta: Float[Array, " d"], num_simulations: int, stage: str
    ) -> Float[Array, "d d"]:
        """Fisher information of one unit in theta, from the learned score on simulations at one point."""
        theta = unit.proposal.unwhiten(eta)
        m = self.training.num_per_theta
        k = min(num_simulations, INFORMATION_UNITS) // m
        batch = self._simulate(rng_key, jnp.broadcast_to(theta, (k, theta.shape[0])), m)
        self.simulator.count(stage, batch.ok.size, int((~batch.ok).sum()))
        s = self._raw(unit, jnp.broadcast_to(eta, (k, eta.shape[0])), batch.x)
        s = jnp.where(batch.ok[..., None], s, 0.0).reshape(-1, theta.shape[0])
        s = s - s.mean(0)
        return unit.proposal.inverse.T @ (s.T @ s / batch.ok.sum()) @ unit.proposal.inverse

    def condition(
        self, rng_key: Array, unit: UnitScore, x: Float[Array, "n p"], settings: Debias, max_simulations: int
    ) -> tuple[DataTerms, Mode, LocalMean]:
        """Sum the score over a data set, find its mode and debias around it; again there, if that moved it."""
        keys = jax.random.split(rng_key, 4)
        # First over the middle of the region: the mode of a score that is off by a constant can be anywhere.
        wide = 0.5 * jnp.eye(unit.proposal.dim)
        data = _around(self.terms(unit, x), jnp.zeros(unit.proposal.dim), wide)
        found = self._local(keys[0], unit, data, 0.0, min(max_simulations // 5, CENTRE_UNITS))
        data = data._replace(offset=found.offset, slope=found.slope)
        left, mode, moved = max_simulations - found.num_simulated, self.mode(unit, data), True
        for i, key in enumerate(keys[1:]):
            data = _around(data, mode.eta, mode.factor)
            # In delta the posterior has unit sd and n units carry unit information: a bias of b per unit moves its mean by n b.
            found = self._local(key, unit, data, settings.tolerance / x.shape[0], left // 5 if moved and i < 2 else left)
            error = float(jnp.max(found.offset_se)) * x.shape[0]
            # A slope that is mostly noise can cancel the information itself and send the mode away.
            data = data._replace(offset=found.offset, slope=found.slope * (error <= MAX_SLOPE_SE))
            left -= found.num_simulated
            mode = self.mode(unit, data)
            moved = bool(jnp.linalg.norm(data.inverse @ (mode.eta - data.centre)) > MAX_MOVE)
            if left < self.training.batch_size * 10 or (not moved and error <= settings.tolerance):
                break
        return data, mode, found

    def terms(self, unit: UnitScore, x: Float[Array, "n p"]) -> DataTerms:
        """The sum over a data set, not debiased locally yet."""
        d = unit.proposal.dim
        zero, eye = jnp.zeros(d), jnp.eye(d)
        summary, radius = self.learned.summarize(unit, x), np.sqrt(d) + 3.0
        return DataTerms(
            summary, jnp.asarray(float(x.shape[0])), zero, eye, eye, zero, jnp.zeros((d, d)), jnp.asarray(radius), jnp.asarray(50.0)
        )

    @cached_property
    def mode(self):
        """Mode of the posterior that a unit score and a data set's terms give."""
        log_prior = self.simulator.units.parameters.log_prior
        return jax.jit(lambda unit, data: find_mode(PosteriorScore(self.learned, unit, log_prior), data))

    def _local(self, rng_key: Array, unit: UnitScore, data: DataTerms, tolerance: float, max_simulations: int) -> LocalMean:
        """Measure the mean of the score around the centre of one data set's terms."""
        stage = "debiasing near the posterior"
        key_pilot, key_mean = jax.random.split(rng_key)
        d = unit.proposal.dim
        eta = data.centre + jax.random.normal(key_pilot, (self.training.num_thetas, d)) @ data.factor.T
        pilot = self._simulate(key_pilot, jax.vmap(unit.proposal.unwhiten)(eta), self.training.num_per_theta)
        self.simulator.count(stage, pilot.ok.size, int((~pilot.ok).sum()))
        context = LocalContext(MeanContext(unit, self._control(unit, pilot)), data)
        large = max_simulations >= 10 * LARGE[0] * LARGE[1]
        sums_fn, size = (self._large_sums, LARGE[0] * LARGE[1]) if large else (self._small_sums, self.training.batch_size)
        left = max_simulations - pilot.ok.size
        found = local_mean(key_mean, sums_fn, context, d, jnp.full(d, tolerance), left, size, self.progress_bar)
        self.simulator.count(stage, found.num_simulated, found.num_failed)
        return found._replace(num_simulated=found.num_simulated + pilot.ok.size)

    @cached_property
    def _large_sums(self):
        return make_local_sums(partial(self._local_scores, LARGE[1]), LARGE[0], len(self.joint_valid))

    @cached_property
    def _small_sums(self):
        return make_local_sums(partial(self._local_scores, self.training.num_per_theta), self.training.num_thetas, len(self.joint_valid))

    def _local_scores(self, num_per_theta: int, rng_key: Array, delta: Float[Array, "k d"], context: "LocalContext") -> tuple[Array, Array]:
        (unit, control, _), data = context
        eta = data.centre + delta @ data.factor.T
        batch = self.simulator.batch(rng_key, jax.vmap(unit.proposal.unwhiten)(eta), num_per_theta)
        s = jax.vmap(lambda e, x: self.learned.units(unit, e, x))(eta, batch.x)
        return (s - control * (batch.joint_score @ unit.proposal.factor)) @ data.factor, batch.ok

    @cached_property
    def _prepare(self):
        """Standardization, weights of the joint target and first weights of the network, from the first units of a round."""

        @jax.jit
        def prepare(rng_key: Array, pilot: Batch, proposal: Proposal) -> tuple[ScoreContext, Any]:
            x = pilot.x.reshape(-1, pilot.x.shape[-1])
            t = pilot.joint_score.reshape(-1, proposal.dim) @ proposal.factor
            standardizer = make_standardizer(x)
            weights = self.learned.network.init(rng_key, proposal.dim, standardizer(x[:1]).shape[-1])
            return ScoreContext(proposal, standardizer, joint_weights(self.target, self.joint_valid, t), None), weights

        return prepare

    def _source(self, rng_key: Array, proposal: Proposal, num_simulations: int, stage: str) -> tuple[Batch, Batch, Batch | None, int]:
        """Units to look at first, held-out ones, a table (None: a stream), and how many steps the budget allows."""
        num_thetas = num_simulations // self.training.num_per_theta
        if self.training.is_fresh:
            held_out = self._draw(rng_key, proposal, min(HELD_OUT_THETAS, num_thetas // 4), stage)
            return held_out, held_out, None, (num_thetas - held_out.theta.shape[0]) // self.training.num_thetas
        drawn = self._draw(rng_key, proposal, num_thetas, stage)
        cut = max(1, num_thetas // 5)
        held_out, table = (jax.tree.map(lambda a, s=s: a[s], drawn) for s in (slice(cut), slice(cut, None)))
        return drawn, held_out, table, self.training.num_epochs * (num_thetas - cut) // self.training.num_thetas

    def _count_stream(self, stage: str, table: Batch | None, curve: LossCurve) -> None:
        if table is None:
            self.simulator.count(stage, int(curve.steps[-1]) * self.training.batch_size, curve.tally)

    def _draw(self, rng_key: Array, proposal: Proposal, num_thetas: int, stage: str) -> Batch:
        key_theta, key_units = jax.random.split(rng_key)
        batch = self._simulate(key_units, proposal.sample(key_theta, num_thetas), self.training.num_per_theta)
        self.simulator.count(stage, batch.ok.size, int((~batch.ok).sum()))
        return batch

    def _control(self, unit: UnitScore, batch: Batch) -> Float[Array, " d"]:
        """Best multiple of t to subtract from s: cov(s, t) / var(t), where t has mean zero."""
        eta = jax.vmap(unit.proposal.whiten)(batch.theta)
        s = self._raw(unit, eta, batch.x).reshape(-1, unit.proposal.dim)
        t = batch.joint_score.reshape(-1, unit.proposal.dim) @ unit.proposal.factor
        variance = jnp.var(t, axis=0)
        best = jnp.mean((s - s.mean(0)) * t, axis=0) / jnp.where(variance > 0, variance, 1.0)
        return jnp.where(jnp.asarray(np.sort(self.joint_valid)), best, 0.0)

    def _next_batch(self, rng_key: Array, proposal: Proposal, table: Batch | None) -> Batch:
        if table is not None:
            rows = jax.random.randint(rng_key, (self.training.num_thetas,), 0, table.theta.shape[0])
            return jax.tree.map(lambda a: a[rows], table)
        key_theta, key_units = jax.random.split(rng_key)
        return self.simulator.batch(key_units, proposal.sample(key_theta, self.training.num_thetas), self.training.num_per_theta)

    @cached_property
    def _raw(self):
        return jax.jit(jax.vmap(self.learned.raw, (None, 0, 0)))

    @cached_property
    def _simulate(self):
        return jax.jit(self.simulator.batch, static_argnums=2)

    @cached_property
    def _score_trainer(self) -> Trainer:
        def loss_fn(weights: Any, batch: Batch, context: ScoreContext) -> tuple[Array, Array]:
            def at(theta, x, joint_score, ok):
                eta = context.proposal.whiten(theta)
                terms = self.learned.network.terms(weights, eta, context.standardizer(x))
                return blend_loss(terms, joint_score @ context.proposal.factor, eta, context.joint_weights, ok)

            return jnp.mean(jax.vmap(at)(*batch)), (~batch.ok).sum()

        return make_trainer(loss_fn, lambda key, context: self._next_batch(key, context.proposal, context.table))

    @cached_property
    def _mean_trainer(self) -> Trainer:
        def loss_fn(weights: Any, batch: Batch, context: MeanContext) -> tuple[Array, Array]:
            unit = context.unit
            eta = jax.vmap(unit.proposal.whiten)(batch.theta)
            s = jax.vmap(lambda e, x: self.learned.raw(unit, e, x))(eta, batch.x)
            s = s - context.control * (batch.joint_score @ unit.proposal.factor)
            mean = jax.vmap(lambda e: self.learned.mean_network.mean(weights, e))(eta)
            return mean_loss(mean, s, batch.ok), (~batch.ok).sum()

        return make_trainer(loss_fn, lambda key, context: self._next_batch(key, context.unit.proposal, context.table))

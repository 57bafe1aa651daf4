"""What one data set makes of a learned score: its sums, the mode of its posterior, and what is mended around that mode."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float
import numpy as np

from numpyro_sls.debias import Debias, LocalMean, MeanZero, local_mean, make_local_sums
from numpyro_sls.focus import FocusTerms
from numpyro_sls.leaning import around_draws
from numpyro_sls.learning import FOCUS_THETAS, Learner
from numpyro_sls.marginals import MAX_COLUMNS, NUM_TAILS, MarginalUnits, make_edges, make_marginal_sums, no_marginals, solve_marginals
from numpyro_sls.readout import Readout, ReadoutUnits, make_bend_sums, make_readout_sums, solve_bend, solve_readout
from numpyro_sls.score import REACH, DataTerms, Mode, PosteriorScore, UnitScore, find_mode, no_local
from numpyro_sls.turns import LARGE, Turns

__all__ = ["Conditioned", "Conditioner"]


class Conditioned(NamedTuple):
    """The terms of a data set, the mode that they give, and how that was measured."""

    data: DataTerms
    mode: Mode
    mean: LocalMean | None  # None where nothing was measured near the posterior
    readout: Readout | None


class LocalContext(NamedTuple):
    """What the compiled sums near the posterior need."""

    unit: UnitScore
    control: Float[Array, " d"]
    focus: FocusTerms | None
    data: DataTerms


CENTRE_UNITS = 100_000  # simulated at most to debias the middle of the region
MAX_MOVE = 0.3  # of the mode by debiasing, in posterior sds, for the place where the mean was measured to be right
MAX_SLOPE_SE = 0.1  # of the local mean's slope, relative to the information, for it to be used
READOUT_WIDTH = 0.07  # of the pairs, in sds of one unit's information
MAX_LINE_SD = 0.3  # of a posterior, where an interval is laid out as a standard normal
MAX_GAP = 1.0  # of Newton's last step, in posterior sds, for a mode to count as one
RARE_WIDTH = 0.7  # of the pairs for units out of the model's reach, in posterior sds
BEND_PLACES = 1.5  # posterior sds around the mode, where it is seen how the score of such units changes
BEND_UNITS = 6_000_000  # simulated at most for that
READOUT_UNITS = 4_000_000  # simulated at most for the readout
COUNT_UNITS, EDGE_UNITS = 2_000_000, 65_536  # simulated at most for the marginal scores, and for the ends of their bins
READOUT_NOISE = 5e-4  # share of the score's variance, at which the readout is sure enough
MIN_READOUT_UNITS = 400_000
MIN_BATCHES = 20  # of the bend, for their noise to be known


@dataclass(frozen=True, eq=False)
class Conditioner:
    """Compiled once for a learner and used for every data set."""

    learner: Learner

    def __getstate__(self) -> dict:
        return {f.name: getattr(self, f.name) for f in fields(self)}  # without what was compiled

    def terms(self, unit: UnitScore, x: Float[Array, "n p"], num_units: int) -> DataTerms:
        """The sum over a data set, nothing mended locally yet. Rows beyond ``num_units`` are replicates, and are averaged over."""
        d = unit.proposal.dim
        summary, mean_summary = self.learner.learned.summarize(unit, x)
        marginals = no_marginals(self._num_columns, d)
        features = self.learner.learned.total_features(unit, x, marginals)
        share = num_units / x.shape[0]
        if self.learner.learned.network.has_potential:
            summary = share * summary
        centre, factor = unit.proposal.frame()
        low, high = self.learner.bounds(x)
        return DataTerms(
            summary,
            share * mean_summary,
            share * features,
            jnp.asarray(float(num_units)),
            no_local(jnp.zeros(d), 0.5 * jnp.eye(d), marginals, features.shape[0]),
            centre,
            0.5 * factor,
            jnp.linalg.inv(0.5 * factor),
            low,
            high,
            jnp.asarray(np.sqrt(d) + 3.0),
            jnp.asarray(50.0 + num_units),
        )

    def __call__(
        self,
        rng_key: Array,
        unit: UnitScore,
        x: Float[Array, "n p"],
        num_units: int,
        settings: Debias | None,
        max_simulations: int,
    ) -> Conditioned:
        """Sum the score over a data set, find its mode and mend the score around it; again there, if that moved it."""
        keys = jax.random.split(rng_key, 8)
        data = self.terms(unit, x, num_units)
        if settings is None or not settings.near:
            mode = self.mode(unit, data, jnp.inf)
            return Conditioned(_around(data, mode), mode, None, None)
        # First over the middle of the region: the mode of a score that is off by a constant can be anywhere.
        found = self._measure(keys[0], unit, data, 0.0, min(max_simulations // 5, CENTRE_UNITS))
        data = data._replace(local=data.local._replace(offset=found.offset, slope=found.slope))
        left, mode, moved, readout = max_simulations - found.num_simulated, self.mode(unit, data, jnp.inf), True, None
        has_layout = self.learner.learned.layout(unit) is not None
        for i in range(3):
            if (mode.gap > MAX_GAP and (i == 0 or has_layout)) or (i == 0 and self._leans(unit, mode)):
                # Without a mode there is no place around which to mend anything; what was measured elsewhere may be wrong here.
                data = self.terms(unit, x, num_units)
                mode = self.mode(unit, data, jnp.inf)
                if not has_layout:
                    return Conditioned(_around(data, mode), mode, None, None)
                data, mode = self._turns(keys[7], unit, _around(data, mode), left)
                return Conditioned(data, mode, None, None)
            data = _around(data, mode)
            if moved and left > 4 * MIN_READOUT_UNITS and data.features.shape[0]:
                key_count, key_focus, key_read = jax.random.split(keys[2 * i + 1], 3)
                focus = self._focus(key_focus, data, x)
                spread = focus is not None and bool(focus.spread > 0)
                # Where there is more to do, something is kept for doing it again where the mode has moved to.
                data, counted = self._count(key_count, unit, data, x, focus, left // (16 if spread and i == 0 else 8))
                readout, spent = self._read(key_read, unit, data, focus, left // 4)
                spent += counted
                data, left = data._replace(local=data.local._replace(readout=readout.readout)), left - spent
                data, spent = self._bend(jax.random.fold_in(key_read, 1), unit, data, focus, left // 4)
                left -= spent
            # In delta the posterior has unit sd and n units carry unit information: a bias of b per unit moves its mean by n b.
            found = self._measure(keys[2 * i + 2], unit, data, settings.tolerance / num_units, left // 5 if moved and i < 2 else left)
            error = float(jnp.max(found.offset_se)) * num_units
            # A slope that is mostly noise can cancel the information itself and send the mode away.
            data = data._replace(local=data.local._replace(offset=found.offset, slope=found.slope * (error <= MAX_SLOPE_SE)))
            left -= found.num_simulated
            mode = self.mode(unit, data, _trust(data))
            moved = bool(_distance(data, mode) > MAX_MOVE * np.sqrt(unit.proposal.dim))
            lost = has_layout and bool(mode.gap > MAX_GAP)
            if left < self.learner.training.batch_size * 10 or (not moved and not lost and error <= settings.tolerance):
                break
        return Conditioned(data, mode, found, readout)

    def _leans(self, unit: UnitScore, mode: Mode) -> bool:
        """Whether some parameter's interval is so much of its posterior that there the line is bent: what is normal on it is not in its values."""
        low, high = self.learner.simulator.units.parameters.box
        sds = np.sqrt((np.asarray(mode.factor) ** 2).sum(1))
        return self.learner.learned.layout(unit) is not None and bool((sds[np.isfinite(high - low)] > MAX_LINE_SD).any())

    def unmended(self, unit: UnitScore, x: Float[Array, "n p"], num_units: int) -> tuple[DataTerms, Mode]:
        """The posterior that the score gives over its whole region, nothing mended near it: where it lies, without a simulation."""
        data = self.terms(unit, x, num_units)
        mode = self.mode(unit, data, jnp.inf)
        if mode.gap > MAX_GAP and self.learner.learned.layout(unit) is not None:
            data = _around(data, mode)
            posterior = PosteriorScore(self.learner.learned, unit, self.learner.simulator.units.parameters.log_prior)
            return around_draws(posterior, data, self._turns.draws(jax.random.key(0), unit, data, None))
        return _around(data, mode), mode

    @cached_property
    def _turns(self) -> Turns:
        return Turns(self.learner)

    @cached_property
    def mode(self):
        """Mode of the posterior that a unit score and a data set's terms give."""
        log_prior = self.learner.simulator.units.parameters.log_prior
        return jax.jit(lambda unit, data, trust: find_mode(PosteriorScore(self.learner.learned, unit, log_prior), data, trust))

    def mean_zero(self, rng_key: Array, unit: UnitScore, data: DataTerms, labels: tuple[str, ...], num_simulations: int) -> MeanZero:
        """The mean of the score near the posterior at three stages, on fresh simulations."""
        local = data.local
        nothing = [jnp.zeros_like(a) for a in (local.readout, local.offset, local.slope)]
        blank = data._replace(local=local._replace(readout=nothing[0], offset=nothing[1], slope=nothing[2], bend=None, third=None))
        n, found = float(data.num_units), []
        for stage, (u, terms) in enumerate(((unit._replace(mean_weights=None, moments=None), blank), (unit, blank), (unit, data))):
            found.append(self._measure(jax.random.fold_in(rng_key, stage), u, terms, 0.0, num_simulations // 3, "diagnosis"))
        raw, region, final = (n * np.asarray(f.offset) for f in found)
        final = final - n * np.asarray(local.offset)  # which the measurement leaves out
        se = np.stack([n * np.asarray(f.offset_se) for f in found])
        return MeanZero(labels, raw, region, final, se, sum(f.num_simulated for f in found))

    def _focus(self, rng_key: Array, data: DataTerms, x: Float[Array, "n p"]) -> FocusTerms | None:
        """Weights in x for the units of the readout."""
        learner = replace(self.learner, observed=x) if x is not self.learner.observed else self.learner
        key_step, key_units = jax.random.split(rng_key)
        step = _readout_width(data) * jax.random.normal(key_step, (FOCUS_THETAS, data.mode.shape[0]))
        return learner.focus_terms(key_units, data.mode + step @ data.factor.T, data.mode, "readout near the posterior")

    def _measure(
        self,
        rng_key: Array,
        unit: UnitScore,
        data: DataTerms,
        tolerance: float,
        max_simulations: int,
        stage: str = "debiasing near the posterior",
    ) -> LocalMean:
        """Measure the mean of the score around the place of one data set's local terms."""
        learner, training = self.learner, self.learner.training
        key_pilot, key_mean = jax.random.split(rng_key)
        d = unit.proposal.dim
        theta = data.mode + jax.random.normal(key_pilot, (training.num_thetas, d)) @ data.factor.T
        pilot = learner.simulate(key_pilot, theta, training.num_per_theta)
        context = LocalContext(unit, learner.control(unit, pilot), None, data)
        large = max_simulations >= 10 * LARGE[0] * LARGE[1]
        sums_fn, size = (self._large_sums, LARGE[0] * LARGE[1]) if large else (self._small_sums, training.batch_size)
        left = max_simulations - pilot.ok.size
        found = local_mean(key_mean, sums_fn, context, jnp.full(d, tolerance), left, size, learner.progress_bar)
        learner.simulator.count(stage, found.num_simulated + pilot.ok.size, found.num_failed + int((~pilot.ok).sum()))
        return found._replace(num_simulated=found.num_simulated + pilot.ok.size)

    def _read(
        self, rng_key: Array, unit: UnitScore, data: DataTerms, focus: FocusTerms | None, max_simulations: int
    ) -> tuple[Readout, int]:
        """The best readout around the mode, from pairs of simulations until its noise is small."""
        size, num_units, zero = LARGE[0] * LARGE[1], int(data.num_units), jnp.zeros(unit.proposal.dim)
        contexts = [(_readout_width(data), LocalContext(unit, zero, focus, data))]
        rare = data.local.marginals.rare
        if focus is not None and rare is not None:
            # Units that the model hardly makes come from thetas far away, if there are such: their score here needs thetas from here.
            widths, parts = (contexts[0][0], RARE_WIDTH * jnp.ones(())), focus.split(int(rare))
            contexts = [(width, LocalContext(unit, zero, part, data)) for width, part in zip(widths, parts, strict=True)]
        most, least = (max(1, n // size) for n in (min(max_simulations, READOUT_UNITS * len(contexts) ** 2), MIN_READOUT_UNITS))
        valid = np.sort(self.learner.joint_valid)
        most, least = max(1, most // len(contexts)), max(1, least // len(contexts))
        sums, failed, found = None, 0, None
        for i in range(most):
            pairs = [self._readout_sums(jax.random.fold_in(rng_key, i), width, context) for width, context in contexts]
            sums, bad = _added(sums, pairs)
            failed += bad
            if i == most - 1 or (i + 1 >= least and (i + 1) % 8 == 0):
                found = solve_readout(sums, valid, num_units, NUM_TAILS * self._num_columns)
                if found.noise.max() <= READOUT_NOISE:
                    break
        assert found is not None
        spent = (i + 1) * size * len(contexts)
        self.learner.simulator.count("readout near the posterior", spent, failed)
        return found, spent

    def _bend(
        self, rng_key: Array, unit: UnitScore, data: DataTerms, focus: FocusTerms | None, max_simulations: int
    ) -> tuple[DataTerms, int]:
        """How the score of units out of the model's reach changes beside the mode, which the readout leaves to the network."""
        rare, size, d = data.local.marginals.rare, LARGE[0] * LARGE[1], unit.proposal.dim
        num = min(max_simulations, BEND_UNITS) // size
        if focus is None or rare is None or num < MIN_BATCHES:
            return data, 0
        context = LocalContext(unit, jnp.zeros(d), focus.split(int(rare))[1], data)
        batches, failed = [], 0
        for i in range(num):
            sums, bad = self._bend_sums(jax.random.fold_in(rng_key, i), jnp.asarray(BEND_PLACES), jnp.asarray(RARE_WIDTH), context)
            batches.append(jax.tree.map(lambda a: np.asarray(a, float), sums))
            failed += int(bad)
        self.learner.simulator.count("readout near the posterior", num * size, failed)
        return data._replace(local=data.local._replace(bend=solve_bend(batches, d))), num * size

    def _count(
        self, rng_key: Array, unit: UnitScore, data: DataTerms, x: Float[Array, "n p"], focus: FocusTerms | None, max_simulations: int
    ) -> tuple[DataTerms, int]:
        """Marginal scores around the mode, from counts in bins."""
        if self._num_columns == 0:
            return data, 0
        key_edges, key_sums = jax.random.split(rng_key)
        widths = [_readout_width(data)] if focus is None or focus.spread == 0 else [_readout_width(data), jnp.ones(())]
        context, size = LocalContext(unit, jnp.zeros(unit.proposal.dim), focus, data), LARGE[0] * LARGE[1]
        theta = data.mode + jax.random.normal(key_edges, (FOCUS_THETAS, unit.proposal.dim)) @ data.factor.T
        first = self.learner.simulate(key_edges, theta, EDGE_UNITS // FOCUS_THETAS, jnp.zeros(()) if focus is None else focus.spread)
        blank = no_marginals(self._num_columns, unit.proposal.dim)
        blank = make_edges(first.x[first.ok][:, : self._num_columns], first.weight[first.ok], blank)
        sums, failed = None, int((~first.ok).sum())
        num = max(1, min(max_simulations, COUNT_UNITS) // size)
        for i in range(num):
            pairs = [self._marginal_sums(jax.random.fold_in(key_sums, i), width, context, blank.edges) for width in widths]
            sums, bad = _added(sums, pairs)
            failed += bad
        assert sums is not None
        spent = EDGE_UNITS + num * size * len(widths)
        self.learner.simulator.count("readout near the posterior", spent, failed)
        marginals = solve_marginals(blank, sums, np.sort(self.learner.joint_valid))
        if len(widths) > 1:
            marginals = marginals._replace(rare=jnp.asarray(max(0.0, np.floor(np.log2(data.num_units)) - 2)))
        features = self.learner.learned.total_features(unit, x, marginals) * data.num_units / x.shape[0]
        local = data.local._replace(marginals=marginals, readout=jnp.zeros((features.shape[0], unit.proposal.dim)), bend=None)
        return data._replace(local=local, features=features), spent

    @property
    def _num_columns(self) -> int:
        """Numbers of a unit that are looked at by themselves."""
        num = self.learner.observed.shape[1] - self.learner.simulator.units.covariates.shape[1]
        return num if num <= MAX_COLUMNS and self.learner.matched == 1 and self.learner.simulator.units.num_units > 1 else 0

    @cached_property
    def _marginal_sums(self):
        return make_marginal_sums(self._marginal_units, LARGE[0], len(self.learner.joint_valid))

    def _marginal_units(self, keys: Array, step: Float[Array, "k d"], context: LocalContext) -> MarginalUnits:
        unit, local = context.unit, context.data.local
        theta = context.data.mode + step @ context.data.factor.T
        batch = self.learner.simulator.batch_of(keys, theta, LARGE[1], None if context.focus is None else context.focus.spread)

        def at(theta, t):
            return local.inverse @ (unit.proposal.whiten(theta) - local.centre), unit.proposal.score_in_eta(theta, t) @ local.factor

        delta, joint_score = jax.vmap(at)(theta, batch.joint_score)
        return MarginalUnits(delta, batch.x, joint_score, batch.weight)

    @cached_property
    def _large_sums(self):
        return make_local_sums(partial(self._local_scores, LARGE[1]), LARGE[0], len(self.learner.joint_valid))

    @cached_property
    def _small_sums(self):
        training = self.learner.training
        return make_local_sums(partial(self._local_scores, training.num_per_theta), training.num_thetas, len(self.learner.joint_valid))

    @cached_property
    def _readout_sums(self):
        return make_readout_sums(self._readout_units, LARGE[0], len(self.learner.joint_valid))

    @cached_property
    def _bend_sums(self):
        def units(keys, step, context):
            u, failed = self._readout_units(keys, step, context)
            return u._replace(score=u.score + u.features @ context.data.local.readout), failed

        return make_bend_sums(units, LARGE[0], len(self.learner.joint_valid), NUM_TAILS * self._num_columns)

    def _local_scores(
        self, num_per_theta: int, rng_key: Array, step: Float[Array, "k d"], context: LocalContext
    ) -> tuple[Array, Array, Array]:
        unit, local = context.unit, context.data.local
        theta = context.data.mode + step @ context.data.factor.T
        batch = self.learner.simulator.batch(rng_key, theta, num_per_theta)
        # The local mean itself is what is measured: of the local terms only the readout is there already.
        known = local._replace(offset=jnp.zeros_like(local.offset), slope=jnp.zeros_like(local.slope))

        def at(theta, x, t):
            eta = unit.proposal.whiten(theta)
            s = self.learner.learned.units(unit, eta, x, known) - context.control * unit.proposal.score_in_eta(theta, t)
            return local.in_delta(eta, s), local.place(eta)

        score, delta = jax.vmap(at)(theta, batch.x, batch.joint_score)
        return score, batch.ok, delta

    def _readout_units(self, keys: Array, step: Float[Array, "k d"], context: LocalContext) -> tuple[ReadoutUnits, Array]:
        unit, local = context.unit, context.data.local
        theta = context.data.mode + step @ context.data.factor.T
        batch = self.learner.simulator.batch_of(keys, theta, LARGE[1], None if context.focus is None else context.focus.spread)
        weight = batch.weight if context.focus is None else batch.weight * context.focus.weight(batch.x)

        def at(theta, x, t):
            eta = unit.proposal.whiten(theta)
            score = self.learner.learned.units(unit, eta, x) @ local.factor
            joint_score = unit.proposal.score_in_eta(theta, t) @ local.factor
            return local.inverse @ (eta - local.centre), self.learner.learned.features(unit, x, local.marginals), score, joint_score

        delta, features, score, joint_score = jax.vmap(at)(theta, batch.x, batch.joint_score)
        return ReadoutUnits(delta, features, score, joint_score, weight), (~batch.ok).sum()


def _added(sums: list | None, pairs: Sequence[tuple[Any, Array]]) -> tuple[list, int]:
    """Sums with those of one more batch, in double precision, and how many of its simulations failed."""
    new = [jax.tree.map(lambda a: np.asarray(a, float), p[0]) for p in pairs]
    return (new if sums is None else jax.tree.map(np.add, sums, new)), sum(int(p[1]) for p in pairs)


def _trust(data: DataTerms) -> float:
    """How far from where it was measured the local score holds, in posterior sds."""
    return REACH + float(np.sqrt(data.mode.shape[0]))


def _distance(data: DataTerms, mode: Mode) -> float:
    return float(jnp.linalg.norm(data.inverse @ (mode.theta - data.mode)))


def _readout_width(data: DataTerms) -> Float[Array, ""]:
    return jnp.maximum(1.0, READOUT_WIDTH * jnp.sqrt(data.num_units))


def _around(data: DataTerms, mode: Mode) -> DataTerms:
    """The same data with all local coordinates laid around a mode, and nothing mended there yet but what was read out."""
    before, factor = data.local, mode.eta_factor
    local = no_local(mode.eta, factor, before.marginals, before.readout.shape[0])
    change, readout = before.inverse @ factor, before.readout
    if before.bend is not None:
        readout = readout.at[-len(before.bend) :].add(before.bend @ before.place(mode.eta))
        local = local._replace(bend=change.T @ before.bend @ change)
    local = local._replace(readout=readout @ change)
    return data._replace(local=local, mode=mode.theta, factor=mode.factor, inverse=jnp.linalg.inv(mode.factor), chart=None)

"""One round of learning: the score of a unit under a proposal, its curvature, and its mean over the whole region."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int
import numpy as np

from numpyro_sls.boundary import BoundaryWeight
from numpyro_sls.focus import Focus, FocusTerms, focused, make_focus, out_of_reach
from numpyro_sls.inputs import Standardizer, embedded_standardizer, make_layout, make_standardizer
from numpyro_sls.networks import SeparablePotential
from numpyro_sls.objectives import CurvaturePenalty, blend_loss, curvature_loss, joint_weights
from numpyro_sls.proposal import Proposal
from numpyro_sls.score import LearnedScore, UnitScore
from numpyro_sls.simulate import Batch, Simulator
from numpyro_sls.start import MOST, NUM_FOLDS, choose, make_start_sums
from numpyro_sls.training import CHUNK, LossCurve, Speed, Trainer, Training, make_trainer, measure_speed, train

__all__ = ["Learner", "ScoreContext", "curvature_training"]


class ScoreContext(NamedTuple):
    """What one round of score training has that another does not."""

    proposal: Proposal
    standardizer: Standardizer
    joint_weights: Float[Array, " d"]
    joint_scale: Float[Array, " d"]  # the sds of the joint score
    focus: FocusTerms | None
    penalty: Float[Array, ""]  # lambda_1
    table: Batch | None


HELD_OUT_THETAS = 256
MOST_HELD_OUT = 65_536  # units of a table, looked at every 50 steps
START_WORK, START_MEMORY = 3e11, 10_000_000  # multiplications for the first weights at most, and numbers held at once
NUM_TURNS = 4  # of a table by the model's symmetry, for the first weights
MOST_JOINT = 6.0  # sds of a joint score that an embedding is taught
MOMENT_EPOCHS = 8  # passes over a table in which an embedding is taught; more, and its moments are those of the table
INFORMATION_UNITS = 4096  # simulated at most to estimate one unit's information


@dataclass(frozen=True, eq=False)
class Learner:
    """The stages of learning on one simulator; each is compiled once and used for every round."""

    simulator: Simulator
    learned: LearnedScore
    training: Training
    target: str
    joint_valid: Bool[np.ndarray, " d"]
    observed: Float[Array, "n p"]
    progress_bar: bool
    focus: Focus | None = None
    boundary: BoundaryWeight | None = None
    matched: int = 1  # units whose summed score is matched: one, or a whole data set (the n-model)
    symmetry: Callable | None = None

    def __getstate__(self) -> dict:
        return {f.name: getattr(self, f.name) for f in fields(self)}  # without what was compiled

    def bounds(self, x: Float[Array, "n p"]) -> tuple[Float[Array, " d"], Float[Array, " d"]]:
        """What the data allow of theta, as far as it was stated."""
        d = len(self.joint_valid)
        if self.boundary is None:
            return jnp.full(d, -jnp.inf, float), jnp.full(d, jnp.inf, float)
        low, high = self.boundary.bounds(x if self.matched == 1 else x.reshape(1, -1), d)
        return low.max(0), high.min(0)

    @property
    def num_per_theta(self) -> int:
        return self.matched if self.matched > 1 else self.training.num_per_theta

    @property
    def num_simulated_per_theta(self) -> int:
        """Units simulated for those that are trained on."""
        keep_all = self.focus is None or self.training.num_simulations is not None or self.matched > 1
        return self.num_per_theta * (1 if keep_all or self.focus is None else self.focus.oversample)

    def score(self, rng_key: Array, proposal: Proposal, num_simulations: int, stage: str) -> tuple[UnitScore, LossCurve]:
        """Train the score of one unit under a proposal with so many simulated units."""
        key_source, key_init, key_train = jax.random.split(rng_key, 3)
        pilot, held_out, table, num_steps = self.source(key_source, proposal, num_simulations, stage)
        context, weights = self.prepare(key_init, pilot, proposal)
        context = context._replace(table=table, focus=self._proposal_focus(key_source, proposal, stage, pilot))
        held_out = held_out if context.focus is None else focused(key_source, held_out, context.focus, held_out.ok.shape[1])
        if self.learned.network.moments:
            # Of a stream half of the units; a table has room for both, and a few passes over it are the most that a mean needs.
            num_first = num_steps // 2 if table is None else -(-num_steps * MOMENT_EPOCHS // max(self.training.num_epochs, MOMENT_EPOCHS))
            weights = self.teach(jax.random.fold_in(key_train, 1), weights, held_out, context, num_first, stage)
            num_steps = num_steps - num_first if table is None else num_steps
        weights = weights if table is None else self.start(weights, context, table)
        weights, curve = self.train(self._score_trainer, key_train, weights, held_out, context, num_steps, stage)
        self.count_stream(stage, table, curve, self.training.num_thetas * self.num_simulated_per_theta)
        return UnitScore(weights, proposal, context.standardizer, None), curve

    def teach(self, rng_key: Array, weights: Any, held_out: Batch, context: ScoreContext, num_steps: int, stage: str) -> Any:
        """An embedding that knows the moments of theta given x. The whole length is run: what is best is only found as the rate decays."""
        name = f"{stage}, moments"
        weights, curve = self.train(self._moment_trainer, rng_key, weights, held_out, context, num_steps, name, patience=num_steps)
        self.count_stream(stage, context.table, curve, self.training.num_thetas * self.num_simulated_per_theta)
        return weights

    @property
    def taught_joint(self) -> bool:
        """Whether an embedding is taught the mean of the joint score too: what a nuisance was says more of theta than theta does."""
        return self.target != "implicit" and bool(np.any(self.joint_valid))

    def moment_targets(self, theta: Float[Array, " d"], joint_score: Float[Array, "m d"], context: ScoreContext) -> Float[Array, "m k"]:
        """eta, its square and the joint score, each with mean zero and sd one without x."""
        eta = context.proposal.whiten(theta)
        parts = [jnp.broadcast_to(a, joint_score.shape) for a in (eta, (eta**2 - 1) / np.sqrt(2))]
        if self.taught_joint:
            t = context.proposal.score_in_eta(theta, joint_score) / context.joint_scale
            parts.append(jnp.where(np.sort(self.joint_valid), jnp.clip(t, -MOST_JOINT, MOST_JOINT), 0.0))
        return jnp.concatenate(parts, axis=1)

    def start(self, weights: Any, context: ScoreContext, table: Batch) -> Any:
        """First weights solved for on the table, where the network has such."""
        network, d = self.learned.network.solvable, context.proposal.dim
        if network is None or self.matched > 1 or self.boundary is not None:
            return weights
        if self.symmetry is not None:
            copies = [self._turned(jax.random.key(i), table) for i in range(NUM_TURNS)]
            # The copies of a row side by side: they belong to one fold.
            table = jax.tree.map(lambda *a: jnp.stack(a, axis=1).reshape(-1, *a[0].shape[1:]), *copies)
        batch = table if context.focus is None else table._replace(weight=table.weight * context.focus.weight(table.x))
        own = weights[0] if isinstance(weights, list) else weights
        f, groups = network.groups(own, context.standardizer(table.x[0]), d)
        sizes = np.cumsum([len(a) * len(b) for a, b in groups])
        groups = groups[: max(1, int(np.sum(sizes <= MOST)))]
        num, m = int(sum(len(a) * len(b) for a, b in groups)), table.x.shape[1]
        per_fold = min(len(table.theta), max(NUM_FOLDS, int(START_WORK / (m * d * num**2)))) // NUM_FOLDS
        size = min(per_fold, max(1, START_MEMORY // (m * d * num)))
        sums_fn, folds = self._start_sums(network, groups), []
        for i in range(NUM_FOLDS):
            rows = [
                jax.tree.map(lambda a, at=at: a[at : at + size], batch) for at in range(i * per_fold, (i + 1) * per_fold - size + 1, size)
            ]
            parts = [sums_fn(r, (own, context)) for r in rows]
            folds.append(jax.tree.map(lambda *a: np.sum([np.asarray(b, float) for b in a], axis=0) / size / len(a), *parts))
        shape = (f.shape[1], network.derivatives(own, jnp.zeros(d), jnp.ones(d))[1].shape[0])
        solved = jnp.asarray(choose(folds, groups, shape).solved, f.dtype)
        return self.learned.network.start_from(weights, solved)

    def _start_sums(self, network: SeparablePotential, groups: list[tuple[np.ndarray, np.ndarray]]) -> Callable:
        # The groups follow from how many numbers a unit has: compiled once, they serve every round.
        if len(groups) not in self._compiled_starts:
            self._compiled_starts[len(groups)] = make_start_sums(self._start_terms(network, groups))
        return self._compiled_starts[len(groups)]

    @cached_property
    def _compiled_starts(self) -> dict[int, Callable]:
        return {}

    def _start_terms(self, network: SeparablePotential, groups: list[tuple[np.ndarray, np.ndarray]]) -> Callable:
        """Of the units at one theta, what their loss is made of."""
        a, b = (
            np.concatenate(parts)
            for parts in zip(*[[g.ravel() for g in np.meshgrid(*pair, indexing="ij")] for pair in groups], strict=True)
        )

        def terms(row: Batch, context: tuple[Any, ScoreContext]):
            own, terms = context
            eta, w = terms.proposal.whiten(row.theta), terms.joint_weights
            first, second = network.derivatives(own, eta, 1 - w)
            f, _ = network.groups(own, terms.standardizer(row.x), terms.proposal.dim)
            g = f[:, a, None] * first.T[b]
            target = w * terms.proposal.score_in_eta(row.theta, row.joint_score) + (1 - w) * eta
            return g, target, f[:, a] * second[b], row.weight / row.weight.shape[0]

        return terms

    def speed(self, rng_key: Array, unit: UnitScore) -> Speed:
        """How fast the score trains on a stream; its simulations are entered as diagnosis."""
        pilot = self.draw(rng_key, unit.proposal, self.training.num_thetas, "diagnosis")
        context, _ = self.prepare(rng_key, pilot, unit.proposal)
        context = context._replace(standardizer=unit.standardizer, focus=self._proposal_focus(rng_key, unit.proposal, "diagnosis", pilot))
        speed = measure_speed(self._score_trainer, rng_key, unit.weights, context)
        self.simulator.count("diagnosis", 6 * CHUNK * self.training.num_thetas * self.num_simulated_per_theta)
        return speed

    def curvature(
        self, rng_key: Array, unit: UnitScore, settings: CurvaturePenalty, num_simulations: int, stage: str = "curvature"
    ) -> tuple[UnitScore, dict[str, LossCurve]]:
        """Go on training with lambda_1 |E[s s^T + grad s]|^2 on a second table; the least held-out score-matching loss wins (eq. 7)."""
        learner = replace(self, training=curvature_training(self.training, settings))
        key_source, key_train = jax.random.split(rng_key)
        ladder = (0.0, *(w for w in settings.ladder if w > 0))
        each = num_simulations // len(ladder) if learner.training.is_fresh else num_simulations
        pilot, held_out, table, num_steps = learner.source(key_source, unit.proposal, each, stage)
        context, _ = learner.prepare(key_source, pilot, unit.proposal)
        focus = learner._proposal_focus(key_source, unit.proposal, stage, pilot)
        held_out = held_out if focus is None else focused(key_source, held_out, focus, held_out.ok.shape[1])
        trainer, curves, found = learner._curvature_trainer, {}, []
        for penalty in ladder:
            context = context._replace(standardizer=unit.standardizer, focus=focus, penalty=jnp.asarray(penalty), table=table)
            name = f"{stage}, lambda {penalty:g}"
            weights, curve = learner.train(trainer, key_train, unit.weights, held_out, context, num_steps, name, settings.learning_rate)
            learner.count_stream(stage, table, curve, learner.training.num_thetas * learner.num_simulated_per_theta)
            curves[name] = curve
            found.append((float(trainer.evaluate(weights, held_out, context)), weights))
        return unit._replace(weights=min(found, key=lambda pair: pair[0])[1]), curves

    def information(
        self, rng_key: Array, unit: UnitScore, eta: Float[Array, " d"], num_simulations: int, stage: str
    ) -> Float[Array, "d d"]:
        """Fisher information of one unit in theta, from the learned score on simulations at one point."""
        theta = unit.proposal.unwhiten(eta)
        m = self.training.num_per_theta
        k = min(num_simulations, INFORMATION_UNITS) // m
        batch = self.simulate(rng_key, jnp.broadcast_to(theta, (k, theta.shape[0])), m)
        self.simulator.count(stage, batch.ok.size, int((~batch.ok).sum()))
        s = self.raw(unit, jnp.broadcast_to(eta, (k, eta.shape[0])), batch.x)
        s = jnp.where(batch.ok[..., None], s, 0.0).reshape(-1, theta.shape[0])
        s = unit.proposal.score_in_theta(theta, s - s.mean(0))
        return s.T @ s / batch.ok.sum()

    def train(
        self, trainer, rng_key, weights, held_out, context, num_steps, stage, learning_rate=None, patience=None
    ) -> tuple[Any, LossCurve]:
        return train(
            trainer,
            rng_key,
            weights,
            held_out,
            context,
            num_steps,
            learning_rate=learning_rate or self.training.learning_rate,
            patience=None if context.table is None else patience or self.training.patience,
            description=stage,
            progress_bar=self.progress_bar,
        )

    @cached_property
    def prepare(self):
        """Standardization, weights of the joint target and first weights of the network, from the first units of a round."""

        @jax.jit
        def prepare(rng_key: Array, pilot: Batch, proposal: Proposal) -> tuple[ScoreContext, Any]:
            x = pilot.x.reshape(-1, pilot.x.shape[-1])
            t = jax.vmap(proposal.score_in_eta)(pilot.theta, pilot.joint_score)
            t = t.sum(1) / np.sqrt(self.matched) if self.matched > 1 else t.reshape(-1, proposal.dim)
            network = self.learned.network
            embedded = getattr(getattr(network, "network", network), "embedding", None) is not None  # also of an ensemble's members
            standardizer = embedded_standardizer(x) if embedded else make_standardizer(x, np.asarray(self.simulator.units.covariates))
            num_moments = ((2 + self.taught_joint) * proposal.dim,) if network.moments else ()
            weights = network.init(rng_key, proposal.dim, standardizer(x[:1]).shape[-1], *num_moments)
            low, high = self.simulator.units.parameters.box
            if proposal.low is None and np.isfinite(low).any():
                layout = make_layout(pilot.theta, proposal.mean, proposal.factor, low, high)
                weights = self.learned.network.with_layout(weights, layout)
            share = joint_weights(self.target, self.joint_valid, t)
            scale = jnp.where(t.std(0) > 0, t.std(0), 1.0)
            return ScoreContext(proposal, standardizer, share, scale, None, jnp.zeros(()), None), weights

        return prepare

    def focus_terms(
        self, rng_key: Array, theta: Float[Array, "k d"], centre: Float[Array, " d"], stage: str, pilot: Batch | None = None
    ) -> FocusTerms | None:
        """Weights in x for units at these thetas; the units at the centre say whether the data are out of the model's reach."""
        num_responses = self.observed.shape[1] - self.simulator.units.covariates.shape[1]
        if self.focus is None or self.focus.flatten == 0 or self.matched > 1 or self.observed.shape[0] < MIN_ROWS or num_responses == 0:
            return None
        if pilot is not None and self.training.num_simulations is not None:  # a budget: what has been simulated must do
            return make_focus(pilot.x[pilot.ok], pilot.weight[pilot.ok], self.observed, num_responses, self.focus)
        num_units, spread = PILOT_UNITS if self.training.num_simulations is not None else FOCUS_UNITS, 0.0
        if self.simulator.units.traced.stretchable:
            # With a spread of none, and not without one: the units below are then simulated by the same program.
            middle = self.simulate(rng_key, jnp.broadcast_to(centre, theta.shape), num_units // theta.shape[0], jnp.zeros(()))
            self.simulator.count(stage, middle.ok.size, int((~middle.ok).sum()))
            spread = SPREAD if out_of_reach(middle.x[middle.ok], self.observed, num_responses) else 0.0
        units = self.simulate(jax.random.fold_in(rng_key, 1), theta, num_units // theta.shape[0], jnp.asarray(spread, float))
        self.simulator.count(stage, units.ok.size, int((~units.ok).sum()))
        return make_focus(units.x[units.ok], units.weight[units.ok], self.observed, num_responses, self.focus, spread)

    def _proposal_focus(self, rng_key: Array, proposal: Proposal, stage: str, pilot: Batch) -> FocusTerms | None:
        key_theta, key_units = jax.random.split(rng_key)
        return self.focus_terms(key_units, proposal.sample(key_theta, FOCUS_THETAS), proposal.frame()[0], stage, pilot)

    def _turned(self, rng_key: Array, batch: Batch) -> Batch:
        """The same batch as it might have been too, by the model's symmetry."""
        if self.symmetry is None:
            return batch
        theta, x = jax.vmap(self.symmetry)(jax.random.split(jax.random.fold_in(rng_key, 1), len(batch.theta)), batch.theta, batch.x)
        if theta.shape != batch.theta.shape or x.shape != batch.x.shape:
            raise ValueError(
                f"symmetry= turned theta of shape {batch.theta.shape[1:]} and units of shape {batch.x.shape[1:]} into {theta.shape[1:]} and "
                f"{x.shape[1:]}; it must return another pair (theta, x) of the same shapes."
            )
        return batch._replace(theta=theta, x=x)

    def source(self, rng_key: Array, proposal: Proposal, num_simulations: int, stage: str) -> tuple[Batch, Batch, Batch | None, int]:
        """Units to look at first, held-out ones, a table (None: a stream), and how many steps the budget allows."""
        # The budget of a stream counts units trained on; what is simulated beside them is counted when it is spent.
        num_thetas = num_simulations // self.num_per_theta
        if self.training.is_fresh:
            held_out = self.draw(rng_key, proposal, max(2, min(HELD_OUT_THETAS, num_thetas // 4)), stage)
            return held_out, held_out, None, (num_thetas - held_out.theta.shape[0]) // self.training.num_thetas
        drawn = self.draw(rng_key, proposal, num_thetas, stage)
        cut = max(1, min(num_thetas // 5, MOST_HELD_OUT // self.num_per_theta))
        look = slice(max(1, FOCUS_UNITS // self.num_per_theta))
        pilot, held_out, table = (jax.tree.map(lambda a, s=s: a[s], drawn) for s in (look, slice(cut), slice(cut, None)))
        return pilot, held_out, table, self.training.num_epochs * (num_thetas - cut) // self.training.num_thetas

    def count_stream(self, stage: str, table: Batch | None, curve: LossCurve, batch_size: int) -> None:
        if table is None:
            self.simulator.count(stage, int(curve.steps[-1]) * batch_size, curve.tally)

    def draw(self, rng_key: Array, proposal: Proposal, num_thetas: int, stage: str) -> Batch:
        key_theta, key_units = jax.random.split(rng_key)
        batch = self.simulate(key_units, proposal.sample(key_theta, num_thetas), self.num_per_theta)
        self.simulator.count(stage, batch.ok.size, int((~batch.ok).sum()))
        return batch

    def control(self, unit: UnitScore, batch: Batch) -> Float[Array, " d"]:
        """Best multiple of t to subtract from s: cov(s, t) / var(t), where t has mean zero."""
        eta = jax.vmap(unit.proposal.whiten)(batch.theta)
        s = self.raw(unit, eta, batch.x).reshape(-1, unit.proposal.dim)
        t = jax.vmap(unit.proposal.score_in_eta)(batch.theta, batch.joint_score).reshape(-1, unit.proposal.dim)
        variance = jnp.var(t, axis=0)
        best = jnp.mean((s - s.mean(0)) * t, axis=0) / jnp.where(variance > 0, variance, 1.0)
        return jnp.where(jnp.asarray(np.sort(self.joint_valid)), best, 0.0)

    def next_batch(
        self, rng_key: Array, proposal: Proposal, table: Batch | None, focus: FocusTerms | None = None
    ) -> tuple[Batch, Int[Array, ""]]:
        """From the table if there is one, else simulated; and how many of the simulations failed, before the focus leaves those out."""
        if table is not None:
            rows = jax.random.randint(rng_key, (self.training.num_thetas,), 0, table.theta.shape[0])
            batch = self._turned(rng_key, jax.tree.map(lambda a: a[rows], table))
            return batch if focus is None else focused(rng_key, batch, focus, self.num_per_theta), jnp.zeros((), int)
        key_theta, key_units, key_keep = jax.random.split(rng_key, 3)
        theta = proposal.sample(key_theta, self.training.num_thetas)
        num = self.num_per_theta if focus is None else self.num_simulated_per_theta
        batch = self.simulator.batch(key_units, theta, num, None if focus is None else focus.spread)
        failed = (~batch.ok).sum()
        return batch if focus is None else focused(key_keep, batch, focus, self.num_per_theta), failed

    @cached_property
    def raw(self):
        return jax.jit(jax.vmap(self.learned.raw, (None, 0, 0)))

    @cached_property
    def simulate(self):
        return jax.jit(self.simulator.batch, static_argnums=2)

    def _score_loss(self, network, weights, theta, z, x, t, weight, probe, context: ScoreContext) -> Float[Array, ""]:
        """The score-matching loss of one network at one theta."""
        eta, w = context.proposal.whiten(theta), context.joint_weights
        grad_log_q = -eta
        if self.boundary is None:
            scale, drift = jnp.ones_like(eta), grad_log_q
        else:
            scale, change = self.boundary(context.proposal, eta, x if self.matched == 1 else x.reshape(1, -1))
            drift = scale * grad_log_q + change
        along = scale * (1 - w)
        if self.training.probes(context.proposal.dim):
            terms = network.probed(weights, eta, z, along, probe)
        else:
            terms = network.terms(weights, eta, z, along)
        if self.matched == 1:
            return blend_loss(terms, t, w, scale, drift, weight / weight.shape[0])
        # The n-model: the score of a whole data set is the sum of its units', and is matched as one (paper, eq. 11).
        summed = jax.tree.map(lambda a: a.sum(0, keepdims=True), terms)
        return blend_loss(summed, t.sum(0, keepdims=True), w, scale, drift, jnp.all(weight > 0)[None] / weight.shape[0])

    def _losses(self, weights: Any, batch: Batch, context: ScoreContext, with_curvature: bool) -> tuple[Array, Array]:
        def at(theta, x, joint_score, weight, ok, probe):
            z, t = context.standardizer(x), context.proposal.score_in_eta(theta, joint_score)
            eta = context.proposal.whiten(theta)
            loss, penalty = jnp.zeros(()), jnp.zeros(())
            for network, own in self.learned.network.each(weights):
                loss += self._score_loss(network, own, theta, z, x, t, weight, probe, context)
                if with_curvature:
                    halves = [network.curvature(own, eta, z[i::2], ok[i::2].astype(z.dtype)) for i in (0, 1)]
                    penalty += curvature_loss(*halves)
            return loss, penalty

        loss, penalty = jax.vmap(at)(*batch)
        return jnp.mean(loss), jnp.mean(penalty)

    @cached_property
    def _score_trainer(self) -> Trainer:
        def loss_fn(weights: Any, batch: Batch, context: ScoreContext) -> Array:
            return self._losses(weights, batch, context, False)[0]

        return make_trainer(loss_fn, lambda key, context: self.next_batch(key, context.proposal, context.table, context.focus))

    @cached_property
    def _moment_trainer(self) -> Trainer:
        def loss_fn(weights: Any, batch: Batch, context: ScoreContext) -> Array:
            def at(theta, x, joint_score, weight):
                targets, z = self.moment_targets(theta, joint_score, context), context.standardizer(x)
                return sum(jnp.mean(weight * network.moment_loss(own, targets, z)) for network, own in self.learned.network.each(weights))

            return jnp.mean(jax.vmap(at)(batch.theta, batch.x, batch.joint_score, batch.weight))

        return make_trainer(loss_fn, lambda key, context: self.next_batch(key, context.proposal, context.table, context.focus))

    @cached_property
    def _curvature_trainer(self) -> Trainer:
        def loss_fn(weights: Any, batch: Batch, context: ScoreContext) -> Array:
            loss, penalty = self._losses(weights, batch, context, True)
            return loss + context.penalty * penalty

        def held_out_fn(weights: Any, batch: Batch, context: ScoreContext) -> Array:
            return self._losses(weights, batch, context, False)[0]

        # Both identities are asked of units as they are simulated: no focus in the second table.
        return make_trainer(loss_fn, lambda key, context: self.next_batch(key, context.proposal, context.table), held_out_fn)


def curvature_training(training: Training, settings: CurvaturePenalty) -> Training:
    """The same budget in batches with more units at a theta; an error if that leaves too few of them."""
    return replace(training, num_per_theta=settings.num_per_theta, num_thetas=settings.num_thetas)


SPREAD = 0.25  # share of the units whose nuisances are spread out, where some observed unit is out of the model's reach
FOCUS_THETAS, FOCUS_UNITS = 1024, 65_536  # that say how rare a unit is
PILOT_UNITS = 4096  # the same where the budget is given
MIN_ROWS = 20  # of the data, for their distances to say where units lie

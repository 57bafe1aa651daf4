"""One round of learning: the score of a unit under a proposal, its curvature, and its mean over the whole region."""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Bool, Float
import numpy as np

from numpyro_sls.boundary import BoundaryWeight
from numpyro_sls.debias import Debias, mean_loss
from numpyro_sls.focus import Focus, FocusTerms, focused, make_focus, out_of_reach
from numpyro_sls.networks import Standardizer, make_layout, make_standardizer
from numpyro_sls.objectives import CurvaturePenalty, blend_loss, curvature_loss, joint_weights
from numpyro_sls.proposal import Proposal
from numpyro_sls.score import LearnedScore, UnitScore
from numpyro_sls.simulate import Batch, Simulator
from numpyro_sls.training import CHUNK, LossCurve, Speed, Trainer, Training, make_trainer, measure_speed, train

__all__ = ["Learner"]


class ScoreContext(NamedTuple):
    """What one round of score training has that another does not."""

    proposal: Proposal
    standardizer: Standardizer
    joint_weights: Float[Array, " d"]
    focus: FocusTerms | None
    penalty: Float[Array, ""]  # lambda_1
    table: Batch | None


class MeanContext(NamedTuple):
    """The score whose mean is learnt, how much of the joint score to subtract as a control variate, and lambda_2."""

    unit: UnitScore
    control: Float[Array, " d"]
    penalty: Float[Array, ""]
    table: Batch | None


HELD_OUT_THETAS = 256
MOMENTS = (256, 64)  # thetas and units in a batch of the least squares for the mean
SMALLEST = 1e-7  # eigenvalue of the polynomial's terms, relative to their size, that single precision resolves
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

    def __getstate__(self) -> dict:
        return {f.name: getattr(self, f.name) for f in fields(self)}  # without what was compiled

    def bounds(self, x: Float[Array, "n p"]) -> tuple[Float[Array, " d"], Float[Array, " d"]]:
        """What the data allow of theta, as far as it was stated."""
        d = len(self.joint_valid)
        if self.boundary is None:
            return jnp.full(d, -jnp.inf), jnp.full(d, jnp.inf)
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
        pilot, held_out, table, num_steps = self._source(key_source, proposal, num_simulations, stage)
        context, weights = self._prepare(key_init, pilot, proposal)
        context = context._replace(table=table, focus=self._proposal_focus(key_source, proposal, stage, pilot))
        held_out = held_out if context.focus is None else focused(key_source, held_out, context.focus, held_out.ok.shape[1])
        weights, curve = self._train(self._score_trainer, key_train, weights, held_out, context, num_steps, stage)
        self._count_stream(stage, table, curve, self.training.num_thetas * self.num_simulated_per_theta)
        return UnitScore(weights, proposal, context.standardizer, None), curve

    def speed(self, rng_key: Array, unit: UnitScore) -> Speed:
        """How fast the score trains on a stream; its simulations are entered as diagnosis."""
        pilot = self._draw(rng_key, unit.proposal, self.training.num_thetas, "diagnosis")
        context, _ = self._prepare(rng_key, pilot, unit.proposal)
        context = context._replace(standardizer=unit.standardizer, focus=self._proposal_focus(rng_key, unit.proposal, "diagnosis", pilot))
        speed = measure_speed(self._score_trainer, rng_key, unit.weights, context)
        self.simulator.count("diagnosis", 6 * CHUNK * self.training.num_thetas * self.num_simulated_per_theta)
        return speed

    def curvature(
        self, rng_key: Array, unit: UnitScore, settings: CurvaturePenalty, num_simulations: int, stage: str = "curvature"
    ) -> tuple[UnitScore, dict[str, LossCurve]]:
        """Go on training with lambda_1 |E[s s^T + grad s]|^2 on a second table; the least held-out score-matching loss wins (eq. 7)."""
        learner = replace(self, training=replace(self.training, num_per_theta=settings.num_per_theta, num_thetas=settings.num_thetas))
        key_source, key_train = jax.random.split(rng_key)
        ladder = (0.0, *(w for w in settings.ladder if w > 0))
        each = num_simulations // len(ladder) if learner.training.is_fresh else num_simulations
        pilot, held_out, table, num_steps = learner._source(key_source, unit.proposal, each, stage)
        context, _ = learner._prepare(key_source, pilot, unit.proposal)
        focus = learner._proposal_focus(key_source, unit.proposal, stage, pilot)
        held_out = held_out if focus is None else focused(key_source, held_out, focus, held_out.ok.shape[1])
        trainer, curves, found = learner._curvature_trainer, {}, []
        for penalty in ladder:
            context = context._replace(standardizer=unit.standardizer, focus=focus, penalty=jnp.asarray(penalty), table=table)
            name = f"{stage}, lambda {penalty:g}"
            weights, curve = learner._train(trainer, key_train, unit.weights, held_out, context, num_steps, name, settings.learning_rate)
            learner._count_stream(stage, table, curve, learner.training.num_thetas * learner.num_simulated_per_theta)
            curves[name] = curve
            found.append((float(trainer.evaluate(weights, held_out, context)), weights))
        return unit._replace(weights=min(found, key=lambda pair: pair[0])[1]), curves

    def mean(
        self, rng_key: Array, unit: UnitScore, settings: Debias, num_simulations: int, moments: bool = True
    ) -> tuple[UnitScore, dict[str, LossCurve]]:
        """Learn the mean of the score over the whole region (paper, 3.2.2), curvature-aware if there is a ladder for that."""
        key_source, key_init, key_train, key_mean = jax.random.split(rng_key, 4)
        stage = "debiasing"
        ladder = tuple(w for w in settings.ladder if w > 0)
        # The paper's ways of debiasing are by a network alone.
        plain = settings.method == "regression" and not ladder and self.matched == 1 and self.training.is_fresh
        by_moments = moments and plain and self.learned.network.has_potential
        each = num_simulations // (1 + len(ladder)) if self.training.is_fresh else num_simulations
        if by_moments:
            unit, each = unit._replace(moments=self.moments(key_mean, unit, each // 2)), each // 2
        pilot, held_out, table, num_steps = self._source(key_source, unit.proposal, each, stage)
        context = MeanContext(unit._replace(mean_weights=None), self._control(unit, pilot), jnp.zeros(()), table)
        start = unit.mean_weights if unit.mean_weights is not None else jax.jit(self.learned.mean_network.init)(key_init)
        trainer, curves, found, weights = self._mean_trainer(settings.method), {}, [], start
        for penalty in (0.0, *ladder):
            context = context._replace(penalty=jnp.asarray(penalty))
            name = f"{stage}, lambda {penalty:g}" if penalty else stage
            weights, curve = self._train(trainer, key_train, start, held_out, context, num_steps, name)
            self._count_stream(stage, table, curve, self.training.num_thetas * self.num_per_theta)
            curves[name] = curve
            found.append((float(trainer.evaluate(weights, held_out, context)), weights))
            start = found[0][1]  # the plain regression comes first, the others go on from it
        best = min(found, key=lambda pair: pair[0])[1]
        if by_moments:
            best = self._shrunk(key_init, unit._replace(mean_weights=best), context.control, each // 4)
        return unit._replace(mean_weights=best), curves

    def moments(self, rng_key: Array, unit: UnitScore, num_simulations: int) -> Float[Array, "q k"]:
        """E[c(x) | theta] by least squares on a polynomial in theta: no step size, and hardly any noise.

        A network for the mean has thousands of weights, and with n units a little noise in each is n times that of the data.
        """
        num_thetas, num_per_theta = MOMENTS
        num = max(1, num_simulations // (num_thetas * num_per_theta))
        sums = [[np.asarray(a, float) for a in self._moment_sums(jax.random.fold_in(rng_key, i), unit)] for i in range(num)]
        gram, cross, failed = (sum(parts[1:], parts[0]) for parts in zip(*sums, strict=True))
        self.simulator.count("debiasing", num * num_thetas * num_per_theta, int(failed))
        scale = np.sqrt(np.diag(gram))
        values, vectors = np.linalg.eigh(gram / np.outer(scale, scale))
        basis = (vectors[:, values > SMALLEST] / np.sqrt(values[values > SMALLEST])) / scale[:, None]
        return jnp.asarray(basis @ (basis.T @ cross), unit.proposal.mean.dtype)

    @cached_property
    def _moment_sums(self):
        @jax.jit
        def sums(rng_key, unit):
            key_theta, key_units = jax.random.split(rng_key)
            batch = self.simulator.batch(key_units, unit.proposal.sample(key_theta, MOMENTS[0]), MOMENTS[1])

            def at(theta, x, ok):
                share = ok / jnp.maximum(ok.sum(), 1)
                c = self.learned.network.summary(unit.weights, unit.standardizer(x), unit.proposal.dim)
                return self.learned.polynomial(unit, unit.proposal.whiten(theta)), share @ c

            terms, mean = jax.vmap(at)(batch.theta, batch.x, batch.ok.astype(batch.x.dtype))
            return terms.T @ terms, terms.T @ mean, (~batch.ok).sum()

        return sums

    def _shrunk(self, rng_key: Array, unit: UnitScore, control: Float[Array, " d"], num_simulations: int) -> Any:
        """The weights of the mean's network with the share of it that fresh units confirm: what is noise they do not."""
        num_thetas, num_per_theta = MOMENTS
        num = max(1, num_simulations // (num_thetas * num_per_theta))
        sums = np.sum([np.asarray(self._share_sums(jax.random.fold_in(rng_key, i), unit, control), float) for i in range(num)], axis=0)
        self.simulator.count("debiasing", num * num_thetas * num_per_theta, int(sums[2]))
        share = np.clip(sums[0] / max(sums[1], 1e-30), 0.0, 1.0)
        return {**unit.mean_weights, "share": jnp.asarray(share, unit.proposal.mean.dtype)}

    @cached_property
    def _share_sums(self):
        @jax.jit
        def sums(rng_key, unit, control):
            key_theta, key_units = jax.random.split(rng_key)
            batch = self.simulator.batch(key_units, unit.proposal.sample(key_theta, MOMENTS[0]), MOMENTS[1])
            before = unit._replace(mean_weights=None)

            def at(theta, x, t, ok):
                eta, share = unit.proposal.whiten(theta), ok / jnp.maximum(ok.sum(), 1)
                s = self.learned.units(before, eta, x) - control * unit.proposal.score_in_eta(theta, t)
                return share @ s, share @ self.learned.mean_network.mean(unit.mean_weights, eta, unit.standardizer(x))

            left, h = jax.vmap(at)(batch.theta, batch.x, batch.joint_score, batch.ok.astype(batch.x.dtype))
            return jnp.stack([jnp.sum(left * h), jnp.sum(h * h), (~batch.ok).sum()])

        return sums

    def project(
        self, rng_key: Array, unit: UnitScore, settings: Debias, penalty: float, num_simulations: int
    ) -> tuple[UnitScore, dict[str, LossCurve]]:
        """The paper's alternative 2: score and mean trained together on the score's loss, then the mean by itself, in turns."""
        each = num_simulations // (2 * settings.num_turns + 1)
        plain = replace(settings, method="regression", ladder=())
        unit, curves = self.mean(jax.random.fold_in(rng_key, 0), unit, plain, each, moments=False)
        for i in range(settings.num_turns):
            key_source, key_train, key_mean = jax.random.split(jax.random.fold_in(rng_key, i + 1), 3)
            stage = f"projection, turn {i + 1}"
            pilot, held_out, table, num_steps = self._source(key_source, unit.proposal, each, stage)
            context, _ = self._prepare(key_source, pilot, unit.proposal)
            context = context._replace(standardizer=unit.standardizer, penalty=jnp.asarray(penalty), table=table)
            both = (unit.weights, unit.mean_weights)
            both, curves[stage] = self._train(self._projection_trainer, key_train, both, held_out, context, num_steps, stage, 3e-3)
            self._count_stream(stage, table, curves[stage], self.training.num_thetas * self.num_simulated_per_theta)
            unit, again = self.mean(key_mean, unit._replace(weights=both[0], mean_weights=both[1]), plain, each, moments=False)
            curves |= {f"{k}, turn {i + 1}": c for k, c in again.items()}
        return unit, curves

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
        s = unit.proposal.score_in_theta(theta, s - s.mean(0))
        return s.T @ s / batch.ok.sum()

    def _train(self, trainer, rng_key, weights, held_out, context, num_steps, stage, learning_rate=None) -> tuple[Any, LossCurve]:
        return train(
            trainer,
            rng_key,
            weights,
            held_out,
            context,
            num_steps,
            learning_rate=learning_rate or self.training.learning_rate,
            patience=None if context.table is None else self.training.patience,
            description=stage,
            progress_bar=self.progress_bar,
        )

    @cached_property
    def _prepare(self):
        """Standardization, weights of the joint target and first weights of the network, from the first units of a round."""

        @jax.jit
        def prepare(rng_key: Array, pilot: Batch, proposal: Proposal) -> tuple[ScoreContext, Any]:
            x = pilot.x.reshape(-1, pilot.x.shape[-1])
            t = jax.vmap(proposal.score_in_eta)(pilot.theta, pilot.joint_score)
            t = t.sum(1) / np.sqrt(self.matched) if self.matched > 1 else t.reshape(-1, proposal.dim)
            network = self.learned.network
            embedded = getattr(getattr(network, "network", network), "embedding", None) is not None  # also of an ensemble's members
            standardizer = make_standardizer(x, None if embedded else np.asarray(self.simulator.units.covariates))
            weights = self.learned.network.init(rng_key, proposal.dim, standardizer(x[:1]).shape[-1])
            low, high = self.simulator.units.parameters.box
            if proposal.low is None and np.isfinite(low).any():
                layout = make_layout(pilot.theta, proposal.mean, proposal.factor, low, high)
                weights = self.learned.network.with_layout(weights, layout)
            share = joint_weights(self.target, self.joint_valid, t)
            return ScoreContext(proposal, standardizer, share, None, jnp.zeros(()), None), weights

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
            middle = self._simulate(rng_key, jnp.broadcast_to(centre, theta.shape), num_units // theta.shape[0])
            self.simulator.count(stage, middle.ok.size, int((~middle.ok).sum()))
            spread = SPREAD if out_of_reach(middle.x[middle.ok], self.observed, num_responses) else 0.0
        units = self._simulate(jax.random.fold_in(rng_key, 1), theta, num_units // theta.shape[0], jnp.asarray(spread))
        self.simulator.count(stage, units.ok.size, int((~units.ok).sum()))
        return make_focus(units.x[units.ok], units.weight[units.ok], self.observed, num_responses, self.focus, spread)

    def _proposal_focus(self, rng_key: Array, proposal: Proposal, stage: str, pilot: Batch) -> FocusTerms | None:
        key_theta, key_units = jax.random.split(rng_key)
        return self.focus_terms(key_units, proposal.sample(key_theta, FOCUS_THETAS), proposal.frame()[0], stage, pilot)

    def _source(self, rng_key: Array, proposal: Proposal, num_simulations: int, stage: str) -> tuple[Batch, Batch, Batch | None, int]:
        """Units to look at first, held-out ones, a table (None: a stream), and how many steps the budget allows."""
        # The budget of a stream counts units trained on; what is simulated beside them is counted when it is spent.
        num_thetas = num_simulations // self.num_per_theta
        if self.training.is_fresh:
            held_out = self._draw(rng_key, proposal, max(2, min(HELD_OUT_THETAS, num_thetas // 4)), stage)
            return held_out, held_out, None, (num_thetas - held_out.theta.shape[0]) // self.training.num_thetas
        drawn = self._draw(rng_key, proposal, num_thetas, stage)
        cut = max(1, num_thetas // 5)
        held_out, table = (jax.tree.map(lambda a, s=s: a[s], drawn) for s in (slice(cut), slice(cut, None)))
        return drawn, held_out, table, self.training.num_epochs * (num_thetas - cut) // self.training.num_thetas

    def _count_stream(self, stage: str, table: Batch | None, curve: LossCurve, batch_size: int) -> None:
        if table is None:
            self.simulator.count(stage, int(curve.steps[-1]) * batch_size, curve.tally)

    def _draw(self, rng_key: Array, proposal: Proposal, num_thetas: int, stage: str) -> Batch:
        key_theta, key_units = jax.random.split(rng_key)
        batch = self._simulate(key_units, proposal.sample(key_theta, num_thetas), self.num_per_theta)
        self.simulator.count(stage, batch.ok.size, int((~batch.ok).sum()))
        return batch

    def _control(self, unit: UnitScore, batch: Batch) -> Float[Array, " d"]:
        """Best multiple of t to subtract from s: cov(s, t) / var(t), where t has mean zero."""
        eta = jax.vmap(unit.proposal.whiten)(batch.theta)
        s = self._raw(unit, eta, batch.x).reshape(-1, unit.proposal.dim)
        t = jax.vmap(unit.proposal.score_in_eta)(batch.theta, batch.joint_score).reshape(-1, unit.proposal.dim)
        variance = jnp.var(t, axis=0)
        best = jnp.mean((s - s.mean(0)) * t, axis=0) / jnp.where(variance > 0, variance, 1.0)
        return jnp.where(jnp.asarray(np.sort(self.joint_valid)), best, 0.0)

    def _next_batch(self, rng_key: Array, context: Any, focus: FocusTerms | None) -> Batch:
        proposal = context.proposal if isinstance(context, ScoreContext) else context.unit.proposal
        if context.table is not None:
            rows = jax.random.randint(rng_key, (self.training.num_thetas,), 0, context.table.theta.shape[0])
            batch = jax.tree.map(lambda a: a[rows], context.table)
            return batch if focus is None else focused(rng_key, batch, focus, self.num_per_theta)
        key_theta, key_units, key_keep = jax.random.split(rng_key, 3)
        theta = proposal.sample(key_theta, self.training.num_thetas)
        num = self.num_per_theta if focus is None else self.num_simulated_per_theta
        batch = self.simulator.batch(key_units, theta, num, None if focus is None else focus.spread)
        return batch if focus is None else focused(key_keep, batch, focus, self.num_per_theta)

    @cached_property
    def _raw(self):
        return jax.jit(jax.vmap(self.learned.raw, (None, 0, 0)))

    @cached_property
    def _simulate(self):
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

    def _losses(self, weights: Any, batch: Batch, context: ScoreContext, with_curvature: bool) -> tuple[Array, Array, Array]:
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
        return jnp.mean(loss), jnp.mean(penalty), (~batch.ok).sum()

    @cached_property
    def _score_trainer(self) -> Trainer:
        def loss_fn(weights: Any, batch: Batch, context: ScoreContext) -> tuple[Array, Array]:
            loss, _, failed = self._losses(weights, batch, context, False)
            return loss, failed

        return make_trainer(loss_fn, lambda key, context: self._next_batch(key, context, context.focus))

    @cached_property
    def _curvature_trainer(self) -> Trainer:
        def loss_fn(weights: Any, batch: Batch, context: ScoreContext) -> tuple[Array, Array]:
            loss, penalty, failed = self._losses(weights, batch, context, True)
            return loss + context.penalty * penalty, failed

        def held_out_fn(weights: Any, batch: Batch, context: ScoreContext) -> Array:
            return self._losses(weights, batch, context, False)[0]

        # Both identities are asked of units as they are simulated: no focus in the second table.
        return make_trainer(loss_fn, lambda key, context: self._next_batch(key, context, None), held_out_fn)

    def _mean_trainer(self, method: str) -> Trainer:
        def losses(weights: Any, batch: Batch, context: MeanContext) -> tuple[Array, Array]:
            unit = context.unit

            def at(theta, x, t, ok):
                eta, z = unit.proposal.whiten(theta), unit.standardizer(x)
                s = self.learned.units(unit, eta, x) - context.control * unit.proposal.score_in_eta(theta, t)
                return mean_loss(lambda e: self.learned.mean_network.mean(weights, e, z), eta, s, ok, context.penalty, method)

            fit, penalized = jax.vmap(at)(batch.theta, batch.x, batch.joint_score, batch.ok.astype(batch.x.dtype))
            return jnp.mean(fit), jnp.mean(penalized)

        def loss_fn(weights, batch, context):
            return losses(weights, batch, context)[1], (~batch.ok).sum()

        def held_out_fn(weights, batch, context):
            return losses(weights, batch, context)[0]

        if method not in self._mean_trainers:
            self._mean_trainers[method] = make_trainer(loss_fn, lambda key, context: self._next_batch(key, context, None), held_out_fn)
        return self._mean_trainers[method]

    @cached_property
    def _mean_trainers(self) -> dict[str, Trainer]:
        return {}

    @cached_property
    def _projection_trainer(self) -> Trainer:
        """s - h with both trained, on score-matching loss and curvature penalty."""
        network, mean_network = self.learned.network, self.learned.mean_network

        def loss_fn(both: Any, batch: Batch, context: ScoreContext) -> tuple[Array, Array]:
            def at(theta, x, joint_score, weight):
                z, t, eta, w = (
                    context.standardizer(x),
                    context.proposal.score_in_eta(theta, joint_score),
                    context.proposal.whiten(theta),
                    context.joint_weights,
                )
                along = 1 - w

                def debiased(e):
                    return network.score(both[0], e, z) - mean_network.mean(both[1], e, z)

                h_jacobian = jax.jacfwd(lambda e: mean_network.mean(both[1], e, z))(eta)
                terms = network.terms(both[0], eta, z, along)
                terms = terms._replace(
                    score=terms.score - mean_network.mean(both[1], eta, z),
                    divergence=terms.divergence - jnp.einsum("mjj,j->m", h_jacobian, along),
                )
                loss = blend_loss(terms, t, w, jnp.ones_like(eta), -eta, weight / weight.shape[0])
                share = weight / jnp.maximum(weight.sum(), 1)
                residual = (share[:, None] * terms.score).T @ terms.score + jax.jacfwd(lambda e: share @ debiased(e))(eta)
                return loss + context.penalty * jnp.sum(residual**2)

            return jnp.mean(jax.vmap(at)(batch.theta, batch.x, batch.joint_score, batch.ok.astype(batch.x.dtype))), (~batch.ok).sum()

        return make_trainer(loss_fn, lambda key, context: self._next_batch(key, context, None))


SPREAD = 0.25  # share of the units whose nuisances are spread out, where some observed unit is out of the model's reach
FOCUS_THETAS, FOCUS_UNITS = 1024, 65_536  # that say how rare a unit is
PILOT_UNITS = 4096  # the same where the budget is given
MIN_ROWS = 20  # of the data, for their distances to say where units lie

"""The mean of the score over the whole region: by least squares on moments, by a network, or projected as the paper has it."""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float
import numpy as np

from numpyro_sls.debias import Debias, mean_loss
from numpyro_sls.learning import Learner, ScoreContext
from numpyro_sls.objectives import blend_loss
from numpyro_sls.score import UnitScore
from numpyro_sls.simulate import Batch
from numpyro_sls.training import LossCurve, Trainer, make_trainer

__all__ = ["MeanLearner"]


class MeanContext(NamedTuple):
    """The score whose mean is learnt, how much of the joint score to subtract as a control variate, and lambda_2."""

    unit: UnitScore
    control: Float[Array, " d"]
    penalty: Float[Array, ""]
    table: Batch | None


MOMENTS = (256, 64)  # thetas and units in a batch of the least squares for the mean
SMALLEST = 1e-7  # eigenvalue of the polynomial's terms, relative to their size, that single precision resolves


@dataclass(frozen=True, eq=False)
class MeanLearner:
    """The stages of debiasing over the region, with the simulations of one learner."""

    learner: Learner

    def __getstate__(self) -> dict:
        return {f.name: getattr(self, f.name) for f in fields(self)}  # without what was compiled

    def by_moments(self, settings: Debias) -> bool:
        """Whether moments are removed before a network learns the rest: the paper's ways of debiasing are by a network alone."""
        plain = settings.method == "regression" and not any(w > 0 for w in settings.ladder)
        return plain and self.learner.matched == 1 and self.learner.training.is_fresh and self.learner.learned.network.has_potential

    def blank(self, unit: UnitScore, settings: Debias) -> UnitScore:
        """A unit with a mean that is zero, made like the one that will be learnt: what is compiled for it need not be compiled again."""
        learned = self.learner.learned
        if not learned.network.has_potential:
            return unit
        weights = jax.jit(learned.mean_network.init)(jax.random.key(0), learned.layout(unit))
        unit = unit._replace(mean_weights={**weights, "share": jnp.zeros_like(weights["share"])})
        if not self.by_moments(settings):
            return unit
        eta = jnp.zeros(unit.proposal.dim, unit.proposal.mean.dtype)
        terms, basis = learned.polynomial(unit, eta), learned.network.basis(unit.weights, eta)
        return unit._replace(moments=jnp.zeros((terms.shape[0], basis.shape[0]), eta.dtype))

    def mean(
        self, rng_key: Array, unit: UnitScore, settings: Debias, num_simulations: int, moments: bool = True
    ) -> tuple[UnitScore, dict[str, LossCurve]]:
        """Learn the mean of the score over the whole region (paper, 3.2.2), curvature-aware if there is a ladder for that."""
        key_source, key_init, key_train, key_mean = jax.random.split(rng_key, 4)
        stage = "debiasing"
        ladder = tuple(w for w in settings.ladder if w > 0)
        by_moments = moments and self.by_moments(settings)
        each = num_simulations // (1 + len(ladder)) if self.learner.training.is_fresh else num_simulations
        if by_moments:
            unit, each = unit._replace(moments=self.moments(key_mean, unit, each // 2)), each // 2
        pilot, held_out, table, num_steps = self.learner.source(key_source, unit.proposal, each, stage)
        context = MeanContext(unit._replace(mean_weights=None), self.learner.control(unit, pilot), jnp.zeros(()), table)
        start = (
            unit.mean_weights
            if unit.mean_weights is not None
            else jax.jit(self.learner.learned.mean_network.init)(key_init, self.learner.learned.layout(unit))
        )
        trainer, curves, found, weights = self._mean_trainer(settings.method), {}, [], start
        for penalty in (0.0, *ladder):
            context = context._replace(penalty=jnp.asarray(penalty))
            name = f"{stage}, lambda {penalty:g}" if penalty else stage
            weights, curve = self.learner.train(trainer, key_train, start, held_out, context, num_steps, name)
            self.learner.count_stream(stage, table, curve, self.learner.training.num_thetas * self.learner.num_per_theta)
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
        self.learner.simulator.count("debiasing", num * num_thetas * num_per_theta, int(failed))
        scale = np.sqrt(np.diag(gram))
        values, vectors = np.linalg.eigh(gram / np.outer(scale, scale))
        basis = (vectors[:, values > SMALLEST] / np.sqrt(values[values > SMALLEST])) / scale[:, None]
        return jnp.asarray(basis @ (basis.T @ cross), unit.proposal.mean.dtype)

    @cached_property
    def _moment_sums(self):
        @jax.jit
        def sums(rng_key, unit):
            key_theta, key_units = jax.random.split(rng_key)
            batch = self.learner.simulator.batch(key_units, unit.proposal.sample(key_theta, MOMENTS[0]), MOMENTS[1])

            def at(theta, x, ok):
                share = ok / jnp.maximum(ok.sum(), 1)
                c = self.learner.learned.network.summary(unit.weights, unit.standardizer(x), unit.proposal.dim)
                return self.learner.learned.polynomial(unit, unit.proposal.whiten(theta)), share @ c

            terms, mean = jax.vmap(at)(batch.theta, batch.x, batch.ok.astype(batch.x.dtype))
            return terms.T @ terms, terms.T @ mean, (~batch.ok).sum()

        return sums

    def _shrunk(self, rng_key: Array, unit: UnitScore, control: Float[Array, " d"], num_simulations: int) -> Any:
        """The weights of the mean's network with the share of it that fresh units confirm: what is noise they do not."""
        num_thetas, num_per_theta = MOMENTS
        num = max(1, num_simulations // (num_thetas * num_per_theta))
        sums = np.sum([np.asarray(self._share_sums(jax.random.fold_in(rng_key, i), unit, control), float) for i in range(num)], axis=0)
        self.learner.simulator.count("debiasing", num * num_thetas * num_per_theta, int(sums[2]))
        share = np.clip(sums[0] / max(sums[1], 1e-30), 0.0, 1.0)
        return {**unit.mean_weights, "share": jnp.asarray(share, unit.proposal.mean.dtype)}

    @cached_property
    def _share_sums(self):
        @jax.jit
        def sums(rng_key, unit, control):
            key_theta, key_units = jax.random.split(rng_key)
            batch = self.learner.simulator.batch(key_units, unit.proposal.sample(key_theta, MOMENTS[0]), MOMENTS[1])
            before = unit._replace(mean_weights=None)

            def at(theta, x, t, ok):
                eta, share = unit.proposal.whiten(theta), ok / jnp.maximum(ok.sum(), 1)
                s = self.learner.learned.units(before, eta, x) - control * unit.proposal.score_in_eta(theta, t)
                return share @ s, share @ self.learner.learned.mean_network.mean(unit.mean_weights, eta, unit.standardizer(x))

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
            pilot, held_out, table, num_steps = self.learner.source(key_source, unit.proposal, each, stage)
            context, _ = self.learner.prepare(key_source, pilot, unit.proposal)
            context = context._replace(standardizer=unit.standardizer, penalty=jnp.asarray(penalty), table=table)
            both = (unit.weights, unit.mean_weights)
            both, curves[stage] = self.learner.train(self._projection_trainer, key_train, both, held_out, context, num_steps, stage, 3e-3)
            self.learner.count_stream(stage, table, curves[stage], self.learner.training.num_thetas * self.learner.num_simulated_per_theta)
            unit, again = self.mean(key_mean, unit._replace(weights=both[0], mean_weights=both[1]), plain, each, moments=False)
            curves |= {f"{k}, turn {i + 1}": c for k, c in again.items()}
        return unit, curves

    def _mean_trainer(self, method: str) -> Trainer:
        def losses(weights: Any, batch: Batch, context: MeanContext) -> tuple[Array, Array]:
            unit = context.unit

            def at(theta, x, t, ok):
                eta, z = unit.proposal.whiten(theta), unit.standardizer(x)
                s = self.learner.learned.units(unit, eta, x) - context.control * unit.proposal.score_in_eta(theta, t)
                return mean_loss(lambda e: self.learner.learned.mean_network.mean(weights, e, z), eta, s, ok, context.penalty, method)

            fit, penalized = jax.vmap(at)(batch.theta, batch.x, batch.joint_score, batch.ok.astype(batch.x.dtype))
            return jnp.mean(fit), jnp.mean(penalized)

        def loss_fn(weights, batch, context):
            return losses(weights, batch, context)[1]

        def held_out_fn(weights, batch, context):
            return losses(weights, batch, context)[0]

        if method not in self._mean_trainers:
            self._mean_trainers[method] = make_trainer(
                loss_fn, lambda key, context: self.learner.next_batch(key, context.unit.proposal, context.table), held_out_fn
            )
        return self._mean_trainers[method]

    @cached_property
    def _mean_trainers(self) -> dict[str, Trainer]:
        return {}

    @cached_property
    def _projection_trainer(self) -> Trainer:
        """s - h with both trained, on score-matching loss and curvature penalty."""
        network, mean_network = self.learner.learned.network, self.learner.learned.mean_network

        def loss_fn(both: Any, batch: Batch, context: ScoreContext) -> Array:
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

            return jnp.mean(jax.vmap(at)(batch.theta, batch.x, batch.joint_score, batch.ok.astype(batch.x.dtype)))

        return make_trainer(loss_fn, lambda key, context: self.learner.next_batch(key, context.proposal, context.table))

"""``SLS(model).run(rng_key, x) -> SLSFit``: trace, localize, learn the score of one unit, debias it, sum it over the data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float
import numpy as np
from tqdm.auto import tqdm

from numpyro_sls.boundary import Smoothing, make_boundary, smoothing_sd
from numpyro_sls.conditioning import Conditioner
from numpyro_sls.debias import Debias, MeanNetwork
from numpyro_sls.fitted import SLSFit
from numpyro_sls.focus import Focus
from numpyro_sls.joint import JointValidity, joint_validity, with_steady
from numpyro_sls.learning import Learner, curvature_training
from numpyro_sls.localization import Localization, Localized, Resemblance, localize
from numpyro_sls.means import MeanLearner
from numpyro_sls.model import trace_model
from numpyro_sls.networks import Ensemble, Network, SeparablePotential
from numpyro_sls.notices import (
    MAX_OUTSIDE,
    MAX_RATIO,
    share_outside,
    warn,
    warn_of_joint,
    warn_of_modes,
    warn_of_region,
    warn_of_resemblance,
    warn_of_supports,
)
from numpyro_sls.objectives import TARGETS, CurvaturePenalty
from numpyro_sls.preparation import Clock, fingerprint, first_proposal, make_room, moving_supports, prior_moments, smoothed
from numpyro_sls.proposal import FromRestarts, Proposal, WorthUnits, default_kappa, from_restarts, in_box, information_of, worth_units
from numpyro_sls.score import LearnedScore, Mode, PosteriorScore, UnitScore
from numpyro_sls.simulate import Simulations, Simulator
from numpyro_sls.sites import whole
from numpyro_sls.training import LossCurve, Training, progress
from numpyro_sls.units import Units, make_units

__all__ = ["SLS"]


UNITS = ("plate", "additive", "whole")
COORDINATES = ("unconstrained", "constrained")


@dataclass(frozen=True, eq=False)
class SLS:
    """Learn the structured likelihood score of a NumPyro model from its own simulations.

    :param model: a NumPyro model, its data passed as ``obs=`` inside a plate.
    :param params: names of the parameter sites; None: the latent sites outside the plate of the data.
    :param unit_plate: name of the plate whose rows are the units; None: the outermost around all observed sites.
    :param units: "plate" trains on single rows of the plate, "additive" a score of rows on whole data sets (the paper's
        n-model), "whole" one network on the data set as one unit, for data that are not independent.
    :param target: what is trained on: "blend", "joint" or "implicit".
    :param network: `SeparablePotential`, `MLPScore` or an `Ensemble`.
    :param smoothing: noise on the data, for observations whose support moves with a parameter; None: if the trace shows that, False: never.
    :param support: for such parameters, by site, a function from the numbers of a unit (of the data set, unless units="plate") to
        (low, high), None for no bound: training is weighted to hold at that boundary, and the posterior ends there.
    :param symmetry: a function (rng_key, theta, x) -> (theta, x) that draws, from the flat unconstrained parameters and the (m, p) units at
        them, a pair that is as likely under prior and model: floors or arms that are exchangeable. A table of simulations is then worth more.
    :param coordinates: "unconstrained", or "constrained" to learn sites on an interval as they are, weighted at its ends.
    :param localization: how the region that matters is found; None: train under the prior.
    :param training: budget and optimizer.
    :param focus: where in x to train; None: units as they are simulated.
    :param curvature: ask for the second Bartlett identity too; None: no.
    :param debias: how the mean of the score is removed; None: not at all.
    :param proposal: how wide the parameters are drawn in training, `WorthUnits` or `FromRestarts`.

    **Example:**

    >>> from numpyro_sls import SLS, Training
    >>> from numpyro_sls.models import queue
    >>> sls = SLS(queue.model, training=Training(num_simulations=1_000_000))
    >>> fit = sls.run(random.key(0), x)  # doctest: +SKIP
    """

    model: Callable
    params: Sequence[str] | None = None
    unit_plate: str | None = None
    units: str = "plate"
    target: str = "blend"
    network: Network = SeparablePotential()
    smoothing: Smoothing | bool | None = None
    support: Mapping[str, Callable] | None = None
    symmetry: Callable | None = None
    coordinates: str = "unconstrained"
    localization: Localization | None = Localization()
    training: Training = Training()
    focus: Focus | None = Focus()
    curvature: CurvaturePenalty | None = None
    debias: Debias | None = Debias()
    proposal: WorthUnits | FromRestarts = WorthUnits()

    def __post_init__(self):
        object.__setattr__(self, "model", whole(self.model))
        if not callable(self.model):
            raise TypeError(f"SLS takes a NumPyro model, a function; got {type(self.model).__name__}.")
        for name, value, known in (
            ("target", self.target, TARGETS),
            ("units", self.units, UNITS),
            ("coordinates", self.coordinates, COORDINATES),
        ):
            if value not in known:
                raise ValueError(f"{name}={value!r} is not known; use one of {known}.")
        if not isinstance(self.proposal, (WorthUnits, FromRestarts)):
            raise TypeError(f"proposal={self.proposal!r} is not known; use WorthUnits(kappa=...) or FromRestarts(diagonal=...).")
        if isinstance(self.proposal, FromRestarts) and (self.localization is None or self.localization.method == "rounds"):
            raise ValueError("proposal=FromRestarts() needs the restarts of localization; leave localization=Localization().")
        if self.smoothing is True:
            raise ValueError(
                "smoothing=True does not say how much; use smoothing=Smoothing(scale), or None to smooth where the trace asks for it."
            )
        if self.support and self.debias is not None:
            raise ValueError(
                "support= states that the support of the data moves with a parameter: the score then does not have mean zero, and cannot be debiased. "
                "Add debias=None, with units='additive' or 'whole' so that nothing needs to be; or use smoothing=Smoothing() instead of support=."
            )
        if self.symmetry is not None and (self.localization is not None or self.target != "implicit"):
            raise ValueError(
                "symmetry= turns simulations under the prior into others that are as likely: it goes with localization=None and target='implicit'. "
                "A proposal beside the prior is not symmetric, and a joint score would have to be turned too."
            )
        if self.curvature is not None:  # its batches are larger, and the budget must hold enough of them
            curvature_training(self.training, self.curvature)
        if self.debias is not None and self.debias.method == "projected" and isinstance(self.network, Ensemble):
            raise ValueError("Debias(method='projected') trains one network; it cannot be used with an Ensemble.")

    def trace(self, model_args: tuple, model_kwargs: dict):
        units = "whole" if self.units == "whole" else "plate"
        return trace_model(self.model, model_args, model_kwargs, params=self.params, unit_plate=self.unit_plate, units=units)

    def units_of(self, model_args: tuple, model_kwargs: dict) -> tuple[Units, Smoothing | None]:
        """The units of these data, with the smoothing that simulations get."""
        units = make_units(self.trace(model_args, model_kwargs))
        if self.target == "implicit":  # a black box: nothing is asked of its density
            units = replace(units, density="none")
        smoothing = self.smoothing
        if smoothing is None and not self.support:
            moving = moving_supports(units)
            smoothing = Smoothing() if moving else None
            warn_of_supports(moving, Smoothing().scale)
        if not isinstance(smoothing, Smoothing):
            return units, None
        return replace(units, noise_sd=smoothing_sd(smoothing, units.traced.observed())), smoothing

    def run(self, rng_key: Array, *model_args, progress_bar: bool = True, **model_kwargs) -> SLSFit:
        """Fit the score for these data; everything random follows from the key."""
        make_room()
        show, clock = progress(progress_bar), Clock()
        units, smoothing = self.units_of(model_args, model_kwargs)
        simulator, observed, num_units = Simulator(units), smoothed(units.observed(), smoothing, units), units.num_units
        if units.traced.tractable:
            warn(
                "The model has no nuisance and no Simulated site: its likelihood is tractable, and NUTS(model) would do without simulations."
            )
        if units.density == "none" and self.target != "implicit":
            warn(
                "The joint density of the model cannot be differentiated (code outside JAX?): everything is learnt from the implicit target."
            )
        budget = self._split_budget()
        keys = iter(jax.random.split(rng_key, 8))

        prior = prior_moments(next(keys), units)
        localized, resemblance = self._localize(next(keys), simulator, observed[:num_units], prior, show)
        clock.mark("localization")
        first = first_proposal(prior, localized)
        total = self.training.num_simulations
        key_joint, key_thetas = next(keys), next(keys)
        thetas, most = first.sample(key_thetas, 128), None if total is None else int(TEST_SHARE * total)
        joint = joint_validity(key_joint, simulator, thetas, most)
        warn_of_joint(joint, units.parameters.labels, self.target)
        if self.target != "implicit":
            joint = with_steady(jax.random.fold_in(key_joint, 1), simulator, thetas, joint, most)
        units = replace(units, carriers=joint.carried, steady=joint.steady)
        simulator = Simulator(units, simulator.spent)

        conditioner = Conditioner(self._learner(simulator, joint, observed, show))
        learner, means = conditioner.learner, MeanLearner(conditioner.learner)
        proposal, curves = self._propose(next(keys), conditioner, means, prior, localized, resemblance, budget["first rounds"])
        clock.mark("first rounds")
        key_train = next(keys)
        num_recentrings = MAX_RECENTRINGS if self.training.num_simulations is None else 0
        for i in range(1 + num_recentrings):
            key_unit, key_local, key_again = jax.random.split(jax.random.fold_in(key_train, i), 3)
            unit, new = self._learn(key_unit, means, proposal, budget, f", re-centred {i}" if i else "")
            curves |= new
            clock.mark("training")
            found = conditioner(key_local, unit, observed, num_units, self.debias, budget["debiasing near the posterior"])
            ratio = _ratio(simulator, resemblance, found.mode.theta)
            clock.mark("near the posterior")
            # A mode whose simulations do not look like the data is not worth following.
            if i == num_recentrings or share_outside(found.mode, found.data) <= MAX_OUTSIDE or not ratio <= MAX_RATIO:
                break
            proposal = self._recentre(key_again, learner, unit, found.mode, proposal, prior)

        warn_of_region(found.mode, found.data, curves)
        warn_of_resemblance(ratio)
        if progress_bar:
            print(simulator.report())
        return SLSFit(
            self,
            units,
            proposal,
            PosteriorScore(learner.learned, unit, units.parameters.log_prior),
            found.data,
            fingerprint((model_args, model_kwargs)),
            localized,
            joint,
            found.mean,
            found.readout,
            smoothing,
            simulator.spent,
            curves,
            clock.seconds,
            conditioner,
        )

    def learner_of(self, units: Units, smoothing: Smoothing | None, joint: JointValidity, spent: Mapping[str, Simulations]) -> Learner:
        """The functions of a fit on these units, as a saved one needs them again."""
        units = replace(units, carriers=joint.carried, steady=joint.steady)
        return self._learner(Simulator(units, dict(spent)), joint, smoothed(units.observed(), smoothing, units), False)

    def _learner(self, simulator: Simulator, joint: JointValidity, observed, show: bool) -> Learner:
        units = simulator.units
        width = self.debias.width if self.debias else 1
        mean_network = MeanNetwork(self.network.has_potential, units.parameters.dim, width, observed.shape[1], units.covariates.shape[1])
        boundary = None
        if self.support or self.coordinates == "constrained":
            per_set = units.num_units if self.units == "additive" else 1
            boundary = make_boundary(units.parameters, self.support, per_set * (observed.shape[1] - units.covariates.shape[1]))
        return Learner(
            simulator,
            LearnedScore(self.network, mean_network),
            self.training,
            self.target,
            joint.valid,
            observed,
            show,
            self.focus,
            boundary,
            units.num_units if self.units == "additive" else 1,
            self.symmetry,
        )

    def _learn(
        self, rng_key, means: MeanLearner, proposal: Proposal, budget: dict[str, int], stage: str
    ) -> tuple[UnitScore, dict[str, LossCurve]]:
        """The score of a unit, its curvature and its mean over the region."""
        key_score, key_curvature, key_mean = jax.random.split(rng_key, 3)
        learner = means.learner
        curves: dict[str, LossCurve] = {}
        unit, curves["training" + stage] = learner.score(key_score, proposal, budget["training"], "training" + stage)
        if self.curvature is not None:
            unit, new = learner.curvature(key_curvature, unit, self.curvature, budget["curvature"], "curvature" + stage)
            curves |= new
        if self.debias is not None:
            if self.debias.method == "projected":
                penalty = max(self.curvature.ladder) if self.curvature else 0.0
                unit, new = means.project(key_mean, unit, self.debias, penalty, budget["debiasing"])
            else:
                unit, new = means.mean(key_mean, unit, self.debias, budget["debiasing"])
            curves |= {k + stage: c for k, c in new.items()}
        return unit, curves

    def _localize(self, rng_key, simulator: Simulator, observed, prior, show: bool) -> tuple[Localized | None, Resemblance | None]:
        if self.localization is None or self.localization.method == "rounds":
            return None, None
        localized, resemblance = localize(rng_key, simulator.units, observed, prior, self.localization, show)
        simulator.count("localization", localized.num_simulated)
        if show:
            tqdm.write(str(localized).splitlines()[0])
        warn_of_modes(localized, simulator.units)
        return localized, resemblance

    def _propose(
        self,
        rng_key,
        conditioner: Conditioner,
        means: MeanLearner,
        prior,
        localized: Localized | None,
        resemblance: Resemblance | None,
        budget: int,
    ) -> tuple[Proposal, dict[str, LossCurve]]:
        """The proposal of the training: from the restarts, or after short rounds under wide ones that find I_1 and the mode."""
        learner = conditioner.learner
        if self.localization is not None and self.localization.method == "rounds":
            return self._from_prior(rng_key, conditioner, prior, budget)
        if localized is None or resemblance is None:
            return self._laid_out(first_proposal(prior, None, learner.joint_valid), learner, prior), {}
        if isinstance(self.proposal, FromRestarts):
            return self._laid_out(
                from_restarts(localized.centre, localized.covariance, self.proposal, learner.joint_valid), learner, prior
            ), {}
        curves: dict[str, LossCurve] = {}
        centre, information, kappa = localized.centre, localized.information, self._kappa(learner)
        # Without a budget every round is a long one, and the next comes only if the centre moved far.
        given = learner.training.num_simulations is not None
        num_rounds = min(self.proposal.num_rounds, 2) if given else self.proposal.num_rounds
        each = budget // num_rounds if given else budget
        rough = Debias(tolerance=0.2) if self.debias is not None else None
        for i in range(num_rounds):
            key_train, key_mode, key_information = jax.random.split(jax.random.fold_in(rng_key, i), 3)
            stage = f"round {i + 1}"
            proposal = self._laid_out(worth_units(centre, prior[1], information, kappa, learner.joint_valid), learner, prior)
            unit, curves[stage] = learner.score(key_train, proposal, each // 2, stage)
            unit = unit if self.debias is None else means.blank(unit, self.debias)
            mode = conditioner(key_mode, unit, learner.observed, learner.simulator.units.num_units, rough, each // 4).mode
            eta = mode.eta * min(1.0, 2.0 / float(jnp.linalg.norm(mode.eta)))
            # A score that has not learnt enough yet can send the mode anywhere; simulations there would not look like the data.
            eta = eta if _ratio(learner.simulator, resemblance, proposal.unwhiten(eta)) <= MAX_RATIO else jnp.zeros_like(eta)
            centre = proposal.unwhiten(eta)
            information = _information(key_information, learner, unit, mode, eta, prior, each // 4, stage)
            if jnp.linalg.norm(eta) < MAX_SHIFT * np.sqrt(proposal.dim):
                break
        return self._laid_out(worth_units(centre, prior[1], information, kappa, learner.joint_valid), learner, prior), curves

    def _from_prior(self, rng_key, conditioner: Conditioner, prior, budget: int) -> tuple[Proposal, dict[str, LossCurve]]:
        """Rounds from the prior on, each under a proposal around the posterior that the one before gave, as wide as kappa units leave it."""
        learner, centre, information = conditioner.learner, prior[0], jnp.zeros_like(prior[1])
        kappa, num_units = self._kappa(learner), learner.simulator.units.num_units
        assert isinstance(self.proposal, WorthUnits), "checked when the settings were"
        num_rounds = self.proposal.num_rounds
        curves: dict[str, LossCurve] = {}

        def proposed() -> Proposal:
            return self._laid_out(worth_units(centre, prior[1], information, kappa, learner.joint_valid), learner, prior)

        for i in range(num_rounds):
            key_train, key_mode = jax.random.split(jax.random.fold_in(rng_key, i))
            stage, proposal = f"round {i + 1}", proposed()
            unit, curves[stage] = learner.score(key_train, proposal, budget // num_rounds, stage)
            mode = conditioner(key_mode, unit, learner.observed, num_units, None, 0).mode
            reach = np.sqrt(proposal.dim) + MARGIN
            centre = proposal.unwhiten(mode.eta * min(1.0, reach / float(jnp.linalg.norm(mode.eta))))
            information = information_of(mode.factor, prior[1], num_units)
        return proposed(), curves

    def _laid_out(self, proposal: Proposal, learner: Learner, prior) -> Proposal:
        if self.coordinates == "unconstrained":
            return proposal
        low, high = learner.simulator.units.parameters.box
        # At the very end of an interval a step in theta is no step in the interval, and its information cannot be told from none.
        centre = jnp.where(np.isfinite(low), jnp.clip(proposal.mean, -NEAREST_END, NEAREST_END), proposal.mean)
        return in_box(proposal._replace(mean=centre), prior[1], low, high)

    def _split_budget(self) -> dict[str, int]:
        """How many units each stage may simulate; what a stage that is left out would have had goes to the training."""
        total, near = self.training.num_simulations, self.debias.max_simulations if self.debias else 0
        if total is None:
            return {
                **DEFAULT_BUDGET,
                "curvature": self.curvature.num_simulations if self.curvature else 0,
                "debiasing near the posterior": near,
            }
        shares = {"first rounds": 0.2, "curvature": 0.15, "debiasing": 0.15, "debiasing near the posterior": 0.15}
        if self.localization is None or isinstance(self.proposal, FromRestarts):
            shares["first rounds"] = 0.0
        elif self.localization.method == "rounds":
            shares["first rounds"] = 0.4
        if self.curvature is None:
            shares["curvature"] = 0.0
        if self.debias is None:
            shares |= {"debiasing": 0.0, "debiasing near the posterior": 0.0}
        elif not self.debias.near:
            shares["debiasing near the posterior"] = 0.0
        shares["training"] = 1.0 - sum(shares.values())
        return {stage: int(share * total) for stage, share in shares.items()}

    def _kappa(self, learner: Learner) -> float:
        num_units = learner.simulator.units.num_units
        chosen = self.proposal.kappa if isinstance(self.proposal, WorthUnits) else None
        if self.units == "additive":  # what is matched is the score of n units: the signal is theirs
            return chosen or num_units / 9
        all_joint = self.target != "implicit" and bool(learner.joint_valid.all())
        return chosen or default_kappa(learner.training.num_simulations or DEFAULT_BUDGET["training"], num_units, all_joint)

    def _recentre(self, rng_key, learner: Learner, unit: UnitScore, mode: Mode, proposal: Proposal, prior) -> Proposal:
        """The posterior leaves the region: move it there, and where it was not measured in units, widen it."""
        warn(
            f"The posterior leaves the region that the score was trained in (its mode is {float(jnp.linalg.norm(mode.eta)):.1f} sds from the centre): "
            "training once more around that mode."
        )
        if isinstance(self.proposal, FromRestarts) or self.localization is None:
            _, factor = proposal.frame()
            wider = from_restarts(mode.theta, factor @ factor.T, FromRestarts(diagonal=False, widen=1.5), learner.joint_valid)
            return self._laid_out(wider, learner, prior)
        information = _information(rng_key, learner, unit, mode, mode.eta, prior, DEFAULT_BUDGET["first rounds"], "re-centring")
        return self._laid_out(worth_units(mode.theta, prior[1], information, self._kappa(learner), learner.joint_valid), learner, prior)


DEFAULT_BUDGET = {"first rounds": 3_000_000, "training": 4_000_000, "debiasing": 4_000_000}
MAX_RECENTRINGS = 2
TEST_SHARE = 0.05  # of a budget, that the test of the joint score may cost beside it
MARGIN = 2.0  # sds of a proposal, beyond the usual length of a draw, that a round's mode is followed
NEAREST_END = 2.3  # of an interval for the centre of a proposal, as a normal quantile: a hundredth of its length
MAX_SHIFT = 1.0  # of the mode in a round, in proposal sds, for the centre to count as found


def _information(
    rng_key, learner: Learner, unit: UnitScore, mode: Mode, eta, prior, num_simulations: int, stage: str
) -> Float[Array, "d d"]:
    """What one unit knows: measured at the mode, or, of a posterior that leans on ends of intervals, from how wide its draws lie."""
    if mode.outside is None:
        return learner.information(rng_key, unit, eta, num_simulations, stage)
    return information_of(mode.factor, prior[1], learner.simulator.units.num_units)


def _ratio(simulator: Simulator, resemblance: Resemblance | None, theta: Float[Array, " d"]) -> float:
    """How much farther from the data simulations at theta are than those at the centre of localization; 1 where there was none."""
    if resemblance is None:
        return 1.0
    simulator.count("localization", resemblance.num_units)
    return resemblance.ratio(theta)

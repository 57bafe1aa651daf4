"""``SLS(model).run(rng_key, x) -> SLSFit``: trace, localize, learn the score of one unit, debias it, sum it over the data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
import hashlib
from typing import Any
import warnings

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float
import numpy as np
from numpyro.util import find_stack_level
from tqdm.auto import tqdm

from numpyro_sls.boundary import Smoothing, smoothing_sd
from numpyro_sls.debias import Debias, LocalMean, MeanNetwork
from numpyro_sls.joint import JointValidity, joint_validity
from numpyro_sls.learning import Learner
from numpyro_sls.localization import Localization, Localized, Resemblance, localize
from numpyro_sls.model import trace_model
from numpyro_sls.networks import Network, SeparablePotential
from numpyro_sls.objectives import TARGETS
from numpyro_sls.proposal import FromRestarts, Proposal, WorthUnits, default_kappa, from_restarts, worth_units
from numpyro_sls.score import DataTerms, LearnedScore, Mode, PosteriorScore, UnitScore
from numpyro_sls.simulate import Simulations, Simulator
from numpyro_sls.training import LossCurve, Training, progress
from numpyro_sls.units import CovariateLayout, Units, make_units

__all__ = ["SLS", "SLSFit"]


@dataclass(frozen=True, eq=False)
class SLSFit:
    """A learned score: what was found, what it cost, and the posterior that it gives for the data.

    **Example:**

    >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> from jax import random
    >>> from numpyro_sls import SLS, Simulated, Training
    >>> def model(x):
    ...     loc = numpyro.sample("loc", dist.Normal(0, 3))
    ...     with numpyro.plate("units", x.shape[0]):
    ...         z = numpyro.sample("z", dist.Normal())
    ...         numpyro.sample("x", Simulated(loc + z), obs=x)
    >>> x = 1 + random.normal(random.key(1), (50,))
    >>> fit = SLS(model, training=Training(num_simulations=50_000)).run(random.key(0), x, progress_bar=False)
    >>> fit.score(jnp.array([0.0]), x[:2, None]).shape
    (2, 1)
    """

    sls: "SLS"
    units: Units
    proposal: Proposal
    posterior: PosteriorScore
    data: DataTerms
    fingerprint: str  # of the model's arguments
    localization: Localized | None  # what the search for the region found, and how; None where it was left out
    joint: JointValidity
    local_mean: LocalMean
    simulations: dict[str, Simulations]
    curves: dict[str, LossCurve]
    learner: Learner

    def score(self, theta: Float[Array, " d"], x: Float[Array, "m p"]) -> Float[Array, "m d"]:
        """Likelihood score of each unit at theta (flat, unconstrained), debiased."""
        learned, unit, data = self.posterior.learned, self.posterior.unit, self.data
        eta = unit.proposal.whiten(theta)
        local = data.inverse.T @ (data.offset + data.slope @ (data.inverse @ (eta - data.centre)))
        return (learned.units(unit, eta, x) - local) @ unit.proposal.inverse

    def potential_fn(self, *model_args, **model_kwargs) -> Callable[[dict[str, Array]], Array]:
        """The learned negative log posterior of a data set, a function of the unconstrained sites, for NUTS and HMC."""
        if not self.posterior.learned.network.has_potential:
            raise ValueError(
                f"{type(self.posterior.learned.network).__name__} has a score but no potential. Fit with network=SeparablePotential(), or sample with SLSLangevin(fit)."
            )
        data = self.condition(*model_args, **model_kwargs)
        return lambda z: self.posterior.potential(self.units.parameters.flatten(z), data)

    def condition(self, *model_args, **model_kwargs) -> DataTerms:
        """The terms of a data set: those of the fit for its own data, else summed, centred and debiased anew."""
        if fingerprint((model_args, model_kwargs)) == self.fingerprint:
            return self.data
        x = self.sls.units_of(model_args, model_kwargs, self.units.layout).observed()
        if x.shape[1] != self.posterior.unit.standardizer.centre.shape[0]:
            raise ValueError(
                f"The fit knows units of {self.posterior.unit.standardizer.centre.shape[0]} numbers, covariates included; these data have {x.shape[1]}."
            )
        key = _key_of(x)
        x = self.sls.smoothed(x, self.units)
        data, mode, _ = self.learner.condition(key, self.posterior.unit, x, self.sls.debias, self.sls.debias.max_simulations)
        _warn_of_region(mode, data, {})
        return data


@dataclass(frozen=True, eq=False)
class SLS:
    """Learn the structured likelihood score of a NumPyro model from its own simulations.

    :param model: a NumPyro model, its data passed as ``obs=`` inside a plate.
    :param params: names of the parameter sites; None: the latent sites outside the plate of the data.
    :param unit_plate: name of the plate whose rows are the units; None: the outermost around all observed sites.
    :param units: "plate", or "whole" to treat the data set as one unit.
    :param target: what is trained on: "blend", "joint" or "implicit".
    :param network: `SeparablePotential` or `MLPScore`.
    :param smoothing: noise on the data, for observations whose support moves with a parameter.
    :param localization: how the region that matters is found; None: train under the prior.
    :param training: budget and optimizer.
    :param debias: how the mean of the score is removed.
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
    smoothing: Smoothing | None = None
    localization: Localization | None = Localization()
    training: Training = Training()
    debias: Debias = Debias()
    proposal: WorthUnits | FromRestarts = WorthUnits()

    def __post_init__(self):
        if not callable(self.model):
            raise TypeError(f"SLS takes a NumPyro model, a function; got {type(self.model).__name__}.")
        if self.target not in TARGETS:
            raise ValueError(f"target={self.target!r} is not known; use one of {TARGETS}.")
        if not isinstance(self.proposal, (WorthUnits, FromRestarts)):
            raise TypeError(f"proposal={self.proposal!r} is not known; use WorthUnits(kappa=...) or FromRestarts(diagonal=...).")
        if isinstance(self.proposal, FromRestarts) and self.localization is None:
            raise ValueError("proposal=FromRestarts() needs the restarts of localization; leave localization=Localization().")

    def trace(self, model_args: tuple, model_kwargs: dict):
        return trace_model(self.model, model_args, model_kwargs, params=self.params, unit_plate=self.unit_plate, units=self.units)

    def units_of(self, model_args: tuple, model_kwargs: dict, layout: CovariateLayout | None = None) -> Units:
        """The units of these data, with the smoothing that simulations get."""
        units = make_units(self.trace(model_args, model_kwargs), layout)
        if self.smoothing is None:
            return units
        observed = units.traced.observed()
        return replace(units, noise_sd=smoothing_sd(self.smoothing, observed))

    def smoothed(self, x: Float[Array, "n p"], units: Units) -> Float[Array, "n p"]:
        """The data as the score sees them; the noise follows from the data, so that a fit knows them again."""
        if self.smoothing is None:
            return x
        num_observed = x.shape[1] - units.covariates.shape[1]
        return self.smoothing.apply(_key_of(x), x, num_observed)

    def run(self, rng_key: Array, *model_args, progress_bar: bool = True, **model_kwargs) -> SLSFit:
        """Fit the score for these data; everything random follows from the key."""
        show = progress(progress_bar)
        units = self.units_of(model_args, model_kwargs)
        simulator, observed = Simulator(units), self.smoothed(units.observed(), units)
        if units.traced.tractable:
            _warn(
                "The model has no nuisance and no Simulated site: its likelihood is tractable, and NUTS(model) would do without simulations."
            )
        if units.density == "none" and self.target != "implicit":
            _warn(
                "The joint density of the model cannot be differentiated (code outside JAX?): everything is learnt from the implicit target."
            )
        budget = _split_budget(self.training, self.debias)
        keys = iter(jax.random.split(rng_key, 8))

        prior = _prior_moments(next(keys), units)
        localized, resemblance = self._localize(next(keys), simulator, observed, prior, show)
        first = _first_proposal(prior, localized)
        joint = joint_validity(next(keys), simulator, first.sample(next(keys), 128))
        _warn_of_joint(joint, units.parameters.labels, self.target)

        learned = LearnedScore(self.network, MeanNetwork(self.network.has_potential, len(prior[0]), self.debias.width))
        learner = Learner(simulator, learned, self.training, self.target, joint.valid, show)
        proposal, curves = self._propose(next(keys), learner, observed, prior, localized, resemblance, budget["first rounds"])
        key_train = next(keys)
        num_recentrings = MAX_RECENTRINGS if self.training.num_simulations is None else 0
        for i in range(1 + num_recentrings):
            key_score, key_mean, key_local, key_again = jax.random.split(jax.random.fold_in(key_train, i), 4)
            stage = f", re-centred {i}" if i else ""
            unit, curves["training" + stage] = learner.score(key_score, proposal, budget["training"], "training" + stage)
            unit, curves["debiasing" + stage] = learner.mean(key_mean, unit, budget["debiasing"])
            data, mode, found = learner.condition(key_local, unit, observed, self.debias, budget["debiasing near the posterior"])
            ratio = _ratio(simulator, resemblance, proposal.unwhiten(mode.eta))
            # A mode whose simulations do not look like the data is not worth following.
            if i == num_recentrings or share_outside(mode, data) <= MAX_OUTSIDE or not ratio <= MAX_RATIO:
                break
            proposal = self._recentre(key_again, learner, unit, mode, proposal, prior, observed)

        posterior = PosteriorScore(learned, unit, units.parameters.log_prior)
        _warn_of_region(mode, data, curves)
        _warn_of_resemblance(ratio)
        if progress_bar:
            print(simulator.report())
        return SLSFit(
            self,
            units,
            proposal,
            posterior,
            data,
            fingerprint((model_args, model_kwargs)),
            localized,
            joint,
            found,
            simulator.spent,
            curves,
            learner,
        )

    def _localize(self, rng_key, simulator: Simulator, observed, prior, show: bool) -> tuple[Localized | None, Resemblance | None]:
        if self.localization is None:
            return None, None
        localized, resemblance = localize(rng_key, simulator.units, observed, prior, self.localization, show)
        simulator.count("localization", localized.num_simulated)
        if show:
            tqdm.write(str(localized).splitlines()[0])
        _warn_of_modes(localized, simulator.units)
        return localized, resemblance

    def _propose(
        self, rng_key, learner: Learner, observed, prior, localized: Localized | None, resemblance: Resemblance | None, budget: int
    ) -> tuple[Proposal, dict[str, LossCurve]]:
        """The proposal of the training: from the restarts, or after short rounds under wide ones that find I_1 and the mode."""
        if localized is None or resemblance is None:
            return _first_proposal(prior, None, learner.joint_valid), {}
        if isinstance(self.proposal, FromRestarts):
            return from_restarts(localized.centre, localized.covariance, self.proposal, learner.joint_valid), {}
        curves: dict[str, LossCurve] = {}
        centre, information, kappa = localized.centre, localized.information, self._kappa(learner, observed)
        # Without a budget every round is a long one, and the next comes only if the centre moved far.
        given = learner.training.num_simulations is not None
        num_rounds = min(self.proposal.num_rounds, 2) if given else self.proposal.num_rounds
        each = budget // num_rounds if given else budget
        for i in range(num_rounds):
            key_train, key_mode, key_information = jax.random.split(jax.random.fold_in(rng_key, i), 3)
            stage = f"round {i + 1}"
            proposal = worth_units(centre, prior[1], information, kappa, learner.joint_valid)
            unit, curves[stage] = learner.score(key_train, proposal, each // 2, stage)
            _, mode, _ = learner.condition(key_mode, unit, observed, Debias(tolerance=0.2), each // 4)
            eta = mode.eta * min(1.0, 2.0 / float(jnp.linalg.norm(mode.eta)))
            # A score that has not learnt enough yet can send the mode anywhere; simulations there would not look like the data.
            eta = eta if _ratio(learner.simulator, resemblance, proposal.unwhiten(eta)) <= MAX_RATIO else jnp.zeros_like(eta)
            centre = proposal.unwhiten(eta)
            information = learner.information(key_information, unit, eta, each // 4, stage)
            if jnp.linalg.norm(eta) < MAX_SHIFT * np.sqrt(proposal.dim):
                break
        return worth_units(centre, prior[1], information, kappa, learner.joint_valid), curves

    def _kappa(self, learner: Learner, observed) -> float:
        all_joint = self.target != "implicit" and bool(learner.joint_valid.all())
        chosen = self.proposal.kappa if isinstance(self.proposal, WorthUnits) else None
        return chosen or default_kappa(learner.training.num_simulations or DEFAULT_BUDGET["training"], observed.shape[0], all_joint)

    def _recentre(self, rng_key, learner: Learner, unit: UnitScore, mode: Mode, proposal: Proposal, prior, observed) -> Proposal:
        """The posterior leaves the region: move it there, and where it was not measured in units, widen it."""
        _warn(
            f"The posterior leaves the region that the score was trained in (its mode is {float(jnp.linalg.norm(mode.eta)):.1f} sds from the centre): "
            "training once more around that mode."
        )
        centre = proposal.unwhiten(mode.eta)
        if isinstance(self.proposal, FromRestarts) or self.localization is None:
            return from_restarts(centre, proposal.covariance, FromRestarts(diagonal=False, widen=1.5), learner.joint_valid)
        information = learner.information(rng_key, unit, mode.eta, DEFAULT_BUDGET["first rounds"], "re-centring")
        return worth_units(centre, prior[1], information, self._kappa(learner, observed), learner.joint_valid)


DEFAULT_BUDGET = {"first rounds": 3_000_000, "training": 4_000_000, "debiasing": 600_000}
MAX_RECENTRINGS = 2
MAX_OUTSIDE = 0.02  # of the posterior, as its mode and curvature give it, outside the trained region
MAX_RATIO = 1.5  # of the distance at the mode to that at the centre of localization
MAX_SHIFT = 1.0  # of the mode in a round, in proposal sds, for the centre to count as found


def fingerprint(tree: Any) -> str:
    """A hash of arrays and settings, to know data again without tracing the model."""
    leaves, structure = jax.tree.flatten(tree)
    seen = hashlib.blake2b(str(structure).encode(), digest_size=16)
    for leaf in leaves:
        is_array = isinstance(leaf, (np.ndarray, jax.Array))
        seen.update(f"{leaf.dtype}{leaf.shape}".encode() + np.ascontiguousarray(leaf).tobytes() if is_array else repr(leaf).encode())
    return seen.hexdigest()


def _key_of(x: Float[Array, "n p"]) -> Array:
    return jax.random.key(int(fingerprint(x)[:8], 16))


def _prior_moments(rng_key: Array, units: Units) -> tuple[Float[Array, " d"], Float[Array, "d d"]]:
    """Median and covariance of the prior in unconstrained space, the draws pulled in to five robust sds."""
    draws = np.asarray(jax.jit(jax.vmap(units.parameters.sample_prior))(jax.random.split(rng_key, 4000)))
    low, centre, high = np.nanquantile(draws, [0.25, 0.5, 0.75], axis=0)
    sd = np.maximum((high - low) / 1.35, 1e-6)
    pulled = np.clip(np.nan_to_num(draws, nan=0.0), centre - 5 * sd, centre + 5 * sd)
    covariance = np.atleast_2d(np.cov(pulled.T))
    return jnp.asarray(centre), jnp.asarray(covariance + 1e-9 * np.diag(sd**2))


def _first_proposal(prior: tuple, localized: Localized | None, joint_valid: np.ndarray | None = None) -> Proposal:
    """Wide enough for a first look: the prior, and one unit where localization says what that leaves open."""
    valid = np.ones(len(prior[0]), bool) if joint_valid is None else joint_valid
    if localized is None:
        return worth_units(prior[0], prior[1], jnp.zeros_like(prior[1]), 1.0, valid)
    return worth_units(localized.centre, prior[1], localized.information, 1.0, valid)


def share_outside(mode: Mode, data: DataTerms) -> float:
    """How much of the Gaussian at the mode lies beyond the radius within which the score was trained."""
    draws = mode.eta + jax.random.normal(jax.random.key(0), (2000, len(mode.eta))) @ mode.factor.T
    inside = jnp.linalg.norm(draws, axis=1) <= data.radius - 1.0
    return float(1 - jnp.mean(inside))


def _ratio(simulator: Simulator, resemblance: Resemblance | None, theta: Float[Array, " d"]) -> float:
    """How much farther from the data simulations at theta are than those at the centre of localization; 1 where there was none."""
    if resemblance is None:
        return 1.0
    simulator.count("localization", resemblance.num_units)
    return resemblance.ratio(theta)


def _split_budget(training: Training, debias: Debias) -> dict[str, int]:
    """How many units each stage may simulate."""
    total = training.num_simulations
    if total is None:
        return {**DEFAULT_BUDGET, "debiasing near the posterior": debias.max_simulations}
    shares = {"first rounds": 0.2, "training": 0.5, "debiasing": 0.15, "debiasing near the posterior": 0.15}
    return {stage: int(share * total) for stage, share in shares.items()}


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=find_stack_level())


def _warn_of_joint(joint: JointValidity, labels: list[str], target: str) -> None:
    if target == "joint" and joint.moves.any():
        moving = [label for label, moves in zip(labels, joint.moves, strict=True) if moves]
        _warn(
            f"target='joint' does not hold in {moving}: a support or a Simulated value moves with them. They are learnt from the implicit target."
        )
    failed = [label for label, bad in zip(labels, joint.fails_mean_zero, strict=True) if bad]
    if failed:
        _warn(f"The traced joint score does not have mean zero in {failed}; these coordinates are learnt from the implicit target instead.")


def _warn_of_modes(localized: Localized, units: Units) -> None:
    if len(localized.modes) > 1:
        places = "; ".join(
            f"{_in_words(units.parameters.constrain(jnp.asarray(m.centre)))} ({m.num_restarts} restarts, distance {m.distance:.3g})"
            for m in localized.modes
        )
        _warn(
            f"Localization found {len(localized.modes)} modes: {places}. The score is trained around the first, and the posterior will hold that one only. "
            "If they mean the same, constrain the prior to one of them; if not, fit each under a prior of its own. fit.localization.modes has them."
        )
    total = len(localized.thetas) + len(localized.dropped)
    if len(localized.thetas) < 0.25 * total:
        _warn(
            f"Only {len(localized.thetas)} of {total} restarts of localization came as near to the data as the best one: the region may be wrong. "
            "Try Localization(num_starts=100), more steps, or method='search'."
        )


def _warn_of_resemblance(ratio: float) -> None:
    if not ratio <= MAX_RATIO:
        _warn(
            f"Simulations at the mode of this posterior are {ratio:.1f} times as far from the data as those at the centre that localization found: "
            "the score has not learnt enough, and the posterior is not to be trusted. Give more simulations, Training(num_simulations=...), or leave it None."
        )


def _in_words(params: dict[str, Array]) -> str:
    return ", ".join(f"{k} = {np.array2string(np.asarray(v), precision=3)}" for k, v in params.items())


def _warn_of_region(mode: Mode, data: DataTerms, curves: dict[str, LossCurve]) -> None:
    for stage, curve in curves.items():
        if "not finite" in curve.outcome:
            _warn(f"{stage.capitalize()} {curve.outcome}. The last weights with a finite loss are kept; try Training(learning_rate=3e-3).")
    outside = share_outside(mode, data)
    if not outside <= MAX_OUTSIDE:
        _warn(
            f"{outside:.0%} of the posterior lies outside the region that the score was trained in (its mode is {float(jnp.linalg.norm(mode.eta)):.1f} sds "
            "from the centre): it is not to be trusted. Widen the region with proposal=WorthUnits(kappa=...) smaller, search longer with "
            "localization=Localization(num_starts=100), or give more simulations."
        )
    elif not float(mode.gap) < 0.1:
        _warn(
            f"No mode of the posterior was found inside the training region (the last Newton step was {float(mode.gap):.2g} posterior sds): check the posterior before use."
        )

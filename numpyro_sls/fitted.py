"""A learned score: what was found, what it cost, and what can be done with it for these data and others."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Float

from numpyro_sls.boundary import Smoothing
from numpyro_sls.conditioning import Conditioner
from numpyro_sls.debias import LocalMean, MeanZero
from numpyro_sls.errors import ScoreErrors, score_errors
from numpyro_sls.joint import JointValidity
from numpyro_sls.localization import Localized
from numpyro_sls.notices import MAX_OUTSIDE, share_outside, warn_of_region
from numpyro_sls.preparation import fingerprint, key_of, smoothed
from numpyro_sls.proposal import Proposal
from numpyro_sls.readout import Readout
from numpyro_sls.score import DataTerms, PosteriorScore
from numpyro_sls.simulate import Simulations
from numpyro_sls.training import LossCurve, Speed
from numpyro_sls.units import Units, make_units

__all__ = ["SLSFit"]


@dataclass(frozen=True, eq=False)
class SLSFit:
    """A learned score: what was found, what it cost, and the posterior that it gives for the data.

    **Example:**

    >>> from numpyro_sls import SLS
    >>> fit = SLS(model).run(random.key(0), x)  # doctest: +SKIP
    >>> fit.score(jnp.array([0.0]), x[:2, None]).shape  # two units, one parameter  # doctest: +SKIP
    (2, 1)
    """

    sls: Any  # the SLS that made it
    units: Units
    proposal: Proposal
    posterior: PosteriorScore
    data: DataTerms
    fingerprint: str  # of the model's arguments
    localization: Localized | None  # what the search for the region found, and how; None where it was left out
    joint: JointValidity
    local_mean: LocalMean | None  # the mean of the score as measured near the posterior
    readout: Readout | None  # how much the linear readout near the posterior mended
    smoothing: Smoothing | None
    simulations: dict[str, Simulations]
    curves: dict[str, LossCurve]
    seconds: dict[str, float]
    conditioner: Conditioner
    known: dict[str, DataTerms] = field(default_factory=dict, repr=False)  # other data sets seen, by fingerprint

    def score(self, theta: Float[Array, " d"], x: Float[Array, "m p"]) -> Float[Array, "m d"]:
        """Likelihood score of each unit at theta (flat, unconstrained), debiased."""
        unit = self.posterior.unit
        score = self.posterior.learned.units(unit, unit.proposal.whiten(theta), x, self.data.local)
        return unit.proposal.score_in_theta(theta, score)

    def errors(
        self,
        log_likelihood: Callable[[dict[str, Array], Array], Array],
        rng_key: Array,
        draws: Mapping[str, Array] | None = None,
        num_thetas: int = 200,
    ) -> ScoreErrors:
        """The error of the score where the likelihood is known: of one unit, of n units, and of the data over posterior draws.

        ``log_likelihood(params, x)`` gives that of every row of x, one a unit; ``draws`` are draws of the parameter sites.
        """
        return score_errors(rng_key, log_likelihood, self.posterior, self.data, self.units, self.observed(), draws, num_thetas)

    def mean_zero(self, rng_key: Array, num_simulations: int = 1_000_000) -> MeanZero:
        """E[s] over the posterior, which should vanish, before and after debiasing, on fresh simulations."""
        labels = tuple(f"delta {j + 1}" for j in range(self.units.parameters.dim))
        return self.conditioner.mean_zero(rng_key, self.posterior.unit, self.data, labels, num_simulations)

    def speed(self, rng_key: Array) -> Speed:
        """Training steps per second here and now, and the share of them that is simulation."""
        return self.conditioner.learner.speed(rng_key, self.posterior.unit)

    def observed(self) -> Float[Array, "n p"]:
        """The data as the score sees them, smoothed if they are."""
        return self.conditioner.learner.observed

    def potential_fn(self, *model_args, **model_kwargs) -> Callable[[dict[str, Array]], Array]:
        """The learned negative log posterior of a data set, a function of the unconstrained sites, for NUTS and HMC."""
        if not self.posterior.learned.network.has_potential:
            raise ValueError(
                f"{type(self.posterior.learned.network).__name__} has a score but no potential. Fit with network=SeparablePotential(), or sample with SLSLangevin(fit)."
            )
        data = self.condition(*model_args, **model_kwargs)
        parameters = self.units.parameters

        def potential(z):
            theta = parameters.flatten(z)
            return self.posterior.potential(theta, data) + parameters.log_jacobian(theta)

        return potential

    def logdensity_fn(self, *model_args, **model_kwargs) -> Callable[[dict[str, Array]], Array]:
        """The learned log posterior density of a data set, a function of the unconstrained sites: for BlackJAX and others."""
        potential = self.potential_fn(*model_args, **model_kwargs)
        return lambda z: -potential(z)

    def log_likelihood(self, params: Mapping[str, ArrayLike], *model_args, **model_kwargs) -> Array:
        """The learned log likelihood of a data set at parameters in their own values, up to a constant; for ``numpyro.factor``.

        Its gradient is the learned score. The data must be concrete: an array that the other model closes over or is given.
        """
        data, parameters = self.condition(*model_args, **model_kwargs), self.units.parameters
        missing = [k for k in parameters.shapes if k not in params]
        if missing:
            raise ValueError(f"log_likelihood needs a value for {missing}; the parameters of the fit are {list(parameters.shapes)}.")
        return self.posterior.log_likelihood(
            parameters.flatten(parameters.unconstrain({k: jnp.asarray(v) for k, v in params.items()})), data
        )

    def condition(self, *model_args, **model_kwargs) -> DataTerms:
        """The terms of a data set: those of the fit for its own data, else summed, centred and debiased anew, once."""
        seen = fingerprint((model_args, model_kwargs))
        if seen == self.fingerprint:
            return self.data
        if seen not in self.known:
            while len(self.known) >= MAX_KNOWN:
                self.known.pop(next(iter(self.known)))
            self.known[seen] = self._condition(model_args, model_kwargs)
        return self.known[seen]

    def covers(self, *model_args, **model_kwargs) -> bool:
        """Whether the posterior of a data set lies in the region that the score was trained in; without any simulation.

        As the score is before it is mended near that posterior: good enough to see where it lies, not where exactly.
        """
        x, unit = self.rows_of(model_args, model_kwargs), self.posterior.unit
        data, mode = self.conditioner.unmended(unit, smoothed(x, self.smoothing, self.units), x.shape[0])
        return share_outside(mode, data) <= MAX_OUTSIDE

    def refit(self, rng_key: Array, *model_args, progress_bar: bool = True, **model_kwargs) -> "SLSFit":
        """A new fit for other data, with the settings of this one."""
        return self.sls.run(rng_key, *model_args, progress_bar=progress_bar, **model_kwargs)

    def rows_of(self, model_args: tuple, model_kwargs: dict) -> Float[Array, "n p"]:
        """The units of other data as rows, if the fit can take them."""
        x = make_units(self.sls.trace(model_args, model_kwargs), self.units.layout).observed()
        if x.shape[1] != self.posterior.unit.standardizer.centre.shape[0]:
            raise ValueError(
                f"The fit knows units of {self.posterior.unit.standardizer.centre.shape[0]} numbers, covariates included; these data have {x.shape[1]}."
            )
        if self.sls.units == "additive" and x.shape[0] != self.units.num_units:
            raise ValueError(f"units='additive' was trained on data sets of {self.units.num_units} units; these data have {x.shape[0]}.")
        return x

    def _condition(self, model_args: tuple, model_kwargs: dict) -> DataTerms:
        x = self.rows_of(model_args, model_kwargs)
        key, debias = key_of(x), self.sls.debias
        found = self.conditioner(
            key, self.posterior.unit, smoothed(x, self.smoothing, self.units), x.shape[0], debias, debias.max_simulations if debias else 0
        )
        warn_of_region(found.mode, found.data, {})
        return found.data


MAX_KNOWN = 16  # data sets whose terms are kept

"""What a fit tells its user: what was found wrong, what that means, and what to try."""

import warnings

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
from numpyro.util import find_stack_level

from numpyro_sls.joint import JointValidity
from numpyro_sls.localization import Localized
from numpyro_sls.score import DataTerms, Mode
from numpyro_sls.training import LossCurve
from numpyro_sls.units import Units

__all__ = [
    "MAX_DRAWS_OUTSIDE",
    "MAX_OUTSIDE",
    "MAX_RATIO",
    "share_outside",
    "warn",
    "warn_of_draws",
    "warn_of_joint",
    "warn_of_modes",
    "warn_of_region",
    "warn_of_resemblance",
    "warn_of_supports",
]

MAX_OUTSIDE = 0.02  # of the posterior, as its mode and curvature give it, outside the trained region
MAX_DRAWS_OUTSIDE = 0.05  # of a run
MAX_RATIO = 1.5  # of the distance at the mode to that at the centre of localization


def share_outside(mode: Mode, data: DataTerms) -> float:
    """How much of the posterior, or else of the Gaussian at its mode, lies beyond the radius within which the score was trained."""
    if mode.outside is not None:
        return float(mode.outside)
    draws = mode.eta + jax.random.normal(jax.random.key(0), (2000, len(mode.eta))) @ mode.eta_factor.T
    inside = jnp.linalg.norm(draws, axis=1) <= data.radius - 1.0
    return float(1 - jnp.mean(inside))


def warn(message: str) -> None:
    """As NumPyro warns: at the caller's line."""
    warnings.warn(message, UserWarning, stacklevel=find_stack_level())


def warn_of_joint(joint: JointValidity, labels: list[str], target: str) -> None:
    """Coordinates where the joint target was asked for or expected and does not hold."""
    if target == "joint" and joint.moves.any():
        moving = [label for label, moves in zip(labels, joint.moves, strict=True) if moves]
        warn(
            f"target='joint' does not hold in {moving}: a support or a Simulated value moves with them. They are learnt from the implicit target."
        )
    failed = [label for label, bad in zip(labels, joint.fails_mean_zero, strict=True) if bad]
    if failed:
        warn(f"The traced joint score does not have mean zero in {failed}; these coordinates are learnt from the implicit target instead.")


def warn_of_supports(sites: list[str], scale: float | None) -> None:
    """Sites whose support moves with a parameter."""
    if not sites:
        return
    done = (
        f"Gaussian noise of {scale:g} of the data's sd is added to simulations and data, and the posterior is that of the noised data"
        if scale is not None
        else "the data were left as they are"
    )
    warn(
        f"The support of {', '.join(map(repr, sites))} moves with a parameter, so that the likelihood may jump, where score matching does not hold: {done}. "
        "Choose the noise by smoothing=Smoothing(scale), leave it out by smoothing=False, or state the support, support={'site': lambda x: (low, high)}."
    )


def warn_of_modes(localized: Localized, units: Units) -> None:
    """Several modes, or few restarts that came near."""
    if len(localized.modes) > 1:
        places = "; ".join(
            f"{_in_words(units.parameters.constrain(jnp.asarray(m.centre)))} ({m.num_restarts} restarts, distance {m.distance:.3g})"
            for m in localized.modes
        )
        warn(
            f"Localization found {len(localized.modes)} modes: {places}. The score is trained around the first, and the posterior will hold that one only. "
            "If they mean the same, constrain the prior to one of them; if not, fit each under a prior of its own. fit.localization.modes has them."
        )
    total = len(localized.thetas) + len(localized.dropped)
    if len(localized.thetas) < 0.25 * total:
        warn(
            f"Only {len(localized.thetas)} of {total} restarts of localization came as near to the data as the best one: the region may be wrong. "
            "Try Localization(num_starts=100), more steps, or method='search'."
        )


def warn_of_resemblance(ratio: float) -> None:
    """Simulations at the mode that do not look like the data."""
    if not ratio <= MAX_RATIO:
        warn(
            f"Simulations at the mode of this posterior are {ratio:.1f} times as far from the data as those at the centre that localization found: "
            "the score has not learnt enough, and the posterior is not to be trusted. Give more simulations, Training(num_simulations=...), or leave it None."
        )


def _in_words(params: dict[str, Array]) -> str:
    return ", ".join(f"{k} = {np.array2string(np.asarray(v), precision=3)}" for k, v in params.items())


def warn_of_region(mode: Mode, data: DataTerms, curves: dict[str, LossCurve]) -> None:
    """Training that broke off, and a posterior that is not where the score was trained."""
    for stage, curve in curves.items():
        if "not finite" in curve.outcome:
            warn(f"{stage.capitalize()} {curve.outcome}. The last weights with a finite loss are kept; try Training(learning_rate=3e-3).")
    outside = share_outside(mode, data)
    if not outside <= MAX_OUTSIDE:
        warn(
            f"{outside:.0%} of the posterior lies outside the region that the score was trained in (its mode is {float(jnp.linalg.norm(mode.eta)):.1f} sds "
            "from the centre): it is not to be trusted. Widen the region with proposal=WorthUnits(kappa=...) smaller, search longer with "
            "localization=Localization(num_starts=100), or give more simulations."
        )
    elif not float(mode.gap) < 0.1:
        warn(
            f"No mode of the posterior was found inside the training region (the last Newton step was {float(mode.gap):.2g} posterior sds): check the posterior before use."
        )


def warn_of_draws(count: Array, share: Array) -> None:
    """A run whose draws leave the trained region, from within the run."""
    warn(
        f"{float(share):.0%} of the draws after warm-up ({int(count)} a chain so far) are outside the region that the score was trained in: they are "
        "held back by a wall, not by the data, and are not to be trusted. For new data use SLSLangevin(fit, refit=True); else widen the region, "
        "SLSLangevin(model, proposal=WorthUnits(kappa=...)) with a smaller kappa. diagnose(fit, rng_key, mcmc=mcmc) tells more."
    )

"""``diagnose(fit, rng_key, x, mcmc) -> Report``: can the posterior be trusted, and if not, why, and what to try."""

from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float
import numpy as np
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import MCMC

from numpyro_sls.bartlett import Bartlett, bartlett
from numpyro_sls.fitted import SLSFit
from numpyro_sls.joint import joint_validity
from numpyro_sls.langevin import SLSLangevin
from numpyro_sls.leaning import draw_posterior, first_places
from numpyro_sls.notices import MAX_OUTSIDE
from numpyro_sls.score import DataTerms, PosteriorScore
from numpyro_sls.training import LossCurve

__all__ = ["Check", "Report", "diagnose"]

TOLERANCE = 0.05  # posterior sds, to which the mean of the score is measured
MAX_SHIFT = 0.25  # of the posterior mean by the mean of the score, in posterior sds
MAX_CURVATURE = 0.25  # relative to the information: sds are off by about half of it
MAX_ASYMMETRY = 0.3
MAX_FAILED = 0.05
MIN_KEPT = 0.25  # of localization's restarts
MAX_RHAT, MIN_ESS = 1.01, 400
MIN_ACCEPTED = 0.2
MAX_BIAS = 0.1  # of unadjusted steps: shift in posterior sds, or relative error of an sd
FAR = 1.5  # times the squared distance of the farthest simulated data set
MAX_NOISE = 0.1  # of the readout near the posterior, as a share of the score's variance
MIN_SIMULATED = 20_000
CLEARLY = 4.0  # standard errors


class Check(NamedTuple):
    """One thing that was looked at."""

    name: str
    ok: bool
    found: str
    advice: str = ""

    def __str__(self) -> str:
        line = f"{'ok  ' if self.ok else 'FAIL'} {self.name:24s} {self.found}"
        return line if self.ok or not self.advice else f"{line}\n     {self.advice}"


class Report(NamedTuple):
    """Everything that was looked at: print it."""

    checks: tuple[Check, ...]
    bartlett: Bartlett

    @property
    def ok(self) -> bool:
        """Whether every check passed."""
        return all(c.ok for c in self.checks)

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the checks that did not."""
        return tuple(c.name for c in self.checks if not c.ok)

    def __str__(self) -> str:
        num = sum(not c.ok for c in self.checks)
        head = "Nothing speaks against this posterior." if self.ok else f"{num} of {len(self.checks)} checks failed: do not trust it yet."
        return "\n".join([head, *map(str, self.checks)])


def diagnose(fit: SLSFit, rng_key: Array, x: Any = None, mcmc: MCMC | None = None) -> Report:
    """Check a fit on fresh simulations near the posterior of its data, and a run of it.

    :param fit: what `SLS.run` gave, or the ``fit`` of a kernel.
    :param x: the data, or a tuple of the model's arguments; None: those of the run, or of the fit.
    :param mcmc: a run of `SLSLangevin` on these data with this fit; its draws are where the score is checked.

    **Example:**

    >>> from numpyro_sls import diagnose
    >>> report = diagnose(fit, random.key(1), mcmc=mcmc)  # doctest: +SKIP
    >>> report.ok  # doctest: +SKIP
    True
    """
    if not isinstance(fit, SLSFit):
        raise TypeError(f"diagnose takes an SLSFit, as SLS(model).run(rng_key, x) or kernel.fit gives it; got {type(fit).__name__}.")
    if mcmc is not None:
        _check_run(mcmc, fit)
    args, kwargs = _arguments(fit, x, mcmc)
    data = fit.data if args is None else fit.condition(*args, **kwargs)
    key_theta, key_bartlett, key_target, key_model, key_bias = jax.random.split(rng_key, 5)
    theta = _draws(key_theta, fit, data, mcmc)
    learner, unit = fit.conditioner.learner, fit.posterior.unit
    found = bartlett(key_bartlett, learner.learned, unit, learner.simulator, data, theta, TOLERANCE)
    observed = fit.observed() if data is fit.data else fit.rows_of(args, kwargs)
    checks = [
        _mean(found, fit),
        _curvature(found),
        *([] if learner.learned.network.has_potential else [_symmetry(found)]),
        *([] if fit.sls.target == "implicit" or not fit.joint.valid.any() else [_target(key_target, fit, theta)]),
        _failures(fit, found),
        *([] if fit.localization is None else [_restarts(fit), _modes(fit)]),
        *([] if not fit.curves else [_training(fit.curves), _effort(fit)]),
        *([] if fit.readout is None else [_readout(fit)]),
        _region(fit, data, theta, mcmc),
        _misspecification(key_model, fit, theta, observed[: int(data.num_units)]),
        *([] if mcmc is None else [_acceptance(mcmc), *_chains(mcmc)]),
        *([] if mcmc is None else _discretization(key_bias, mcmc)),
    ]
    return Report(tuple(checks), found)


def _check_run(mcmc: MCMC, fit: SLSFit) -> None:
    if not isinstance(mcmc.sampler, SLSLangevin):
        raise TypeError(f"diagnose takes a run of SLSLangevin; this MCMC ran {type(mcmc.sampler).__name__}.")
    if mcmc.last_state is None:
        raise ValueError("The MCMC has not been run: call mcmc.run(rng_key, *model_args) first.")
    if mcmc.sampler.fit is not fit:
        raise ValueError("The run was made with another fit: call diagnose(mcmc.sampler.fit, rng_key, mcmc=mcmc).")


def _arguments(fit: SLSFit, x: Any, mcmc: MCMC | None) -> tuple[Any, dict]:
    """The model's arguments; None for those of the fit."""
    if x is not None:
        return x if isinstance(x, tuple) else (x,), {}
    return (None, {}) if mcmc is None else (mcmc._args, mcmc._kwargs)


def _draws(rng_key: Array, fit: SLSFit, data: DataTerms, mcmc: MCMC | None, num: int = 2000) -> Float[Array, "k d"]:
    """Draws of the posterior: those of the run, or of short chains."""
    parameters = fit.units.parameters
    if mcmc is None:
        posterior = PosteriorScore(fit.posterior.learned, fit.posterior.unit, parameters.log_prior)
        key_start, key_run = jax.random.split(rng_key)
        start = first_places(key_start, data)
        return jax.jit(lambda key, data: draw_posterior(key, posterior, data, start, jnp.ones(len(start))))(key_run, data)
    samples = mcmc.get_samples()
    rows = np.linspace(0, len(next(iter(samples.values()))) - 1, num).round().astype(int)
    chosen = {k: samples[k][rows] for k in parameters.shapes}
    return jax.vmap(lambda p: parameters.flatten(parameters.unconstrain(p)))(chosen)


def _mean(found: Bartlett, fit: SLSFit) -> Check:
    worst = int(np.argmax(np.abs(found.mean)))
    bad = np.any((np.abs(found.mean) > MAX_SHIFT) & (np.abs(found.mean) > CLEARLY * found.mean_se))
    cause = (
        "debias=None leaves it in: use debias=Debias()"
        if fit.sls.debias is None
        else "Give more simulations for it, debias=Debias(max_simulations=...)"
    )
    return Check(
        "mean zero",
        not bad,
        f"E[s] shifts the posterior mean by at most {abs(found.mean[worst]):.2f} posterior sds (standard error {found.mean_se[worst]:.2f})",
        f"The score does not have mean zero, which n units add up. {cause}, or train longer.",
    )


def _curvature(found: Bartlett) -> Check:
    relative, se = found.relative
    worst = int(np.argmax(np.abs(relative)))
    bad = np.any((np.abs(relative) > MAX_CURVATURE) & (np.abs(relative) > CLEARLY * se))
    return Check(
        "curvature",
        not bad,
        f"E[s s^T] + E[grad s] is at most {abs(relative[worst]):.2f} of the information (standard error {se[worst]:.2f})",
        "The score is too steep or too flat: posterior sds are wrong. Train longer, add curvature=CurvaturePenalty(), or see whether the proposal is far too wide.",
    )


def _symmetry(found: Bartlett) -> Check:
    return Check(
        "symmetry",
        found.asymmetry <= MAX_ASYMMETRY,
        f"the mean Jacobian differs from its transpose by {found.asymmetry:.2f} of its size",
        "The score is not the gradient of anything. Train longer, or use network=SeparablePotential(), which cannot be asymmetric.",
    )


def _target(rng_key: Array, fit: SLSFit, theta: Float[Array, "k d"]) -> Check:
    """The joint score tested once more, where the posterior is."""
    again = joint_validity(rng_key, fit.conditioner.learner.simulator, theta)
    bad = [
        label
        for label, trained, holds in zip(fit.units.parameters.labels, fit.joint.valid, again.valid, strict=True)
        if trained and not holds
    ]
    return Check(
        "target",
        not bad,
        f"the joint score does not hold in {bad}" if bad else "the joint score holds where it was trained on",
        "What was learnt there is not the score: a support or a simulated value moves with the parameter. Fit with target='implicit'.",
    )


def _failures(fit: SLSFit, found: Bartlett) -> Check:
    total, failed = (sum(getattr(s, k) for s in fit.simulations.values()) for k in ("num", "num_failed"))
    here = found.num_failed / max(found.num_simulated, 1)
    return Check(
        "simulations",
        max(here, failed / max(total, 1)) <= MAX_FAILED,
        f"{here:.1%} of {found.num_simulated:.3g} units simulated near the posterior were not finite, and left out ({failed:.3g} of {total:.3g} in the fit)",
        "What was left out is left out of the likelihood too. Mend the simulator, or make its failures a value of the data.",
    )


def _restarts(fit: SLSFit) -> Check:
    found = fit.localization
    assert found is not None
    kept, total = len(found.thetas), len(found.thetas) + len(found.dropped)
    return Check(
        "localization",
        kept >= MIN_KEPT * total,
        f"{kept} of {total} restarts came as near to the data as the best",
        "The region may be wrong. Try Localization(num_starts=100), more steps, or method='search'.",
    )


def _modes(fit: SLSFit) -> Check:
    assert fit.localization is not None
    num = len(fit.localization.modes)
    return Check(
        "modes",
        num <= 1,
        f"{num} found",
        "The posterior holds the first one only; fit each under a prior of its own, or constrain the prior if they mean the same.",
    )


def _training(curves: dict[str, LossCurve]) -> Check:
    """Broken off, over-fitted, or still falling when it ended."""
    broken = [k for k, c in curves.items() if "not finite" in c.outcome]
    if broken:
        return Check("training", False, f"{broken[0]}: {curves[broken[0]].outcome}", "Try Training(learning_rate=3e-3).")
    curve = next((c for k, c in reversed(list(curves.items())) if k.startswith("training")), None)
    if curve is None or len(curve.held_out) < 8:
        return Check(
            "training", curve is not None, "too few evaluations to tell" if curve is not None else "no curve", "Give more simulations."
        )
    # A score that is zero everywhere has loss zero.
    held, part = curve.held_out, max(2, len(curve.held_out) // 8)
    drop, over = -held[curve.best], held[-part:].mean() - held[curve.best]
    if drop <= 0:
        return Check(
            "training", False, "the held-out loss never fell below that of no score at all", "Give more simulations, or a simpler network."
        )
    return Check(
        "training",
        bool(over <= 0.3 * drop),
        f"held-out loss {held[curve.best]:.4g} at step {int(curve.steps[curve.best])} of {int(curve.steps[-1])}; {curve.outcome}",
        "The held-out loss rose again: the table is too small for the network. Give more simulations, or a smaller network.",
    )


def _effort(fit: SLSFit) -> Check:
    trained = sum(s.num for k, s in fit.simulations.items() if k.startswith("training"))
    return Check(
        "simulations spent",
        trained >= MIN_SIMULATED,
        f"{trained:.3g} units for the score itself",
        f"Fewer than {MIN_SIMULATED:.0e} units teach a network little. Give more, Training(num_simulations=...), or leave it None.",
    )


def _readout(fit: SLSFit) -> Check:
    assert fit.readout is not None
    noise = float(np.max(fit.readout.noise))
    return Check(
        "readout",
        noise <= MAX_NOISE,
        f"the readout near the posterior added {float(np.max(fit.readout.gain)):.2f} of the score's variance, {noise:.3f} of it noise",
        "Give more simulations near the posterior, debias=Debias(max_simulations=...).",
    )


def _region(fit: SLSFit, data: DataTerms, theta: Float[Array, "k d"], mcmc: MCMC | None) -> Check:
    share = float(jnp.mean(jax.vmap(fit.posterior.outside, (0, None))(theta, data)))
    if mcmc is not None and "diverging" in mcmc.get_extra_fields():
        share = max(share, float(np.mean(mcmc.get_extra_fields()["diverging"])))
    return Check(
        "region",
        share <= MAX_OUTSIDE,
        f"{share:.1%} of the draws lie outside the region that the score was trained in",
        "Outside, nothing was learnt. Widen the region with proposal=WorthUnits(kappa=...) smaller, or refit for these data.",
    )


MAX_ROWS = 2000  # units in each simulated data set of the check
NUM_SETS = 400
NUM_DIRECTIONS = 20


def _misspecification(rng_key: Array, fit: SLSFit, theta: Float[Array, "k d"], observed: Float[Array, "n p"]) -> Check:
    """Are the data's own summaries, as the score sees them, like those of data simulated at posterior draws?"""
    learner, unit = fit.conditioner.learner, fit.posterior.unit
    n = min(len(observed), MAX_ROWS)
    key_rows, key_sets, key_theta = jax.random.split(rng_key, 3)
    network = learner.learned.network

    def summaries(x, ok):
        z = unit.standardizer(x)
        parts = [network.summary(unit.weights, z, unit.proposal.dim)] if network.has_potential else []
        return jnp.concatenate([*parts, network.features(unit.weights, z), z], axis=1).mean(0, where=ok[:, None])

    def simulate(key, t):
        batch = learner.simulator.batch(key, t[None], n)
        return summaries(batch.x[0], batch.ok[0]), (~batch.ok).sum()

    rows = jax.random.randint(key_theta, (NUM_SETS,), 0, len(theta))
    keys = jax.random.split(key_sets, NUM_SETS)
    found, failed = jax.jit(lambda keys, t: jax.lax.map(lambda pair: simulate(*pair), (keys, t)))(keys, theta[rows])
    simulated = np.asarray(found, float)
    learner.simulator.count("diagnosis", NUM_SETS * n, failed.sum())
    chosen = observed if n == len(observed) else observed[jax.random.choice(key_rows, len(observed), (n,), replace=False)]
    own = np.asarray(summaries(chosen, jnp.ones(n, bool)), float)
    # The principal directions of one half of the simulated sets; the distances of the other half are the reference.
    half = NUM_SETS // 2
    centre, scale = simulated[:half].mean(0), simulated[:half].std(0)
    used = scale > 1e-6 * np.abs(centre) + 1e-12
    whitened = (simulated[:, used] - centre[used]) / scale[used]
    _, sizes, axes = np.linalg.svd(whitened[:half], full_matrices=False)
    num = min(NUM_DIRECTIONS, int((sizes > 1e-3 * sizes[0]).sum()), half // 8)
    project = axes[:num].T / (sizes[:num] / np.sqrt(half))
    distance = ((whitened[half:] @ project) ** 2).sum(1)
    mine = float((((own[used] - centre[used]) / scale[used] @ project) ** 2).sum())
    p = (1 + np.sum(distance >= mine)) / (1 + len(distance))
    return Check(
        "the data",
        mine <= FAR * float(distance.max()),  # with so few simulated sets p has a floor, so how far out counts
        f"the data's own summaries are {np.sqrt(mine / np.median(distance)):.2f} times as far out as simulated data's (p = {p:.3f})",
        "No parameters of this model make data like these: the model is wrong about something that the score looks at. Compare them with predict(mcmc, rng_key).",
    )


def _acceptance(mcmc: MCMC) -> Check:
    rate, size = float(np.min(mcmc.last_state.mean_accept_prob)), float(np.max(mcmc.last_state.step_size))
    return Check(
        "acceptance",
        rate >= MIN_ACCEPTED,
        f"{rate:.2f} of the steps, at step size {size:.2g}",
        "The steps are too large for this posterior: give num_warmup, in which they are adapted, or a smaller step_size.",
    )


def _chains(mcmc: MCMC) -> list[Check]:
    samples = {k: np.asarray(v) for k, v in mcmc.get_samples(group_by_chain=True).items()}
    rhat = {k: float(np.nanmax(split_gelman_rubin(v))) for k, v in samples.items()}
    ess = {k: float(np.nanmin(effective_sample_size(v))) for k, v in samples.items()}
    worst, least = max(rhat, key=lambda k: rhat[k]), min(ess, key=lambda k: ess[k])
    return [
        Check(
            "R-hat",
            rhat[worst] < MAX_RHAT,
            f"at most {rhat[worst]:.3f} ({worst})",
            "The chains have not met: run longer, with more warm-up, or annealed=True.",
        ),
        Check("effective samples", ess[least] >= MIN_ESS, f"at least {ess[least]:.0f} ({least})", "Run longer, or with more num_steps."),
    ]


def _discretization(rng_key: Array, mcmc: MCMC) -> list[Check]:
    kernel = mcmc.sampler
    if kernel._adjusted:
        return []
    size = float(np.max(mcmc.last_state.step_size))
    bias = kernel.discretization_bias(rng_key, *mcmc._args, step_size=size, **mcmc._kwargs)
    worst = max(float(np.abs(bias.shift).max()), float(np.abs(bias.sd_ratio - 1).max()))
    fine = np.isfinite(worst) and worst <= MAX_BIAS
    return [Check("discretization", bool(fine), str(bias), "Take smaller steps, step_size=..., or adjusted=True.")]

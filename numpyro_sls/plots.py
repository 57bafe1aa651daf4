"""Pictures of a fit, of what was checked, and of posteriors next to one another; every function returns matplotlib axes."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float
import matplotlib.pyplot as plt
import numpy as np
from numpyro.distributions import constraints

from numpyro_sls.bartlett import Bartlett
from numpyro_sls.calibration import Calibration
from numpyro_sls.diagnostics import MAX_CURVATURE, MAX_SHIFT
from numpyro_sls.fitted import SLSFit
from numpyro_sls.parameters import bare

__all__ = ["bartlett_residuals", "calibration", "compare", "pairs", "predictive_bands", "score_field", "training_curves"]

OURS, OTHER, GREY = "C0", "C1", "0.6"


def training_curves(fit: SLSFit, axes: Any = None) -> Any:
    """Held-out loss of every stage by step, each from its first value to its best."""
    curves = {k: c for k, c in fit.curves.items() if len(c.held_out) > 1}
    if not curves:
        raise ValueError("The fit has no loss curves to draw.")
    axes = _axes(axes, 1, len(curves), (3.2, 2.6))
    for axis, (stage, curve) in zip(axes, curves.items(), strict=True):
        axis.plot(curve.steps, curve.train, color=GREY, linewidth=0.7, label="training")
        axis.plot(curve.steps, curve.held_out, color=OURS, label="held out")
        axis.axvline(curve.steps[curve.best], color="0.3", linestyle=":", linewidth=0.8)
        axis.set_ylim(*_robust(np.concatenate([curve.train, curve.held_out])))
        axis.set(title=stage, xlabel="step")
    axes[0].set_ylabel("loss")
    axes[0].legend(frameon=False, fontsize="small")
    return axes


def pairs(fit: SLSFit, samples: Mapping[str, Any], axes: Any = None) -> Any:
    """Restarts of localization, draws of the proposal and draws of the posterior, for every two coordinates of theta."""
    labels = _labels(fit)
    d, draws = len(labels), _flat(fit, samples)
    proposal = np.asarray(fit.proposal.sample(jax.random.key(0), 500))
    restarts = None if fit.localization is None else np.asarray(fit.localization.thetas)
    axes = np.asarray(plt.subplots(d, d, figsize=(2.2 * d, 2.2 * d), layout="constrained", squeeze=False)[1] if axes is None else axes)
    for i in range(d):
        for j in range(d):
            axis = axes[i, j]
            if j > i:
                axis.set_visible(False)
                continue
            if i == j:
                for values, color in ((proposal, GREY), (draws, OURS)):
                    axis.hist(values[:, i], bins=40, density=True, color=color, alpha=0.6)
                axis.set_yticks([])
            else:
                axis.plot(proposal[:, j], proposal[:, i], ".", color=GREY, markersize=2, label="proposal")
                axis.plot(draws[::10, j], draws[::10, i], ".", color=OURS, markersize=2, label="posterior")
                if restarts is not None:
                    axis.plot(restarts[:, j], restarts[:, i], "+", color=OTHER, label="restarts")
            if i == d - 1:
                axis.set_xlabel(labels[j])
            if j == 0:
                axis.set_ylabel(labels[i])
    if d > 1:
        axes[1, 0].legend(frameon=False, fontsize="small")
    return axes


def score_field(fit: SLSFit, coordinates: tuple[int, int] = (0, 1), width: float = 4.0, axis: Any = None, num: int = 60) -> Any:
    """The learned posterior score as arrows on the density that it gives, through the mode, in units of theta (the paper's Figure 1)."""
    i, j = coordinates
    data, posterior = fit.data, fit.posterior
    sd = np.linalg.norm(np.asarray(data.factor), axis=1)
    axis = plt.subplots(figsize=(4.2, 3.6), layout="constrained")[1] if axis is None else axis
    ends = [np.asarray(data.mode)[k] + width * sd[k] * np.linspace(-1, 1, num) for k in (i, j)]

    def at(a, b):
        return data.mode.at[i].set(a).at[j].set(b)

    grid = jnp.stack(jnp.meshgrid(*map(jnp.asarray, ends)), axis=-1)
    coarse = grid[2 :: num // 12, 2 :: num // 12]
    score = jax.vmap(jax.vmap(lambda p: posterior.score(at(*p), data)))(coarse)[..., [i, j]]
    if posterior.learned.network.has_potential:
        value = -np.asarray(jax.vmap(jax.vmap(lambda p: posterior.potential(at(*p), data)))(grid))
        axis.pcolormesh(*ends, np.exp(np.maximum(value - np.nanmax(value), -30)), shading="auto", cmap="Blues")
    arrows = np.asarray(score) * sd[[i, j]]  # in posterior sds, as the axes are
    axis.quiver(coarse[..., 0], coarse[..., 1], arrows[..., 0], arrows[..., 1], color="0.25", width=0.004)
    labels = _labels(fit)
    axis.set(xlabel=labels[i], ylabel=labels[j])
    return axis


def bartlett_residuals(found: Bartlett, axes: Any = None) -> Any:
    """Both identities by direction with two standard errors; the shaded bands are what a posterior tolerates."""
    axes = _axes(axes, 1, 2, (3.6, 2.8))
    relative, se = found.relative
    rows = (
        (found.mean, found.mean_se, MAX_SHIFT, "n E s, in posterior sds"),
        (relative, se, MAX_CURVATURE, "(E s s' + E grad s) / information"),
    )
    for axis, (value, error, bar, title) in zip(axes, rows, strict=True):
        axis.axhspan(-bar, bar, color="0.92")
        axis.axhline(0, color="0.5", linewidth=0.8)
        axis.errorbar(np.arange(len(value)) + 1, value, 2 * error, fmt="o", color=OURS, capsize=3)
        axis.set(title=title, xlabel="direction", xticks=np.arange(len(value)) + 1)
    return axes


def calibration(found: Calibration, axis: Any = None) -> Any:
    """Coverage at every level by coordinate, with the band that chance allows."""
    axis = plt.subplots(figsize=(3.8, 3.6), layout="constrained")[1] if axis is None else axis
    levels = np.linspace(0.02, 0.98, 49)
    low, high = found.band(levels)
    axis.fill_between(levels, low, high, color="0.88", label="95 % by chance")
    axis.plot([0, 1], [0, 1], color="0.5", linewidth=0.8)
    for curve, label in zip(found.coverage(levels).T, found.labels, strict=True):
        axis.plot(levels, curve, label=label)
    axis.set(xlabel="level of the interval", ylabel="share that holds the truth", xlim=(0, 1), ylim=(0, 1))
    axis.legend(frameon=False, fontsize="small")
    return axis


def predictive_bands(drawn: Float[np.ndarray, "s n"], observed: Float[np.ndarray, " n"], axis: Any = None) -> Any:
    """Quantiles of the data, sorted, against those of data sets simulated from the posterior, as differences from their median."""
    axis = plt.subplots(figsize=(4.2, 3), layout="constrained")[1] if axis is None else axis
    drawn, observed = np.sort(np.asarray(drawn).reshape(len(drawn), -1), axis=1), np.sort(np.ravel(observed))
    if drawn.shape[1] != len(observed):
        raise ValueError(f"predictive_bands got data sets of {drawn.shape[1]} numbers and {len(observed)} observed ones.")
    low, middle, high = np.quantile(drawn, [0.025, 0.5, 0.975], axis=0)
    at = (np.arange(len(observed)) + 0.5) / len(observed)
    axis.fill_between(at, low - middle, high - middle, color=OURS, alpha=0.3, label="95 % of simulated data")
    axis.plot(at, observed - middle, color="k", linewidth=0.9, label="data")
    axis.set(xlabel="quantile", ylabel="data - predictive median")
    axis.legend(frameon=False, fontsize="small")
    return axis


def compare(posteriors: Mapping[str, Mapping[str, Any]], names: Sequence[str] | None = None, axes: Any = None) -> Any:
    """Marginals of several posteriors, ours, exact, a rival's: ``{"ours": samples, "exact": samples}``."""
    first = next(iter(posteriors.values()))
    columns = [(k, i) for k in (names or first) for i in range(int(np.prod(np.shape(first[k])[1:], dtype=int)))]
    axes = _axes(axes, 1, len(columns), (2.6, 2.4))
    for axis, (name, i) in zip(axes, columns, strict=True):
        values = {k: np.asarray(v[name]).reshape(len(v[name]), -1)[:, i] for k, v in posteriors.items() if name in v}
        low, high = (f([np.quantile(v, q) for v in values.values()]) for f, q in ((min, 0.001), (max, 0.999)))
        for label, v in values.items():
            axis.hist(v, bins=np.linspace(low, high, 50), density=True, histtype="step", linewidth=1.3, label=label)
        axis.set(xlabel=name if np.ndim(first[name]) == 1 else f"{name}[{i}]", yticks=[])
    axes[0].legend(frameon=False, fontsize="small")
    return axes


def _axes(axes: Any, rows: int, columns: int, size: tuple[float, float]) -> Any:
    if axes is None:
        axes = plt.subplots(rows, columns, figsize=(size[0] * columns, size[1] * rows), layout="constrained", squeeze=False)[1]
    return np.ravel(np.asarray(axes))


def _labels(fit: SLSFit) -> list[str]:
    """Of the coordinates of theta: a site that is not real is drawn unconstrained, and says so."""
    parameters = fit.units.parameters
    sites = [k for k, shape in parameters.shapes.items() for _ in range(int(np.prod(shape)))]
    real = {k for k in sites if bare(parameters.traced.supports[k]) is constraints.real}
    return [label if k in real else f"{label}, unconstrained" for label, k in zip(parameters.labels, sites, strict=True)]


def _flat(fit: SLSFit, samples: Mapping[str, Any]) -> Float[np.ndarray, "s d"]:
    parameters = fit.units.parameters
    chosen: dict[str, Array] = {k: jnp.asarray(samples[k]) for k in parameters.shapes}
    return np.asarray(jax.vmap(lambda p: parameters.flatten(parameters.unconstrain(p)))(chosen))


def _robust(values: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(values[np.isfinite(values)], [0.0, 0.95])
    return float(low - 0.05 * (high - low)), float(high + 0.05 * (high - low) + 1e-12)

"""What the structured score is worth, against exact scores and posteriors.

python -m benchmarks.structure variants dirichlet beta_binomial [--seeds 0 1]

Rows go to benchmarks/results/; --picture draws the variants from there into docs/variants.png and prints their table."""

import argparse

import jax
from jax import random
import jax.numpy as jnp
import matplotlib.pyplot as plt
from matplotlib.ticker import NullFormatter
import numpy as np
from numpyro.distributions import biject_to, constraints

from benchmarks.common import fitted, rows, save
from numpyro_sls import CurvaturePenalty, Debias, FromRestarts, MLPScore, SeparablePotential, SLSFit, Training
from numpyro_sls.models import beta_binomial, dirichlet, monotone


def monotone_log_likelihood(params, x):
    """Of every row (y, D_1, ..., D_10); D_0 is 1."""
    design = jnp.concatenate([jnp.ones((len(x), 1)), x[:, 1:]], axis=1)
    return -0.5 * ((x[:, 0] - design @ params["theta"]) / monotone.NOISE) ** 2


PLAIN = {"focus": None, "target": "implicit", "coordinates": "unconstrained"}
DEFAULT = 4_000_000  # units for a variant
PENALTY = CurvaturePenalty(ladder=(1e-2,))


def variants(budget: int) -> dict[str, dict]:
    """The paper's seven models of the monotonic regression, and ours, all under the same proposal of the restarts."""
    single, whole = Training(num_simulations=budget), Training(num_simulations=budget, num_thetas=8)
    debias = Debias(near=False)
    paper = {"network": MLPScore(), "proposal": FromRestarts(widen=2.0), **PLAIN}
    return {
        "1-model": {**paper, "debias": None, "training": single},
        "1-model-C": {**paper, "debias": None, "curvature": PENALTY, "training": single},
        "1-model-D": {**paper, "debias": debias, "training": single},
        "1-model-DC": {**paper, "debias": Debias(near=False, ladder=(1e-3,)), "curvature": PENALTY, "training": single},
        "n-model": {**paper, "debias": None, "units": "additive", "training": whole},
        "n-model-C": {**paper, "debias": None, "units": "additive", "curvature": PENALTY, "training": whole},
        "n-model-C5": {
            **paper,
            "debias": None,
            "units": "additive",
            "curvature": PENALTY,
            "training": Training(num_simulations=5 * budget, num_thetas=8),
        },
        "separable-DC": {
            **paper,
            "network": SeparablePotential(),
            "debias": Debias(near=False, ladder=(1e-3,)),
            "curvature": PENALTY,
            "training": single,
        },
        "separable, near the posterior too": {**paper, "network": SeparablePotential(), "debias": Debias(), "training": single},
    }


def run_variants(options) -> None:
    """loss-1, loss-n and loss-n over the posterior, relative to the mean square of the true score."""
    for seed in options.seeds:
        xy = monotone.simulate_data(random.key(100 + seed))
        draws = {"theta": monotone.exact_posterior(random.key(2), xy)}
        for name, settings in variants(options.simulations or DEFAULT).items():
            if options.variants and name not in options.variants:
                continue
            fit, cost = fitted(monotone.model, random.key(seed), xy, **settings)
            e = fit.errors(monotone_log_likelihood, random.key(9), draws, num_thetas=200)
            losses = {"loss-1": e.unit.relative, "loss-n": e.data_set.relative, "loss-n-posterior": e.posterior.relative}
            save("variants", seed=seed, variant=name, **losses, **cost)


def run_dirichlet(options) -> None:
    """Relative error of the score of n rows around the truth, with and without the curvature penalty (same budget, same debiasing)."""
    n, truth = 100, dirichlet.TRUTH["theta"]
    for seed in options.seeds:
        x = dirichlet.simulate_data(random.key(100 + seed), n)
        for name, curvature in {"without": None, "with": CurvaturePenalty(ladder=(1e-2, 1e-1, 1.0))}.items():
            settings = {
                "network": MLPScore(width=32, depth=2),
                "target": "implicit",
                "localization": None,
                "focus": None,
                "debias": Debias(near=False),
                "training": Training(num_simulations=400_000, num_per_theta=4),
                "curvature": curvature,
            }
            fit, cost = fitted(dirichlet.model, random.key(seed), x, **settings)
            parameters, unit = fit.units.parameters, fit.posterior.unit
            by_radius = {}
            for radius in (0.0, 0.02, 0.05, 0.1, 0.15):
                angle = np.linspace(0, 2 * np.pi, 8, endpoint=False)
                around = truth + radius * np.stack([np.cos(angle), np.sin(angle), -np.cos(angle) - np.sin(angle)], 1)
                errors = [_error_at(fit, parameters, unit, jnp.asarray(p), n) for p in around]
                by_radius[radius] = float(np.max(errors))
            save("dirichlet", seed=seed, variant=name, error=by_radius, chosen=_chosen(fit), **cost)


def _error_at(fit: SLSFit, parameters, unit, probs, n: int) -> float:
    """E |s - s*|^2 / E |s*|^2 of n rows from the truth at one theta, in eta."""
    truth = dirichlet.TRUTH["theta"]
    theta = parameters.flatten({"theta": biject_to(constraints.simplex).inv(probs)})
    keys = random.split(random.key(3), 200)
    x = jax.vmap(lambda k: jax.nn.one_hot(random.categorical(k, jnp.log(truth), shape=(n,)), 3))(keys)
    exact = jax.grad(lambda t, q: jnp.sum(dirichlet.log_likelihood(parameters.constrain(t), q)))

    def at(q):
        true = unit.proposal.score_in_eta(theta, exact(theta, q)[None])[0]
        ours = fit.posterior.learned.units(unit, unit.proposal.whiten(theta), q, fit.data.local).sum(0)
        return jnp.sum((ours - true) ** 2), jnp.sum(true**2)

    error, size = jax.vmap(at)(x)
    return float(error.mean() / size.mean())


def _chosen(fit: SLSFit) -> str:
    curves = {k: float(c.held_out[-1]) for k, c in fit.curves.items() if k.startswith("curvature")}
    return min(curves, key=lambda k: curves[k]) if curves else ""


def run_beta_binomial(options) -> None:
    """The error of a score learnt under the prior, at the posterior of one count, against the prior density at its truth."""
    settings = {"target": "implicit", "localization": None, "focus": None, "network": MLPScore(width=32, depth=2), "debias": None}
    x = beta_binomial.simulate_data(random.key(0))
    for seed in options.seeds:
        fit, cost = fitted(beta_binomial.model, random.key(seed), x, training=Training(num_simulations=200_000), **settings)
        truths = np.linspace(0.05, 0.95, 19)
        errors = [_binomial_error(fit, float(truth)) for truth in truths]
        densities = (truths**4 * (1 - truths) ** 4 * 630).tolist()
        save("beta_binomial", seed=seed, theta=truths.tolist(), error=errors, prior_density=densities, **cost)


def _binomial_error(fit: SLSFit, truth: float) -> float:
    """E |s - s*|^2 / E |s*|^2 over counts at the truth and draws of their posteriors."""
    parameters, unit = fit.units.parameters, fit.posterior.unit
    counts = random.binomial(random.key(4), beta_binomial.NUM_TRIALS, truth, (400,))
    p = random.beta(random.key(5), 5 + counts, 105 - counts)
    theta = jax.vmap(lambda q: parameters.flatten({"theta": jnp.log(q) - jnp.log1p(-q)}))(p)

    def at(t, c):
        true = jax.grad(lambda u: beta_binomial.log_likelihood(parameters.constrain(u), c[None, None])[0])(t)
        ours = unit.proposal.score_in_theta(t, fit.posterior.learned.raw(unit, unit.proposal.whiten(t), c[None, None])[0])
        return jnp.sum((ours - true) ** 2), jnp.sum(true**2)

    error, size = jax.vmap(at)(theta, counts.astype(float))
    return float(error.mean() / size.mean())


LOSSES = {"loss-1": "one row", "loss-n": "1000 rows", "loss-n-posterior": "the data, over the posterior"}


def picture() -> None:
    """The losses of the variants, averaged over seeds: a table on the screen and a figure in docs/."""
    latest = {(row["variant"], row["seed"]): row for row in rows("variants")}
    names = [name for name in variants(DEFAULT) if any(name == key[0] for key in latest)]
    mean = {(name, k): np.mean([row[k] for key, row in latest.items() if key[0] == name]) for name in names for k in LOSSES}
    print("| model | " + " | ".join(LOSSES.values()) + " | units simulated |\n|---|" + "---|" * (len(LOSSES) + 1))
    for name in names:
        units = np.mean([row["units"] for key, row in latest.items() if key[0] == name])
        print(f"| {name} | " + " | ".join(f"{mean[name, k]:.3g}" for k in LOSSES) + f" | {units:.2g} |")
    figure, panels = plt.subplots(1, 3, figsize=(11, 3.2), sharey=True, layout="constrained")
    for panel, (key, title) in zip(panels, LOSSES.items(), strict=True):
        values = [mean[name, key] for name in names]
        panel.barh(names, values, color=["C0" if name.startswith(("1", "n")) else "C1" for name in names])
        panel.set(xscale="log", title=title, xlabel="error / size of the true score")
        panel.bar_label(panel.containers[0], [f"{v:.2g}" for v in values], padding=2, fontsize=8)
        panel.set_xlim(min(values) / 2, max(values) * 5)
        panel.xaxis.set_minor_formatter(NullFormatter())
    panels[0].invert_yaxis()
    figure.savefig("docs/variants.png", dpi=110)


TASKS = {
    "variants": run_variants,
    "dirichlet": run_dirichlet,
    "beta_binomial": run_beta_binomial,
}


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", default=list(TASKS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--simulations", type=int, default=None, help="units for monotone and variants")
    parser.add_argument("--variants", nargs="*", default=[], help="which of them; none: all")
    parser.add_argument("--picture", action="store_true", help="draw the variants from the results, run nothing")
    options = parser.parse_args()
    if options.picture:
        return picture()
    for task in options.tasks:
        TASKS[task](options)


if __name__ == "__main__":
    main()

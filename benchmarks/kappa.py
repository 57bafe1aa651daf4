"""How wide the training proposal should be: score error and posterior error against kappa, on two models.

python -m benchmarks.kappa [--kappas 0.1 0.3 1 3 10 n] [--seeds 0 1] [--table]
"""

import argparse
import json
from pathlib import Path
import time
import warnings

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.infer import MCMC

from numpyro_sls import SLS, SLSFit, SLSLangevin, WorthUnits
from tests.cases import CASES, Case, compare, exact_samples

# Implicit in both coordinates, and joint in both.
MODELS = {"location_scale": "implicit", "mixture": "blend"}
RESULTS = Path("benchmarks/results/kappa.jsonl")


def exact_score(case: Case, fit: SLSFit, theta, x):
    """Likelihood score of every unit in x from the likelihood written down."""

    def log_likelihood(theta, row):
        params = fit.units.parameters.constrain(theta)
        trace = handlers.trace(handlers.substitute(case.marginal, params)).get_trace(row.reshape(1, *row.shape) if row.size > 1 else row)
        sites = [s for s in trace.values() if s["type"] == "sample" and s["is_observed"]]
        return sum(s["fn"].log_prob(s["value"]).sum() for s in sites)

    return jax.vmap(jax.grad(log_likelihood), (None, 0))(theta, x)


def run(name: str, kappa: float, seed: int) -> dict:
    """Fit with one kappa and measure the error of the score at the posterior mean and of the posterior."""
    case = CASES[name]
    args = case.simulate(random.key(100 + seed), case.n)
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sls = SLS(case.model, target=MODELS[name], proposal=WorthUnits(kappa=kappa))
        fit = sls.run(random.key(seed), *args, progress_bar=False)
        mcmc = MCMC(SLSLangevin(fit), num_warmup=500, num_samples=2000, num_chains=4, chain_method="vectorized", progress_bar=False)
        mcmc.run(random.key(seed), *args)
    theta = fit.data.mode
    x = fit.units.simulate_x(random.key(99), theta, 8000)
    exact, ours = exact_score(case, fit, theta, x), fit.score(theta, x)
    rho = jnp.mean((ours - exact) ** 2, axis=0) / jnp.mean(exact**2, axis=0)
    distance = compare({k: np.asarray(v) for k, v in mcmc.get_samples().items()}, exact_samples(case, args))
    return {
        "model": name,
        "target": MODELS[name],
        "n": case.n,
        "kappa": kappa,
        "seed": seed,
        "rho": np.asarray(rho).tolist(),
        "w1": distance.w1.tolist(),
        "sd_ratio": distance.sd_ratio.tolist(),
        "warned": any("region" in str(w.message) for w in caught),
        "seconds": time.perf_counter() - start,
    }


def table(rows: list[dict]) -> str:
    """One line for every model and kappa, the worst coordinate averaged over the seeds."""
    lines = [
        "| model | target | n | kappa | relative squared score error | W1 in exact sds | sd ratio | runs | warned |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, kappa in dict.fromkeys((r["model"], r["kappa"]) for r in rows):
        group = [r for r in rows if (r["model"], r["kappa"]) == (name, kappa)]
        rho, w1 = (np.mean([max(r[k]) for r in group]) for k in ("rho", "w1"))
        ratio = max((v for r in group for v in r["sd_ratio"]), key=lambda v: abs(np.log(v)))
        shown = f"{kappa:g}" if kappa != group[0]["n"] else f"n = {kappa:g}"
        cells = [
            name,
            group[0]["target"],
            group[0]["n"],
            shown,
            f"{rho:.4f}",
            f"{w1:.3f}",
            f"{ratio:.2f}",
            len(group),
            sum(r["warned"] for r in group),
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run what was asked for, append the rows, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--kappas", nargs="*", default=["0.1", "0.3", "1", "3", "10", "n"])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--table", action="store_true", help="only print the table of the rows so far")
    options = parser.parse_args()
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    if not options.table:
        for name in options.models:
            for kappa in options.kappas:
                for seed in options.seeds:
                    row = run(name, float(CASES[name].n if kappa == "n" else kappa), seed)
                    with RESULTS.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                    print(row, flush=True)
    print(table([json.loads(line) for line in RESULTS.read_text().splitlines()]))


if __name__ == "__main__":
    main()

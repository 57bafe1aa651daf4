"""Ten models with known posteriors, defaults only: 1-Wasserstein distance in exact sds and sd ratio of every marginal.

python -m benchmarks.foundation [case ...] [--seeds 0 1] [--target implicit]
"""

import argparse
import json
import os
from pathlib import Path
import platform
import time

import jax
from jax import random
import numpy as np
import numpyro
from numpyro.infer import MCMC

from numpyro_sls import SLSLangevin, diagnose
from tests.cases import CASES, compare, exact_samples


def run_case(name: str, seed: int, target: str = "blend") -> dict:
    """Fit and sample one model on one data set, and compare with the exact posterior."""
    case = CASES[name]
    args = case.simulate(random.key(100 + seed), case.n)
    exact = exact_samples(case, args)
    start = time.perf_counter()
    kernel = SLSLangevin(case.model, target=target, progress_bar=False, fit_key=random.key(seed))
    mcmc = MCMC(kernel, num_warmup=500, num_samples=2000, num_chains=4, chain_method="vectorized", progress_bar=False)
    mcmc.run(random.key(seed), *args)
    seconds = time.perf_counter() - start
    distance = compare({k: np.asarray(v) for k, v in mcmc.get_samples().items()}, exact)
    fit = kernel.fit
    return {
        "case": name,
        "target": target,
        "seed": seed,
        "n": case.n,
        "w1": distance.w1.tolist(),
        "sd_ratio": distance.sd_ratio.tolist(),
        "shift": distance.shift.tolist(),
        "diverging": float(mcmc.get_extra_fields()["diverging"].mean()),
        "simulations": {k: s.num for k, s in fit.simulations.items()},
        "seconds": seconds,
        "failed": diagnose(fit, random.key(9), mcmc=mcmc).failed,
        "passed": bool(distance.w1.max() <= 0.15 and distance.sd_ratio.min() >= 0.9 and distance.sd_ratio.max() <= 1.1),
    }


def table(rows: list[dict]) -> str:
    """The rows as a page of the docs."""
    lines = [
        "# Accuracy on ten known posteriors",
        "",
        "Defaults only, no settings for any model; 4 chains x 2000 draws against NUTS on the likelihood written down (4 x 2000 draws). W1 is the largest",
        "1-Wasserstein distance of a marginal in exact sds, the sd ratio the one furthest from 1. The bars are 0.15 and 0.9-1.1. Two sets of exact draws of",
        "this size differ by about 0.03. Made by `make benchmark` and `python -m benchmarks.foundation --table`; seconds are those of the machine in the last line,",
        "compilation included. The last column is what `diagnose` finds wrong.",
        "",
        "| model | n | target | seed | W1 | sd ratio | units simulated | seconds | within the bars | `diagnose` |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        ratio = max(r["sd_ratio"], key=lambda v: abs(v - 1))
        units = sum(r["simulations"].values())
        cells = [
            r["case"],
            r["n"],
            r["target"],
            r["seed"],
            f"{max(r['w1']):.3f}",
            f"{ratio:.3f}",
            f"{units:.1e}",
            f"{r['seconds']:.0f}",
            "yes" if r["passed"] else "no",
            ", ".join(r["failed"]) or "ok",
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, jax {jax.__version__}, numpyro {numpyro.__version__}"
    return "\n".join([*lines, "", f"Machine: {machine}.", ""])


def main() -> None:
    """Run the cases that were asked for and append a row for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--target", default="blend")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/foundation.jsonl"))
    parser.add_argument("--table", action="store_true", help="only write docs/accuracy.md from the rows so far")
    options = parser.parse_args()
    if options.table:
        rows = [json.loads(line) for line in options.out.read_text().splitlines()]
        Path("docs/accuracy.md").write_text(table(rows))
        return
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for name in options.cases:
        for seed in options.seeds:
            row = run_case(name, seed, options.target)
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            units = sum(row["simulations"].values())
            print(
                f"{name:20s} n={row['n']:<7d} {row['target']:8s} seed {seed}  W1 {np.round(row['w1'], 3)}  sd ratio {np.round(row['sd_ratio'], 3)}  "
                f"{units:.2e} units  {row['seconds']:.0f} s  {'ok' if row['passed'] else 'MISSED'}",
                flush=True,
            )


if __name__ == "__main__":
    main()

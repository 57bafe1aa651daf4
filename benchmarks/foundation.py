"""Ten models with known posteriors, defaults only: 1-Wasserstein distance in exact sds and sd ratio of every marginal.

python -m benchmarks.foundation [case ...] [--seeds 0 1] [--target implicit]
"""

import argparse
import json
from pathlib import Path
import time

from jax import random
import numpy as np
from numpyro.infer import MCMC

from numpyro_sls import SLSLangevin
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
        "passed": bool(distance.w1.max() <= 0.15 and distance.sd_ratio.min() >= 0.9 and distance.sd_ratio.max() <= 1.1),
    }


def main() -> None:
    """Run the cases that were asked for and append a row for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--target", default="blend")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/foundation.jsonl"))
    options = parser.parse_args()
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

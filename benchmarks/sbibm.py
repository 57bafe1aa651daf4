"""Seven tasks of sbibm with ten thousand simulations: C2ST next to the published NLE, NPE, SNLE and SNPE.

python -m benchmarks.sbibm [--full] [--tasks sir slcp] [--ways "black box" traced] [--table]

As a black box nothing is used but simulations; traced, the joint score and the derivative of the simulator are.
"""

from pathlib import Path
from typing import Any

from jax import random
import jax.numpy as jnp
import numpy as np

from benchmarks.common import distances, fitted, options, sampled, save
from benchmarks.report import sbibm_table
from benchmarks.sbibm_tasks import TASKS
from numpyro_sls import Localization, Training, WorthUnits
from numpyro_sls.metrics import c2st

BUDGET = 10_000
COMMON: dict[str, Any] = {"units": "whole", "debias": None, "focus": None}
BLACK_BOX = {**COMMON, "target": "implicit", "localization": Localization(method="rounds"), "proposal": WorthUnits(num_rounds=2)}
TRACED = {**COMMON, "localization": Localization(num_starts=8, population=128, num_units=1, num_steps=(10, 10))}
# A simulator whose data change by orders of magnitude under the prior is searched, without a derivative, before anything is learnt.
SEARCHED = {**BLACK_BOX, "localization": Localization(method="search", num_starts=8, population=128, num_units=1, num_rounds=6)}
WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "black box": {"lotka_volterra": SEARCHED},
    "traced": {},
}
SPENT = {"rounds": 0, "search": 5000, None: 2500}  # by localization, at most


def settings_of(way: str, task: str) -> dict[str, Any]:
    """What is left of the budget after localization goes into learning."""
    found = WAYS[way].get(task, BLACK_BOX if way == "black box" else TRACED)
    num = BUDGET - SPENT[found["localization"].method]
    return {**found, "training": Training(num_simulations=num, num_thetas=32, num_per_theta=1, fresh=False)}


def run(name: str, way: str, observation: int, data: Path) -> None:
    """One observation of one task."""
    task, reference = TASKS(data)[name], np.load(data / "sbibm/sbibm_dev.npz")
    x = jnp.asarray(reference[f"{name}__x_o"][observation], jnp.float32)
    params = ["beta", "gamma"] if name == "sir" else ["theta"]
    fit, cost = fitted(task.model, random.key(observation), x, params=params, **settings_of(way, name))
    samples, outside = sampled(fit, x)
    ours, exact = task.draws(samples), reference[f"{name}__ref1000"][observation]
    chosen = np.random.default_rng(0).choice(len(ours), len(exact), replace=False)
    save(
        "sbibm",
        problem=name,
        way=way,
        observation=observation + 1,
        c2st=c2st(random.key(0), ours[chosen], exact),
        modes=1 if fit.localization is None else len(fit.localization.modes),
        outside=outside,
        **distances(ours, exact),
        **cost,
    )


def main() -> None:
    """Run what was asked for, then print the table of all rows so far."""
    names = ["gaussian_linear", "gaussian_linear_uniform", "bernoulli_glm", "slcp", "two_moons", "sir", "lotka_volterra"]
    found = options(__doc__, 5, 1, tasks=names, ways=list(WAYS))
    for name in found.tasks:
        for way in found.ways:
            for observation in range(found.first, min(found.first + found.repetitions, 5)):
                run(name, way, observation, found.data)
    print(sbibm_table())


if __name__ == "__main__":
    main()

"""The shape of the project: import direction, documented names, examples that run."""

import ast
import doctest
import os
from pathlib import Path
import subprocess
import sys

import pytest

from benchmarks.report import PAGE, TABLES, rendered
import numpyro_sls

ROOT = Path(__file__).parents[1]
# DESIGN.md, section 2, with the modules that came since put where they belong. A module imports only from modules above it.
ORDER = [
    "sites",
    "reparametrize",
    "model",
    "parameters",
    "carried",
    "units",
    "distances",
    "descent",
    "comparison",
    "localization",
    "proposal",
    "boundary",
    "simulate",
    "inputs",
    "perceptron",
    "networks",
    "focus",
    "objectives",
    "start",
    "joint",
    "training",
    "debias",
    "readout",
    "marginals",
    "chart",
    "score",
    "errors",
    "dynamics",
    "leaning",
    "learning",
    "means",
    "turns",
    "conditioning",
    "preparation",
    "notices",
    "fitted",
    "fit",
    "blocks",
    "langevin",
    "checkpoint",
    "metrics",
    "bartlett",
    "calibration",
    "diagnostics",
    "arviz_io",
    "plots",
    "models",
]


def _imports(path: Path) -> set[str]:
    modules = [n.module for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom) and n.module]
    return {m.split(".")[1] for m in modules if m.startswith("numpyro_sls.")}


def test_data_flow_down_and_never_back_up():
    paths = [p for p in (ROOT / "numpyro_sls").glob("*.py") if p.stem != "__init__"]
    assert {p.stem for p in paths} <= set(ORDER), "a new module needs its place in the order"
    for path in paths:
        below = {m for m in _imports(path) if ORDER.index(m) >= ORDER.index(path.stem)}
        assert not below, f"{path.name} imports {below}, which stand below it"


def test_the_tables_of_the_experiments_are_made_from_their_rows(monkeypatch):
    monkeypatch.chdir(ROOT)
    page = PAGE.read_text()
    assert sum(f"<!-- begin {name} -->" in page for name in TABLES) == len(TABLES)
    assert rendered(page) == page, "run python -m benchmarks.report"


@pytest.mark.parametrize("name", [n for n in numpyro_sls.__all__ if n not in ("models", "plots", "SLSLangevinState")])
def test_public_names_have_a_docstring_with_a_doctest(name):
    examples = doctest.DocTestParser().get_examples(getattr(numpyro_sls, name).__doc__ or "")
    assert examples, f"{name} has no example"


# Each fits from scratch in a process of its own: one of them is enough for every day.
EXAMPLES = [pytest.param(p.name, marks=() if p.stem == "mg1_queue" else pytest.mark.slow) for p in sorted((ROOT / "examples").glob("*.py"))]


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_run_small(name, tmp_path):
    command = [sys.executable, f"examples/{name}", "--small", "--output", str(tmp_path)]
    cache = {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache" / "jax-example")}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, **cache})
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("*.png")), done.stdout
    if name == "mg1_queue.py":
        assert "theta1" in done.stdout

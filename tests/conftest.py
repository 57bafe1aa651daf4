"""Shape checks on in all tests, and the fits that they share."""

import os
from pathlib import Path

from jaxtyping import install_import_hook

hook = install_import_hook("numpyro_sls", "beartype.beartype")

import jax  # noqa: E402
from jax import random  # noqa: E402
import pytest  # noqa: E402

from numpyro_sls import SLS, MLPScore, Training  # noqa: E402
from tests.cases import CASES  # noqa: E402

hook.uninstall()

# The same programs are compiled in many tests: compile them once, and keep them for the next session. Workers do not share.
worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parents[1] / ".pytest_cache" / f"jax-{worker}"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


@pytest.fixture(autouse=True)
def few_programs():
    """Every compiled program holds memory maps, of which a process may have 65 530; past that XLA crashes."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()


@pytest.fixture(scope="session")
def location_data():
    case = CASES["location_scale"]
    return case.simulate(random.key(3), 200)


@pytest.fixture(scope="session")
def location_fit(location_data):
    """Implicit in every coordinate, on a stream."""
    return SLS(CASES["location_scale"].model).run(random.key(0), *location_data, progress_bar=False)


@pytest.fixture(scope="session")
def table_fit(location_data):
    """The same on a small table."""
    sls = SLS(CASES["location_scale"].model, training=Training(num_simulations=60_000))
    return sls.run(random.key(0), *location_data, progress_bar=False)


@pytest.fixture(scope="session")
def mlp_fit(location_data):
    """A network without a potential."""
    sls = SLS(CASES["location_scale"].model, network=MLPScore(), training=Training(num_simulations=60_000))
    return sls.run(random.key(0), *location_data, progress_bar=False)


@pytest.fixture(scope="session")
def mixture_data():
    return CASES["mixture"].simulate(random.key(4), 300)


@pytest.fixture(scope="session")
def mixture_fit(mixture_data):
    """Joint in every coordinate, with a discrete nuisance."""
    return SLS(CASES["mixture"].model).run(random.key(0), *mixture_data, progress_bar=False)

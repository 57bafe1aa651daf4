"""Shape checks on in all tests, and the fits that they share."""

import os
from pathlib import Path
import time

from jaxtyping import install_import_hook

hook = install_import_hook("numpyro_sls", "beartype.beartype")

import jax  # noqa: E402
from jax import random  # noqa: E402
import pytest  # noqa: E402

from numpyro_sls import SLS, Debias, MLPScore, Training, load_fit, save_fit  # noqa: E402
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


def _shared(tmp_path_factory, name: str, sls: SLS, args: tuple):
    """A fit, made by the worker that asks first and loaded from its file by the other."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return sls.run(random.key(0), *args, progress_bar=False)
    root = tmp_path_factory.getbasetemp().parent
    path, failed = root / f"{name}.sls", root / f"{name}.failed"
    try:
        (root / f"{name}.lock").mkdir()
    except FileExistsError:
        for _ in range(1200):
            if path.exists():
                break
            assert not failed.exists(), f"{name} failed in the other worker"
            time.sleep(0.5)
        assert path.exists(), f"{name} did not come from the other worker in ten minutes"
        return load_fit(path, sls.model)
    try:
        fit = sls.run(random.key(0), *args, progress_bar=False)
        save_fit(fit, root / f"{name}.part")
        (root / f"{name}.part").rename(path)
    except BaseException:
        failed.touch()
        raise
    return fit


@pytest.fixture(scope="session")
def location_fit(location_data, tmp_path_factory):
    """Implicit in every coordinate, on a stream."""
    return _shared(tmp_path_factory, "location", SLS(CASES["location_scale"].model), location_data)


@pytest.fixture(scope="session")
def table_fit(location_data, tmp_path_factory):
    """The same on a small table."""
    sls = SLS(CASES["location_scale"].model, training=Training(num_simulations=60_000))
    return _shared(tmp_path_factory, "table", sls, location_data)


@pytest.fixture(scope="session")
def mlp_fit(location_data, tmp_path_factory):
    """A network without a potential."""
    sls = SLS(CASES["location_scale"].model, network=MLPScore(), debias=Debias(near=False), training=Training(num_simulations=60_000))
    return _shared(tmp_path_factory, "mlp", sls, location_data)


@pytest.fixture(scope="session")
def mixture_data():
    return CASES["mixture"].simulate(random.key(4), 300)


@pytest.fixture(scope="session")
def mixture_fit(mixture_data):
    """Joint in every coordinate, with a discrete nuisance."""
    return SLS(CASES["mixture"].model).run(random.key(0), *mixture_data, progress_bar=False)

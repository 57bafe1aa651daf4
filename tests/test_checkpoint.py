"""Saved fits: the same draws after a reload, a header that can be read, clear errors."""

import json
import zipfile

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
import pytest

from numpyro_sls import SLS, Simulated, SLSLangevin, Training, load_fit, save_fit
from tests.cases import CASES


def _draws(fit, data):
    mcmc = MCMC(SLSLangevin(fit), num_warmup=50, num_samples=100, progress_bar=False)
    mcmc.run(random.key(0), *data)
    return mcmc.get_samples()


@pytest.mark.parametrize("which", ["location_fit", "table_fit", pytest.param("mlp_fit", marks=pytest.mark.slow)])
def test_the_same_draws_after_a_reload(which, request, location_data, tmp_path):
    fit = request.getfixturevalue(which)
    save_fit(fit, tmp_path / "fit.sls")
    again = load_fit(tmp_path / "fit.sls", CASES["location_scale"].model)
    before, after = _draws(fit, location_data), _draws(again, location_data)
    np.testing.assert_array_equal(before["a"], after["a"])
    assert again.simulations == fit.simulations
    assert str(again.localization) == str(fit.localization)


@pytest.mark.slow
def test_new_data_after_a_reload(location_fit, tmp_path):
    save_fit(location_fit, tmp_path / "fit.sls")
    again = load_fit(tmp_path / "fit.sls", CASES["location_scale"].model)
    x = CASES["location_scale"].simulate(random.key(12), 300)
    np.testing.assert_allclose(location_fit.condition(*x).mode, again.condition(*x).mode, rtol=1e-4)


def test_the_header_can_be_read(table_fit, tmp_path):
    save_fit(table_fit, tmp_path / "fit.sls")
    with zipfile.ZipFile(tmp_path / "fit.sls") as file:
        header = json.loads(file.read("header.json"))
    assert header["model"]["parameters"] == {"a": [], "b": []}
    assert {"numpyro", "jax", "jaxlib", "numpyro_sls"} == set(header["versions"])
    assert header["settings"]["training"]["fields"]["num_simulations"] == 60_000


def test_another_model_is_refused(table_fit, tmp_path):
    save_fit(table_fit, tmp_path / "fit.sls")

    def other(x):
        loc = numpyro.sample("loc", dist.Normal(0, 3))
        with numpyro.plate("units", x.shape[0]):
            z = numpyro.sample("z", dist.Normal())
            numpyro.sample("x", Simulated(loc + z), obs=x)

    with pytest.raises(ValueError, match=r"made for another model.*parameters: the file has"):
        load_fit(tmp_path / "fit.sls", other)


def test_other_files_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as file:
        file.writestr("nothing.txt", "")
    with pytest.raises(ValueError, match="not a file that save_fit wrote"):
        load_fit(tmp_path / "other.zip", CASES["location_scale"].model)


def test_settings_that_are_code_are_asked_for(tmp_path):
    def model(x):
        top = numpyro.sample("top", dist.LogNormal(0, 1))
        with numpyro.plate("units", x.shape[0]):
            numpyro.sample("x", dist.Uniform(0, top), obs=x)

    support = {"top": lambda x: (x.max(), None)}
    settings = {"units": "additive", "debias": None, "localization": None}
    x = 2 * random.uniform(random.key(0), (20,))
    fit = SLS(model, support=support, training=Training(num_simulations=100_000, num_thetas=16), **settings).run(
        random.key(0), x, progress_bar=False
    )
    save_fit(fit, tmp_path / "fit.sls")
    with pytest.raises(ValueError, match=r"support=\.\.\."):
        load_fit(tmp_path / "fit.sls", model)
    again = load_fit(tmp_path / "fit.sls", model, support=support)
    np.testing.assert_allclose(again.data.mode, fit.data.mode)
    assert jnp.isfinite(again.posterior.potential(fit.data.mode, again.data))

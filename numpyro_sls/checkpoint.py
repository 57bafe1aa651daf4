"""Save a fit and load it again without pickle: a zip archive of arrays (.npy) with a header.json that can be read by eye."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from importlib.metadata import version
import io
import json
import os
from typing import Any, NamedTuple
import zipfile

import jax
import jaxlib
import numpy as np
import numpyro

from numpyro_sls.conditioning import Conditioner
from numpyro_sls.fit import SLS
from numpyro_sls.fitted import SLSFit
from numpyro_sls.score import PosteriorScore

__all__ = ["load_fit", "save_fit"]

FORMAT = 1
# whose tuples and settings may stand in a file
MODULES = "boundary chart debias focus inputs joint localization marginals networks objectives proposal readout reparametrize score simulate training"
PARTS = ("proposal", "data", "localization", "joint", "local_mean", "readout", "smoothing", "curves", "seconds")


def save_fit(fit: SLSFit, path: str | os.PathLike) -> None:
    """Write a fit to a file, with the data that it was made for.

    The model itself is code and is not saved, nor are functions among the settings; `load_fit` takes them again.

    **Example:**

    >>> from numpyro_sls import save_fit
    >>> save_fit(fit, "queue.sls")  # doctest: +SKIP
    """
    writer, traced = _Writer(), fit.units.traced
    header = {
        "format": FORMAT,
        "versions": {
            "numpyro_sls": version("numpyro_sls"),
            "numpyro": numpyro.__version__,
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
        },
        "model": _describe(fit),
        "settings": {f.name: writer.encode(getattr(fit.sls, f.name)) for f in fields(fit.sls) if f.name != "model"},
        "model_args": writer.encode(tuple(traced.model_args)),
        "model_kwargs": writer.encode(dict(traced.model_kwargs)),
        "fingerprint": fit.fingerprint,
        "unit": writer.encode(fit.posterior.unit),
        "simulations": writer.encode(fit.simulations),
        "parts": {name: writer.encode(getattr(fit, name)) for name in PARTS},
    }
    if _has_code([header["model_args"], header["model_kwargs"]]):
        raise ValueError(
            "The model was fitted with arguments that are not data (functions or other objects); only arrays, numbers and strings can be saved."
        )
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("header.json", json.dumps(header, indent=1))
        for name, array in writer.arrays.items():
            buffer = io.BytesIO()
            np.save(buffer, array, allow_pickle=False)
            file.writestr(f"{name}.npy", buffer.getvalue())


def load_fit(path: str | os.PathLike, model: Callable, **settings) -> SLSFit:
    """Read a fit. The model is traced anew on the saved data, and must have the same sites.

    :param path: what `save_fit` wrote.
    :param model: the model of the fit.
    :param settings: those that are functions or flax modules (``support=``, ``network=``) and could not be saved.

    **Example:**

    >>> from numpyro_sls import load_fit
    >>> from numpyro_sls.models import queue
    >>> fit = load_fit("queue.sls", queue.model)  # doctest: +SKIP
    """
    with zipfile.ZipFile(path) as file:
        if "header.json" not in file.namelist():
            raise ValueError(f"{os.fspath(path)!r} has no header.json: it is not a file that save_fit wrote.")
        header = json.loads(file.read("header.json"))
        arrays = {n[:-4]: np.load(io.BytesIO(file.read(n)), allow_pickle=False) for n in file.namelist() if n.endswith(".npy")}
    if header["format"] != FORMAT:
        raise ValueError(
            f"{os.fspath(path)!r} has format {header['format']}, this version reads {FORMAT}. It was written by {header['versions']}."
        )
    reader = _Reader(arrays)
    missing = [k for k, v in header["settings"].items() if _has_code(v) and k not in settings]
    if missing:
        raise ValueError(
            f"The settings {missing} hold functions or modules, which are not saved: "
            f"load_fit(path, model, {', '.join(f'{k}=...' for k in missing)}) with what the fit was made with."
        )
    saved = {k: settings[k] if k in settings else reader.decode(v) for k, v in header["settings"].items()}
    sls = SLS(model, **saved)
    args, kwargs = reader.decode(header["model_args"]), reader.decode(header["model_kwargs"])
    parts = {name: reader.decode(header["parts"][name]) for name in PARTS}
    return _assemble(sls, args, kwargs, header, parts, reader.decode(header["unit"]), reader.decode(header["simulations"]))


def _assemble(sls: SLS, args: tuple, kwargs: dict, header: dict, parts: dict[str, Any], unit: Any, simulations: dict) -> SLSFit:
    units, smoothing = sls.units_of(args, kwargs)
    learner = sls.learner_of(units, smoothing, parts["joint"], simulations)
    fit = SLSFit(
        sls=sls,
        units=units,
        posterior=PosteriorScore(learner.learned, unit, units.parameters.log_prior),
        fingerprint=header["fingerprint"],
        simulations=learner.simulator.spent,
        conditioner=Conditioner(learner),
        **parts,
    )
    found, wanted = _describe(fit), header["model"]
    wrong = [f"{key}: the file has {wanted[key]}, the model {found[key]}" for key in wanted if found[key] != wanted[key]]
    if wrong:
        raise ValueError(
            "The fit was made for another model. " + "; ".join(wrong) + ". Pass the model that was fitted, load_fit(path, model)."
        )
    return fit


def _describe(fit: SLSFit) -> dict[str, Any]:
    """What must be the same for a fit to hold; lists and strings, as JSON gives them back."""
    traced = fit.units.traced
    return {
        "parameters": {k: list(shape) for k, shape in fit.units.parameters.shapes.items()},
        "supports": {k: str(v) for k, v in traced.supports.items()},
        "nuisances": list(traced.nuisances),
        "observations": list(traced.observations),
        "numbers in a unit": int(fit.observed().shape[1]),
        "covariates": int(fit.units.covariates.shape[1]),
        "units": int(traced.num_units),
    }


class _Writer:
    """Turns a tree into JSON; arrays go aside and leave their name."""

    def __init__(self):
        self.arrays: dict[str, np.ndarray] = {}

    def encode(self, value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, (np.ndarray, np.generic, jax.Array)):
            name = f"array{len(self.arrays)}"
            self.arrays[name] = np.asarray(value)
            return {"array": name, "jax": isinstance(value, jax.Array), "shape": list(np.shape(value))}
        if isinstance(value, Mapping):
            return {"dict": [[self.encode(k), self.encode(v)] for k, v in value.items()]}
        name = type(value).__name__
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            assert name in _classes(), f"the module of {name} must be among those of a file"
            return {"named": name, "fields": {k: self.encode(v) for k, v in zip(value._fields, value, strict=True)}}
        if isinstance(value, (list, tuple)):
            return {type(value).__name__: [self.encode(v) for v in value]}
        if is_dataclass(value) and name in _classes():
            return {"settings": name, "fields": {f.name: self.encode(getattr(value, f.name)) for f in fields(value) if f.init}}
        return {"code": repr(value)}


class _Reader(NamedTuple):
    """The way back."""

    arrays: dict[str, np.ndarray]

    def decode(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if "array" in value:
            array = self.arrays[value["array"]]
            return jax.numpy.asarray(array) if value["jax"] else array
        if "dict" in value:
            return {self.decode(k): self.decode(v) for k, v in value["dict"]}
        if "list" in value:
            return [self.decode(v) for v in value["list"]]
        if "tuple" in value:
            return tuple(self.decode(v) for v in value["tuple"])
        return _classes()[value.get("named") or value["settings"]](**{k: self.decode(v) for k, v in value["fields"].items()})


def _has_code(value: Any) -> bool:
    if isinstance(value, dict):
        return "code" in value or any(_has_code(v) for v in value.values())
    return isinstance(value, list) and any(_has_code(v) for v in value)


def _classes() -> dict[str, type]:
    """What may stand in a file, by name: the tuples and settings of the package."""
    modules = [import_module(f"numpyro_sls.{name}") for name in MODULES.split()]
    found = {name: c for module in modules for name, c in vars(module).items() if isinstance(c, type) and c.__module__ == module.__name__}
    return {name: c for name, c in found.items() if is_dataclass(c) or hasattr(c, "_fields")}

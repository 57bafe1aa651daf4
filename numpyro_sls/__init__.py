"""Simulation-based inference for NumPyro by Langevin dynamics on a structured likelihood score."""

from importlib import import_module
from typing import Any

from numpyro_sls import models
from numpyro_sls.arviz_io import predict, to_arviz
from numpyro_sls.boundary import Smoothing
from numpyro_sls.calibration import calibrate
from numpyro_sls.checkpoint import load_fit, save_fit
from numpyro_sls.debias import Debias
from numpyro_sls.diagnostics import diagnose
from numpyro_sls.fit import SLS
from numpyro_sls.fitted import SLSFit
from numpyro_sls.focus import Focus
from numpyro_sls.langevin import SLSLangevin, SLSLangevinState
from numpyro_sls.localization import Localization
from numpyro_sls.model import Simulated
from numpyro_sls.networks import Ensemble, MLPScore, SeparablePotential
from numpyro_sls.objectives import CurvaturePenalty
from numpyro_sls.proposal import FromRestarts, WorthUnits
from numpyro_sls.reparametrize import indicator
from numpyro_sls.training import Training
from numpyro_sls.units import transitions

__version__ = "0.1.0"

__all__ = [
    "SLS",
    "CurvaturePenalty",
    "Debias",
    "Ensemble",
    "Focus",
    "FromRestarts",
    "Localization",
    "MLPScore",
    "SLSFit",
    "SLSLangevin",
    "SLSLangevinState",
    "SeparablePotential",
    "Simulated",
    "Smoothing",
    "Training",
    "WorthUnits",
    "calibrate",
    "diagnose",
    "indicator",
    "load_fit",
    "models",
    "plots",
    "predict",
    "save_fit",
    "to_arviz",
    "transitions",
]


def __getattr__(name: str) -> Any:
    """``numpyro_sls.plots`` is imported when it is first used: matplotlib takes a while."""
    if name == "plots":
        return import_module("numpyro_sls.plots")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

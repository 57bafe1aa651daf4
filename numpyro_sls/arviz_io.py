"""To ArviZ: `to_arviz(mcmc)` gives an InferenceData (ArviZ 0.23) or a DataTree (ArviZ 1), and `predict` new data from the posterior."""

import inspect
from typing import Any

import jax
from jax import Array
import numpy as np
from numpyro import handlers
from numpyro.infer import MCMC, Predictive

from numpyro_sls.langevin import SLSLangevin
from numpyro_sls.sites import whole

__all__ = ["from_groups", "predict", "to_arviz"]

STATS = {"accept_prob": "acceptance_rate", "step_size": "step_size", "diverging": "diverging"}
MAX_PREDICTIVE = 500  # data sets simulated from the posterior, unless the caller says how many


def to_arviz(mcmc: MCMC, rng_key: Array | None = None, *, posterior_predictive: int | bool = False, prior: int | bool = False) -> Any:
    """Posterior, sample stats, observed and constant data of a run; predictive draws on request.

    :param mcmc: a finished run of `SLSLangevin`. Ask it for ``extra_fields=("accept_prob", "step_size", "potential_energy")`` to have them too.
    :param rng_key: for predictive draws; None: key 0.
    :param posterior_predictive: simulate data from so many posterior draws, nuisances drawn anew; True: 500.
    :param prior: so many draws of parameters and data from the prior.

    **Example:**

    >>> from numpyro_sls import to_arviz
    >>> az.summary(to_arviz(mcmc))  # doctest: +SKIP
    """
    kernel = _kernel(mcmc)
    fit = kernel.fit
    assert fit is not None, "a run has a fit"
    fields = mcmc.get_extra_fields(group_by_chain=True)
    groups: dict[str, dict[str, np.ndarray]] = {
        "posterior": _arrays(mcmc.get_samples(group_by_chain=True)),
        "sample_stats": {STATS[k]: np.asarray(v) for k, v in fields.items() if k in STATS},
    }
    if "potential_energy" in fields:
        groups["sample_stats"]["lp"] = -np.asarray(fields["potential_energy"])
    key_posterior, key_prior = jax.random.split(jax.random.key(0) if rng_key is None else rng_key)
    if posterior_predictive:
        num = MAX_PREDICTIVE if posterior_predictive is True else posterior_predictive
        groups["posterior_predictive"] = {k: v[None] for k, v in predict(mcmc, key_posterior, num).items()}
    if prior:
        num = MAX_PREDICTIVE if prior is True else prior
        names = [*fit.units.parameters.shapes, *fit.units.traced.observations]
        drawn = Predictive(handlers.uncondition(_model(kernel)), num_samples=num, return_sites=names)(
            key_prior, *mcmc._args, **mcmc._kwargs
        )
        groups["prior"] = {k: np.asarray(drawn[k])[None] for k in fit.units.parameters.shapes}
        groups["prior_predictive"] = {k: np.asarray(drawn[k])[None] for k in fit.units.traced.observations}
    observed, constant = _data(kernel, mcmc)
    return from_groups({**groups, "observed_data": observed, "constant_data": constant})


def predict(mcmc: MCMC, rng_key: Array, num_samples: int = MAX_PREDICTIVE) -> dict[str, np.ndarray]:
    """Data sets simulated from draws of the posterior through NumPyro's `Predictive`, every nuisance drawn anew; (s, ...) by site.

    **Example:**

    >>> from numpyro_sls import predict
    >>> predict(mcmc, random.key(1), 100)["x"].shape  # doctest: +SKIP
    (100, 500)
    """
    kernel = _kernel(mcmc)
    assert kernel.fit is not None, "a run has a fit"
    traced = kernel.fit.units.traced
    samples = mcmc.get_samples()
    draws = {k: samples[k] for k in kernel.fit.units.parameters.shapes}
    total = len(next(iter(draws.values())))
    if not num_samples >= 1:
        raise ValueError(f"predict(num_samples={num_samples}) must be at least 1; the run has {total} draws.")
    rows = np.linspace(0, total - 1, min(num_samples, total)).round().astype(int)
    model = handlers.uncondition(_model(kernel))
    found = Predictive(model, {k: v[rows] for k, v in draws.items()}, return_sites=list(traced.observations))(
        rng_key, *mcmc._args, **mcmc._kwargs
    )
    return _arrays(found)


def from_groups(groups: dict[str, dict[str, np.ndarray]]) -> Any:
    """The groups that hold something, in what the installed ArviZ calls them."""
    import arviz as az  # takes a while, and only these functions need it

    filled: dict[str, Any] = {k: v for k, v in groups.items() if v}
    return az.from_dict(filled) if int(az.__version__.split(".")[0]) >= 1 else az.from_dict(**filled)


def _kernel(mcmc: MCMC) -> SLSLangevin:
    if not isinstance(mcmc.sampler, SLSLangevin):
        raise TypeError(
            f"to_arviz takes a run of SLSLangevin; this MCMC ran {type(mcmc.sampler).__name__}, for which there is az.from_numpyro(mcmc)."
        )
    if mcmc.last_state is None:
        raise ValueError("The MCMC has not been run: call mcmc.run(rng_key, *model_args) first.")
    return mcmc.sampler


def _model(kernel: SLSLangevin):
    return whole(kernel.model)


def _data(kernel: SLSLangevin, mcmc: MCMC) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Values of the observed sites, and the other arrays among the model's arguments, by their names."""
    model = _model(kernel)
    with handlers.seed(rng_seed=0), handlers.trace() as trace:
        model(*mcmc._args, **mcmc._kwargs)
    observed = {k: np.asarray(s["value"]) for k, s in trace.items() if s["type"] == "sample" and s["is_observed"]}
    bound = inspect.signature(model).bind(*mcmc._args, **mcmc._kwargs).arguments
    arrays = {k: np.asarray(v) for k, v in bound.items() if isinstance(v, (np.ndarray, Array))}
    same = {k for k, a in arrays.items() for o in observed.values() if a.shape == o.shape and np.array_equal(a, o)}
    return observed, {k: a for k, a in arrays.items() if k not in same}


def _arrays(tree: dict) -> dict[str, np.ndarray]:
    return {k: np.asarray(v) for k, v in tree.items()}

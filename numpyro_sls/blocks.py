"""A block of NumPyro's ``Gibbs``: the other blocks' sites are given, and reach the learned posterior through its prior alone."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
from numpyro import handlers

from numpyro_sls.parameters import Parameters
from numpyro_sls.units import Units

__all__ = ["GIBBS", "block_prior", "check_block", "hidden", "split_conditioning", "typical"]

GIBBS = "_gibbs_sites"  # numpyro.infer.gibbs.GIBBS_SITES_KWARG, through which Gibbs hands the other blocks' values
NUM_DRAWS = 200


def split_conditioning(model_kwargs: Mapping[str, Any] | None) -> tuple[dict[str, Any], dict[str, Array]]:
    """The model's own keyword arguments, and the values of other blocks' sites among them."""
    kwargs = dict(model_kwargs or {})
    return kwargs, kwargs.pop(GIBBS, {})


def hidden(model: Callable, values: Mapping[str, Array]) -> Callable:
    """The model with some of its sites given, which are then no sites any more."""
    return handlers.block(handlers.substitute(model, data=dict(values)), hide=list(values))


def typical(model: Callable, model_args: tuple, model_kwargs: dict, names: list[str]) -> dict[str, Array]:
    """Prior medians of the other blocks' sites: under these the score is learnt, whichever chain comes first."""

    def draw(key):
        trace = handlers.trace(handlers.seed(model, key)).get_trace(*model_args, **model_kwargs)
        return {name: trace[name]["value"] for name in names}

    draws = jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(0), NUM_DRAWS))
    return {k: jnp.asarray(np.median(np.asarray(v), axis=0)) for k, v in draws.items()}


def check_block(units: Units, model: Callable, values: Mapping[str, Array]) -> None:
    """The simulator must see the other blocks' sites through the parameters only: what it learnt is kept when they move."""
    theta, index = units.parameters.sample_prior(jax.random.key(0)), jnp.arange(units.num_units)
    moved = {k: v + 0.5 * (1 + jnp.abs(v)) for k, v in values.items()}
    other = replace(units.traced, model=hidden(model, moved))
    first, second = (t.run(jax.random.key(1), index, units.parameters.unflatten(theta)).features for t in (units.traced, other))
    if not np.allclose(first, second, rtol=1e-4, atol=1e-6, equal_nan=True):
        raise ValueError(
            f"The data depend on {list(values)} directly, not only through {list(units.parameters.shapes)}: their likelihood changes whenever another block of Gibbs moves. "
            "Give SLSLangevin all sites that the simulator uses, Gibbs([(SLSLangevin(model), [...]), (NUTS(model), [...])])."
        )


def block_prior(parameters: Parameters, model: Callable, values: Mapping[str, Array]) -> Callable[[Array], Array]:
    """The prior density of the parameters given the other blocks' sites."""
    return replace(parameters, traced=replace(parameters.traced, model=hidden(model, values))).log_prior

"""What a site of a trace is, and which sites are refused: `Simulated`, fixed values, factors, bad data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.primitives import _PYRO_STACK

__all__ = [
    "Simulated",
    "WithoutLikelihood",
    "check_data",
    "check_latents_exist",
    "check_parameters",
    "fixed_value",
    "is_factor",
    "is_fixed",
    "plates",
    "unwrapped",
    "whole",
]


class Simulated(dist.Distribution):
    """An observation that can be simulated but has no density.

    :param value: what the simulator produced, batch dimensions first.
    :param event_dim: how many dimensions on the right make one event.

    **Example:**

    >>> import jax.numpy as jnp
    >>> from numpyro_sls import Simulated
    >>> d = Simulated(jnp.zeros((100, 5)), event_dim=1)
    >>> d.batch_shape, d.event_shape
    ((100,), (5,))
    """

    arg_constraints = {"value": constraints.dependent(is_discrete=False)}
    reparametrized_params = ["value"]
    pytree_aux_fields = ("is_given",)
    is_given = False

    def __init__(self, value: ArrayLike, event_dim: int = 0, *, validate_args: bool | None = None):
        shape = jnp.shape(value)
        if not 0 <= event_dim <= len(shape):
            raise ValueError(
                f"Simulated got a value of shape {shape} and event_dim={event_dim}; event_dim must lie between 0 and {len(shape)}."
            )
        self.value = value
        self.is_given = _is_in_gibbs()
        cut = len(shape) - event_dim
        super().__init__(shape[:cut], shape[cut:], validate_args=validate_args)

    @constraints.dependent_property
    def support(self) -> constraints.Constraint:
        return constraints.independent(constraints.real, self.event_dim)

    def sample(self, key: Array | None, sample_shape: tuple[int, ...] = ()) -> Array:
        return jnp.broadcast_to(self.value, sample_shape + self.batch_shape + self.event_shape)

    def log_prob(self, value: ArrayLike) -> Array:
        """Zero in a block of Gibbs: there SLSLangevin owns what the simulator uses, and to the other blocks the data are a constant."""
        if self.is_given:
            return jnp.zeros(self.batch_shape)
        raise NotImplementedError(
            "Simulated has no density, so NUTS, SVI and other likelihood-based methods cannot use it. "
            "Use MCMC(SLSLangevin(model), ...), which learns the score of the likelihood from simulations."
        )


def _is_in_gibbs() -> bool:
    """Whether the model runs conditioned by ``numpyro.infer.Gibbs``, which conditions and substitutes the same values."""
    given = [h.data for h in _PYRO_STACK if isinstance(h, handlers.condition) and h.data]
    put = [h.data for h in _PYRO_STACK if isinstance(h, handlers.substitute) and h.data]
    return any(a is b for a in given for b in put)


@dataclass(frozen=True)
class WithoutLikelihood:
    """A model whose observed sites cannot be seen from outside, for whoever would ask them for a log likelihood.

    ArviZ 0.23 does, of the model of a kernel. `Simulated` has none, and where nuisances are drawn anew what the sites would
    give is not the likelihood of the parameters.
    """

    model: Callable

    def __call__(self, *args, **kwargs):
        return handlers.block(self.model, hide_fn=_is_observed)(*args, **kwargs)


def _is_observed(site: dict) -> bool:
    return site["type"] == "sample" and site["is_observed"]


def whole(model: Callable) -> Callable:
    """The model with everything that can be seen of it."""
    return model.model if isinstance(model, WithoutLikelihood) else model


def unwrapped(fn: dist.Distribution) -> dist.Distribution:
    """The distribution inside what plates and events wrap around it."""
    while isinstance(fn, (dist.ExpandedDistribution, dist.Independent, dist.MaskedDistribution)):
        fn = fn.base_dist
    return fn


def is_fixed(fn: dist.Distribution) -> bool:
    """Whether the value has no density of its own: `Simulated` or `Delta`."""
    return isinstance(unwrapped(fn), (Simulated, dist.Delta))


def fixed_value(fn: dist.Distribution) -> ArrayLike:
    """The value of such a site."""
    base = unwrapped(fn)
    return base.value if isinstance(base, Simulated) else base.v


def is_factor(site: Mapping[str, Any]) -> bool:
    """Whether the site is a numpyro.factor."""
    return isinstance(unwrapped(site["fn"]), dist.Unit)


def plates(site: Mapping[str, Any]) -> list[str]:
    """Names of the plates around a site, innermost first."""
    return [frame.name for frame in site.get("cond_indep_stack", [])]


def check_latents_exist(latent: Mapping[str, dict], params: Sequence[str] | None) -> None:
    """There is something to infer, and params= names only that."""
    if not latent:
        raise ValueError(
            "The model has no latent parameter: it samples nothing but its observations. Give at least one site a prior outside the plate of the data."
        )
    unknown = [p for p in params or () if p not in latent]
    if unknown:
        raise ValueError(
            f"params={list(params or ())} names {unknown}, which are not latent sites of the model; its latent sites are {list(latent)}."
        )


def check_parameters(latent: Mapping[str, dict], parameters: tuple[str, ...], inside: set[str], name: str | None) -> None:
    """Parameters are continuous, outside the plate and properly distributed; nothing else is left outside."""
    for k in parameters:
        if k in inside:
            raise ValueError(
                f"The site {k!r} is inside the plate {name!r}: it is different for every unit and cannot be a parameter. Leave it out of params=."
            )
        if latent[k]["fn"].support.is_discrete:
            raise ValueError(
                f"The parameter {k!r} is discrete ({type(unwrapped(latent[k]['fn'])).__name__}). Parameters must be continuous: Langevin dynamics follows a gradient. "
                "If it belongs to a unit, sample it inside the plate of the data, where it is simulated away."
            )
        if isinstance(unwrapped(latent[k]["fn"]), dist.ImproperUniform):
            raise ValueError(
                f"The parameter {k!r} has an improper prior, from which nothing can be simulated. Give it a proper one, however wide."
            )
    stray = [k for k in latent if k not in parameters and k not in inside]
    if stray and name is not None:
        raise ValueError(
            f"The latent sites {stray} are outside the plate {name!r} and not among params={list(parameters)}: with them simulated away the units "
            "are no longer independent. Add them to params, or use units='whole'."
        )


def check_data(observed: Mapping[str, dict], trace: Mapping[str, dict], name: str | None) -> None:
    """The data are concrete, finite and as long as the plate; every site inside it can be simulated."""
    for k, s in observed.items():
        if isinstance(s["value"], jax.core.Tracer):
            raise TypeError(
                f"The data of {k!r} are traced by a JAX transformation. Fit first, fit = SLS(model).run(rng_key, x), and use SLSLangevin(fit) there."
            )
        if isinstance(s["fn"], dist.MaskedDistribution):
            raise ValueError(
                f"The observed site {k!r} is masked. Simulations would not be: leave the missing rows out, or observe them through a Simulated(...) that blanks them."
            )
        value = np.asarray(s["value"])
        expected = tuple(s["fn"].shape())
        if value.shape != expected:
            raise ValueError(
                f"The data of {k!r} have shape {value.shape}, but the site has shape {expected}: batch shape {tuple(s['fn'].batch_shape)} (plates {plates(s)}) "
                f"and event shape {tuple(s['fn'].event_shape)}. Make the plate as long as the data, and use .to_event() or event_dim= for what is one unit."
            )
        if not np.all(np.isfinite(value)):
            raise ValueError(
                f"The data of {k!r} hold {int((~np.isfinite(value)).sum())} values that are NaN or infinite. Drop or impute those rows first."
            )
    for k, s in trace.items():
        if s["type"] != "sample":
            continue
        if is_factor(s) and (name is None or name in plates(s)):
            raise ValueError(
                f"The factor {k!r} cannot be simulated: inside the plate of the data every site needs a sampler. Move it outside, where it counts as part of the prior."
            )
        if s["scale"] is not None and np.any(np.asarray(s["scale"]) != 1):
            raise ValueError(f"The site {k!r} is scaled (handlers.scale): a scaled likelihood cannot be simulated. Remove the scale.")

"""One trace of a NumPyro model: its parameters, nuisances, observations and unit plate, and how to run it for any units."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
import zlib

import jax
from jax import Array
from jax.extend.core import Literal, jaxpr_as_fun
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.distributions import biject_to
from numpyro.primitives import _PYRO_STACK, Messenger, plate

from numpyro_sls.sites import Simulated, check_data, check_latents_exist, check_parameters, fixed_value, is_factor, is_fixed, plates

__all__ = ["ModelRun", "Sampler", "Simulated", "TracedModel", "pruned", "trace_model"]

Sampler = Callable[[str, dist.Distribution, Array], Array]


class ModelRun(NamedTuple):
    """What one run of the model for m units gives; whatever is not used is dropped by the compiler."""

    params: dict[str, Array]
    unconstrained: dict[str, Array]
    log_prior: Array
    values: dict[str, Array]
    features: Array  # (m, p): the observed sites of each unit, side by side
    log_density: Array  # (m,): log p(x, z | theta) over the sites that have a density
    deterministics: dict[str, Array]
    anchors: list[Array]  # the joint score is valid where none of these moves with theta
    supports: dict[str, list[Array]]  # those of them that say where a site can lie


@dataclass(frozen=True, eq=False)
class TracedModel:
    """A model with the roles of its sites, read off one trace."""

    model: Callable
    model_args: tuple
    model_kwargs: dict
    parameters: tuple[str, ...]
    nuisances: tuple[str, ...]
    observations: tuple[str, ...]
    deterministics: tuple[str, ...]
    unit_plate: str | None  # None: the whole data set is one unit
    plate_dim: int
    num_units: int
    num_simulated: int  # observed sites without a density
    supports: dict[str, Any]  # of the parameters
    stretchable: tuple[str, ...] = ()  # sites inside the plate whose draws can be spread out: symmetric, on the whole line, few of them

    @property
    def tractable(self) -> bool:
        """Whether the likelihood can be written down, so that NUTS would do."""
        return not self.nuisances and self.num_simulated == 0

    def run(
        self,
        rng_key: Array,
        indices: Array,
        unconstrained: Mapping[str, Array] | None = None,
        values: Mapping[str, Array] | None = None,
        sampler: Sampler | None = None,
    ) -> ModelRun:
        """Run the model for the units at ``indices``, with the given parameters (else prior draws) and site values."""
        handler = _Run(self.model, self, rng_key, indices, unconstrained, values, sampler=sampler)
        trace = handlers.trace(handler).get_trace(*self.model_args, **self.model_kwargs)
        return _summarize(self, trace, indices.shape[0], unconstrained or {})

    def features(self, rng_key: Array, indices: Array, unconstrained: Mapping[str, Array], sampler: Sampler) -> Array:
        """Only the observed sites of such a run, every site drawn by ``sampler(name, distribution, rng_key)``."""
        handler = _Run(self.model, self, rng_key, indices, unconstrained, None, sampler=sampler)
        trace = handlers.trace(handler).get_trace(*self.model_args, **self.model_kwargs)
        return _features(self, trace, indices.shape[0])

    def per_unit(self, value: ArrayLike, num_units: int) -> Array:
        """A value without event dimensions, such as a log density, as one flat row a unit."""
        return _per_unit(self, value, 0, num_units)

    def observed(self) -> Array:
        """The data, one row a unit."""
        handler = _Run(self.model, self, jax.random.key(0), jnp.arange(max(self.num_units, 1)), None, None, free=False)
        trace = handlers.trace(handler).get_trace(*self.model_args, **self.model_kwargs)
        return _features(self, trace, self.num_units)


def trace_model(
    model: Callable,
    model_args: tuple = (),
    model_kwargs: Mapping[str, Any] | None = None,
    *,
    params: Sequence[str] | None = None,
    unit_plate: str | None = None,
    units: str = "plate",
) -> TracedModel:
    """Trace the model once on its data and find the role of every site."""
    if units not in ("plate", "whole"):
        raise ValueError(f"units={units!r} is not known; use units='plate' (one term of the score per row of the plate) or units='whole'.")
    kwargs = dict(model_kwargs or {})
    with handlers.seed(rng_seed=0), handlers.trace() as trace, _FullPlates():
        model(*model_args, **kwargs)
    observed = {k: s for k, s in trace.items() if s["type"] == "sample" and s["is_observed"] and not is_factor(s)}
    latent = {k: s for k, s in trace.items() if s["type"] == "sample" and not s["is_observed"]}
    if not observed:
        raise ValueError(
            "The model has no observed site: nothing was passed as obs=. Pass the data to the model, "
            "numpyro.sample('x', ..., obs=x), and call run(rng_key, x)."
        )
    check_latents_exist(latent, params)
    frame = _choose_plate(trace, observed, unit_plate) if units == "plate" else None
    name = None if frame is None else frame.name
    inside = {k for k, s in trace.items() if name is not None and name in plates(s)}
    parameters = tuple(
        k for k in latent if (k in params if params is not None else k not in inside and (name is not None or not plates(latent[k])))
    )
    if not parameters:
        raise ValueError(
            f"The model has no latent parameter: every latent site ({', '.join(latent)}) is inside the plate {name!r}. "
            "A parameter is sampled outside the plate of the data; a site inside it is a nuisance, simulated away."
        )
    check_parameters(latent, parameters, inside, name)
    check_data(observed, trace, name)
    traced = TracedModel(
        model,
        tuple(model_args),
        kwargs,
        parameters,
        tuple(k for k in latent if k not in parameters),
        tuple(observed),
        (),
        name,
        0 if frame is None else frame.dim,
        1 if frame is None else frame.size,
        sum(is_fixed(s["fn"]) for s in observed.values()),
        {k: latent[k]["fn"].support for k in parameters},
        () if frame is None else _stretchable([s for k, s in trace.items() if k in inside and k not in parameters], frame.size),
    )
    _check_runs_for_any_units(traced, trace)
    return _with_deterministics(traced, [k for k, s in trace.items() if s["type"] == "deterministic" and k not in inside])


class _FullPlates(Messenger):
    """A user's own subsampling is undone: the score is learnt once, and the sum over all units is cheap."""

    def process_message(self, msg: dict) -> None:
        if msg["type"] == "control_flow":
            raise NotImplementedError(
                "numpyro's scan and cond are not supported inside a simulated model yet: "
                "use jax.lax.scan on noise sampled beforehand, and pass its result to Simulated(...)."
            )
        if msg["type"] == "plate":
            size = msg["args"][0]
            msg["args"] = (size, size)
            msg["value"] = jnp.arange(size)


class _Run(_FullPlates):
    """One run: the unit plate at the given indices, observations freed, parameters and values put in, keys by site name."""

    def __init__(self, fn, traced, rng_key, indices, unconstrained, values, free=True, sampler=None):
        super().__init__(fn)
        self.sampler = sampler
        self.traced, self.rng_key, self.indices, self.free = traced, rng_key, indices, free
        self.unconstrained = {} if unconstrained is None else unconstrained
        self.values = {} if values is None else values
        self.num_keys = 0

    def process_message(self, msg: dict) -> None:
        super().process_message(msg)
        if msg["type"] == "plate" and msg["name"] == self.traced.unit_plate:
            msg["args"] = (msg["args"][0], self.indices.shape[0])
            msg["value"] = self.indices
        elif msg["type"] == "prng_key":
            self.num_keys += 1
            msg["value"] = jax.random.fold_in(self.rng_key, self.num_keys)
        elif msg["type"] == "sample" and not is_factor(msg):
            self._fill(msg)

    def _fill(self, msg: dict) -> None:
        name = msg["name"]
        if msg["is_observed"]:
            if not self.free:
                return
            msg["is_observed"], msg["value"] = False, None
        if name in self.unconstrained:
            msg["value"] = biject_to(msg["fn"].support)(self.unconstrained[name])
        elif name in self.values:
            msg["value"] = self.values[name]
        elif msg["value"] is None:
            # Keys by name, not by order: the joint score runs the model again with the same randomness.
            rng_key = jax.random.fold_in(self.rng_key, zlib.crc32(name.encode()))
            msg["kwargs"]["rng_key"] = rng_key
            if self.sampler is not None and name not in self.traced.parameters:
                msg["value"] = self.sampler(name, msg["fn"], rng_key)

    def postprocess_message(self, msg: dict) -> None:
        # numpyro.plate subsamples only when m < n; here m may be anything, so the rows are taken before the plate looks.
        if msg["type"] != "subsample" or self.traced.unit_plate is None:
            return
        active = [p for p in _PYRO_STACK if isinstance(p, plate) and p.name == self.traced.unit_plate]
        event_dim = msg["kwargs"]["event_dim"]
        axis = self.traced.plate_dim - event_dim
        shape = jnp.shape(msg["value"])
        if active and len(shape) >= -axis and shape[axis] == active[0].size and shape[axis] != 1:
            msg["value"] = jnp.take(jnp.asarray(msg["value"]), self.indices, axis)
            msg["kwargs"] = {**msg["kwargs"], "event_dim": None}


def _summarize(traced: TracedModel, trace: Mapping[str, dict], num_units: int, given: Mapping[str, Array]) -> ModelRun:
    params, unconstrained, values, anchors, supports = {}, {}, {}, [], {}
    log_prior = jnp.zeros(())
    log_density = jnp.zeros(num_units)
    for name, site in trace.items():
        if site["type"] != "sample":
            continue
        fn, value = site["fn"], site["value"]
        if name in traced.parameters:
            transform = biject_to(fn.support)
            u = given[name] if name in given else transform.inv(value)
            params[name], unconstrained[name] = value, u
            log_prior += fn.log_prob(value).sum() + transform.log_abs_det_jacobian(u, value).sum()
        elif is_factor(site):
            log_prior += fn.log_prob(value).sum()
        elif is_fixed(fn):
            anchors += jax.tree.leaves(fixed_value(fn))
            if name in traced.observations:
                values[name] = value
        else:
            values[name] = value
            log_density += _per_unit(traced, fn.log_prob(value), 0, num_units).sum(-1)
            supports[name] = _support_anchors(fn, value)
            anchors += supports[name]
    deterministics = {k: trace[k]["value"] for k in traced.deterministics}
    return ModelRun(
        params,
        unconstrained,
        log_prior,
        values,
        _features(traced, trace, num_units),
        log_density,
        deterministics,
        [jnp.asarray(a) for a in anchors],
        supports,
    )


def _features(traced: TracedModel, trace: Mapping[str, dict], num_units: int) -> Array:
    sites = [(trace[k]["value"], trace[k]["fn"].event_dim) for k in traced.observations]
    rows = [_per_unit(traced, v, e, num_units) for v, e in sites]
    return rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=-1)  # one array is not copied


def _per_unit(traced: TracedModel, value: ArrayLike, event_dim: int, num_units: int) -> Array:
    """The value as one flat row a unit."""
    value = jnp.asarray(value).astype(jnp.result_type(float))
    if traced.unit_plate is None:
        return value.reshape(1, -1)
    return jnp.moveaxis(value, traced.plate_dim - event_dim, 0).reshape(num_units, -1)


def _support_anchors(fn: dist.Distribution, value: Array) -> list[Array]:
    """What must stay still for a site's support to stay still: its bounds, and the membership of its own value."""
    anchors = [jnp.asarray(a) for a in jax.tree.leaves(fn.support)]
    base = fn
    while not isinstance(base, dist.TransformedDistribution) and hasattr(base, "base_dist"):
        base = base.base_dist
    if isinstance(base, dist.TransformedDistribution):
        for transform in reversed(base.transforms):
            value = transform.inv(value)
        anchors.append(jnp.asarray(base.base_dist.support(value)).astype(float))
    return anchors


MAX_STRETCHED = 4  # numbers of a unit: the weights of more would have no bounds to speak of


def _stretchable(sites: Sequence[dict], num_units: int) -> tuple[str, ...]:
    """Sites with a symmetric density on the whole line, if a unit has few such numbers."""
    chosen = []
    for site in sites:
        fn = site.get("fn")
        while isinstance(fn, (dist.Independent, dist.ExpandedDistribution)):
            fn = fn.base_dist
        if site["type"] == "sample" and isinstance(fn, (dist.Normal, dist.Laplace, dist.Logistic)):
            chosen.append(site)
    size = sum(int(np.size(s["value"])) for s in chosen) // num_units
    return tuple(s["name"] for s in chosen) if size <= MAX_STRETCHED else ()


def _choose_plate(trace: Mapping[str, dict], observed: Mapping[str, dict], unit_plate: str | None):
    """The outermost plate that encloses every observed site, or the one that was asked for."""
    common = [f for f in next(iter(observed.values()))["cond_indep_stack"] if all(f.name in plates(s) for s in observed.values())]
    if unit_plate is not None:
        for frame in common:
            if frame.name == unit_plate:
                return frame
        raise ValueError(
            f"unit_plate={unit_plate!r} does not enclose every observed site ({', '.join(observed)}); the plates that do: {[f.name for f in common] or 'none'}."
        )
    if not common:
        bare = [k for k, s in observed.items() if not s["cond_indep_stack"]] or list(observed)
        raise ValueError(
            f"The observed site {bare[0]!r} is not inside a plate that all observed sites share. If the rows of the data are independent given "
            f"the parameters, say so: `with numpyro.plate('units', len(x)): numpyro.sample({bare[0]!r}, ..., obs=x)`. "
            "If they are not, treat the data set as one unit with units='whole'."
        )
    return common[-1]


def _check_runs_for_any_units(traced: TracedModel, trace: Mapping[str, dict]) -> None:
    """Run the model abstractly for two other numbers of units; a covariate that is not subsampled shows here."""
    if traced.unit_plate is None:
        return
    n = traced.num_units
    for m in [m for m in (2, 3, 5) if m != n][:2]:
        try:
            shape = jax.eval_shape(lambda i: traced.run(jax.random.key(0), i).features, jnp.zeros(m, jnp.int32)).shape
            problem = None if shape == (m, _num_features(traced, trace)) else f"the observed sites then have shape {shape}"
        except (TypeError, ValueError, AssertionError, IndexError) as error:
            problem = str(error).splitlines()[0] if str(error) else type(error).__name__
        if problem is not None:
            raise ValueError(
                f"The model does not run for {m} of its {n} units: {problem}. Probably a covariate with {n} rows is used whole inside the plate {traced.unit_plate!r}. "
                "Take its rows there: `c = numpyro.subsample(c, event_dim=0)`, or `with numpyro.plate(...) as idx: c[idx]`."
            )


def _num_features(traced: TracedModel, trace: Mapping[str, dict]) -> int:
    return sum(int(np.size(trace[k]["value"])) for k in traced.observations) // traced.num_units


def _with_deterministics(traced: TracedModel, names: list[str]) -> TracedModel:
    """Keep the deterministic sites that the parameters alone decide; the others depend on simulated nuisances."""
    if not names:
        return traced
    candidate = TracedModel(**{**vars(traced), "deterministics": tuple(names)})
    index = jnp.arange(max(traced.num_units, 1))
    theta = candidate.run(jax.random.key(0), index).unconstrained
    first, second = (candidate.run(jax.random.key(seed), index, theta) for seed in (1, 2))
    kept = [k for k in names if np.array_equal(first.deterministics[k], second.deterministics[k], equal_nan=True)]
    return TracedModel(**{**vars(traced), "deterministics": tuple(kept)})


def pruned(fn: Callable, theta: Array, *args) -> Callable[[Array], Array]:
    """The function of theta without the equations that its result does not need: a callback among those does no harm."""
    closed = jax.make_jaxpr(lambda t: fn(t, *args))(theta)
    needed = {v for v in closed.jaxpr.outvars if not isinstance(v, Literal)}
    kept = []
    for eqn in reversed(closed.jaxpr.eqns):
        if needed.intersection(eqn.outvars):
            kept.append(eqn)
            needed.update(v for v in eqn.invars if not isinstance(v, Literal))
    rest = closed.replace(jaxpr=closed.jaxpr.replace(eqns=kept[::-1]))
    return lambda t: jaxpr_as_fun(rest)(t)[0]

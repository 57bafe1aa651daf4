"""What one term of the additive score is: a row of the unit plate with its covariates, or the whole data set."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.extend.core import ClosedJaxpr, Literal
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Int
import numpy as np

from numpyro_sls.carried import is_carried, residual, value_at
from numpyro_sls.model import ModelRun, Sampler, TracedModel, pruned
from numpyro_sls.parameters import Parameters, make_parameters

__all__ = ["CovariateLayout", "SimulatedUnits", "Units", "make_units", "transitions"]

MAX_SURPRISE = 0.1  # in log density, or as a share of its change, over a step of a fiftieth of a proposal sd
STRETCH = 2.0  # of the nuisances of units that are spread out
MAX_LEVELS = 20  # an integer covariate with at most so many values is also shown to the network one-hot


class SimulatedUnits(NamedTuple):
    """m simulated units at one theta and, for each, the gradient of its joint log density with the nuisances held."""

    x: Float[Array, "m p"]
    joint_score: Float[Array, "m d"]
    difference: Float[Array, "m q"] | None  # by which that changes, in the steady coordinates, if nuisances are carried along
    weight: Float[Array, " m"]  # by which an average over them is one over the model; 1 unless they were spread out


class CovariateLayout(NamedTuple):
    """Which per-unit inputs of the simulator the score sees, and which integer ones get a column per level."""

    kept: tuple[int, ...] = ()
    levels: tuple[tuple[int, tuple[int, ...]], ...] = ()


@dataclass(frozen=True, eq=False)
class Units:
    """The units of a traced model: the observed ones, and a way to simulate more."""

    traced: TracedModel
    parameters: Parameters
    covariates: Float[Array, "n c"]  # by row of the plate
    layout: CovariateLayout
    noise_sd: Float[Array, " o"] | None = None  # of the smoothing of the observed columns
    density: str = "traced"  # how the joint density is differentiated: as "traced", "pruned" of what it does not need, or "none"
    carriers: tuple[str, ...] = ()  # nuisances that the parameters can carry along, for a second joint score
    steady: tuple[int, ...] = ()  # coordinates in which the difference of the two is wanted

    @property
    def num_units(self) -> int:
        return self.traced.num_units

    @cached_property
    def size(self) -> int:
        """How many numbers a run of the model draws for one unit."""
        theta, index = jnp.zeros(self.parameters.dim), jnp.zeros(1, jnp.int32)
        run = jax.eval_shape(lambda key: self.traced.run(key, index, self.parameters.unflatten(theta)).values, jax.random.key(0))
        return max(1, sum(int(np.prod(a.shape)) for a in jax.tree.leaves(run)))

    def observed(self) -> Float[Array, "n p"]:
        """The data set, one row a unit, covariates behind the observations."""
        observed = self.traced.observed()
        return jnp.concatenate([observed, self.covariates], axis=-1) if self.covariates.shape[1] else observed

    def simulate(self, rng_key: Array, theta: Float[Array, " d"], num: int, spread: Float[Array, ""] | None = None) -> SimulatedUnits:
        """Simulate ``num`` units at theta, their covariates drawn from the rows of the data.

        Of the units a share ``spread`` has its normal nuisances at twice their distance from the mean, and so reaches where
        the model hardly ever goes.
        """
        key_index, key_run = jax.random.split(rng_key)
        index = jax.random.randint(key_index, (num,), 0, self.num_units)
        if self.traced.unit_plate is None:
            each = jax.vmap(lambda key: self._simulate(key, theta, index[:1]))(jax.random.split(key_run, num))
            return jax.tree.map(lambda a: a[:, 0], each)
        return self._simulate(key_run, theta, index, spread)

    def simulate_x(self, rng_key: Array, theta: Float[Array, " d"], num: int) -> Float[Array, "m p"]:
        """Only the units, without the joint score: the compiler drops the rest."""
        return self.simulate(rng_key, theta, num).x

    def pushforward(self, rng_key: Array, theta: Float[Array, " d"], index: Int[Array, " m"], sampler: Sampler) -> Float[Array, "m p"]:
        """tau(theta, Z): the units at these rows, their randomness fixed by the key and every site drawn by ``sampler``."""
        features = self.traced.features(rng_key, index, self.parameters.unflatten(theta), sampler)
        return jnp.concatenate([self._noised(rng_key, features), self.covariates[index]], axis=-1)

    def density_jumped(self, rng_key: Array, theta: Float[Array, " d"], other: Float[Array, " d"]) -> tuple[Array, Array]:
        """Whether the joint density of one unit, nuisances held, changes between two near thetas otherwise than its gradient says.

        Twice: over the whole way, and over the sixteenth of it where that is worst, which a steep density or a kink passes and a jump does not.
        """
        index = jax.random.randint(rng_key, (1,), 0, self.num_units)
        values = self.traced.run(rng_key, index, self.parameters.unflatten(theta)).values

        def log_density(t, rng_key, index, values):
            return self.traced.run(rng_key, index, self.parameters.unflatten(t), values).log_density

        density = pruned(log_density, theta, rng_key, index, values) if self.density == "pruned" else None

        def along(t):
            at = theta + t * (other - theta)
            return (log_density(at, rng_key, index, values) if density is None else density(at))[0]

        return _jumped(along)

    def anchors_moved(self, rng_key: Array, theta: Float[Array, " d"], other: Float[Array, " d"], num: int) -> Bool[Array, ""]:
        """Whether a support or a density-free value moves between two thetas with every nuisance held fixed."""
        index = jax.random.randint(rng_key, (num,), 0, self.num_units)
        run = self.traced.run(rng_key, index, self.parameters.unflatten(theta))
        again = self.traced.run(rng_key, index, self.parameters.unflatten(other), run.values)
        # Equal up to rounding: the two runs are compiled apart.
        moved = [_differ(a, b) for a, b in zip(run.anchors, again.anchors, strict=True)]
        return jnp.any(jnp.array(moved)) if moved else jnp.array(False)

    def carried_moved(
        self, rng_key: Array, theta: Float[Array, " d"], other: Float[Array, " d"]
    ) -> tuple[Bool[Array, ""], tuple[Array, Array]]:
        """The same with the noise of the carriers held instead, and whether an anchor moves then."""
        index = jax.random.randint(rng_key, (1,), 0, self.num_units)
        values = self.traced.run(rng_key, index, self.parameters.unflatten(theta)).values
        noise = self.residuals(rng_key, theta, index, values)

        def run(t):
            at = theta + t * (other - theta)
            run, own = self.density_of(rng_key, at, index, self.carried(rng_key, at, index, values, noise))
            return (run.log_density - own)[0], run.anchors

        anchors, again = (run(jnp.asarray(t))[1] for t in (0.0, 1.0))
        moved = [_differ(a, b) for a, b in zip(anchors, again, strict=True)]
        return jnp.any(jnp.array([*moved, False])), _jumped(lambda t: run(t)[0])

    def supports_moved(self, rng_key: Array, theta: Float[Array, " d"], other: Float[Array, " d"]) -> dict[str, Bool[Array, ""]]:
        """For every site inside the plate whether its support moves between two thetas."""
        index = jnp.zeros(2, jnp.int32)
        run = self.traced.run(rng_key, index, self.parameters.unflatten(theta))
        again = self.traced.run(rng_key, index, self.parameters.unflatten(other), run.values)
        pairs = {k: zip(run.supports[k], again.supports[k], strict=True) for k in run.supports}
        return {k: jnp.any(jnp.array([_differ(a, b) for a, b in p] or [False])) for k, p in pairs.items()}

    def _simulate(
        self, rng_key: Array, theta: Float[Array, " d"], index: Int[Array, " m"], spread: Float[Array, ""] | None = None
    ) -> SimulatedUnits:
        m, params = index.shape[0], self.parameters.unflatten(theta)
        if spread is None or not self.traced.stretchable:
            run, weight = self.traced.run(rng_key, index, params), jnp.ones(m)
        else:
            run, weight = self._stretched(rng_key, index, params, spread)
        joint_score, difference = self._joint_scores(rng_key, theta, index, run.values)
        x = jnp.concatenate([self._noised(rng_key, run.features), self.covariates[index]], axis=-1)
        return SimulatedUnits(x, joint_score, difference, weight)

    def _stretched(self, rng_key: Array, index: Int[Array, " m"], params: dict, spread: Float[Array, ""]) -> tuple[ModelRun, Array]:
        """A run in which some units are stretched, with p(z) / ((1 - spread) p(z) + spread p(z / 2) / 2) as the weight of each."""
        traced, m = self.traced, index.shape[0]
        chosen = jax.random.uniform(jax.random.fold_in(rng_key, 1), (m,)) < spread
        scale = jnp.where(chosen, STRETCH, 1.0)
        ratios = [jnp.zeros(m)]  # log of the stretched density over the model's

        def draw(name, fn, key):
            value = fn.sample(key)
            if name not in traced.stretchable:
                return value
            axis = value.ndim + traced.plate_dim - fn.event_dim
            by_unit = scale.reshape([m if i == axis else 1 for i in range(value.ndim)])
            value = fn.mean + by_unit * (value - fn.mean)
            nearer = fn.mean + (value - fn.mean) / STRETCH
            per_unit = traced.per_unit(fn.log_prob(nearer) - fn.log_prob(value), m).sum(-1)
            ratios.append(per_unit - value.size // m * np.log(STRETCH))
            return value

        run = traced.run(rng_key, index, params, sampler=draw)
        return run, 1 / (1 - spread + spread * jnp.exp(sum(ratios)))

    def _noised(self, rng_key: Array, features: Float[Array, "m o"]) -> Float[Array, "m o"]:
        if self.noise_sd is None:
            return features
        return features + self.noise_sd * jax.random.normal(jax.random.fold_in(rng_key, 0), features.shape)

    def residuals(self, rng_key: Array, theta: Float[Array, " d"], index: Int[Array, " m"], values: dict) -> dict[str, Array]:
        """The noise of the carriers; while they are not known, of all nuisances that could be."""
        found: dict[str, Array] = {}

        def look(name, fn, key):
            if name not in values:  # of no concern to any density
                return fn.sample(key)
            if is_carried(fn) and (name in self.carriers or not self.carriers):
                found[name] = residual(fn, values[name])
            return values[name]

        kept = {k: v for k, v in values.items() if k not in self.traced.nuisances}
        self.traced.run(rng_key, index, self.parameters.unflatten(theta), kept, sampler=look)
        return found

    def carried(
        self, rng_key: Array, theta: Float[Array, " d"], index: Int[Array, " m"], values: dict, noise: dict[str, Array]
    ) -> dict[str, Array]:
        """Values in which the nuisances with this noise are as theta makes them, and all others as they were."""
        found = dict(values)

        def carry(name, fn, key):
            found[name] = value_at(fn, noise[name]) if name in noise else fn.sample(key)
            return found[name]

        held = {k: v for k, v in values.items() if k not in noise}
        self.traced.run(rng_key, index, self.parameters.unflatten(theta), held, sampler=carry)
        return found

    def density_of(self, rng_key: Array, theta: Float[Array, " d"], index: Int[Array, " m"], values: dict) -> tuple[ModelRun, Array]:
        """A run at these values, and the log density of the nuisances that can be carried, by unit."""
        own = [jnp.zeros(index.shape[0])]

        def look(name, fn, key):
            if name not in self.carriers:
                return fn.sample(key)
            own.append(self.traced.per_unit(fn.log_prob(values[name]), index.shape[0]).sum(-1))
            return values[name]

        held = {k: v for k, v in values.items() if k not in self.carriers}
        run = self.traced.run(rng_key, index, self.parameters.unflatten(theta), held, sampler=look)
        return run, sum(own[1:], own[0])

    def _joint_scores(self, rng_key: Array, theta: Float[Array, " d"], index: Int[Array, " m"], values: dict) -> tuple[Array, Array | None]:
        """The joint score with the nuisances held, and by how much the one with their noise held differs in the steady coordinates.

        Both from one pass: theta decides the density, and a second copy of it what becomes of the noise.
        """
        if not self.steady:
            return self._joint_score(rng_key, theta, index, values), None
        d, some, values = len(theta), jnp.array(self.steady), jax.lax.stop_gradient(values)
        noise = jax.lax.stop_gradient(self.residuals(rng_key, theta, index, values))

        def densities(both):
            moved = self.carried(rng_key, theta.at[some].set(both[d:]), index, values, noise)
            run, own = self.density_of(rng_key, both[:d], index, moved)
            return run.log_density, own

        whole, own = jax.jacfwd(densities)(jnp.concatenate([theta, theta[some]]))
        # The noise has a density that does not depend on theta: what it adds is left out.
        return whole[:, :d], whole[:, d:] - own[:, :d][:, some] - own[:, d:]

    def _joint_score(self, rng_key: Array, theta: Float[Array, " d"], index: Int[Array, " m"], values: dict) -> Float[Array, "m d"]:
        values = jax.lax.stop_gradient(values)

        def log_density(theta, rng_key, index, values):
            return self.traced.run(rng_key, index, self.parameters.unflatten(theta), values).log_density

        if self.density == "none":
            return jnp.zeros((index.shape[0], theta.shape[0]))
        if self.density == "pruned":
            return jax.jacfwd(pruned(log_density, theta, rng_key, index, values))(theta)
        # Forward mode: one pass a coordinate gives every unit's gradient, and loops in the simulator do not matter.
        return jax.jacfwd(log_density)(theta, rng_key, index, values)


NUM_HALVINGS = 4


def _jumped(along: Callable[[Array], Array]) -> tuple[Bool[Array, ""], Bool[Array, ""]]:
    """Whether a function on [0, 1] changes otherwise than its derivative says: on the whole, and where that is worst."""

    def at(t):
        value, slope = jax.jvp(along, (t,), (jnp.ones(()),))
        return jnp.stack([t, value, slope])

    def surprise(a, b):
        found = jnp.abs(b[1] - a[1] - (b[0] - a[0]) * (a[2] + b[2]) / 2)
        return jnp.where(jnp.isfinite(found), found, 0.0)

    def halve(_, ends):
        a, b = ends
        middle = at((a[0] + b[0]) / 2)
        left = surprise(a, middle) > surprise(middle, b)
        return jnp.where(left, a, middle), jnp.where(left, middle, b)

    a, b = jax.lax.map(at, jnp.array([0.0, 1.0]))
    # A density that does not jump, but is steep, is not held to more than a share of its slope.
    size = jnp.maximum(1.0, jnp.maximum(jnp.abs(b[1] - a[1]), jnp.abs(a[2])))
    first = surprise(a, b) > MAX_SURPRISE * size
    return first, surprise(*jax.lax.fori_loop(0, NUM_HALVINGS, halve, (a, b))) > MAX_SURPRISE


def _differ(a: Array, b: Array) -> Bool[Array, ""]:
    return jnp.max(jnp.abs(a - b)) > 1e-4 * jnp.max(jnp.abs(a))


def make_units(traced: TracedModel, layout: CovariateLayout | None = None) -> Units:
    """The units of a traced model; with the layout of an earlier one, the covariates come out as there."""
    parameters = make_parameters(traced)
    if traced.unit_plate is None:
        return _with_density(Units(traced, parameters, jnp.zeros((1, 0)), CovariateLayout()))
    inputs, is_integer = _per_unit_inputs(traced, parameters)
    if layout is None:
        kept = tuple(j for j in range(inputs.shape[1]) if not _is_redundant(inputs, j))
        values = {j: np.unique(inputs[:, j]) for j in kept if is_integer[j]}
        layout = CovariateLayout(kept, tuple((j, tuple(int(v) for v in u)) for j, u in values.items() if 2 < len(u) <= MAX_LEVELS))
    columns = [inputs[:, list(layout.kept)]]
    columns += [(inputs[:, j, None] == np.array(u)).astype(inputs.dtype) for j, u in layout.levels]
    return _with_density(Units(traced, parameters, jnp.asarray(np.concatenate(columns, axis=1)), layout))


def transitions(series: ArrayLike, order: int = 1) -> tuple[Float[Array, "n q"], Float[Array, "n p"]]:
    """Cut a Markov series into units: the states before, ``order`` of them, and the state that follows.

    :param series: (T,) or (T, p), or several of one length, (S, T, p).
    :param order: how many states before decide the next.

    The first are covariates, the second the data: a score of the transitions is additive, and mean zero given the states before.

    **Example:**

    >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> from numpyro_sls import transitions
    >>> def ar1(series):
    ...     phi = numpyro.sample("phi", dist.Normal(0, 1))
    ...     before, after = transitions(series)
    ...     with numpyro.plate("steps", len(after)) as step:
    ...         numpyro.sample("x", dist.Normal(phi * before[step], 1).to_event(1), obs=after)
    >>> before, after = transitions(jnp.arange(5.0), order=2)
    >>> before.tolist(), after.tolist()
    ([[0.0, 1.0], [1.0, 2.0], [2.0, 3.0]], [[2.0], [3.0], [4.0]])
    """
    x = jnp.asarray(series)
    x = x[None, :, None] if x.ndim == 1 else x[None] if x.ndim == 2 else x
    if x.ndim != 3:
        raise ValueError(f"transitions takes a series of shape (T,), (T, p) or (S, T, p); got {jnp.shape(series)}.")
    if not 1 <= order < x.shape[1]:
        raise ValueError(f"transitions(order={order}) must lie between 1 and {x.shape[1] - 1}, one less than the length of the series.")
    length = x.shape[1] - order
    before = jnp.concatenate([x[:, i : i + length] for i in range(order)], axis=-1)
    return before.reshape(-1, before.shape[-1]), x[:, order:].reshape(-1, x.shape[-1])


def _with_density(units: Units) -> Units:
    """How the joint density can be differentiated, tried on the trace: code outside JAX (a callback) has no derivative."""
    for density in ("traced", "pruned"):
        candidate = replace(units, density=density)
        try:
            jax.eval_shape(lambda key, theta, c=candidate: c.simulate(key, theta, 2), jax.random.key(0), jnp.zeros(units.parameters.dim))
        except (ValueError, TypeError, NotImplementedError):
            continue
        return candidate
    return replace(units, density="none")


def _is_redundant(inputs: np.ndarray, j: int) -> bool:
    """Constant, or the same as an earlier one, up to rounding, which standardization would blow up to noise."""
    column = inputs[:, j]
    rounding = 1e-5 * np.max(np.abs(column))
    return bool(np.ptp(column) <= rounding) or any(np.max(np.abs(inputs[:, i] - column)) <= rounding for i in range(j))


def _per_unit_inputs(traced: TracedModel, parameters: Parameters) -> tuple[np.ndarray, list[bool]]:
    """Every quantity that the row number alone decides and that meets a parameter or a random number, by row.

    However the covariates came in (an argument, a closure, numpyro.subsample, c[idx]), these are what the simulator
    makes of them. The program is evaluated as far as the row number goes; the frontier is the answer.
    """

    def program(index, theta, rng_key):
        return traced.run(rng_key, index, parameters.unflatten(theta)).features

    theta = jnp.zeros(parameters.dim)
    closed = jax.make_jaxpr(program)(jnp.zeros(1, jnp.int32), theta, jax.random.key(0))
    is_integer: list[bool] = []

    def row(i):
        frontier: list[Array] = []
        _walk(closed, [_Known(i[None], True), None, None], frontier)
        is_integer[:] = [not jnp.issubdtype(a.dtype, jnp.inexact) for a in frontier for _ in range(a.size)]
        return jnp.concatenate([jnp.ravel(a).astype(theta.dtype) for a in frontier] + [jnp.zeros(0)])

    inputs = jax.jit(jax.vmap(row))(jnp.arange(traced.num_units, dtype=jnp.int32))
    return np.asarray(inputs), is_integer


class _Known(NamedTuple):
    value: Any
    by_row: bool


INLINED = {"jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call"}


def _walk(closed: ClosedJaxpr, args: list[_Known | None], frontier: list[Array]) -> list[_Known | None]:
    jaxpr = closed.jaxpr
    env: dict[Any, _Known | None] = dict(zip(jaxpr.constvars, [_Known(c, False) for c in closed.consts], strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        ins = [_Known(v.val, False) if isinstance(v, Literal) else env[v] for v in eqn.invars]
        by_row = any(a is not None and a.by_row for a in ins)
        inner = next((p for p in eqn.params.values() if isinstance(p, ClosedJaxpr)), None)
        if inner is not None and eqn.primitive.name in INLINED:
            outs = _walk(inner, ins, frontier)
        elif all(a is not None for a in ins):
            out = eqn.primitive.bind(*[a.value for a in ins if a is not None], **eqn.params)
            outs = [_Known(v, by_row) for v in (out if eqn.primitive.multiple_results else [out])]
        else:
            frontier += [a.value for a in ins if a is not None and a.by_row]
            outs = [None] * len(eqn.outvars)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [_Known(v.val, False) if isinstance(v, Literal) else env[v] for v in jaxpr.outvars]

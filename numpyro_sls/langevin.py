"""Langevin dynamics on the learned posterior score, Metropolis-adjusted, as a NumPyro kernel."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float
from numpyro.infer.hmc_util import dual_averaging
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import is_prng_key

from numpyro_sls.fit import SLS, SLSFit
from numpyro_sls.preparation import fingerprint
from numpyro_sls.score import DataTerms, PosteriorScore

__all__ = ["SLSLangevin", "SLSLangevinState"]


class SLSLangevinState(NamedTuple):
    """State of one chain.

    ``z`` holds the parameter sites, unconstrained, and ``data`` what the score needs of the data set; ``diverging``
    says that the draw is outside the region on which the score was trained.
    """

    i: Array
    z: dict[str, Array]
    potential_energy: Array
    score: Float[Array, " d"]  # in delta, the coordinates whitened by the posterior
    accept_prob: Array
    mean_accept_prob: Array
    diverging: Array
    step_size: Array
    adapt_state: Any
    data: DataTerms
    rng_key: Array


# How vectorized chains are stacked: all share one copy of the data's terms.
_BY_CHAIN: Any = SLSLangevinState._make(None if field == "data" else 0 for field in SLSLangevinState._fields)


class _Point(NamedTuple):
    delta: Float[Array, " d"]
    potential: Array
    score: Float[Array, " d"]


class SLSLangevin(MCMCKernel):
    """Samples the posterior of a model without a likelihood by Langevin dynamics on its learned score.

    :param model_or_fit: a NumPyro model, fitted at the first run with the settings of `SLS`, or an `SLSFit`.
    :param num_steps: Langevin steps between two draws; a step is cheap, whatever the size of the data.
    :param step_size: at the start, in posterior sds.
    :param target_accept_prob: what the step size is adapted to during warm-up.
    :param fit_key: the key that the fit follows from. It is apart from the key of the run, so that a chain does not
        depend on how many others there are; another key gives another fit of the same posterior.
    :param progress_bar: whether the fit shows its progress.
    :param settings: those of `SLS`: ``training=Training(...)``, ``target="implicit"``, ...

    **Example:**

    >>> import numpyro, numpyro.distributions as dist
    >>> from jax import random
    >>> from numpyro.infer import MCMC
    >>> from numpyro_sls import Simulated, SLSLangevin, Training
    >>> def model(x):
    ...     loc = numpyro.sample("loc", dist.Normal(0, 3))
    ...     with numpyro.plate("units", x.shape[0]):
    ...         z = numpyro.sample("z", dist.Normal())
    ...         numpyro.sample("x", Simulated(loc + z), obs=x)
    >>> x = 1 + random.normal(random.key(1), (50,))
    >>> kernel = SLSLangevin(model, training=Training(num_simulations=50_000), progress_bar=False)
    >>> mcmc = MCMC(kernel, num_warmup=100, num_samples=200, progress_bar=False)
    >>> mcmc.run(random.key(0), x)
    >>> mcmc.get_samples()["loc"].shape
    (200,)
    """

    def __init__(
        self,
        model_or_fit: Callable | SLSFit,
        *,
        num_steps: int = 4,
        step_size: float = 0.9,
        target_accept_prob: float = 0.65,
        fit_key: Array | None = None,
        progress_bar: bool = True,
        **settings,
    ):
        if num_steps < 1:
            raise ValueError(f"num_steps={num_steps} must be at least 1.")
        if not 0 < target_accept_prob < 1:
            raise ValueError(f"target_accept_prob={target_accept_prob} must lie between 0 and 1.")
        if isinstance(model_or_fit, SLSFit) and settings:
            raise TypeError(
                f"SLSLangevin(fit) got {sorted(settings)}: a fit has its settings already. Pass them to SLS(model, ...) and fit again."
            )
        self._is_given = isinstance(model_or_fit, SLSFit)
        self._fit: SLSFit | None = model_or_fit if isinstance(model_or_fit, SLSFit) else None
        self._sls: SLS = model_or_fit.sls if isinstance(model_or_fit, SLSFit) else SLS(model_or_fit, **settings)
        self._num_steps, self._step_size, self._target = num_steps, step_size, target_accept_prob
        self._fit_key = jax.random.key(0) if fit_key is None else fit_key
        self._progress_bar = progress_bar
        self._num_warmup = 0
        self._compiled_for_any_data = False
        self._compiled_start: tuple[SLSFit, tuple[Callable, Callable]] | None = None

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_compiled_start": None}

    @property
    def model(self):
        return self._sls.model

    @property
    def fit(self) -> SLSFit | None:
        """The fit that the kernel samples from; None before the first run."""
        return self._fit

    @property
    def sample_field(self) -> str:
        return "z"

    @property
    def default_fields(self) -> tuple[str, ...]:
        return ("z", "diverging")

    def get_diagnostics_str(self, state: SLSLangevinState) -> str:
        return f"step size {state.step_size:.2e}. acc. prob={state.mean_accept_prob:.2f}"

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs) -> SLSLangevinState:
        """Fit the score if that has not been done for these data, and start a chain for every key."""
        self._num_warmup = num_warmup
        # Under pmap or jit the keys are traced, but the data are not: the fit runs outside the trace, once.
        with jax.ensure_compile_time_eval():
            fit, data = self._fit_and_terms(model_args, model_kwargs or {})
        if self._compiled_start is None or self._compiled_start[0] is not fit:
            self._compiled_start = fit, _compile_start(partial(self._start, fit))
        one, many = self._compiled_start[1]
        return (one if is_prng_key(rng_key) else many)(data, rng_key, init_params)

    def sample(self, state: SLSLangevinState, model_args, model_kwargs) -> SLSLangevinState:
        """The next draw: ``num_steps`` Langevin steps, and in warm-up a better step size."""
        if any(isinstance(a, jax.core.Tracer) for a in jax.tree.leaves((model_args, model_kwargs))):
            self._compiled_for_any_data = True
        if is_prng_key(state.rng_key):
            return self._sample(state)
        return jax.vmap(self._sample, in_axes=(_BY_CHAIN,), out_axes=_BY_CHAIN)(state)

    def _sample(self, state: SLSLangevinState) -> SLSLangevinState:
        fit, data = self._fit, state.data
        assert fit is not None, "init comes before sample"
        posterior, flatten = fit.posterior, fit.units.parameters.flatten
        rng_key, key_steps = jax.random.split(state.rng_key)
        point = _Point(_to_delta(data, flatten(state.z)), state.potential_energy, state.score)

        def step(point, key):
            return langevin_step(key, point, state.step_size, posterior, data)

        point, accept_probs = jax.lax.scan(step, point, jax.random.split(key_steps, self._num_steps))
        accept_prob = accept_probs.mean()
        warming = state.i < self._num_warmup
        adapted = _adapt()[1](self._target - accept_prob, state.adapt_state)
        adapt_state = jax.tree.map(lambda new, old: jnp.where(warming, new, old), adapted, state.adapt_state)
        last = state.i == self._num_warmup - 1
        step_size = jnp.where(warming, jnp.minimum(jnp.exp(jnp.where(last, adapted[1], adapted[0])), MAX_STEP_SIZE), state.step_size)
        count = jnp.where(warming, state.i + 1, state.i + 1 - self._num_warmup)
        mean_accept_prob = state.mean_accept_prob + (accept_prob - state.mean_accept_prob) / count
        theta = _to_theta(data, point.delta)
        return SLSLangevinState(
            state.i + 1,
            fit.units.parameters.unflatten(theta),
            point.potential,
            point.score,
            accept_prob,
            mean_accept_prob,
            posterior.outside(theta, data),
            step_size,
            adapt_state,
            data,
            rng_key,
        )

    def postprocess_fn(self, model_args, model_kwargs):
        """From unconstrained sites to the parameters and the deterministic sites that they decide."""
        assert self._fit is not None, "init comes before postprocess_fn"
        parameters = self._fit.units.parameters
        return lambda z: parameters.constrain(parameters.flatten(z))

    def _fit_and_terms(self, model_args: tuple, model_kwargs: dict) -> tuple[SLSFit, DataTerms]:
        if self._is_given:
            assert self._fit is not None
            return self._fit, self._fit.condition(*model_args, **model_kwargs)
        if self._fit is not None:
            if fingerprint((model_args, model_kwargs)) == self._fit.fingerprint:
                return self._fit, self._fit.data
            if self._compiled_for_any_data:
                raise ValueError(
                    "New data came with jit_model_args=True, but this kernel's score was fitted to the data before them. "
                    "Fit once, fit = SLS(model).run(rng_key, x), and sample any data with MCMC(SLSLangevin(fit), ..., jit_model_args=True)."
                )
        self._fit = self._sls.run(self._fit_key, *model_args, progress_bar=self._progress_bar, **model_kwargs)
        return self._fit, self._fit.data

    def _start(self, fit: SLSFit, data: DataTerms, rng_key: Array, init_params: dict[str, Array] | None) -> SLSLangevinState:
        """A draw twice as wide as the Gaussian approximation at the mode, or what the user gave."""
        posterior, parameters = fit.posterior, fit.units.parameters
        rng_key, key_start = jax.random.split(rng_key)
        if init_params is None:
            delta = 2 * jax.random.normal(key_start, (parameters.dim,))
            delta = jnp.where(posterior.possible(_to_theta(data, delta), data), delta, 0.0)
        else:
            delta = _to_delta(data, parameters.flatten(init_params))
        point = _at(posterior, data, delta)
        zero = jnp.zeros(())
        theta = _to_theta(data, delta)
        # The coordinates are whitened: a long first step would only leap to where the score was never meant to be used.
        adapt_state = _adapt()[0](jnp.log(self._step_size))
        return SLSLangevinState(
            jnp.array(0),
            parameters.unflatten(theta),
            point.potential,
            point.score,
            zero,
            zero,
            posterior.outside(theta, data),
            jnp.asarray(self._step_size, theta.dtype),
            jax.tree.map(jnp.asarray, adapt_state),
            data,
            rng_key,
        )


def _compile_start(start: Callable) -> tuple[Callable, Callable]:
    """For one chain, and for one a key."""

    def many(data, keys, init_params):
        in_axes = (None, 0, None if init_params is None else 0)
        return jax.vmap(start, in_axes=in_axes, out_axes=_BY_CHAIN)(data, keys, init_params)

    return jax.jit(start), jax.jit(many)


def langevin_step(rng_key: Array, point: _Point, step_size: Array, posterior: PosteriorScore, data: DataTerms) -> tuple[_Point, Array]:
    """One Metropolis-adjusted Langevin step in the whitened coordinates delta; with g the score there,

    delta' = delta + e^2/2 g(delta) + e xi,    log ratio = log pi(delta') - log pi(delta) + log q(delta | delta') - log q(delta' | delta).
    """
    key_noise, key_accept = jax.random.split(rng_key)
    noise = jax.random.normal(key_noise, point.delta.shape)
    half = 0.5 * step_size**2
    proposed = point.delta + half * point.score + step_size * noise
    new = _at(posterior, data, proposed)
    back = point.delta - proposed - half * new.score
    log_ratio = _log_density_ratio(posterior, data, point, new) + 0.5 * jnp.sum(noise**2) - 0.5 * jnp.sum(back**2) / step_size**2
    possible = posterior.possible(_to_theta(data, proposed), data)
    accept_prob = jnp.where(jnp.isfinite(log_ratio) & possible, jnp.exp(jnp.minimum(log_ratio, 0.0)), 0.0)
    accept = jax.random.uniform(key_accept) < accept_prob
    return jax.tree.map(lambda a, b: jnp.where(accept, a, b), new, point), accept_prob


MAX_STEP_SIZE = 2.0
GAUSS_LEGENDRE = ((0.1127016654, 0.5, 0.8872983346), (5 / 18, 8 / 18, 5 / 18))  # three nodes on [0, 1]


def _log_density_ratio(posterior: PosteriorScore, data: DataTerms, old: _Point, new: _Point) -> Array:
    """By the potential; where there is none, by the line integral of the score between the two points."""
    if posterior.learned.network.has_potential:
        return old.potential - new.potential
    return line_integral(lambda delta: _score_delta(posterior, data, delta), old.delta, new.delta - old.delta)


def line_integral(score_fn: Callable[[Array], Array], start: Float[Array, " d"], move: Float[Array, " d"]) -> Float[Array, ""]:
    """int_0^1 s(start + a move) . move da, by Gauss-Legendre."""
    nodes, weights = GAUSS_LEGENDRE
    return jnp.stack([w * score_fn(start + a * move) @ move for a, w in zip(nodes, weights, strict=True)]).sum()


def _at(posterior: PosteriorScore, data: DataTerms, delta: Float[Array, " d"]) -> _Point:
    if not posterior.learned.network.has_potential:
        return _Point(delta, jnp.zeros(()), _score_delta(posterior, data, delta))
    value, gradient = jax.value_and_grad(lambda e: posterior.potential(_to_theta(data, e), data))(delta)
    return _Point(delta, value, -gradient)


def _score_delta(posterior: PosteriorScore, data: DataTerms, delta: Float[Array, " d"]) -> Float[Array, " d"]:
    return data.factor.T @ posterior.score(_to_theta(data, delta), data)


def _to_theta(data: DataTerms, delta: Float[Array, " d"]) -> Float[Array, " d"]:
    return data.mode + data.factor @ delta


def _to_delta(data: DataTerms, theta: Float[Array, " d"]) -> Float[Array, " d"]:
    return data.inverse @ (theta - data.mode)


def _adapt():
    return dual_averaging()

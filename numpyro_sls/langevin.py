"""Langevin dynamics on the learned posterior score as a NumPyro kernel."""

from collections.abc import Callable, Sequence
import copy
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.custom_batching import custom_vmap
import jax.numpy as jnp
from jaxtyping import Float
import numpy as np
from numpyro.infer.hmc_util import dual_averaging
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import is_prng_key

from numpyro_sls.blocks import block_prior, check_block, hidden, split_conditioning, typical
from numpyro_sls.dynamics import (
    DiscretizationBias,
    Point,
    acceptance,
    discretization_bias,
    inside,
    langevin_step,
    point_at,
    to_delta,
    to_theta,
)
from numpyro_sls.fit import SLS
from numpyro_sls.fitted import SLSFit
from numpyro_sls.notices import MAX_DRAWS_OUTSIDE, warn_of_draws
from numpyro_sls.preparation import fingerprint
from numpyro_sls.proposal import Proposal
from numpyro_sls.score import FARTHEST, DataTerms, PosteriorScore
from numpyro_sls.sites import WithoutLikelihood

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
    mean_outside: Array  # share of the draws so far that were diverging
    step_size: Array
    adapt_state: Any
    data: DataTerms
    rng_key: Array


# How vectorized chains are stacked: all share one copy of the data's terms.
_BY_CHAIN: Any = SLSLangevinState._make(None if field == "data" else 0 for field in SLSLangevinState._fields)


class SLSLangevin(MCMCKernel):
    """Samples the posterior of a model without a likelihood by Langevin dynamics on its learned score.

    :param model_or_fit: a NumPyro model, fitted at the first run with the settings of `SLS`, or an `SLSFit`.
    :param num_steps: Langevin steps between two draws; a step is cheap, whatever the size of the data.
    :param adjusted: accept or reject every step by Metropolis, by the potential or the line integral of the score. Without it
        the draws have a bias that falls as the square of the step size; ``discretization_bias(rng_key, *model_args)`` estimates it.
    :param annealed: start the chains from the proposal of the training, at the temperature at which the posterior is as wide, and
        cool them down in the first half of warm-up (the paper's tempering).
    :param refit: what SLSLangevin(fit) does with new data whose posterior leaves the region of the fit: False warns and samples
        them all the same, True fits again for them, with the settings of the fit.
    :param step_size: at the start, in posterior sds.
    :param target_accept_prob: what the step size is adapted to during warm-up; None: 0.65, and 0.3 where the posterior leans on the
        ends of intervals, beyond which steps are refused.
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
    >>> mcmc.run(random.key(0), x)  # doctest: +SKIP
    >>> mcmc.get_samples()["loc"].shape  # doctest: +SKIP
    (200,)
    """

    def __init__(
        self,
        model_or_fit: Callable | SLSFit,
        *,
        num_steps: int = 4,
        step_size: float = 0.9,
        target_accept_prob: float | None = None,
        adjusted: bool = True,
        annealed: bool = False,
        refit: bool = False,
        fit_key: Array | None = None,
        progress_bar: bool = True,
        **settings,
    ):
        if num_steps < 1:
            raise ValueError(f"num_steps={num_steps} must be at least 1.")
        if target_accept_prob is None and not adjusted:
            target_accept_prob = 0.95  # without rejections, steps so short that few would be
        if target_accept_prob is not None and not 0 < target_accept_prob < 1:
            raise ValueError(f"target_accept_prob={target_accept_prob} must lie between 0 and 1.")
        if isinstance(model_or_fit, SLSFit) and settings:
            raise TypeError(
                f"SLSLangevin(fit) got {sorted(settings)}: a fit has its settings already. Pass them to SLS(model, ...) and fit again."
            )
        self._is_given, self._refit = isinstance(model_or_fit, SLSFit), refit
        self._fit: SLSFit | None = model_or_fit if isinstance(model_or_fit, SLSFit) else None
        self._sls: SLS = model_or_fit.sls if isinstance(model_or_fit, SLSFit) else SLS(model_or_fit, **settings)
        self._num_steps, self._step_size, self._target = num_steps, step_size, target_accept_prob
        self._adjusted, self._annealed = adjusted, annealed
        self._base: Callable | None = None  # the model before Gibbs wrapped it
        self._fit_key = jax.random.key(0) if fit_key is None else fit_key
        self._progress_bar = progress_bar
        self._num_warmup = 0
        self._compiled_for_any_data = False
        self._compiled_start: tuple[SLSFit, tuple[Callable, Callable]] | None = None

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_compiled_start": None}

    @property
    def model(self):
        """The model; once there is a fit, without its observed sites, which have no likelihood that could be asked for."""
        return WithoutLikelihood(self._sls.model) if self._fit is not None and self._base is None else self._sls.model

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
        outside = f". {100 * state.mean_outside:.0f}% outside the region" if state.mean_outside > 0 else ""
        return f"step size {state.step_size:.2e}. acc. prob={state.mean_accept_prob:.2f}{outside}"

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs) -> SLSLangevinState:
        """Fit the score if that has not been done for these data, and start a chain for every key."""
        self._num_warmup = num_warmup
        kwargs, given = split_conditioning(model_kwargs)
        # Under pmap or jit the keys are traced, but the data are not: the fit runs outside the trace, once.
        with jax.ensure_compile_time_eval():
            fit, data = self._fit_and_terms(model_args, kwargs, list(given))
        if given and init_params is not None:  # by Gibbs, in the sites' own values
            init_params = fit.units.parameters.unconstrain(init_params)
        if self._compiled_start is None or self._compiled_start[0] is not fit:
            self._compiled_start = fit, _compile_start(partial(self._start, fit))
        one, many = self._compiled_start[1]
        return (one if is_prng_key(rng_key) else many)(data, rng_key, init_params, given)

    def sample(self, state: SLSLangevinState, model_args, model_kwargs) -> SLSLangevinState:
        """The next draw: ``num_steps`` Langevin steps, and in warm-up a better step size."""
        if any(isinstance(a, jax.core.Tracer) for a in jax.tree.leaves((model_args, model_kwargs))):
            self._compiled_for_any_data = True
        posterior = self._posterior(split_conditioning(model_kwargs)[1])
        if is_prng_key(state.rng_key):
            state = self._sample(posterior, state)
        else:
            state = jax.vmap(partial(self._sample, posterior), in_axes=(_BY_CHAIN,), out_axes=_BY_CHAIN)(state)
        count, share = jnp.ravel(state.i)[0] - self._num_warmup, state.mean_outside.mean()
        _tell(jnp.any(count == jnp.asarray(TELL_AFTER)) & (share > MAX_DRAWS_OUTSIDE), count, share)
        return state

    def discretization_bias(self, rng_key: Array, *model_args, step_size: float | None = None, **model_kwargs) -> DiscretizationBias:
        """What steps of this size would do to the draws without the Metropolis step, by step halving."""
        fit, data = self._fit_and_terms(model_args, model_kwargs)
        return discretization_bias(rng_key, fit.posterior, data, self._step_size if step_size is None else step_size)

    def refresh(self, state: SLSLangevinState, model_args, model_kwargs) -> SLSLangevinState:
        """Potential and score where the chain is, after another block of Gibbs has moved."""
        assert self._fit is not None, "init comes before refresh"
        delta = to_delta(state.data, self._fit.units.parameters.flatten(state.z))
        point = point_at(self._posterior(split_conditioning(model_kwargs)[1]), state.data, delta)
        return state._replace(potential_energy=point.potential, score=point.score)

    def wrap_model(self, wrapper: Callable) -> "SLSLangevin":
        """A copy for the model that ``Gibbs`` conditions on its other blocks; it fits by itself."""
        if self._is_given:
            raise ValueError("SLSLangevin(fit) cannot be a block of Gibbs: the fit is of the whole posterior. Use SLSLangevin(model, ...).")
        kernel = copy.copy(self)
        kernel._base = self._base or self._sls.model
        kernel._sls = replace(self._sls, model=wrapper(self._sls.model))
        kernel._fit, kernel._compiled_start = None, None
        return kernel

    def _posterior(self, given: dict[str, Array]) -> PosteriorScore:
        """That of the fit; in Gibbs with the prior that the other blocks' values give."""
        fit = self._fit
        assert fit is not None, "init comes before sample"
        if not given:
            return fit.posterior
        assert self._base is not None
        return replace(fit.posterior, log_prior=block_prior(fit.units.parameters, self._base, given))

    def _sample(self, posterior: PosteriorScore, state: SLSLangevinState) -> SLSLangevinState:
        fit, data = self._fit, state.data
        assert fit is not None, "init comes before sample"
        flatten = fit.units.parameters.flatten
        rng_key, key_steps = jax.random.split(state.rng_key)
        point = Point(to_delta(data, flatten(state.z)), state.potential_energy, state.score)

        heat = self._inverse_temperature(state, fit.posterior.unit.proposal) if self._annealed else 1.0

        def step(point, key):
            return langevin_step(key, point, state.step_size, posterior, data, heat, self._adjusted)

        point, accept_probs = jax.lax.scan(step, point, jax.random.split(key_steps, self._num_steps))
        accept_prob = accept_probs.mean()
        warming = state.i < self._num_warmup
        target = acceptance(data) if self._target is None else self._target
        adapted = _adapt()[1](target - accept_prob, state.adapt_state)
        adapt_state = jax.tree.map(lambda new, old: jnp.where(warming, new, old), adapted, state.adapt_state)
        last = state.i == self._num_warmup - 1
        step_size = jnp.where(warming, jnp.minimum(jnp.exp(jnp.where(last, adapted[1], adapted[0])), MAX_STEP_SIZE), state.step_size)
        count = jnp.where(warming, state.i + 1, state.i + 1 - self._num_warmup)
        mean_accept_prob = state.mean_accept_prob + (accept_prob - state.mean_accept_prob) / count
        theta = to_theta(data, point.delta)
        outside = posterior.outside(theta, data)
        return SLSLangevinState(
            state.i + 1,
            fit.units.parameters.unflatten(theta),
            point.potential,
            point.score,
            accept_prob,
            mean_accept_prob,
            outside,
            state.mean_outside + (outside - state.mean_outside) / count,
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

    def _inverse_temperature(self, state: SLSLangevinState, proposal: Proposal) -> Array:
        """From one at which the posterior is as wide as the proposal up to 1, over the first half of warm-up."""
        length = self._num_warmup // 2
        progress = jnp.minimum(state.i / length, 1.0) if length else jnp.ones(())
        width = jnp.linalg.norm(state.data.inverse @ proposal.frame()[1]) / np.sqrt(proposal.dim)  # in posterior sds
        return jnp.clip(width, 1.0, FARTHEST) ** (-2 * (1 - progress))

    def _fit_and_terms(self, model_args: tuple, model_kwargs: dict, siblings: Sequence[str] = ()) -> tuple[SLSFit, DataTerms]:
        if self._is_given:
            assert self._fit is not None
            if self._refit and not self._fit.covers(*model_args, **model_kwargs):
                self._fit = self._fit.refit(self._fit_key, *model_args, progress_bar=self._progress_bar, **model_kwargs)
            return self._fit, self._fit.condition(*model_args, **model_kwargs)
        if self._fit is not None:
            if fingerprint((model_args, model_kwargs)) == self._fit.fingerprint:
                return self._fit, self._fit.data
            if self._compiled_for_any_data:
                raise ValueError(
                    "New data came with jit_model_args=True, but this kernel's score was fitted to the data before them. "
                    "Fit once, fit = SLS(model).run(rng_key, x), and sample any data with MCMC(SLSLangevin(fit), ..., jit_model_args=True)."
                )
        sls, values = self._sls, {}
        if siblings:
            assert self._base is not None, "only Gibbs gives values of other blocks"
            values = typical(self._base, model_args, model_kwargs, list(siblings))
            sls = replace(sls, model=hidden(self._base, values))
            check_block(sls.units_of(model_args, model_kwargs)[0], self._base, values)
        self._fit = sls.run(self._fit_key, *model_args, progress_bar=self._progress_bar, **model_kwargs)
        return self._fit, self._fit.data

    def _start(
        self, fit: SLSFit, data: DataTerms, rng_key: Array, init_params: dict[str, Array] | None, given: dict[str, Array]
    ) -> SLSLangevinState:
        """A draw twice as wide as the Gaussian approximation at the mode, one from the proposal if annealed, or what the user gave.

        A start outside the trained region is moved along the line to the mode until it is inside, and flagged as diverging.
        """
        posterior, parameters = self._posterior(given), fit.units.parameters
        rng_key, key_start = jax.random.split(rng_key)
        if init_params is None:
            delta = 2.0 * jax.random.normal(key_start, (parameters.dim,))
            if self._annealed:
                delta = to_delta(data, posterior.unit.proposal.sample(key_start, 1)[0])
            # A start that is not possible goes towards the middle, and not quite to the end of what is.
            possible = posterior.possible(to_theta(data, delta), data)
            delta = jnp.where(possible, delta, SHY * inside(posterior, data, delta))
        else:
            delta = to_delta(data, parameters.flatten(init_params))
        was_outside = posterior.outside(to_theta(data, delta), data)
        delta = inside(posterior, data, delta)
        point = point_at(posterior, data, delta)
        zero = jnp.zeros(())
        theta = to_theta(data, delta)
        # The coordinates are whitened: a long first step would only leap to where the score was never meant to be used.
        adapt_state = _adapt()[0](jnp.log(self._step_size))
        return SLSLangevinState(
            jnp.array(0),
            parameters.unflatten(theta),
            point.potential,
            point.score,
            zero,
            zero,
            was_outside,
            zero,
            jnp.asarray(self._step_size, theta.dtype),
            jax.tree.map(jnp.asarray, adapt_state),
            data,
            rng_key,
        )


MAX_STEP_SIZE = 2.0
SHY = 0.9
TELL_AFTER = (100, 1000)  # draws of a chain after warm-up


@custom_vmap
def _tell(due: Array, count: Array, share: Array) -> Array:
    """NumPyro calls nothing at the end of a run: after so many draws, say if many of them were outside the region."""
    jax.lax.cond(due, lambda: jax.debug.callback(warn_of_draws, count, share), lambda: None)
    return jnp.zeros(())


@_tell.def_vmap
def _tell_once(_, __, due: Array, count: Array, share: Array) -> tuple[Array, bool]:
    # Under jax.vmap a cond runs both branches, for every chain: all chains speak together instead.
    return _tell(jnp.any(due), jnp.max(count), jnp.mean(share)), False


def _compile_start(start: Callable) -> tuple[Callable, Callable]:
    """For one chain, and for one a key."""

    def many(data, keys, init_params, given):
        in_axes = (None, 0, None if init_params is None else 0, None)
        return jax.vmap(start, in_axes=in_axes, out_axes=_BY_CHAIN)(data, keys, init_params, given)

    return jax.jit(start), jax.jit(many)


def _adapt():
    return dual_averaging()

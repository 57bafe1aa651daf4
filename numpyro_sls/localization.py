"""Where to look: parameters whose simulations resemble the data in sliced Wasserstein distance (paper, section 3.1)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float
import numpy as np
import optax
from tqdm.auto import tqdm

from numpyro_sls.distances import directions, quantile_slices, sliced_wasserstein

__all__ = ["Localization", "Localized", "localize"]


@dataclass(frozen=True)
class Localization:
    """How the region of parameters that matters is found.

    :param num_starts: restarts B, each with a latent draw of its own.
    :param num_units: units simulated in each comparison; None: as many as the data, at most 200.
    :param num_steps: Adam steps from each start.
    :param num_directions: slices of the Wasserstein distance.
    :param population: parameters in each round of the search that finds the starts.
    :param num_rounds: rounds of that search; it needs no gradient, so that discrete simulators are found too.
    :param learning_rate: of Adam, in prior sds; it decays to zero.

    **Example:**

    >>> from numpyro_sls import Localization
    >>> Localization(num_starts=30).num_directions
    20
    """

    num_starts: int = 16
    num_units: int | None = None
    num_steps: int = 150
    num_directions: int = 20
    population: int = 500
    num_rounds: int = 8
    learning_rate: float = 0.1


class Localized(NamedTuple):
    """The restarts, best first, and what they say of the centre and of one unit's information."""

    centre: Float[Array, " d"]
    unit_covariance: Float[Array, "d d"]
    thetas: Float[Array, "b d"]
    distances: Float[Array, " b"]
    num_simulated: int


class _Comparison(NamedTuple):
    """The data as the distance sees them: standardized and cut into quantile slices."""

    centre: Float[Array, " p"]
    scale: Float[Array, " p"]
    w: Float[Array, "k p"]
    slices: Float[Array, "k m"]


def localize(
    rng_key: Array,
    simulate: Callable[[Array, Array, int], Array],
    sample_prior: Callable[[Array], Array],
    observed: Float[Array, "n p"],
    prior_sd: Float[Array, " d"],
    settings: Localization,
    progress_bar: bool = False,
) -> Localized:
    """Search from the prior, then descend from the best starts with one fixed latent draw each.

    ``simulate(rng_key, theta, num)`` gives units and ``sample_prior(rng_key)`` a theta; both are pure.
    """
    key_w, key_search, key_descend = jax.random.split(rng_key, 3)
    num_units = settings.num_units or max(2, min(200, observed.shape[0]))
    data = _compare_with(key_w, observed, settings.num_directions, num_units)

    def distance(theta: Float[Array, " d"], key: Array) -> Float[Array, ""]:
        x = simulate(key, theta, num_units)
        sw = sliced_wasserstein((x - data.centre) / data.scale, data.w, data.slices)
        return jnp.where(jnp.isfinite(sw), sw, jnp.inf)

    bar = tqdm(total=settings.num_rounds + 1, desc="localization", disable=not progress_bar)
    starts = _search(key_search, distance, sample_prior, prior_sd, settings, bar)
    thetas, distances = _descend(key_descend, distance, starts, prior_sd, settings)
    bar.update()
    bar.close()
    num_simulated = num_units * (settings.population * settings.num_rounds + settings.num_starts * (settings.num_steps + 1))

    # A restart that ended far above the others has failed: it is dropped, by its distance.
    kept = distances <= 2 * np.median(distances) + 1e-12
    thetas, distances = thetas[kept], distances[kept]
    spread = np.cov(thetas.T).reshape(prior_sd.shape[0], -1) if len(thetas) > 1 else np.diag(np.asarray(prior_sd) ** 2)
    spread = 0.5 * spread + 0.5 * np.diag(np.diag(spread))
    # The minimizers scatter as an estimate from m simulated and n observed units does: V (1/m + 1/n).
    unit_covariance = spread / (1 / num_units + 1 / observed.shape[0])
    floor = np.diag(1e-4 * np.asarray(prior_sd) ** 2)
    return Localized(
        jnp.asarray(np.median(thetas, axis=0)),
        jnp.asarray(unit_covariance + floor),
        jnp.asarray(thetas),
        jnp.asarray(distances),
        num_simulated,
    )


def _compare_with(rng_key: Array, observed: Float[Array, "n p"], num_directions: int, num_units: int) -> _Comparison:
    low, centre, high = jnp.quantile(observed, jnp.array([0.25, 0.5, 0.75]), axis=0)
    sd = jnp.std(observed, axis=0)
    scale = jnp.where(high > low, (high - low) / 1.35, jnp.where(sd > 0, sd, jnp.maximum(jnp.abs(centre), 1.0)))
    # Every axis is a direction too: with few random ones a coordinate could go unseen.
    p = observed.shape[1]
    w = directions(rng_key, num_directions, p)
    w = jnp.concatenate([jnp.eye(p), w]) if 1 < p <= num_directions else w
    return _Comparison(centre, scale, w, quantile_slices((observed - centre) / scale, w, num_units))


def _search(rng_key, distance, sample_prior, prior_sd, settings: Localization, bar) -> Float[Array, "b d"]:
    """Cross-entropy search: draw, keep the tenth nearest the data, draw around them; the first draws are the prior's."""
    evaluate = jax.jit(
        lambda thetas, key: jax.lax.map(lambda a: distance(*a), (thetas, jax.random.split(key, len(thetas))), batch_size=100)
    )
    num_elite = max(settings.population // 10, settings.num_starts)
    thetas = jax.jit(jax.vmap(sample_prior))(jax.random.split(rng_key, settings.population))
    elite = thetas
    for i in range(settings.num_rounds):
        key_eval, key_draw = jax.random.split(jax.random.fold_in(rng_key, i))
        order = jnp.argsort(evaluate(thetas, key_eval))
        elite = thetas[order[:num_elite]]
        cov = jnp.cov(elite.T).reshape(prior_sd.shape[0], -1)
        noise = jax.random.multivariate_normal(
            key_draw, jnp.zeros(len(prior_sd)), cov + 1e-6 * jnp.diag(prior_sd**2), (settings.population,)
        )
        thetas = elite.mean(0) + 1.2 * noise
        bar.update()
    return elite[: settings.num_starts]


def _descend(rng_key, distance, starts: Float[Array, "b d"], prior_sd, settings: Localization) -> tuple[np.ndarray, np.ndarray]:
    """Adam on theta -> SW(tau(theta, Z_b), data), Z_b the b-th fixed key; a coordinate without a gradient stays."""
    optimizer = optax.adam(optax.cosine_decay_schedule(settings.learning_rate, settings.num_steps))

    def one(start, key):
        def loss(u):
            return distance(start + prior_sd * u, key)

        def step(carry, _):
            u, state = carry
            gradient = jnp.nan_to_num(jax.grad(loss)(u))
            update, state = optimizer.update(gradient, state)
            return (u + update, state), None

        u = jnp.zeros_like(start)
        (u, _), _ = jax.lax.scan(step, (u, optimizer.init(u)), length=settings.num_steps)
        better = loss(u) <= loss(jnp.zeros_like(start))
        theta = jnp.where(better, start + prior_sd * u, start)
        return theta, loss((theta - start) / prior_sd)

    thetas, distances = jax.jit(jax.vmap(one))(starts, jax.random.split(rng_key, len(starts)))
    order = np.argsort(np.asarray(distances))
    return np.asarray(thetas)[order], np.asarray(distances)[order]

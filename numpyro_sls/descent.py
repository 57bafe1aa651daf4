"""Minimizers of theta -> d(tau(theta, Z_b), data), one for every fixed latent draw Z_b, all in one compiled program."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Bool, Float
import numpy as np
import optax

__all__ = ["Problem", "adam", "cross_entropy", "distances", "gauss_newton", "has_derivative"]


@dataclass(frozen=True, eq=False)
class Problem:
    """What is minimized: the mean absolute residual of a simulation from the data.

    ``view(rng_key)`` draws directions and cuts the data along them; ``residuals(theta, rng_key, view)`` compares a simulation
    with that. The prior is a further residual for every parameter, (theta - centre) / scale in units of ``noise``, the size of
    a residual by chance: what the data do not decide stays where the prior has it.
    """

    view: Callable[[Array], Any]
    residuals: Callable[[Array, Array, Any], Array]
    centre: Float[Array, " d"]
    scale: Float[Array, " d"]
    noise: float
    num_units: int  # simulated for one vector of residuals

    def distance(self, theta: Float[Array, " d"], rng_key: Array, view: Any) -> Float[Array, ""]:
        d = jnp.mean(jnp.abs(self.residuals(theta, rng_key, view)))
        return jnp.where(jnp.isfinite(d), d, jnp.inf)

    @cached_property
    def compiled_distances(self):
        def program(thetas, keys, rng_key):
            view = self.view(rng_key)
            return jax.lax.map(lambda a: self.distance(a[0], a[1], view), (thetas, keys), batch_size=BATCH)

        return jax.jit(program)

    def penalized(self, theta: Float[Array, " d"], rng_key: Array, view: Any) -> Float[Array, " r"]:
        """The residuals with those of the prior behind them."""
        return jnp.concatenate([self.residuals(theta, rng_key, view), self.noise * (theta - self.centre) / self.scale])

    def objective(self, theta: Float[Array, " d"], rng_key: Array, view: Any) -> Float[Array, ""]:
        d = jnp.mean(jnp.abs(self.penalized(theta, rng_key, view)))
        return jnp.where(jnp.isfinite(d), d, jnp.inf)


CHUNK = 32  # thetas in one call, whatever their number: one compilation
BATCH = 16  # restarts side by side: more would only fill the cache


def distances(problem: Problem, thetas: Float[Array, "b d"], keys: Array, rng_key: Array) -> Float[Array, " b"]:
    """The distance at every theta with the latent draw of its key, all along the same directions."""
    num = len(thetas)
    rows = np.minimum(np.arange(-(-num // CHUNK) * CHUNK), num - 1).reshape(-1, CHUNK)
    return jnp.concatenate([problem.compiled_distances(thetas[r], keys[r], rng_key) for r in rows])[:num]


def has_derivative(problem: Problem, thetas: Float[Array, "b d"], rng_key: Array) -> tuple[Bool[np.ndarray, " d"], int]:
    """Which coordinates the simulation's derivative sees, among those that move the simulation at all; and simulations made."""
    view = problem.view(rng_key)

    def jacobian(theta):
        return jnp.max(jnp.abs(jax.jacfwd(problem.residuals)(theta, rng_key, view)), axis=0)

    try:
        size = np.asarray(jax.jit(lambda t: jax.lax.map(jacobian, t))(thetas))
    except (TypeError, ValueError, NotImplementedError):
        return np.zeros(thetas.shape[1], bool), 0  # code outside JAX, or a function without a forward derivative
    seen = np.any((size > 0) & np.isfinite(size), axis=0)
    if seen.all():
        return seen, len(thetas)

    def change(theta):
        moved = jnp.concatenate([theta[None], theta + 0.5 * jnp.diag(problem.scale)])
        at = jax.lax.map(lambda t: problem.residuals(t, rng_key, view), moved)
        # Equal up to rounding is equal.
        return jnp.max(jnp.abs(at[1:] - at[0]), axis=1) > 1e-4 * (1 + jnp.max(jnp.abs(at[0])))

    moves = np.asarray(jax.jit(lambda t: jax.lax.map(change, t))(thetas))
    return seen | ~np.any(moves, axis=0), len(thetas) * (2 + thetas.shape[1])


def gauss_newton(
    problem: Problem, starts: Float[Array, "b d"], keys: Array, rng_key: Array, num_steps: int
) -> tuple[Float[Array, "b d"], Float[Array, "b 2 d d"]]:
    """Levenberg-Marquardt steps on the residuals, reweighted so that their absolute mean is minimized.

    Every step looks along fresh directions and is taken only if it helps along these. Also returned are the normal matrices
    at the last step, that of the data and that of data and prior, in prior sds.
    """
    d = starts.shape[1]

    def one(args, view):
        theta, damping, key = args
        r = problem.penalized(theta, key, view)
        jac = jax.jacfwd(problem.penalized)(theta, key, view) * problem.scale
        distance = jnp.mean(jnp.abs(r))
        # |r| = r^2 / |r|: the weights of least absolute deviations, bounded near zero
        weight = 1 / jnp.maximum(jnp.abs(r), 0.1 * distance + 1e-12)
        normal = jac.T @ (weight[:, None] * jac)
        by_data = jac[:-d].T @ (weight[:-d, None] * jac[:-d])
        size = jnp.trace(normal) / d + 1e-12
        step = -jnp.linalg.solve(normal + damping * size * jnp.eye(d), jac.T @ (weight * r))
        step = jnp.where(jnp.all(jnp.isfinite(step)), jnp.clip(step, -2.0, 2.0), 0.0)
        proposed = theta + problem.scale * step
        better = problem.objective(proposed, key, view) < jnp.where(jnp.isfinite(distance), distance, jnp.inf)
        damping = jnp.clip(jnp.where(better, 0.3 * damping, 4 * damping), 1e-5, 1e3)
        return jnp.where(better, proposed, theta), damping, jnp.stack([by_data, normal])

    def step(carry, key):
        view = problem.view(key)
        thetas, damping, normals = jax.lax.map(lambda a: one(a, view), (carry[0], carry[1], keys), batch_size=BATCH)
        return (thetas, damping, normals), None

    carry = (starts, jnp.full(len(starts), 0.1), jnp.zeros((len(starts), 2, d, d)))
    (thetas, _, normals), _ = jax.jit(partial(jax.lax.scan, step))(carry, jax.random.split(rng_key, num_steps))
    return thetas, normals


def adam(
    problem: Problem, starts: Float[Array, "b d"], keys: Array, rng_key: Array, num_steps: int, learning_rate: float
) -> Float[Array, "b d"]:
    """Adam on the distance with a decaying rate in prior sds, as the paper has it.

    The gradient is taken in forward mode: loops in the simulator do not matter, and a failed unit, which another one replaces,
    leaves no NaN behind.
    """
    optimizer = optax.adam(optax.cosine_decay_schedule(learning_rate, num_steps, alpha=0.01))

    def one(args, view):
        theta, state, key = args
        gradient = jax.jacfwd(problem.objective)(theta, key, view)
        update, state = optimizer.update(jnp.nan_to_num(gradient * problem.scale), state)
        return theta + problem.scale * update, state

    def step(carry, key):
        view = problem.view(key)
        return jax.lax.map(lambda a: one(a, view), (*carry, keys), batch_size=BATCH), None

    carry = (starts, jax.vmap(optimizer.init)(starts))
    (thetas, _), _ = jax.jit(partial(jax.lax.scan, step))(carry, jax.random.split(rng_key, num_steps))
    return thetas


def cross_entropy(
    problem: Problem, mean: Float[Array, " d"], covariance: Float[Array, "d d"], keys: Array, rng_key: Array, size: tuple[int, int]
) -> Float[Array, "b d"]:
    """A search without derivatives, for every latent draw by itself: draw, keep the nearest quarter, draw around them."""
    num_rounds, population = size
    num_elite = max(population // 4, 2)
    floor = 1e-6 * jnp.diag(problem.scale**2)

    def one(args):
        key, key_search = args

        def step(carry, key_step):
            mean, covariance = carry
            key_view, key_draw = jax.random.split(key_step)
            view = problem.view(key_view)
            noise = jax.random.multivariate_normal(key_draw, jnp.zeros_like(mean), covariance + floor, (population,), method="svd")
            thetas = mean + noise
            distance = jax.lax.map(lambda t: problem.objective(t, key, view), thetas, batch_size=BATCH)
            elite = thetas[jnp.argsort(distance)[:num_elite]]
            # Half of the old covariance stays, so that few draws do not shrink it to a line.
            spread = 0.5 * covariance + 0.5 * jnp.cov(elite.T).reshape(covariance.shape)
            return (elite.mean(0), spread), None

        return jax.lax.scan(step, (mean, covariance), jax.random.split(key_search, num_rounds))[0][0]

    return jax.jit(partial(jax.lax.map, one))((keys, jax.random.split(rng_key, len(keys))))

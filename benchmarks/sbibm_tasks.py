"""Seven tasks of sbibm as NumPyro models: one observation, the whole data set one unit; specifications in the reference data's README."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_sls import Simulated

__all__ = ["TASKS", "Task"]


class Task(NamedTuple):
    """A model of one observation, and the site that the reference posterior is about, in its own space."""

    model: Callable[[Array], None]
    draws: Callable[[dict[str, np.ndarray]], np.ndarray]


def _theta(samples: dict[str, np.ndarray]) -> np.ndarray:
    return np.asarray(samples["theta"])


def gaussian_linear(x):
    theta = numpyro.sample("theta", dist.Normal(0, 0.1**0.5).expand([10]).to_event(1))
    numpyro.sample("x", dist.Normal(theta, 0.1**0.5).to_event(1), obs=x)


def gaussian_linear_uniform(x):
    theta = numpyro.sample("theta", dist.Uniform(-1, 1).expand([10]).to_event(1))
    numpyro.sample("x", dist.Normal(theta, 0.1**0.5).to_event(1), obs=x)


def two_moons(x):
    theta = numpyro.sample("theta", dist.Uniform(-1, 1).expand([2]).to_event(1))
    angle = numpyro.sample("angle", dist.Uniform(-jnp.pi / 2, jnp.pi / 2))
    radius = numpyro.sample("radius", dist.Normal(0.1, 0.01))
    crescent = jnp.stack([radius * jnp.cos(angle) + 0.25, radius * jnp.sin(angle)])
    moved = jnp.stack([-jnp.abs(theta[0] + theta[1]), theta[1] - theta[0]]) / jnp.sqrt(2.0)
    numpyro.sample("x", Simulated(crescent + moved, event_dim=1), obs=x)


def slcp(x):
    theta = numpyro.sample("theta", dist.Uniform(-3, 3).expand([5]).to_event(1))
    s1, s2, rho = theta[2] ** 2, theta[3] ** 2, jnp.tanh(theta[4])
    covariance = jnp.array([[1.0, 0.0], [0.0, 0.0]]) * s1**2 + jnp.array([[0.0, 1.0], [1.0, 0.0]]) * rho * s1 * s2
    covariance += jnp.array([[0.0, 0.0], [0.0, 1.0]]) * s2**2 + 1e-6 * jnp.eye(2)
    points = dist.MultivariateNormal(theta[:2], covariance).expand([4]).to_event(1)
    z = numpyro.sample("points", points)
    numpyro.sample("x", Simulated(z.reshape(8), event_dim=1), obs=x)


def bernoulli_glm(data: Path) -> Callable:
    design = jnp.asarray(np.loadtxt(data / "sbibm/design_matrix.csv", delimiter=","))
    precision = jnp.asarray(np.loadtxt(data / "sbibm/prior_precision.csv", delimiter=","))

    def model(x):
        theta = numpyro.sample("theta", dist.MultivariateNormal(jnp.zeros(10), precision_matrix=precision))
        y = numpyro.sample("y", dist.Bernoulli(logits=design @ theta).to_event(1))
        numpyro.sample("x", Simulated(design.T @ y, event_dim=1), obs=x)

    return model


def _rk4(slope: Callable, start: Array, dt: float, num_kept: int, num_between: int) -> Array:
    """The path of an ordinary differential equation at its start and every ``num_between`` steps."""

    def step(y, _):
        k1 = slope(y)
        k2 = slope(y + dt / 2 * k1)
        k3 = slope(y + dt / 2 * k2)
        k4 = slope(y + dt * k3)
        return y + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4), None

    def keep(y, _):
        after, _ = jax.lax.scan(step, y, length=num_between)
        return after, y

    return jax.lax.scan(keep, start, length=num_kept)[1]


POPULATION = 1e6


def sir(x):
    beta = numpyro.sample("beta", dist.LogNormal(jnp.log(0.4), 0.5))
    gamma = numpyro.sample("gamma", dist.LogNormal(jnp.log(0.125), 0.2))

    def slope(y):
        new = beta * y[0] * y[1]
        return jnp.stack([-new, new - gamma * y[1]])

    path = _rk4(slope, jnp.array([1 - 1 / POPULATION, 1 / POPULATION]), 17 / 34, 10, 34)
    share = jnp.clip(path[:, 1], 1e-9, 1 - 1e-6)
    numpyro.sample("x", dist.Binomial(1000, share).to_event(1), obs=x)


def lotka_volterra(x):
    rates = numpyro.sample("theta", dist.LogNormal(jnp.array([-0.125, -3.0, -0.125, -3.0]), 0.5).to_event(1))
    a, b, c, d = rates

    def slope(y):  # of the logarithms, which keeps both positive
        prey, predator = jnp.exp(y)
        return jnp.stack([a - b * predator, d * prey - c])

    path = _rk4(slope, jnp.log(jnp.array([30.0, 1.0])), 2.1 / 84, 10, 84)
    numpyro.sample("x", dist.LogNormal(path.T.reshape(20), 0.1).to_event(1), obs=x)


def TASKS(data: Path) -> dict[str, Task]:
    """Every task by its name; one reads its design from the reference data."""

    def of_sir(samples: dict[str, np.ndarray]) -> np.ndarray:
        return np.stack([samples["beta"], samples["gamma"]], axis=1)

    return {
        "gaussian_linear": Task(gaussian_linear, _theta),
        "gaussian_linear_uniform": Task(gaussian_linear_uniform, _theta),
        "bernoulli_glm": Task(bernoulli_glm(data), _theta),
        "slcp": Task(slcp, _theta),
        "two_moons": Task(two_moons, _theta),
        "sir": Task(sir, of_sir),
        "lotka_volterra": Task(lotka_volterra, _theta),
    }

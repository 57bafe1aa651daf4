r"""mRNA transfection: a stochastic differential equation with random effects for every cell (paper, section 4.3).

Cell i has c_i = (log delta, log gamma, log k, log t0)_i ~ N(mu, diag(tau^2)). From (m, p) = (m0, 0) at t0 on,

    dm = -delta m dt + sqrt(delta m) dW1,    dp = (k m - gamma p) dt + sqrt(k m + gamma p) dW2,

by Euler-Maruyama, clipped at zero. Observed are log(scale p + offset) + N(0, sigma^2) at j / 6 hours, j = 1, ..., 180; before t0
p is zero. Only log m0 + log scale + mu_k is identified, not its three parts. `model` has the prior of the simulation study,
`real_model` that of the forty cells of Froehlich et al. (2018), with tau^-2 ~ Gamma(2, rate 1/2).
"""

from typing import Any

import flax.linen as nn
import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float
import numpyro
import numpyro.distributions as dist

from numpyro_sls.networks import SeparablePotential
from numpyro_sls.reparametrize import indicator
from numpyro_sls.training import Training

__all__ = ["INTERVAL", "NUM_TIMES", "SETTINGS", "TRUTH", "Cell", "identified", "model", "protein", "real_model", "simulate_data"]

NUM_TIMES = 180
INTERVAL = 1 / 6  # hours between observations
SUBSTEPS = 2  # Euler steps in an interval: dt = 1/12 h changes marginal means and sds by less than 0.03 against dt = 0.01 h
TRUTH: dict[str, Any] = {
    "log_m0": 5.7,
    "log_scale": 0.7,
    "log_offset": 2.08,
    "log_sigma": -1.6,
    "mu": jnp.array([-0.694, -3.0, 0.027, 0.0]),
    "log_tau": jnp.full(4, -1.15),
}
PRIOR_MEAN: dict[str, Any] = {**TRUTH, "log_m0": 5.0, "log_scale": 1.0, "log_offset": 3.0, "log_sigma": -1.5, "log_tau": jnp.full(4, -0.8)}
PRIOR_SD: dict[str, Any] = {
    "log_m0": 1.0,
    "log_scale": 1.0,
    "log_offset": 1.0,
    "log_sigma": 1.0,
    "mu": jnp.array([0.6, 0.5, 1.0, 1.0]),
    "log_tau": jnp.full(4, 0.5),
}


class Cell(nn.Module):
    """A series of 180 numbers, in 32."""

    @nn.compact
    def __call__(self, x: Float[Array, "m q"]) -> Float[Array, "m r"]:
        for _ in range(2):
            x = nn.silu(nn.Dense(128)(x))
        return nn.Dense(32)(x)


# A score of 180 numbers is learnt from what a cell says of its rates, and that is taught first. log_m0 has no joint score (the last
# molecules die out at once or not at all): what its implicit target needs is many thetas, with few cells each.
SETTINGS: dict[str, Any] = {
    "network": SeparablePotential(embedding=Cell(), moments=True),
    "focus": None,
    "training": Training(num_simulations=4_000_000, fresh=False, num_epochs=12, learning_rate=5e-3, num_thetas=256, num_per_theta=4),
}


REAL_MEAN: dict[str, Any] = {**PRIOR_MEAN, "log_sigma": -1.0, "mu": jnp.array([-1.0, -5.0, 0.5, 0.0])}
REAL_SD: dict[str, Any] = {**PRIOR_SD, "mu": jnp.array([1.0, 2.0, 1.0, 1.0])}


def model(x: Float[Array, "n 180"], substeps: int = SUBSTEPS) -> None:
    """Log fluorescence of n cells; the prior is that of the paper's simulation study."""
    shared, mu = _shared(PRIOR_MEAN, PRIOR_SD)
    log_tau = numpyro.sample("log_tau", dist.Normal(PRIOR_MEAN["log_tau"], PRIOR_SD["log_tau"]).to_event(1))
    _cells(x, shared, mu, jnp.exp(log_tau), substeps)


def real_model(x: Float[Array, "n 180"], substeps: int = SUBSTEPS) -> None:
    """The same cells under the prior of the paper's study of real data."""
    shared, mu = _shared(REAL_MEAN, REAL_SD)
    precision = numpyro.sample("precision", dist.Gamma(2.0, 0.5).expand([4]).to_event(1))
    log_tau = numpyro.deterministic("log_tau", -0.5 * jnp.log(precision))
    _cells(x, shared, mu, jnp.exp(log_tau), substeps)


def _shared(mean: dict[str, Any], sd: dict[str, Any]) -> tuple[list[Array], Float[Array, " 4"]]:
    """What all cells share, on the scale of the equations, and mu."""
    shared = [jnp.exp(numpyro.sample(k, dist.Normal(mean[k], sd[k]))) for k in ("log_m0", "log_scale", "log_offset", "log_sigma")]
    return shared, numpyro.sample("mu", dist.Normal(mean["mu"], sd["mu"]).to_event(1))


def _cells(x: Float[Array, "n 180"], shared: list[Array], mu: Float[Array, " 4"], tau: Float[Array, " 4"], substeps: int) -> None:
    """n cells, their rates and their noise."""
    m0, scale, offset, sigma = shared
    with numpyro.plate("cells", x.shape[0]):
        c = numpyro.sample("c", dist.Normal(mu, tau).to_event(1))
        noise = numpyro.sample("noise", dist.Normal().expand([NUM_TIMES * substeps, 2]).to_event(2))
        mean = jnp.log(scale * protein(c, noise, m0, substeps) + offset)
        numpyro.sample("x", dist.Normal(mean, sigma).to_event(1), obs=x)


def protein(c: Float[Array, "n 4"], noise: Float[Array, "n s 2"], m0: Float[Array, ""], substeps: int) -> Float[Array, "n 180"]:
    """Protein of n cells at the times of observation."""
    delta, gamma, k, t0 = jnp.exp(c.T)
    dt = INTERVAL / substeps

    def step(state, time_noise):
        m, p = state
        time, w = time_noise
        # A step counts from t0 on; the derivative of that is as wide as the grid.
        on = indicator(time - t0, steepness=4 / dt)
        m_new = m - delta * m * dt + _root(delta * m * dt) * w[:, 0]
        p_new = p + (k * m - gamma * p) * dt + _root((k * m + gamma * p) * dt) * w[:, 1]
        return (m + on * (jnp.maximum(m_new, 0.0) - m), p + on * (jnp.maximum(p_new, 0.0) - p)), p

    start = (jnp.broadcast_to(m0, t0.shape), jnp.zeros_like(t0))
    steps = noise.shape[1]
    (_, last), path = jax.lax.scan(step, start, ((jnp.arange(steps) + 0.5) * dt, jnp.moveaxis(noise, 1, 0)))
    # path[s] is the state before step s: time s dt
    return jnp.concatenate([path[substeps::substeps], last[None]]).T


def _root(x: Float[Array, " n"]) -> Float[Array, " n"]:
    """Square root with a derivative at zero."""
    return jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1.0)), 0.0)


def simulate_data(rng_key: Array, n: int = 200, substeps: int = SUBSTEPS) -> Float[Array, "n 180"]:
    """n cells at the truth."""
    key_c, key_w, key_x = jax.random.split(rng_key, 3)
    c = TRUTH["mu"] + jnp.exp(TRUTH["log_tau"]) * jax.random.normal(key_c, (n, 4))
    noise = jax.random.normal(key_w, (n, NUM_TIMES * substeps, 2))
    p = protein(c, noise, jnp.exp(TRUTH["log_m0"]), substeps)
    mean = jnp.log(jnp.exp(TRUTH["log_scale"]) * p + jnp.exp(TRUTH["log_offset"]))
    return mean + jnp.exp(TRUTH["log_sigma"]) * jax.random.normal(key_x, mean.shape)


def identified(params: dict[str, Array]) -> dict[str, Array]:
    """The ten combinations that the data decide: the three that only enter as a sum are given as that sum."""
    mu = jnp.asarray(params["mu"])
    return {
        "log_m0 + log_scale + mu_k": jnp.asarray(params["log_m0"]) + jnp.asarray(params["log_scale"]) + mu[..., 2],
        "log_offset": jnp.asarray(params["log_offset"]),
        "log_sigma": jnp.asarray(params["log_sigma"]),
        "mu_delta": mu[..., 0],
        "mu_gamma": mu[..., 1],
        "mu_t0": mu[..., 3],
        **{f"log_tau_{k}": jnp.asarray(params["log_tau"])[..., i] for i, k in enumerate(("delta", "gamma", "k", "t0"))},
    }

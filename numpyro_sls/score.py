"""The posterior score: prior score plus the sum over units of the debiased learned score, and its potential."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float
import numpy as np

from numpyro_sls.chart import Chart
from numpyro_sls.debias import MeanNetwork
from numpyro_sls.inputs import Layout, Standardizer
from numpyro_sls.marginals import Marginals
from numpyro_sls.networks import MOST_QUADRATIC, Network, products
from numpyro_sls.proposal import Proposal

__all__ = [
    "Chart",
    "DataTerms",
    "LearnedScore",
    "Local",
    "Mode",
    "PosteriorScore",
    "UnitScore",
    "find_mode",
    "local_log_likelihood",
    "no_local",
]


class UnitScore(NamedTuple):
    """A trained network with the coordinates that it was trained in; arrays only, so that it can be saved and traced."""

    weights: Any
    proposal: Proposal
    standardizer: Standardizer
    mean_weights: Any  # of the network that learnt E[s | theta]; None before debiasing
    moments: Float[Array, "q k"] | None = None  # E[c(x) | theta] of a separable network as a polynomial in theta


class Local(NamedTuple):
    """What is mended around one place, in delta = inverse (eta - centre), where the posterior of the data is about standard normal.

    With a layout, eta stands for the parameters' own values that it gives. The score of a unit in delta gets
    readout^T f(x) - offset - slope delta - third delta delta / 2, f the features of the network, and bend^T f(x) delta of the last
    few of them, where some units are out of the model's reach.
    """

    centre: Float[Array, " d"]
    factor: Float[Array, "d d"]
    inverse: Float[Array, "d d"]  # of the factor
    marginals: Marginals  # further features, counted here
    readout: Float[Array, "k d"]
    offset: Float[Array, " d"]
    slope: Float[Array, "d d"]
    layout: Layout | None = None
    bend: Float[Array, "q d d"] | None = None  # symmetric in the last two
    third: Float[Array, "d d d"] | None = None  # symmetric

    def place(self, eta: Float[Array, " d"]) -> Float[Array, " d"]:
        """Where eta lies."""
        return self.inverse @ ((eta if self.layout is None else self.layout(eta)) - self.centre)

    def in_delta(self, eta: Float[Array, " d"], score: Float[Array, "m d"]) -> Float[Array, "m d"]:
        """A score in eta as one in delta."""
        if self.layout is None:
            return score @ self.factor
        return jnp.linalg.solve(self.layout.derivatives(eta)[0].T, score.T).T @ self.factor

    def delta(self, eta: Float[Array, " d"]) -> Float[Array, " d"]:
        """The same, drawn in when it is far: what was measured near the posterior says nothing of places far from it."""
        delta = self.place(eta)
        return delta * (1 + (jnp.sum(delta**2) / self.reach**2) ** 4) ** -0.125

    @property
    def reach(self) -> float:
        """How far that is."""
        return REACH + np.sqrt(len(self.centre))

    def units(self, eta: Float[Array, " d"], features: Float[Array, "m k"]) -> Float[Array, "m d"]:
        """What it adds to the score of each unit, in eta."""
        delta, jacobian = self.delta(eta), jax.jacfwd(self.delta)(eta)
        read = features @ self.readout
        if self.bend is not None:
            read += features[:, -len(self.bend) :] @ (self.bend @ delta)
        # In two products: as one, with all but eta and the features constant, XLA 0.10 on a CPU returned what it had not computed.
        mean = self.offset + self.slope @ delta
        if self.third is not None:
            mean += 0.5 * self.third @ delta @ delta
        return read @ jacobian - mean @ jacobian


REACH = 4.0  # in posterior sds, beyond the usual length of delta


def no_local(centre: Float[Array, " d"], factor: Float[Array, "d d"], marginals: Marginals, num_features: int) -> Local:
    """A place where nothing is mended yet."""
    d = centre.shape[0]
    return Local(centre, factor, jnp.linalg.inv(factor), marginals, jnp.zeros((num_features, d)), jnp.zeros(d), jnp.zeros((d, d)))


class DataTerms(NamedTuple):
    """What the posterior of one data set needs beside the network."""

    summary: Array  # sum_i c(x_i) of a separable network; else the units themselves, standardized
    mean_summary: Array  # the same for the covariates, where the mean of the score depends on them
    features: Float[Array, " k"]  # sum_i f(x_i)
    num_units: Float[Array, ""]
    local: Local
    mode: Float[Array, " d"]  # theta
    factor: Float[Array, "d d"]  # theta = mode + factor @ delta has about unit sd, and is what the sampler moves in
    inverse: Float[Array, "d d"]
    low: Float[Array, " d"]  # of theta, where the data bound it
    high: Float[Array, " d"]
    radius: Float[Array, ""]  # of the trained region, in eta
    wall: Float[Array, ""]  # how steeply the potential rises outside it
    chart: Chart | None = None  # in which the sampler moves instead, where the posterior leans on the ends of intervals


@dataclass(frozen=True, eq=False)
class LearnedScore:
    """The functions that go with a `UnitScore`, in whitened coordinates eta."""

    network: Network
    mean_network: MeanNetwork

    def __getstate__(self) -> dict:
        return {f.name: getattr(self, f.name) for f in fields(self)}  # without what was compiled

    def mean(self, unit: UnitScore, eta: Float[Array, " d"], x: Float[Array, "m p"]) -> Float[Array, "m d"]:
        """h(eta) = E[s | theta], in the coordinates eta, for each unit with its covariates."""
        shared = jnp.zeros_like(eta) if unit.moments is None else jax.grad(self.log_partition, argnums=1)(unit, eta)
        if unit.mean_weights is None:
            return jnp.broadcast_to(shared, (x.shape[0], eta.shape[0]))
        return shared + self.mean_network.mean(unit.mean_weights, eta, unit.standardizer(x))

    def log_partition(self, unit: UnitScore, eta: Float[Array, " d"]) -> Float[Array, ""]:
        """A with grad A = E[c | theta] . grad phi: the integral of that from the centre to theta, by Gauss-Legendre.

        Along a line in the parameters' own values: along one in eta, what the measured moments lack of a gradient would grow
        without bound toward the ends of intervals.
        """
        moments, layout = unit.moments, self.layout(unit)
        assert moments is not None
        if layout is None:
            basis, start, end = partial(self.network.basis, unit.weights), jnp.zeros_like(eta), eta
        else:
            basis, start, end = partial(self.network.basis_at, unit.weights), layout(jnp.zeros_like(eta)), layout(eta)
        nodes, weights = np.polynomial.legendre.leggauss(NUM_NODES)

        def slope(t):
            at = start + t * (end - start)
            _, change = jax.jvp(basis, (at,), (end - start,))
            return (polynomial(at) @ moments) @ change

        return jnp.asarray(weights / 2, eta.dtype) @ jax.vmap(slope)(jnp.asarray((nodes + 1) / 2, eta.dtype))

    def polynomial(self, unit: UnitScore, eta: Float[Array, " d"]) -> Float[Array, " q"]:
        """The terms in which the moments are given, in the parameters' own values."""
        layout = self.layout(unit)
        return polynomial(eta if layout is None else layout(eta))

    def layout(self, unit: UnitScore) -> Layout | None:
        """How the network sees parameters in their own values, if some lie in intervals."""
        weights = unit.weights[0] if isinstance(unit.weights, list) else unit.weights
        return weights.get("layout")

    def raw(self, unit: UnitScore, eta: Float[Array, " d"], x: Float[Array, "m p"]) -> Float[Array, "m d"]:
        """The network's own score of each unit, not debiased."""
        return self.network.score(unit.weights, eta, unit.standardizer(x))

    def units(self, unit: UnitScore, eta: Float[Array, " d"], x: Float[Array, "m p"], local: Local | None = None) -> Float[Array, "m d"]:
        """The score of each unit, debiased over the whole region, and around one place if that is given."""
        score = self.raw(unit, eta, x) - self.mean(unit, eta, x)
        return score if local is None else score + local.units(eta, self.features(unit, x, local.marginals))

    def features(self, unit: UnitScore, x: Float[Array, "m p"], marginals: Marginals) -> Float[Array, "m k"]:
        """What a linear readout near the posterior uses of each unit."""
        f = jnp.concatenate([self.network.features(unit.weights, unit.standardizer(x)), marginals(x)], axis=-1)
        return f if marginals.rare is None else jnp.concatenate([f, marginals.is_rare(x)[:, None] * f, marginals.tails(x)], axis=-1)

    def total_features(self, unit: UnitScore, x: Float[Array, "n p"], marginals: Marginals, size: int = 50_000) -> Float[Array, " k"]:
        """Their sum over the data, in pieces."""
        parts = [self._total_features(unit, x[i : i + size], marginals) for i in range(0, len(x), size)]
        return sum(parts[1:], parts[0])

    def summarize(self, unit: UnitScore, x: Float[Array, "n p"], size: int = 50_000) -> tuple[Array, Array]:
        """What all later work needs of the data: the sums of c(x_i) and of those of the mean, in pieces, or the units themselves."""
        parts = [self._total_summaries(unit, x[i : i + size]) for i in range(0, len(x), size)]
        summary, mean = jax.tree.map(lambda *a: sum(a[1:], a[0]), *parts)
        return (summary if self.network.has_potential else unit.standardizer(x)), mean

    @cached_property
    def _total_features(self):
        return jax.jit(lambda unit, x, marginals: self.features(unit, x, marginals).sum(0))

    @cached_property
    def _total_summaries(self):
        network, mean_network = self.network, self.mean_network

        def total(unit, x):
            z = unit.standardizer(x)
            summary = network.summary(unit.weights, z, unit.proposal.dim).sum(0) if network.has_potential else jnp.zeros(0)
            return summary, jnp.zeros(0) if unit.mean_weights is None else mean_network.summary(unit.mean_weights, z)

        return jax.jit(total)

    def data_log_likelihood(self, unit: UnitScore, eta: Float[Array, " d"], data: DataTerms) -> Float[Array, ""]:
        """sum_i c(x_i) . phi(theta) - n A(theta), up to a constant."""
        log_likelihood = data.summary @ self.network.basis(unit.weights, eta)
        if unit.moments is not None:
            log_likelihood -= data.num_units * self.log_partition(unit, eta)
        if unit.mean_weights is not None:
            log_likelihood -= self.mean_network.log_partition(unit.mean_weights, eta, data.mean_summary)
        return log_likelihood + local_log_likelihood(eta, data)

    def data_score(self, unit: UnitScore, eta: Float[Array, " d"], data: DataTerms) -> Float[Array, " d"]:
        """The score of the whole data set."""
        if self.network.has_potential:
            return jax.grad(self.data_log_likelihood, argnums=1)(unit, eta, data)
        total = self.network.score(unit.weights, eta, data.summary).sum(0)
        if unit.mean_weights is not None:
            total -= self.mean_network.total(unit.mean_weights, eta, data.summary)
        return total * data.num_units / data.summary.shape[0] + jax.grad(local_log_likelihood)(eta, data)


NUM_NODES = 8
MOST_CUBIC = 5  # parameters, up to which the polynomial of the moments has third-order terms


def polynomial(values: Float[Array, " d"]) -> Float[Array, " q"]:
    """1, v_i, v_i v_j and, where these are few, v_i v_j v_k."""
    parts = [jnp.ones(1), values]
    if values.shape[0] <= MOST_QUADRATIC:
        parts.append(products(values))
    if values.shape[0] <= MOST_CUBIC:
        parts += [values[i] * products(values[i:]) for i in range(values.shape[0])]
    return jnp.concatenate(parts)


def local_log_likelihood(eta: Float[Array, " d"], data: DataTerms) -> Float[Array, ""]:
    """What is mended around the place of the data's local terms."""
    local = data.local
    delta = local.delta(eta)
    slope = data.num_units * local.slope
    if local.bend is not None:
        slope -= jnp.tensordot(data.features[-len(local.bend) :], local.bend, 1)
    third = 0.0 if local.third is None else data.num_units * (local.third @ delta @ delta @ delta) / 6
    return data.features @ local.readout @ delta - data.num_units * (local.offset @ delta) - 0.5 * delta @ slope @ delta - third


@dataclass(frozen=True, eq=False)
class PosteriorScore:
    """Potential and score of the posterior as functions of theta and of the data's terms."""

    learned: LearnedScore
    unit: UnitScore
    log_prior: Callable[[Array], Array]

    def potential(self, theta: Float[Array, " d"], data: DataTerms) -> Float[Array, ""]:
        """Negative log posterior density, up to a constant; outside the trained region a wall is added."""
        eta = self.unit.proposal.whiten(theta)
        potential = -self.log_prior(theta) - self.learned.data_log_likelihood(self.unit, eta, data) + self._wall(theta, data)
        return jnp.where(self.possible(theta, data), potential, jnp.inf)

    def score(self, theta: Float[Array, " d"], data: DataTerms) -> Float[Array, " d"]:
        """Gradient of the log posterior density in theta."""
        return jax.grad(self.log_prior)(theta) + self.likelihood_score(theta, data)

    def likelihood_score(self, theta: Float[Array, " d"], data: DataTerms) -> Float[Array, " d"]:
        """That of the log likelihood of the data alone, with the wall around the trained region."""
        proposal = self.unit.proposal
        score = proposal.score_in_theta(theta, self.learned.data_score(self.unit, proposal.whiten(theta), data))
        return score - jax.grad(self._wall)(theta, data)

    def log_likelihood(self, theta: Float[Array, " d"], data: DataTerms) -> Float[Array, ""]:
        """Up to a constant, with a gradient that is the learned score.

        Without a potential it is the integral of the score along the line from the mode, by Gauss-Legendre.
        """
        if self.learned.network.has_potential:
            value = self.learned.data_log_likelihood(self.unit, self.unit.proposal.whiten(theta), data) - self._wall(theta, data)
            return jnp.where(self.possible(theta, data), value, -jnp.inf)
        nodes, weights = np.polynomial.legendre.leggauss(NUM_NODES)

        @jax.custom_jvp
        def integral(t):
            scores = jax.vmap(lambda a: self.likelihood_score(data.mode + a * (t - data.mode), data))(jnp.asarray((nodes + 1) / 2, t.dtype))
            return jnp.asarray(weights / 2, t.dtype) @ (scores @ (t - data.mode))

        @integral.defjvp
        def _(primals, tangents):
            return integral(primals[0]), self.likelihood_score(primals[0], data) @ tangents[0]

        return integral(theta)

    def possible(self, theta: Float[Array, " d"], data: DataTerms) -> Array:
        """Whether the data allow theta at all."""
        return jnp.all((theta >= data.low) & (theta <= data.high))

    def outside(self, theta: Float[Array, " d"], data: DataTerms) -> Array:
        """Whether theta has left the region that the score was trained on, or all that its Gaussian approximation allows."""
        return jnp.any(self._excess(theta, data) > 0)

    def _excess(self, theta: Float[Array, " d"], data: DataTerms) -> Float[Array, " 2"]:
        eta, delta = self.unit.proposal.whiten(theta), data.inverse @ (theta - data.mode)
        lengths = jnp.stack([jnp.sum(eta**2) / data.radius**2, jnp.sum(delta**2) / (FARTHEST + jnp.sqrt(len(delta))) ** 2])
        return jnp.maximum(lengths - 1, 0.0)

    def _wall(self, theta: Float[Array, " d"], data: DataTerms) -> Float[Array, ""]:
        return data.wall * jnp.sum(self._excess(theta, data) ** 2)


FARTHEST = 15.0  # posterior sds: with many units the region is wider, and a score that is a little wrong there, times n, can make a mode of nothing


class Mode(NamedTuple):
    """Where the posterior score vanishes, the Cholesky factor of the inverse information there, and how near it came."""

    theta: Float[Array, " d"]
    factor: Float[Array, "d d"]  # in theta
    eta: Float[Array, " d"]
    eta_factor: Float[Array, "d d"]  # the same in eta
    gap: Float[Array, ""]  # length of the last Newton step, in posterior sds
    outside: Float[Array, ""] | None = None  # share of the posterior outside the trained region, where draws have told it


MAX_STEP = 0.5  # of Newton's method, in sds of the proposal
NUM_NEWTON = 60


def find_mode(posterior: PosteriorScore, data: DataTerms, trust: Float[Array, ""] | float = jnp.inf) -> Mode:
    """Newton's method on the posterior score from the centre of the local terms, with steps of bounded length.

    It goes no farther than ``trust`` from where those were measured, in posterior sds.
    """
    proposal = posterior.unit.proposal
    origin, frame = proposal.frame()
    bounded = jnp.any(jnp.isfinite(data.low) | jnp.isfinite(data.high))

    def score_fn(e):  # theta = origin + frame @ e: about the coordinates eta
        return frame.T @ posterior.score(origin + frame @ e, data)

    def newton(e):
        score, jacobian = score_fn(e), jax.jacfwd(score_fn)(e)
        # Where the score cannot be computed, nothing moves, and the gap says that no mode was found.
        fine = jnp.all(jnp.isfinite(jacobian)) & jnp.all(jnp.isfinite(score))
        score, jacobian = jnp.where(fine, score, jnp.nan), jnp.where(fine, jacobian, -jnp.eye(len(e)))
        values, vectors = jnp.linalg.eigh(-(jacobian + jacobian.T) / 2)
        # A direction without information has at least a tenth of the proposal's own.
        values = jnp.maximum(jnp.abs(values), 0.1)
        return score, values, vectors

    def step(e, _):
        score, values, vectors = newton(e)
        move = vectors @ (vectors.T @ score / values)
        length = jnp.linalg.norm(move)
        move = jnp.where(jnp.all(jnp.isfinite(move)), move * jnp.minimum(1.0, MAX_STEP / jnp.maximum(length, 1e-12)), 0.0)
        e = inside(e + move)
        # Outside the region the score was never trained, and whatever vanishes there is not a mode.
        return e * jnp.minimum(1.0, (data.radius - 1.0) / jnp.maximum(jnp.linalg.norm(e), 1e-12)), None

    def inside(e):
        theta = origin + frame @ e
        distance = jnp.linalg.norm(data.inverse @ (theta - data.mode))
        theta = data.mode + (theta - data.mode) * jnp.minimum(1.0, trust / jnp.maximum(distance, 1e-12))
        margin = 0.01 * jnp.linalg.norm(frame, axis=1)
        return jnp.linalg.solve(frame, jnp.clip(theta, data.low + margin, data.high - margin) - origin)

    start = jnp.linalg.solve(frame, data.mode - origin)
    e, _ = jax.lax.scan(step, start, length=NUM_NEWTON)
    score, values, vectors = newton(e)
    gap = jnp.sqrt(jnp.sum((vectors.T @ score) ** 2 / values))
    # Against a bound the density falls off exponentially, at the rate of its score.
    precision = (vectors * values) @ vectors.T + jnp.where(bounded & jnp.isfinite(score).all(), jnp.outer(score, score), 0.0)
    values, vectors = jnp.linalg.eigh((precision + precision.T) / 2)
    # The Cholesky factor of the inverse, which single precision could not factorize where it is stiff.
    lower = jnp.linalg.qr((vectors / jnp.sqrt(jnp.maximum(values, 0.1))).T, mode="r").T
    factor = frame @ (lower * jnp.where(jnp.diag(lower) < 0, -1.0, 1.0))
    theta = origin + frame @ e
    return Mode(
        theta,
        factor,
        proposal.whiten(theta),
        proposal.inverse @ (proposal.slopes(theta)[:, None] * factor),
        jnp.where(bounded, 0.0, gap),
    )

"""Score networks on one unit: s(theta, x) and its divergence, many x sharing one theta."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float
import numpy as np

from numpyro_sls.inputs import NUM_VIEWS, Layout
from numpyro_sls.perceptron import MLP, forward_laplacian, hidden_layer

__all__ = ["MOST_QUADRATIC", "Ensemble", "MLPScore", "Network", "ScoreTerms", "SeparablePotential", "products"]

Weights = Any  # a pytree of arrays, as flax makes them


class ScoreTerms(NamedTuple):
    """What the objectives need of a network at one theta: s_j, and sum_j a_j d s_j / d theta_j, for every x."""

    score: Float[Array, "m d"]
    divergence: Float[Array, " m"]


class Curvature(NamedTuple):
    """What the second Bartlett identity needs at one theta, averaged over its x: E s, E s s^T and E grad s."""

    mean: Float[Array, " d"]
    outer: Float[Array, "d d"]
    jacobian: Float[Array, "d d"]


class Network:
    """What the stages below ask of a network; theta is whitened, x standardized.

    A network with a potential has ``summary`` and ``basis`` too, u(theta, x) = summary(x) . basis(theta).
    """

    has_potential: bool

    def init(self, rng_key: Array, dim: int, num_inputs: int, num_moments: int | None = None) -> Weights:
        raise NotImplementedError

    def score(self, weights: Weights, theta: Float[Array, " d"], x: Float[Array, "m q"]) -> Float[Array, "m d"]:
        raise NotImplementedError

    def terms(self, weights: Weights, theta: Float[Array, " d"], x: Float[Array, "m q"], along: Array) -> ScoreTerms:
        """Score and divergence with the weights ``along``, one a coordinate, (d,), or for every x its own, (m, d)."""
        raise NotImplementedError

    def probed(
        self, weights: Weights, theta: Float[Array, " d"], x: Float[Array, "m q"], along: Array, probe: Float[Array, " d"]
    ) -> ScoreTerms:
        """The same with the divergence estimated along one random direction, (a v) . (grad s) v (Hutchinson)."""
        score, change = jax.jvp(lambda t: self.score(weights, t, x), (theta,), (probe,))
        return ScoreTerms(score, jnp.sum(along * probe * change, axis=1))

    def curvature(self, weights: Weights, theta: Float[Array, " d"], x: Float[Array, "m q"], ok: Float[Array, " m"]) -> Curvature:
        share = ok / jnp.maximum(ok.sum(), 1)
        score = self.score(weights, theta, x)
        jacobian = jax.jacfwd(lambda t: share @ self.score(weights, t, x))(theta)
        return Curvature(share @ score, (share[:, None] * score).T @ score, jacobian)

    def summary(self, weights: Weights, x: Float[Array, "m q"], dim: int) -> Float[Array, "m k"]:
        raise NotImplementedError

    def basis(self, weights: Weights, theta: Float[Array, " d"]) -> Float[Array, " k"]:
        raise NotImplementedError

    def basis_at(self, weights: Weights, values: Float[Array, " d"]) -> Float[Array, " k"]:
        """The same where the parameters' own values are given, for networks that take a layout."""
        raise NotImplementedError

    def features(self, weights: Weights, x: Float[Array, "m q"]) -> Float[Array, "m f"]:
        """What of x a linear readout may use near the posterior; nothing unless the network says so."""
        return jnp.zeros((x.shape[0], 0))

    moments: bool = False  # whether something is to be taught before the score

    def moment_loss(self, weights: Weights, targets: Float[Array, "m k"], x: Float[Array, "m q"]) -> Float[Array, " m"]:
        """How far the embedding is from these numbers; its minimum over all functions of x is their means given x."""
        raise NotImplementedError

    def each(self, weights: Weights) -> list[tuple["Network", Weights]]:
        """The networks that are trained, each by its own loss."""
        return [(self, weights)]

    def with_layout(self, weights: Weights, layout: Layout) -> Weights:
        """First weights that know the parameters' own values, if the network can use them."""
        return weights

    @property
    def solvable(self) -> "SeparablePotential | None":
        """The network whose first weights can be solved for, if this is one or made of such."""
        return None

    def start_from(self, weights: Weights, solved: Float[Array, "r k"]) -> Weights:
        """First weights from what was solved for."""
        return weights


@dataclass(frozen=True)
class SeparablePotential(Network):
    """u(theta, x) = c(x) . phi(theta), s = grad_theta u: an exponential family in disguise.

    The sum over n units is the sum of c(x_i), done once, so that a draw costs the same for any n.

    :param num_features: learnt entries of phi, beyond theta itself and its products.
    :param quadratic: give phi the products theta_i theta_j too: near one place every smooth log likelihood is made of
        these; None: up to 16 parameters.
    :param width: units in each hidden layer.
    :param depth: hidden layers of each of the two networks.
    :param embedding: a flax module that turns the standardized numbers of m units, (m, p), into (m, r) features before c
        sees them: a convolution for a series, an image network. It reshapes as it needs.
    :param moments: teach the embedding first what E[theta | x] and E[theta^2 | x] are, by regression, and, unless the target is "implicit", the
        mean given x of the joint score; and let c see these 2 d or 3 d numbers only. For many numbers and few simulations: a score's
        noise is that of its targets; a mean's is much less.

    **Example:**

    >>> from numpyro_sls import SeparablePotential
    >>> SeparablePotential(num_features=16).has_potential
    True
    """

    num_features: int = 32
    width: int = 64
    depth: int = 2
    quadratic: bool | None = None
    embedding: nn.Module | None = None
    moments: bool = False
    has_potential = True

    def __post_init__(self):
        if self.moments and self.embedding is None:
            raise ValueError(
                "SeparablePotential(moments=True) teaches an embedding; give one: SeparablePotential(embedding=..., moments=True)."
            )

    def _num_products(self, dim: int) -> int:
        return dim * (dim + 1) // 2 if (dim <= MOST_QUADRATIC if self.quadratic is None else self.quadratic) else 0

    def _summary(self, dim: int) -> MLP:
        return MLP(self.num_features + dim + self._num_products(dim), self.width, self.depth, nn.silu)

    def _basis(self) -> MLP:
        # Smooth on purpose: the Laplacian of a kinked activation trains wrongly in silence.
        return MLP(self.num_features, self.width, self.depth, nn.tanh)

    def init(self, rng_key: Array, dim: int, num_inputs: int, num_moments: int | None = None) -> Weights:
        key_c, key_phi, key_skip, key_embed = jax.random.split(rng_key, 4)
        weights, embedded = _init_embedding(self.embedding, key_embed, num_inputs)
        if self.moments:
            num = num_moments or 2 * dim
            weights["moments"], embedded = nn.Dense(num).init(key_embed, jnp.zeros(embedded)), num
        return {
            **weights,
            "c": self._summary(dim).init(key_c, jnp.zeros(embedded)),
            "phi": self._basis().init(key_phi, jnp.zeros(dim)),
            "skip": 0.01 * jax.random.normal(key_skip, (embedded, self.num_features + dim + self._num_products(dim))),
        }

    def with_layout(self, weights: Weights, layout: Layout) -> Weights:
        return {**weights, "layout": layout}

    @property
    def solvable(self) -> "SeparablePotential":
        return self

    def moment_loss(self, weights: Weights, targets: Float[Array, "m k"], x: Float[Array, "m q"]) -> Float[Array, " m"]:
        return jnp.mean((self._moments(weights, x) - targets) ** 2, axis=1)

    def _moments(self, weights: Weights, x: Float[Array, "m q"]) -> Float[Array, "m k"]:
        """Of the targets, given x."""
        return jnp.asarray(
            nn.Dense(weights["moments"]["params"]["bias"].shape[0]).apply(weights["moments"], _embed(self.embedding, weights, x))
        )

    def _seen_of(self, weights: Weights, x: Float[Array, "m q"]) -> Float[Array, "m r"]:
        """What c sees of a unit."""
        return jax.lax.stop_gradient(self._moments(weights, x)) if self.moments else _embed(self.embedding, weights, x)

    def summary(self, weights: Weights, x: Float[Array, "m q"], dim: int) -> Float[Array, "m k"]:
        """c(x): what the score keeps of a unit."""
        x = self._seen_of(weights, x)
        return self._summary(dim).apply(weights["c"], x) + x @ weights["skip"]

    def features(self, weights: Weights, x: Float[Array, "m q"]) -> Float[Array, "m f"]:
        """The last hidden layer of c and its inputs: everything of which c(x) is a linear function."""
        x = self._seen_of(weights, x)
        return jnp.concatenate([hidden_layer(weights["c"], x, nn.silu), x], axis=-1)

    def basis(self, weights: Weights, theta: Float[Array, " d"]) -> Float[Array, " k"]:
        """phi(theta): what is learnt, theta itself and its products, all of its own values."""
        return self.basis_at(weights, theta if "layout" not in weights else jax.lax.stop_gradient(weights["layout"])(theta))

    def basis_at(self, weights: Weights, values: Float[Array, " d"]) -> Float[Array, " k"]:
        parts = [jnp.asarray(self._basis().apply(weights["phi"], values)), values]
        return jnp.concatenate([*parts, products(values)] if self._num_products(values.shape[0]) else parts)

    def terms(self, weights: Weights, theta: Float[Array, " d"], x: Float[Array, "m q"], along: Array) -> ScoreTerms:
        values, slope, bent = self._seen(weights, theta, along)
        learnt = forward_laplacian(weights["phi"], (values, slope.T, bent), along if along.ndim == 1 else None)
        given = self.derivatives(weights, theta, along)
        first, second = (jnp.concatenate(pair, axis=-1) for pair in zip(learnt, given, strict=True))
        c = self.summary(weights, x, theta.shape[0])
        return ScoreTerms(c @ first.T, c @ second if along.ndim == 1 else jnp.sum(along * (c @ second.T), axis=1))

    def derivatives(self, weights: Weights, theta: Float[Array, " d"], along: Array) -> tuple[Float[Array, "d k"], Array]:
        """Of the part of phi that is not learnt: first derivatives, and sum_j a_j d_jj, (k,), or for weights that depend on x each d_jj, (d, k)."""
        values, slope, bent = self._seen(weights, theta, along)
        if not self._num_products(theta.shape[0]):
            return slope.T, bent
        change = bent if along.ndim > 1 else self._seen(weights, theta, along[None])[2]
        i, j = np.triu_indices(theta.shape[0])
        half = jnp.where(i == j, 0.5, 1.0)
        first = half * (values[i] * slope[j].T + values[j] * slope[i].T)
        # d_aa of v_i v_j is 2 d_a v_i d_a v_j + v_i d_aa v_j + v_j d_aa v_i
        pure = half * (2 * (slope[i] * slope[j]).T + values[i] * change[:, j] + values[j] * change[:, i])
        second = along @ pure if along.ndim == 1 else pure
        return jnp.concatenate([slope.T, first], axis=1), jnp.concatenate([bent, second], axis=-1)

    def _seen(self, weights: Weights, theta: Float[Array, " d"], along: Array) -> tuple[Array, Float[Array, "d d"], Array]:
        """The values that phi sees, their first derivatives and, as in `derivatives`, their second ones."""
        if "layout" not in weights:
            values, slope, change = theta, jnp.eye(theta.shape[0]), jnp.zeros((theta.shape[0],) * 2)
        else:
            layout = jax.lax.stop_gradient(weights["layout"])
            values, (slope, change) = layout(theta), layout.derivatives(theta)
        return values, slope, along @ change.T if along.ndim == 1 else change.T

    def groups(self, weights: Weights, x: Float[Array, "m q"], dim: int) -> tuple[Float[Array, "m r"], list[tuple[np.ndarray, np.ndarray]]]:
        """Inputs with a constant in front, and nested groups of (inputs, entries of phi) whose coefficients can be solved for."""
        z = self._seen_of(weights, x)
        num = z.shape[1] if self.embedding is not None else z.shape[1] // NUM_VIEWS
        one, linear, others = np.arange(1), 1 + np.arange(num), 1 + np.arange(num, z.shape[1])
        values, given = np.arange(dim), np.arange(dim + self._num_products(dim))
        parts = [(one, given), (linear, values), (others, values), (linear, given[dim:])]
        f = jnp.concatenate([jnp.ones_like(z[:, :1]), z], axis=1)
        return f, [(a, b) for a, b in parts if len(a) and len(b)]

    def start_from(self, weights: Weights, solved: Float[Array, "r k"]) -> Weights:
        """First weights with these coefficients of the inputs, a constant before them, and nothing learnt beyond."""
        last = f"Dense_{self.depth}"
        c = weights["c"]["params"]
        none = jnp.zeros((solved.shape[0], self.num_features))
        both = jnp.concatenate([none, solved], axis=1)
        last_layer = {"kernel": jnp.zeros_like(c[last]["kernel"]), "bias": both[0]}
        return {**weights, "skip": both[1:], "c": {"params": {**c, last: last_layer}}}

    def score(self, weights: Weights, theta: Float[Array, " d"], x: Float[Array, "m q"]) -> Float[Array, "m d"]:
        return self.summary(weights, x, theta.shape[0]) @ jax.jacfwd(lambda t: self.basis(weights, t))(theta)

    def probed(
        self, weights: Weights, theta: Float[Array, " d"], x: Float[Array, "m q"], along: Array, probe: Float[Array, " d"]
    ) -> ScoreTerms:
        c = self.summary(weights, x, theta.shape[0])
        first, change = jax.jvp(jax.jacfwd(lambda t: self.basis(weights, t)), (theta,), (probe,))  # (k, d) each
        return ScoreTerms(c @ first, jnp.sum(along * probe * (c @ change), axis=1))

    def curvature(self, weights: Weights, theta: Float[Array, " d"], x: Float[Array, "m q"], ok: Float[Array, " m"]) -> Curvature:
        # E s s^T = G E[c c^T] G^T and E grad s = Hess(E[c] . phi): all x share one Hessian.
        share = ok / jnp.maximum(ok.sum(), 1)
        c = self.summary(weights, x, theta.shape[0])
        score = c @ jax.jacfwd(lambda t: self.basis(weights, t))(theta)
        mean = share @ c
        return Curvature(share @ score, (share[:, None] * score).T @ score, jax.hessian(lambda t: mean @ self.basis(weights, t))(theta))


@dataclass(frozen=True)
class MLPScore(Network):
    """One multilayer perceptron on (theta, x) for the whole score, as the paper has it; no potential.

    :param width: units in each hidden layer.
    :param depth: hidden layers.
    :param separate: a network of its own for every coordinate (the paper's mRNA setting).
    :param embedding: a flax module for x, as in `SeparablePotential`.

    **Example:**

    >>> from numpyro_sls import MLPScore
    >>> MLPScore(width=64, depth=3).has_potential
    False
    """

    width: int = 64
    depth: int = 3
    separate: bool = False
    embedding: nn.Module | None = None
    has_potential = False

    def _mlp(self, dim: int) -> MLP:
        return MLP(1 if self.separate else dim, self.width, self.depth, nn.elu)

    def init(self, rng_key: Array, dim: int, num_inputs: int, num_moments: int | None = None) -> Weights:
        key_mlp, key_embed = jax.random.split(rng_key)
        weights, embedded = _init_embedding(self.embedding, key_embed, num_inputs)
        start = jnp.zeros(dim + embedded)
        if self.separate:
            return {**weights, "mlp": jax.vmap(lambda key: self._mlp(dim).init(key, start))(jax.random.split(key_mlp, dim))}
        return {**weights, "mlp": self._mlp(dim).init(key_mlp, start)}

    def score(self, weights: Weights, theta: Float[Array, " d"], x: Float[Array, "m q"]) -> Float[Array, "m d"]:
        x = _embed(self.embedding, weights, x)
        joined = jnp.concatenate([jnp.broadcast_to(theta, (x.shape[0], *theta.shape)), x], axis=-1)
        mlp = self._mlp(theta.shape[0])
        if self.separate:
            return jax.vmap(lambda w: jnp.asarray(mlp.apply(w, joined))[:, 0], out_axes=1)(weights["mlp"])
        return jnp.asarray(mlp.apply(weights["mlp"], joined))

    def terms(self, weights: Weights, theta: Float[Array, " d"], x: Float[Array, "m q"], along: Array) -> ScoreTerms:
        def in_direction(direction):
            score, change = jax.jvp(lambda t: self.score(weights, t, x), (theta,), (direction,))
            return score, change @ direction

        score, diagonal = jax.vmap(in_direction, out_axes=(None, -1))(jnp.eye(theta.shape[0]))
        return ScoreTerms(score, jnp.sum(along * diagonal, axis=1))


@dataclass(frozen=True)
class Ensemble(Network):
    """The average of several networks, trained side by side on the same simulations from different first weights.

    :param network: what each member is.
    :param num_members: how many.

    **Example:**

    >>> from numpyro_sls import Ensemble, SeparablePotential
    >>> Ensemble(SeparablePotential(), num_members=3).has_potential
    True
    """

    network: Network
    num_members: int = 3

    def __post_init__(self):
        if self.num_members < 1:
            raise ValueError(f"Ensemble(num_members={self.num_members}) must be at least 1.")

    @property
    def has_potential(self) -> bool:  # type: ignore[override]
        return self.network.has_potential

    @property
    def moments(self) -> bool:  # type: ignore[override]
        return self.network.moments

    def init(self, rng_key: Array, dim: int, num_inputs: int, num_moments: int | None = None) -> Weights:
        return [self.network.init(key, dim, num_inputs, num_moments) for key in jax.random.split(rng_key, self.num_members)]

    def each(self, weights: Weights) -> list[tuple[Network, Weights]]:
        return [(self.network, w) for w in weights]

    def with_layout(self, weights: Weights, layout: Layout) -> Weights:
        return [self.network.with_layout(w, layout) for w in weights]

    @property
    def solvable(self) -> SeparablePotential | None:
        return self.network.solvable

    def start_from(self, weights: Weights, solved: Float[Array, "r k"]) -> Weights:
        return [self.network.start_from(w, solved) for w in weights]

    def score(self, weights: Weights, theta: Float[Array, " d"], x: Float[Array, "m q"]) -> Float[Array, "m d"]:
        return jnp.stack([self.network.score(w, theta, x) for w in weights]).mean(0)

    def summary(self, weights: Weights, x: Float[Array, "m q"], dim: int) -> Float[Array, "m k"]:
        return jnp.concatenate([self.network.summary(w, x, dim) for w in weights], axis=-1) / self.num_members

    def features(self, weights: Weights, x: Float[Array, "m q"]) -> Float[Array, "m f"]:
        return jnp.concatenate([self.network.features(w, x) for w in weights], axis=-1)

    def basis(self, weights: Weights, theta: Float[Array, " d"]) -> Float[Array, " k"]:
        return jnp.concatenate([self.network.basis(w, theta) for w in weights])

    def basis_at(self, weights: Weights, values: Float[Array, " d"]) -> Float[Array, " k"]:
        return jnp.concatenate([self.network.basis_at(w, values) for w in weights])


MOST_QUADRATIC = 16


def products(theta: Float[Array, " d"]) -> Float[Array, " q"]:
    """theta_i theta_j for i < j, and theta_j^2 / 2."""
    i, j = np.triu_indices(theta.shape[0])
    return jnp.where(i == j, 0.5, 1.0) * theta[i] * theta[j]


def _init_embedding(embedding: nn.Module | None, rng_key: Array, num_inputs: int) -> tuple[dict, int]:
    if embedding is None:
        return {}, num_inputs
    # Of the views of x that the standardizer gives, a module that knows series or images wants the linear one.
    out, variables = embedding.init_with_output(rng_key, jnp.zeros((2, num_inputs // NUM_VIEWS)))
    if jnp.ndim(out) != 2 or jnp.shape(out)[0] != 2:
        raise ValueError(
            f"embedding={type(embedding).__name__} turned an array of shape (2, {num_inputs // NUM_VIEWS}), two units, into {jnp.shape(out)}; "
            "it must return one row of features a unit, (2, r)."
        )
    return {"embedding": variables}, jnp.shape(out)[1]


def _embed(embedding: nn.Module | None, weights: Weights, x: Float[Array, "m q"]) -> Float[Array, "m r"]:
    return x if embedding is None else jnp.asarray(embedding.apply(weights["embedding"], x[:, : x.shape[1] // NUM_VIEWS]))

"""Where to look: parameters whose simulations resemble the data in sliced Wasserstein distance (paper, section 3.1)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float, Int
import numpy as np
from tqdm.auto import tqdm

from numpyro_sls.comparison import NUM_NOISE, Comparison, reparametrize
from numpyro_sls.descent import Problem, adam, cross_entropy, distances, gauss_newton, has_derivative
from numpyro_sls.reparametrize import Reparametrized
from numpyro_sls.units import Units

__all__ = ["Localization", "Localized", "LocalizedMode", "Resemblance", "localize"]

METHODS = ("gauss-newton", "adam", "search", "rounds")
MIN_POPULATION = 32


@dataclass(frozen=True)
class Localization:
    """How the region of parameters that matters is found.

    :param num_starts: restarts B, each with a latent draw of its own.
    :param method: "gauss-newton", "adam" (the paper) or "search" (no derivative); None: Gauss-Newton where the simulator has
        a derivative in every parameter, else the search. "rounds" does not search: short rounds of learning begin with the prior,
        each around the posterior of the one before, which spends least where only some thousand simulations are to be had.
    :param num_units: units simulated in the last comparisons; None: four times the data, at most 4096. With
        ``units="whole"`` it is data sets, whose summaries are averaged; None: 8.
    :param num_steps: steps of the coarse and of the fine descent; None: 24 and 28, for Adam 300 and 100.
    :param num_directions: fresh slices of the Wasserstein distance in every step.
    :param population: prior draws among which the starts are chosen, and draws in every round of the search.
    :param num_rounds: rounds of the search.
    :param learning_rate: of Adam, in prior sds; it decays to a hundredth.
    :param steepness: of the sigmoid that stands in for a discrete site's step (the paper: 500); None: its derivative is
        spread evenly between neighbouring values, which has less noise.
    :param summary: for ``units="whole"``: from the data set as one flat vector to the numbers that are compared; None: itself.

    **Example:**

    >>> from numpyro_sls import Localization
    >>> Localization(num_starts=100, method="adam").num_directions
    10
    """

    num_starts: int = 32
    method: str | None = None
    num_units: int | None = None
    num_steps: tuple[int, int] | None = None
    num_directions: int = 10
    population: int = 512
    num_rounds: int = 12
    learning_rate: float = 0.1
    steepness: float | None = None
    summary: Callable[[Array], Array] | None = None

    def __post_init__(self):
        if self.method is not None and self.method not in METHODS:
            raise ValueError(
                f"Localization(method={self.method!r}) is not known; use one of {METHODS}, or None to choose by the simulator."
            )
        if not 2 <= self.num_starts <= self.population:
            raise ValueError(f"Localization(num_starts={self.num_starts}) must lie between 2 and population={self.population}.")
        if self.population < MIN_POPULATION:
            raise ValueError(f"Localization(population={self.population}) must be at least {MIN_POPULATION}.")


class LocalizedMode(NamedTuple):
    """A group of restarts that no rise of the distance separates."""

    centre: Float[np.ndarray, " d"]
    distance: float  # of its best restart
    num_restarts: int


class Localized(NamedTuple):
    """What localization found, and how: print it."""

    centre: Float[Array, " d"]  # of the best mode
    covariance: Float[Array, "d d"]  # what as many units as the data leave open: the paper's proposal
    information: Float[Array, "d d"]  # of one unit, as far as the distance sees it
    thetas: Float[np.ndarray, "b d"]  # restarts kept, best first
    distances: Float[np.ndarray, " b"]
    dropped: Float[np.ndarray, "f d"]  # restarts that failed
    dropped_distances: Float[np.ndarray, " f"]
    modes: tuple[LocalizedMode, ...]
    method: str = ""
    no_derivative: tuple[str, ...] = ()  # parameters that the simulator's derivative does not see
    sites: Mapping[str, Reparametrized] = MappingProxyType({})
    num_simulated: int = 0  # units
    num_units: int = 1  # of the data

    def __str__(self) -> str:
        lines = [
            f"localization by {self.method}: {len(self.thetas)} restarts kept, {len(self.dropped)} dropped by their distance, "
            f"{len(self.modes)} mode{'s' * (len(self.modes) != 1)}; "
            f"{self.num_simulated} units simulated ({self.num_simulated / self.num_units:.4g} data sets)"
        ]
        lines += [f"  {name}: base noise {r.base}; {r.map}" for name, r in self.sites.items()]
        if self.no_derivative:
            lines.append(f"  no derivative in {', '.join(self.no_derivative)}")
        return "\n".join(lines)


STEPS = {"gauss-newton": (24, 28), "adam": (300, 100)}
LOCAL_SEARCH = (10, 32)  # rounds and draws for every latent draw by itself, after the common search
FAILED = 1.05  # times the distance that the best restart's theta has on the same latent draw
BARRIER = 1.5  # rise of the distance between two restarts that makes them two modes
GAP = 4.0  # times the usual gap between neighbouring restarts, to look for a second mode across it
NUM_LATENT = 8  # draws on which a theta is compared with the centre later
NUM_CANDIDATES = 12  # restarts among which the centre is chosen, each tried on as many latent draws


def localize(
    rng_key: Array,
    units: Units,
    observed: Float[Array, "n p"],
    prior: tuple[Float[Array, " d"], Float[Array, "d d"]],
    settings: Localization,
    progress_bar: bool = False,
) -> tuple[Localized, "Resemblance"]:
    """Descend from the prior draws nearest the data with one fixed latent draw each; drop what failed, name the modes.

    ``prior`` holds mean and covariance in unconstrained space; ``observed`` the units as the score will see them.
    """
    if settings.summary is not None and units.traced.unit_plate is not None:
        raise ValueError(
            f"Localization(summary=...) is for whole data sets; this model has units, the rows of the plate {units.traced.unit_plate!r}, which are compared "
            "one with another. Leave the summary out, or treat the data set as one unit with units='whole'."
        )
    key_problem, key_starts, key_coarse, key_fine, key_judge = jax.random.split(rng_key, 5)
    sampler, sites = reparametrize(units, settings.steepness)
    scale = jnp.sqrt(jnp.diag(prior[1]))
    comparison = Comparison(units, observed, sampler, (prior[0], scale), settings.num_units, settings.num_directions, settings.summary)
    spent = _Spent()
    bar = tqdm(total=4, desc="localization", disable=not progress_bar)

    draws = jax.jit(jax.vmap(units.parameters.sample_prior))(jax.random.split(key_starts, settings.population))
    coarse = comparison.problem(key_problem, draws[:NUM_NOISE], coarse=True)
    draws = draws[jnp.argsort(spent.distances(coarse, draws, jax.random.split(key_starts, len(draws)), key_starts))]
    starts, latent = draws[: settings.num_starts], jax.random.split(key_coarse, settings.num_starts)
    bar.update()

    seen, times = has_derivative(coarse, starts[:4], key_coarse)
    spent.count(coarse, times)
    method = settings.method or ("gauss-newton" if seen.all() else "search")
    if method != "search" and not seen.any():
        raise ValueError(
            f"Localization(method={method!r}) follows the simulator's derivative, and it has none. Leave method=None, or use method='search'."
        )
    num_steps = settings.num_steps or STEPS.get(method, (0, 0))
    if method == "search":
        thetas = _search(key_coarse, coarse, draws, latent, settings, spent)
    else:
        thetas, normals = _descend(key_coarse, method, coarse, starts, latent, num_steps[0], settings, spent)
    bar.update()
    best = thetas[jnp.argmin(spent.distances(coarse, thetas, latent, key_fine))]
    # Only now is it known where the noise of a whole data set's summary should be measured.
    fine = comparison.problem(key_fine, best[None], coarse=False)
    if method == "search":
        spread = jnp.cov(thetas.T).reshape(prior[1].shape) + 1e-4 * prior[1]
        thetas = cross_entropy(fine, best, spread, latent, key_fine, LOCAL_SEARCH)
        normals = jnp.broadcast_to(jnp.eye(len(scale)), (len(latent), 2, *prior[1].shape))
        spent.count(fine, len(latent) * LOCAL_SEARCH[0] * LOCAL_SEARCH[1])
    else:
        thetas, normals = _descend(key_fine, method, fine, thetas, latent, num_steps[1], settings, spent)
    bar.update()
    found = _judge(key_judge, coarse, fine, thetas, latent, normals, prior, observed.shape[0], spent)
    bar.update()
    bar.close()
    found = found._replace(
        method=method,
        no_derivative=tuple(label for label, s in zip(units.parameters.labels, seen, strict=True) if not s),
        sites=sites,
        num_simulated=spent.num_units + 2 * NUM_NOISE * comparison.is_whole,
        num_units=units.num_units,
    )
    return found, Resemblance(fine, found.centre, latent[:NUM_LATENT], key_judge)


class Resemblance(NamedTuple):
    """Whether simulations at some theta look like the data, measured against those at the centre of localization."""

    problem: Problem
    centre: Float[Array, " d"]
    latent: Array
    rng_key: Array

    @property
    def num_units(self) -> int:
        """Units simulated for one look."""
        return 2 * len(self.latent) * self.problem.num_units

    def ratio(self, theta: Float[Array, " d"]) -> float:
        """Distance at theta over distance at the centre, on the same latent draws and along the same directions."""
        both = jnp.repeat(jnp.stack([theta, self.centre]), len(self.latent), axis=0)
        at = distances(self.problem, both, jnp.concatenate([self.latent, self.latent]), self.rng_key)
        # Discrete data can be met exactly: a distance much below the noise is no better than one at it.
        there, here = at.reshape(2, -1).mean(1) + 0.1 * self.problem.noise
        return float(there / here)


@dataclass
class _Spent:
    """Units simulated so far."""

    num_units: int = 0

    def count(self, problem: Problem, times: int) -> None:
        self.num_units += problem.num_units * times

    def distances(self, problem: Problem, thetas: Float[Array, "b d"], keys: Array, rng_key: Array) -> Float[Array, " b"]:
        self.count(problem, len(thetas))
        return distances(problem, thetas, keys, rng_key)


def _descend(
    rng_key, method: str, problem: Problem, starts, latent, num_steps: int, settings: Localization, spent: _Spent
) -> tuple[Float[Array, "b d"], Float[Array, "b 2 d d"]]:
    """Minimizers and the normal matrices there; Adam ends with one step of the other method, which has them."""
    if method == "adam":
        spent.count(problem, num_steps * len(starts))
        starts, num_steps = adam(problem, starts, latent, rng_key, num_steps, settings.learning_rate), 1
    spent.count(problem, 2 * num_steps * len(starts))
    return gauss_newton(problem, starts, latent, rng_key, num_steps)


def _search(rng_key, problem: Problem, draws: Float[Array, "s d"], latent, settings: Localization, spent: _Spent) -> Float[Array, "b d"]:
    """Cross-entropy from the prior draws nearest the data, on a few latent draws; every restart gets one of the ends."""
    elite = draws[: max(settings.population // 10, 4)]
    size = (settings.num_rounds, settings.population // 4)
    ends = cross_entropy(problem, elite.mean(0), jnp.cov(elite.T).reshape(elite.shape[1], -1), latent[:4], rng_key, size)
    spent.count(problem, len(ends) * size[0] * size[1])
    return jnp.tile(ends, (-(-len(latent) // len(ends)), 1))[: len(latent)]


def _judge(rng_key, coarse: Problem, fine: Problem, thetas, latent, normals, prior, num_observed: int, spent: _Spent) -> Localized:
    """Which restarts failed, which modes the others form, and where the best of these lies."""
    key_distance, key_group = jax.random.split(rng_key)
    found = spent.distances(fine, thetas, latent, key_distance)
    best = jnp.broadcast_to(thetas[jnp.argmin(found)], thetas.shape)
    bar = FAILED * spent.distances(fine, best, latent, key_distance)
    failed = np.asarray(~(jnp.isfinite(found) & (found <= bar)))
    points, at = np.asarray(thetas), np.asarray(found)
    ranked = np.argsort(at)
    kept, dropped = ranked[~failed[ranked]], ranked[failed[ranked]]
    if len(kept) == 0:
        raise ValueError(
            "No restart of localization has a finite distance from the data: every simulation failed near the prior draws nearest the data. "
            "Check the simulator for NaN at prior draws, or narrow the prior."
        )
    group = _group(key_group, coarse, points[kept], spent)
    modes = [kept[group == g] for g in dict.fromkeys(group.tolist())]

    # The centre is the restart that does best on other latent draws too: a mean of restarts may lie off their ridge.
    candidates = modes[0][:NUM_CANDIDATES]
    pairs = jnp.repeat(thetas[candidates], len(candidates), axis=0), jnp.tile(latent[candidates], len(candidates))
    common = np.asarray(spent.distances(fine, *pairs, key_distance)).reshape(len(candidates), -1).mean(1)
    information = _information(points[modes[0]], np.asarray(normals)[modes[0]], np.sqrt(np.diag(prior[1])), fine.num_units)
    return Localized(
        centre=thetas[candidates[np.argmin(common)]],
        covariance=jnp.asarray(np.linalg.inv(np.linalg.inv(prior[1]) + num_observed * information)),
        information=jnp.asarray(information),
        thetas=points[kept],
        distances=at[kept],
        dropped=points[dropped],
        dropped_distances=at[dropped],
        modes=tuple(LocalizedMode(points[m[0]], float(at[m[0]]), len(m)) for m in modes),
    )


def _information(points: np.ndarray, normals: np.ndarray, scale: np.ndarray, num_units: int) -> Float[np.ndarray, "d d"]:
    """What one unit tells, from how the restarts scatter.

    Minimizers over different latent draws of m units scatter as V / m, V what one unit leaves open. The prior holds them
    together where the data do not: with A the normal matrix of the data, P that of the prior and K = (A + P)^-1 A the scatter
    is K V K' / m, so V^-1 = K' (m scatter)^-1 K, zero where nothing is decided.
    """
    d = len(scale)
    if len(points) < 3:
        return np.zeros((d, d))
    data, both = np.nan_to_num(normals).mean(0).astype(np.float64)
    # In coordinates where A + P is the identity the scatter is nearly round, however stiff it was, and can be drawn towards its
    # diagonal, the more the fewer the restarts it was estimated from.
    stiff = np.linalg.cholesky((both + both.T) / 2 + 1e-9 * np.trace(both) / d * np.eye(d))
    z = (points / scale).astype(np.float64) @ stiff
    scatter = np.cov(z.T).reshape(d, d)
    share = len(points) / (len(points) + 2 * d)
    scatter = share * scatter + (1 - share) * np.diag(np.diag(scatter)) + 1e-8 * np.mean(np.diag(scatter)) * np.eye(d)
    k = stiff.T @ np.linalg.solve(both, data)
    return k.T @ np.linalg.inv(num_units * scatter) @ k / np.outer(scale, scale)


def _group(rng_key, problem: Problem, thetas: np.ndarray, spent: _Spent) -> Int[np.ndarray, " b"]:
    """A number for every restart. Two groups differ if a gap parts them and the distance rises on the line across it."""
    label, bridges = _clusters(thetas)
    if not bridges:
        return label
    along = np.array([0.0, 0.25, 0.5, 0.75, 1.0])
    a, b = (thetas[list(side)] for side in zip(*bridges, strict=True))
    points = jnp.asarray(a[:, None] + along[:, None] * (b - a)[:, None]).reshape(-1, thetas.shape[1])
    total = np.zeros((len(bridges), len(along)))
    for key in jax.random.split(rng_key, 4):
        at = spent.distances(problem, points, jnp.broadcast_to(key, (len(points),)), key)
        total += np.asarray(at).reshape(total.shape)
    joined = total[:, 1:-1].max(1) <= BARRIER * total[:, [0, -1]].max(1)
    # A restart alone is a straggler, not a mode.
    alone = np.array([min(np.sum(label == label[i]), np.sum(label == label[j])) < 2 for i, j in bridges])
    for i, j in np.array(bridges)[joined | alone]:
        label[label == label[j]] = label[i]
    return label


def _clusters(points: Float[np.ndarray, "b d"]) -> tuple[Int[np.ndarray, " b"], list[tuple[int, int]]]:
    """Groups parted by edges of the minimal spanning tree that are much longer than the others, and these edges."""
    spread = np.subtract(*np.quantile(points, [0.75, 0.25], axis=0))
    z = points / np.where(spread > 0, spread, 1.0)
    gap = np.linalg.norm(z[:, None] - z, axis=-1)
    near, at, edges, left = gap[0].copy(), np.zeros(len(z), int), [], set(range(1, len(z)))
    while left:
        j = min(left, key=lambda i: near[i])
        edges.append((near[j], int(at[j]), j))
        left.remove(j)
        closer = gap[j] < near
        near, at = np.where(closer, gap[j], near), np.where(closer, j, at)
    longest = GAP * np.median([e[0] for e in edges]) if edges else 0.0
    label = np.arange(len(z))
    for length, i, j in edges:
        if length <= longest:
            label[label == label[j]] = label[i]
    return label, [(i, j) for length, i, j in edges if length > longest]

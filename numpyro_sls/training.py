"""The optax loop: batches from a stream or a table, validation, early stopping, progress. It knows arrays and a loss."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
import os
import time
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from tqdm.auto import tqdm

__all__ = ["LossCurve", "Speed", "Trainer", "Training", "make_trainer", "measure_speed", "progress", "train"]


MOST_EXACT = 24  # parameters, up to which an exact divergence costs less than its noise
FRESH_BATCHES, TABLE_BATCHES = 2000, 40  # the least that every stage can work with


@dataclass(frozen=True)
class Training:
    """How the score is trained.

    :param num_simulations: units that all of learning may simulate: first round, training, validation, debiasing.
        None: 4 million for training, and for debiasing what the size of the data demands.
    :param fresh: simulate units anew for every step, or make one table and go over it many times. None: anew, unless
        the budget is below 2000 batches.
    :param learning_rate: at the start; it decays to zero along a half cosine.
    :param num_thetas: parameter vectors in a batch.
    :param num_per_theta: units simulated at each of them; they share the work on theta.
    :param num_epochs: passes over the table at most, when it is not fresh.
    :param divergence: "exact" (forward Laplacian) or "probed" (Hutchinson: one random direction a theta); None: exact up to 24 parameters.
    :param patience: evaluations without a better held-out loss before training on a table stops.

    **Example:**

    >>> from numpyro_sls import Training
    >>> Training(num_simulations=100_000, fresh=False).patience
    10
    """

    num_simulations: int | None = None
    fresh: bool | None = None
    learning_rate: float = 1e-2
    num_thetas: int = 64
    num_per_theta: int = 16
    num_epochs: int = 50
    patience: int = 10
    divergence: str | None = None

    def __post_init__(self):
        if self.divergence not in (None, "exact", "probed"):
            raise ValueError(
                f"Training(divergence={self.divergence!r}) is not known; use 'exact', 'probed', or None to choose by the number of parameters."
            )
        least = (FRESH_BATCHES if self.fresh else TABLE_BATCHES) * self.batch_size
        if self.num_simulations is not None and self.num_simulations < least:
            kind = "a fresh stream" if self.fresh else "a table"
            raise ValueError(
                f"Training(num_simulations={self.num_simulations}, fresh={self.fresh}): {kind} needs at least {least}, in batches of {self.num_thetas} x {self.num_per_theta} units. "
                "Give more, or make the batches smaller: Training(num_simulations=..., num_thetas=16, num_per_theta=4)."
            )

    @property
    def is_fresh(self) -> bool:
        few = self.num_simulations is not None and self.num_simulations < FRESH_BATCHES * self.batch_size
        return not few if self.fresh is None else self.fresh

    def probes(self, dim: int) -> bool:
        """Whether the divergence is estimated."""
        return dim > MOST_EXACT if self.divergence is None else self.divergence == "probed"

    @property
    def batch_size(self) -> int:
        return self.num_thetas * self.num_per_theta


class LossCurve(NamedTuple):
    """Loss by step and held-out loss by evaluation, and how training ended."""

    steps: np.ndarray
    train: np.ndarray
    held_out: np.ndarray
    best: int  # index into steps
    outcome: str
    tally: int  # what came with the batches, summed over all steps


CHUNK = 50  # steps between two evaluations, in one compiled loop


class Trainer(NamedTuple):
    """The compiled parts of a training loop; whatever changes between two uses goes into their ``context``."""

    init: Callable[[Any], Any]
    run_chunk: Callable
    evaluate: Callable
    draw_chunk: Callable  # the batches of a chunk and nothing else, to know what they cost


class Speed(NamedTuple):
    """Of training, once compiled."""

    steps_per_second: float
    simulation: float  # share of the time that goes into making the batches

    def __str__(self) -> str:
        return f"{self.steps_per_second:.0f} steps a second, {100 * self.simulation:.0f} % of the time in simulation"


def make_trainer(
    loss_fn: Callable[[Any, Any, Any], Array],
    next_batch: Callable[[Array, Any], tuple[Any, Array]],
    held_out_fn: Callable[[Any, Any, Any], Array] | None = None,
) -> Trainer:
    """Compile ``loss_fn(weights, batch, context)`` over batches ``next_batch(rng_key, context) -> (batch, tally)``.

    ``held_out_fn`` is what is watched, where that is not the loss itself.
    """
    # Muon orthogonalizes the step of every weight matrix: on these networks it needs a third to a fifth of Adam's steps.
    optimizer = optax.contrib.muon(1.0)

    @jax.jit
    def run_chunk(weights, state, rng_key, context, first, total, learning_rate):
        def step(carry, i):
            weights, state = carry
            batch, tally = next_batch(jax.random.fold_in(rng_key, i), context)
            loss, gradient = jax.value_and_grad(loss_fn)(weights, batch, context)
            update, state = optimizer.update(gradient, state, weights)
            rate = learning_rate * 0.5 * (1 + jnp.cos(jnp.pi * (first + i) / total))
            weights = optax.apply_updates(weights, jax.tree.map(lambda u: rate * u, update))
            return (weights, state), (loss, tally)

        (weights, state), (losses, tallies) = jax.lax.scan(step, (weights, state), jnp.arange(CHUNK))
        return weights, state, losses.mean(), tallies.sum()

    @jax.jit
    def draw_chunk(rng_key, context):
        def step(total, i):
            batch, _ = next_batch(jax.random.fold_in(rng_key, i), context)
            return total + sum(jnp.sum(a, dtype=total.dtype) for a in jax.tree.leaves(batch)), None

        return jax.lax.scan(step, jnp.zeros(()), jnp.arange(CHUNK))[0]

    return Trainer(jax.jit(optimizer.init), run_chunk, jax.jit(held_out_fn or loss_fn), draw_chunk)


def measure_speed(trainer: Trainer, rng_key: Array, weights: Any, context: Any) -> Speed:
    """Time a chunk of steps, and of their batches alone, the faster of two runs after a first that compiles."""
    state = trainer.init(weights)
    whole = partial(trainer.run_chunk, weights, state, rng_key, context, 0, CHUNK, 1e-2)
    seconds = []
    for run in (whole, partial(trainer.draw_chunk, rng_key, context)):
        jax.block_until_ready(run())
        times = []
        for _ in range(2):
            start = time.perf_counter()
            jax.block_until_ready(run())
            times.append(time.perf_counter() - start)
        seconds.append(min(times))
    return Speed(CHUNK / seconds[0], seconds[1] / seconds[0])


def train(
    trainer: Trainer,
    rng_key: Array,
    weights: Any,
    held_out: Any,
    context: Any,
    num_steps: int,
    *,
    learning_rate: float = 1e-2,
    patience: int | None = None,
    description: str = "training",
    progress_bar: bool = False,
) -> tuple[Any, LossCurve]:
    """Minimize the trainer's loss. With ``patience``, stop early and return the weights with the least held-out loss.

    Without it, batches are a fresh stream that cannot be over-fitted: the last weights are the best, and to choose by a
    held-out loss would only choose its noise, which early weights exploit (implicit targets are that noisy).
    """
    num_chunks = max(1, num_steps // CHUNK)
    total = num_chunks * CHUNK
    state = trainer.init(weights)
    best, best_loss, best_at = weights, np.inf, -1
    curve, tally, outcome = [], 0, "ran its full length"
    if patience is not None:  # on a table the first weights compete: they may have been solved for
        best_loss = float(trainer.evaluate(weights, held_out, context))
        curve.append((best_loss, best_loss))
    bar = tqdm(range(num_chunks), desc=description, disable=not progress(progress_bar))
    for i in bar:
        key = jax.random.fold_in(rng_key, i)
        weights, state, loss, counted = trainer.run_chunk(weights, state, key, context, i * CHUNK, total, learning_rate)
        held_out_loss = float(trainer.evaluate(weights, held_out, context))
        curve.append((float(loss), held_out_loss))
        tally += int(counted)
        bar.set_postfix_str(f"held-out loss {held_out_loss:.4f}", refresh=False)
        if held_out_loss < best_loss or (patience is None and np.isfinite(held_out_loss)):
            best, best_loss, best_at = weights, held_out_loss, i
        if not np.isfinite(held_out_loss):
            outcome = f"stopped at step {(i + 1) * CHUNK}: the held-out loss is not finite"
            break
        if patience is not None and i - best_at >= patience:
            outcome = f"stopped early at step {(i + 1) * CHUNK}: no better held-out loss in {patience} evaluations"
            break
    bar.close()
    losses, held_out_losses = np.array(curve).T
    first = int(patience is None)
    steps = CHUNK * np.arange(first, len(curve) + first)
    return best, LossCurve(steps, losses, held_out_losses, best_at + 1 - first, outcome, tally)


def progress(asked: bool) -> bool:
    """Whether to show a bar: as NumPyro, never in CI."""
    return asked and "CI" not in os.environ and "PYTEST_XDIST_WORKER" not in os.environ

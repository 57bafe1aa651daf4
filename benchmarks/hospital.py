"""What the posterior of a hospital's rates really is: quantiles learnt from many more simulations than anyone would spend.

python -m benchmarks.hospital [--floors 5 10] [--simulations 200000] [--full]

No exact posterior is known. Each quantile of log beta given the summaries is what minimizes the pinball loss, whatever the shape of
the posterior; a network that treats all floors alike learns them from two hundred thousand hospitals under the prior. It is checked on
hospitals that it has not seen: an interval must cover as often as it says, over the prior and around the rates of the study.
"""

from functools import partial

import flax.linen as nn
import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.common import options, save
from numpyro_sls.models import epidemic

LEVELS = jnp.array([0.025, 0.16, 0.5, 0.84, 0.975])
BATCH, EPOCHS, RATE = 256, 16, 1e-3
HELD_OUT = 20_000
NEAR = 0.5  # sds of the prior, root mean square over rates, within which a held-out hospital's rates are near the study's


class Quantiles(nn.Module):
    """Five quantiles of every rate; floors are exchangeable, so that what is learnt of one serves all."""

    width: int = 96

    @nn.compact
    def __call__(self, s: Array) -> Array:  # (m, 52, J + 2) -> (m, 5, J + 2)
        floors, rooms = 5 * jnp.moveaxis(s[..., 1:-1], 1, 2), 5 * s[..., -1]
        both = jnp.concatenate([floors.mean(1), rooms], axis=-1)
        h = self._dense(jnp.concatenate([floors, self._spread(both, floors)], axis=-1))
        h = self._dense(jnp.concatenate([h, self._spread(h.mean(1), h)], axis=-1))
        g = self._dense(jnp.concatenate([h.mean(1), (h**2).mean(1), both], axis=-1))
        of_floors, of_others = nn.Dense(len(LEVELS))(h), nn.Dense(2 * len(LEVELS))(g).reshape(-1, 2, len(LEVELS))
        return jnp.moveaxis(jnp.concatenate([of_others[:, :1], of_floors, of_others[:, 1:]], axis=1), 1, 2)

    def _dense(self, x: Array) -> Array:
        return nn.silu(nn.Dense(self.width)(nn.silu(nn.Dense(self.width)(x))))

    def _spread(self, x: Array, like: Array) -> Array:
        return jnp.broadcast_to(x[:, None], (*like.shape[:2], x.shape[-1]))


@partial(jax.jit, static_argnums=(1, 2))
def simulate(rng_key: Array, num: int, floors: int) -> tuple[Array, Array]:
    """Rates under the prior, standardized, and the summaries of a hospital with each."""

    def one(key):
        key_beta, key_s = random.split(key)
        z = random.normal(key_beta, (floors + 2,))
        return z, epidemic.simulate_data(key_s, floors, jnp.exp(-3.0 + prior_sd(floors) * z))

    return jax.vmap(one)(random.split(rng_key, num))


def prior_sd(floors: int) -> float:
    """Of log beta."""
    return 1.0 if floors == 5 else 2.0


def pinball(weights, s: Array, z: Array) -> Array:
    """Its minimum over all functions of s is the quantile at every level."""
    off = z[:, None] - Quantiles().apply(weights, s)
    return jnp.mean(jnp.maximum(LEVELS[:, None] * off, (LEVELS[:, None] - 1) * off))


def learn(z: Array, s: Array) -> dict:
    """Weights after a few passes; with this many hospitals held-out and training loss agree."""
    weights = Quantiles().init(random.key(0), s[:2])
    steps = len(z) // BATCH
    optimizer = optax.adam(optax.cosine_decay_schedule(RATE, EPOCHS * steps))

    @jax.jit
    def epoch(weights, state, key):
        def step(carry, rows):
            weights, state = carry
            loss, gradient = jax.value_and_grad(pinball)(weights, s[rows], z[rows])
            update, state = optimizer.update(gradient, state)
            return (optax.apply_updates(weights, update), state), loss

        rows = random.permutation(key, len(z))[: steps * BATCH].reshape(steps, BATCH)
        (weights, state), losses = jax.lax.scan(step, (weights, state), rows)
        return weights, state, losses.mean()

    state = optimizer.init(weights)
    for i in range(EPOCHS):
        weights, state, loss = epoch(weights, state, random.key(i))
        print(f"pass {i + 1}: pinball loss {float(loss):.4f}", flush=True)
    return weights


def main() -> None:
    """Learn, check, and save the quantiles for the hospitals of the study."""
    found = options(__doc__, 50, 50, floors=[5, 10], simulations=200_000)
    for floors in found.floors:
        parts = [simulate(random.fold_in(random.key(7), i), 2000, floors) for i in range((found.simulations + HELD_OUT) // 2000)]
        z, s = (jnp.concatenate(a) for a in zip(*parts, strict=True))
        weights = learn(z[HELD_OUT:], s[HELD_OUT:])
        quantiles = jax.jit(partial(Quantiles().apply, weights))
        z_new, q = np.asarray(z[:HELD_OUT]), np.asarray(quantiles(s[:HELD_OUT]))
        within = (q[:, 0] <= z_new) & (z_new <= q[:, -1])
        truth = np.asarray(epidemic.TRUTH[floors])
        near = np.sqrt(np.mean((z_new - (np.log(truth) + 3.0) / prior_sd(floors)) ** 2, axis=1)) < NEAR
        save(
            "hospital_check",
            floors=floors,
            simulations=found.simulations,
            losses=[float(pinball(weights, s[a : a + HELD_OUT], z[a : a + HELD_OUT])) for a in (HELD_OUT, 0)],
            coverage=within.mean(0).tolist(),
            num_near=int(near.sum()),
            coverage_near=within[near].mean(0).tolist(),
        )
        for i in range(found.first, found.first + found.repetitions):
            z_quantiles = np.asarray(quantiles(epidemic.simulate_data(random.key(100 + i), floors)[None])[0])
            beta = np.exp(-3.0 + prior_sd(floors) * z_quantiles)
            low, middle, high = beta[0], beta[2], beta[-1]
            save(
                "hospital",
                seed=i,
                floors=floors,
                quantiles=np.stack([low, middle, high]).tolist(),
                width=(high - low).tolist(),
                error=np.abs(middle - truth).tolist(),
                covered=((low <= truth) & (truth <= high)).tolist(),
            )


if __name__ == "__main__":
    main()

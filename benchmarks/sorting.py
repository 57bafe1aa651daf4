"""The derivative of a sliced Wasserstein distance: packed order against jnp.sort, and numpy's sort for comparison.

python -m benchmarks.sorting
"""

import time

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

from numpyro_sls.distances import order


def seconds(fn, *args, repeats: int = 10) -> float:
    """Median time of a call, compiled before."""
    jax.block_until_ready(fn(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(fn(*args))
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def main() -> None:
    """16 restarts, 20 directions, 1000 units."""
    t = random.normal(random.key(0), (16, 20, 1000))
    data = jnp.sort(random.normal(random.key(1), t.shape), axis=-1)

    def packed(t):
        return jnp.mean(jnp.abs(jnp.take_along_axis(t, order(jax.lax.stop_gradient(t)), axis=-1) - data))

    def plain(t):
        return jnp.mean(jnp.abs(jnp.sort(t, axis=-1) - data))

    base = seconds(jax.jit(jax.grad(plain)), t)
    print(f"gradient through jnp.sort   {1e3 * base:.1f} ms")
    print(f"gradient by packed order    {1e3 * (fast := seconds(jax.jit(jax.grad(packed)), t)):.1f} ms, {base / fast:.1f} times as fast")
    host = np.asarray(t)
    print(f"numpy.sort, values only     {1e3 * seconds(lambda a: np.sort(a, axis=-1), host):.1f} ms")


if __name__ == "__main__":
    main()

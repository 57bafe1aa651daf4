"""The rivals on the queue and the regression: NLE, NPE and SNPE of the `sbi` package, rejection ABC by W1, synthetic likelihood.

make rivals TASK="queue --methods nle npe snpe abc bsl --rows 1000000"

They run in an environment of their own (.venv-rivals: sbi and torch beside this package), on the same simulators, data and
priors; the parameters are laid out on the line by the prior's normal quantiles, where that prior is standard normal.
"""

import argparse
from collections.abc import Callable
import time
from typing import NamedTuple

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

from benchmarks.common import covered, distances, options, save
from numpyro_sls import SLS
from numpyro_sls.metrics import ks, w1
from numpyro_sls.models import monotone, queue

GRID = jnp.linspace(0, 1, 101)


class Problem(NamedTuple):
    """One data set of a model whose prior is standard normal on the line."""

    x: np.ndarray  # (n, p), covariates behind the observations
    dim: int
    simulate: Callable  # rng_key, theta (k, d), m -> (k, m, p)
    constrain: Callable  # theta (k, d) -> what is compared, (k, q)
    exact: np.ndarray
    report: Callable  # draws of what is compared -> the figures of a row


def problem_of(task: str, i: int, options_: argparse.Namespace) -> Problem:
    """The i-th data set of a task, as `experiments` has it."""
    if task == "queue":
        reference = np.load(options_.data / "mg1/exact_posteriors.npz")
        x, exact = jnp.asarray(reference["x"][i], jnp.float32), reference["posterior"][i]
        model, truth = queue.model, np.array([queue.TRUTH[k] for k in ("theta1", "theta2", "theta3")])

        def compared(params):
            return jnp.stack([params["theta1"], params["theta2"], params["theta3"]])

        def report(draws):
            return {**covered(draws, truth), **distances(draws, exact)}
    elif task == "monotone":
        x = monotone.simulate_data(random.key(100 + i))
        basis = monotone.features(GRID)
        exact = np.asarray(monotone.exact_posterior(random.key(2), x)) @ np.asarray(basis).T
        model = monotone.model

        def compared(params):
            return basis @ params["theta"]

        def report(draws):
            distance = w1(draws, exact) * exact.std(0)
            return {"ks": float(ks(draws, exact).mean()), "w1": float(distance.mean())}
    else:
        raise ValueError(f"{task!r} is not known here; use queue or monotone.")
    return make_problem(model, x, compared, exact, report)


def make_problem(model: Callable, x: jax.Array, compared: Callable, exact: np.ndarray, report: Callable) -> Problem:
    """A model and its data, as the methods here want them."""
    units, _ = SLS(model, target="implicit", smoothing=False).units_of((x,), {})
    simulate = jax.jit(
        lambda key, theta, m: jax.vmap(lambda k, t: units.simulate_x(k, t, m))(random.split(key, len(theta)), theta), static_argnums=2
    )
    constrain = jax.jit(jax.vmap(lambda t: compared(units.parameters.constrain(t))))
    return Problem(np.asarray(units.observed()), units.parameters.dim, simulate, constrain, exact, report)


def prior_of(problem: Problem):
    """The standard normal of the line, for torch."""
    import torch

    return torch.distributions.MultivariateNormal(torch.zeros(problem.dim), torch.eye(problem.dim))


def run_nle(problem: Problem, seed: int, num_rows: int, num_draws: int) -> np.ndarray:
    """Masked autoregressive flow for one row, slice sampling over all of them."""
    from sbi.inference import NLE
    import torch

    torch.manual_seed(seed)
    theta = random.normal(random.key(seed), (num_rows, problem.dim))
    x = np.asarray(problem.simulate(random.key(seed + 1), theta, 1))[:, 0]
    scale = x.std(0)
    trainer = NLE(prior_of(problem), density_estimator="maf", show_progress_bars=False)
    trainer.append_simulations(torch.tensor(np.asarray(theta)), torch.tensor(x / scale))
    start = time.perf_counter()
    trainer.train(training_batch_size=1000, learning_rate=5e-4, max_num_epochs=30)
    print(f"NLE trained in {time.perf_counter() - start:.0f} s; slice sampling follows", flush=True)
    settings = {"method": "slice_np_vectorized", "num_chains": 20, "warmup_steps": 100, "thin": 2, "init_strategy": "proposal"}
    posterior = trainer.build_posterior(mcmc_method=settings.pop("method"), mcmc_parameters=settings)
    return posterior.sample((num_draws,), x=torch.tensor(problem.x / scale), show_progress_bars=False).numpy()


def run_npe(problem: Problem, seed: int, num_rows: int, num_draws: int, num_rounds: int = 1) -> np.ndarray:
    """Flow on an embedding that does not see the order of the rows; several rounds, each under the posterior before, are SNPE."""
    from sbi.inference import NPE
    from sbi.neural_nets import posterior_nn
    from sbi.neural_nets.embedding_nets import FCEmbedding, PermutationInvariantEmbedding
    import torch

    torch.manual_seed(seed)
    n, p = problem.x.shape
    num_sets = num_rows // n // num_rounds
    rows = FCEmbedding(input_dim=p, num_hiddens=128, num_layers=3, output_dim=128)
    embedding = PermutationInvariantEmbedding(rows, trial_net_output_dim=128, num_hiddens=100, num_layers=2, output_dim=20)
    prior = prior_of(problem)
    trainer = NPE(prior, density_estimator=posterior_nn("maf", embedding_net=embedding, z_score_x="none"), show_progress_bars=False)
    proposal, posterior, scale = prior, None, None
    for i in range(num_rounds):
        theta = proposal.sample((num_sets,))
        at = jnp.asarray(theta.numpy(), jnp.float32)
        keys = random.split(random.key(seed + i), -(-num_sets // AT_ONCE))
        x = np.concatenate([np.asarray(problem.simulate(k, at[j * AT_ONCE : (j + 1) * AT_ONCE], n)) for j, k in enumerate(keys)])
        scale = x.std((0, 1)) if scale is None else scale
        trainer.append_simulations(theta, torch.tensor(x / scale), proposal=None if i == 0 else proposal)
        trainer.train(training_batch_size=200, learning_rate=5e-4, max_num_epochs=100)
        posterior = trainer.build_posterior().set_default_x(torch.tensor(problem.x / scale)[None])
        proposal = posterior
    assert posterior is not None
    return posterior.sample((num_draws,), show_progress_bars=False).numpy()


def run_snpe(problem: Problem, seed: int, num_rows: int, num_draws: int) -> np.ndarray:
    """NPE in three rounds."""
    return run_npe(problem, seed, num_rows, num_draws, num_rounds=3)


AT_ONCE = 500  # data sets


KEPT = 0.01  # of the data sets, by ABC


def run_abc(problem: Problem, seed: int, num_rows: int, num_draws: int) -> np.ndarray:
    """The data sets nearest in W1, column by column in sds of the data, under the prior."""
    n = len(problem.x)
    theta = random.normal(random.key(seed), (num_rows // n, problem.dim))
    wanted = jnp.sort(jnp.asarray(problem.x), axis=0)
    scale = jnp.asarray(problem.x.std(0))
    near = jax.jit(lambda x: jnp.mean(jnp.abs(jnp.sort(x, axis=1) - wanted) / scale, axis=(1, 2)))
    found = [near(problem.simulate(random.key(seed + i), theta[i : i + AT_ONCE], n)) for i in range(0, len(theta), AT_ONCE)]
    order = np.argsort(np.concatenate(found))[: max(20, int(KEPT * len(theta)))]
    return np.asarray(theta)[np.random.default_rng(seed).choice(order, num_draws)]


NUM_SETS, NUM_CHAINS = 50, 10  # data sets for one synthetic likelihood


def run_bsl(problem: Problem, seed: int, num_rows: int, num_draws: int) -> np.ndarray:
    """Random-walk Metropolis on the normal likelihood of means and log sds, fitted to data sets simulated at every step."""
    n = len(problem.x)
    num_steps = max(10, num_rows // (n * NUM_SETS * NUM_CHAINS))

    def summaries(x):
        return jnp.concatenate([x.mean(-2), jnp.log(x.std(-2) + 1e-6)], axis=-1)

    own = summaries(jnp.asarray(problem.x))
    used = jnp.asarray(np.asarray(own) > -13)  # a constant column has no sd

    def log_density(key, theta):
        s = summaries(problem.simulate(key, jnp.broadcast_to(theta, (NUM_SETS, problem.dim)), n))
        s = jnp.where(used, s, 0.0)
        left, covariance = jnp.where(used, own, 0.0) - s.mean(0), jnp.cov(s.T) + 1e-8 * jnp.eye(s.shape[1])
        return -0.5 * left @ jnp.linalg.solve(covariance, left) - 0.5 * jnp.linalg.slogdet(covariance)[1] - 0.5 * theta @ theta

    def step(carry, key):
        theta, value = carry
        key_move, key_new, key_accept = random.split(key, 3)
        proposed = theta + 0.1 * random.normal(key_move, theta.shape)
        new = log_density(key_new, proposed)
        accept = jnp.log(random.uniform(key_accept)) < new - value
        carry = jax.tree.map(lambda a, b: jnp.where(accept, a, b), (proposed, new), carry)
        return carry, carry[0]

    def chain(key):
        start = random.normal(key, (problem.dim,))
        return jax.lax.scan(step, (start, log_density(key, start)), random.split(key, num_steps))[1]

    draws = np.asarray(jax.jit(lambda keys: jax.lax.map(chain, keys))(random.split(random.key(seed), NUM_CHAINS)))
    late = draws[:, num_steps // 3 :].reshape(-1, problem.dim)
    return late[np.random.default_rng(seed).choice(len(late), num_draws)]


METHODS = {"nle": run_nle, "npe": run_npe, "snpe": run_snpe, "abc": run_abc, "bsl": run_bsl}


def main() -> None:
    """Run the methods that were asked for on the data sets that were asked for."""
    found = options(__doc__, 5, 1, tasks=["queue"], methods=list(METHODS), rows=1_000_000)
    for task in found.tasks:
        for i in range(found.first, found.first + found.repetitions):
            problem = problem_of(task, i, found)
            for name in found.methods:
                start = time.perf_counter()
                theta = METHODS[name](problem, 10 * i, found.rows, 2000)
                draws = np.asarray(problem.constrain(jnp.asarray(theta, jnp.float32)))
                figures = problem.report(draws)
                save("rivals", problem=task, method=name, seed=i, units=found.rows, **figures, seconds=time.perf_counter() - start)


if __name__ == "__main__":
    main()

"""What the score is trained on: the implicit target, the joint one, and their blend coordinate by coordinate."""

from jax import Array
import jax.numpy as jnp
from jaxtyping import Bool, Float
import numpy as np

from numpyro_sls.networks import ScoreTerms

__all__ = ["TARGETS", "blend_loss", "joint_weights", "mean_zero_z"]

TARGETS = ("blend", "joint", "implicit")


def blend_loss(
    terms: ScoreTerms,
    joint_score: Float[Array, "m d"],
    eta: Float[Array, " d"],
    weights: Float[Array, " d"],
    ok: Bool[Array, " m"],
) -> Float[Array, ""]:
    """Score-matching loss at one theta, up to a constant that no network can change.

    With s the score, t the joint score, q the standard normal of eta and w the weight of the joint target:

        implicit:  1/2 s_j^2 + s_j d_j log q + d_j s_j         joint:  1/2 s_j^2 - s_j t_j
        blend:     1/2 s_j^2 - w_j s_j t_j + (1 - w_j) (s_j d_j log q + d_j s_j)
    """
    s, grad_log_q = terms.score, -eta
    each = 0.5 * s**2 - weights * s * joint_score + (1 - weights) * (s * grad_log_q + terms.diagonal)
    return jnp.sum(jnp.where(ok, each.sum(-1), 0.0)) / ok.shape[0]


def joint_weights(target: str, joint_valid: Bool[np.ndarray, " d"], joint_score: Float[Array, "m d"]) -> Float[Array, " d"]:
    """How much each whitened coordinate leans on the joint target: inverse variances, 1 / (1 + Var t_j).

    The noise of the implicit target is grad log q, of variance 1 in whitened coordinates.
    """
    valid = jnp.asarray(np.sort(joint_valid))  # the proposal puts the coordinates without one first
    if target == "implicit":
        return jnp.zeros(len(joint_valid))
    if target == "joint":
        return valid.astype(float)
    return jnp.where(valid, 1 / (1 + jnp.var(joint_score, axis=0)), 0.0)


def mean_zero_z(joint_score: Float[Array, "k m d"]) -> Float[Array, " d"]:
    """How far the mean of t is from zero, theta by theta, as one standard normal per coordinate.

    E[t | theta] = 0 wherever the joint score is valid. The k squared t-ratios have mean (m-1)/(m-3).
    """
    k, m, _ = joint_score.shape
    se = jnp.std(joint_score, axis=1, ddof=1) / jnp.sqrt(m)
    ratios = jnp.where(se > 0, jnp.mean(joint_score, axis=1) / jnp.where(se > 0, se, 1.0), 0.0) ** 2
    expected = (m - 1) / (m - 3)
    return (ratios.mean(0) - expected) / jnp.maximum(jnp.std(ratios, axis=0, ddof=1), 1.4) * jnp.sqrt(k)

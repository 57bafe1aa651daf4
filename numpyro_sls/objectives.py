"""What the score is trained on: the implicit target, the joint one, their blend, and the curvature penalty."""

from dataclasses import dataclass

from jax import Array
import jax.numpy as jnp
from jaxtyping import Bool, Float
import numpy as np

from numpyro_sls.networks import Curvature, ScoreTerms

__all__ = ["TARGETS", "CurvaturePenalty", "blend_loss", "curvature_loss", "joint_weights", "mean_zero_z", "residual"]

TARGETS = ("blend", "joint", "implicit")


@dataclass(frozen=True)
class CurvaturePenalty:
    """Ask for the second Bartlett identity, E[s s^T + grad s] = 0 at every theta, once the plain objective has converged.

    :param ladder: weights lambda_1 to try; the one with the least held-out score-matching loss is kept. 0 always competes.
    :param num_per_theta: units at each theta of the second table, from which the two expectations are estimated.
    :param num_thetas: thetas in a batch.
    :param num_simulations: units for all weights together, where ``Training(num_simulations=...)`` does not say.
    :param learning_rate: at the start of each.

    **Example:**

    >>> from numpyro_sls import CurvaturePenalty
    >>> CurvaturePenalty(ladder=(1e-3, 1e-2)).num_per_theta
    64
    """

    ladder: tuple[float, ...] = (1e-2, 1e-1, 1.0)
    num_per_theta: int = 64
    num_thetas: int = 32
    num_simulations: int = 2_000_000
    learning_rate: float = 3e-3

    def __post_init__(self):
        if not self.ladder or min(self.ladder) < 0:
            raise ValueError(f"CurvaturePenalty(ladder={self.ladder}) must hold at least one weight, none of them negative.")
        if self.num_per_theta < 4:
            raise ValueError(f"CurvaturePenalty(num_per_theta={self.num_per_theta}) must be at least 4.")


def blend_loss(
    terms: ScoreTerms,
    joint_score: Float[Array, "m d"],
    weights: Float[Array, " d"],
    scale: Float[Array, "*m d"],
    drift: Float[Array, "*m d"],
    share: Float[Array, " m"],
) -> Float[Array, ""]:
    """Score-matching loss at one theta, up to a constant that no network can change.

    With s the score, t the joint score, q the proposal, w the weight of the joint target and g the weight of a coordinate (1, or
    what makes the loss hold at a boundary: paper, Theorem 4):

        implicit:  g_j (1/2 s_j^2 + s_j d_j log q + d_j s_j) + s_j d_j g_j        joint:  g_j (1/2 s_j^2 - s_j t_j)
        blend:     the two, weighted by 1 - w_j and w_j.

    ``scale`` is g and ``drift`` is g d log q + d g; the divergence in ``terms`` has the weights g (1 - w) already. ``share`` is
    the weight of every unit.
    """
    s = terms.score
    each = jnp.sum(scale * (0.5 * s**2 - weights * s * joint_score) + (1 - weights) * s * drift, axis=-1) + terms.divergence
    return share @ each


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


def residual(curvature: Curvature) -> Float[Array, "d d"]:
    """E[s s^T + grad s], which should vanish."""
    return curvature.outer + curvature.jacobian


def curvature_loss(first: Curvature, second: Curvature) -> Float[Array, ""]:
    """|E[s s^T + grad s]|_F^2 (paper, eq. 7) from two independent halves of the units at one theta.

    The product of two independent estimates has the right mean; the square of one would add its variance.
    """
    return jnp.sum(residual(first) * residual(second))


def mean_zero_z(joint_score: Float[Array, "k m d"]) -> Float[Array, " d"]:
    """How far the mean of t is from zero, theta by theta, as one standard normal per coordinate.

    E[t | theta] = 0 wherever the joint score is valid. The k squared t-ratios have mean (m-1)/(m-3).
    """
    k, m, _ = joint_score.shape
    se = jnp.std(joint_score, axis=1, ddof=1) / jnp.sqrt(m)
    ratios = jnp.where(se > 0, jnp.mean(joint_score, axis=1) / jnp.where(se > 0, se, 1.0), 0.0) ** 2
    expected = (m - 1) / (m - 3)
    return (ratios.mean(0) - expected) / jnp.maximum(jnp.std(ratios, axis=0, ddof=1), 1.4) * jnp.sqrt(k)

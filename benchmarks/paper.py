"""What the paper reports of its experiments, to stand beside what is measured here (Jiang, Wang, Yang; tables of section 4 and appendix)."""

from typing import NamedTuple

__all__ = ["EPIDEMIC", "MONOTONE", "MRNA", "QUEUE", "SBIBM", "Reported"]


class Reported(NamedTuple):
    """Means over the paper's repetitions, a number for every parameter."""

    error: tuple[float, ...]  # of the posterior mean
    width: tuple[float, ...]  # of the 95 % interval
    covered: tuple[float, ...]


QUEUE = {  # theta1, theta2, theta3; 100 data sets
    "single-model": Reported((0.025, 0.044, 0.00379), (0.152, 0.283, 0.017), (0.98, 0.97, 0.94)),
    "n-model": Reported((0.002, 0.107, 0.00420), (0.011, 0.510, 0.021), (0.98, 0.95, 0.93)),
    "ABC": Reported((0.594, 0.259, 0.01172), (2.953, 4.117, 0.058), (1.0, 1.0, 1.0)),
    "BSL": Reported((0.328, 0.399, 0.00460), (2.663, 3.638, 0.029), (1.0, 1.0, 0.96)),
    "NPE": Reported((0.067, 0.201, 0.00448), (0.465, 1.018, 0.021), (1.0, 0.99, 0.94)),
    "NLE": Reported((0.025, 0.069, 0.00510), (0.080, 0.223, 0.016), (0.80, 0.78, 0.78)),
    "SNPE": Reported((0.050, 0.077, 0.00362), (0.249, 0.394, 0.017), (0.96, 0.97, 0.93)),
}

MONOTONE = {  # KS, W1 (x 100), coverage and width of the 95 % intervals of the curve; 10 data sets
    "single-model": (0.095, 0.210, 0.976, 0.034),
    "n-model": (0.159, 0.395, 0.985, 0.042),
    "ABC": (0.442, 1.884, 0.999, 0.097),
    "BSL": (0.516, 2.956, 0.944, 0.148),
    "NPE": (0.156, 0.347, 0.971, 0.037),
    "NLE": (0.329, 0.702, 0.827, 0.032),
}

EPIDEMIC = {  # by the number of floors: beta_0, the floors, the rooms; 100 and 50 data sets, "n-model"
    5: Reported(
        (0.010, 0.014, 0.014, 0.016, 0.023, 0.025, 0.015),
        (0.066, 0.074, 0.090, 0.104, 0.126, 0.138, 0.123),
        (0.98, 0.98, 1.0, 1.0, 0.98, 0.96, 1.0),
    ),
    10: Reported(
        (0.009, 0.017, 0.014, 0.022, 0.026, 0.028, 0.027, 0.030, 0.043, 0.039, 0.038, 0.020),
        (0.055, 0.127, 0.131, 0.128, 0.131, 0.138, 0.141, 0.160, 0.172, 0.174, 0.197, 0.110),
        (1.0, 0.94, 0.98, 0.98, 0.96, 0.98, 0.98, 0.94, 0.90, 0.94, 0.96, 0.94),
    ),
}

MRNA = {  # "Ours", 100 data sets, by combination as `models.mrna.identified` names them: error, width, coverage
    "log_m0 + log_scale + mu_k": (0.019, 0.116, 0.98),
    "log_offset": (0.004, 0.024, 0.98),
    "log_sigma": (0.004, 0.020, 0.97),
    "mu_delta": (0.017, 0.101, 0.95),
    "mu_gamma": (0.019, 0.092, 0.92),
    "mu_t0": (0.019, 0.089, 0.94),
    "log_tau_delta": (0.057, 0.265, 0.96),
    "log_tau_gamma": (0.039, 0.220, 0.97),
    "log_tau_k": (0.039, 0.223, 0.96),
    "log_tau_t0": (0.041, 0.200, 0.96),
}

SBIBM = {  # C2ST at 10^4 simulations, means over ten observations (Lueckmann et al., 2021): NLE, NPE, SNLE, SNPE
    "gaussian_linear": (0.555, 0.552, 0.548, 0.544),
    "gaussian_linear_uniform": (0.548, 0.553, 0.552, 0.527),
    "bernoulli_glm": (0.605, 0.678, 0.553, 0.614),
    "sir": (0.748, 0.680, 0.745, 0.561),
    "lotka_volterra": (0.956, 0.997, 0.738, 0.953),
    "slcp": (0.771, 0.901, 0.713, 0.845),
    "two_moons": (0.713, 0.606, 0.571, 0.554),
}

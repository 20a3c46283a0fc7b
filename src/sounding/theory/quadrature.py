"""The expectations of `sounding.theory.integrals.quadrature` under the name by which users import them."""

from sounding.theory.integrals.quadrature import (
    Integral,
    gaussian_joint_mean,
    gaussian_mean,
    gaussian_pair_mean,
    sphere_joint_mean,
    sphere_mean,
    sphere_pair_mean,
)

__all__ = [
    "Integral", "gaussian_joint_mean", "gaussian_mean", "gaussian_pair_mean", "sphere_joint_mean", "sphere_mean",
    "sphere_pair_mean",
]  # fmt: skip

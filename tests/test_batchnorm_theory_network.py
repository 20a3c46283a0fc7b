"""The batch norm mean field against wide random networks through autograd."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sounding.activations import resolve
from sounding.theory.batchnorm import batchnorm
from tolerance import TOLERANCE

torch = pytest.importorskip("torch")


def run(name, *, size, width, depth, seed, eps=0.0, scale=1.0, shift=0.0):
    """Squared gradient norms at the pre-activations h_ℓ and the weights, and the last second moments over the batch."""
    generator = torch.Generator().manual_seed(seed)
    phi = resolve(name).torch()
    x = torch.randn(size, width, generator=generator, dtype=torch.float64)
    hidden, weights = [], []
    for _ in range(depth):
        weight = torch.randn(width, width, generator=generator, dtype=torch.float64) / math.sqrt(width)
        weights.append(weight.requires_grad_())
        h = x @ weight.T
        h.retain_grad()
        hidden.append(h)
        centred = h - h.mean(dim=0)
        x = phi(scale * centred / torch.sqrt((centred**2).mean(dim=0) + eps) + shift)
    target = torch.randn(size, width, generator=generator, dtype=torch.float64)
    (x * target).sum().backward()
    gram = (x @ x.T / width).detach().numpy()
    gradients = np.array([float((h.grad**2).sum()) for h in hidden])
    weight_gradients = np.array([float((w.grad**2).sum()) for w in weights])
    return gradients, weight_gradients, gram


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("relu", {}),
        ("tanh", {"eps": 0.3, "scale": 1.5, "shift": 0.2}),
        ("hardtanh", {"scale": 0.7, "shift": -0.4}),
    ],
)
def test_a_wide_network_has_the_predicted_fixed_point_and_growth(name, kwargs):
    """Width 800, batch 16: growth of activations' and weights' gradients over layers 6 to 20, two networks."""
    size, width, depth = 16, 800, 22
    found = batchnorm(name, batch_size=size, **kwargs)
    rates, weight_rates, variances, correlations = [], [], [], []
    for seed in range(2):
        gradients, weight_gradients, gram = run(name, size=size, width=width, depth=depth, seed=seed, **kwargs)
        rates.append((math.log(gradients[5]) - math.log(gradients[19])) / 14)
        weight_rates.append((math.log(weight_gradients[5]) - math.log(weight_gradients[19])) / 14)
        variance = np.trace(gram) / size
        variances.append(variance)
        correlations.append((gram.sum() - np.trace(gram)) / (size * (size - 1)) / variance)
    expected = math.log(found.gradient_growth)
    noise = 3 / math.sqrt(width * 14)
    assert np.mean(rates) == pytest.approx(expected, abs=noise + TOLERANCE.finite_width)
    assert np.mean(weight_rates) == pytest.approx(expected, abs=noise + TOLERANCE.finite_width)
    assert np.mean(variances) == pytest.approx(found.fixed_point.variance, rel=2 * TOLERANCE.finite_width)
    assert np.mean(correlations) == pytest.approx(found.fixed_point.correlation, abs=3 * TOLERANCE.finite_width)


@pytest.mark.slow
def test_growth_in_networks_over_batch_sizes():
    """ReLU at batch sizes 8, 32 and 64, eight networks each: the growth within half a percent."""
    for size in (8, 32, 64):
        found = batchnorm("relu", batch_size=size)
        rates = []
        for seed in range(8):
            gradients, _, _ = run("relu", size=size, width=1000, depth=30, seed=100 + seed)
            rates.append((math.log(gradients[5]) - math.log(gradients[27])) / 22)
        stderr = np.std(rates) / math.sqrt(len(rates))
        allowed = TOLERANCE.standard_errors * stderr + TOLERANCE.finite_width
        assert abs(np.mean(rates) - math.log(found.gradient_growth)) <= allowed

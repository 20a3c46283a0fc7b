"""Guard a repository: a test that fails when a change makes a network untrainable.

Run it: python docs/tutorials/guard_with_pytest.py. It makes a small repository in a temporary folder and runs its tests
before and after a careless change.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

# %% A network, as a repository might hold it.
NETWORK = """
from torch import nn

def make_network(depth=20, width=64):
    layers = []
    for _ in range(depth):
        linear = nn.Linear(width, width)
        nn.init.orthogonal_(linear.weight)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 10))
"""

# %% Its guard: the fixture `depth_check` comes with Sounding and fails the test where the verdict is unhealthy.
TEST = """
import torch
from network import make_network

def test_the_network_starts_healthy(depth_check):
    torch.manual_seed(0)
    report = depth_check(make_network(), torch.randn(64, 64), torch.arange(64) % 10)
    assert report.profile.value("gradient_growth", source="check").value < 1.5
"""

# %% Options for all tests of the repository.
SETTINGS = """
[tool.sounding]
theory = false
ignore = ["saturation"]
"""


def run_tests(folder: Path) -> subprocess.CompletedProcess[str]:
    """The outcome of `pytest` in a folder of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "sounding.pytest", str(folder)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    (folder / "network.py").write_text(NETWORK)
    (folder / "test_network.py").write_text(TEST)
    (folder / "pyproject.toml").write_text(SETTINGS)
    before = run_tests(folder)
    print(before.stdout.strip().splitlines()[-1])

    # %% Somebody removes the initialization ("PyTorch has a good default"). The guard says what that does.
    careless = NETWORK.replace("        nn.init.orthogonal_(linear.weight)\n", "")
    (folder / "network.py").write_text(careless)
    after = run_tests(folder)
    print("\n".join(line for line in after.stdout.splitlines() if "gradient" in line)[:600])

# %% What the lines above promise.
assert before.returncode == 0, before.stdout + before.stderr
assert after.returncode == 1, after.stdout + after.stderr
assert "gradient_vanishing" in after.stdout

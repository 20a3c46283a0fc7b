"""What all tests share: one thread per worker, one profile for hypothesis."""

from __future__ import annotations

import os
from importlib.util import find_spec

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("sounding", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("sounding")

# these two modules are classes of a trainer that an extra brings: without it there is nothing to import
collect_ignore = [
    f"../src/sounding/train/callbacks/{name}.py"
    for name, package in (("hf", "transformers"), ("lightning", "lightning"))
    if find_spec(package) is None
]

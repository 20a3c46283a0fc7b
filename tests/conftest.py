"""What all tests share: one thread per worker, one profile for hypothesis."""

from __future__ import annotations

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("sounding", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("sounding")

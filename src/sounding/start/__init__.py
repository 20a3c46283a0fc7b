"""A network before its first step: what its parameters are, what its loss is, and which gradients do not arrive."""

from sounding.start.audit import Audit, Place, audit
from sounding.start.compare import compare_paths

__all__ = ["Audit", "Place", "audit", "compare_paths"]

"""The blocks in which the forward measures of a step are reduced, kept from one measured step to the next."""

from __future__ import annotations

from sounding.probe.moments import Moments


class KeptMoments(Moments):
    """Moments for the passes of many steps, one after another.

    To lay out a block takes as long as to measure a small network. A few megabytes of them stay where they are; on a
    GPU, where they are hundreds and memory is scarce, they go.
    """

    def release(self) -> None:
        """Let go of the matrices and of threads, and of memory that others may want."""
        self._digest_all()
        self.blocks = {key: block for key, block in self.blocks.items() if key[3].type == "cpu"}
        self.known = {}  # sequences of all lengths would fill it
        self.spectra.close()

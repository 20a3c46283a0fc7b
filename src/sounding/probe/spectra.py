"""Eigenvalues of many small symmetric matrices, one matrix to a thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

WORKERS = 16  # threads at most, a limit that was not tuned
PIECE = 2**15  # entries handed to LAPACK at a time, which copies them
WORTHWHILE = 2**21  # n³ summed over the matrices, from which threads pay


class Spectra:
    """Decomposes stacks of symmetric matrices, on the CPU in as many threads as torch may use.

    LAPACK gains nothing from a second thread inside a matrix of a hundred rows (torch's own waits for it at every
    step), while two matrices at once take half the time.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def decompose(self, matrices: Tensor) -> Tensor:
        """The eigenvalues (matrices, n), ascending, of (matrices, n, n)."""
        count, n, _ = matrices.shape
        find: Callable[[Tensor], Tensor] = torch.linalg.eigvalsh
        if matrices.device.type != "cpu":
            return find(matrices)
        before = torch.get_num_threads()
        threads = min(before, WORKERS)
        pieces = torch.split(matrices, min(-(-count // threads), max(PIECE // n**2, 1)))
        if min(threads, count) < 2 or count * n**3 < WORTHWHILE:
            return torch.cat(list(map(find, pieces)))
        if self._pool is None:
            self._pool = ThreadPoolExecutor(threads, thread_name_prefix="sounding-spectra")
        torch.set_num_threads(1)  # one number for all threads, so it is set back
        try:
            return torch.cat(list(self._pool.map(find, pieces)))
        finally:
            torch.set_num_threads(before)

    def close(self) -> None:
        """Let the threads go."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

"""Works whose half in Python torch does not keep.

Before 2.8, where C++ calls a process group in Python, it keeps the C++ half of the Work that comes back. All of ours
is in the other half: if that is gone, C++ waits for ever.
"""

from __future__ import annotations

import sys
from collections import deque

from drumline.torch.work import DrumlineWork

# C++ asks for a future at once, or else only waits. So as many newer calls later an ended Work needs no tensors.
RECENT = 16

# So many Works without tensors are kept. C++ may hold as many for which nobody has waited.
WITHOUT_TENSORS = 10_000


class KeptWorks:
    """Keeps Works for C++, and their tensors while they may be asked for."""

    def __init__(self) -> None:
        self._recent: deque[DrumlineWork] = deque()
        self._with_tensors: deque[DrumlineWork] = deque()
        self._without: deque[DrumlineWork] = deque(maxlen=WITHOUT_TENSORS)

    def add(self, work: DrumlineWork) -> DrumlineWork:
        self._recent.append(work)
        if len(self._recent) > RECENT:
            self._with_tensors.append(self._recent.popleft())
        # Two for each that comes: so all are looked at, and no call takes long.
        for _ in range(min(2, len(self._with_tensors))):
            self._look(self._with_tensors.popleft())
        return work

    def _look(self, work: DrumlineWork) -> None:
        """Drops the tensors of a Work that only C++ may hold."""
        only_here = sys.getrefcount(work) <= _HERE
        (self._without if only_here and work.drop_tensors() else self._with_tensors).append(work)


class _Probe(KeptWorks):
    """Counts the references that `_look` has itself: how many there are differs with the interpreter."""

    count = 0

    def _look(self, work: object) -> None:
        self.count = sys.getrefcount(work)


def _references_here() -> int:
    probe = _Probe()
    probe._with_tensors.append(object())  # type: ignore[arg-type]
    probe._look(probe._with_tensors.popleft())
    return probe.count


_HERE = _references_here()

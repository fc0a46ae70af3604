"""How long the parts of a step take."""

from __future__ import annotations

from time import perf_counter_ns


class Times:
    """Times of the averaged steps, in nanoseconds."""

    def __init__(self) -> None:
        self._marks: dict[str, int] = {}
        self._parts: dict[str, int] = {}
        self._sums: dict[str, int] = {}
        self._steps = 0

    def mark(self, what: str) -> None:
        """``forward``, ``backward``, ``gradient`` (the first one) or ``gradients`` (the last one) is
        reached."""
        self._marks[what] = perf_counter_ns()

    def end_step(self) -> None:
        """All gradients are averaged."""
        marks, end = self._marks, perf_counter_ns()
        self._marks = {}
        first, last = marks.get("gradient", end), marks.get("gradients", end)
        backward = marks.get("backward", first)
        self._parts = {
            "forward_compute_time": backward - marks.get("forward", backward),
            "backward_compute_time": last - backward,
            "backward_comm_time": end - first,
            "backward_compute_comm_overlap_time": last - first,
        }
        self._steps += 1
        for name, part in self._parts.items():
            self._sums[name] = self._sums.get(name, 0) + part

    def table(self) -> dict[str, int]:
        """Times of the last step, and averages, under torch's names."""
        averages = {f"avg_{name}": it // self._steps for name, it in self._sums.items()}
        return {**self._parts, **averages}

"""What the wrapper tells of itself, as torch's does with TORCH_DISTRIBUTED_DEBUG.

``info``: its settings, when it is made. ``detail``: also how long the parts of a step take, in the first ten
steps and in every hundredth.
"""

from __future__ import annotations

import logging
from typing import Any

from drumline import _log
from drumline.ddp.logging_data import logging_data

_logger = logging.getLogger("drumline.ddp")
_FIRST_STEPS = 10
_TIMES = {
    "Avg forward compute time": "avg_forward_compute_time",
    "Avg backward compute time": "avg_backward_compute_time",
    "Avg backward comm. time": "avg_backward_comm_time",
    "Avg backward comm/comp overlap time": "avg_backward_compute_comm_overlap_time",
}


class Debug:
    """Tells of one wrapper. ``level`` is off, info or detail (DRUMLINE_DEBUG)."""

    def __init__(self, level: str) -> None:
        self._level = level
        self.every = 100
        """Which steps are told after the first ones."""

    def begin(self, model: Any) -> None:
        """Tells with which settings the wrapper was made."""
        if self._level == "off":
            return
        data = logging_data(model)
        settings = [f"{name}: {value}" for name, value in data.items()]
        _tell(f"[Rank {data['rank']}]: DDP Initialized with: \n" + "\n".join(settings))

    def end_step(self, model: Any) -> None:
        """Tells how long the steps have taken so far, in nanoseconds, if this step is one to tell."""
        step = model.reducer.steps - 1
        if self._level != "detail" or (step >= _FIRST_STEPS and step % self.every):
            return
        data = logging_data(model)
        times = [f" {title}: {data.get(name, 0)}" for title, name in _TIMES.items()]
        _tell(
            f"[Rank {data['rank']} / {data['world_size']}] [step {step}] Training {data['module_name']} "
            f"unused_parameter_size={data['unused_parameter_size']} \n" + "\n".join(times)
        )


def _tell(text: str) -> None:
    if _logger.level == logging.NOTSET:
        _logger.setLevel(logging.INFO)
    _log.say(_logger, logging.INFO, text)

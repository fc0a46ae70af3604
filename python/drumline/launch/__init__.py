"""The launcher, called from Python: torch's ``LaunchConfig``, ``elastic_launch`` and ``record``.

::

    from drumline.launch import LaunchConfig, elastic_launch

    def train(epochs):
        with drumline.init_process_group() as group:
            ...
            return group.rank

    if __name__ == "__main__":
        config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2)
        results = elastic_launch(config, train)(3)      # {0: 0, 1: 1}

A function runs in fresh processes, under ``drumline run``. So everything that the launcher does is there: restarts,
several hosts, logs, reports, and nothing that is left behind.
"""

from drumline.launch.agent import SignalException, elastic_launch, launch_agent
from drumline.launch.config import LaunchConfig
from drumline.launch.failures import ChildFailedError, ProcessFailure
from drumline.launch.logs import DefaultLogsSpecs, LogsSpecs, Std
from drumline.launch.recorded import ErrorHandler, get_error_handler, record

__all__ = [
    "ChildFailedError",
    "DefaultLogsSpecs",
    "ErrorHandler",
    "LaunchConfig",
    "LogsSpecs",
    "ProcessFailure",
    "SignalException",
    "Std",
    "elastic_launch",
    "get_error_handler",
    "launch_agent",
    "record",
]

"""What to launch, and how: torch's ``LaunchConfig``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from drumline.launch import logs


@dataclass
class LaunchConfig:
    """Fields, order and defaults are torch's, but for ``options``. [Launcher](docs/reference/launcher.md) explains the
    flags of ``drumline run``, which the fields become.
    """

    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    logs_specs: Any = None
    """A `LogsSpecs`, or torch's."""
    run_id: str = ""
    role: str = "default_role"
    rdzv_endpoint: str = ""
    rdzv_backend: str = "etcd"
    rdzv_configs: dict[str, Any] = field(default_factory=dict)
    """The keys of ``--rdzv-conf``, and ``rank``, which is ``--node-rank``."""
    rdzv_timeout: int = -1
    """Seconds; the old name of ``rdzv_configs["timeout"]``."""
    max_restarts: int = 3
    monitor_interval: float = 0.1
    """No effect."""
    start_method: str = "spawn"
    """No effect: ranks are fresh processes. ``fork`` and ``forkserver`` are taken."""
    log_line_prefix_template: str | None = None
    metrics_cfg: dict[str, str] = field(default_factory=dict)
    """No effect."""
    local_addr: str | None = None
    event_log_handler: str = "null"
    """No effect."""
    numa_options: Any = None
    """``"node"`` and so on, or torch's ``NumaOptions``."""
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    shutdown_timeout: int | None = None
    """Seconds; ``TORCH_ELASTIC_SHUTDOWN_TIMEOUT`` or 30 unless given."""
    options: Sequence[str] = ()
    """Further flags of ``drumline run``: ``["--restart-delay", "0"]``."""

    def __post_init__(self) -> None:
        if self.start_method not in ("spawn", "fork", "forkserver"):
            raise ValueError(
                f"start_method is {self.start_method!r}; it should be 'spawn', 'fork' or 'forkserver'"
            )
        if self.logs_specs is None:
            self.logs_specs = logs.LogsSpecs()
        if self.rdzv_timeout != -1:
            self.rdzv_configs["timeout"] = self.rdzv_timeout
        if self.shutdown_timeout is None:
            self.shutdown_timeout = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or 30)
        elif self.shutdown_timeout < 0:
            raise ValueError(f"shutdown_timeout must be non-negative, got {self.shutdown_timeout}")


def flags(config: LaunchConfig) -> list[str]:
    """The options of ``drumline run`` that say the same."""
    conf = dict(config.rdzv_configs)
    node_rank = conf.pop("rank", None)
    given = {
        "--nnodes": f"{config.min_nodes}:{config.max_nodes}",
        "--nproc-per-node": config.nproc_per_node,
        "--role": config.role,
        "--max-restarts": config.max_restarts,
        "--signals-to-handle": config.signals_to_handle,
        "--shutdown-timeout": config.shutdown_timeout,
        "--rdzv-backend": config.rdzv_backend or None,
        "--rdzv-endpoint": config.rdzv_endpoint or None,
        "--rdzv-id": config.run_id or None,
        "--rdzv-conf": ",".join(f"{key}={_plain(value)}" for key, value in conf.items()) or None,
        "--node-rank": node_rank,
        "--local-addr": config.local_addr or None,
        "--log-line-prefix-template": config.log_line_prefix_template,
        "--duplicate-stdout-filters": _filters(config.duplicate_stdout_filters),
        "--duplicate-stderr-filters": _filters(config.duplicate_stderr_filters),
        "--numa-binding": _numa_binding(config.numa_options),
    }
    words = [f"{name}={value}" for name, value in given.items() if value is not None]
    words += ["--virtual-local-rank"] if config.virtual_local_rank else []
    return [*words, *logs.flags(config.logs_specs), *config.options]


def _plain(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _filters(texts: Sequence[str] | None) -> str | None:
    return ",".join(text.replace(",", ",,") for text in texts) if texts else None


def _numa_binding(options: Any) -> str | None:
    mode = getattr(options, "affinity_mode", options)
    return None if mode is None else str(getattr(mode, "value", mode))

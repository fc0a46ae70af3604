"""With ``CI=true`` a test that is left out is a failure. Slow tests run with ``DRUMLINE_SLOW_TESTS=1``."""

from __future__ import annotations

import os

import pytest

IS_CI = os.environ.get("CI") == "true"
SLOW_TOO = os.environ.get("DRUMLINE_SLOW_TESTS", "0") != "0"


def pytest_collection_modifyitems(config, items):
    slow = [item for item in items if item.get_closest_marker("slow") and not SLOW_TOO]
    items[:] = [item for item in items if item not in slow]
    config.hook.pytest_deselected(items=slow)


def _left_out(report: pytest.TestReport | pytest.CollectReport) -> None:
    if IS_CI and report.skipped and not hasattr(report, "wasxfail"):
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome, report.longrepr = "failed", f"left out, although CI=true: {why}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    _left_out(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    _left_out(report)
    return report

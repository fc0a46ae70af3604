"""With ``CI=true`` a test that is left out is a failure. Slow tests run with ``DRUMLINE_SLOW_TESTS=1``."""

from __future__ import annotations

import os
import pathlib

import pytest

IS_CI = os.environ.get("CI") == "true"
SLOW_TOO = os.environ.get("DRUMLINE_SLOW_TESTS", "0") != "0"

# Of each file, whether this pytest runs it.
OWN_FILES = pytest.StashKey[dict[pathlib.Path, bool]]()


def pytest_addoption(parser):
    parser.addoption("--share", type=pathlib.Path, help="a folder; of those who share it, each runs files that no other has begun")


def pytest_configure(config):
    config.stash[OWN_FILES] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    """``True`` if another pytest runs it."""
    shared, own = item.config.getoption("--share"), item.config.stash[OWN_FILES]
    if shared and item.path not in own:
        try:
            (shared / item.path.name).touch(exist_ok=False)
            own[item.path] = True
        except FileExistsError:
            own[item.path] = False
    return None if own.get(item.path, True) else True


@pytest.hookimpl(trylast=True)  # after -k
def pytest_collection_modifyitems(config, items):
    chosen = [item for item in items if SLOW_TOO or not item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def pytest_generate_tests(metafunc):
    """A test that uses ``torch_base`` runs with drumline as each of what it can be for this torch."""
    if "torch_base" in metafunc.fixturenames:
        from torch_versions import BASES

        metafunc.parametrize("torch_base", BASES, indirect=True)


@pytest.fixture
def torch_base(request, monkeypatch):
    monkeypatch.setenv("DRUMLINE_TORCH_BASE", request.param)
    return request.param


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

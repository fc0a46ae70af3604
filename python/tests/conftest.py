"""With ``CI=true`` a test that is left out is a failure. Slow tests run with ``DRUMLINE_SLOW_TESTS=1``."""

from __future__ import annotations

import os

import pytest

IS_CI = os.environ.get("CI") == "true"
SLOW_TOO = os.environ.get("DRUMLINE_SLOW_TESTS", "0") != "0"

# Whether other parts have tests, so that this one needs none.
IN_OTHER_PARTS = pytest.StashKey[bool]()


def pytest_addoption(parser):
    parser.addoption("--part", default="1/1", metavar="N/OF", help="run this part alone: whole files, dealt out in turn")


@pytest.hookimpl(trylast=True)  # after -k
def pytest_collection_modifyitems(config, items):
    part, of = map(int, config.getoption("--part").split("/"))
    parts = {file: number % of for number, file in enumerate(dict.fromkeys(item.path for item in items), 1)}
    chosen = [
        item for item in items
        if parts[item.path] == part % of and (SLOW_TOO or not item.get_closest_marker("slow"))
    ]  # fmt: skip
    config.stash[IN_OTHER_PARTS] = any(it != part % of for it in parts.values())
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


def pytest_sessionfinish(session, exitstatus):
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.stash.get(IN_OTHER_PARTS, False):
        session.exitstatus = pytest.ExitCode.OK


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

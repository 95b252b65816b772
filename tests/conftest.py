"""Fixtures of the whole suite: real ranks, forked once."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: ranks share two cores
# ranks are forks: threads of a pool of compilers that this process began would not exist in them
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # 800 modules that every train step imports: here once, and not in each forked rank
from hypothesis import Phase, settings

from fnaccel.testing import RankPools
from tests.row_names import row_name

# shells let jobs in the background ignore the first, and nohup the second
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
torch.set_num_threads(1)
settings.register_profile("suite", deadline=None)  # machines are noisy: time is never tested
settings.register_profile("mutants", deadline=None, phases=[Phase.generate], derandomize=True)
settings.load_profile("suite")


@pytest.fixture(scope="session")
def pools() -> Iterator[RankPools]:
    """Worlds of any size: `pools.run(2, fn, *args)` -> the results of both ranks."""
    with RankPools(timeout=150.0) as started:  # beside others, inductor compiles for a minute
        yield started


@pytest.fixture(scope="session", autouse=True)
def plans_without_addresses() -> None:
    """No plan of any test holds an address: ranks that did not fork from one process have others."""
    from fnaccel.program.plan import Plan

    made = Plan.__init__

    def checked(plan: Plan, *args: Any, **options: Any) -> None:
        made(plan, *args, **options)
        assert " at 0x" not in f"{plan} {plan.digests}"

    Plan.__init__ = checked


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> None:
    """Leave what was imported by now out of collections: worlds collect as they end, a second each."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before `-m "not long"` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as long the rows that `long_except` does not name. In a run of everything it has to name some."""
    rows: dict[str, list[bool]] = {}
    both: set[str] = set()
    for item in items:
        if mark := item.get_closest_marker("long_except"):
            test = item.nodeid.partition("[")[0]
            if item.get_closest_marker("long"):
                both.add(test)
            named = bool(re.search(mark.args[0], item.callspec.id))
            rows.setdefault(test, []).append(named)
            if not named:
                item.add_marker(pytest.mark.long)
    whole = config.args == config.getini("testpaths")
    stale = [test for test, named in rows.items() if whole and not any(named)]
    if both or stale:
        raise pytest.UsageError(
            f"`long` beside `long_except`: {both or 'none'}. It names no row: {stale or 'none'}"
        )


def pytest_make_parametrize_id(val: Any) -> str | None:
    """Name rows by their values."""
    return row_name(val)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a row that needs another environment than this one."""
    needed = item.get_closest_marker("environment")
    if needed is None:
        return
    root = item.config.rootpath
    target, *python = needed.args
    if not (root / target).exists() or (python and Path(sys.executable) != root / python[0]):
        pytest.skip(f"needs {target}: `make test-all` makes it")

"""`make soak`: what three ranks do if one of them goes wrong, for many faults; prints a table and a count."""

from __future__ import annotations

import sys

import pytest

from fnaccel.world.hang_report import CODE
from tests.faulty import FAULTS, RANKS, run_ranks, train
from tests.strategies.pipeline import test_faults as pipelines

pytestmark = [pytest.mark.launcher, pytest.mark.timeout(3600)]

SOON = 10.0
HARMLESS = {"passes a batch without rows"}
"""What a rank may do: then no rank raises."""

ENDS = {
    "leaves its loop early": "returned", "closes the world early": "returned",
    "raises between steps": "ValueError", "raises in the loss": "ValueError", "raises in the loader": "ValueError",
    "raises KeyboardInterrupt": "KeyboardInterrupt", "sys.exit(0)": "SystemExit", "sys.exit(3)": "SystemExit",
    "os._exit(0)": "ended with 0", "os.abort": "ended with -6", "kill -9": "ended with -9",
    "SIGTERM": "ended with -15", "passes a batch of another width": "RuntimeError",
    "passes a batch of another structure": "ValueError", "reports another aux": "LossError",
}  # fmt: skip
"""How the faulty rank itself ends; in all other cases it raises what the other ranks raise."""

CASES = [(name, [rank]) for name in FAULTS for rank in ((0, 1) if name in ENDS else (1,))]
CASES += [(name, [0, 2]) for name in FAULTS if name.endswith("the others step")]
STRATEGIES = {
    "fsdp": (
        *("leaves its loop early", "raises in the loss", "kill -9"),
        *(name for name in FAULTS if name.endswith("the others step")),
    )
}


def test_each_fault_ends_with_a_named_error(tmp_path):
    cases = [(name, faulty, "ddp") for name, faulty in CASES if name != "looks, the others step"]
    cases += [(name, [1], strategy) for strategy, names in STRATEGIES.items() for name in names]
    soon, wrong = 0, []
    for number, (name, faulty, strategy) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        outcomes = run_ranks(train, faulty, name, folder, strategy, folder=folder)
        longest = max(outcome.waited for outcome in outcomes)
        soon += longest <= SOON
        line = ", ".join(outcome.error for outcome in outcomes)
        print(f"{strategy:5} {name:40} on {faulty}: {line:64} {longest:5.1f} s", file=sys.stderr, flush=True)
        wrong += [
            f"{name} on {faulty}: {outcome}" for outcome in outcomes if not _named(outcome, name, faulty)
        ]
    print(f"{soon} of {len(cases)} faults ended within {SOON:g} s", file=sys.stderr, flush=True)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("faulty", range(RANKS))
@pytest.mark.parametrize("fault", [*pipelines.FAULTS, "is silent"])
def test_each_fault_in_a_schedule_ends_soon(tmp_path, fault, faulty):
    """With the watchdog at 2 seconds for a rank that is silent."""
    outcomes = run_ranks(pipelines.train, faulty, fault, str(tmp_path), folder=tmp_path)
    longest = max(outcome.waited for outcome in outcomes)
    line = ", ".join(outcome.error for outcome in outcomes)
    print(f"pipeline {fault:10} on {faulty}: {line:64} {longest:5.1f} s", file=sys.stderr, flush=True)
    own, others = pipelines.FAULTS.get(fault, (f"ended with {CODE}",) * 2)
    assert [each.error for each in outcomes] == [own if rank == faulty else others for rank in range(RANKS)]
    assert longest <= SOON


def _named(outcome, name, faulty):
    """Whether a rank ended as it should: with an error that names another rank, if it is not to blame."""
    if name in HARMLESS:
        return outcome.error == "returned"
    if outcome.rank in faulty and name in ENDS:
        return outcome.error == ENDS[name]
    others = [f"rank {rank}" for rank in range(RANKS) if rank != outcome.rank]
    named = any(other in outcome.what or other.replace("rank", "ranks") in outcome.what for other in others)
    return outcome.error in ("PeerLostError", "RankMismatchError") and named

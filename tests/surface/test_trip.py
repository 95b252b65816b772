"""One steady call enters few functions and files: ceilings, at the values that were reached. They only sink."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.docs.names import ROOT

CEILINGS = {  # functions, files, borders, frames of the library under the loss
    "update": [109, 33, 100, 7],
    "save": [161, 35, 391],  # `named_errors`: an error of a file descriptor names no file
    "restore": [186, 37, 439],
    "captured update": [100, 34, 93],  # one file more than before: the engine's `drive` runs its passes too
    "fsdp update": [140, 39, 126, 10],  # one file more: the private names of FSDP2 have a file of their own
}


@pytest.mark.long
def test_no_trip_gets_longer():
    out = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "trip.py")], capture_output=True, text=True, check=True
    )
    rows = dict(line.split(": ") for line in out.stdout.splitlines())
    found = {name: [int(number) for number in re.findall(r"\d+", row)] for name, row in rows.items()}
    assert found.keys() == CEILINGS.keys()
    for name, trip in found.items():
        assert all(now <= most for now, most in zip(trip, CEILINGS[name], strict=True)), (name, trip)

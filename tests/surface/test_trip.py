"""One steady call enters few functions and files: ceilings, at the values that were reached. They only sink."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.docs.names import ROOT

# Each has what is looked at since it was first counted. An update: a function of torch.func around it, ranks with other
# numbers of rows, rates of groups, parameters without a gradient. Under fsdp: each gather, and whole parameters that a
# loss kept. A save: extras that differ between ranks, and buffers that grew, which a restore lets grow.
CEILINGS = {  # functions, files, borders, frames of the library under the loss
    "update": [112, 33, 99, 7],
    "save": [166, 35, 397],
    "restore": [185, 37, 467],
    "captured update": [105, 34, 99],
    "fsdp update": [148, 41, 153, 10],
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

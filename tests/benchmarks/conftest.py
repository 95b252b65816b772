"""The modules of `benchmarks` are scripts beside each other: tests import them by their names."""

from __future__ import annotations

import sys

from tests.docs.names import ROOT

sys.path.append(str(ROOT / "benchmarks"))  # the end, so that nothing else is hidden

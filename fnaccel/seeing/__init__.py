"""What a run does and costs: logs, profiles, throughput, memory, reports."""

from typing import TYPE_CHECKING

from fnaccel import _lazy
from fnaccel.seeing.logging import get_logger as get_logger
from fnaccel.seeing.profile import Profile as Profile
from fnaccel.seeing.throughput import Throughput as Throughput
from fnaccel.seeing.timeline import Summary as Summary
from fnaccel.seeing.timeline import summarize as summarize

if TYPE_CHECKING:
    from fnaccel.seeing.report import ReportTracker as ReportTracker
    from fnaccel.seeing.report import write_report as write_report
else:  # a copy of fnaccel may lack it
    __getattr__, __dir__, __all__ = _lazy.attach(
        __name__,
        {
            "fnaccel.seeing.report": "ReportTracker write_report",
        },
    )

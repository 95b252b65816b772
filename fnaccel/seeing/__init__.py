"""What a run does and costs: logs, profiles, throughput, memory, reports."""

from fnaccel.seeing.logging import get_logger as get_logger
from fnaccel.seeing.profile import Profile as Profile
from fnaccel.seeing.report import ReportTracker as ReportTracker
from fnaccel.seeing.report import write_report as write_report
from fnaccel.seeing.throughput import Throughput as Throughput
from fnaccel.seeing.timeline import Summary as Summary
from fnaccel.seeing.timeline import summarize as summarize

"""What a run does and costs: profiles, throughput, memory."""

from fnaccel.seeing.profile import Profile as Profile
from fnaccel.seeing.throughput import Throughput as Throughput
from fnaccel.seeing.timeline import Summary as Summary
from fnaccel.seeing.timeline import summarize as summarize

"""Replicas that train apart for some steps, and average then: local SGD and DiLoCo."""

from fnaccel.strategies.replicas import boundary as _boundary
from fnaccel.strategies.replicas.record import diloco as diloco
from fnaccel.strategies.replicas.record import local_sgd as local_sgd

_INTERPRETER = _boundary  # importing it registers it

"""XLA devices (TPUs) as a strategy: one process, tensors spread over all devices by SPMD annotations."""

from fnaccel.strategies.xla import engine as _engine
from fnaccel.strategies.xla.record import xla as xla

_REGISTERED = (_engine,)  # importing it registers it

"""DeepSpeed as a strategy: its options, the one configuration, its engine behind ours."""

from fnaccel.strategies.deepspeed import config as _config
from fnaccel.strategies.deepspeed import runtime as _runtime
from fnaccel.strategies.deepspeed.record import deepspeed as deepspeed

_REGISTERED = (_config, _runtime)  # importing them registers them

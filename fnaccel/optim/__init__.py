"""Optimizers as descriptions, and schedules as pure functions."""

from fnaccel.optim import schedules as schedules
from fnaccel.optim.deepspeed import deepspeed_lr as deepspeed_lr
from fnaccel.optim.deepspeed import from_deepspeed as from_deepspeed
from fnaccel.optim.description import Group as Group
from fnaccel.optim.description import Optimizer as Optimizer
from fnaccel.optim.foreign import adafactor as adafactor
from fnaccel.optim.foreign import from_torch as from_torch
from fnaccel.optim.fused import adam as adam
from fnaccel.optim.fused import adamw as adamw
from fnaccel.optim.fused import sgd as sgd
from fnaccel.optim.quantized import adamw8bit as adamw8bit
from fnaccel.optim.several import OptimizerGroups as OptimizerGroups
from fnaccel.optim.several import optimizer_groups as optimizer_groups
from fnaccel.optim.several import starting_at as starting_at

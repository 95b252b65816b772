"""Optimizers as descriptions, and schedules as pure functions."""

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
from fnaccel.optim.schedules import constant as constant
from fnaccel.optim.schedules import cosine as cosine
from fnaccel.optim.schedules import from_torch_scheduler as from_torch_scheduler
from fnaccel.optim.schedules import inverse_sqrt as inverse_sqrt
from fnaccel.optim.schedules import joined as joined
from fnaccel.optim.schedules import linear as linear
from fnaccel.optim.schedules import one_cycle as one_cycle
from fnaccel.optim.schedules import piecewise as piecewise
from fnaccel.optim.schedules import warmup_constant as warmup_constant
from fnaccel.optim.schedules import warmup_cosine as warmup_cosine
from fnaccel.optim.schedules import warmup_linear as warmup_linear

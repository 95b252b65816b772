"""Optimizers as descriptions, and schedules as pure functions."""

from typing import TYPE_CHECKING

from fnaccel import _lazy
from fnaccel.optim import schedules as schedules
from fnaccel.optim.description import Group as Group
from fnaccel.optim.description import Optimizer as Optimizer
from fnaccel.optim.foreign import adafactor as adafactor
from fnaccel.optim.foreign import from_torch as from_torch
from fnaccel.optim.fused import adam as adam
from fnaccel.optim.fused import adamw as adamw
from fnaccel.optim.fused import chain as chain
from fnaccel.optim.fused import sgd as sgd
from fnaccel.optim.several import OptimizerGroups as OptimizerGroups
from fnaccel.optim.several import layer_decay as layer_decay
from fnaccel.optim.several import optimizer_groups as optimizer_groups
from fnaccel.optim.several import starting_at as starting_at

if TYPE_CHECKING:
    from fnaccel.optim.deepspeed import deepspeed_lr as deepspeed_lr
    from fnaccel.optim.deepspeed import from_deepspeed as from_deepspeed
    from fnaccel.optim.parts import adaptive_clip as adaptive_clip
    from fnaccel.optim.parts import add_decayed_weights as add_decayed_weights
    from fnaccel.optim.parts import centralize as centralize
    from fnaccel.optim.parts import clip_norm as clip_norm
    from fnaccel.optim.parts import lookahead as lookahead
    from fnaccel.optim.parts import masked as masked
    from fnaccel.optim.parts import scale_by_adam as scale_by_adam
    from fnaccel.optim.parts import scale_by_lion as scale_by_lion
    from fnaccel.optim.parts import scale_by_rms as scale_by_rms
    from fnaccel.optim.parts import trace as trace
    from fnaccel.optim.parts import trust_ratio as trust_ratio
    from fnaccel.optim.quantized import adamw8bit as adamw8bit
else:  # a copy of fnaccel may lack them
    __getattr__, __dir__, __all__ = _lazy.attach(
        __name__,
        {
            "fnaccel.optim.deepspeed": "deepspeed_lr from_deepspeed",
            "fnaccel.optim.parts": "adaptive_clip add_decayed_weights centralize clip_norm lookahead masked "
            "scale_by_adam scale_by_lion scale_by_rms trace trust_ratio",
            "fnaccel.optim.quantized": "adamw8bit",
        },
        namespaces="schedules",
    )

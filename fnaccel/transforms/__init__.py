"""Transforms of a step: pure functions `Step -> Step`, one a file."""

from typing import TYPE_CHECKING

from fnaccel import _lazy
from fnaccel.step.chain import Chain as Chain
from fnaccel.step.chain import chain as chain
from fnaccel.step.precision_policy import Precision as Precision
from fnaccel.step.step import Capability as Capability
from fnaccel.step.step import Info as Info
from fnaccel.transforms.accumulation import accumulate as accumulate
from fnaccel.transforms.attention import attention as attention
from fnaccel.transforms.averaging import with_ema as with_ema
from fnaccel.transforms.batch_statistics import sync_batch_norm as sync_batch_norm
from fnaccel.transforms.clipping import clip_norm as clip_norm
from fnaccel.transforms.clipping import clip_value as clip_value
from fnaccel.transforms.compilation import compile as compile  # noqa: A004
from fnaccel.transforms.layer_casting import cast_layers as cast_layers
from fnaccel.transforms.precision import with_precision as with_precision
from fnaccel.transforms.rematerialisation import remat as remat
from fnaccel.transforms.skipping import skip_nonfinite as skip_nonfinite
from fnaccel.transforms.spikes import on_spike as on_spike
from fnaccel.transforms.weighting import with_weight as with_weight

if TYPE_CHECKING:
    from fnaccel.losses.chunked_head import chunked_head as chunked_head
    from fnaccel.transforms.float8.record import Float8 as Float8
    from fnaccel.transforms.float8.record import float8_layers as float8_layers
    from fnaccel.transforms.teachers import momentum_teacher as momentum_teacher
else:  # a copy of fnaccel may lack it
    __getattr__, __dir__, __all__ = _lazy.attach(
        __name__,
        {
            "fnaccel.losses.chunked_head": "chunked_head",
            "fnaccel.transforms.float8.record": "Float8 float8_layers",
            "fnaccel.transforms.teachers": "momentum_teacher",
        },
    )

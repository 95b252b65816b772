"""`sync_batch_norm`: statistics of batch norms over the rows of all ranks."""

from __future__ import annotations

import attrs
from torch import nn

from fnaccel.errors import CapabilityError
from fnaccel.models.synced_norm import synchronise
from fnaccel.step.chain import takes_step
from fnaccel.step.spec import Spec
from fnaccel.step.step import Capability, Phase, Transform


@attrs.frozen
class SyncBatchNorm:
    """Batch norms take their statistics over the ranks."""

    def obstacle_to_capture(self, spec: Spec) -> str:  # noqa: ARG002
        """A graph does not know which micro-batches count."""
        return "sync_batch_norm sums statistics over ranks in the middle of a forward"

    def check(self, spec: Spec) -> None:
        """Raise CapabilityError beside `fa.compile`."""
        if spec.step.settings.compiler is not None:
            raise CapabilityError(
                "sync_batch_norm sums statistics over ranks in the middle of a forward, which is compiled",
                where="fa.transforms.sync_batch_norm",
                fix="leave out fa.compile; or leave out the transform, if the rows of a rank are enough",
            )

    def on_module(self, module: nn.Module, where: str) -> None:
        """Patch the forward of each batch norm, so that names and buffers stay as they are."""
        synchronise(module, where)


@takes_step
def sync_batch_norm() -> Transform:
    """Let batch norms take the mean and variance of a micro-batch over the rows of all ranks.

    So `ddp(2)`, `fsdp(2)` and `hsdp` train as one rank does with micro-batches of all rows. A forward sends
    one all-reduce for each norm, and so does a backward. Statistics are in fp32 at least. Fillers count for
    nothing, and a norm in evaluation mode stays as it is. torch's SyncBatchNorm does this on GPUs only:
    https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html

    Args:
        step: a step or a loss function; or none, for `fa.chain`.

    Raises:
        CapabilityError: beside `fa.compile`. Or at `init`, if the model has no batch norm, or one that is
            a class of its own with another forward.

    Example:
        >>> def build():
        ...     return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        >>> def loss_fn(model, batch):
        ...     return fa.Mean(model(batch).square().sum(), weight=len(batch))
        >>> step = fa.transforms.sync_batch_norm(loss_fn)
        >>> train_step = fa.train_step(step, model=fa.distribute(build, "local"), optimizer=fa.sgd(0.1))
        >>> state, metrics = train_step(train_step.init(), torch.randn(8, 3))
    """
    return Transform(
        "sync_batch_norm", Phase.MODULE, apply=SyncBatchNorm(), needs=frozenset({Capability.MODULES})
    )

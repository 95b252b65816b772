"""`UpdateGuard`: what an update that does not reach its end puts back."""

from __future__ import annotations

from types import TracebackType

import torch

from fnaccel import _torch, tree
from fnaccel.data.cut import shapes_of
from fnaccel.data.micro_batches import MicroBatches
from fnaccel.engine.passes import explained
from fnaccel.errors import ArgumentError, FnaccelError
from fnaccel.optim import kernels
from fnaccel.program.instance import Instance
from fnaccel.program.probe import CAUSES
from fnaccel.seeing.memory import explain_out_of_memory
from fnaccel.state import TrainState, donate, is_stale
from fnaccel.world.progress_marks import NOW, enter_step, leave_step
from fnaccel.world.undo import SigintHeld, StreamStates, TorchSettings


class UpdateGuard:
    """In the body an update runs, in two halves with `commit` between them.

    A failure before `commit` leaves the state live and exact: random streams, grad mode, autocast, buffers,
    gradients and gathered parameters are as before. From `commit` on the state is dead, and a Ctrl-C waits
    for the end of the body. A captured step commits inside of its program, so a Ctrl-C waits from its
    beginning on, except in the first call, which may compile for minutes.

    Args:
        instance: the model and its optimizers.
        state: the live state.
        micro_batches: those of the update, for a note to an error of the loss.
    """

    __slots__ = (
        "_begun",
        "_committed",
        "_instance",
        "_micro_batches",
        "_own",
        "_settings",
        "_sigint",
        "_state",
        "_streams",
    )

    def __init__(self, instance: Instance, state: TrainState, micro_batches: MicroBatches) -> None:
        self._instance = instance
        self._state = state
        self._micro_batches = micro_batches
        self._sigint = SigintHeld()
        self._committed = False

    def __enter__(self) -> UpdateGuard:
        instance, state = self._instance, self._state
        shares = instance.shares and not instance.alone
        enter_step(state.step, instance.where, first=not instance.learned.moved, shares=shares)
        unfinished = instance.engine.unfinished
        if unfinished:  # an interrupt cut off what the step or the look before had to put back
            instance.engine.drop_pass()
        unfinished.add("step")
        self._begun = kernels.begun() if instance.captured else 0
        self._settings = TorchSettings(instance.autocast_device)
        # a data set may draw from the same streams, and has to find them as it left them (1 us)
        self._streams = StreamStates(instance.streams)
        # tensors in the states of the user's transforms, which may be changed in place
        own = tuple(filter(torch.is_tensor, tree.leaves(state.transforms))) if state.transforms else ()
        self._own = tuple(zip(own, map(_torch.version_of, own), strict=True))
        instance.moving_buffers.begin()
        if instance.captured and instance.learned.moved:
            self._sigint.__enter__()
        return self

    def commit(self) -> None:
        """Donate the state: its tensors change from here on."""
        self._sigint.__enter__()
        self._committed = True
        donate(self._state)

    def check_own(self) -> None:
        """Raise ArgumentError if a transform of the user's changed a tensor of its state in place."""
        if self._own_changed():
            raise ArgumentError(
                "a transform changed a tensor of its state in place, and an update that is left out has to "
                "leave it as it was",
                where="fa.Transform(apply=)",
                fix="return new tensors: own * 0.9 + grad in place of own.mul_(0.9).add_(grad)",
            )

    def _own_changed(self) -> bool:
        return any(_torch.version_of(tensor) != version for tensor, version in self._own)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sigint.__enter__()  # what is put back must not be cut in two either
        try:
            self._streams.put_back()
            if error is None:
                self._instance.engine.unfinished.clear()
            else:
                self._put_back(error)
        finally:
            leave_step(self._state.step + (error is None and self._committed))
            self._sigint.__exit__()

    def _put_back(self, error: BaseException) -> None:
        """Leave the state as it was, or dead. Raises a clearer error in the place of one of torch's."""
        instance, state = self._instance, self._state
        # in this order: the list of what fills the memory, torch's settings, the engine's pass, buffers
        explain_out_of_memory(error, instance.named_tensors)
        self._settings.put_back()
        if isinstance(error, Exception):
            self._add_notes(error)
        if not self._committed:
            if instance.engine.hooks.abandon is not None and isinstance(error, Exception):
                instance.engine.hooks.abandon(error)
            instance.engine.drop_pass()
        if instance.captured and kernels.begun() != self._begun:  # its program has begun the update
            donate(state)
        if not is_stale(state):
            exact = instance.moving_buffers.put_back()
            if not exact or self._own_changed():
                donate(state)
        # of the loss, and not of a hook on gradients
        clearer = None if self._committed or NOW.phase == "update" else explained(error, instance.engine)
        if clearer is not None:
            raise clearer from error

    def _add_notes(self, error: Exception) -> None:
        """Say where it happened: in a model that is cut, and in which micro-batch."""
        if self._instance.learned.cut_fails:
            error.add_note(f"in the first forward of a model that is cut. {CAUSES}")
        in_loss = NOW.phase in ("forward", "backward", "captured step", "compile")
        if in_loss and not isinstance(error, FnaccelError):
            stage = f", stage {NOW.stage}" if NOW.stage >= 0 else ""
            shapes = shapes_of(self._micro_batches[NOW.micro_batch].data)
            error.add_note(
                f"on rank {self._instance.engine.layout.mesh.world.rank}, in step {NOW.step}, micro-batch "
                f"{NOW.micro_batch}{stage}, whose batch is {shapes}"
            )

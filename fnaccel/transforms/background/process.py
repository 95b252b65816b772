"""`Background`: a process that compiles a train step, and the step at which ranks go over to its code.

The process gets the step, the model's structure and a batch. It makes the same train step as a rank whose
peers do not exist (`fa.simulate`), and calls it once. Then all code is in the caches of `torch.compile` on
disk, where each rank of the machine finds it.
"""

from __future__ import annotations

import io
import logging
import pickle
import subprocess
import sys
import tempfile
import time
import types
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fnaccel.errors import ArgumentError, MissingBackendError, install_line
from fnaccel.extend import Spec, enter
from fnaccel.transforms.background import _torch

_WHERE = "fa.compile(background=)"
_SMALL = 1 << 10  # bytes of a tensor that keeps its values
_PAUSE = 0.05  # seconds
_logger = logging.getLogger("fnaccel")


class Background:
    """The compilation of one train step beside it. Ranks ask each other in each step whether it has ended.

    Args:
        spec: the train step.
        at: the step at which ranks go over. True: after the one in which all know that all is compiled.

    Attributes:
        over: whether compiled code runs.
        since: the step from which it does, or None.

    Raises:
        MissingBackendError: cloudpickle is not installed.
        ArgumentError: another process can't be given the step, the model or an optimizer.
    """

    def __init__(self, spec: Spec, at: bool | int) -> None:
        self.over = False
        self.since: int | None = None
        self._at = None if at is True else at
        world = spec.mesh.world
        self._world = world
        self._agreed = False
        self._asked: torch.Tensor | None = None
        self._begun = False
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._failure = ""
        optimizers = spec.optimizers
        self._parts = _pickled(
            {
                "step": spec.step,
                "model": spec.model,
                "strategy": spec.strategy,
                "optimizers": optimizers[None] if optimizers and None in optimizers else optimizers,
                "frozen": spec.frozen,
                "rng": spec.rng,
                "world": {
                    "ranks": world.size,
                    "per_machine": world.local_size,
                    "rank": world.rank,
                    "device": world.device,
                },
                "settings": _torch.settings(),
                "main": types.FunctionType((lambda: None).__code__, vars(sys.modules["__main__"])),
            },
            values=False,
        )

    def begin(self, step: int, batch: Any) -> None:
        """At the beginning of a step: start the process in the first, go over to its code in a later one."""
        if self._at is not None and step >= self._at:
            self._wait()
            self._agreed = True
        if self._agreed:
            self._go_over(step)
        elif not self._begun:
            self._begun = True
            if self._world.local_rank == 0:
                try:
                    self._start(batch)
                except OSError as error:  # such as a full disk
                    self._failure = f"was not started: {error}"

    def _start(self, batch: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fnaccel-")
        file, log = (Path(self._folder.name) / name for name in ("step", "errors"))
        file.write_bytes(pickle.dumps((self._parts, _pickled(batch, values=True))))
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; sys.argv[:] = {sys.argv!r}; "
            f"from fnaccel.transforms.background.child import main; main({str(file)!r})"
        )
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=errors, stderr=errors
            )
        weakref.finalize(self, _end, self._process)

    def _wait(self) -> None:
        """Until the code is there, on all ranks."""
        while self._begun and not self._ended:
            enter("compile")
            time.sleep(_PAUSE)
        if self._begun:
            self._world.barrier()

    @property
    def _ended(self) -> bool:
        """Whether this rank's process has ended, if it has one."""
        return self._process is None or self._process.poll() is not None

    def _go_over(self, step: int) -> None:
        self.over, self.since = True, step
        if self._process is not None and self._folder is not None and self._process.returncode:
            lines = (Path(self._folder.name) / "errors").read_text(errors="replace").splitlines()
            said = next((line for line in reversed(lines) if "Error" in line), "no message")
            self._failure = f"ended with exit code {self._process.returncode}: {said}"
        if self._failure:
            warnings.warn(
                f"{_WHERE}: the process that compiles {self._failure}. So the step is compiled here, from "
                f"step {step} on",
                RuntimeWarning,
                stacklevel=5,
            )
        elif self._process is not None:
            _logger.info("compiled code runs from step %d on", step)
        self.close()

    def close(self) -> None:
        """End the process, if it runs."""
        if self._process is not None:
            _end(self._process)
        if self._folder is not None:
            self._folder.cleanup()

    @property
    def numbers(self) -> Sequence[float]:
        """1 if this rank waits for nothing: see `extend.Question`."""
        return (float(self._ended),)

    def hear(self, sums: torch.Tensor | None, device: torch.device) -> None:  # noqa: ARG002
        """Take the answer. On an accelerator that of the step before, so that no step waits for its own."""
        if self._at is not None:
            return
        if sums is None:
            self._agreed = self._ended
            return
        heard, self._asked = (sums, None) if sums.device.type == "cpu" else (self._asked, sums.clone())
        self._agreed = heard is not None and float(heard[0]) == self._world.size

    def check(self) -> None:
        """Nothing to raise: a step goes on."""


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: str, parameter: bool, trained: bool) -> Any:
    value = torch.zeros(shape, dtype=dtype, device=device)
    return nn.Parameter(value, trained) if parameter else value.requires_grad_(trained)


def _pickled(value: Any, *, values: bool) -> bytes:
    """Functions and classes of a script by what they are, others by name. Large tensors by shape alone."""
    try:
        import cloudpickle  # noqa: PLC0415
    except ImportError as error:
        raise MissingBackendError(
            "cloudpickle is not installed", where=_WHERE, fix=install_line("background")
        ) from error

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if type(obj) not in (torch.Tensor, nn.Parameter) or (obj.nbytes <= _SMALL and not values):
                return super().reducer_override(obj)
            if values:  # of a view its own values, and not all of what it is a view of
                return obj.detach().clone().__reduce_ex__(4)
            kind = isinstance(obj, nn.Parameter), obj.requires_grad
            return _zeros, (tuple(obj.shape), obj.dtype, str(obj.device), *kind)

    file = io.BytesIO()
    try:
        Pickler(file).dump(value)
    except Exception as error:
        raise ArgumentError(
            f"another process can't be given this step: {error}",
            where=_WHERE,
            fix="leave background= out; or make what can't be pickled in the function that needs it",
        ) from error
    return file.getvalue()

"""The tracker protocol, and the copy of metrics from the device without stalling a step.

The trackers themselves are in `fnaccel.track`.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from fnaccel.step.checked_metrics import check_logged


@runtime_checkable
class Tracker(Protocol):
    """A destination of metrics. Only rank 0 calls it.

    Example:
        >>> class Printer:
        ...     def start(self, config): print("start")
        ...     def log(self, step, metrics): print(step, sorted(metrics))
        ...     def finish(self): print("finish")
        >>> for state, metrics in fa.scan(train_step, state, fa.shard(loader), trackers=[Printer()]):
        ...     pass
        start
        1 ['loss', ...]
        finish
    """

    def start(self, config: Mapping[str, Any]) -> None:
        """Begin a run, or go on with it. `config` is shown beside it."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one step's metrics."""
        ...

    def finish(self) -> None:
        """End the run. Everything is written when this returns."""
        ...


class Fetcher:
    """Copies scalar metrics to the host asynchronously, and returns those that have arrived.

    On the CPU everything has arrived at once. On an accelerator a copy is read when its event says
    that it is complete, or after `depth` steps.
    """

    def __init__(self, depth: int = 8) -> None:
        self._depth = depth
        self._waiting: deque[tuple[int, list[str], torch.Tensor, Any]] = deque()

    def put(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take one step's metrics. Values that are no scalars are left out."""
        names: list[str] = []
        values: list[torch.Tensor] = []
        device = next(
            (v.device for v in metrics.values() if isinstance(v, torch.Tensor)), torch.device("cpu")
        )
        for name, value in metrics.items():
            if isinstance(value, torch.Tensor):
                if value.numel() == 1:
                    names.append(name)
                    values.append(value.detach().reshape(()).to(device, torch.float32))
            elif isinstance(value, int | float):
                names.append(name)
                values.append(torch.tensor(float(value), device=device))
        if not values:
            return
        packed = torch.stack(values)
        event: Any = None
        if device.type != "cpu":
            host = torch.empty_like(packed, device="cpu", pin_memory=True)
            host.copy_(packed, non_blocking=True)
            event = torch.Event(device.type)
            event.record()
            packed = host
        self._waiting.append((step, names, packed, event))

    def arrived(self, *, wait: bool = False) -> Iterator[tuple[int, dict[str, float]]]:
        """(step, metrics as floats) for the steps whose copies are complete. All steps if `wait`."""
        while self._waiting:
            step, names, packed, event = self._waiting[0]
            if event is not None and not event.query():
                if not wait and len(self._waiting) <= self._depth:
                    return
                event.synchronize()
            self._waiting.popleft()
            yield step, dict(zip(names, packed.tolist(), strict=True))


_logger = logging.getLogger("fnaccel")


class Log:
    """Sends metrics to trackers and to a progress bar, on the main rank.

    A tracker that raises does not end training: its first error is logged with its traceback, and the others
    and the number of all its errors at the end.

    Attributes:
        failures: the number of errors of each tracker that raised, by its class's name.
    """

    def __init__(
        self,
        trackers: Iterable[Tracker],
        config: Mapping[str, Any],
        show: Callable[[dict[str, float]], None] | None,
    ) -> None:
        self._trackers = tuple(trackers)
        self._show = show
        self._fetcher = Fetcher()
        self._started: list[Tracker] = []
        self.failures: Counter[str] = Counter()
        try:
            for tracker in self._trackers:
                tracker.start(config)
                self._started.append(tracker)
        except BaseException:
            self._finish()
            raise

    def put(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take one step's metrics, and pass on the metrics that have arrived so far."""
        self._fetcher.put(step, metrics)
        self._pass_on(wait=False)

    def _pass_on(self, *, wait: bool) -> None:
        for step, values in self._fetcher.arrived(wait=wait):
            check_logged(values)
            for tracker in self._trackers:
                self._guarded(tracker, "log", step, values)
            if self._show is not None:
                self._show(values)

    def close(self) -> None:
        """Write the remaining metrics and end the trackers that were started."""
        try:
            self._pass_on(wait=True)
        finally:
            self._finish()
            for name, count in self.failures.items():
                _logger.error("%s raised %d times; training went on", name, count)

    def _finish(self) -> None:
        """End all trackers that were started, even if a Ctrl-C interrupts one of them."""
        with contextlib.ExitStack() as stack:
            while self._started:
                stack.callback(self._guarded, self._started.pop(0), "finish")

    def _guarded(self, tracker: Tracker, method: str, *args: Any) -> None:
        """Call a method of a tracker. Its errors are logged."""
        try:
            getattr(tracker, method)(*args)
        except Exception:
            name = type(tracker).__name__
            self.failures[name] += 1
            if self.failures[name] == 1:
                _logger.exception("%s.%s() raised; training goes on", name, method)

"""Metrics to TensorBoard's event files, by `torch.utils.tensorboard`."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fnaccel.track.library import LibraryTracker
from fnaccel.track.media import as_pixels
from fnaccel.track.plain import markdown_table, plain
from fnaccel.track.tracker import Ranks
from fnaccel.world.paths import local_path, named_errors


class TensorBoardTracker(LibraryTracker):
    """Writes each step's metrics to event files. Look at them with `tensorboard --logdir runs`.

    The config is a text in the run, named `config`. Text is written by `add_text`. Nothing needs a network.
    An option of one call is `walltime`, in seconds since 1970.

    Args:
        directory: the folder of the event files. TensorBoard shows each folder as one run.
        offline: no effect: nothing needs a network.
        ranks: the ranks that write. With `"all"` each rank has a folder of its own in `directory`.
        options: further arguments of `torch.utils.tensorboard.SummaryWriter`, such as `flush_secs` and
            `purge_step`.

    Example:
        >>> from fnaccel.track import TensorBoardTracker
        >>> tracker = TensorBoardTracker("runs/gpt")
        >>> for state, metrics in fa.scan(train_step, state, fa.shard(loader), track=tracker):
        ...     pass
        >>> len(list(Path("runs/gpt").glob("events.out.tfevents.*")))
        1
    """

    _module = "torch.utils.tensorboard"
    _extra = "tensorboard"
    _starters = ("SummaryWriter",)
    _writer = "file_writer.add_summary"
    _closer = "close"

    def __init__(
        self,
        directory: str | Path = "runs",
        *,
        ranks: Ranks = "main",
        offline: bool | None = None,
        **options: Any,
    ) -> None:
        directory = local_path(directory, type(self).__name__)
        super().__init__(directory=directory, ranks=ranks, offline=offline)
        self.options = options

    def _begin(self, config: Mapping[str, Any]) -> Any:
        folder = Path(self._directory or "", self._named(None) or "")
        with named_errors(folder):
            resumed = {"purge_step": config["resumed_at"] + 1} if "resumed_at" in config else {}
            writer = self._library.SummaryWriter(str(folder), **resumed | self.options)
        for key, value in plain(config).items():
            text = value if isinstance(value, str) else json.dumps(value, indent=1)
            writer.add_text(f"config/{key}", f"```\n{text}\n```")
        return writer

    def _write(self, step: int, metrics: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        numbers, texts = self._numbers_and_texts(metrics)
        # one event for all: the checksum of each event is Python's work, in a thread beside the training
        summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        values = [summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        if values:
            self._run.file_writer.add_summary(summary(value=values), step, **options)
        for name, text in texts.items():
            self._run.add_text(name, text, step, **options)

    def log_images(self, step: int, name: str, images: object) -> None:
        """Show images. See `Media`."""
        writer = self._started("log_images")
        pixels = as_pixels(images)
        if len({image.shape for image in pixels}) == 1:
            writer.add_images(name, torch.stack(pixels), step, dataformats="NHWC")
            return
        for number, image in enumerate(pixels):
            writer.add_image(f"{name}/{number}", image, step, dataformats="HWC")

    def log_figure(self, step: int, name: str, figure: object) -> None:
        """Show a figure of matplotlib. The figure stays open."""
        self._started("log_figure").add_figure(name, figure, step, close=False)

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Show a table as text."""
        self._started("log_table").add_text(name, markdown_table(columns, rows), step)

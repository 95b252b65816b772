"""Saving and restoring one training state: fnaccel, Accelerate, torch's DCP, and the bytes alone."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from environment import is_installed, present
from safetensors.torch import load_file, save_file
from torch import nn

import fnaccel as fa

WIDTH = 1024


def model(layers: int) -> nn.Module:
    """4 MiB of fp32 parameters a layer."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def squares(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return module(batch).square().mean()


def program(layers: int, strategy: str = "local") -> tuple[fa.TrainStep, fa.TrainState]:
    """A train step after one update, so that the moments are no zeros."""
    step = fa.train_step(
        squares, model=fa.distribute(lambda: model(layers), strategy), optimizer=fa.adamw(1e-3)
    )
    state, _ = step(step.init(seed=0), torch.ones(2, WIDTH))
    return step, state


class Contest:
    """The same model and AdamW moments, held by each contestant; each has a folder of its own."""

    def __init__(self, root: Path, layers: int) -> None:
        self.root = root
        self.step, self.state = program(layers)
        self.module: Any = model(layers)
        self.optimizer: Any = torch.optim.AdamW(self.module.parameters(), lr=1e-3)
        self.accelerator: Any = None
        if is_installed("Accelerate"):
            from accelerate import Accelerator

            self.accelerator = Accelerator(cpu=True)
            self.module, self.optimizer = self.accelerator.prepare(self.module, self.optimizer)
        squares(self.module, torch.ones(2, WIDTH)).backward()
        self.optimizer.step()
        leaves = fa.tree.items((self.state.params, self.state.opt))
        self.flat = {path: leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor)}
        self.bytes = sum(leaf.nbytes for leaf in self.flat.values())
        self.data = bytes(self.bytes)

    def plain(self) -> dict[str, Any]:
        return {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def savers(self) -> dict[str, Callable[[], Any]]:
        """What writes a whole checkpoint."""
        ways = {
            "fnaccel": lambda: fa.save(self.root / "fnaccel", self.state),
            "write + fsync": self._write,
            "Accelerate": lambda: self.accelerator.save_state(
                str(self.root / "Accelerate"), safe_serialization=True
            ),
            "DCP": lambda: dcp.save(self.plain(), checkpoint_id=self.root / "DCP"),
        }
        return present(ways)

    def stallers(self) -> dict[str, Callable[[], Callable[[], Any]]]:
        """What begins a save in the background; each returns what waits for its end."""
        return {
            "fnaccel": lambda: fa.save_async(self.root / "fnaccel", self.state).wait,
            "DCP async": lambda: dcp.async_save(self.plain(), checkpoint_id=self.root / "DCP").result,
        }

    def restorers(self) -> dict[str, Callable[[], Any]]:
        """What reads one; all were saved before."""
        save_file(self.flat, self.root / "plain.safetensors")
        ways = {
            "fnaccel": self._restore,
            "load_file + copy": self._load_file,
            "Accelerate": lambda: self.accelerator.load_state(str(self.root / "Accelerate")),
            "DCP": lambda: dcp.load(self.plain(), checkpoint_id=self.root / "DCP"),
        }
        return present(ways)

    def _restore(self) -> None:
        self.state = fa.restore(self.root / "fnaccel", like=self.state)

    def _load_file(self) -> None:
        # by itself it maps the file and reads nothing
        found = load_file(self.root / "plain.safetensors")
        with torch.no_grad():
            for name, value in self.flat.items():
                value.copy_(found[name])

    def _write(self) -> None:
        folder = self.root / "bytes"
        folder.mkdir(exist_ok=True)
        with (folder / "data").open("xb", buffering=0) as file:
            rest = memoryview(self.data)
            while rest:
                rest = rest[os.write(file.fileno(), rest) :]
            os.fsync(file.fileno())

    def clear(self, name: str) -> None:
        """Remove what a contestant wrote, so that each writes to an empty folder."""
        folder = self.root / {"write + fsync": "bytes", "DCP async": "DCP"}.get(name, name)
        shutil.rmtree(folder, ignore_errors=True)
        os.sync()

    def settle(self) -> None:
        """Let nobody pay for memory that the host took back.

        A virtual machine gives pages that were freed to its host after some seconds; whoever writes next
        waits until it has them again, seen to take seven times as long as the write. So as many bytes
        as a save has go through the page cache before each turn.
        """
        gc.collect()
        warm = self.root / "warm"
        warm.write_bytes(self.data)
        warm.unlink()


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


# --- memory


def resident(key: str) -> int:
    """A figure of /proc/self/status in bytes: VmRSS is what is held now, VmHWM the most since the reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def peak(call: Callable[[], Any]) -> int:
    """How much more memory than before a call held at its height."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or what was freed before would be used again, unseen
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    call()
    return max(0, resident("VmHWM") - before)


def memory(layers: int, folder: Path) -> dict[str, tuple[int, int]]:
    """(bytes held besides the state, bytes of the state) on one of several ranks under fsdp, of each call."""
    _, state = program(layers, "fsdp")
    held = sum(
        x.to_local().nbytes for x in fa.tree.leaves((state.params, state.opt)) if hasattr(x, "to_local")
    )
    fa.save(folder / "warm", {"x": torch.zeros(1)})
    found = {"save": (peak(lambda: fa.save(folder / "fsdp", state)), held)}
    states = [state]
    found["restore"] = peak(lambda: states.append(fa.restore(folder / "fsdp", like=states[0]))), held
    found["save_async"] = peak(lambda: fa.save_async(folder / "later", states[1]).wait()), held
    return found

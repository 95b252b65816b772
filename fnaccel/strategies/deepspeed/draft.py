"""One DeepSpeed configuration out of several sources: the file, the strategy's arguments, the step.

A value that the file leaves out or calls `"auto"` is filled in. If two sources give the same value, it is
accepted. If they give different values, an error names both values and both sources.
"""

from __future__ import annotations

import copy
import difflib
import math
from typing import Any

from fnaccel.errors import ConfigError
from fnaccel.tree import Tree

AUTO = "auto"
_WHERE = "fa.deepspeed"
# sections and numbers that are checked here: DeepSpeed checks the others
_SECTIONS = ("zero_optimization", "bf16", "fp16", "optimizer", "scheduler", "torch_autocast")
_NUMBERS = (
    "gradient_clipping",
    "gradient_accumulation_steps",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "steps_per_print",
)
_ROWS = ("gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu")
# correct keys, to suggest for a misspelt one (https://www.deepspeed.ai/docs/config-json/)
_TOP = (
    *_SECTIONS, *_NUMBERS, "activation_checkpointing", "aio", "amp", "autotuning", "checkpoint", "comet",
    "comms_logger", "communication_data_type", "compression_training", "csv_monitor", "curriculum_learning",
    "data_efficiency", "data_types", "dump_state", "elasticity", "eigenvalue", "flops_profiler",
    "gradient_predivide_factor", "memory_breakdown", "prescale_gradients",
    "seq_parallel_communication_data_type",
    "sparse_attention", "sparse_gradients", "tensorboard", "wall_clock_breakdown", "wandb",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
)  # fmt: skip


class Draft:
    """A configuration that is being completed.

    Args:
        written: the contents of the file, or of the dictionary given in its place.
        origin: its name in error messages.
    """

    def __init__(self, written: dict[str, Any], origin: str) -> None:
        self.origin = origin
        self._config = copy.deepcopy(written)
        self._problems: list[str] = []
        self._filled: dict[str, str] = {}

    def written(self, key: str) -> Any:
        """The value at a dotted key. None if there is no value, or if it is `"auto"`."""
        value = self._find(key)
        return None if value == AUTO else value

    def is_auto(self, key: str) -> bool:
        """Whether the value is `"auto"`."""
        return self._find(key) == AUTO

    def say(self, key: str, value: Tree, origin: str) -> None:
        """Set a value that a source chose. Note a problem if another source chose a different value."""
        present = self.written(key)
        if present is None:
            self._put(key, value)
            self._filled[key] = origin
        elif present != value:
            there = self._filled.get(key, self.origin)
            self._problems.append(f"{key} is {present!r} in {there}, and {value!r} in {origin}")

    def fill(self, key: str, value: Tree) -> None:
        """Set a default if no source chose a value."""
        if self.written(key) is None:
            self._put(key, value)

    def resolve(self, key: str, value: Tree) -> None:
        """Set a value only if the file says `"auto"`."""
        if self.is_auto(key):
            self._put(key, value)

    def drop(self, key: str) -> None:
        """Remove a key that is left to DeepSpeed."""
        section, _, last = key.rpartition(".")
        inside = self._find(section) if section else self._config
        if isinstance(inside, dict):
            inside.pop(last, None)

    def check_shape(self) -> None:
        """See that the file can be read at all, before anything is filled in.

        Raises:
            ConfigError: sections that are none, numbers that are text, misspelt keys: all of them.
        """
        for key in _SECTIONS:
            value = self.written(key)
            if value is not None and not isinstance(value, dict):
                self.object_to(f"{key} is {value!r} in {self.origin}, and not a section {{...}}")
        for key in _NUMBERS:
            value = self.written(key)
            whole = key != "gradient_clipping"
            if value is not None and (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not math.isfinite(value)
                or (whole and value != int(value))
            ):
                self.object_to(
                    f"{key} is {value!r} in {self.origin}, and not a {'whole ' if whole else ''}number"
                )
            elif value is not None and key in _ROWS and not 1 <= value < 2**31:
                self.object_to(f"{key} is {value!r} in {self.origin}, and counts from 1")
        for key in self._config:
            near = difflib.get_close_matches(key, _TOP, n=1, cutoff=0.85)
            if key not in _TOP and near:
                self.object_to(f"DeepSpeed has no key {key!r} in {self.origin}: {near[0]!r} may be meant")
        stage = self.written("zero_optimization.stage")
        if stage is not None and (type(stage) is not int or not 0 <= stage <= 3):
            self.object_to(f"zero_optimization.stage is {stage!r} in {self.origin}, and not 0, 1, 2 or 3")
        self.check()

    def object_to(self, problem: str) -> None:
        """Note another problem."""
        self._problems.append(problem)

    def check(self) -> None:
        """Raise one ConfigError with every disagreement if sources disagree."""
        if self._problems:
            raise ConfigError(
                f"the DeepSpeed configuration contradicts itself: {'; '.join(self._problems)}",
                where=_WHERE,
                fix='say it in one place: write "auto" in the file (or leave it out), or remove the other',
            )

    def finish(self) -> dict[str, Any]:
        """The configuration, complete.

        Raises:
            ConfigError: sources disagree, or an `"auto"` is left that nothing here fills.
        """
        self.check()
        left = sorted(_autos(self._config))
        if left:
            raise ConfigError(
                f'nothing here fills "auto" for {", ".join(left)}',
                where=f"{_WHERE}, {self.origin}",
                fix="write the values out",
            )
        return self._config

    def _find(self, key: str) -> Any:
        inside: Any = self._config
        for name in key.split("."):
            if not isinstance(inside, dict) or name not in inside:
                return None
            inside = inside[name]
        return inside

    def _put(self, key: str, value: Tree) -> None:
        *path, last = key.split(".")
        inside = self._config
        for name in path:
            inside = inside.setdefault(name, {})
            if not isinstance(inside, dict):
                raise ConfigError(
                    f"{name} holds {inside!r}, not a section with {last!r} in it",
                    where=self.origin,
                    fix=f'write {{"{name}": {{"{last}": ...}}}}',
                )
        inside[last] = value


def _autos(value: Tree, path: str = "") -> set[str]:
    if isinstance(value, dict):
        return {
            key_path
            for key, child in value.items()
            for key_path in _autos(child, f"{path}.{key}" if path else key)
        }
    return {path} if value == AUTO else set()

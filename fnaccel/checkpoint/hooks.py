"""Functions of the user's that run with each save and each restore."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import attrs

from fnaccel.errors import require
from fnaccel.world.world import World, current

BeforeSave = Callable[[Path, Any], object]
AfterSave = Callable[[Path], object]
OnRestore = Callable[[Path, Any], object]


@attrs.frozen(eq=False)
class Hooks:
    """Functions that were registered together. A context manager: they are removed at its end.

    Example:
        >>> with fa.checkpoint.hooks(after_save=lambda path: print("saved", path.name)):
        ...     path = fa.save("runs/gpt", state)
        saved step-0000000000
    """

    before_save: BeforeSave | None
    after_save: AfterSave | None
    before_restore: OnRestore | None
    after_restore: OnRestore | None
    world: World = attrs.field(repr=False)

    def remove(self) -> None:
        """Run them no longer."""
        registered = self.world.resource(Registered).hooks
        if self in registered:
            registered.remove(self)

    def __enter__(self) -> Hooks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


class Registered:
    """The hooks of a world, in their order. Created by `world.resource`."""

    def __init__(self, _: World) -> None:
        self.hooks: list[Hooks] = []

    def run(self, name: str, *args: Any) -> None:
        """Call the function `name` of each."""
        for hooks in list(self.hooks):
            function = getattr(hooks, name)
            if function is not None:
                function(*args)

    def close(self, *, clean: bool) -> None:  # noqa: ARG002 - the signature of a resource
        """Forget them with the world."""
        self.hooks.clear()


def hooks(
    *,
    before_save: BeforeSave | None = None,
    after_save: AfterSave | None = None,
    before_restore: OnRestore | None = None,
    after_restore: OnRestore | None = None,
    world: World | None = None,
) -> Hooks:
    """Run functions with each save and each restore of this world, those of `fa.scan` too.

    All ranks register the same functions. Each runs on every rank. If it raises on one rank, the save or
    the restore fails on all.

    Args:
        before_save: `(directory, state)`. Files that it writes into `directory` are part of the checkpoint,
            and appear with it: a tokenizer, a config. All ranks see one directory, so let one rank write.
        after_save: `(path)`, when the checkpoint at `path` is on the device. `fa.save_async` calls it on its
            thread, where it must not call functions that all ranks call.
        before_restore: `(path, like)`, before anything is read into `like`.
        after_restore: `(path, state)`.
        world: the world, if none was started in this context.

    Returns:
        A context manager. `remove()` ends it early. Without `with` they run until the world ends.

    Raises:
        ArgumentError: not a function, or none at all.

    Example:
        >>> def add_tokenizer(directory, state):
        ...     if world.is_main:
        ...         (directory / "tokenizer.json").write_text("{}")
        >>> with fa.checkpoint.hooks(before_save=add_tokenizer):
        ...     path = fa.save("runs/gpt", state)
        >>> (path / "tokenizer.json").exists()
        True
    """
    there = current(world)
    made = Hooks(before_save, after_save, before_restore, after_restore, there)
    given = [before_save, after_save, before_restore, after_restore]
    require(
        any(each is not None for each in given) and all(each is None or callable(each) for each in given),
        "there is no function to run" if not any(given) else "a hook is no function",
        "fa.checkpoint.hooks",
        "fa.checkpoint.hooks(before_save=lambda directory, state: ...)",
    )
    there.resource(Registered).hooks.append(made)
    return made

"""Every mistake fnaccel can point out, one class each.

A message has three lines: what happened, `where:` it happened, and the `fix:`.
The docstring of a class shows code that raises it and the same code put right.
Nothing here imports torch, so the command line can use it at no cost.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class FnaccelError(Exception):
    """Base of all fnaccel errors: what / where / fix.

    Raises nothing itself; catch it to catch every mistake fnaccel reports.
    """

    def __init__(self, what: str, *, where: str, fix: str) -> None:
        super().__init__(f"{what}\n  where: {where}\n  fix: {fix}")
        self.what = what
        self.where = where
        self.fix = fix

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.what, self.where, self.fix))


def _rebuild(kind: type[FnaccelError], what: str, where: str, fix: str) -> FnaccelError:
    return kind(what, where=where, fix=fix)


def nearest(name: str, known: Iterable[str]) -> str:
    """The sentence that suggests the known name closest to `name`, or lists them all."""
    names = sorted(set(known))
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}? known: {', '.join(names)}"
    return f"choose one of: {', '.join(names)}"


class NoWorldError(FnaccelError, RuntimeError):
    """Something needs to know the ranks, and no world was started.

    Fails: `fa.gather(x)`. Works: `with fa.start() as world: fa.gather(x)`.
    """


class WorldError(FnaccelError, RuntimeError):
    """The environment describes no usable world.

    Fails: RANK=3 WORLD_SIZE=2. Works: let `fnaccel launch -n 2` set both.
    """


class AxisProductError(FnaccelError, ValueError):
    """The degrees of a strategy do not multiply to the number of ranks.

    Fails: `ddp(2) * fsdp(4)` on 6 ranks. Works: `ddp(2) * fsdp(3)`, or `ddp(2) * fsdp(-1)`.
    """


class UnknownNameError(FnaccelError, ValueError):
    """A name (strategy, dtype, optimizer, key) that fnaccel does not know.

    Fails: `fa.with_precision(step, "bf61")`. Works: `fa.with_precision(step, "bf16")`.
    """


class RepeatedTransformError(FnaccelError, ValueError):
    """A transform that may appear once was applied twice.

    Fails: `fa.accumulate(fa.accumulate(step, 2), 4)`. Works: `fa.accumulate(step, 4)`.
    """


class CapabilityError(FnaccelError, ValueError):
    """The strategy, device or optimizer can't do what the step asks.

    Fails: `compile(step, scope="step")` with `fsdp()`. Works: `compile(step, scope="block")`.
    """


class NotCompiledError(FnaccelError, RuntimeError):
    """Compilation was asked for and nothing was compiled, or XLA can't compile a step.

    Fails: `compile(step, scope="block")` on a model without repeated blocks. Works: `scope="loss"`.
    """


class RecompileLimitError(FnaccelError, RuntimeError):
    """A compiled step was compiled again and again, since something changes from call to call.

    Fails: batches of ever other lengths. Works: pad them to a few lengths, or say what varies:
    `fa.compile(step, dynamic={"tokens": 1})`.
    """


class ArgumentError(FnaccelError, ValueError):
    """An argument is outside what the function accepts.

    Fails: `fa.accumulate(step, 0)`. Works: `fa.accumulate(step, 1)`.
    """


class LossError(FnaccelError, ValueError):
    """The loss function returned something that can't be trained on.

    Fails: `return loss.item()`. Works: `return loss`, or `return fa.Mean(total, weight=n)`.
    """


class NonfiniteError(FnaccelError, ArithmeticError):
    """Update after update was skipped, since no gradient is finite.

    Fails: a model that returns NaN, under `fa.skip_nonfinite(step)`. Works: find the NaN, or lower the rate.
    """


class MicroBatchError(FnaccelError, ValueError):
    """A batch can't be cut into the micro-batches asked for.

    Fails: 3 rows under `accumulate(step, 4)`. Works: 4 rows or more.
    """


class LoaderError(FnaccelError, ValueError):
    """A loader that can't be sharded as asked, or holds nothing.

    Fails: `fa.shard(DataLoader([]))`. Works: a loader with one item or more.
    """


class RankMismatchError(FnaccelError, ValueError):
    """Ranks handed different structures, shapes or dtypes to one collective.

    Fails: `fa.gather(torch.ones(rank + 1))`. Works: `fa.gather(fa.pad_across_processes(x))`.
    """


class PeerLostError(FnaccelError, RuntimeError):
    """A rank waited for another one that left, exited, never came, or made another call.

    Fails: `if world.rank == 0: train_step(state, batch)`. Works: the same calls on every rank.
    """


class PlanMismatchError(FnaccelError, ValueError):
    """Ranks built different train steps.

    Fails: `accumulate(step, 2 if rank == 0 else 3)`. Works: the same call on every rank.
    """


class StaleStateError(FnaccelError, RuntimeError):
    """A state was used after it was donated.

    Fails: `new, _ = train_step(state, b); train_step(state, b)`.
    Works: `state, _ = train_step(state, b)`, or `kept = fa.snapshot(state)` before the call.
    """


class UnleasedStateError(FnaccelError, RuntimeError):
    """A state that was made by hand is not tied to the train step's parameters.

    Fails: `train_step(attrs.evolve(state, step=0), b)`.
    Works: `train_step(train_step.adopt(attrs.evolve(state, step=0)), b)`.
    """


class ReadOnlyError(FnaccelError, TypeError):
    """A tree that a state shows was written to.

    Fails: `state.params["weight"] = value`. Works: `state.params["weight"].copy_(value)` under no_grad, or
    `train_step.adopt(attrs.evolve(state, params={**state.params, "weight": value}))`.
    """


class ReplacedParameterError(FnaccelError, RuntimeError):
    """A parameter of a trained model was replaced, added or removed, so it would not be trained.

    Fails: `model.head = nn.Linear(4, 2)` inside the loss. Works: the layer in the model's constructor.
    """


class AveragedError(FnaccelError, RuntimeError):
    """The parameters hold the averages of `with_ema`, so the state can't be saved, copied or trained.

    Fails: `with train_step.averaged(state): fa.save(d, state)`. Works: the save after the block.
    """


class OwnershipError(FnaccelError, RuntimeError):
    """One module was given to two train steps, or a train step was used after `close()`.

    Fails: two `fa.train_step(..., model=fa.distribute(module, ...))` on one module.
    Works: a factory (`fa.distribute(lambda: GPT(), ...)`), or `first.close()` before.
    """


class TreeMismatchError(FnaccelError, ValueError):
    """Two trees that must match differ; every differing path is listed.

    Fails: `fa.restore(dir, like=state_of_another_model)`. Works: `like=` the architecture saved.
    """


class CheckpointError(FnaccelError, RuntimeError):
    """A checkpoint is missing, torn, or of a format this version can't read.

    Fails: `fa.restore("empty_dir", like=state)`. Works: `fa.save("empty_dir", state)` first.
    """


class NotSerializableError(FnaccelError, TypeError):
    """A value has no place in a checkpoint or a config file.

    Fails: `fa.save(d, {"f": lambda: 0})`. Works: scalars, strings, bytes, lists, dicts, tensors.
    """


class ConfigError(FnaccelError, ValueError):
    """A config file or value is not what its class describes.

    Fails: `precison: bf16`. Works: `precision: bf16`.
    """


class UnusedOverrideError(FnaccelError, RuntimeError):
    """The launcher was told something that the script never used.

    Fails: `fnaccel launch --strategy fsdp` on a script without `fa.recipe()`.
    Works: build the strategy from `fa.recipe()`.
    """


class LaunchError(FnaccelError, RuntimeError):
    """The processes asked for can't be started, or one of them failed.

    Fails: `fnaccel launch -n 0 train.py`. Works: `fnaccel launch -n 1 train.py`.
    """


class MissingBackendError(FnaccelError, ImportError):
    """An optional package is not installed.

    Fails: `trackers=WandbTracker()` without wandb. Works: `pip install 'fnaccel[wandb]'` first.
    """


class Preempted(SystemExit):
    """The run was asked to stop, and has saved its state: start it again to go on.

    A SystemExit, so `with` blocks unwind and an uncaught one ends the process without a traceback.
    The exit code is 75 (EX_TEMPFAIL of sysexits.h: try again later), of `fnaccel launch` too.

    Args:
        step: the step after which the run stopped.
        path: the checkpoint of that step; None where nothing was saved.

    Example: `if notice.stopping: raise fa.Preempted(state.step, fa.save("runs/gpt", state))`.
    """

    CODE = 75
    on_all_ranks = True

    def __init__(self, step: int, path: Path | None = None) -> None:
        super().__init__(self.CODE)
        self.step = step
        self.path = path

    def __str__(self) -> str:
        return f"stopped after step {self.step}" + ("" if self.path is None else f", saved {self.path}")

    def __reduce__(self) -> tuple[Any, ...]:
        return Preempted, (self.step, self.path)


def require(condition: bool, what: str, where: str, fix: str) -> None:
    """Raise ArgumentError unless `condition` holds."""
    if not condition:
        raise ArgumentError(what, where=where, fix=fix)


def as_names(names: Iterable[str] | str) -> tuple[str, ...]:
    """A tuple of names from one name or several."""
    return (names,) if isinstance(names, str) else tuple(names)

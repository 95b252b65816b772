"""Every mistake fnaccel can point out, one class each.

A message has three lines: the problem, its location (`where:`), and the `fix:`. A class docstring shows
code that raises the error, and code that works. Nothing here imports torch, so the command line starts fast.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class FnaccelError(Exception):
    """Base of all fnaccel errors: the problem, its location, and the fix. Catch it to catch each of them.

    Example:
        >>> print(fa.errors.FnaccelError("the loss is text", where="train_step", fix="return a tensor"))
        the loss is text
          where: train_step
          fix: return a tensor
    """

    follows = False
    """Whether it only reports that another rank failed. A launcher shows the error of that rank first."""

    def __init__(self, what: str, *, where: str, fix: str) -> None:
        super().__init__(f"{what}\n  where: {where}\n  fix: {fix}")
        self.what = what
        self.where = where
        self.fix = fix

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(type(self), where=self.where, fix=self.fix), (self.what,)


def nearest(name: str, choices: Iterable[str]) -> str:
    """The sentence that suggests the known name closest to `name`, or lists them all."""
    names = sorted(set(choices))
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    listed = ", ".join(names)
    return f"did you mean {close[0]!r}? known: {listed}" if close else f"choose one of: {listed}"


def listing(texts: Sequence[str], most: int = 10) -> str:
    """Texts in one line of a message, and how many are left out.

    Example:
        >>> fa.errors.listing(["a", "b", "c"], most=2)
        'a; b; and 1 more'
    """
    more = len(texts) - most
    return "; ".join(texts[:most]) + (f"; and {more} more" if more > 0 else "")


def install_line(extra: str) -> str:
    """The command that installs an extra of fnaccel, such as `"deepspeed"`.

    If fnaccel was installed from a checkout, the command names its folder. pip writes that folder to
    `direct_url.json` beside the metadata of the installation (PEP 610).

    Example:
        >>> print(fa.errors.install_line("deepspeed"))
        pip install ...[deepspeed]...
    """
    import importlib.metadata  # noqa: PLC0415 - only a message needs it, and `--help` is quick
    import json  # noqa: PLC0415
    from urllib.parse import unquote, urlsplit  # noqa: PLC0415

    checkout, editable = Path(), False
    with contextlib.suppress(
        importlib.metadata.PackageNotFoundError, ValueError, LookupError, TypeError, AttributeError
    ):
        origin = json.loads(importlib.metadata.distribution("fnaccel").read_text("direct_url.json") or "{}")
        editable = bool(origin["dir_info"].get("editable"))
        checkout = Path(unquote(urlsplit(origin["url"]).path))
    if checkout == Path() or not checkout.is_dir():
        return f"pip install 'fnaccel[{extra}]'"
    return f'pip install {"-e " if editable else ""}"{checkout}[{extra}]"'


class NoWorldError(FnaccelError, RuntimeError):
    """A function needs to know the ranks, and no world was started.

    Fails:
        >>> world.close()
        >>> fa.gather(torch.ones(2))
    Works:
        >>> with fa.start(): fa.gather(torch.ones(2))
    """


class WorldError(FnaccelError, RuntimeError):
    """The environment variables describe no usable world, or the world lacks a rank or a device.

    Fails:
        >>> world.on_process(1)  # one process: there is no rank 1
    Works:
        >>> world.on_process(0)
    """


class AxisProductError(FnaccelError, ValueError):
    """The degrees of a strategy do not multiply to the number of ranks.

    Fails, on 2 ranks:
        >>> make(loss_fn, GPT, "ddp(2) * fsdp(4)")
    Works, on 2 ranks:
        >>> make(loss_fn, GPT, "ddp(2) * fsdp(-1)")
    """


class UnknownNameError(FnaccelError, ValueError):
    """fnaccel does not know this name of a strategy, dtype, optimizer or key.

    Fails:
        >>> fa.with_precision(loss_fn, "bf61")
    Works:
        >>> fa.with_precision(loss_fn, "bf16")
    """


class RepeatedTransformError(FnaccelError, ValueError):
    """A transform was applied twice, and a step can have only one of it.

    Fails:
        >>> fa.accumulate(fa.accumulate(loss_fn, 2), 4)
    Works:
        >>> fa.accumulate(loss_fn, 8)
    """


class CapabilityError(FnaccelError, ValueError):
    """The strategy, the device or the optimizer lacks a capability that the step needs.

    Fails:
        >>> make(fa.compile(loss_fn, "loss"), GPT, "fsdp")
    Works:
        >>> make(fa.compile(loss_fn, "step"), GPT, "fsdp")
    """


class NotCompiledError(FnaccelError, RuntimeError):
    """`fa.compile` was applied and nothing was compiled, or XLA can't compile a step.

    Fails:
        >>> make(fa.compile(loss_fn, "block"), lambda: nn.Linear(8, 2)).init()
    Works:
        >>> make(fa.compile(loss_fn, "loss"), lambda: nn.Linear(8, 2)).init()
    """


class RecompileLimitError(FnaccelError, RuntimeError):
    """A compiled step was compiled again too often, because shapes change from call to call.

    Fails:
        >>> step = fa.compile(loss_fn, "loss", backend="aot_eager", dynamic=False, limit=0)
        >>> train_step = make(step)
        >>> state = train_step.init()
        >>> for rows in (4, 3, 2):
        ...     state, metrics = train_step(state, {name: x[:rows] for name, x in batch.items()})
    Works:
        >>> step = fa.compile(loss_fn, "loss", backend="aot_eager", dynamic={"*": 0}, limit=0)
        >>> train_step = make(step)  # any number of rows
        >>> state, metrics = train_step(train_step.init(), batch)
    """


class ArgumentError(FnaccelError, ValueError):
    """An argument is outside the range that the function accepts.

    Fails:
        >>> fa.accumulate(loss_fn, 0)
    Works:
        >>> fa.accumulate(loss_fn, 1)
    """


class LossError(FnaccelError, ValueError):
    """The loss function returned a value that can't be trained on.

    Fails:
        >>> train_step = make(lambda model, batch: model(batch["tokens"]).sum().item())
        >>> train_step(train_step.init(), batch)
    Works:
        >>> state, metrics = train_step(state, batch)  # loss_fn returns fa.Mean(total, weight=count)
    """


class NonfiniteError(FnaccelError, ArithmeticError):
    """Many updates in a row were skipped, because no gradient was finite.

    Fails:
        >>> step = fa.skip_nonfinite(lambda model, b: math.nan * model(b["tokens"]).sum(), max_skipped=1)
        >>> train_step = make(step)
        >>> state, metrics = train_step(train_step.init(), batch)
        >>> train_step(state, batch)
    Works:
        >>> state, metrics = train_step(state, batch)
    """


class MicroBatchError(FnaccelError, ValueError):
    """A batch can't be cut into the micro-batches asked for.

    Fails:
        >>> train_step = make(fa.accumulate(loss_fn, 5))
        >>> train_step(train_step.init(), batch)  # a batch of 4 rows
    Works:
        >>> train_step = make(fa.accumulate(loss_fn, 2))
        >>> state, metrics = train_step(train_step.init(), batch)
    """


class LoaderError(FnaccelError, ValueError):
    """A loader can't be sharded as asked, or is empty.

    Fails:
        >>> fa.shard(DataLoader([]))
    Works:
        >>> fa.shard(DataLoader(dataset))
    """


class RankMismatchError(FnaccelError, ValueError):
    """Ranks passed different structures, shapes or dtypes to one collective, or trained on different batches.

    Fails, on 2 ranks:
        >>> fa.gather(torch.ones(2, 3 + world.rank))
    Works, on 2 ranks:
        >>> fa.gather(fa.pad_across_processes(torch.ones(2, 3 + world.rank), dim=1))
    """


class PeerLostError(FnaccelError, RuntimeError):
    """A rank waited for another rank that left, exited, never came, or made another call.

    Fails, on 2 ranks:
        >>> if world.rank == 0: train_step(state, batch)
    Works, on 2 ranks:
        >>> state, metrics = train_step(state, batch)
    """

    follows = True


class PlanMismatchError(FnaccelError, ValueError):
    """Ranks built different train steps.

    Fails, on 2 ranks:
        >>> make(fa.accumulate(loss_fn, 1 + world.rank), GPT, "ddp").init()
    Works, on 2 ranks:
        >>> make(fa.accumulate(loss_fn, 2), GPT, "ddp").init()
    """


class StaleStateError(FnaccelError, RuntimeError):
    """A state was used after it was donated to a train step.

    Fails:
        >>> new, metrics = train_step(state, batch)
        >>> train_step(state, batch)
    Works:
        >>> best = fa.snapshot(state)  # an independent copy
        >>> state, metrics = train_step(state, batch)
    """


class UnleasedStateError(FnaccelError, RuntimeError):
    """A state that was made by hand is not tied to the train step's parameters.

    Fails:
        >>> train_step(attrs.evolve(state, step=0), batch)
    Works:
        >>> state, metrics = train_step(train_step.adopt(attrs.evolve(state, step=0)), batch)
    """


class ReadOnlyError(FnaccelError, TypeError):
    """A tree of a state was written to.

    Fails:
        >>> state.params["lm_head.bias"] = torch.zeros(16)
    Works:
        >>> with torch.no_grad(): state.params["lm_head.bias"].zero_()
    """


class ReplacedParameterError(FnaccelError, RuntimeError):
    """A parameter of a trained model was replaced, added or removed, so it would not be trained.

    Fails:
        >>> train_step.look(state, lambda model: setattr(model, "lm_head", nn.Linear(32, 16)))
        >>> train_step(state, batch)
    Works:
        >>> state, metrics = train_step(state, batch)  # GPT.__init__ makes every layer
    """


class AveragedError(FnaccelError, RuntimeError):
    """The parameters are the averages of `with_ema`, so the state can't be saved, copied or trained.

    Fails:
        >>> train_step = make(fa.with_ema(loss_fn, 0.99))
        >>> state = train_step.init()
        >>> with train_step.averaged(state): fa.save("runs/gpt", state)
    Works:
        >>> path = fa.save("runs/gpt", state)  # after the `with` block
    """


class OwnershipError(FnaccelError, RuntimeError):
    """One module was given to two train steps, or a train step was used after `close()`.

    Fails:
        >>> model = GPT()
        >>> first, second = make(loss_fn, model), make(loss_fn, model)
        >>> first.init(), second.init()
    Works:
        >>> states = [make(loss_fn).init() for _ in range(2)]
    """


class TreeMismatchError(FnaccelError, ValueError):
    """Two trees that must match differ. The message lists every differing path.

    Fails:
        >>> another = make(loss_fn, lambda: nn.Linear(8, 2)).init()
        >>> fa.restore(fa.save("runs/gpt", state), like=another)
    Works:
        >>> state = fa.restore(fa.save("runs/gpt", state), like=train_step.init(seed=1))
    """


class CheckpointError(FnaccelError, RuntimeError):
    """A checkpoint is missing, damaged, or of a format that this version can't read.

    Fails:
        >>> fa.restore("runs/gpt", like=state)
    Works:
        >>> state = fa.resume_or_init("runs/gpt", train_step)
    """


class NotSerializableError(FnaccelError, TypeError):
    """A value can't be stored in a checkpoint or a config file.

    Fails:
        >>> fa.save("runs/gpt", {"activation": lambda x: x})
    Works:
        >>> fa.save("runs/gpt", {"activation": "gelu", "scale": torch.ones(2)})
    """


class ConfigError(FnaccelError, ValueError):
    """A config file or value does not fit its class.

    Fails:
        >>> fa.config.from_yaml("precison: bf16")
    Works:
        >>> fa.config.from_yaml("precision: bf16")
    """


class UnusedOverrideError(FnaccelError, RuntimeError):
    """The launcher got an option that the script never used.

    Fails:
        $ fnaccel launch --strategy fsdp -m this  # a program without a train step
    Works:
        $ fnaccel launch --strategy fsdp train.py  # a script with fa.train_step or fa.config.recipe()
    """


class FlagMismatchError(FnaccelError, ValueError):
    """The launcher and the script choose different things. Nothing was built.

    Fails:
        >>> told = attrs.evolve(world, flags={"strategy": "fsdp"})  # as fnaccel launch --strategy fsdp does
        >>> fa.train_step(loss_fn, model=fa.distribute(GPT, "ddp"), optimizer=fa.sgd(0.1), world=told)
    Works:
        >>> told = attrs.evolve(world, flags={"strategy": "fsdp"})
        >>> train_step = fa.train_step(loss_fn, model=fa.distribute(GPT), optimizer=fa.sgd(0.1), world=told)
    """


class LaunchError(FnaccelError, RuntimeError):
    """The processes asked for can't be started, or one of them failed.

    Fails:
        $ fnaccel launch -n 0 train.py
    Works:
        $ fnaccel launch -n 2 train.py
    """


class MissingBackendError(FnaccelError, ImportError):
    """An optional package is not installed.

    Fails:
        >>> fa.start(device="npu")  # without torch_npu
    Works:
        >>> fa.start(device="cpu")
    """


class Preempted(SystemExit):
    """The run was asked to stop, and has saved its state: start it again to go on.

    A SystemExit, so `with` blocks unwind and an uncaught one ends the process without a traceback.
    The exit code is 75 (EX_TEMPFAIL of sysexits.h: try again later), of `fnaccel launch` too.

    Args:
        step: the step after which the run stopped.
        path: the checkpoint of that step. None if nothing was saved.

    Example:
        >>> print(fa.errors.Preempted(10, fa.save("runs/gpt", state)))
        stopped after step 10, saved ...
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


def require_counts(where: str, **counts: object) -> None:
    """Raise ArgumentError for a count that is neither None nor an integer of 1 or more."""
    for name, count in counts.items():
        positive = count is None or (type(count) is int and count >= 1)
        require(positive, f"{name}={count!r}", where, f"{name} is 1 or more, or None")


def as_names(names: Any) -> tuple[Any, ...]:
    """A tuple of one name (or function) or several. A set is sorted: its order differs between processes."""
    if isinstance(names, str) or callable(names):
        return (names,)
    return tuple(sorted(names) if isinstance(names, set | frozenset) else names)


def moved_arguments(where: str, **places: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function: an argument that it no longer takes raises ArgumentError, and says where it went.

    A type checker sees the function as it is.

    Args:
        where: the function, as the user calls it.
        places: what to write now, by the argument's name.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in places.keys() & kwargs.keys():
                raise ArgumentError(f"there is no argument {name}= any more", where=where, fix=places[name])
            return function(*args, **kwargs)

        return call

    return decorate

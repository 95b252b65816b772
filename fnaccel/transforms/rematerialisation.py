"""`remat`: compute activations again in the backward pass instead of keeping them."""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Generator
from typing import Any, get_args

import attrs
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fnaccel import _lazy, _torch, tree
from fnaccel.errors import CapabilityError, UnknownNameError, nearest
from fnaccel.models.blocks import Units, find_units
from fnaccel.models.moving_buffers import MovingBuffers
from fnaccel.models.parameter_values import gives_parameters
from fnaccel.step.chain import takes_step
from fnaccel.step.choices import Kept
from fnaccel.step.spec import Spec
from fnaccel.step.step import Capability, Phase, Transform
from fnaccel.transforms.recomputed import recomputed_with_parameters
from fnaccel.tree import Tree

_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "convolution", *_ATTENTION)
_NAMES: dict[str, tuple[str, ...]] = {"attention": _ATTENTION, "matmuls": _PRODUCTS}


@functools.cache
def _kept_operations(save: Kept) -> list[Any]:
    """The operations whose results are kept, as far as this torch has them."""
    packets = [getattr(torch.ops.aten, name, None) for name in _NAMES[save]]
    return [packet.default for packet in packets if packet is not None]


@attrs.frozen
class Remat:
    """The modules that run under activation checkpointing, and the results that are kept."""

    units: Units = "block"
    save: Kept = "nothing"

    def obstacle_to_capture(self, spec: Spec) -> str:  # noqa: ARG002
        """Forward and backward of one graph share their activations."""
        return "remat needs forward and backward as two programs"

    def check(self, spec: Spec) -> None:
        """Raise CapabilityError for compiled blocks that would wait on the host."""
        _memory(self.save)  # a copy of fnaccel may lack it
        if self.save == "offload" and any(t.name == "compile" for t in spec.step.transforms):
            raise CapabilityError(
                'remat(save="offload") moves tensors between programs, and compile makes one of them',
                where=f"strategy {spec.strategy}",
                fix='another save, such as fa.remat(step, save="attention"); or leave fa.compile out',
            )

    def on_module(self, module: nn.Module, where: str) -> None:
        """Patch `forward` in place, so that parameter names stay as they are."""
        units = find_units(module, self.units, where)
        if not units:
            raise CapabilityError(
                f"the model has no modules that remat(units={self.units!r}) could recompute",
                where=where,
                fix='name their classes: fa.remat(step, units=("Block",))',
            )
        functions: dict[Any, Any] = {}
        keeping = _memory(self.save)
        for _, unit in units:
            forward: Any = unit.forward
            plain = getattr(forward, "__func__", None)
            if plain is None:
                alone = _recomputing(lambda _, *a, run=forward, **k: run(*a, **k), self.save, keeping)
                unit.forward = types.MethodType(alone, unit)
            else:  # one function for equal blocks, so that one compilation may serve them
                shared = functions.setdefault(plain, _recomputing(plain, self.save, keeping))
                unit.forward = types.MethodType(shared, unit)


Keeping = Callable[[], contextlib.AbstractContextManager[Any]]
"""The context in which autograd keeps the inputs of a block."""


def _memory(save: Kept) -> Keeping:
    if save != "offload":
        return contextlib.nullcontext
    return _lazy.load("fnaccel.transforms.waiting.host_memory").HostMemory().keeping


def _recomputing(forward: Callable[..., Any], save: Kept, keeping: Keeping) -> Callable[..., Any]:
    selective = None
    if save in _NAMES:
        selective = functools.partial(create_selective_checkpoint_contexts, _kept_operations(save))

    def recomputed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            # the second run of a block would append its keys and values a second time
            args = tuple(None if _is_cache(value) else value for value in args)
            kwargs = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
            if kwargs.get("use_cache"):
                kwargs["use_cache"] = False
            if gives_parameters():
                return recomputed_with_parameters(forward, module, args, kwargs)
        context_fn = selective
        # a graph moves buffers in its forward only
        eager = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if eager and next(module.buffers(), None) is not None:
            context_fn = functools.partial(_still_buffers, _buffers_of(module), selective)
        options: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}
        run: Callable[..., Any] = functools.partial(forward, module)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            run = _twice_alike(run, module)
        if save != "offload":
            return checkpoint(run, *args, use_reentrant=False, **options, **kwargs)
        # hooks see the tensors that checkpoint takes by position
        leaves, structure = tree.flatten((args, kwargs))

        def run_leaves(*leaves: Any) -> Any:
            args, kwargs = tree.unflatten(structure, leaves)
            return run(*args, **kwargs)

        with keeping():
            return checkpoint(run_leaves, *leaves, use_reentrant=False, **options)

    return recomputed


_slots: weakref.WeakKeyDictionary[nn.Module, list[tuple[dict[str, Any], str]]] = weakref.WeakKeyDictionary()


def _twice_alike(run: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """The forward of a block, which raises if its second run finds other parameters than its first did.

    The second run happens in backward, when `functional_call` has put the module's own parameters back: the
    gradient would be that of other values.
    """
    if module not in _slots:
        _slots[module] = [
            (_torch.parameters_of(owner), name)
            for owner in module.modules()
            for name in _torch.parameters_of(owner)
        ]
    slots = _slots[module]
    first: list[Any] = []

    def checked(*args: Any, **kwargs: Any) -> Any:
        held = [slot.get(name) for slot, name in slots]
        if not first:
            first.extend(held)
        for index, (before, now) in enumerate(zip(first, held, strict=True)):
            # a unit of FSDP2 inside of the block may be gathered in one run and cut in the other
            if before is not now and hasattr(before, "placements") == hasattr(now, "placements"):
                raise CapabilityError(
                    f"the parameter {slots[index][1]!r} of a {type(module).__name__} was replaced for a call "
                    "(torch.func.functional_call), and the second run of that block, in backward, would read "
                    "the module's own",
                    where="fa.remat",
                    fix="fa.call(model, params, ...) in its place; or leave fa.remat out, or name other "
                    "blocks: fa.remat(step, units=...)",
                )
        return run(*args, **kwargs)

    return checked


Contexts = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]
_moving: weakref.WeakKeyDictionary[nn.Module, MovingBuffers] = weakref.WeakKeyDictionary()


def _buffers_of(module: nn.Module) -> MovingBuffers:
    """The buffers of a block. They learn from each of its runs which ones move."""
    if module not in _moving:
        slots = [
            (owner, name) for owner in module.modules() for name, _ in owner.named_buffers(recurse=False)
        ]
        _moving[module] = MovingBuffers(slots)
    return _moving[module]


def _still_buffers(moving: MovingBuffers, selective: Callable[[], Contexts] | None) -> Contexts:
    """The contexts of the two runs of a block. The second begins as the first did, and moves no buffer.

    Args:
        moving: the buffers of the block.
        selective: makes the contexts that keep the results of some operations, or None.
    """
    first, second = (contextlib.nullcontext(),) * 2 if selective is None else selective()
    before: dict[int, torch.Tensor] = {}

    @contextlib.contextmanager
    def run() -> Generator[None]:
        before.update(moving.begin())
        with first:
            yield
        moving.end()

    @contextlib.contextmanager
    def run_again() -> Generator[None]:
        with moving.holding(before), second:
            yield

    return run(), run_again()


def _is_cache(value: Tree) -> bool:
    """Whether an argument is a cache of keys and values, as transformers' models pass to their blocks."""
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


@takes_step
def remat(units: Units = "block", *, save: Kept = "nothing") -> Transform:
    """Trade compute for memory: run each block again in backward (Chen et al. 2016).

    With `save` the results of some operations are kept, and the rest is computed again (selective activation
    checkpointing, Korthikanti et al. 2022), by torch's `create_selective_checkpoint_contexts`:
    https://docs.pytorch.org/docs/stable/checkpoint.html

    A cache of keys and values that a transformers model passes to its blocks is left out while it trains, as
    `gradient_checkpointing_enable` does: a block that runs twice would append to it twice.

    Args:
        step: a step or a loss function; or none, for `fa.chain`.
        units: `"block"`, class names, a least size, or a function: see `fnaccel.models.blocks`.
        save: the results that are kept: `"nothing"`, `"attention"` (scaled_dot_product_attention), or
            `"matmuls"` (matrix products and convolutions as well). `"offload"` keeps the inputs of blocks
            alone, as `"nothing"` does, and these wait in host memory. Each comes back while the block after
            it computes. On CUDA by streams of its own and pinned memory, at most 32 GiB. Not beside
            `fa.compile`. Under `fa.call` they stay. (CUDA: not run on hardware.)

    Raises:
        UnknownNameError: no such `save`.
        CapabilityError: at `init`, if no module matches. `"offload"` beside `fa.compile`.

    Example:
        >>> step = fa.remat(loss_fn)
        >>> step = fa.remat(loss_fn, save="attention")
        >>> step = fa.remat(loss_fn, save="offload")
    """
    if save not in get_args(Kept):
        raise UnknownNameError(
            f"nothing called {save!r} is kept",
            where="fa.remat(save=)",
            fix=nearest(str(save), get_args(Kept)),
        )
    chosen = tuple(units) if isinstance(units, list) else units
    return Transform("remat", Phase.MODULE, apply=Remat(chosen, save), needs=frozenset({Capability.MODULES}))

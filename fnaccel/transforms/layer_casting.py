"""`cast_layers`: frozen weights stored in a small dtype, and cast around each layer's forward.

Backward gets the small weight and casts it again. Trainable parameters are never
stored small: an update would be lost in the rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from fnaccel.errors import CapabilityError, UnknownNameError, as_names, nearest, require
from fnaccel.models.layers import Layers, check_patterns, matches
from fnaccel.models.meta import modules_without_values
from fnaccel.models.parameter import takes
from fnaccel.step.chain import takes_step
from fnaccel.step.precision_policy import dtype_of
from fnaccel.step.spec import Spec
from fnaccel.step.step import Capability, Phase, Transform
from fnaccel.tree import Tree

_WHERE = "fa.transforms.cast_layers"
_FP8 = {
    "fp8": torch.float8_e4m3fn,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
_KINDS = (
    nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d,
    nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip


def _to_storage(name: str | torch.dtype) -> torch.dtype:
    return _FP8[name] if isinstance(name, str) and name in _FP8 else dtype_of(name, _WHERE)


def _to_compute(name: str | torch.dtype) -> torch.dtype:
    return dtype_of(name, _WHERE)


@attrs.frozen(kw_only=True)
class CastLayers:
    """Which frozen weights are stored in which dtype: see `cast_layers`."""

    storage: torch.dtype = attrs.field(default=torch.float8_e4m3fn, converter=_to_storage)
    compute: torch.dtype = attrs.field(default=torch.bfloat16, converter=_to_compute)
    only: tuple[str, ...] = attrs.field(default=(), converter=as_names)
    skip: tuple[str, ...] = attrs.field(default=("*norm*",), converter=as_names)

    def describe(self) -> str:
        """The text in the plan."""
        parts = [f"frozen weights stored in {_short(self.storage)}, computed in {_short(self.compute)}"]
        parts += [f"{name}={list(getattr(self, name))}" for name in ("only", "skip") if getattr(self, name)]
        return ", ".join(parts)

    def layers(self, module: nn.Module, trained: Callable[[str, Any], bool]) -> Layers:
        """Which layers are cast, and which of the same kinds are not.

        Args:
            module: the model.
            trained: whether the parameter of a path is trained.

        Raises:
            CapabilityError: a layer that `only` names is trained.
            ArgumentError: a pattern of `only` matches nothing.
        """
        check_patterns(self.only, module, _WHERE)
        layers = [
            (path, layer)
            for path, layer in module.named_modules(remove_duplicate=False)
            if next(layer.parameters(recurse=False), None) is not None
        ]
        # a weight that also serves a layer which is not cast has to stay as that one needs it
        uncast: dict[Any, str] = {}
        for path, layer in layers:
            if self._left(path, layer) is not None:
                uncast.update(dict.fromkeys(layer.parameters(recurse=False), path))
        converted: list[str] = []
        skipped: dict[str, str] = {}
        for path, layer in layers:
            why = self._left(path, layer)
            params = dict(layer.named_parameters(recurse=False))
            training = [name for name in params if trained(f"{path}.{name}" if path else name, params[name])]
            tied = next((uncast[param] for param in params.values() if param in uncast), None)
            if why is not None:
                if isinstance(layer, _KINDS):
                    skipped[path] = why
            elif len(training) == len(params):
                self._check_not_asked(path, training)
                skipped[path] = "trained"
            elif tied is not None:
                skipped[path] = f"tied to {tied}, which is not cast"
            else:
                converted.append(path)
        return Layers(tuple(converted), skipped)

    def _left(self, path: str, layer: nn.Module) -> str | None:
        """Why the patterns or its kind leave a layer as it is."""
        pattern = matches(path, self.skip, ("weight", "bias"))
        if not isinstance(layer, _KINDS) or next(layer.children(), None) is not None:
            return f"{type(layer).__name__} is not of a kind that is cast"
        if pattern is not None:
            return f"skip={pattern!r}"
        if self.only and matches(path, self.only, ("weight", "bias")) is None:
            return "no pattern of only= matches"
        return None

    def _check_not_asked(self, path: str, training: list[str]) -> None:
        if matches(path, self.only, ("weight", "bias")) is not None:
            raise CapabilityError(
                f"{path}.{training[0]} is trained, and an update would be lost in {_short(self.storage)}",
                where=_WHERE,
                fix=f'fa.train_step(..., frozen=("{path}.*",)), or take it out of only=',
            )

    def plan_notes(self, spec: Spec) -> list[str]:
        """Notes for the plan: the layers that are cast, and those that are not.

        Raises:
            CapabilityError: the strategy or the compiler can't carry it out, or nothing is frozen.
        """
        self._check_surroundings(spec)
        notes: list[str] = []
        for key, module in modules_without_values(spec.model).items():
            name = f"stored in {_short(self.storage)}" if key is None else f"{key} in {_short(self.storage)}"
            if isinstance(module, str):
                notes.append(f"{name}: known when init has built it: {module}")
                continue

            layers = self.layers(module, _trained(spec, key, module))
            _check_some(layers, _WHERE)
            first, *details = layers.describe()
            notes += [f"{name}: {first}", *details]
        return notes

    def _check_surroundings(self, spec: Spec) -> None:
        where = f"strategy {spec.strategy}"
        axes = [axis.mesh_axis for axis in spec.strategy.axes]
        if spec.runtime or "dp_shard" in axes:
            raise CapabilityError(
                f"{spec.runtime or 'fsdp'} gathers and casts weights itself, without the dtype they "
                "are stored in",
                where=where,
                fix="fa.local() or fa.ddp(); or leave out cast_layers: fsdp shards frozen weights too",
            )
        precision = spec.step.settings.precision
        if precision.autocast and precision.compute is not self.compute:
            raise CapabilityError(
                f"with_precision computes in {_short(precision.compute)} and cast_layers in "
                f"{_short(self.compute)}: weights would be cast twice, and backward keep the second copy",
                where=_WHERE,
                fix=f'fa.transforms.cast_layers(step, compute="{_short(precision.compute)}")',
            )
        if spec.step.settings.compiler is not None:
            raise CapabilityError(
                "cast_layers keeps small weights for backward by hooks, which torch.compile does not capture",
                where=_WHERE,
                fix="leave out fa.compile, or cast_layers",
            )

    def on_module(self, module: nn.Module, where: str) -> None:
        """Store the weights small and cast them around each forward. Names stay as they are."""

        def trained(_: str, param: torch.Tensor) -> bool:
            return param.requires_grad

        choice = self.layers(module, trained)
        _check_some(choice, where)
        # before any is cast: a tied weight has the dtype it came in under both of its names
        layers = [module.get_submodule(path) for path in choice.converted]
        plans = [(layer, _dtype_before(layer)) for layer in layers]
        done: set[nn.Module] = set()
        for layer, before in plans:
            if layer in done:  # one module under two names
                continue
            done.add(layer)
            for param in layer.parameters(recurse=False):
                if not param.requires_grad:
                    _check_range(param, self.storage, where)
                    param.data = param.data.to(self.storage)
            plain: Any = layer.forward
            layer.forward = functools.partial(_forward, layer, plain, self.compute, before)


def _check_range(param: torch.Tensor, storage: torch.dtype, where: str) -> None:
    """Raise CapabilityError if a value would be cut off: torch saturates in fp8 silently."""
    if param.numel() == 0 or param.is_meta or param.dtype is storage:
        return
    largest, most = float(param.detach().abs().max()), torch.finfo(storage).max
    if largest > most:
        raise CapabilityError(
            f"a weight of shape {list(param.shape)} holds {largest:g}; {_short(storage)} ends at {most:g}",
            where=where,
            fix='fa.transforms.cast_layers(step, storage="bf16"), or skip= this layer',
        )


def _check_some(layers: Layers, where: str) -> None:
    if not layers.converted:
        reasons = "; ".join(layers.describe()[1:]) or "it has no layer of a kind that is cast"
        raise CapabilityError(
            f"no weight of this model can be stored small: {reasons}",
            where=where,
            fix='freeze the parameters that are not trained: fa.train_step(..., frozen=("base.*",))',
        )


def _trained(spec: Spec, key: str | None, module: nn.Module) -> Callable[[str, Any], bool]:
    """A function that tells whether a parameter is trained. `frozen=` matches its first name."""
    prefix = "" if key is None else f"{key}/"
    frozen = {
        param
        for name, param in module.named_parameters()
        if any(takes(pattern, prefix + name, param) for pattern in spec.frozen)
    }
    return lambda _, param: spec.optimizers is not None and param.requires_grad and param not in frozen


def _dtype_before(layer: nn.Module) -> torch.dtype:
    """A layer's output dtype, outside of autocast, before its weights were cast."""
    return next(param.dtype for param in layer.parameters(recurse=False) if not param.requires_grad)


def _forward(
    layer: nn.Module,
    plain: Callable[..., Any],
    compute: torch.dtype,
    before: torch.dtype,
    *args: Any,
    **kwargs: Any,
) -> Any:
    kind = next(layer.parameters(recurse=False)).device.type
    autocast = torch.is_autocast_enabled(kind)
    if not autocast:  # else it casts inputs itself, and later layers take its output
        args, kwargs = _floats_to(args, compute), _floats_to(kwargs, compute)
    with _cast(layer, compute, everything=not autocast):
        out = plain(*args, **kwargs)
    return out if autocast else _floats_to(out, before)


@contextmanager
def _cast(layer: nn.Module, compute: torch.dtype, *, everything: bool) -> Generator[None]:
    """In the body a layer's frozen parameters are in the compute dtype. Backward keeps the small ones.

    With `everything` trained ones are cast too, so that all operands of a product have one dtype.
    """
    params: Any = dict(layer.named_parameters(recurse=False))
    cast = {name: p.to(compute) for name, p in params.items() if everything or not p.requires_grad}
    small = {
        value.untyped_storage().data_ptr(): params[name]
        for name, value in cast.items()
        if not params[name].requires_grad and value is not params[name]
    }

    def pack(saved: torch.Tensor) -> Any:
        param = small.get(saved.untyped_storage().data_ptr())
        if param is None:
            return saved
        return param, saved.size(), saved.stride(), saved.storage_offset()

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        param, size, stride, offset = packed
        return param.to(compute).as_strided(size, stride, offset)

    table: Any = vars(layer)["_parameters"]
    table.update(cast)
    try:
        with saved_tensors_hooks(pack, unpack):
            yield
    finally:
        table.update(params)


def _floats_to(value: Tree, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _floats_to(item, dtype) for key, item in value.items()}
    return tuple(_floats_to(item, dtype) for item in value) if type(value) is tuple else value


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@takes_step
def cast_layers(
    storage: str | torch.dtype = "fp8",
    *,
    compute: str | torch.dtype = "bf16",
    only: str | Iterable[str] = (),
    skip: str | Iterable[str] = ("*norm*",),
) -> Transform:
    """Store frozen weights in a small dtype and cast them around each layer's forward.

    For models of which a small part is trained (adapters, a head), and for teachers: weights take a
    quarter of fp32's memory in fp8. The state and its checkpoints hold the small values. They are rounded
    without a scale, as diffusers' layerwise casting does: e4m3 ends at 448, and below 2**-6 it has fewer
    than its four digits. Only linear, embedding and convolution layers are cast.

    Args:
        step: a step or a loss function; or none, for `fa.chain`.
        storage: `"fp8"` (e4m3), `"float8_e5m2"`, `"bf16"`, `"fp16"`, or a dtype.
        compute: the dtype each layer computes in. By default that of `with_precision`.
        only: patterns of paths of layers or parameters. By default all that are fully or partly frozen.
        skip: patterns of those that are left.

    Raises:
        UnknownNameError: no such dtype.
        ArgumentError: storage that is not smaller than the compute dtype. At `train_step`, a pattern of
            `only` that matches nothing.
        CapabilityError: at `train_step`: a trained parameter that `only` names, nothing frozen, another
            dtype than autocast's, `fsdp`, DeepSpeed, `compile`, and fp8 under `ddp` on CPUs.

    Example:
        >>> step = fa.transforms.cast_layers(loss_fn, "fp8", skip=("*norm*", "*embed*"))
    """
    if isinstance(storage, str) and storage not in _FP8:
        try:
            dtype_of(storage, _WHERE)
        except UnknownNameError as error:
            raise UnknownNameError(
                f"no storage is called {storage!r}",
                where=_WHERE,
                fix=nearest(storage, [*_FP8, "bf16", "fp16"]),
            ) from error
    record = CastLayers(storage=storage, compute=compute, only=only, skip=skip)
    require(
        record.storage.is_floating_point
        and record.storage.itemsize <= record.compute.itemsize
        and record.compute.itemsize > 1,
        f"weights stored in {_short(record.storage)} and computed in {_short(record.compute)} save nothing",
        _WHERE,
        'storage="fp8", compute="bf16"',
    )
    needs = frozenset({Capability.MODULES})
    return Transform("cast_layers", Phase.MODULE, apply=record, needs=needs)

"""`with_precision(step, "fp8")`: linear layers in 8-bit floating point, all else in bf16 under autocast.

The choice of layers and hardware is here. The layers themselves are torchao's or TransformerEngine's
(`torchao`, `transformer_engine`). Master weights, gradients and optimizer stay the same as without it.
"""

from __future__ import annotations

import weakref
from typing import Any, Literal, get_args

import attrs
import torch
from torch import nn

from fnaccel.errors import ArgumentError, CapabilityError, UnknownNameError, as_names, nearest, require
from fnaccel.extend import Capability, Phase, Spec, Transform
from fnaccel.models.layers import Layers, check_patterns, matches
from fnaccel.models.meta import modules_without_values
from fnaccel.step.chain import Chain, chain
from fnaccel.step.precision_policy import Precision
from fnaccel.transforms.float8 import torchao as by_torchao
from fnaccel.transforms.float8 import transformer_engine as by_transformer_engine

Backend = Literal["torchao", "transformer_engine", "ms_amp"]

_RECIPES = {"torchao": by_torchao.RECIPES, "transformer_engine": by_transformer_engine.RECIPES}
# options of a single backend
_OWN = {
    "torchao": ("emulate", "all_gather", "pad"),
    "transformer_engine": ("amax_history_len", "amax_compute_algo", "margin"),
}
_WHERE = "fa.transforms.Float8"
# AMD's with fp8 of torch's dtypes. A compute capability means nothing there
_ROCM = ("gfx942", "gfx950", "gfx12")

_found: weakref.WeakKeyDictionary[nn.Module, Layers] = weakref.WeakKeyDictionary()


@attrs.frozen(kw_only=True)
class Float8:
    """How linear layers compute in fp8: an argument of `with_precision`.

    Attributes:
        backend: whose layers: `"torchao"`, or `"transformer_engine"` (not run on hardware yet).
        recipe: how tensors are scaled. torchao: `"tensorwise"` (one scale for a tensor), `"rowwise"`,
            `"rowwise_with_gw_hp"` (the same, weight gradients in bf16).
            TransformerEngine: `"hybrid"` (e4m3 forward, e5m2 backward), `"e4m3"`, both with delayed
            scaling, or `"mxfp8"`. By default the first of its backend.
        only, skip: patterns of paths of layers or parameters (`"*lm_head*"`). `skip` wins.
        emulate: torchao: round to fp8 and multiply in fp32, on any device. Slower than bf16, for tests.
        all_gather: torchao: send weights as fp8 under `fsdp` (recipe `"tensorwise"` only). Each gather
            takes one small all-reduce a weight, to find its scale.
        pad: torchao: pad the inner dimension of each product to a multiple of 16. Without it a GPU
            raises if a batch has another number of rows.
        amax_history_len, amax_compute_algo, margin: TransformerEngine's delayed scaling: over how many
            steps the largest value is looked for, `"max"` or `"most_recent"` of them, and how many
            powers of two are left above it. By default 1024, `"max"` and 0.

    Raises:
        UnknownNameError: no such backend or recipe.
        ArgumentError: an option of another backend, or one that can't be.
        CapabilityError: `backend="ms_amp"`, which has optimizers and parameters of its own.

    Example:
        >>> step = fa.with_precision(loss_fn, fa.transforms.Float8(recipe="rowwise", skip="*lm_head*"))
    """

    backend: Backend = "torchao"
    recipe: str = attrs.field(
        default=attrs.Factory(lambda self: _RECIPES.get(self.backend, ("",))[0], takes_self=True)
    )
    only: tuple[str, ...] = attrs.field(default=(), converter=as_names)
    skip: tuple[str, ...] = attrs.field(default=(), converter=as_names)
    emulate: bool = False
    all_gather: bool = False
    pad: bool = False
    amax_history_len: int | None = None
    amax_compute_algo: str | None = None
    margin: int | None = None

    def __attrs_post_init__(self) -> None:
        if self.backend not in get_args(Backend):
            raise UnknownNameError(
                f"no fp8 backend is called {self.backend!r}",
                where=_WHERE,
                fix=nearest(str(self.backend), get_args(Backend)),
            )
        if self.backend == "ms_amp":
            raise CapabilityError(
                "MS-AMP replaces parameters and optimizer by its own (msamp.initialize returns both), which "
                "fnaccel's optimizers don't update, and is not maintained for torch 2.9 and later",
                where=_WHERE,
                fix="O1: fa.transforms.Float8(all_gather=True) under fsdp; O2 besides: "
                'fa.optim.adamw8bit(codes="fp8")',
            )
        if self.recipe not in _RECIPES[self.backend]:
            raise UnknownNameError(
                f"{self.backend} has no recipe {self.recipe!r}",
                where=_WHERE,
                fix=nearest(str(self.recipe), _RECIPES[self.backend]),
            )
        for backend, names in _OWN.items():
            for name in names if backend != self.backend else ():
                require(
                    getattr(self, name) is None or getattr(self, name) is False,
                    f"{name} is an option of {backend}, and the backend is {self.backend}",
                    _WHERE,
                    f"leave it out, or backend={backend!r}",
                )
        require(
            not self.all_gather or self.recipe == "tensorwise",
            f"weights can be sent as fp8 with one scale for each, and the recipe is {self.recipe!r}",
            _WHERE,
            'recipe="tensorwise", or leave out all_gather',
        )
        delayed = (self.amax_history_len, self.amax_compute_algo, self.margin)
        require(
            self.recipe != "mxfp8" or delayed == (None, None, None),
            "mxfp8 scales by the values at hand: there is no delayed scaling to set",
            _WHERE,
            'leave out amax_history_len, amax_compute_algo and margin, or recipe="hybrid"',
        )
        require(
            self.amax_history_len is None or self.amax_history_len >= 1,
            f"a history can't have {self.amax_history_len} steps",
            _WHERE,
            "amax_history_len=1024",
        )
        if self.amax_compute_algo not in (None, *by_transformer_engine.ALGORITHMS):
            raise UnknownNameError(
                f"no amax_compute_algo is called {self.amax_compute_algo!r}",
                where=_WHERE,
                fix=nearest(str(self.amax_compute_algo), by_transformer_engine.ALGORITHMS),
            )

    @property
    def multiple(self) -> int:
        """The number that must divide the features of a layer."""
        return 32 if self.recipe == "mxfp8" else 16

    def describe(self) -> str:
        """The text in the plan."""
        parts = [f"recipe {self.recipe}, by {self.backend}"]
        parts += [text for name, text in _WORDS.items() if getattr(self, name)]
        parts += [f"{name}={list(getattr(self, name))}" for name in ("only", "skip") if getattr(self, name)]
        return ", ".join(parts)

    def layers(self, model: object) -> Layers:
        """The linear layers of a module (or of a factory, without values) that would compute in fp8.

        Args:
            model: a module, or a factory of one.

        Raises:
            ArgumentError: a pattern matches nothing, or the factory can't run without values.

        Example:
            >>> list(fa.transforms.Float8(skip="*lm_head*").layers(GPT).skipped)
            ['lm_head']
        """
        require(
            not isinstance(model, dict), "several models", f"{_WHERE}.layers", "give one of them at a time"
        )
        module = modules_without_values(model)[None]
        if isinstance(module, str):
            raise ArgumentError(module, where=f"{_WHERE}.layers", fix="give a module")
        return self._choose(module)

    def _choose(self, module: nn.Module) -> Layers:
        check_patterns((*self.only, *self.skip), module, _WHERE)
        users: dict[Any, int] = {}
        for _, layer in module.named_modules(remove_duplicate=False):
            for param in layer.parameters(recurse=False):
                users[param] = users.get(param, 0) + 1
        converted: list[str] = []
        skipped: dict[str, str] = {}
        for path, layer in module.named_modules(remove_duplicate=False):
            if isinstance(layer, nn.Linear):
                why = self._obstacle(path, layer, users)
                if why:
                    skipped[path or "the model itself"] = why
                else:
                    converted.append(path)
        return Layers(tuple(converted), skipped)

    def _obstacle(self, path: str, layer: nn.Linear, users: dict[Any, int]) -> str:
        """The reason why a layer stays in bf16. Empty if it does not."""
        pattern = matches(path, self.skip, ("weight", "bias"))
        odd = [size for size in (layer.in_features, layer.out_features) if size % self.multiple]
        if not path:
            return "there is no module to put another layer in"
        if pattern is not None:
            return f"skip={pattern!r}"
        if self.only and matches(path, self.only, ("weight", "bias")) is None:
            return "no pattern of only= matches"
        if type(layer) is not nn.Linear:
            return f"{type(layer).__name__} is a linear layer of its own kind"
        if odd:
            return f"{' and '.join(map(str, odd))} features, not a multiple of {self.multiple}"
        if self.all_gather and users[layer.weight] > 1:
            return "its weight is tied, and all_gather makes another of it"
        return ""

    def plan_notes(self, spec: Spec) -> list[str]:
        """Notes for the plan: the layers in fp8, and those that are not.

        Raises:
            CapabilityError: the device has no fp8, the strategy or the compiler can't carry it out, or
                no layer would be converted.
            MissingBackendError: the backend is not installed.
        """
        self._check_surroundings(spec)
        check_device(spec.mesh.world.device, self)
        where = "fa.with_precision"
        library = by_torchao if self.backend == "torchao" else by_transformer_engine
        library.backend(where)
        notes: list[str] = []
        for key, module in modules_without_values(spec.model).items():
            name = "in fp8" if key is None else f"{key} in fp8"
            if isinstance(module, str):
                notes.append(f"{name}: known when init has built it (fa.transforms.float8_layers): {module}")
                continue
            layers = self._choose(module)
            _check_some(layers, where)
            first, *details = layers.describe()
            notes.append(f"{name}: {first}")
            notes += details
        if self.recipe in ("hybrid", "e4m3"):
            notes.append("the largest values of past steps, which scale fp8, are no part of the state")
        return notes

    def _check_surroundings(self, spec: Spec) -> None:
        where = f"strategy {spec.strategy}"
        if not self.all_gather:
            return
        if all(axis.mesh_axis != "dp_shard" for axis in spec.strategy.axes):
            raise CapabilityError(
                "all_gather=True sends shards of weights as fp8, and nothing is sharded",
                where=where,
                fix="fa.fsdp(), or leave out all_gather",
            )
        if spec.step.settings.captured:
            raise CapabilityError(
                "a captured step gathers weights by operations of its own, in bf16",
                where=where,
                fix='fa.compile(step, scope="block"), or leave out all_gather',
            )

    def on_module(self, module: nn.Module, where: str) -> None:
        """Convert the layers in place. Parameters keep their names."""
        layers = self._choose(module)
        _check_some(layers, where)
        for path in layers.converted:
            attributes = vars(module.get_submodule(path))
            if "forward" in attributes or attributes["_forward_hooks"] or attributes["_forward_pre_hooks"]:
                raise CapabilityError(
                    f"{path} has a forward or hooks of its own, and a new layer would lose them",
                    where=where,
                    fix="apply fa.with_precision before remat, cast_layers and your own transforms",
                )
        if self.backend == "torchao":
            by_torchao.convert(
                module,
                layers.converted,
                recipe=self.recipe,
                emulate=self.emulate,
                all_gather=self.all_gather,
                pad=self.pad,
                where=where,
            )
        else:
            by_transformer_engine.convert(module, layers.converted, where)
        _found[module] = layers


_WORDS = {
    "emulate": "emulated: rounded to fp8, multiplied in fp32",
    "all_gather": "weights sent as fp8",
    "pad": "padded to 16",
}


def _check_some(layers: Layers, where: str) -> None:
    if not layers.converted:
        reasons = "; ".join(layers.describe()[1:]) or "it has no linear layers"
        raise CapabilityError(
            f"nothing of this model would compute in fp8: {reasons}",
            where=where,
            fix='choose sizes that are multiples of 16, other patterns, or fa.with_precision(step, "bf16")',
        )


def check_device(device: torch.device, record: Float8) -> None:
    """See that a device multiplies in fp8, or that it is emulated.

    Raises:
        CapabilityError: it doesn't.
    """
    if record.emulate:
        return
    needed = (10, 0) if record.recipe == "mxfp8" else (8, 9)
    if device.type != "cuda":
        problem = f"this rank computes on {device.type}, which has no fp8 products"
    elif torch.version.hip is not None:
        arch = str(torch.cuda.get_device_properties(device).gcnArchName)
        problem = "" if arch.startswith(_ROCM) else f"{arch} has no fp8 products"
    else:
        major, minor = torch.cuda.get_device_capability(device)
        problem = (
            ""
            if (major, minor) >= needed
            else f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}, and "
            f"{record.recipe} needs {needed[0]}.{needed[1]}"
        )
    if problem:
        raise CapabilityError(
            f"fp8 can't run here: {problem}",
            where="fa.with_precision",
            fix='fa.with_precision(step, "bf16"); or fa.transforms.Float8(emulate=True), to test anywhere',
        )


def float8(record: Float8) -> Chain:
    """The transforms after which linear layers compute in fp8 and the rest in bf16."""
    needs = frozenset({Capability.MODULES})
    converted = Transform("float8", Phase.MODULE, apply=record, needs=needs)
    rest = Transform("with_precision", Phase.FORWARD, apply=Precision(compute="bf16"))
    if record.backend != "transformer_engine":
        return chain(converted, rest)
    chosen = {name: getattr(record, name) for name in _OWN["transformer_engine"]}
    context = by_transformer_engine.Autocast(
        recipe=record.recipe, **{name: value for name, value in chosen.items() if value is not None}
    )
    return chain(converted, Transform("float8_autocast", Phase.FORWARD, apply=context), rest)


def float8_layers(train_step: Any) -> Layers | list[Layers]:
    """The layers of a train step that compute in fp8, after `init`. The plan lists them before it.

    Args:
        train_step: the result of `fa.train_step`, after its `init`.

    Returns:
        The layers of its model. For several models a list, in their order.

    Raises:
        OwnershipError: before `init`.
        ArgumentError: a train step without fp8.

    Example:
        >>> step = fa.with_precision(loss_fn, fa.transforms.Float8(emulate=True, only="*up*"))
        >>> train_step = fa.train_step(step, model=fa.distribute(GPT, "local"), optimizer=fa.sgd(0.1))
        >>> state = train_step.init()
        >>> list(fa.transforms.float8_layers(train_step).converted)
        ['blocks.0.up', 'blocks.1.up']
    """
    layers = [_found[module] for module in train_step.engine.layout.modules if module in _found]
    require(
        bool(layers),
        "no layer of this train step was converted",
        "fa.transforms.float8_layers",
        'fa.with_precision(step, "fp8") before fa.train_step',
    )
    return layers[0] if len(layers) == 1 else layers

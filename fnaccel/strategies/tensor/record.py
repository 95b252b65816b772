"""`tensor()`: the options of the axis `tp`, and the cutting of a model over it."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import attrs
from torch import nn

from fnaccel import _torch
from fnaccel.errors import ArgumentError, CapabilityError, nearest
from fnaccel.extend import (
    Axis,
    Built,
    Cut,
    Mesh,
    MeshAxis,
    Spec,
    Strategy,
    Traffic,
    check_degree,
    maker,
    runtime_in,
)
from fnaccel.models.building import mark_cut, share_first_values
from fnaccel.strategies.strategy import Pairs
from fnaccel.strategies.tensor.plans import READY, Plan, check_ends, plan_for
from fnaccel.strategies.tensor.region import Region
from fnaccel.strategies.tensor.styles import ENDS, STYLES, Layer, cuts_of, divisors, parse, part_of, patch
from fnaccel.strategies.tensor.traffic import traffic_of


def _as_pairs(plan: Any) -> str | Pairs:
    if isinstance(plan, str):
        return plan
    entries = plan.items() if isinstance(plan, Mapping) else plan
    return Pairs((str(pattern), style) for pattern, style in entries)


@attrs.frozen
class Tensor(Axis):
    """The axis `tp`: see `tensor`."""

    mesh_axis: ClassVar[str] = "tp"
    maker: ClassVar[str] = "tensor"

    degree: int = -1
    plan: str | Pairs = attrs.field(default="auto", converter=_as_pairs)
    sequence: bool = False

    def check(self, spec: Spec) -> None:
        """Raise for runtimes beside it, for fp8, and for initial values that one rank sends to all."""
        where = f"strategy {spec.strategy}"
        runtime = runtime_in(spec)
        if runtime:
            raise CapabilityError(
                f"{runtime} lays models out itself, and tensor cuts their parameters",
                where=where,
                fix="multiply tensor with ddp, fsdp or hsdp",
            )
        if any(transform.name == "float8" for transform in spec.step.transforms):
            raise CapabilityError(
                "fp8 replaces linear layers, and tensor cuts them: no kernel computes both",
                where=where,
                fix='fa.with_precision(step, "bf16"); or fp8 under fa.ddp or fa.fsdp',
            )
        if any(getattr(axis, "init", "seeded") == "rank0" for axis in spec.strategy.axes):
            raise CapabilityError(
                'init="rank0" sends whole parameters, and ranks of tensor have parts',
                where=where,
                fix='init="seeded"; or "meta", and restore or adopt a state',
            )

    def plan_notes(self, spec: Spec) -> list[str]:
        """What ranks along `tp` share, and whether their group crosses machines."""
        size = spec.mesh.degrees.get("tp", 1)
        world = spec.mesh.world
        if size == 1:
            return []
        notes = [f"tensor: {size} ranks read the same rows, and each has a part of every layer in the plan"]
        if size > world.local_size or world.local_size % size:
            notes.append("tensor: a group crosses machines, and it communicates in every layer")
        return notes

    def cuts(self, built: Built, size: int) -> dict[str, Cut]:
        """The cuts of the plan over `size` ranks, by canonical name. Changes nothing."""
        of = _all_cuts(built, _layers(built, attrs.evolve(self, degree=size)), size, self)
        return {name: of[id(param)] for name, param in built.named("parameters") if id(param) in of}

    def traffic(self, built: Built, size: int) -> list[Traffic]:
        """The collectives of a micro-batch, with the bytes of one token, and those of a step."""
        rows = traffic_of(_layers(built, attrs.evolve(self, degree=size)), sequence=self.sequence)
        cuts, named = self.cuts(built, size), dict(built.named("parameters"))
        added = [named[name] for name, cut in cuts.items() if cut.partial and named[name].requires_grad]
        if added:
            bytes_added = sum(param.numel() * param.element_size() for param in added)
            what = "gradients of which ranks have summands"
            rows.append(
                Traffic(axis="tp", kind="all_reduce", count=1, size=bytes_added, per="step", what=what)
            )
        return rows

    def apply(self, built: Built, mesh: Mesh) -> None:
        """Cut the layers of the plan, and patch their forwards."""
        axis = mesh["tp"]
        layers = _layers(built, attrs.evolve(self, degree=axis.size))
        if axis.group is None:
            return
        draws = any(_draws(module) for root in built.modules.values() for module in root.modules())
        region = Region(axis, mesh.world.device, sequence=self.sequence, draws=draws)
        cuts = _all_cuts(built, layers, axis.size, self)
        mark_cut(built, (layer.module for layer, _ in layers))
        for layer, styles in layers:
            if styles != ("/",):
                patch(layer, [style for style in styles if self.sequence or style not in ENDS], axis, region)
        if draws:
            for root in built.modules.values():
                region.watch(root)
        if built.prebuilt:
            share_first_values(built, axis.group, mesh.world.device)
        _cut_parameters(built, cuts, axis)
        for layer, styles in layers:
            if styles == ("/",):
                path, _, attribute = layer.path.rpartition(".")
                setattr(layer.module, attribute, _divided(layer, path, attribute, axis.size))


@maker
def tensor(
    degree: int = -1, plan: str | Mapping[str, str | int] | Pairs = "auto", sequence: bool = False
) -> Strategy:
    """Cut layers over ranks that read the same rows (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053).

    A column layer has a part of its output features, and the row layer after it the same part of its input
    features: one all-reduce in forward and one in backward for each such pair. Parameters are this rank's
    parts, and states show them as DTensors of the whole shape. Values are those of the whole seeded model.

    Multiply it with `ddp`, `fsdp` or `hsdp`. It stands innermost: neighbouring ranks form a group.

    Args:
        degree: over how many ranks. -1 takes the ranks that are left.
        plan: `{pattern: style}` with patterns of module paths, of which the first that matches counts. In a
            dict of models, paths begin with the name of the model: `"student/blocks.*.up"`. Or a ready plan:
            `"gpt2"`, `"llama"`, `"bert"`, `"t5"`. `"auto"` takes the ready plan for the model's type, or the
            `tp_plan` that the model brings, in these styles or in those of transformers. Styles:

            - a dimension of a weight, as in `fa.fsdp(dims=)`. For a Linear `{"*.up.weight": 0}` is the same
              as `{"*.up": "colwise"}`, and 1 is `"rowwise"`.
            - `"colwise"`, `"rowwise"`: a Linear, or transformers' Conv1D, is cut along its output or input
              features. The input of column layers is whole, and so is the output of row layers.
            - `"packed_colwise:3"`: as colwise, for 3 matrices side by side, such as query, key, value.
            - `"colwise_gather"`: the outputs are gathered, such as logits.
            - `"vocab"`: an Embedding is cut along its rows. A Linear keeps its part of the logits, and
              `cross_entropy` takes them without a gather.
            - `"replicate"`: whole, for a module that a later pattern matches too. `"replicate_partial"`:
              whole, between column and row layers, so that ranks add their gradients.
            - `"/"`: the pattern names an attribute, such as `"*.attention.heads"`, which is divided.
            - with `sequence=True`: `"scatter_input"` and `"gather_output"` are for the first and the last
              block, between which activations are cut along the sequence. `"sequence"` marks modules in
              between, such as norms, whose gradients ranks add. `"gather_input"` is for an attention module
              whose own forward reads the length of its input.
        sequence: cut activations outside of column and row layers along dimension 1 (Korthikanti et al.
            2022, https://arxiv.org/abs/2205.05198).

    Raises:
        ArgumentError: no such plan or style. At `init`: a pattern that matches nothing or a parameter of no
            layer, a size or a number of heads that does not divide, a tied weight of which one use is cut.

    Example, on 2 ranks:
        >>> plan = {"*.up": "colwise", "*.down": "rowwise", "lm_head": "colwise_gather"}
        >>> model = fa.distribute(GPT, fa.tensor(2, plan))
        >>> state = fa.train_step(loss_fn, model=model, optimizer=fa.sgd(0.1)).init()
        >>> state.params["lm_head.weight"].shape, state.params["lm_head.weight"].to_local().shape
        (torch.Size([16, 32]), torch.Size([8, 32]))
    """
    check_degree(degree, "fa.tensor")
    if isinstance(plan, str) and (plan in STYLES or plan.startswith("packed_colwise")):
        raise ArgumentError(
            f"{plan!r} is a style, and a plan says which layers have it",
            where="fa.tensor(plan=)",
            fix=f'plan={{"*.up": "{plan}", ...}}: a pattern for the layers before it',
        )
    if isinstance(plan, str) and plan not in (*READY, "auto"):
        raise ArgumentError(
            f"no plan is called {plan!r}", where="fa.tensor(plan=)", fix=nearest(plan, [*READY, "auto"])
        )
    if not isinstance(plan, str):
        _check_plan(plan)
        styles = [style for _, style in _as_pairs(plan)]
        if not styles:
            raise ArgumentError(
                "the plan names no layer",
                where="fa.tensor(plan=)",
                fix='plan={"*.up": "colwise", "*.down": "rowwise"}; or leave out the axis',
            )
        for pattern, style in _as_pairs(plan):
            _check_dim(pattern, style) if type(style) is int else parse(style)
        if sequence:
            check_ends([style for style in styles if type(style) is not int], "the plan")
    return Strategy((Tensor(degree, plan, bool(sequence)),))


def _check_plan(plan: Any) -> None:
    entries = plan.items() if isinstance(plan, Mapping) else plan
    pairs = isinstance(entries, Iterable) and all(
        isinstance(entry, Sequence) and len(entry) == 2 and isinstance(entry[0], str) for entry in entries
    )
    if not pairs or any(isinstance(entry, str) for entry in entries):
        raise ArgumentError(
            f"{plan!r} is no plan",
            where="fa.tensor(plan=)",
            fix='plan={"*.up": "colwise", "*.down": "rowwise"}, or the name of a ready plan',
        )


def _check_dim(pattern: str, dim: int) -> None:
    if dim not in (0, 1) or not pattern.endswith(".weight"):
        raise ArgumentError(
            f"{pattern!r}: {dim} is no dimension of a layer's weight",
            where="fa.tensor(plan=)",
            fix='0 or 1 for a weight, {"*.up.weight": 0, "*.down.weight": 1}; or a style for a layer, '
            '{"*.up": "colwise"}',
        )


def _styles_of(layer: Layer, style: str | int) -> tuple[str, ...]:
    """The styles of a layer. A dimension of its weight is that of its output features, or of its input."""
    if isinstance(style, str):
        return parse(style)
    if style == layer.features[0]:
        return ("colwise",)
    return ("vocab",) if isinstance(layer.module, nn.Embedding) else ("rowwise",)


def _layers(built: Built, options: Tensor) -> list[tuple[Layer, tuple[str, ...]]]:
    """The modules and attributes that the plan names, with their styles.

    Raises:
        ArgumentError: a pattern matches nothing, or heads do not divide.
    """
    chosen: list[tuple[Layer, tuple[str, ...]]] = []
    attributes: set[tuple[int, str]] = set()
    matched: set[str] = set()
    lacking: list[str] = []
    optional = True
    named = isinstance(options.plan, str)  # the plan of each model, whose paths are those in the model
    for key, root in built.modules.items():
        plan = plan_for(root, options.plan, sequence=options.sequence)
        matched = set() if named else matched
        start = len(chosen)
        shown = "" if key is None else f"{key}/"
        prefix = "" if named else shown
        for path, module in root.named_modules():
            style = _first(plan, f"{prefix}{path}", matched)
            if style is not None:
                layer = Layer(f"{shown}{path}", module)
                chosen.append((layer, _styles_of(layer, style)))
            for pattern, each in plan.pairs:
                owner, _, attribute = pattern.rpartition(".")
                if each != "/" or not fnmatch.fnmatchcase(f"{prefix}{path}", owner):
                    continue
                if hasattr(module, attribute):
                    matched.add(pattern)
                    if (id(module), attribute) not in attributes:  # divided once, by the first pattern
                        attributes.add((id(module), attribute))
                        chosen.append((Layer(f"{shown}{path}.{attribute}", module), ("/",)))
        if len(chosen) > start:
            _check_heads(plan, options)
        unmatched = [pattern for pattern, _ in plan.pairs if pattern not in matched]
        lacking = [*lacking, *unmatched] if named else unmatched
        optional = optional and plan.optional
    if (lacking and not optional) or not chosen:
        _check_bare(lacking[0], built, named=named)
        raise ArgumentError(
            f"the pattern {lacking[0]!r} matches no module",
            where="fa.tensor(plan=)",
            fix=nearest(lacking[0], _paths(built, named=named)),
        )
    return chosen


def _check_rows_follow(chosen: Sequence[tuple[Layer, tuple[str, ...]]]) -> None:
    """Raise ArgumentError for a column layer whose output no row layer takes: the loss would see a part.

    Layers of one block belong together. A block with row layers only may belong to any other.
    """
    columns: dict[str, str] = {}
    rows: set[str] = set()
    for layer, styles in chosen:
        block = _block_of(layer.path)
        if "rowwise" in styles:
            rows.add(block)
        elif any(style == "colwise" or style.startswith("packed_colwise") for style in styles):
            columns.setdefault(block, layer.path)
    alone = [path for block, path in columns.items() if block not in rows]
    if alone and not rows - columns.keys():
        raise ArgumentError(
            f"{alone[0]} is a column layer, and no row layer takes its output",
            where="fa.tensor(plan=)",
            fix='give the layer after it "rowwise"; or "colwise_gather" to this one, or "vocab" if it makes '
            "the logits of cross_entropy",
        )


def _block_of(path: str) -> str:
    """The path of the innermost member of a list around a module, or ""."""
    parts = path.split(".")[:-1]
    while parts and not parts[-1].isdigit():
        parts.pop()
    return ".".join(parts)


def _paths(built: Built, *, named: bool) -> list[str]:
    """The paths that patterns match. In a dict of models they begin with the name of the model."""
    return [
        path if named or key is None else f"{key}/{path}"
        for key, root in built.modules.items()
        for path, _ in root.named_modules()
        if path
    ]


def _check_bare(pattern: str, built: Built, *, named: bool) -> None:
    """Raise ArgumentError if a pattern that matches no module matches a parameter."""
    names = [
        name if named or key is None else f"{key}/{name}"
        for key, root in built.modules.items()
        for name, _ in root.named_parameters()
    ]
    bare = fnmatch.filter(names, pattern)
    if bare:
        raise ArgumentError(
            f"{pattern!r} names the parameter {bare[0]}, and a plan names layers: arithmetic of your own "
            "can't be cut",
            where="fa.tensor(plan=)",
            fix="put the parameter in a layer (torch.nn.Linear), or write an axis; for the weight of a layer "
            'give its dimension: {"*.up.weight": 0}',
        )


def _first(plan: Plan, path: str, matched: set[str]) -> str | int | None:
    found: str | int | None = None
    for pattern, style in plan.pairs:
        layer = pattern if isinstance(style, str) else pattern.removesuffix(".weight")
        if style != "/" and fnmatch.fnmatchcase(path, layer):
            matched.add(pattern)
            found = style if found is None else found
    return found


def _check_heads(plan: Plan, options: Tensor) -> None:
    size = options.degree
    for name, heads in plan.heads.items():
        if size > 0 and heads % size:
            raise ArgumentError(
                f"config.{name} is {heads}, which {size} ranks can't divide",
                where=f"fa.tensor({size})",
                fix=f"a degree among {', '.join(map(str, divisors(heads)))}",
            )


def _divided(layer: Layer, path: str, attribute: str, size: int) -> int:
    value = getattr(layer.module, attribute)
    if not isinstance(value, int) or value % size:
        raise ArgumentError(
            f"{path}.{attribute} is {value!r}, which {size} ranks can't divide",
            where=f"fa.tensor({size})",
            fix=f"a degree among {', '.join(map(str, divisors(value)))}"
            if isinstance(value, int)
            else 'the style "/" is for numbers of heads and features',
        )
    return value // size


def _draws(module: nn.Module) -> bool:
    """Whether a module may draw random numbers between column and row layers."""
    values = (value for name, value in vars(module).items() if "drop" in name or name == "p")
    return any(isinstance(value, float) and value > 0 for value in values)


def _all_cuts(
    built: Built, layers: list[tuple[Layer, tuple[str, ...]]], size: int, options: Tensor
) -> dict[int, Cut]:
    """The cuts of all parameters by identity, checked before anything changes.

    Raises:
        ArgumentError: a size does not divide, or a tied weight is cut otherwise elsewhere.
    """
    cuts: dict[int, Cut] = {}
    owners: dict[int, str] = {}
    planned: set[tuple[int, str]] = set()
    for layer, styles in layers:
        if styles == ("/",):
            attribute = layer.path.rpartition(".")
            _divided(layer, attribute[0], attribute[2], size)
            continue
        for style in styles:
            for name, cut in cuts_of(layer, style, size, sequence=options.sequence).items():
                param = layer.module.get_parameter(name)
                path = f"{layer.path}.{name}"
                if cuts.setdefault(id(param), cut) != cut:
                    raise ArgumentError(
                        f"{owners[id(param)]} and {path} are one parameter, cut in two ways",
                        where="fa.tensor(plan=)",
                        fix='give both styles that cut it alike, such as "vocab" and "colwise_gather"',
                    )
                owners[id(param)] = path
                owner, _, last = name.rpartition(".")
                planned.add((id(layer.module.get_submodule(owner)), last))
    for root in built.modules.values():
        for path, module in root.named_modules():
            for name, param in _torch.parameters_of(module).items():
                cut = cuts.get(id(param))
                if cut is not None and cut.dim is not None and (id(module), name) not in planned:
                    raise ArgumentError(
                        f"{path}.{name} and {owners[id(param)]} are one parameter, of which the plan has one",
                        where="fa.tensor(plan=)",
                        fix='give both modules a style, such as "vocab" and "colwise_gather"',
                    )
    _check_rows_follow(layers)
    return cuts


def _cut_parameters(built: Built, cuts: dict[int, Cut], axis: MeshAxis) -> None:
    built.cuts.update(
        (name, cuts[id(param)]) for name, param in built.named("parameters") if id(param) in cuts
    )

    def parted(param: nn.Parameter) -> nn.Parameter:
        cut = cuts.get(id(param))
        if cut is None or cut.dim is None:
            return param
        part = part_of(param.detach(), cut, axis.rank, axis.size)
        return nn.Parameter(part, requires_grad=param.requires_grad)

    _torch.replace_parameters(built.host, parted)

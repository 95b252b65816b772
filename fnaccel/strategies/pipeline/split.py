"""Where a model is split: which blocks and which parameters lie on which stage."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
from torch import nn

from fnaccel import _torch
from fnaccel.errors import UnknownNameError
from fnaccel.extend import ArgumentError, CapabilityError, nearest
from fnaccel.models.blocks import blocks
from fnaccel.texts import counted

WHERE = "fa.pipeline(split=)"


@attrs.frozen
class Element:
    """A module of the chain that a pipeline cuts. Its stage runs it, and other stages pass over it.

    Attributes:
        path: its name in the model.
        module: itself.
        stage: where it runs. Of a group, where its last member runs.
        carried: whether all later stages get its output: the last member of a list, a module that is no
            block, which `split=` names, or a group.
    """

    path: str
    module: nn.Module
    stage: int
    carried: bool = False

    def has(self, name: str) -> bool:
        """Whether a parameter, a buffer or a module of this name is inside of it."""
        return name.startswith(f"{self.path}.")


@attrs.frozen
class Split:
    """A model cut into stages.

    Attributes:
        elements: the chain, in the order in which it runs.
        groups: modules around several lists' members, such as an encoder before a decoder. Later stages than
            that of the last member pass over the group.
        parameters: by canonical name, the stages that use the parameter. The first one owns it.
        names: the stage of each name of a parameter or a buffer.
        homes: by stage, its rank along the axis.
    """

    elements: tuple[Element, ...]
    groups: tuple[Element, ...]
    parameters: dict[str, tuple[int, ...]]
    names: dict[str, int]
    homes: tuple[int, ...]

    @property
    def stages(self) -> int:
        """How many."""
        return len(self.homes)

    def home(self, name: str) -> int:
        """The rank of a parameter or a buffer."""
        return self.homes[self.names[name]]

    @functools.cached_property
    def users(self) -> dict[str, tuple[int, ...]]:
        """By canonical name, the ranks that use the parameter. The first one owns it."""
        return {
            name: tuple(dict.fromkeys(self.homes[stage] for stage in stages))
            for name, stages in self.parameters.items()
        }

    @functools.cached_property
    def last(self) -> dict[int, Element]:
        """By stage, the element whose output goes to the next stage."""
        return {element.stage: element for element in self.elements}

    @functools.cached_property
    def carried(self) -> frozenset[str]:
        """The elements and groups whose output goes to all later stages."""
        return frozenset(each.path for each in (*self.elements, *self.groups) if each.carried)

    def end(self, stage: int) -> Element | None:
        """The element, or the group around it, at whose end the stage ends. None for the last stage."""
        last = self.last[stage]
        if stage == self.stages - 1:
            return None
        around = [g for g in self.groups if g.stage == stage and g.has(last.path)]
        return min(around, key=lambda group: len(group.path), default=last)

    def inside(self, name: str) -> bool:
        """Whether a parameter lies in an element of the chain."""
        return any(element.has(name) for element in self.elements)


def join(path: str, name: str) -> str:
    """The name in a model of a parameter or a buffer of the module at a path."""
    return f"{path}.{name}" if path else name


def split_model(model: nn.Module, asked: Any, weights: Mapping[str, float], homes: tuple[int, ...]) -> Split:
    """Cut a model into stages.

    Args:
        model: the whole model.
        asked: `"even"`, `"size"`, the paths where stages begin, or pairs of a path and its stage.
        weights: of `"embedding"` and `"head"`, where a block weighs 1. For `"even"`.
        homes: by stage, its rank along the axis.

    Raises:
        ArgumentError: a number of paths or a stage that does not fit, or a stage without a block.
        CapabilityError: the model has no chain of blocks, or fewer than stages, or several.
        UnknownNameError: a path that no module has. Names the nearest.
    """
    stages = len(homes)
    named = dict(model.named_modules())
    found = [name for block, module in blocks(model) for name in _called(block, module)]
    _check_once(model, found)
    if isinstance(asked, str):
        _check_chain(model, found, stages)
        places = _balanced(model, found, asked, weights, stages)
        of_path: dict[str, int] = {}
        own: list[str] = []
    else:
        _check_paths(asked, named, stages)
        of_path = dict(asked) if asked and isinstance(asked[0], tuple) else _beginnings(asked, named)
        own = [path for path in of_path if not any(name.startswith(f"{path}.") for name in found)]
        found = [name for name in named if name in found or name in own]
        places = _assigned(found, named, of_path, begin=not isinstance(asked[0], tuple))
    elements = [
        Element(name, named[name], stage, name in own) for name, stage in zip(found, places, strict=True)
    ]
    groups = _groups(elements, named)
    elements = sorted(elements, key=lambda element: element.stage)
    empty = sorted(set(range(stages)) - {element.stage for element in elements})
    if empty:
        raise ArgumentError(
            f"stage {empty[0]} of {stages} gets no block",
            where=WHERE,
            fix="give each stage a path, or fewer stages",
        )
    of_names = _stages_of_names(model, elements, groups, of_path, stages)
    aliases: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(param), []).append(name)
    users = {each[0]: tuple(dict.fromkeys(of_names[name] for name in each)) for each in aliases.values()}
    return Split(tuple(elements), groups, users, of_names, homes)


def _called(path: str, module: nn.Module) -> Iterator[str]:
    """The path of a block, or of those inside of it if it is a list, which nobody calls."""
    if not isinstance(module, nn.ModuleList):
        yield path
        return
    for key, member in module.named_children():
        yield from _called(f"{path}.{key}", member)


def _check_once(model: nn.Module, found: Sequence[str]) -> None:
    """Raise CapabilityError if a list runs one block several times."""
    for path in dict.fromkeys(name.rpartition(".")[0] for name in found):
        container: Any = model.get_submodule(path)
        members = [id(module) for module in container]
        if len(set(members)) < len(members):
            raise CapabilityError(
                f"{path or 'the model'} holds one block several times, and a stage runs a block once",
                where=WHERE,
                fix="give the list blocks of their own, or use another strategy",
            )


def _check_chain(model: nn.Module, found: Sequence[str], stages: int) -> None:
    """Raise CapabilityError unless the blocks are one list that is long enough."""
    lists = list(dict.fromkeys(name.rpartition(".")[0] for name in found))
    if len(lists) > 1:
        first = [next(name for name in found if name.rpartition(".")[0] == each) for each in lists[1:]]
        raise CapabilityError(
            f"{type(model).__name__} has {len(lists)} lists of blocks, {', '.join(lists)}, and not one chain",
            where=WHERE,
            fix=f"name the modules where stages begin: split={tuple(first[: stages - 1])!r}",
        )
    if len(found) < stages:
        what = counted(len(found), "block") if found else "no blocks in a ModuleList or Sequential"
        raise CapabilityError(
            f"{type(model).__name__} has {what}, for {stages} stages",
            where=WHERE,
            fix="use fewer stages, or name the modules where stages begin: split=('encoder.3', 'head')",
        )


def _balanced(
    model: nn.Module, found: Sequence[str], asked: str, weights: Mapping[str, float], stages: int
) -> list[int]:
    """The stage of each block, so that the squares of the stages' weights add up to the least.

    A tied weight counts in the head, too. By size one that is looked up counts nowhere.
    """
    sizes = dict.fromkeys(found, 0)
    before = after = 0
    looked_up = {
        f"{path}.weight" for path, module in model.named_modules() if isinstance(module, nn.Embedding)
    }
    for name, param in model.named_parameters(remove_duplicate=False):
        if asked == "size" and name in looked_up:
            continue
        block = next((each for each in found if name.startswith(f"{each}.")), None)
        if block is not None:
            sizes[block] += param.numel()
        elif any(sizes.values()):
            after += param.numel()
        else:
            before += param.numel()
    if asked == "size":
        loads = [float(sizes[name]) for name in found]
        ends = float(before), float(after)
    else:
        loads = [1.0] * len(found)
        ends = (
            weights.get("embedding", 1.0) if before else 0.0,
            weights.get("head", 1.0) if after else 0.0,
        )
    loads[0] += ends[0]
    loads[-1] += ends[1]
    sums = [0.0]
    for load in loads:
        sums.append(sums[-1] + load)
    # best[k][n]: the least cost of the first n blocks on k stages, and how many of them are on k - 1
    best: list[list[tuple[float, int]]] = [[(0.0, 0)] + [(math.inf, 0)] * len(loads)]
    for _ in range(stages):
        before = best[-1]
        row = [
            min((before[at][0] + (sums[end] - sums[at]) ** 2, at) for at in range(end))
            for end in range(1, len(loads) + 1)
        ]
        best.append([(math.inf, 0), *row])
    places = [0] * len(loads)
    end = len(loads)
    for stage in reversed(range(stages)):
        begin = best[stage + 1][end][1]
        places[begin:end] = [stage] * (end - begin)
        end = begin
    return places


def _check_paths(asked: Any, named: Mapping[str, nn.Module], stages: int) -> None:
    pairs = bool(asked) and isinstance(asked[0], tuple)
    paths = [pair[0] for pair in asked] if pairs else list(asked)
    for path in paths:
        if path not in named:
            raise UnknownNameError(f"the model has no module {path!r}", where=WHERE, fix=nearest(path, named))
    if pairs:
        for path, stage in asked:
            if type(stage) is not int or not 0 <= stage < stages:
                raise ArgumentError(
                    f"{path!r} can't be on stage {stage!r} of {stages}",
                    where=WHERE,
                    fix=f"a whole number from 0 to {stages - 1}",
                )
    elif len(paths) != stages - 1:
        raise ArgumentError(
            f"{counted(len(paths), 'path')} for {stages} stages",
            where=WHERE,
            fix=f"name the modules where stages 1 to {stages - 1} begin: {counted(stages - 1, 'path')}",
        )


def _beginnings(paths: Sequence[str], named: Mapping[str, nn.Module]) -> dict[str, int]:
    """The stage that begins at each path, in the order of the model."""
    ordered = [name for name in named if name in paths]
    return {path: stage for stage, path in enumerate(ordered, start=1)}


def _assigned(
    found: Sequence[str], named: Mapping[str, nn.Module], of_path: Mapping[str, int], *, begin: bool
) -> list[int]:
    """The stage of each element: that of its path, or of a module around it, or of the element before it.

    Args:
        found: the elements.
        named: the modules in order.
        of_path: stages by path.
        begin: whether a path is where a stage begins. Then what follows it is on that stage, too.
    """
    stage, places = 0, dict[str, int]()
    for name in named:
        around = [path for path in of_path if name == path or (not begin and name.startswith(f"{path}."))]
        stage = of_path[max(around, key=len)] if around else stage
        places[name] = stage
    return [places[name] for name in found]


def _groups(elements: list[Element], named: Mapping[str, nn.Module]) -> tuple[Element, ...]:
    """The modules that end where one list of blocks ends and another begins.

    What follows a list that is called by no module of its own may read the output of its last member.
    """
    groups: dict[str, Element] = {}
    for place in range(len(elements) - 1):
        element, following = elements[place], elements[place + 1]
        own, other = element.path.split("."), following.path.split(".")
        if own[:-1] == other[:-1]:
            continue
        alike = next((at for at, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), None)
        if alike is None:
            raise ArgumentError(
                f"{element.path} and {following.path} are one inside of the other",
                where=WHERE,
                fix="name the inner one or the outer one",
            )
        path = ".".join(own[: alike + 1])
        if path == element.path or isinstance(named[path], nn.ModuleList):
            elements[place] = attrs.evolve(element, carried=True)
        else:
            groups[path] = Element(path, named[path], element.stage, carried=True)
    return tuple(groups.values())


def _stages_of_names(
    model: nn.Module,
    elements: Sequence[Element],
    groups: Sequence[Element],
    of_path: Mapping[str, int],
    stages: int,
) -> dict[str, int]:
    """The stage of each parameter and buffer: that of its element, or of the next element in its group.

    After the last element of a group it is the stage of that, and after all elements the last stage.
    """
    names = [
        join(path, name)
        for path, module in model.named_modules(remove_duplicate=False)
        for kind in (_torch.parameters_of(module), _torch.buffers_of(module))
        for name in kind
    ]
    of_names: dict[str, int] = {}
    following: Element | None = None
    for name in reversed(names):
        element = next((each for each in elements if each.has(name)), None)
        following = element or following
        named = [path for path in of_path if name.startswith(f"{path}.")]
        group = next((each for each in groups if each.has(name)), None)
        if element is None and named:
            of_names[name] = of_path[max(named, key=len)]
        elif group is not None and (following is None or not group.has(following.path)):
            of_names[name] = group.stage
        else:
            of_names[name] = stages - 1 if following is None else following.stage
    return of_names

"""ZeRO-3 in a captured step: parameters are gathered just before they are used, and again for backward.

A pass over the graph that inductor is about to lower. As written, a step gathers all parameters first and
keeps them until backward has used them. This pass moves each all-gather to one unit before its first use,
so that it runs beside the previous unit. Parameters that backward needs are gathered again, except for
those that backward needs first: they stay. An all-gather of the model's own, such as one of activations,
stays in its place.

Gradients are reduced as soon as those of a unit are there. As written, all are reduced after backward, and
until then they live whole, with all that they are computed from.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Container, Iterable, Sequence
from typing import Any

import attrs
import torch
from torch import fx

from fnaccel import _torch
from fnaccel.strategies.captured_buckets import begin_when_ready

_GATHER = "all_gather_into_tensor"


@attrs.frozen
class GatheredShards:
    """The shards that one all-gather of parameters takes, as a graph shows them.

    Attributes:
        group: the name of the process group.
        shards: shape and dtype of each shard, as text, sorted.
    """

    group: str
    shards: tuple[str, ...]


def gathered_shards(group: str, shards: Iterable[torch.Tensor]) -> GatheredShards:
    """The all-gather of these shards over the process group with this name."""
    return GatheredShards(group, tuple(sorted(map(_shown, shards))))


class _Gather:
    """One all-gather of the forward pass and the nodes computed from it alone, in the order of the graph."""

    def __init__(self, gather: fx.Node, place: dict[fx.Node, int], boundary: int) -> None:
        self.start = gather
        self.nodes = [gather]
        derived = {gather}
        for node in sorted(_reached(gather), key=place.__getitem__):
            if place[node] < boundary and node not in derived and derived.issuperset(node.all_input_nodes):
                derived.add(node)
                self.nodes.append(node)
        users = {user for node in self.nodes for user in node.users if user not in derived}
        self.early = min(
            (user for user in users if place[user] < boundary), key=place.__getitem__, default=None
        )
        self.late = sorted((user for user in users if place[user] >= boundary), key=place.__getitem__)


def regather(graph: fx.Graph, units: Sequence[GatheredShards]) -> None:
    """Change the graph of one step in place. A graph without a backward pass is left alone.

    Args:
        graph: the graph.
        units: the all-gathers of parameters. All others stay in their places.
    """
    place = {node: index for index, node in enumerate(graph.nodes)}
    boundary = next((index for node, index in place.items() if _is_backward(node)), None)
    if boundary is None:
        return
    gathers = [
        _Gather(node, place, boundary)
        for node, index in place.items()
        if index < boundary and _GATHER in str(node.target) and _taken_by(node) in units
    ]
    _regather_late(graph, [gather for gather in gathers if gather.late], place)
    _gather_when_needed([gather for gather in gathers if gather.early is not None], place)
    _reduce_when_ready(graph, {unit.group for unit in units})
    graph.lint()


def _taken_by(gather: fx.Node) -> GatheredShards | None:
    """The shards that an all-gather takes, if it takes inputs of the graph. None if it takes results.

    Activations are results of parameters that were gathered before. The shapes tell parameters from a batch.
    """
    inputs: list[str] = []
    seen: set[fx.Node] = set()
    waiting = list(gather.all_input_nodes)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "placeholder":
            inputs.append(_shown(node.meta["val"]))
        elif node.op != "call_function" or _GATHER in str(node.target):
            return None
        waiting.extend(node.all_input_nodes)
    return GatheredShards(str(gather.args[-1]), tuple(sorted(inputs)))


def _shown(value: Any) -> str:
    return f"{list(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else "a number"


def _is_backward(node: fx.Node) -> bool:
    return node.op == "call_function" and bool(node.meta.get("autograd_backward"))


def _reached(start: fx.Node) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    waiting = list(start.users)
    while waiting:
        node = waiting.pop()
        # after a node with other inputs, nothing is computed from the all-gather alone
        if node not in seen and node.op == "call_function" and len(node.all_input_nodes) == 1:
            seen.add(node)
            waiting.extend(node.users)
    return seen


def _regather_late(graph: fx.Graph, gathers: list[_Gather], place: dict[fx.Node, int]) -> None:
    """Give backward its own all-gathers, except for the parameters that it needs first."""
    gathers.sort(key=lambda gather: place[gather.late[0]])
    for before, gather in itertools.pairwise(gathers):
        copies: dict[fx.Node, fx.Node] = {}
        originals = set(gather.nodes)
        for node in gather.nodes:
            ahead = before.late[0] if node is gather.start else gather.late[0]
            with graph.inserting_before(ahead):
                copies[node] = graph.node_copy(node, lambda arg, copied=copies: copied.get(arg, arg))
        for user in gather.late:
            for node in [arg for arg in user.all_input_nodes if arg in originals]:
                user.replace_input_with(node, copies[node])
        for node in reversed(list(copies.values())):
            if not node.users:
                graph.erase_node(node)


def _gather_when_needed(gathers: list[_Gather], place: dict[fx.Node, int]) -> None:
    """Move the nodes of the forward pass to their first use, the all-gather itself one unit ahead."""
    gathers.sort(key=lambda gather: place[_early(gather)])
    for index, gather in enumerate(gathers):
        ahead = _early(gathers[max(0, index - 1)])
        for node in gather.nodes:
            (ahead if node is gather.start else _early(gather)).prepend(node)


def _early(gather: _Gather) -> Any:
    return gather.early


def _reduce_when_ready(graph: fx.Graph, groups: Container[str]) -> None:
    """Begin each reduce-scatter where its gradients are there.

    It is waited for at the latest as the next one begins: until then its input lives.
    """
    reduces = begin_when_ready(graph, "reduce_scatter_tensor", groups, in_order=False)
    place = {node: index for index, node in enumerate(graph.nodes)}
    for before, reduce in itertools.pairwise(sorted(reduces, key=place.__getitem__)):
        for wait in list(before.users):
            if place[wait] > place[reduce]:
                reduce.prepend(wait)


def zero3_pass(units: Sequence[GatheredShards]) -> Any:
    """The pass as inductor takes it. Its text and the units are part of the key of the compile cache."""
    files = (__file__, begin_when_ready.__code__.co_filename)
    return _torch.graph_pass(functools.partial(regather, units=tuple(units)), files, repr(units))

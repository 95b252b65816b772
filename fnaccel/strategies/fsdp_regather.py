"""ZeRO-3 in a captured step: parameters are gathered just before they are used, and again for backward.

A pass over the graph that inductor is about to lower. As written, a step gathers everything first and
keeps it until backward has used it. Here each all-gather moves to where its unit begins, one unit ahead,
so that it runs beside the unit before; and what backward needs of it is gathered again. What backward
needs first stays.
"""

from __future__ import annotations

import itertools
from typing import Any

from torch import fx

from fnaccel import _torch

_GATHER = "all_gather_into_tensor"


class _Gathered:
    """One all-gather of the forward pass and all that is made of it alone, in the order of the graph."""

    def __init__(self, gather: fx.Node, place: dict[fx.Node, int], boundary: int) -> None:
        self.gather = gather
        self.made = [gather]
        known = {gather}
        for node in sorted(_reached(gather), key=place.__getitem__):
            if place[node] < boundary and node not in known and known.issuperset(node.all_input_nodes):
                known.add(node)
                self.made.append(node)
        users = {user for node in self.made for user in node.users if user not in known}
        self.early = min(
            (user for user in users if place[user] < boundary), key=place.__getitem__, default=None
        )
        self.late = sorted((user for user in users if place[user] >= boundary), key=place.__getitem__)


def regather(graph: fx.Graph) -> None:
    """Change a graph of one step in place; one without a backward pass is left alone."""
    place = {node: index for index, node in enumerate(graph.nodes)}
    boundary = next((index for node, index in place.items() if _is_backward(node)), None)
    if boundary is None:
        return
    found = [
        _Gathered(node, place, boundary)
        for node, index in place.items()
        if index < boundary and _GATHER in str(node.target)
    ]
    _regather_late(graph, [one for one in found if one.late], place)
    _gather_when_needed([one for one in found if one.early is not None], place)
    graph.lint()


def _is_backward(node: fx.Node) -> bool:
    return node.op == "call_function" and bool(node.meta.get("autograd_backward"))


def _reached(start: fx.Node) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    waiting = list(start.users)
    while waiting:
        node = waiting.pop()
        # past a node of other inputs nothing is made of the gather alone
        if node not in seen and node.op == "call_function" and len(node.all_input_nodes) == 1:
            seen.add(node)
            waiting.extend(node.users)
    return seen


def _regather_late(graph: fx.Graph, found: list[_Gathered], place: dict[fx.Node, int]) -> None:
    """Give backward gathers of its own, but for what it needs first."""
    found.sort(key=lambda one: place[one.late[0]])
    for before, one in itertools.pairwise(found):
        copies: dict[fx.Node, fx.Node] = {}
        originals = set(one.made)
        for node in one.made:
            ahead = before.late[0] if node is one.gather else one.late[0]
            with graph.inserting_before(ahead):
                copies[node] = graph.node_copy(node, lambda arg, known=copies: known.get(arg, arg))
        for user in one.late:
            for node in [arg for arg in user.all_input_nodes if arg in originals]:
                user.replace_input_with(node, copies[node])
        for node in reversed(list(copies.values())):
            if not node.users:
                graph.erase_node(node)


def _gather_when_needed(found: list[_Gathered], place: dict[fx.Node, int]) -> None:
    """Move what forward gathers to where it is used, the all-gather itself one unit ahead."""
    found.sort(key=lambda one: place[_early(one)])
    for index, one in enumerate(found):
        ahead = _early(found[max(0, index - 1)])
        for node in one.made:
            (ahead if node is one.gather else _early(one)).prepend(node)


def _early(one: _Gathered) -> Any:
    return one.early


def zero3_pass() -> Any:
    """The pass as inductor takes it; its text is part of the key of the compile cache."""
    return _torch.graph_pass(regather, __file__)

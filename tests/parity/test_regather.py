"""ZeRO-3 in a captured step moves the all-gathers of parameters, and no other one. Gradients are reduced early.

The pass runs on the graph before inductor does, as part of a backend of this file: that takes a second, not ten.
"""

from __future__ import annotations

import functools
from unittest import mock

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import fnaccel as fa
from fnaccel import _torch
from fnaccel.transforms.compilation import Compile
from fnaccel.world.world import current
from tests.parity.compiled import run_kind
from tests.tiny_models import Block, batch_of, loss_fn, whole_params

STEPS = 3
ROWS, WIDTH = 5, 6
ACTIVATIONS = ROWS * WIDTH


class Meeting(nn.Module):
    """Between two blocks, each rank's activations are scaled by the mean of those of all ranks."""

    def __init__(self, of):
        super().__init__()
        self.inp = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(WIDTH, 1)
        self.of = of

    def forward(self, x):
        inputs = x[:, :1].expand(-1, WIDTH)
        x = self.blocks[0](self.inp(x))
        meeting = (x if self.of == "activations" else inputs).detach().contiguous()
        everyone = torch.ops._c10d_functional.all_gather_into_tensor(meeting, 2, self.group)
        everyone = torch.ops._c10d_functional.wait_tensor(everyone)
        return self.out(self.blocks[1](x * everyone.mean(0)))


def trained(of, strategy, scope):
    """The parameters after some steps, and what the all-gathers of the graph take, before the pass and after.

    And how many reductions come before the last node of the backward pass.
    """
    seen, reduced = [], []
    passes = []
    reduction = "reduce_scatter_tensor" if "fsdp" in strategy else "all_reduce"

    def graph_pass(change, files, key):
        passes.append(change)

    def sizes(graph):
        gathers = [node for node in graph.nodes if "all_gather_into_tensor" in str(node.target)]
        taken = [node.args[0].meta["val"].numel() for node in gathers]
        assert [reader(node) for node, size in zip(gathers, taken, strict=True) if size != ACTIVATIONS] == [
            "fnaccel.copied_parts.default"
        ] * (len(taken) - taken.count(ACTIVATIONS)), "what is gathered lives for more than its copies"
        return taken

    def reader(node):
        while len(node.users) == 1 and "copied" not in str(node.target):
            (node,) = node.users
        return str(node.target)

    def early(graph):
        nodes = list(graph.nodes)
        last = max(at for at, node in enumerate(nodes) if node.meta.get("autograd_backward"))
        return sum(reduction in str(node.target) for node in nodes[:last])

    def lowered(module, _):
        begun = early(module.graph)
        before = sizes(module.graph)
        passes[0](module.graph)
        module.recompile()
        seen.append((before, sizes(module.graph)))
        reduced.append((begun, early(module.graph)))
        return make_boxed_func(module.forward)

    step = fa.clip_norm(loss_fn, 0.5)
    if scope is not None:
        name = f"regathering {of} {strategy}"  # ranks compare plans, so an object would not do
        torch._dynamo.register_backend(aot_autograd(fw_compiler=lowered), name=name)
        step = fa.compile(step, scope, backend=name)
    model = fa.distribute(functools.partial(Meeting, of), strategy)
    with mock.patch.object(_torch, "graph_pass", graph_pass):
        train_step = fa.train_step(step, model=model, optimizer=fa.sgd(0.3))
        state = train_step.init(seed=0)
    Meeting.group = train_step.mesh["batch"].group.group_name
    for number in range(STEPS):
        state, _ = train_step(state, batch_of(ROWS, seed=2 * number + current().rank))
    return whole_params(state), seen, reduced


BLOCK, ROOT = 21, 16  # elements that a rank sends: of 42, and of 31 (the bias of one element is padded)


@pytest.mark.long_except(r"activations-fsdp\(2\)-|inputs-ddp")
@pytest.mark.parametrize(("of", "strategy", "before", "after"), [
    (of, "fsdp(2)", [BLOCK, BLOCK, ROOT, ACTIVATIONS], [ROOT, BLOCK, BLOCK, ACTIVATIONS, BLOCK, BLOCK])
    for of in ("activations", "inputs")
] + [
    ("activations", "fsdp(2, units=None)", [2 * BLOCK + ROOT, ACTIVATIONS], [2 * BLOCK + ROOT, ACTIVATIONS]),
    ("inputs", "ddp(2, bucket_mb=0.0002)", [ACTIVATIONS], [ACTIVATIONS]),
])  # fmt: skip
def test_a_gather_of_the_model_s_own_stays_in_its_place(pools, of, strategy, before, after):
    """Backward needs its result, too, and no rank gathers it again."""
    eager = pools.run(2, trained, of, strategy, None)
    compiled = pools.run(2, trained, of, strategy, "step")
    # the first unit's gradients are the last to be there. Under ddp the sum of the weights is early as written
    reductions = {"fsdp(2)": (0, 2), "fsdp(2, units=None)": (0, 0)}.get(strategy, (1, 3))
    for (params, seen, reduced), (expected, *_) in zip(compiled, eager, strict=True):
        assert seen == [(before, after)]
        assert reduced == [reductions]
        for name, value in expected.items():
            torch.testing.assert_close(params[name], value, atol=1e-5, rtol=1e-5)


def compiled_with(kind, strategy):
    """Whether each program of a step was compiled with a pass."""
    of_step, taken = Compile.of_step, []

    def counting(settings, fn, graph_pass=None):
        taken.append(graph_pass is not None)
        return of_step(settings, fn, graph_pass)

    with mock.patch.object(Compile, "of_step", counting):
        run_kind(kind, strategy, "step")
    return taken


@pytest.mark.parametrize(
    ("kind", "taken"), [("plain", [True, True]), ("skipping", [True, True, False, False])]
)
def test_ranks_that_use_other_parameters_gather_as_written(pools, kind, taken):
    """Where each of them uses one is another place in the graph of each."""
    assert pools.run(2, compiled_with, kind, "fsdp") == [taken] * 2

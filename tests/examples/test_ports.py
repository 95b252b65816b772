"""Scripts that other projects write by hand train the curve of a plain loop, on any number of ranks, and resume.

The losses agree to 1e-6 and parameters to 1e-5, in fp32. Those of the diffusion model agree to 2e-5, since Adam
divides by second moments that are near 0 there. Losses of DPO agree to 3e-6: they are differences of sums of 130, whose
last digit is 1.5e-5.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import sys
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader

import fnaccel as fa
from tests.examples import raw_loops
from tests.examples.running import ROOT, killed
from tests.tiny_models import whole

STEPS = 6
PORTS = {
    "dpo-lent": ("dpo", "--reference", "lent"),
    "dpo-frozen": ("dpo", "--reference", "frozen"),
    "dpo-computed": ("dpo", "--reference", "computed"),
    "contrastive": ("contrastive",),
    "contrastive-cached": ("contrastive", "--cache", "2"),
    "teachers": ("teachers",),
    "diffusion": ("diffusion",),
    "grpo": ("grpo",),
}
LOSSES = {"dpo": 3e-6}
PARAMETERS = {"diffusion": 2e-5}


def example(name):
    if str(ROOT / "examples") not in sys.path:
        sys.path.insert(0, str(ROOT / "examples"))
    return importlib.import_module(name)


def trained(port, strategy=None, steps=STEPS, folder=None, compiled=False):
    """Losses and whole parameters of a port, by its own `main`, and what it drew at random."""
    name, *flags = PORTS[port]
    flags = [*flags, "--steps", str(steps), *(["--dir", str(folder)] if folder else [])]
    drawn = []
    distribute, train_step = fa.distribute, fa.train_step

    def recorded(draw):
        def fn(*args, **kwargs):
            drawn.append(draw(*args, **kwargs))
            return drawn[-1]

        return fn

    def captured(step, **options):
        step = fa.compile(step, scope="step", backend="eager") if options["optimizer"] else step
        return train_step(step, **options)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(fa, "distribute", lambda model: distribute(model, strategy)))
        if compiled:
            stack.enter_context(mock.patch.object(fa, "train_step", captured))
        else:
            for kind in ("uniform", "normal"):
                stack.enter_context(mock.patch.object(fa.random, kind, recorded(getattr(fa.random, kind))))
        losses, state = example(name).main(flags)
    params = {path: whole(value) for path, value in fa.tree.items(state.params)}
    return losses, params, drawn


def batches(loader, count, seed=0):
    """The first batches of a run, of all rows, as a run on one rank reads them."""
    shards = fa.shard(loader, seed=seed)
    epochs = (shards.at(fa.state.Position(epoch)) for epoch in itertools.count())
    return [batch.data for batch in itertools.islice(itertools.chain.from_iterable(epochs), count)]


def raw(port, drawn):
    """Losses and parameters of the plain loop."""
    module = example(PORTS[port][0])
    if module.__name__ == "dpo":
        loop = raw_loops.dpo(module, batches(DataLoader(module.Preferences(), 16, shuffle=True), STEPS))
    elif module.__name__ == "diffusion":
        rows = batches(DataLoader(module.digits(), 128, shuffle=True), STEPS)
        loop = raw_loops.diffusion(module, rows, [((100 * u).long(), z) for u, z in pairs(drawn)[:STEPS]])
    elif module.__name__ == "grpo":
        prompts = batches(DataLoader(torch.arange(module.VOCABULARY), 8, shuffle=True), STEPS // 2)
        size = module.LENGTH
        loop = raw_loops.grpo(module, prompts, [drawn[at * size : (at + 1) * size] for at in range(3)])
    else:
        rows = batches(DataLoader(module.data()[0], 128, shuffle=True), STEPS)
        loop = raw_loops.contrastive(module, rows)
        if module.__name__ == "teachers":
            loop = raw_loops.teachers(module, rows, pairs([u > 0.3 for u in drawn]))
    losses, models = zip(*loop, strict=True)
    return list(losses), {name: value.detach() for name, value in models[-1].named_parameters()}


def pairs(items):
    return list(zip(items[::2], items[1::2], strict=False))


def named(params):
    """By the name in the plain model: that of the policy where a reference is beside it."""
    return {
        path.removeprefix("policy/").replace("student/", "student.").replace("teacher/", "teacher."): value
        for path, value in params.items()
        if not path.startswith("reference/")
    }


def without_bias_of_keys(params):
    """It shifts all scores of a query alike, so its gradient is a rounding error, which Adam scales up."""
    thirds = {name: value.chunk(3) for name, value in params.items() if name.endswith("qkv.bias")}
    return {**params, **{name: torch.cat([query, value]) for name, (query, _, value) in thirds.items()}}


@pytest.mark.long_except(r"dpo-frozen|contrastive-fsdp|teachers-ddp|grpo-ddp|diffusion-fsdp")
@pytest.mark.parametrize(("strategy", "ranks"), [("local", 1), ("ddp", 2), ("fsdp", 2)])
@pytest.mark.parametrize("port", PORTS)
def test_a_port_trains_as_the_plain_loop(pools, port, strategy, ranks):
    with fa.start():
        *_, drawn = trained(port, "local")
        losses, params = raw(port, drawn)
    for found, values, _ in pools.run(ranks, trained, port, strategy):
        assert found == pytest.approx(losses, abs=LOSSES.get(PORTS[port][0], 1e-6))
        values, expected = without_bias_of_keys(named(values)), without_bias_of_keys(params)
        assert fa.tree.allclose(values, expected, rtol=0, atol=PARAMETERS.get(port, 1e-5))


@pytest.mark.long_except(r"dpo-computed")
@pytest.mark.parametrize("port", ["dpo-frozen", "dpo-computed", "dpo-lent", "diffusion", "teachers"])
def test_a_captured_port_trains_as_the_eager_one(port):
    with fa.start():
        losses, params, _ = trained(port, "local")
        found, values, _ = trained(port, "local", compiled=True)
    assert found == pytest.approx(losses, abs=LOSSES.get(PORTS[port][0], 1e-6))
    values, params = without_bias_of_keys(values), without_bias_of_keys(params)
    assert fa.tree.allclose(values, params, rtol=0, atol=PARAMETERS.get(port, 1e-5))


@pytest.mark.launcher
@pytest.mark.long_except(r"teachers")
@pytest.mark.parametrize("port", ["dpo-frozen", "contrastive", "teachers", "diffusion", "grpo"])
def test_a_port_that_was_killed_goes_on_with_the_same_bits(tmp_path, port):
    name, *flags = PORTS[port]
    command = [sys.executable, f"examples/{name}.py", *flags, "--steps", "100000", "--dir", str(tmp_path)]
    steps = killed(command, tmp_path) + 8
    with fa.start():
        resumed, params, _ = trained(port, "local", steps=steps, folder=tmp_path)
        losses, expected, _ = trained(port, "local", steps=steps)
    assert resumed == losses[-8:]
    assert fa.tree.allclose(params, expected, rtol=0, atol=0)

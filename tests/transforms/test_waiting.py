"""`fa.remat(step, save="offload")`: inputs of blocks wait in host memory. On CPUs that is memory beside them."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fnaccel as fa
from fnaccel.transforms.waiting.host_memory import HostMemory, _Waiting
from tests.losses import models
from tests.losses.models import trained

OFFLOAD = fa.remat(save="offload")


@pytest.mark.long_except("ddp|local")
@pytest.mark.parametrize(
    ("strategy", "ranks", "parts"),
    [
        ("local", 1, ()),
        ("local", 1, (fa.accumulate(2),)),
        ("local", 1, (fa.with_precision("bf16"),)),
        ("ddp", 2, ()),
        ("fsdp", 2, ()),
        ("tensor(2)", 2, ()),
        ("pipeline(2)", 2, ()),
    ],
    ids=["local", "local, accumulated", "local, bf16", "ddp", "fsdp", "tensor", "pipeline"],
)
def test_a_step_is_that_of_blocks_that_are_recomputed_to_the_bit(pools, strategy, ranks, parts):
    args = models.llama, models.labelled, strategy
    found = pools.run(ranks, trained, *args, OFFLOAD, *parts)
    for (losses, params), (expected, values) in zip(
        found, pools.run(ranks, trained, *args, fa.remat(), *parts), strict=True
    ):
        assert losses == expected
        torch.testing.assert_close(params, values, rtol=0, atol=0)


class Chain:
    """Blocks that keep their inputs in host memory, and what became of these."""

    def __init__(self, blocks=3):
        torch.manual_seed(0)
        self.blocks = [nn.Linear(4, 4) for _ in range(blocks)]
        self.memory = HostMemory()
        self.inputs = []
        self.sent, self.returned = [], []
        send, bring = self.memory._sent, self.memory._returning

        def sent(tensor, size):
            waiting = send(tensor, size)
            self.sent.append(weakref.ref(waiting))
            return waiting

        def returning(waiting):
            self.returned.append(self.place(waiting))
            return bring(waiting)

        self.memory._sent, self.memory._returning = sent, returning

    def place(self, waiting):
        return next(place for place, ref in enumerate(self.sent) if ref() is waiting)

    def forward(self, x, *rest, keep=False):
        for block in self.blocks:
            x = x * 1.0
            self.inputs.append(x if keep else weakref.ref(x))
            with self.memory.keeping():
                x = checkpoint(
                    lambda value, *others, run=block: torch.tanh(run(value)) + sum(others),
                    x,
                    *rest,
                    use_reentrant=False,
                )
        return x


def test_inputs_are_freed_and_come_back_one_ahead():
    chain = Chain(4)
    x = torch.randn(2, 4, requires_grad=True)
    total = chain.forward(x).sum()
    gc.collect()
    assert [ref() for ref in chain.inputs] == [None] * 4
    assert chain.returned == []
    seen = []
    for block in chain.blocks:
        block.register_forward_pre_hook(lambda *_: seen.append(list(chain.returned)))
    total.backward()
    assert seen == [
        [3, 2],
        [3, 2, 1],
        [3, 2, 1, 0],
        [3, 2, 1, 0],
    ]  # a block finds the one before it under way
    del total
    gc.collect()
    assert [ref() for ref in chain.sent] == [None] * 4
    assert chain.memory._known == {}


def test_a_tensor_that_all_blocks_take_is_copied_once():
    chain = Chain(3)
    mask = torch.ones(2, 1) * 0.5
    chain.forward(torch.randn(2, 4), mask).sum().backward()
    assert len(chain.sent) == 3 + 1
    assert sorted(chain.returned) == [0, 1, 2, 3]


def test_a_tensor_that_changed_in_place_is_copied_again():
    chain, alone = Chain(1), Chain(1)
    found = []
    for which, memory in ((chain, chain.memory.keeping), (alone, None)):
        x = torch.ones(2, 4)
        weight = torch.tensor(2.0, requires_grad=True)

        def run(value, weight=weight):
            return (value * weight).square()

        total = 0
        for _ in range(2):
            if memory is None:
                total = total + run(x.clone()).sum()
            else:
                with memory():
                    total = total + checkpoint(run, x, use_reentrant=False).sum()
            x.add_(1)
        total.backward()
        found.append(weight.grad)
        assert which is alone or len(chain.sent) == 2
    assert torch.equal(*found)


def test_freed_memory_is_not_taken_for_what_was_there():
    memory, kept = HostMemory(), []
    places = set()
    for value in range(50):
        tensor = torch.full((1000,), float(value))
        places.add(id(tensor.untyped_storage()))
        kept.append(memory._pack(tensor))
        del tensor
    assert len(places) < 50  # memory was used again
    assert [float(memory._unpack(waiting)[0]) for waiting in kept] == list(range(50))


class ByKeyword(nn.Module):
    """Blocks that take their input by keyword, in a tuple, and transposed."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Viewing() for _ in range(3))

    def forward(self, x):
        x = x.transpose(1, 2)
        for block in self.blocks:
            x = block(rest=(x,))
        return x


class Viewing(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, *, rest):
        (x,) = rest
        y = torch.tanh(self.mix(x.transpose(1, 2).view(-1, 4))).view(x.shape[0], -1, 4)
        return y.transpose(1, 2) * 1.0


def stepped(save):
    sent, send = [], HostMemory._sent
    step = fa.remat(squared, units=("Viewing",), save=save)
    train_step = fa.train_step(step, model=fa.distribute(ByKeyword, "local"), optimizer=fa.sgd(0.1))
    HostMemory._sent = lambda memory, *args: sent.append(1) or send(memory, *args)
    try:
        state, metrics = train_step(
            train_step.init(seed=0), torch.randn(2, 5, 4, generator=torch.manual_seed(0))
        )
    finally:
        HostMemory._sent = send
    return float(metrics["loss"]), len(sent), {name: value.clone() for name, value in state.params.items()}


def test_inputs_by_keyword_in_tuples_and_with_strides_of_their_own(pools):
    loss, sent, params = pools.run(1, stepped, "offload")[0]
    expected, none, values = pools.run(1, stepped, "nothing")[0]
    assert (loss, sent, none) == (expected, 3, 0)
    torch.testing.assert_close(params, values, rtol=0, atol=0)


def test_a_graph_that_is_kept_is_walked_twice():
    chain = Chain(2)
    x = torch.randn(2, 4, requires_grad=True)
    total = chain.forward(x).sum()
    first = torch.autograd.grad(total, x, retain_graph=True)
    second = torch.autograd.grad(total, x)
    assert torch.equal(first[0], second[0])


def test_parameters_indices_and_expanded_tensors_stay():
    memory = HostMemory()
    tensors = [nn.Parameter(torch.ones(3)), torch.arange(3), torch.ones(1).expand(3)]
    assert all(memory._pack(tensor) is tensor for tensor in tensors)
    view = torch.arange(12.0).view(3, 4).t()
    kept = memory._pack(view)
    assert isinstance(kept, _Waiting)
    assert torch.equal(memory._unpack(kept), view)


def test_a_compiled_step_is_refused_by_name():
    step = fa.compile(fa.remat(models.labelled, save="offload"), scope="block")
    with fa.start(), pytest.raises(fa.errors.CapabilityError, match="moves tensors between programs"):
        fa.train_step(step, model=fa.distribute(models.llama, "local"), optimizer=fa.sgd(0.1))


def wide():
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))


def squared(model, batch):
    return model(batch).square().mean()


def test_an_estimate_counts_what_is_on_the_device():
    def peak(save):
        step = fa.remat(squared, units=("Sequential",), save=save)
        return fa.estimate.training(
            step, model=fa.distribute(wide, "local"), batch=torch.zeros(4096, 64), optimizer=fa.sgd(0.1)
        ).peak.kinds["activations"]

    one = 4096 * 64 * 4
    kept, away = peak("nothing"), peak("offload")
    assert kept - away >= 3 * one


def through_call(model, batch):
    out = fa.call(model, fa.params(model), input_ids=batch["input_ids"], labels=batch["labels"])
    return fa.Mean.of(out.loss, weight=(batch["labels"][:, 1:] != -100).sum())


@pytest.mark.parametrize("save", ["nothing", "offload"])
def test_blocks_that_run_again_inside_of_a_call_have_no_cache(pools, save):
    losses, params = pools.run(1, trained, models.llama, through_call, "local")[0]
    found, values = pools.run(1, trained, models.llama, through_call, "local", fa.remat(save=save))[0]
    assert found == pytest.approx(losses, abs=1e-5)
    torch.testing.assert_close(values, params, atol=1e-5, rtol=1e-5)

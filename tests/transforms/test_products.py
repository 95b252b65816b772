"""Products of matrices by oneDNN: which of a graph, on which processors, and that their values stay."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.utils import fresh_cache
from torch.fx.experimental.proxy_tensor import make_fx

import fnaccel as fa
from fnaccel.transforms.products import _torch as products

A, B, BIAS = torch.randn(256, 128), torch.randn(128, 128), torch.randn(128)
PRODUCT = "fnaccel.product.default"

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN here")


def changed(fn, *inputs, tracing_mode="fake"):
    """The graph of a function with the products replaced, and how many there are."""
    products._register()
    graph = make_fx(fn, tracing_mode=tracing_mode)(*inputs)
    products.replace(graph.graph)
    graph.recompile()
    return graph, sum(str(node.target) == PRODUCT for node in graph.graph.nodes)


@pytest.mark.parametrize(
    ("fn", "inputs"),
    [
        (torch.mm, (A, B)),
        (lambda a, b: a.t() @ b, (torch.randn(512, 128), torch.randn(512, 128))),
        (lambda a, b: a @ b.t(), (A, B)),
        (lambda a, b, bias: torch.addmm(bias, a, b), (A, B, BIAS)),
        (lambda a, b, wide: torch.addmm(wide[::2], a, b), (A, B, torch.randn(256))),
        (lambda a, b, one: torch.addmm(one.expand(128), a, b), (A, B, torch.randn(1))),
        (lambda a, b, one: torch.addmm(one, a, b), (A, B, torch.randn(1))),
        (lambda a, b, number: torch.addmm(number, a, b), (A, B, torch.randn(()))),
        (lambda wide, b: torch.mm(wide[3:259, 5:133], b), (torch.randn(300, 200), B)),
        (lambda a, wide: torch.mm(a, wide[::2, 1::2]), (A, torch.randn(256, 256))),
        (lambda row, b: torch.mm(row.expand(256, 128), b), (torch.randn(1, 128), B)),
        (lambda a, b, sums: torch.addmm(sums, a, b), (A, B, torch.randn(256, 128))),
        (lambda a, b, row: torch.addmm(row, a, b), (A, B, torch.randn(1, 128))),
    ],
    ids=[
        "as they are",
        "first transposed",
        "second transposed",
        "with a bias",
        "a bias with a stride",
        "one number as bias",
        "a tensor of one number",
        "a number",
        "a part of the first",
        "steps in the second",
        "a repeated row",
        "with sums",
        "with a row",
    ],
)
def test_large_products_are_replaced(fn, inputs):
    graph, count = changed(fn, *inputs)
    assert count == 1
    torch.testing.assert_close(graph(*inputs), fn(*inputs), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("fn", "inputs"),
    [
        (torch.mm, (A[:64], B)),
        (torch.mm, (A[:, :16], B[:16])),
        (torch.mm, (A.double(), B.double())),
        (torch.mm, (A.bfloat16(), B.bfloat16())),
        (lambda a, b, bias: torch.addmm(bias, a, b, beta=0.5), (A, B, BIAS)),
    ],
    ids=["few rows", "short sums", "fp64", "bf16", "a factor"],
)
def test_others_stay(fn, inputs):
    graph, count = changed(fn, *inputs)
    assert count == 0
    assert torch.equal(graph(*inputs), fn(*inputs))


def test_products_of_any_number_of_rows_stay():
    assert changed(torch.mm, A, B, tracing_mode="symbolic")[1] == 0


@pytest.mark.parametrize(
    ("maker", "instructions", "quicker"),
    [("AuthenticAMD", "AVX512", True), ("AuthenticAMD", "AVX2", False), ("GenuineIntel", "AVX512", False)],
)
def test_the_processor_decides(monkeypatch, tmp_path, maker, instructions, quicker):
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: instructions)
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor\t: 0\nvendor_id\t: {maker}\n")
    assert products.is_quicker(str(file)) is quicker
    assert not products.is_quicker(str(tmp_path / "none"))


def test_a_compiled_step_learns_as_an_eager_one(monkeypatch):
    monkeypatch.setattr(products, "is_quicker", lambda: True)
    found = []
    replace = products.replace

    def counted(graph):
        replace(graph)
        found.extend(node for node in graph.nodes if str(node.target) == PRODUCT)

    monkeypatch.setattr(products, "replace", counted)

    def loss_fn(model, batch):
        x, y = batch
        return fa.Mean(F.cross_entropy(model(x), y, reduction="sum"), weight=len(y))

    batch = torch.randn(256, 64), torch.randint(8, (256,))
    losses = {}
    with fa.start(device="cpu"), fresh_cache():
        for step in (loss_fn, fa.compile(loss_fn, scope="loss")):
            model = fa.distribute(
                lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)), "local"
            )
            train_step = fa.train_step(step, model=model, optimizer=fa.adamw(1e-2))
            state = train_step.init(seed=0)
            losses[step] = []
            for _ in range(3):
                state, metrics = train_step(state, batch)
                losses[step].append(float(metrics["loss"]))
    eager, compiled = losses.values()
    assert found
    assert compiled == pytest.approx(eager, rel=1e-5)

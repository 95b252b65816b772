"""What makes the first loss of a compiled step come sooner leaves its results as they were."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._inductor import config, cpu_vec_isa
from torch._inductor.utils import fresh_cache

import fnaccel as fa
from fnaccel import errors
from fnaccel.transforms.first_loss import _torch as quick
from fnaccel.transforms.first_loss import translation_unit

X = torch.linspace(-1, 1, 24).reshape(4, 6)


def several_kernels(x):
    """What stands between two products of matrices is a kernel."""
    values = []
    for width in (5, 7, 3, 8):
        x = torch.sin(x @ torch.linspace(-1, 2, x.shape[1] * width).reshape(x.shape[1], width))
        values += [x, x.softmax(1).sum(0)]
    return values


@pytest.fixture(params=[pytest.param(1, marks=pytest.mark.long), 2], ids=["one thread", "two threads"])
def compiled(tmp_path, request):
    """Compile `several_kernels` in a folder of its own. Returns its values, and the C++ files."""
    quick.compile_quickly()

    def run():
        torch.compiler.reset()
        with config.patch(compile_threads=request.param), fresh_cache(dir=tmp_path, delete=False):
            values = torch.compile(several_kernels, fullgraph=True)(X)
        return values, [*tmp_path.rglob("*.main.cpp")]

    yield run
    torch.compiler.reset()


def check(values):
    for value, expected in zip(values, several_kernels(X), strict=True):
        torch.testing.assert_close(value, expected)


def test_the_kernels_of_a_graph_are_one_file(compiled):
    values, files = compiled()
    check(values)
    assert len(files) == 1
    assert files[0].read_text().count("PyMODINIT_FUNC PyInit_kernel_") > 2


def test_many_kernels_are_several_files(compiled, monkeypatch):
    monkeypatch.setattr(quick, "_PER_FILE", 2)
    values, files = compiled()
    check(values)
    assert len(files) > 1


@pytest.mark.parametrize("change", ["not one file", "not beside others"])
def test_kernels_that_cannot_be_one_file_are_compiled_by_themselves(compiled, monkeypatch, change):
    if change == "not one file":
        monkeypatch.setattr(quick, "as_one_file", lambda texts: "no C++")
    else:
        monkeypatch.setattr(quick, "fits", lambda text: False)
    values, files = compiled()
    check(values)
    assert len(files) > 2


def test_a_kernel_with_a_macro_has_a_file_of_its_own():
    assert translation_unit.fits("#include <x.h>\n#pragma omp parallel\nvoid kernel() {}")
    assert not translation_unit.fits("#include <x.h>\n  # define N 3\nvoid kernel() {}")


@pytest.mark.parametrize("capability", [None, "avx2", "default"])
def test_instructions_are_those_that_torch_takes(monkeypatch, capability):
    quick.compile_quickly()
    if capability:
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)
    ours = cpu_vec_isa.pick_vec_isa()
    lazily = cpu_vec_isa.valid_vec_isa_list()
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", lambda: [isa for isa in lazily if isa])
    assert str(ours) == str(cpu_vec_isa.pick_vec_isa())
    assert lazily[0] is next(iter(lazily))
    assert len(lazily) == len(list(lazily)) > 0


def test_an_error_of_the_compiler_is_no_limit_of_recompilations():
    """Its text names the folder of precompiled headers."""

    def broken(graph, inputs):
        raise RuntimeError("precompiled_headers failed")

    with fa.start(device="cpu"):
        step = fa.train_step(
            fa.compile(lambda model, batch: model(batch).sum(), backend=broken),
            model=fa.distribute(lambda: nn.Linear(6, 1), fa.local()),
            optimizer=fa.sgd(0.1),
        )
        with pytest.raises(errors.NotCompiledError, match="precompiled_headers failed"):
            step(step.init(seed=0), X)

"""`fa.losses.linear_cross_entropy` beside cross entropy of whole logits: values and derivatives."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode

import fnaccel as fa

ROWS, LENGTH, WIDTH, VOCABULARY = 2, 7, 8, 31
IGNORED = -100
CASES = list(itertools.product((0.0, 0.1), (0.0, 1e-2), (None, 3.0), ("sum", "mean", "none"), (False, True)))


def plain(
    hidden, weight, labels, bias=None, *, label_smoothing, z_loss, soft_cap, reduction, ignore_index=IGNORED
):
    logits = F.linear(hidden, weight, bias).flatten(0, -2)
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    flat = labels.flatten()
    losses = F.cross_entropy(
        logits, flat, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )
    losses = losses + torch.where(flat == ignore_index, 0, z_loss * logits.logsumexp(1).square())
    if reduction == "none":
        return losses.view(labels.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / (flat != ignore_index).sum()


def ours(*args, rows=3, **options):
    return fa.losses.linear_cross_entropy(*args, rows=rows, **options)


def inputs(dtype=torch.float64, bias=True):
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(*shape, dtype=dtype, generator=generator)

    labels = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels[0, 3] = labels[1, :2] = IGNORED
    values = [drawn(ROWS, LENGTH, WIDTH), drawn(VOCABULARY, WIDTH), *([drawn(VOCABULARY)] if bias else [])]
    return values, labels, drawn(ROWS, LENGTH)


def total(fn, values, labels, factors, **options):
    """A number, for which each row counts differently."""
    hidden, weight, *bias = values
    loss = fn(hidden, weight, labels, *bias, **options)
    return (loss * factors).sum() if options["reduction"] == "none" else loss


@pytest.mark.parametrize(("smoothing", "z_loss", "cap", "reduction", "bias"), CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-11)])
def test_values_and_two_derivatives_are_those_of_whole_logits(
    smoothing, z_loss, cap, reduction, bias, dtype, tolerance
):
    options = {"label_smoothing": smoothing, "z_loss": z_loss, "soft_cap": cap, "reduction": reduction}
    values, labels, factors = inputs(dtype, bias)
    found = []
    for fn in (ours, plain):
        given = [value.clone().requires_grad_() for value in values]
        loss = total(fn, given, labels, factors, **options)
        first = torch.autograd.grad(loss, given, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), given)
        found.append((loss, first, second))
    torch.testing.assert_close(found[0], found[1], rtol=10 * tolerance, atol=10 * tolerance)
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("cap", [None, 3.0])
def test_it_runs_inside_of_transforms_of_functions(reduction, cap):
    options = {"label_smoothing": 0.1, "z_loss": 1e-2, "soft_cap": cap, "reduction": reduction}
    values, labels, factors = inputs()
    several = torch.randn(
        3, *values[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    found = []
    for fn in (ours, plain):

        def loss(hidden, weight, fn=fn):
            return total(fn, [hidden, weight, values[2]], labels, factors, **options)

        def penalty(hidden, weight, loss=loss):
            return grad(loss, argnums=1)(hidden, weight).square().sum()

        found.append(
            (
                grad(loss, argnums=(0, 1))(*values[:2]),
                vmap(grad(loss, argnums=(0, 1)), in_dims=(0, None))(several, values[1]),
                grad(lambda weight, loss=loss: vmap(loss, in_dims=(0, None))(several, weight).sum())(
                    values[1]
                ),
                grad(lambda several, loss=loss: vmap(loss, in_dims=(0, None))(several, values[1]).sum())(
                    several
                ),
                vmap(grad(penalty, argnums=(0, 1)), in_dims=(0, None))(several, values[1]),
            )
        )
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's compiler does
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_compiled_loss_is_one_graph_with_the_same_values(reduction):
    values, labels, factors = inputs(torch.float32)
    options = {"label_smoothing": 0.1, "soft_cap": 3.0, "reduction": reduction}

    def loss(hidden, *rest):
        return total(ours, [hidden * 2, *rest], labels, factors, **options)

    found = []
    for fn in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        given = [value.clone().requires_grad_() for value in values]
        value = fn(*given)
        found.append((value, torch.autograd.grad(value, given)))
    torch.testing.assert_close(found[0], found[1])


class Sizes(TorchDispatchMode):
    """Notes the elements of the largest tensor that an operation makes."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.Tensor):
                self.most = max(self.most, value.numel())
        return result


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_no_tensor_has_the_size_of_the_logits(reduction):
    hidden = torch.randn(64, 2, requires_grad=True)
    weight = torch.randn(500, 2, requires_grad=True)
    with Sizes() as sizes:
        ours(hidden, weight, torch.zeros(64, dtype=torch.int64), rows=4, reduction=reduction).sum().backward()
    assert sizes.most == 4 * 500


@pytest.mark.parametrize("frozen", ["weight", "hidden", "both"])
def test_frozen_values_get_no_gradient(frozen):
    (hidden, weight, _), labels, _ = inputs()
    hidden.requires_grad_(frozen == "weight")
    weight.requires_grad_(frozen == "hidden")
    loss = ours(hidden, weight, labels)
    assert loss.requires_grad == (frozen != "both")
    if frozen != "both":
        loss.backward()
    assert (hidden.grad is None, weight.grad is None) == (frozen != "weight", frozen != "hidden")


def test_rows_that_are_all_ignored_have_no_loss():
    (hidden, weight, bias), labels, _ = inputs()
    hidden.requires_grad_()
    loss = ours(hidden, weight, torch.full_like(labels, IGNORED), bias)
    loss.backward()
    assert loss.item() == 0
    assert not hidden.grad.any()


def test_no_rows_have_no_loss():
    (hidden, weight, bias), labels, _ = inputs()
    weight.requires_grad_()
    loss = ours(hidden[:0], weight, labels[:0], bias)
    loss.backward()
    assert loss.item() == 0
    assert not weight.grad.any()


def test_autocast_computes_in_its_dtype_and_sums_up_in_fp32():
    values, labels, _ = inputs(torch.float32)
    found = []
    for fn in (ours, plain):
        given = [value.clone().requires_grad_() for value in values]
        with torch.autocast("cpu", torch.bfloat16):
            loss = fn(
                *given[:2], labels, given[2], label_smoothing=0.0, z_loss=0.0, soft_cap=None, reduction="sum"
            )
        loss.backward()
        found.append((loss.detach(), [value.grad for value in given]))
    assert found[0][0].dtype is torch.float32
    torch.testing.assert_close(found[0], found[1], rtol=0.03, atol=0.03)
    exact = plain(
        *values[:2], labels, values[2], label_smoothing=0.0, z_loss=0.0, soft_cap=None, reduction="sum"
    )
    assert 0 < abs(found[0][0] - exact) < 0.01 * exact


def test_a_head_is_taken_as_a_module_or_by_its_parameters():
    (hidden, weight, bias), labels, _ = inputs(torch.float32)
    head = nn.Linear(WIDTH, VOCABULARY)
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.copy_(bias)
    torch.testing.assert_close(ours(hidden, head, labels), ours(hidden, weight, labels, bias), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        (
            {"labels": torch.zeros(3, dtype=torch.int64)},
            fa.errors.ArgumentError,
            r"labels have the shape \[3\]",
        ),
        ({"reduction": "total"}, fa.errors.ArgumentError, "reduction='total'"),
        ({"rows": 0}, fa.errors.ArgumentError, "rows=0"),
        ({"soft_cap": 0.0}, fa.errors.ArgumentError, "soft_cap=0.0"),
        ({"weight": nn.Bilinear(2, 2, 2)}, fa.errors.CapabilityError, "the head is a Bilinear"),
        (
            {"labels": torch.full((ROWS, LENGTH), VOCABULARY)},
            RuntimeError,
            f"index {VOCABULARY} is out of bounds",
        ),
    ],
)
def test_a_mistake_raises_by_name(change, kind, text):
    (hidden, weight, _), labels, _ = inputs()
    given = {"weight": weight, "labels": labels, **change}
    with pytest.raises(kind, match=text):
        fa.losses.linear_cross_entropy(hidden, **given)

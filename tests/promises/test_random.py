"""`fa.random`: the numbers are those of their distributions, independent between keys, and equal everywhere."""

from __future__ import annotations

import math

import pytest
import torch

import fnaccel as fa
from fnaccel.errors import ArgumentError, UnknownNameError

N = 200_000
KEYS = [fa.random.key(0), fa.random.key(1), fa.random.key(-5, 3), fa.random.key(2**63 + 1).fold_in(9)]


RECORDED_KEYS = [-2152535657050944081, -4001523715203586374]
RECORDED_NUMBERS = [0.6524484863740322, 0.7012121095215252, 0.3871241409757855]


def chi_square(counts, expected):
    """Deviations of the statistic from its mean, in its own deviations."""
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(counts) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("key", KEYS, ids=lambda key: str(key.bits.tolist()))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform(key, dtype):
    values = fa.random.uniform(key, (N,), dtype=dtype)
    assert values.dtype == dtype
    assert values.min() >= 0
    assert values.max() < 1
    assert abs(chi_square(torch.histc(values, 256, 0, 1), N / 256)) < 4
    assert abs(float(values.double().mean()) - 0.5) < 4 / math.sqrt(12 * N)
    ranged = fa.random.uniform(key, (N,), low=-2.0, high=3.0)
    assert ranged.min() >= -2
    assert ranged.max() < 3
    assert abs(float(ranged.mean()) - 0.5) < 0.02


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_no_number_is_rounded_up_to_1(dtype):
    values = fa.random.uniform(fa.random.key(0), (N,), dtype=dtype)
    assert values.dtype == dtype
    assert values.max() < 1
    assert fa.random.normal(fa.random.key(0), (N,), dtype=dtype).isfinite().all()


@pytest.mark.parametrize("key", KEYS, ids=lambda key: str(key.bits.tolist()))
def test_normal(key):
    values = fa.random.normal(key, (N,)).double()
    for power, expected, deviation in (
        (1, 0, 1),
        (2, 1, math.sqrt(2)),
        (3, 0, math.sqrt(15)),
        (4, 3, math.sqrt(96)),
    ):
        assert abs(float((values**power).mean()) - expected) < 4 * deviation / math.sqrt(N)
    below = torch.special.ndtr(values)  # uniform, if they are normal
    assert abs(chi_square(torch.histc(below, 256, 0, 1), N / 256)) < 4


def test_bernoulli():
    key = fa.random.key(4)
    for p in (0.0, 0.1, 0.9, 1.0):
        drawn = fa.random.bernoulli(key, p, (N,))
        assert drawn.dtype == torch.bool
        assert abs(float(drawn.float().mean()) - p) < 4 * math.sqrt(p * (1 - p) / N) + 1e-9
    each = fa.random.bernoulli(key, torch.tensor([0.0, 1.0]), (2,))
    assert each.tolist() == [False, True]


@pytest.mark.parametrize(
    "folded",
    [
        [fa.random.key(seed) for seed in range(300)],
        [fa.random.key(0).fold_in(n) for n in range(300)],
        [fa.random.key(0, 0).fold_in(n).fold_in(0) for n in range(300)],
    ],
    ids=["seeds", "folds", "folds of folds"],
)
def test_neighbouring_keys_are_independent(folded):
    values = torch.stack([fa.random.normal(key, (2000,)) for key in folded]).double()
    products = values @ values.T / 2000
    off = products[~torch.eye(300, dtype=torch.bool)]
    assert float(off.abs().max()) < 5.5 / math.sqrt(2000)  # 45 thousand pairs
    assert abs(float(off.square().mean() * 2000) - 1) < 0.05
    for shift in (1, 2, 7):  # nor is one the other, moved
        moved = (values[1:, shift:] * values[:-1, :-shift]).mean()
        assert abs(float(moved)) < 4 / math.sqrt(299 * 2000)
    across = values[:, 0]  # the first number of each key
    assert abs(float(across.mean())) < 4 / math.sqrt(300)
    assert abs(float((across[1:] * across[:-1]).mean())) < 4 / math.sqrt(299)


def test_a_folded_key_is_no_number_of_its_parent():
    """Folding and drawing count in other sequences. Else `key.fold_in(3)` would be what `key` draws at 3."""
    key = fa.random.key(0)
    folded = {int(key.fold_in(n).bits) >> 40 for n in range(2000)}
    drawn = {int(value * 2**24) for value in fa.random.uniform(key, (2000,), dtype=torch.float64)}
    assert len(folded & drawn) < 5


def test_one_key_a_row_is_that_row_alone():
    key, rows = fa.random.key(3), torch.tensor([5, 0, 2])
    together = fa.random.normal(key.fold_in(rows), (4, 2))
    for place, row in enumerate(rows.tolist()):
        assert torch.equal(together[place], fa.random.normal(key.fold_in(row), (4, 2)))
    x = torch.randn(3, 4, 2)
    masked = fa.random.dropout(x, 0.5, key=key.fold_in(rows))
    assert torch.equal(masked[2], fa.random.dropout(x[2], 0.5, key=key.fold_in(2)))


def test_keys_from_the_host_and_from_tensors_are_the_same():
    key = fa.random.key(7).fold_in(torch.tensor(3)).fold_in(1)
    assert torch.equal(key.bits, fa.random.key(7, 3, 1).bits)
    assert torch.equal(key.fold_in(2).bits, key.fold_in(torch.tensor(2, dtype=torch.int32)).bits)


def test_recorded_numbers():
    """They are the same in every version: a run goes on with the same masks after an update of the library."""
    key = fa.random.key(0)
    assert [int(key.bits), int(key.fold_in(1).bits)] == RECORDED_KEYS
    assert fa.random.uniform(key, (3,), dtype=torch.float64).tolist() == RECORDED_NUMBERS


def test_dropout():
    x = torch.randn(100, 1000)
    out = fa.random.dropout(x, 0.3, key=fa.random.key(0))
    kept = out != 0
    assert abs(float(kept.float().mean()) - 0.7) < 4 * math.sqrt(0.21 / x.numel())
    torch.testing.assert_close(out[kept], x[kept] / 0.7)
    assert torch.equal(fa.random.dropout(x, 0.3, key=fa.random.key(0), training=False), x)
    assert torch.equal(fa.random.dropout(x, 0.0, key=fa.random.key(0)), x)
    assert not fa.random.dropout(x.clone().fill_(math.inf), 1.0, key=fa.random.key(0)).any()
    assert fa.random.dropout(x.bfloat16(), 0.3, key=fa.random.key(0)).dtype == torch.bfloat16


def test_it_is_mapped_and_compiled():
    key = fa.random.key(1)
    keys = key.fold_in(torch.arange(5))
    mapped = torch.func.vmap(lambda each: fa.random.normal(each, (3,)))(keys)
    assert torch.equal(mapped, fa.random.normal(keys, (3,)))
    x = torch.randn(5, 3)
    masked = torch.func.vmap(lambda row, number: fa.random.dropout(row, 0.5, key=key.fold_in(number)))
    assert torch.equal(masked(x, torch.arange(5)), fa.random.dropout(x, 0.5, key=keys))
    compiled = torch.compile(
        lambda row, each: fa.random.dropout(row, 0.5, key=each.fold_in(2)),
        fullgraph=True,
        backend="aot_eager",
    )
    assert torch.equal(compiled(x, keys), fa.random.dropout(x, 0.5, key=keys.fold_in(2)))


def test_compiled_code_folds_any_number():
    """It multiplies in parts, and each number has to come to the same 64 bits."""
    ends = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 2]
    numbers = torch.tensor([sign * end + near for end in ends for sign in (1, -1) for near in (-1, 0)])
    key = fa.random.key(3)
    compiled = torch.compile(lambda each: key.fold_in(each).bits, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(numbers), key.fold_in(numbers).bits)


@pytest.mark.long
@pytest.mark.parametrize("width", [256, 512])
def test_kernels_count_without_overflow(width):
    """Vectors of 256 bits (AVX2) had other numbers, behind a loop that gcc had taken the end from."""

    def drawn(key):
        return fa.random.uniform(key, (12,), dtype=torch.float64), key.fold_in(torch.arange(20)).bits

    key = fa.random.key(5)
    with torch._inductor.config.patch({"cpp.simdlen": width}):
        compiled = torch.compile(drawn, fullgraph=True)(key)
    assert all(torch.equal(a, b) for a, b in zip(compiled, drawn(key), strict=True))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda key: key.fold_in(0.5), ArgumentError, "whole numbers, and this is float"),
        (lambda key: key.fold_in(True), ArgumentError, "whole numbers, and this is bool"),
        (lambda key: key.fold_in(torch.ones(2)), ArgumentError, "this tensor is torch.float32"),
        (lambda key: key.fold_in(torch.ones(2) > 0), ArgumentError, "this tensor is torch.bool"),
        (lambda _: fa.random.key("a"), ArgumentError, "whole numbers, and this is str"),
        (
            lambda key: fa.random.dropout(torch.ones(2), 1.5, key=key),
            ArgumentError,
            "p=1.5 is no probability",
        ),
        (lambda key: fa.random.bernoulli(key, -1), ArgumentError, "p=-1 is no probability"),
        (
            lambda key: fa.random.dropout(torch.ones(2, 3), 0.1, key=key.fold_in(torch.arange(3))),
            ArgumentError,
            r"the key has the shape \[3\], and x has \[2, 3\]",
        ),
        (lambda key: fa.random.uniform(key, dtype=torch.int64), UnknownNameError, "not made in torch.int64"),
    ],
)
def test_mistakes(call, error, message):
    with pytest.raises(error, match=message):
        call(fa.random.key(0))

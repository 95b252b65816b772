"""Random numbers as functions of a key: `fa.random`.

A number depends on its key and on its place in the result, and on nothing else: not on numbers that were
drawn before, on the device, or on the number of ranks. The generator is splitmix64 (Steele et al. 2014) with
a counter, on int64 tensors. All operations are elementwise, so `torch.vmap` and `torch.compile` take them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fnaccel import _lazy, _torch
from fnaccel.errors import ArgumentError, UnknownNameError, nearest

_WHERE = "fa.random"


def _signed(value: int) -> int:
    """A number of 64 bits as int64 has it."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


_STEP = _signed(0x9E3779B97F4A7C15)
_LOW = _STEP & ((1 << 31) - 1)
_FIRST, _SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)
_FOLDS = _signed(0x666F6C645F696E21)
"""Sets keys that are folded apart from numbers that are drawn: without it they would be the same bits."""


def _steps(number: torch.Tensor) -> torch.Tensor:
    """`number * _STEP`, modulo 2**64.

    Compiled code multiplies in parts that do not overflow. The overflow of a signed number is undefined in
    C++, and gcc removes the end of a loop whose counter, multiplied, would overflow: inductor's kernels of
    `torch.arange(n) * _STEP` for AVX2 then wrote past their result (torch 2.13, gcc 12).
    """
    if not torch.compiler.is_compiling():
        return number * _STEP
    part = (number & ((1 << 32) - 1)) * _LOW
    rest = (part >> 31) + (number & ((1 << 32) - 1)) * (_STEP >> 31) + (number >> 32) * _signed(_STEP << 1)
    return (rest << 31) | (part & ((1 << 31) - 1))


def _mixed(value: torch.Tensor) -> torch.Tensor:
    """splitmix64's mixing of int64 values, in their place. The masks make the shifts logical ones."""
    value ^= (value >> 30).bitwise_and_((1 << 34) - 1)
    value *= _FIRST
    value ^= (value >> 27).bitwise_and_((1 << 37) - 1)
    value *= _SECOND
    value ^= (value >> 31).bitwise_and_((1 << 33) - 1)
    return value


def _mixed_on_host(value: int) -> int:
    """The same of one number."""
    value &= (1 << 64) - 1
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & ((1 << 64) - 1)
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & ((1 << 64) - 1)
    return _signed(value ^ (value >> 31))


# a dataclass: no attrs value can be built inside compiled code
@dataclass(frozen=True, eq=False)
class Key:
    """A key of random numbers, or one key for each row.

    Args:
        bits: an int64 tensor. Its shape is that of the keys: `[]` for one key, `[rows]` for one a row.

    Example:
        >>> key = fa.random.key(0)
        >>> rows = key.fold_in(torch.arange(4))
        >>> rows.shape, fa.random.uniform(rows, (3,)).shape
        (torch.Size([4]), torch.Size([4, 3]))
    """

    bits: torch.Tensor
    if not TYPE_CHECKING:
        __getattr__ = _lazy.absent

    @property
    def shape(self) -> torch.Size:
        """The shape of the keys."""
        return self.bits.shape

    def fold_in(self, number: int | torch.Tensor) -> Key:
        """A new key for each number. Equal numbers give equal keys, and other numbers give independent ones.

        Args:
            number: an int, such as the number of a layer. Or an integer tensor that broadcasts with the key,
                such as `info.rows`: of shape `[rows]`, it makes one key for each row.

        Raises:
            ArgumentError: no whole number.

        Example:
            >>> dropout_key, noise_key = (info.key.fold_in(use) for use in range(2))
        """
        if isinstance(number, torch.Tensor):
            if number.dtype in _NO_NUMBERS or number.is_floating_point():
                raise ArgumentError(
                    f"a key takes whole numbers, and this tensor is {number.dtype}",
                    where="key.fold_in(number)",
                    fix="fold in an int, or an int64 tensor such as info.rows",
                )
            counter: Any = _steps(number.long() + 1)
        elif isinstance(number, int) and not isinstance(number, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            counter = _signed((number + 1) * _STEP)
        else:
            raise ArgumentError(
                f"a key takes whole numbers, and this is {type(number).__name__}",
                where="key.fold_in(number)",
                fix="fold in an int, or an int64 tensor such as info.rows",
            )
        return Key(_mixed((self.bits ^ _FOLDS) + counter))

    def __repr__(self) -> str:
        return f"Key(shape={list(self.bits.shape)})"


_NO_NUMBERS = (torch.bool, torch.complex64, torch.complex128, torch.complex32)
_torch.register_node(Key, lambda key: ([key.bits], None), lambda bits, _: Key(*bits))


def key(
    seed: int | torch.Tensor, *numbers: int | torch.Tensor, device: torch.device | str | None = None
) -> Key:
    """The key of a seed. `key(seed, 3, 1)` is `key(seed).fold_in(3).fold_in(1)`, computed on the host.

    Args:
        seed: any whole number of 64 bits. A 0-d int64 tensor makes the key on its device.
        numbers: folded in, one after the other.
        device: of the key, and of all numbers drawn from it. The CPU by default.

    Raises:
        ArgumentError: no whole numbers.

    Example:
        >>> fa.random.normal(fa.random.key(7), (2, 3)).shape
        torch.Size([2, 3])
    """
    if isinstance(seed, torch.Tensor):
        made = Key(_mixed(seed + _STEP))
        for number in numbers:
            made = made.fold_in(number)
        return made
    for number in (seed, *numbers):
        if type(number) is not int:
            raise ArgumentError(
                f"a key is made of whole numbers, and this is {type(number).__name__}",
                where="fa.random.key(seed)",
                fix="fa.random.key(0); key.fold_in(tensor) for a number on a device",
            )
    bits = _mixed_on_host(seed + _STEP)
    for number in numbers:
        bits = _mixed_on_host((bits ^ _FOLDS) + (int(number) + 1) * _STEP)
    return Key(torch.full((), _signed(bits), dtype=torch.int64, device=device))


def uniform(
    key: Key,
    shape: Sequence[int] = (),
    *,
    low: float = 0.0,
    high: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Numbers from low (included) to high (not included), each equally probable.

    Args:
        key: one key, or one for each row.
        shape: of the numbers of one key.
        low, high: the range.
        dtype: a floating-point dtype. Numbers are multiples of half of its `eps`.

    Returns:
        A tensor of shape `[*key.shape, *shape]` on the key's device.

    Raises:
        UnknownNameError: the dtype is none of the four.

    Example:
        >>> t = fa.random.uniform(info.key.fold_in(info.rows))  # a diffusion time for each row
        >>> t.shape
        torch.Size([4])
    """
    digits = _digits(dtype, "fa.random.uniform")
    unit = _top(_words(key, shape), digits).to(dtype) * 2.0**-digits
    return unit if low == 0.0 and high == 1.0 else low + (high - low) * unit


def normal(key: Key, shape: Sequence[int] = (), *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers of the normal distribution with mean 0 and deviation 1 (Box and Muller 1958).

    Args:
        key: one key, or one for each row.
        shape: of the numbers of one key.
        dtype: a floating-point dtype. The largest number is 7.4.

    Returns:
        A tensor of shape `[*key.shape, *shape]` on the key's device.

    Raises:
        UnknownNameError: the dtype is none of the four.

    Example:
        >>> float(fa.random.normal(fa.random.key(0), (10_000,)).std().round(decimals=1))
        1.0
    """
    _digits(dtype, "fa.random.normal")
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    words = _words(key, shape)
    # the angle takes the 24 bits that the radius does not. The radius has no 0, whose logarithm is infinite
    radius = (-2 * torch.log((_top(words, 40).to(wide) + 1) * 2.0**-40)).sqrt()
    angle = (words & ((1 << 24) - 1)).to(wide) * (2 * math.pi * 2.0**-24)
    return (radius * torch.cos(angle)).to(dtype)


def bernoulli(key: Key, p: float | torch.Tensor, shape: Sequence[int] = ()) -> torch.Tensor:
    """True with probability p.

    Args:
        key: one key, or one for each row.
        p: from 0 to 1, or a tensor of probabilities that broadcasts with the result.
        shape: of the values of one key.

    Returns:
        A bool tensor of shape `[*key.shape, *shape]` on the key's device.

    Raises:
        ArgumentError: p is no probability.

    Example:
        >>> drop = fa.random.bernoulli(info.key.fold_in(info.rows), 0.1)  # labels dropped for guidance
        >>> drop.shape, drop.dtype
        (torch.Size([4]), torch.bool)
    """
    if isinstance(p, torch.Tensor):
        return uniform(key, shape) < p
    return _top(_words(key, shape), 24) < _threshold(p, "fa.random.bernoulli")


def dropout(x: torch.Tensor, p: float, *, key: Key, training: bool = True) -> torch.Tensor:
    """`F.dropout(x, p)` with a mask that follows from a key.

    Args:
        x: values of any shape and floating-point dtype.
        p: the probability of a 0.
        key: one key for all values. Or one for each row: a key of shape `x.shape[:n]` has a mask of shape
            `x.shape[n:]` for each of its rows, whatever the other rows are. So the ranks and micro-batches
            that share the rows change nothing.
        training: False returns `x`, as `F.dropout` does.

    Returns:
        `x / (1 - p)` where it is kept, else 0. The shape and dtype of `x`.

    Raises:
        ArgumentError: p is no probability, or the key's shape is not that of x's first dimensions.

    Example:
        >>> x = torch.ones(4, 8)
        >>> fa.random.dropout(x, 0.1, key=info.key.fold_in(info.rows)).shape
        torch.Size([4, 8])
    """
    threshold = _threshold(p, "fa.random.dropout")
    first = key.bits.dim()
    if key.bits.shape != x.shape[:first]:
        raise ArgumentError(
            f"the key has the shape {list(key.bits.shape)}, and x has {list(x.shape)}",
            where="fa.random.dropout",
            fix="give one key; or one for each row: key.fold_in(info.rows), if dim 0 of x is the rows",
        )
    if not training or threshold == 0:
        return x
    kept = _top(_words(key, x.shape[first:]), 24) >= threshold
    return torch.where(kept, x * (1 / (1 - p) if p < 1 else 0.0), 0.0)


def _words(key: Key, shape: Sequence[int]) -> torch.Tensor:
    """64 random bits for each place of a shape, for each key: `[*key.shape, *shape]`, int64."""
    bits = key.bits
    if len(shape) == 0:
        return _mixed(bits + _STEP)
    places = _steps(torch.arange(1, math.prod(shape) + 1, device=bits.device))
    return _mixed(bits.unsqueeze(-1) + places).view((*bits.shape, *shape))


def _top(words: torch.Tensor, digits: int) -> torch.Tensor:
    """The first bits of each word, as a number from 0 on."""
    return (words >> (64 - digits)).bitwise_and_((1 << digits) - 1)


_DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}


def _digits(dtype: torch.dtype, where: str) -> int:
    """The binary digits of a dtype, so that no number is rounded up to 1."""
    if dtype not in _DIGITS:
        names = [str(known) for known in _DIGITS]
        raise UnknownNameError(
            f"random numbers are not made in {dtype}", where=where, fix=nearest(str(dtype), names)
        )
    return _DIGITS[dtype]


def _threshold(p: float, where: str) -> int:
    if not 0 <= p <= 1:
        raise ArgumentError(f"p={p!r} is no probability", where=where, fix="give a number from 0 to 1")
    return round(p * (1 << 24))

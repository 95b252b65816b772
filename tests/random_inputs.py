"""Every hypothesis strategy of the suite; tiny sizes only."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
REAL_DTYPES = tuple(dtype for dtype in DTYPES if not dtype.is_complex)

worlds = st.sampled_from([1, 2, 3, 4])
lengths = st.integers(0, 9)
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
keys = st.text("abc", min_size=1, max_size=2)


def whole_numbers(shape: tuple[int, ...], dtype: torch.dtype, start: int = 0) -> torch.Tensor:
    """A tensor of small whole numbers, on which every dtype computes exactly."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) + start) % 7).reshape(shape).to(dtype)


def tensors(dtypes: tuple[torch.dtype, ...] = DTYPES) -> st.SearchStrategy[torch.Tensor]:
    """Small tensors of any shape, 0-d and empty ones among them; some not contiguous."""

    def build(shape: tuple[int, ...], dtype: torch.dtype, start: int, flip: bool) -> torch.Tensor:
        made = whole_numbers(shape, dtype, start)
        return made.mT if flip and made.dim() >= 2 else made

    return st.builds(build, shapes, st.sampled_from(dtypes), st.integers(0, 6), st.booleans())


def trees(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Nested dicts, lists and tuples around leaves."""
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(keys, inner, max_size=3),
            st.tuples(inner, inner),
        ),
        max_leaves=6,
    )


scalars = st.one_of(st.integers(-5, 5), st.floats(-1, 1), st.text("xy", max_size=2), st.booleans())
mixed_trees = trees(st.one_of(tensors(), scalars))

# what a checkpoint may hold; NaN apart, which equals nothing
storable = trees(
    st.one_of(
        tensors(),
        scalars,
        st.none(),
        st.binary(max_size=4),
        st.integers(),
        st.floats(allow_nan=False),
        st.text(max_size=3),
    )
)

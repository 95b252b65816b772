"""Context parallelism by a ring: keys and values go from rank to rank, and no rank ever has all of them.

In n steps each rank attends to the keys of every rank, while it sends those that it has to the next one
(Liu et al. 2023). Softmaxes are merged by their log-sum-exp. The backward pass is a ring of its own, in which
the gradients of keys and values go round with them. All of it is one operation, which graphs take as it is.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from fnaccel.errors import CapabilityError
from fnaccel.strategies.context.blocks import block_attention, block_gradients, merged
from fnaccel.strategies.context.order import Chunks
from fnaccel.strategies.context.split import Split

_ARGUMENTS = "Tensor? mask, int ranks, int rank, bool balanced, bool causal, float? scale, str group"
_FORWARD = f"(Tensor query, Tensor key, Tensor value, {_ARGUMENTS}) -> (Tensor, Tensor)"
_BACKWARD = (
    f"(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor total, {_ARGUMENTS}) "
    "-> (Tensor, Tensor, Tensor)"
)

# operations of torch take the name of a group
_groups: weakref.WeakValueDictionary[str, dist.ProcessGroup] = weakref.WeakValueDictionary()


def ring_attention(
    split: Split,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    dropout: float,
    scale: float | None,
    gqa: bool,
) -> torch.Tensor:
    """Attention of this rank's rows, with keys and values that go round. Arguments as for `gather_attention`.

    Raises:
        CapabilityError: dropout, or a mask that takes a gradient.
    """
    problem = "draws dropout" if dropout else "takes the gradient of a mask" if _learned(mask) else ""
    if problem:
        raise CapabilityError(
            f"attention {problem}, and a ring computes each block of it twice",
            where='fa.context(method="ring")',
            fix='fa.context(method="gather")' + (", or attention without dropout" if dropout else ""),
        )
    del gqa  # heads of keys are repeated, block by block, if there are fewer of them
    chunks = split.chunks
    options = (chunks.ranks, chunks.rank, chunks.balanced, causal, scale, split.group.group_name)
    key, value = key.contiguous(), value.contiguous()
    return torch.ops.fnaccel.ring_attention(query, key, value, mask, *options)[0]


def _learned(mask: torch.Tensor | None) -> bool:
    return mask is not None and mask.requires_grad and torch.is_grad_enabled()


def register_ring(group: dist.ProcessGroup) -> None:
    """Register the ring as operations of torch, and a group that is to use them."""
    _groups[group.group_name] = group
    _register_operations()


@functools.cache
def _register_operations() -> None:
    forward = torch.library.custom_op("fnaccel::ring_attention", _forward, mutates_args=(), schema=_FORWARD)
    backward = torch.library.custom_op(
        "fnaccel::ring_attention_backward", _backward, mutates_args=(), schema=_BACKWARD
    )
    forward.register_fake(_fake_forward)
    backward.register_fake(_fake_backward)
    forward.register_autograd(_differentiate, setup_context=_keep)


def _fake_forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> Any:  # noqa: ARG001
    wide = torch.promote_types(query.dtype, torch.float32)
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    return out, query.new_empty(query.shape[:-1], dtype=wide)


def _fake_backward(_grad: torch.Tensor, *tensors: Any) -> Any:
    return tuple(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors[:3])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, mask, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, *output, mask)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
    *tensors, mask = ctx.saved_tensors
    grads = torch.ops.fnaccel.ring_attention_backward(grad, *tensors, mask, *ctx.options)
    return *grads, *(None for _ in range(7))


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    ranks: int,
    rank: int,
    balanced: bool,
    causal: bool,
    scale: float | None,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    chunks, ring = Chunks(ranks, rank, balanced), _Ring(group, rank, ranks)
    both = torch.cat([key, value], dim=-1)
    with torch.autocast(query.device.type, enabled=False):
        parts: dict[int, Any] = {}
        for step in range(ranks):
            sending = ring.send_on(both) if step < ranks - 1 else None
            for block in _blocks(query, both, key.shape[-1], mask, chunks, (rank - step) % ranks, causal):
                result = block_attention(*block.tensors, block.mask, block.diagonal, scale)
                parts[block.start] = merged(parts.get(block.start), result)
            both = both if sending is None else sending.wait()
        ordered = [parts[start] for start in sorted(parts)]
        out = torch.cat([part[0] for part in ordered], dim=-2).to(query.dtype).contiguous()
        return out, torch.cat([part[1] for part in ordered], dim=-1).contiguous()


def _backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor,
    mask: torch.Tensor | None,
    ranks: int,
    rank: int,
    balanced: bool,
    causal: bool,
    scale: float | None,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    chunks, ring = Chunks(ranks, rank, balanced), _Ring(group, rank, ranks)
    both, width = torch.cat([key, value], dim=-1), key.shape[-1]
    wide = total.dtype
    of_query = torch.zeros(query.shape, dtype=wide, device=query.device)
    arriving: _Transfer | None = None
    with torch.autocast(query.device.type, enabled=False):
        for step in range(ranks):
            sending = ring.send_on(both) if step < ranks - 1 else None
            of_both = torch.zeros(both.shape, dtype=wide, device=both.device)
            for block in _blocks(query, both, width, mask, chunks, (rank - step) % ranks, causal):
                rows, keys = slice(block.start, block.stop), slice(block.key_start, block.key_stop)
                grads = block_gradients(
                    grad[..., rows, :], *block.tensors, out[..., rows, :], total[..., rows],
                    block.mask, block.diagonal, scale,
                )  # fmt: skip
                of_query[..., rows, :] += grads[0]
                of_both[..., keys, :width] += _of_heads(grads[1], key)
                of_both[..., keys, width:] += _of_heads(grads[2], key)
            if arriving is not None:
                of_both += arriving.wait()
            # n sends bring the gradients of keys home to the rank that has the keys
            arriving = ring.send_on(of_both)
            both = both if sending is None else sending.wait()
        assert arriving is not None
        of_both = arriving.wait()
    of_key, of_value = of_both[..., :width], of_both[..., width:]
    return (
        of_query.to(query.dtype),
        of_key.to(key.dtype, memory_format=torch.contiguous_format, copy=True),
        of_value.to(value.dtype, memory_format=torch.contiguous_format, copy=True),
    )


class _Block:
    """Some rows of this rank and some keys of another, with the heads of keys repeated."""

    def __init__(
        self, query: torch.Tensor, both: torch.Tensor, width: int, mask: torch.Tensor | None, diagonal: bool,
        rows: tuple[int, int], keys: tuple[int, int],
    ) -> None:  # fmt: skip
        (self.start, size), (self.key_start, key_size) = rows, keys
        self.stop, self.key_stop = self.start + size, self.key_start + key_size
        part = both[..., self.key_start : self.key_stop, :]
        heads = query.shape[-3] // both.shape[-3] if query.dim() > 2 else 1
        part = part if heads == 1 else part.repeat_interleave(heads, dim=-3)
        row_part = query[..., self.start : self.stop, :]
        self.tensors = row_part, part[..., :width], part[..., width:]
        self.mask = mask
        self.diagonal = diagonal


def _blocks(
    query: torch.Tensor,
    both: torch.Tensor,
    width: int,
    mask: torch.Tensor | None,
    chunks: Chunks,
    source: int,
    causal: bool,
) -> Iterator[_Block]:
    """The blocks of attention between this rank's rows and the keys of the rank `source`."""
    rows, keys = query.shape[-2], both.shape[-2]
    if not causal:
        if mask is not None and mask.shape[-1] != 1:
            mask = chunks.cut(mask, -1, source)
        yield _Block(query, both, width, mask, False, (0, rows), (0, keys))
        return
    start = 0
    for first, size in chunks.spans(rows):
        key_start = 0
        for key_first, key_size in chunks.spans(keys, source):
            if key_first <= first:
                diagonal = key_first == first
                yield _Block(query, both, width, None, diagonal, (start, size), (key_start, key_size))
            key_start += key_size
        start += size


def _of_heads(grad: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The gradient of keys whose heads were repeated."""
    if grad.dim() < 3 or grad.shape[-3] == key.shape[-3]:
        return grad
    return grad.unflatten(-3, (key.shape[-3], -1)).sum(-3)


class _Ring:
    """Sends tensors to the next rank, and gets those of the rank before."""

    def __init__(self, group: str, rank: int, ranks: int) -> None:
        self._group = _groups[group]
        self._following = dist.get_global_rank(self._group, (rank + 1) % ranks)
        self._preceding = dist.get_global_rank(self._group, (rank - 1) % ranks)

    def send_on(self, tensor: torch.Tensor) -> _Transfer:
        """Begin to send a tensor on. The result's `wait()` gives the one that arrived."""
        outgoing, incoming = (
            tensor.contiguous(),
            torch.empty_like(tensor, memory_format=torch.contiguous_format),
        )
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, outgoing, self._following, self._group),
                dist.P2POp(dist.irecv, incoming, self._preceding, self._group),
            ]
        )
        return _Transfer(works, outgoing, incoming)


class _Transfer:
    """A tensor on its way."""

    def __init__(self, works: list[Any], outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
        self._works = works
        self._outgoing = outgoing  # has to live until it was sent
        self._incoming = incoming

    def wait(self) -> torch.Tensor:
        """The tensor that arrived."""
        for work in self._works:
            work.wait()
        return self._incoming

"""Which positions of a sequence each rank has: contiguous parts, or two chunks that balance causal attention.

A causal token attends to all tokens before it, so the last tokens cost the most. In the balanced order a
sequence is cut in 2n chunks, and rank r has the chunks r and 2n - 1 - r: every rank computes equally much.
"""

from __future__ import annotations

import attrs
import torch


@attrs.frozen
class Chunks:
    """The positions of one rank.

    Attributes:
        ranks: the number of ranks that share a sequence.
        rank: this rank among them.
        balanced: whether each rank has two chunks, one from each end, or one contiguous part.
    """

    ranks: int
    rank: int
    balanced: bool

    @property
    def count(self) -> int:
        """The number of equal chunks in which a sequence is cut."""
        return 2 * self.ranks if self.balanced else self.ranks

    def spans(self, length: int, rank: int | None = None) -> list[tuple[int, int]]:
        """(first position in the whole sequence, number of positions) of each chunk of a rank.

        Args:
            length: the positions that a rank has.
            rank: this rank by default.
        """
        at = self.rank if rank is None else rank
        if not self.balanced:
            return [(at * length, length)]
        chunk = length // 2
        return [(at * chunk, chunk), ((self.count - 1 - at) * chunk, chunk)]

    def cut(self, whole: torch.Tensor, dim: int, rank: int | None = None) -> torch.Tensor:
        """A rank's positions of a whole tensor, in the order of its chunks, contiguous. This rank by default.

        Losses of transformers view labels as one dimension, which a part of each row does not allow.
        """
        spans = self.spans(whole.shape[dim] // self.ranks, rank)
        parts = [whole.narrow(dim, first, size) for first, size in spans]
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim)

    def positions(self, length: int, device: torch.device) -> torch.Tensor:
        """The positions of this rank's tokens in the whole sequence, int64 of shape `[length]`."""
        parts = [torch.arange(first, first + size, device=device) for first, size in self.spans(length)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def in_order(self, gathered: torch.Tensor) -> torch.Tensor:
        """The parts of all ranks, one after the other along dim 0, in the order of the sequence."""
        if not self.balanced:
            return gathered
        chunks = gathered.unflatten(0, (self.ranks, 2, -1))
        return torch.cat([chunks[:, 0], chunks[:, 1].flip(0)]).flatten(0, 1)

    def by_rank(self, whole: torch.Tensor) -> torch.Tensor:
        """The inverse of `in_order`."""
        if not self.balanced:
            return whole
        chunks = whole.unflatten(0, (self.count, -1))
        first, second = chunks[: self.ranks], chunks[self.ranks :].flip(0)
        return torch.stack([first, second], dim=1).flatten(0, 2)

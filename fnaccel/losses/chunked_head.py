"""`chunked_head`: the head of a language model, without whole logits in its loss."""

from __future__ import annotations

import types
from typing import Any

import attrs
from torch import nn

from fnaccel.errors import ArgumentError, require_counts
from fnaccel.extend import Capability, Phase, Transform, takes_step
from fnaccel.losses.logits import check_linear, has_logits, logits_forward, train_in_chunks

_WHERE = "fa.transforms.chunked_head"


@attrs.frozen
class ChunkedHead:
    """The head whose logits are computed for some rows at a time, and how many."""

    head: str | None = None
    rows: int | None = None

    def on_module(self, module: nn.Module, where: str) -> None:  # noqa: ARG002
        """Patch the forward of the head."""
        head = self._of(module)
        if not has_logits(head):
            check_linear(head, _WHERE)
            forward = logits_forward(head, whole=nn.Linear.forward)
            head.forward = types.MethodType(forward, head)
        train_in_chunks(head, self.rows)

    def _of(self, module: nn.Module) -> Any:
        if self.head is not None:
            try:
                return module.get_submodule(self.head)
            except AttributeError as error:
                raise ArgumentError(
                    f"the model has no {self.head}", where=_WHERE, fix="the path of its head"
                ) from error
        find = getattr(module, "get_output_embeddings", None)
        head = None if find is None else find()
        if head is None:
            raise ArgumentError(
                f"nothing says which module of a {type(module).__name__} is its head",
                where=_WHERE,
                fix='its path: chunked_head(step, head="lm_head")',
            )
        return head


@takes_step
def chunked_head(head: str | None = None, *, rows: int | None = None) -> Transform:
    """Let a language model compute the logits of its loss for some rows at a time.

    In a step the head returns a stand-in for its logits. `cross_entropy` takes it, and computes losses and
    gradients by `fa.losses.linear_cross_entropy`. So `model(ids, labels=labels).loss` of transformers' causal
    models keeps its shift, `num_items_in_batch` and `ignore_index`. Other uses of the logits raise. Without
    gradients, in `evaluate` and `generate`, logits are whole.

    Args:
        step: a step or a loss function; or none, for `fa.chain`.
        head: the path of an `nn.Linear`. By default what the model's `get_output_embeddings` returns.
        rows: how many rows have logits at a time. By default 128 on CPUs, and 1,024 elsewhere.

    Raises:
        ArgumentError: at `init`, if the model has no such head.
        CapabilityError: at `init`, a head that is no linear layer. In a step, a use of whole logits.

    Example:
        >>> step = fa.transforms.chunked_head(loss_fn)
        >>> step = fa.transforms.chunked_head(loss_fn, head="lm_head")
    """
    require_counts(_WHERE, rows=rows)
    return Transform(
        "chunked_head", Phase.MODULE, apply=ChunkedHead(head, rows), needs=frozenset({Capability.MODULES})
    )

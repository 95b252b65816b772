"""`inference`: the memory of a forward pass without gradients, with its cache of keys and values."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import attrs
import torch
from torch import nn

from fnaccel.big.sizes import Dtype, bits_of, nbytes
from fnaccel.errors import ArgumentError, CapabilityError
from fnaccel.estimate.account import Account
from fnaccel.estimate.model_names import NamedModel
from fnaccel.estimate.repeated import multiply, shorten
from fnaccel.estimate.trace import fill, tensors_of
from fnaccel.extend import construct
from fnaccel.models import _torch
from fnaccel.models.building import release
from fnaccel.models.unknown_values import ordinary_batch
from fnaccel.texts import size_of


@attrs.frozen(kw_only=True)
class InferenceEstimate:
    """The memory of inference on one rank. Print it.

    Attributes:
        parameters: bytes of parameters and buffers.
        cache: bytes of keys and values of all tokens.
        activations: further bytes at the peak of the forward pass over all tokens at once.
        rows, length: of the batch.

    Example:
        >>> fa.estimate.InferenceEstimate(parameters=900, cache=80, activations=20, rows=1, length=8).total
        1000
    """

    parameters: int
    cache: int
    activations: int
    rows: int
    length: int | None

    @property
    def total(self) -> int:
        """All bytes."""
        return self.parameters + self.cache + self.activations

    def __str__(self) -> str:
        shape = f"{self.rows} rows" + ("" if self.length is None else f" of {self.length:,} tokens")
        return "\n".join(
            [
                f"inference of {shape}: {size_of(self.total)}",
                f"    parameters  {size_of(self.parameters)}",
                f"    cache       {size_of(self.cache)}",
                f"    activations {size_of(self.activations)}",
            ]
        )


def inference(
    model: NamedModel, *, rows: int = 1, length: int | None = None, dtype: Dtype = "bf16"
) -> InferenceEstimate:
    """The memory of a forward pass over a whole batch, and of the cache that it leaves. Nothing is allocated.

    Args:
        model: a model by name, whose kind of batch is known.
        rows: sequences, or images.
        length: tokens of each. By default as long as the model can, 2,048 at most.
        dtype: of parameters. Activations and cache are in bf16 if it is smaller than that.

    Raises:
        ArgumentError: the kind of batch is unknown.

    Example:
        >>> model = fa.estimate.find_model("torch.nn:Identity")
        >>> fa.estimate.inference(model)
        Traceback (most recent call last):
        fnaccel.errors.ArgumentError: nothing is known of the batches of torch.nn:Identity...
    """
    if model.batch is None:
        raise ArgumentError(
            f"nothing is known of the batches of {model.name}",
            where="fa.estimate.inference",
            fix="name a model of transformers or timm",
        )
    bits = bits_of(dtype) or 16
    kind = (
        torch.float32
        if bits == 32
        else torch.float16
        if str(dtype) in ("fp16", "float16")
        else torch.bfloat16
    )
    built = construct(model.factory, 0, empty=True)
    try:
        module = built.modules[None]
        parameters = nbytes([*module.parameters(), *module.buffers()], bits)
        module.to(kind).eval().requires_grad_(False)
        account = Account()
        batch: Any = model.batch(rows, length)
        tokens = batch["input_ids"].shape[1] if isinstance(batch, dict) and "input_ids" in batch else None
        try:
            cache = _forward(module, built.host, batch, account)
        except Exception as error:
            raise CapabilityError(
                f"a forward pass fails: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
                where="fa.estimate.inference",
                fix="estimate training, whose batch has labels: fa.estimate.training(...)",
            ) from error
        return InferenceEstimate(
            parameters=parameters,
            cache=cache,
            activations=account.top.total - cache,
            rows=rows,
            length=tokens,
        )
    finally:
        release(built)


def _forward(module: nn.Module, host: nn.Module, batch: Any, account: Account) -> int:
    """Run a forward pass without values, and return the bytes of the cache that it leaves."""
    runs = shorten(module, ())
    with contextlib.ExitStack() as stack:
        stack.enter_context(_torch.fake_mode())
        stack.enter_context(ordinary_batch())
        inputs = fill(host, batch)
        account.leave_out(tensors_of(host, inputs))
        for run in runs:
            multiply(run, account)
        stack.enter_context(account)
        stack.enter_context(torch.no_grad())
        if not isinstance(inputs, dict):
            module(inputs[0])
            return 0
        options: dict[str, Any] = {key: value for key, value in inputs.items() if key != "labels"}
        accepted = inspect.signature(module.forward).parameters
        options |= {"use_cache": True} if "use_cache" in accepted else {}
        options |= {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        # the result is dropped at once, but for the cache
        cache = getattr(module(**options), "past_key_values", None)
        return 0 if cache is None else account.live

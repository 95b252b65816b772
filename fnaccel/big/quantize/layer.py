"""`QuantizedLayer`: the base class of the layers of all libraries. Codes and scales are buffers.

In a state they are plain tensors. `state_dict` has the names that the library itself writes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from fnaccel.errors import CheckpointError
from fnaccel.models.constant_buffers import ConstantBuffers

if TYPE_CHECKING:
    from fnaccel.big.quantize.records import Record

Shape = tuple[int, ...] | None
"""None: the length depends on the values."""


class LinearLayer(Protocol):
    """A layer with a weight of two dimensions: `nn.Linear`, or transformers' `Conv1D`."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    training: bool


class QuantizedLayer(ConstantBuffers):
    """A linear layer that holds its weight as codes.

    Attributes:
        record: the description that made it.
        in_features: the size of its input.
        out_features: the size of its output.
        kind: the class of the layer that it replaced.
        weight_dtype: the dtype of the weight that was quantized, and of `full_weight()`.
        bias: `[out_features]`, in full width, or None.
    """

    record: Any
    bias: nn.Parameter | None

    def __init__(self, layer: LinearLayer, record: Record) -> None:
        nn.Module.__init__(self)
        self.record = record
        self.constant_weight = f"is quantized ({record.name})"
        self.kind: type[Any] = type(layer)
        self.weight_dtype: torch.dtype = layer.weight.dtype
        rows, columns = layer.weight.shape
        self.out_features, self.in_features = (columns, rows) if self.transposed else (rows, columns)
        self.bias = layer.bias
        self.train(layer.training)

    @property
    def transposed(self) -> bool:
        """Whether the layer that was replaced has a weight `[in_features, out_features]` (`Conv1D`)."""
        return is_conv1d(self.kind)

    @property
    def full_shape(self) -> tuple[int, int]:
        """The shape that the weight has in full-width files."""
        rows, columns = self.out_features, self.in_features
        return (columns, rows) if self.transposed else (rows, columns)

    @abstractmethod
    def stored_shapes(self) -> dict[str, tuple[Shape, torch.dtype]]:
        """Shape and dtype of each tensor of the quantized weight in a file, by the name after the layer's."""

    @abstractmethod
    def stored(self) -> dict[str, torch.Tensor]:
        """The tensors of the quantized weight as a file has them."""

    @abstractmethod
    def put(self, suffix: str, tensor: torch.Tensor) -> None:
        """Take one tensor of a quantized file. Its shape and dtype were checked."""

    @abstractmethod
    def encode(self, weight: torch.Tensor) -> None:
        """Quantize a weight `[out_features, in_features]` of dtype `weight_dtype`, and keep its codes."""

    @abstractmethod
    def full_weight(self) -> torch.Tensor:
        """The weight in full width, `[out_features, in_features]`, as rounded as the codes."""

    def fill(self, suffix: str, tensor: torch.Tensor, device: torch.device | str) -> None:
        """Take a full-width `weight`, which is quantized on `device`, or a tensor of a quantized file.

        Raises:
            CheckpointError: another shape or dtype than this layer has, or a name that it lacks.
        """
        with torch.no_grad():
            if suffix == "weight" and tensor.is_floating_point():
                self._check("weight", tensor, self.full_shape, None)
                full = tensor.detach().to(device=device, dtype=self.weight_dtype)
                self.encode(full.t().contiguous() if self.transposed else full.contiguous())
                return
            shapes = self.stored_shapes()
            if suffix not in shapes:
                raise CheckpointError(
                    f"a layer of {self.record.name} has no tensor {suffix!r}, only {', '.join(shapes)}",
                    where="a quantized checkpoint",
                    fix="quantize with the record of the checkpoint: fa.big.quantization_of(folder)",
                )
            self._check(suffix, tensor, *shapes[suffix])
            self.put(suffix, tensor.detach().to(device))

    def header(self) -> str | None:
        """The text about the weight that the library reads in the header of a safetensors file, or None."""
        return None

    def missing(self) -> list[str]:
        """The buffers that have no values yet."""
        return [name for name, value in self.named_buffers(recurse=False) if value.is_meta]

    def set_value(self, name: str, value: torch.Tensor) -> None:
        """Give a buffer its values: in place, unless it is empty or on another device."""
        buffer: Any = self.get_buffer(name)
        if buffer.is_meta or buffer.device != value.device:
            setattr(self, name, value.clone() if value.is_inference() else value)
        else:
            buffer.copy_(value)

    def declare(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Register a buffer without values."""
        self.register_buffer(name, torch.empty(tuple(shape), dtype=dtype, device="meta"))

    def _check(self, suffix: str, tensor: torch.Tensor, shape: Shape, dtype: torch.dtype | None) -> None:
        same = shape is None or tuple(tensor.shape) == shape
        if not same or (dtype is not None and tensor.dtype is not dtype):
            expected = f"{'' if shape is None else list(shape)} {dtype or 'in full width'}".strip()
            raise CheckpointError(
                f"{suffix} is {list(tensor.shape)} {tensor.dtype}, and this layer has {expected}",
                where=f"a quantized checkpoint, read with {self.record}",
                fix="quantize with the record of the checkpoint: fa.big.quantization_of(folder)",
            )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        # `module.to(torch.bfloat16)` would round the scales
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, value in before.items():
            after = self.get_buffer(name)
            if after.dtype is not value.dtype:
                setattr(self, name, value.to(after.device))
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias if keep_vars else self.bias.detach()
        stored = self._stored_without_values() if self.missing() else self.stored()
        destination.update({prefix + suffix: value for suffix, value in stored.items()})

    def _stored_without_values(self) -> dict[str, torch.Tensor]:
        shapes = self.stored_shapes().items()
        return {
            suffix: torch.empty(shape or (0,), dtype=dtype, device="meta")
            for suffix, (shape, dtype) in shapes
        }

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        tensors = {
            **dict(self.named_buffers(recurse=False)),
            **({} if self.bias is None else {"bias": self.bias}),
        }
        before = {name: (value, None if value.is_meta else value.clone()) for name, value in tensors.items()}
        errors = len(error_msgs)
        left = {name: value for name, value in state_dict.items() if name.startswith(prefix)}
        bias = left.pop(f"{prefix}bias", None)
        if self.bias is not None and bias is not None:
            if bias.shape != self.bias.shape:
                error_msgs.append(
                    f"{prefix}bias is {list(bias.shape)}, and this layer has {list(self.bias.shape)}"
                )
            elif self.bias.is_meta or local_metadata.get("assign_to_params_buffers", False):
                self.bias = nn.Parameter(bias.detach(), requires_grad=self.bias.requires_grad)
            else:
                with torch.no_grad():
                    self.bias.copy_(bias)
        weight = left.get(f"{prefix}weight")
        full = weight is not None and weight.is_floating_point()
        suffixes = ["weight"] if full else list(self.stored_shapes())
        for suffix in suffixes:
            value = left.pop(prefix + suffix, None)
            if value is None:
                missing_keys.append(prefix + suffix)
                continue
            try:
                self.fill(suffix, value, self._device(value))
            except CheckpointError as error:
                error_msgs.append(str(error))
        if self.bias is not None and bias is None:
            missing_keys.append(f"{prefix}bias")
        if strict:
            unexpected_keys.extend(left)
        if len(error_msgs) > errors:  # all tensors or none
            with torch.no_grad():
                for name, (tensor, values) in before.items():
                    setattr(self, name, tensor if values is None else tensor.copy_(values))

    def _device(self, value: torch.Tensor) -> torch.device:
        """The device of the codes, or that of `value` if there are none yet."""
        buffer = next(self.buffers(recurse=False))
        return value.device if buffer.is_meta else buffer.device

    def extra_repr(self) -> str:
        """The sizes and the record, for `print(module)`."""
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, {self.record}"


def is_conv1d(kind: type[Any]) -> bool:
    """Whether a class is transformers' `Conv1D`: a linear layer with a transposed weight."""
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")

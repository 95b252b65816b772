"""The descriptions of quantization: `Nf4`, `Fp4`, `Int8` of bitsandbytes, and two of torchao."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any, Literal

import attrs
import torch
from torch import nn

from fnaccel.big.quantize.layer import LinearLayer, is_conv1d
from fnaccel.errors import MissingBackendError, as_names, install_line, require, require_counts
from fnaccel.step.choices import DtypeName
from fnaccel.step.precision_policy import dtype_of

BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)


def _patterns(names: str | Iterable[str] | None) -> tuple[str, ...] | None:
    if names is None:
        return None
    require(isinstance(names, Iterable), f"skip={names!r}", "a quantization", 'patterns: skip="*.down"')  # pyright: ignore[reportUnnecessaryIsInstance]
    return as_names(names)


def _number(value: float) -> float:
    number = isinstance(value, int | float)  # pyright: ignore[reportUnnecessaryIsInstance]
    require(number, f"threshold={value!r}", "fa.big.Int8", "0 or more. bitsandbytes' own is 6.0")
    return float(value)


def _compute(name: DtypeName | torch.dtype | None) -> torch.dtype | None:
    return None if name is None else dtype_of(name, "compute=")


@attrs.frozen(kw_only=True)
class Record:
    """The fields that all descriptions share: the layers that are left.

    Attributes:
        skip: shell patterns of layers, or of modules above them, that are not quantized. None: the output
            head (`get_output_embeddings()` of a model of transformers, or a layer called `lm_head`).
        keep: patterns of modules or parameters that are not quantized and that are stored in fp32.
        optional: whether patterns may match nothing. Those of a checkpoint may.
    """

    skip: tuple[str, ...] | None = attrs.field(default=None, converter=_patterns)
    keep: tuple[str, ...] = attrs.field(default=(), converter=as_names)
    optional: bool = attrs.field(default=False, repr=False, eq=False)

    @property
    def name(self) -> str:
        """The name of the codes."""
        return type(self).__name__.lower()

    @property
    def bits(self) -> int:
        """The bits of a code."""
        raise NotImplementedError

    def obstacle(self, layer: LinearLayer) -> str | None:  # noqa: ARG002 - some records take any layer
        """Why a linear layer can't be quantized, or None."""
        return None

    def make(self, layer: nn.Module) -> Any:
        """A quantized layer in the place of a linear one: empty if that is.

        Raises:
            MissingBackendError: the library is not installed.
        """
        raise NotImplementedError

    def __str__(self) -> str:
        changed = [
            f"{field.name}={_shown(getattr(self, field.name))}"
            for field in attrs.fields(type(self))
            if field.repr and getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(changed)})"


@attrs.frozen(kw_only=True, str=False)
class Int8(Record):
    """LLM.int8() of bitsandbytes: one scale for each output, and outliers of the input in full width.

    Source: https://arxiv.org/abs/2208.07339. On CPUs a training step multiplies in full width, as
    bitsandbytes does. In evaluation both are int8, and the input is rounded too.

    Attributes:
        skip, keep: patterns of layers that are left, see `fa.big.chosen_layers`.
        threshold: input columns with a larger magnitude are multiplied in full width. 0: none are.

    Raises:
        ArgumentError: a negative threshold.

    Example:
        >>> model = fa.big.quantize(GPT(), fa.big.Int8())
        >>> model.blocks[0].up.codes.dtype
        torch.int8
    """

    threshold: float = attrs.field(default=6.0, converter=_number)

    def __attrs_post_init__(self) -> None:
        require(
            0 <= self.threshold < float("inf"),
            f"threshold={self.threshold}",
            "fa.big.Int8",
            "0 or more. bitsandbytes' own is 6.0",
        )

    @property
    def bits(self) -> int:
        """The bits of a code."""
        return 8

    def make(self, layer: nn.Module) -> Any:
        """An empty layer of int8 codes."""
        return importable("bitsandbytes", "fnaccel.big.quantize.bitsandbytes_8bit").Int8Linear(layer, self)


@attrs.frozen(kw_only=True, str=False)
class _FourBits(Record):
    double: bool = False
    compute: torch.dtype | None = attrs.field(default=None, converter=_compute)
    block: int = 64

    def __attrs_post_init__(self) -> None:
        name = type(self).__name__
        require(
            self.block in BLOCKS,
            f"block={self.block}",
            f"fa.big.{name}",
            f"one of {', '.join(map(str, BLOCKS))}",
        )
        require(
            self.compute is None or (self.compute.is_floating_point and self.compute.itemsize in (2, 4)),
            f"compute={self.compute}",
            f"fa.big.{name}",
            'compute="bf16", "fp16" or "fp32"',
        )

    def obstacle(self, layer: LinearLayer) -> str | None:
        """Why a layer can't be quantized, or None.

        If a block goes over the end of a row, bitsandbytes 0.50 reads the scale of another block on CPUs with
        AVX-512, and the weight is wrong by a quarter. That hits its own layers, peft and transformers too.
        """
        inputs = layer.weight.shape[0] if is_conv1d(type(layer)) else layer.weight.shape[1]
        return f"its {inputs} inputs are no multiple of block={self.block}" if inputs % self.block else None

    @property
    def bits(self) -> int:
        """The bits of a code."""
        return 4

    def make(self, layer: nn.Module) -> Any:
        """An empty layer of 4-bit codes."""
        return importable("bitsandbytes", "fnaccel.big.quantize.bitsandbytes_4bit").FourBitLinear(layer, self)


@attrs.frozen(kw_only=True, str=False)
class Nf4(_FourBits):
    """4-bit NormalFloat codes of bitsandbytes: two in a byte, one scale for each block of weights.

    Source: https://arxiv.org/abs/2305.14314 (QLoRA).

    Attributes:
        skip, keep: patterns of layers that are left, see `fa.big.chosen_layers`.
        double: whether scales are quantized too, to 8 bits in blocks of 256.
        compute: the dtype of the product: `"bf16"`, `"fp16"`, `"fp32"`. By default that of the input.
        block: weights that share a scale: 32, 64, 128, 256, 512, 1024, 2048 or 4096. Layers whose inputs are
            no multiple of it are left.

    Raises:
        ArgumentError: a block or a dtype that bitsandbytes lacks.

    Example:
        >>> model = fa.big.quantize(GPT(), fa.big.Nf4(double=True, block=32))
        >>> up = model.blocks[0].up
        >>> up.codes.dtype, up.codes.numel() == up.in_features * up.out_features / 2
        (torch.uint8, True)
    """

    kind: Literal["nf4"] = attrs.field(default="nf4", init=False, repr=False)


@attrs.frozen(kw_only=True, str=False)
class Fp4(_FourBits):
    """4-bit floating-point codes of bitsandbytes: two in a byte, one scale for each block of weights.

    The attributes and errors are those of `Nf4`.

    Example:
        >>> model = fa.big.quantize(GPT(), fa.big.Fp4())
        >>> print(model.blocks[0].down.record)
        Fp4()
    """

    kind: Literal["fp4"] = attrs.field(default="fp4", init=False, repr=False)


@attrs.frozen(kw_only=True, str=False)
class _Integers(Record):
    group: int | None = None

    def __attrs_post_init__(self) -> None:
        require_counts(f"fa.big.{type(self).__name__}", group=self.group)

    def obstacle(self, layer: LinearLayer) -> str | None:
        """Why torchao can't quantize a layer, or None."""
        if not isinstance(layer, nn.Linear):
            return "torchao quantizes nn.Linear only"
        if self.group is not None and layer.in_features % self.group:
            return f"its {layer.in_features} inputs are no multiple of group={self.group}"
        return None

    def make(self, layer: nn.Module) -> Any:
        """A layer of integer codes."""
        importable("torchao", "torchao.quantization")
        return importable("torchao", "fnaccel.big.quantize.torchao").IntegerLinear(layer, self)


@attrs.frozen(kw_only=True, str=False)
class Int8Weights(_Integers):
    """Symmetric int8 weights of torchao (`Int8WeightOnlyConfig`): products are in the input's dtype.

    Source: https://github.com/pytorch/ao. Layers whose inputs are no multiple of `group` are left, and
    so are transformers' `Conv1D` layers.

    Attributes:
        skip, keep: patterns of layers that are left, see `fa.big.chosen_layers`.
        group: inputs that share a scale. None: all inputs of an output.

    Raises:
        ArgumentError: a group that is no positive integer.

    Example:
        >>> model = fa.big.quantize(GPT(), fa.big.Int8Weights())
        >>> model.blocks[0].up.codes.dtype
        torch.int8
    """

    @property
    def bits(self) -> int:
        """The bits of a code."""
        return 8


@attrs.frozen(kw_only=True, str=False)
class Int4Weights(_Integers):
    """Symmetric int4 weights of torchao (`IntxWeightOnlyConfig`): products are in the input's dtype.

    Two codes are in a byte here, and one in files, as torchao writes them. torchao's `Int4WeightOnlyConfig`
    needs kernels that exist for GPUs only: this form runs everywhere. The attributes and errors are those of
    `Int8Weights`.

    Example:
        >>> model = fa.big.quantize(GPT(), fa.big.Int4Weights(group=16))
        >>> model.blocks[0].up.codes.nbytes, model.blocks[0].up.out_features * model.blocks[0].up.in_features
        (1024, 2048)
    """

    group: int | None = 32

    @property
    def bits(self) -> int:
        """The bits of a code."""
        return 4


def importable(library: str, name: str) -> Any:
    """A module that needs a library.

    Raises:
        MissingBackendError: the library is not installed.
    """
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:  # bitsandbytes loads its library as it is imported
        raise MissingBackendError(
            f"{library} can't be imported: {error}",
            where="fa.big.quantize",
            fix=install_line("quantize"),
        ) from error


def _shown(value: object) -> str:
    return repr(str(value).removeprefix("torch.")) if isinstance(value, torch.dtype) else repr(value)

"""`quantization_config` of `config.json`: from a record to the keys of its library, and back."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from fnaccel.big.quantize.records import Fp4, Int4Weights, Int8, Int8Weights, Nf4, Record
from fnaccel.checkpoint.format.dtypes import NAMES, name_of
from fnaccel.errors import ArgumentError, CheckpointError
from fnaccel.world.plain_data import LONGEST, load_json

_OWN = "fnaccel"
"""A key of ours: transformers ignores it. It holds the fields for which the library has no key."""
_FOUR_BITS: dict[str, type[Nf4 | Fp4]] = {"nf4": Nf4, "fp4": Fp4}


def config_of(record: Record, skipped: Sequence[str], dtype: torch.dtype) -> dict[str, Any]:
    """The `quantization_config` of a record, as transformers reads it.

    Args:
        record: of the quantized layers.
        skipped: the paths of linear layers in full width.
        dtype: the dtype of the weights that were quantized: that of a product without `compute`.
    """
    if isinstance(record, Int8):
        extra: dict[str, Any] = {}
        keys: dict[str, Any] = {"load_in_8bit": True, "llm_int8_threshold": record.threshold}
    elif isinstance(record, Nf4 | Fp4):
        extra = {
            "block": record.block,
            "compute": None if record.compute is None else name_of(record.compute),
        }
        keys = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": record.kind,
            "bnb_4bit_use_double_quant": record.double,
            "bnb_4bit_compute_dtype": name_of(record.compute or dtype),
            "bnb_4bit_quant_storage": "uint8",
        }
    elif isinstance(record, Int8Weights | Int4Weights):
        return _of_integers(record, skipped)
    else:
        raise ArgumentError(
            f"{record} has no form in config.json",
            where="fa.big.save_quantized",
            fix="quantize with fa.big.Nf4(), Fp4(), Int8(), Int8Weights() or Int4Weights()",
        )
    return {"quant_method": "bitsandbytes", **keys, "llm_int8_skip_modules": list(skipped), _OWN: extra}


def quantization_of(source: str | os.PathLike[str] | Mapping[str, Any]) -> Record | None:
    """The record with which a checkpoint was quantized, from its `config.json`.

    Args:
        source: a directory with a `config.json`, or the content of that file. Written by
            `fa.big.save_quantized`, or by `save_pretrained` of transformers.

    Returns:
        The record. Its `skip` has the layers that the file names. None if nothing is quantized.

    Raises:
        CheckpointError: no such file, or a method of quantization that is unknown here.

    Example:
        >>> path = fa.big.save_quantized("small", fa.big.quantize(GPT(), fa.big.Nf4(block=32)))
        >>> print(fa.big.quantization_of(path))
        Nf4(skip=('lm_head', '*.lm_head'), block=32)
    """
    content = source if isinstance(source, Mapping) else _read(Path(source))
    section: Any = content.get("quantization_config")
    if section is None:
        return None
    if not isinstance(section, Mapping):
        raise CheckpointError(
            f"quantization_config is a {type(section).__name__}",
            where="config.json",
            fix="an object with a quant_method",
        )
    method = section.get("quant_method", "bitsandbytes")
    if method == "torchao":
        return _named(_of_torchao(section), section.get("modules_to_not_convert"))
    if method != "bitsandbytes":
        raise CheckpointError(
            f"the checkpoint was quantized by {method!r}, which fnaccel does not read",
            where="quantization_config in config.json",
            fix="load it with transformers, or quantize the full-width checkpoint: fa.big.Nf4()",
        )
    return _named(_of_bitsandbytes(section), section.get("llm_int8_skip_modules"))


def _named(record: Record, names: Sequence[str] | None) -> Record:
    """A record that leaves the layers which a file names."""
    if names is None:
        return record
    # transformers takes a name for a whole path or for its end
    patterns = tuple(pattern for name in names for pattern in (name, f"*.{name}"))
    return attrs.evolve(record, skip=patterns, optional=True)


def _of_bitsandbytes(section: Mapping[str, Any]) -> Record:
    extra: Mapping[str, Any] = section.get(_OWN) or {}
    if section.get("load_in_8bit") or section.get("_load_in_8bit"):
        return Int8(threshold=section.get("llm_int8_threshold", 6.0))
    kind = _FOUR_BITS.get(section.get("bnb_4bit_quant_type", "fp4"))
    storage = section.get("bnb_4bit_quant_storage") or "uint8"
    if kind is None or storage != "uint8":
        raise CheckpointError(
            f"codes of {section.get('bnb_4bit_quant_type')!r} stored as {storage} are unknown here",
            where="quantization_config in config.json",
            fix="quantize the full-width checkpoint: fa.big.Nf4()",
        )
    compute = extra.get("compute", section.get("bnb_4bit_compute_dtype"))
    return kind(
        double=bool(section.get("bnb_4bit_use_double_quant")),
        compute=None if compute is None else _dtype(compute),
        block=extra.get("block", 64),
    )


def _dtype(name: object) -> torch.dtype:
    short = str(name).removeprefix("torch.")
    if short not in NAMES:
        raise CheckpointError(
            f"bnb_4bit_compute_dtype is {name!r}",
            where="quantization_config in config.json",
            fix=f"one of {', '.join(NAMES)}",
        )
    return NAMES[short]


def _of_integers(record: Int8Weights | Int4Weights, skipped: Sequence[str]) -> dict[str, Any]:
    layers: Any = importlib.import_module("fnaccel.big.quantize.torchao")
    form: Any = importlib.import_module("torchao.core.config")
    return {
        "quant_method": "torchao",
        "quant_type": {"default": form.config_to_dict(layers.config_of(record))},
        "modules_to_not_convert": list(skipped),
        "include_input_output_embeddings": False,
        "untie_embedding_weights": False,
    }


def _of_torchao(section: Mapping[str, Any]) -> Record:
    default: Any = (section.get("quant_type") or {}).get("default") or {}
    data: Any = default.get("_data") or {}
    granularity: Any = data.get("granularity") or {}
    group = (granularity.get("_data") or {}).get("group_size")
    if default.get("_type") == "Int8WeightOnlyConfig" and granularity.get("_type") in ("PerRow", "PerGroup"):
        return Int8Weights(group=group)
    fields = {name: (data.get(name) or {}).get("_data") for name in ("weight_dtype", "mapping_type")}
    integers = fields == {"weight_dtype": "int4", "mapping_type": "SYMMETRIC"}
    if default.get("_type") == "IntxWeightOnlyConfig" and integers and data.get("scale_dtype") is None:
        return Int4Weights(group=group)
    raise CheckpointError(
        f"weights quantized by torchao's {default.get('_type')} with these options are not read here",
        where="quantization_config in config.json",
        fix="load it with transformers, or quantize the full-width checkpoint: fa.big.Int8Weights()",
    )


def _read(directory: Path) -> Mapping[str, Any]:
    path = directory / "config.json" if directory.is_dir() else directory
    try:
        return load_json(path.read_text(encoding="utf-8"), longest=64 * LONGEST)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} can't be read: {error}",
            where="fa.big.quantization_of",
            fix="give a directory with the config.json of a quantized checkpoint",
        ) from error

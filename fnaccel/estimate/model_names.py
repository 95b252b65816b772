"""Models by name, without values: folders and ids of transformers, names of timm, references to factories."""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import nn

from fnaccel.big import empty
from fnaccel.config.references import load
from fnaccel.errors import ArgumentError, ConfigError
from fnaccel.tree import Tree

TIMM = ("timm/", "timm:")


@attrs.frozen(kw_only=True)
class NamedModel:
    """A model by name.

    Attributes:
        name: as it was given.
        factory: makes it, without values for its parameters.
        config: of transformers, or None.
        loss_fn: a loss for it, or None if its kind is unknown.
        batch: `batch(rows, length)` is a batch for the loss, on the meta device. None if its kind is unknown.

    Example:
        >>> model = fa.estimate.find_model("torch.nn:Identity")
        >>> model.factory()
        Identity()
    """

    name: str
    factory: Callable[[], nn.Module]
    config: Any = None
    loss_fn: Callable[[Any, Any], Any] | None = None
    batch: Callable[[int, int | None], Tree] | None = None


def find_model(name: str, *, trust_remote_code: bool = False) -> NamedModel:
    """Find a model by name. Nothing but its configuration is read.

    Args:
        name: a folder or a configuration file of transformers, an id of the Hugging Face hub,
            `"timm/NAME"`, or a reference to a factory: `"module:name"` or `"file.py:name"`.
        trust_remote_code: whether code that a transformers model brings along may run.

    Raises:
        ConfigError: there is no such model, it brings code that is not trusted, or its library is not
            installed.

    Example:
        >>> fa.estimate.find_model("torch.nn:Identity").name
        'torch.nn:Identity'
    """
    if name.startswith(TIMM):
        return _of_timm(name)
    if ":" in name and not Path(name).exists():
        factory = load(name, "fnaccel estimate MODEL")
        if isinstance(factory, nn.Module):
            module: nn.Module = factory
            # a trace takes blocks away from its modules
            return NamedModel(name=name, factory=lambda: copy.deepcopy(module).to("meta"))
        return NamedModel(name=name, factory=functools.partial(_built, name, factory))
    return _of_transformers(name, trust_remote_code=trust_remote_code)


def _built(name: str, factory: Callable[[], object]) -> nn.Module:
    with empty():
        module = factory()
    if not isinstance(module, nn.Module):
        raise ArgumentError(
            f"{name} returned {type(module).__name__}, not a module",
            where="fnaccel estimate MODEL",
            fix="name a class or a function without arguments that returns a torch.nn.Module",
        )
    return module


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"the model is one of {name}, which is not installed",
            where="fnaccel estimate MODEL",
            fix=f"pip install {name}, or name a factory: module:name",
        ) from error


def _of_timm(name: str) -> NamedModel:
    timm, model = _library("timm"), name[len(TIMM[0]) :]
    if model not in timm.list_models(pretrained=False) and not timm.is_model(model):
        raise ConfigError(
            f"timm has no model {model!r}",
            where="fnaccel estimate MODEL",
            fix=f"one of: {', '.join(timm.list_models(f'*{model}*')[:5]) or 'timm.list_models()'}",
        )

    def factory() -> nn.Module:
        with empty():
            return timm.create_model(model, pretrained=False)

    channels, height, width = timm.data.resolve_data_config({}, model=factory())["input_size"]

    def batch(rows: int, length: int | None = None) -> Tree:  # noqa: ARG001 - images have no length
        pixels = torch.empty(rows, channels, height, width, device="meta")
        return pixels, torch.empty(rows, dtype=torch.long, device="meta")

    def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]).float(), batch[1])

    return NamedModel(name=name, factory=factory, loss_fn=loss_fn, batch=batch)


def _of_transformers(name: str, *, trust_remote_code: bool) -> NamedModel:
    transformers = _library("transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        kind = _class_of(transformers, config, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise _not_loaded(name, error) from error

    def factory() -> nn.Module:
        with empty():
            if kind is not None:
                return kind._from_config(config, dtype=torch.float32)  # noqa: SLF001 - what from_config calls
            has_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
            auto = transformers.AutoModelForCausalLM if has_code else transformers.AutoModel
            return auto.from_config(config, trust_remote_code=trust_remote_code, dtype=torch.float32)

    batch = _batch_for(config, kind)
    return NamedModel(
        name=name, factory=factory, config=config, loss_fn=None if batch is None else _own_loss, batch=batch
    )


def _class_of(transformers: Any, config: Any, *, trust_remote_code: bool) -> Any:
    """The class that the configuration names. None if an Auto class has to choose."""
    if trust_remote_code and getattr(config, "auto_map", None):
        return None
    names = getattr(config, "architectures", None) or ()
    first = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
    if first is not None:
        return first
    mapping = transformers.AutoModelForCausalLM._model_mapping  # noqa: SLF001 - which classes it has
    return mapping.get(type(config), None)


def _not_loaded(name: str, error: Exception) -> ConfigError:
    text = str(error)
    if "trust_remote_code" in text:
        return ConfigError(
            f"{name} brings code of its own, which would have to run",
            where="fnaccel estimate MODEL",
            fix="read that code, then add --trust-remote-code",
        )
    return ConfigError(
        f"transformers can't load the configuration of {name!r}: {text.splitlines()[0]}",
        where="fnaccel estimate MODEL",
        fix="a folder with config.json, a file of it, an id of the hub (with access to it), timm/NAME, or "
        "module:factory",
    )


def _own_loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Any:
    """The loss that a model of transformers computes from labels."""
    options = {"use_cache": False} if "input_ids" in batch else {}
    return model(**batch, **options).loss


def _batch_for(config: Any, kind: type[nn.Module] | None) -> Callable[[int, int | None], Tree] | None:
    """A function that makes batches without values. None if the kind of model is unknown."""
    name = "" if kind is None else kind.__name__
    inputs = getattr(kind, "main_input_name", "input_ids")
    text = config.get_text_config() if hasattr(config, "get_text_config") else config

    def tokens(rows: int, length: int | None) -> Tree:
        size = length or min(getattr(text, "max_position_embeddings", None) or 1_024, 2_048)
        ids = torch.empty(rows, size, dtype=torch.long, device="meta")
        labels = torch.empty(rows, dtype=torch.long, device="meta") if "Classification" in name else ids
        return {"input_ids": ids, "labels": labels}

    def pixels(rows: int, length: int | None) -> Tree:  # noqa: ARG001 - images have no length
        size = config.image_size
        height, width = size if isinstance(size, list | tuple) else (size, size)
        images = torch.empty(rows, config.num_channels, height, width, device="meta")
        return {"pixel_values": images, "labels": torch.empty(rows, dtype=torch.long, device="meta")}

    if inputs == "pixel_values" and "Classification" in name and hasattr(config, "image_size"):
        return pixels
    lm = "CausalLM" in name or "LMHead" in name or "MaskedLM" in name or "ConditionalGeneration" in name
    if inputs == "input_ids" and (kind is None or lm or "SequenceClassification" in name):
        return tokens
    return None

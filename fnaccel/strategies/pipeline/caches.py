"""Key-value caches of transformers on stages: each rank has a cache of its own, with keys of its own layers.

A cache is asked for the length of its first layer, or of its first layer of a kind, on any stage. So after a
call the layers of other stages get keys of one number a token. transformers is not imported here.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
from collections.abc import Generator
from typing import Any

import torch
from torch import nn

from fnaccel.extend import CapabilityError
from fnaccel.strategies.pipeline.passes import Known

_NAME = "past_key_values"
_WHERE = "a forward of a pipeline"
_FIX = (
    "past_key_values=transformers.DynamicCache(config=model.config); or use_cache=False: "
    "model.generate(ids, use_cache=False)"
)


class StageCache:
    """The cache of one call of a model, or none.

    Args:
        cache: a `DynamicCache`, or None.
    """

    def __init__(self, cache: Any = None) -> None:
        self.cache = cache
        self._before: list[Any] = [] if cache is None else list(cache.layers)
        self._written: dict[int, Any] = {}

    @contextlib.contextmanager
    def one_pass(self, known: Known) -> Generator[None]:
        """In the body layers are as before the call, and a stage writes to copies of them.

        Args:
            known: gets the rows and tokens by which the layers of a stage have grown.
        """
        if self.cache is None:
            yield
            return
        self.cache.layers = [copy.copy(layer) for layer in self._before]
        try:
            yield
        finally:  # at the end of a stage an exception ends the body
            for place, layer in enumerate(self.cache.layers):
                length = self._length_before(place)
                if layer.get_seq_length() > length:
                    self._written[place] = layer
                    known.cached = layer.keys.shape[0], layer.get_seq_length() - length
            self.cache.layers = list(self._before)

    def fill(self, cached: tuple[int, int] | None, device: torch.device) -> None:
        """Put the layers of this rank's stages in the cache, and make those of others as long.

        Args:
            cached: the rows and tokens of the call. None if no layer has grown.
            device: of the layers of others.
        """
        if self.cache is None or cached is None:
            return
        rows, tokens = cached
        nothing = torch.zeros(rows, 1, tokens, 1, device=device)
        for place in range(max([len(self._before), *(1 + place for place in self._written)])):
            if place in self._written:
                self.cache.layers[place : place + 1] = [self._written[place]]
            else:
                self.cache.update(nothing, nothing, place)

    def _length_before(self, place: int) -> int:
        return self._before[place].get_seq_length() if place < len(self._before) else 0


class CacheElsewhere:
    """Stands in an output for a cache that each stage made in its forward. What reads it raises.

    Attributes of the cache raise CapabilityError.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise CapabilityError(
            "each stage made a cache with the keys of its own layers",
            where=f"output.{_NAME}.{name}",
            fix=_FIX,
        )


def is_cache(value: object) -> bool:
    """Whether an object is a cache of transformers."""
    kinds: Any = sys.modules.get("transformers.cache_utils")
    return kinds is not None and isinstance(value, kinds.Cache)


def cache_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StageCache:
    """The cache of a call. A causal model that would make one in its forward gets one in `kwargs` here.

    Raises:
        CapabilityError: it is no `DynamicCache` of layers with full or sliding attention.
    """
    if kwargs.get(_NAME) is None and _makes_one(module, kwargs):
        kinds: Any = sys.modules["transformers.cache_utils"]
        kwargs[_NAME] = kinds.DynamicCache(config=module.config)
    caches = [value for value in (*args, *kwargs.values()) if is_cache(value)]
    given = kwargs.get(_NAME)
    if given is None and not caches:
        return StageCache()
    if len(caches) != 1 or caches[0] is not given or not _is_plain(given):
        kind = type(given if given is not None else caches[0]).__name__
        raise CapabilityError(
            f"a stage with other layers can't tell the length of a cache of class {kind}, or of its layers",
            where=_WHERE,
            fix=_FIX,
        )
    return StageCache(given)


def lasting(kwargs: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    """The arguments that decide the shapes of messages.

    With a cache the mask grows at each token, and only attentions grow with it.
    """
    config = getattr(module, "config", None)
    attentions = kwargs.get("output_attentions") or getattr(config, "output_attentions", False)
    if kwargs.get(_NAME) is None or attentions:
        return kwargs
    return {name: value for name, value in kwargs.items() if name != "attention_mask"}


def _makes_one(module: Any, kwargs: dict[str, Any]) -> bool:
    if "transformers.cache_utils" not in sys.modules or not hasattr(type(module), "can_generate"):
        return False
    config = module.config
    uses = kwargs.get("use_cache")
    uses = getattr(config, "use_cache", False) if uses is None else uses
    others = config.is_encoder_decoder or getattr(config, "add_cross_attention", False)
    takes = _NAME in inspect.signature(type(module).forward).parameters
    return bool(uses and takes and module.can_generate() and not others)


def _is_plain(cache: Any) -> bool:
    kinds: Any = sys.modules.get("transformers.cache_utils")
    if not is_cache(cache) or not isinstance(cache, kinds.DynamicCache) or cache.offloading:
        return False
    plain = (kinds.DynamicLayer, kinds.DynamicSlidingWindowLayer)
    return all(type(layer) in plain for layer in cache.layers)

"""One pass of a stage through the user's own forward, which runs on each stage from its beginning.

Blocks of earlier stages are passed over: the last of them returns what came from the stage before. The end of
the last block of this stage ends the pass. What a stage knows beside that travels along: other values that
blocks return, outputs that hooks listen to, and values that blocks store on modules.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import nn

from fnaccel import _torch
from fnaccel.extend import CapabilityError
from fnaccel.strategies.pipeline._torch import listeners_of
from fnaccel.strategies.pipeline.split import Element, Split
from fnaccel.strategies.pipeline.unknown import Unknown, check_known, unknown
from fnaccel.world.undo import StreamStates

_LOSS = "the loss function under fa.pipeline()"
_STORED = (torch.Tensor, int, float)
_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that every module has. What a forward stores is another one."""
Stored = tuple[str, str, type, torch.Tensor]
_Slot = tuple[tuple[str, str], dict[str, Any]]


class StageEnds(BaseException):
    """Ends the user's function where the stage of this rank ends. No `except Exception` takes it."""


@attrs.frozen
class Omitted:
    """The place of an activation that went on to the next block, and that no later stage gets."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@attrs.define
class Known:
    """What a stage knows of the chain so far: this is what it sends to the next one.

    Attributes:
        outputs: by element, what it returned.
        inputs: by element that hooks listen to itself, its first argument.
        heard: by element, the outputs of modules inside of it which hooks listen to: (path, output).
        stored: by element, values that it stored on modules: (path, attribute, kind, value).
        draws: by element, the states of the random streams at its end, if it or what is before it drew.
        cached: the rows and tokens by which a key-value cache grows in this call. None before a layer of it.
    """

    outputs: dict[str, Any] = attrs.field(factory=dict)
    inputs: dict[str, Any] = attrs.field(factory=dict)
    heard: dict[str, list[tuple[str, Any]]] = attrs.field(factory=dict)
    stored: dict[str, list[Stored]] = attrs.field(factory=dict)
    draws: dict[str, list[torch.Tensor]] = attrs.field(factory=dict)
    cached: tuple[int, int] | None = None


@attrs.define(eq=False)
class Pass:
    """The pass that is under way.

    Attributes:
        stage: whose.
        known: what came, and what this stage adds.
        streams: the states of the random streams at its beginning, and after each element. None if they are
            not seeded.
        passed: the elements that were passed over.
    """

    stage: int
    known: Known
    streams: StreamStates | None
    passed: set[str] = attrs.field(factory=set)


class StagedModel:
    """The user's model, with forwards that know which stage runs.

    Args:
        model: its modules have the values of this rank's stages.
        split: of the model.
        elsewhere: the module, attribute, name, shape and dtype of each parameter of another stage.
        buffers: the name, module, attribute and stage of each buffer that is saved and part of no element.
        draws: whether random streams are seeded for each micro-batch.
        device: of this rank.

    Attributes:
        hides: whether parameters of other stages are hidden at this moment.
        lends: whether they may be whole while they are not hidden.
        moved: the names of buffers that moved in a pass, and whether it was that of their stage.
    """

    def __init__(
        self,
        model: nn.Module,
        split: Split,
        elsewhere: Sequence[tuple[nn.Module, str, str, torch.Size, torch.dtype]],
        buffers: Sequence[tuple[str, nn.Module, str, int]],
        draws: bool,
        device: torch.device,
    ) -> None:
        self._model, self._split = model, split
        self._modules = list(model.modules())
        self._inside = {each.path: tuple(each.module.named_modules()) for each in split.elements}
        self._attributes: dict[str, tuple[int, list[_Slot]]] = {}
        self._hidden = [(_torch.parameters_of(module), attribute) for module, attribute, *_ in elsewhere]
        self._buffers = buffers
        self._draws = draws
        self._device = device
        self._now: Pass | None = None
        self.hides, self.lends = False, True
        self.moved: set[tuple[str, bool]] = set()
        self._stored: dict[str, dict[tuple[str, str], None]] = {}
        self._unknown_values = [self._unknown(name, shape, dtype) for *_, name, shape, dtype in elsewhere]
        for group in split.groups:
            module = group.module
            module.forward = functools.partial(self._enter_group, group, module.forward)
            module.register_forward_hook(functools.partial(self._leave, group))
        for element in split.elements:
            module = element.module
            module.forward = functools.partial(self._enter, element, module.forward)
            module.register_forward_pre_hook(functools.partial(self._arguments, element))
            module.register_forward_hook(functools.partial(self._leave, element))

    def modes(self) -> tuple[bool, ...]:
        """Whether each module is in training mode. What travels depends on it."""
        return tuple(module.training for module in self._modules)

    def streams(self) -> StreamStates:
        """The states of random streams at this moment. Of none if they are not seeded."""
        return StreamStates.of(self._device) if self._draws else StreamStates(())

    def draw_on(self, states: Sequence[torch.Tensor]) -> None:
        """Go on with random numbers from these states of the streams."""
        streams = self.streams()
        streams.states = [state.cpu() for state in states]
        streams.put_back()

    def around(self) -> Iterator[nn.Module]:
        """The modules that have all blocks in them: the model, and those between it and the blocks."""
        for path, module in self._model.named_modules():
            if all(each.path.startswith(f"{path}." if path else "") for each in self._split.elements):
                yield module

    @property
    def running(self) -> bool:
        """Whether a pass is under way."""
        return self._now is not None

    @contextlib.contextmanager
    def hiding(self) -> Generator[None]:
        """In the body parameters of other stages are NaN. They have no elements, whose sum would be 0."""
        if self.hides:
            yield
            return
        own: list[tuple[dict[str, Any], str, Any]] = []
        self.hides = True
        try:
            held: dict[str, Any]
            for (held, attribute), value in zip(self._hidden, self._unknown_values, strict=True):
                own.append((held, attribute, held[attribute]))
                held[attribute] = value
            yield
        finally:
            self.hides = False
            for held, attribute, value in own:
                held[attribute] = value

    @contextlib.contextmanager
    def one_pass(self, stage: int, known: Known) -> Generator[Pass]:
        """In the body functions of the model run as this stage."""
        watched: list[tuple[str, bool, dict[str, Any], str, Any, torch.Tensor, int]] = []
        with self.hiding():
            streams = StreamStates.of(self._device) if self._draws else None
            modes = [(module, module.training) for module in self._modules]
            self._now = Pass(stage, known, streams)
            try:
                for name, module, attribute, home in self._buffers:
                    held: dict[str, Any] = _torch.buffers_of(module)
                    own = held[attribute]
                    if own is not None:  # its own stage alone moves it
                        held[attribute] = now = own if home == stage else own.clone()
                        version = _torch.version_of(now)
                        watched.append((name, home == stage, held, attribute, own, now, version))
                yield self._now
            except StageEnds:  # the loss would do it after the forward: model.eval(), model(x), model.train()
                for module, training in modes:
                    if module.training != training:
                        module.training = training
                raise
            finally:
                for name, at_home, held, attribute, own, now, version in watched:
                    if held[attribute] is not now or _torch.version_of(now) != version:
                        self.moved.add((name, at_home))
                    if not at_home:
                        held[attribute] = own
                self._now = None

    def sends(self, done: Pass) -> Known:
        """What the next stage gets of a pass."""
        known = done.known
        carried = {*self._split.carried, self._split.last[done.stage].path, *known.inputs}
        outputs = {
            path: value if path in carried else _without_first(value) for path, value in known.outputs.items()
        }
        return attrs.evolve(known, outputs=outputs)

    def _enter(self, element: Element, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The forward of an element, on any stage."""
        now = self._now
        if now is None and self.lends and not self.hides:
            return run(*args, **kwargs)  # with whole parameters
        if now is None:
            raise CapabilityError(
                f"{element.path} was called outside of the model's forward, and lies on one stage of several",
                where="a function of the model under fa.pipeline()",
                fix="call model(...), whose output is on all ranks",
            )
        if element.stage < now.stage:
            return self._pass_over(element, now)
        if element.stage > now.stage:
            raise CapabilityError(
                f"{element.path} of stage {element.stage} runs before "
                f"{self._split.last[now.stage].path} of stage {now.stage}",
                where=_LOSS,
                fix="split the model in the order in which it runs: fa.pipeline(split={path: stage})",
            )
        check_known((args, kwargs))
        itself, *inside = self._inside[element.path]
        if args and any(True for _ in listeners_of([itself])):
            now.known.inputs[element.path] = args[0]
        heard: list[tuple[str, Any]] = []
        handles: list[Any] = []
        for path, module in listeners_of(inside):
            record = functools.partial(_record, heard, path)
            handles.append(module.register_forward_hook(record))
        before = self._values_stored(element)
        try:
            result = run(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        if heard:
            now.known.heard[element.path] = heard
        if stored := self._newly_stored(element, before):
            now.known.stored[element.path] = stored
        return result

    def _enter_group(self, group: Element, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The forward of a group: passed over if all of its members are on earlier stages."""
        now = self._now
        if now is None or group.stage >= now.stage:
            return run(*args, **kwargs)
        known = now.known
        for element in self._split.elements:
            if group.has(element.path) and element.path in {*known.inputs, *known.heard, *known.stored}:
                element.module(known.inputs.get(element.path))  # for its hooks
        self._draw_on(group, now)
        return known.outputs[group.path]

    def _arguments(self, element: Element, module: nn.Module, args: tuple[Any, ...]) -> Any:  # noqa: ARG002
        """The arguments of an element that is passed over, as far as its hooks see them."""
        now = self._now
        if now is None or element.stage >= now.stage or element.path not in now.known.inputs:
            return None
        return now.known.inputs[element.path], *args[1:]

    def _leave(self, element: Element, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002
        """Note what an element or a group returned, after all other hooks. The last one ends the pass."""
        now = self._now
        if now is None or element.stage != now.stage:
            return
        now.known.outputs[element.path] = output
        if now.streams is not None and now.streams.moved():
            now.streams = StreamStates.of(self._device)
            now.known.draws[element.path] = list(now.streams.states)
        if element is self._split.end(now.stage):
            raise StageEnds

    def _pass_over(self, element: Element, now: Pass) -> Any:
        """The output of an element of an earlier stage, as far as it travels."""
        path = element.path
        if path in now.passed:
            raise CapabilityError(
                f"{path} runs twice in one loss, and a stage gets its output once",
                where=_LOSS,
                fix="call the model once in the loss, with all rows of the micro-batch",
            )
        now.passed.add(path)
        known = now.known
        for inner, attribute, kind, value in known.stored.get(path, ()):
            stored = value if issubclass(kind, torch.Tensor) else kind(value.item())
            setattr(element.module.get_submodule(inner), attribute, stored)
        for inner, value in known.heard.get(path, ()):
            _call_again(element.module.get_submodule(inner), value)
        self._draw_on(element, now)
        return self._filled(path, known.outputs[path])

    def _draw_on(self, element: Element, now: Pass) -> None:
        """Go on with the random numbers where another stage ended an element, or the last one of a group."""
        if now.streams is None or not now.known.draws:
            return
        inside = [each.path for each in reversed(self._split.elements) if element.has(each.path)]
        drew = next((path for path in (element.path, *inside) if path in now.known.draws), None)
        if drew is not None:
            now.streams.states = [state.cpu() for state in now.known.draws[drew]]
            now.streams.put_back()

    def _filled(self, path: str, output: Any) -> Any:
        """An output with a tensor of NaN where the activation stood."""
        if isinstance(output, Omitted):
            return self._unknown(f"the output of {path}", output.shape, output.dtype, apart=True)
        if isinstance(output, tuple | list):
            filled = [self._filled(path, value) if isinstance(value, Omitted) else value for value in output]
            return filled if isinstance(output, list) else tuple(filled)
        if isinstance(output, dict):
            return {key: self._filled(path, v) if isinstance(v, Omitted) else v for key, v in output.items()}
        return output

    def _unknown(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, *, apart: bool = False
    ) -> torch.Tensor:
        """NaN in the place of values of another stage. A gradient that reaches it raises by name.

        Elements that lie `apart` can be written to. Else all of them are one in memory.
        """
        if dtype.is_floating_point or dtype.is_complex:
            value = torch.full((), float("nan"), dtype=dtype, device=self._device, requires_grad=True)
            value.register_hook(functools.partial(_refuse, name))
        else:
            value = torch.zeros((), dtype=dtype, device=self._device)
        value = value.expand(shape)
        return Unknown.of(value.clone() if apart else value, name)

    def _values_stored(self, element: Element) -> dict[tuple[str, str], Any]:
        """Tensors and numbers that modules have as plain attributes, by path and name."""
        count = sum(len(vars(module)) for _, module in self._inside[element.path])
        known, slots = self._attributes.get(element.path, (-1, []))
        if known == count:
            with contextlib.suppress(KeyError):  # one attribute in the place of another
                return {slot: value for slot, held in slots if isinstance(value := held[slot[1]], _STORED)}
        slots = [
            ((path, attribute), vars(module))
            for path, module in self._inside[element.path]
            for attribute in vars(module).keys() - _OF_MODULES
        ]
        self._attributes[element.path] = count, slots
        return {slot: value for slot, held in slots if isinstance(value := held[slot[1]], _STORED)}

    def _newly_stored(self, element: Element, before: dict[tuple[str, str], Any]) -> list[Stored]:
        """What forwards of an element store on modules, such as the auxiliary loss of a router.

        What one forward has stored, all later ones send, so that messages have one shape.
        """
        slots = self._stored.setdefault(element.path, {})
        now = self._values_stored(element)
        slots |= dict.fromkeys(slot for slot, value in now.items() if before.get(slot) is not value)
        values = [(*slot, vars(element.module.get_submodule(slot[0])).get(slot[1])) for slot in slots]
        return [(path, at, type(x), torch.as_tensor(x)) for path, at, x in values if x is not None]


def _record(heard: list[tuple[str, Any]], path: str, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001
    heard.append((path, output))


def _call_again(module: nn.Module, output: Any) -> None:
    """Let the hooks of a module see an output that another stage computed."""
    own = vars(module).get("forward")
    module.forward = lambda *_, **__: output
    try:
        module()
    finally:
        del module.forward
        if own is not None:
            module.forward = own


def _without_first(output: Any) -> Any:
    """An output with the shape of its first tensor in the place of that tensor."""
    if isinstance(output, torch.Tensor):
        return Omitted(tuple(output.shape), output.dtype)
    if type(output) not in (tuple, list, dict):
        return output
    pairs = list(output.items() if type(output) is dict else enumerate(output))
    first = next((key for key, x in pairs if isinstance(x, torch.Tensor | Omitted)), None)
    left = [(key, _without_first(x) if key == first else x) for key, x in pairs]
    return dict(left) if type(output) is dict else type(output)(x for _, x in left)


def _refuse(name: str, grad: torch.Tensor) -> None:  # noqa: ARG001 - a hook of autograd
    raise unknown(name)

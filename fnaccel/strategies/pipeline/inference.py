"""Inference on stages, without a train step: a call of the model runs in chunks of its rows."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import nn

from fnaccel import _torch, tree
from fnaccel.collectives import gather_objects
from fnaccel.extend import ArgumentError, CapabilityError, Mesh
from fnaccel.strategies.pipeline.building import Parts, on_stages, without_rows
from fnaccel.strategies.pipeline.caches import CacheElsewhere, is_cache
from fnaccel.strategies.pipeline.executor import Executor, Run
from fnaccel.strategies.pipeline.messages import signature
from fnaccel.strategies.pipeline.owned import AXIS
from fnaccel.strategies.pipeline.passes import StagedModel
from fnaccel.strategies.pipeline.record import Pipeline
from fnaccel.strategies.pipeline.split import join
from fnaccel.strategies.pipeline.unknown import check_known

_WHERE = "a model of fa.big.pipeline"
_Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def run_on_stages(model: nn.Module, axis: Pipeline, mesh: Mesh, chunks: int | None, outputs: str) -> None:
    """Leave the values of this rank's stage in a model, and let its forward run on all stages.

    Args:
        model: the whole model.
        axis: where it is split.
        mesh: the ranks.
        chunks: into how many parts the rows of a call are cut. None: as many as there are stages.
        outputs: `"all"` or `"last"`: the ranks that get outputs.
    """
    along, device = mesh[AXIS], mesh.world.device
    parts = Parts(axis.split_of(model, along.size))
    for path, module in model.named_modules():
        for attribute, param in _torch.parameters_of(module).items():
            name = join(path, attribute)
            if param is not None and param.dim() and parts.split.home(name) != along.rank:
                parts.elsewhere.append((module, attribute, name, param.shape, param.dtype))
                _torch.parameters_of(module)[attribute] = without_rows(param, "cpu")
    model.to(device)
    inner: Run = lambda fn, *args: fn(model, *args)  # noqa: E731
    staged, executor = on_stages(model, parts, inner, mesh, "gpipe", draws=True)
    staged.lends = False
    calls = _Calls(model.forward, staged, executor, mesh, chunks or along.size, outputs == "all")
    model.forward = functools.update_wrapper(_named("model(...)", calls.forward, mesh), model.forward)
    if callable(generate := getattr(model, "generate", None)):
        run = functools.partial(calls.generate, generate)
        model.__dict__["generate"] = _named("model.generate(...)", run, mesh)


def _named(name: str, fn: Run, mesh: Mesh) -> Run:
    """A call of all ranks, so that ranks that wait in it learn that another one has left it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            mesh.world.abandon(error)
            raise

    calls = mesh.world.calls
    return run if calls is None else calls.wrap(f"{name} of fa.big.pipeline", run)


def _no_backward(i: int, result: Any, stage: int) -> None:
    """There are no gradients."""


@attrs.define(eq=False)
class _Calls:
    """The calls of a model on stages.

    Attributes:
        run: the model's forward on the stage of this rank.
        staged, executor, mesh: what runs it.
        chunks: into how many parts rows are cut.
        everywhere: whether all ranks get outputs, or that of the last stage alone.
    """

    run: Run
    staged: StagedModel
    executor: Executor
    mesh: Mesh
    chunks: int
    everywhere: bool

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the model: chunk after chunk."""
        if self.staged.hides:  # inside of generate
            return self.run(*args, **kwargs)
        inputs = self._placed(args, kwargs)
        parts, sizes = _cut(inputs, self.chunks)
        along, results = self.mesh[AXIS], list[Any]()
        last = along.rank == along.size - 1
        if len(parts) == 1:
            output = self.executor.run(self._call, inputs)
            return output if last or self.everywhere else None

        def run_chunk(i: int, stage: int) -> tuple[None, bool]:  # noqa: ARG001 - as Drive has it
            output = self.executor.run(self._call, parts[i])
            check_known(output)
            results.append(output)
            return None, False

        with self.staged.hiding():
            self.executor.drive(len(parts), run_chunk, _no_backward, contextlib.nullcontext)
        output, problem = _joined(results, sizes) if last else (None, None)
        for found in filter(None, gather_objects(problem, over=along)):
            raise found
        shapes = "chunks", signature(inputs), self.staged.modes()
        shared = self.executor.links.share(
            output if self.everywhere else None, along.size - 1, shapes, own=last
        )
        return shared if self.everywhere else output

    @torch.no_grad()
    def generate(self, run: Run, *args: Any, **kwargs: Any) -> Any:
        """`model.generate` with all rows at once. All ranks run its loop, and return what it does."""
        inputs = self._placed(args, kwargs)
        return self.executor.run(lambda _: run(*inputs[0], **inputs[1]))

    def _call(self, model: nn.Module, inputs: _Inputs) -> Any:  # noqa: ARG002 - as the executor calls it
        return self.run(*inputs[0], **inputs[1])

    def _placed(self, *inputs: Any) -> Any:
        """The inputs of a call on this rank's device.

        Raises:
            ArgumentError: those of another rank have other shapes. Raised on all ranks.
        """
        texts = gather_objects(str(signature(inputs)), over=self.mesh[AXIS])
        for rank, text in enumerate(texts):
            if text != texts[0]:
                raise ArgumentError(
                    f"rank 0 of pp was called with {texts[0]}, and rank {rank} with {text}",
                    where=_WHERE,
                    fix="give all ranks of a pipeline the same rows",
                )
        return tree.map_tensors(lambda x: x.to(self.executor.links.device), inputs)


def _cut(inputs: _Inputs, chunks: int) -> tuple[list[_Inputs], list[int]]:
    """The inputs of each chunk, and its rows. Tensors with another number of rows go whole to all chunks."""
    tensors: list[torch.Tensor] = []
    values = [*inputs[0], *inputs[1].values()]
    tree.map_tensors(tensors.append, values)
    rows = next((len(x) for x in tensors if x.dim()), 0)
    if any(map(is_cache, values)):  # it has all rows
        chunks = 1
    sizes = [len(part) for part in torch.arange(rows).tensor_split(max(1, min(chunks, rows)))]

    def part(i: int) -> Any:
        return tree.map_tensors(lambda x: x.split(sizes)[i] if x.dim() and len(x) == rows else x, inputs)

    return [part(i) for i in range(len(sizes))], sizes


def _joined(results: Sequence[Any], sizes: Sequence[int]) -> tuple[Any, CapabilityError | None]:
    """The outputs of chunks as one, or an error for all ranks: an output has not the rows of its chunk."""

    def join(path: str, *leaves: Any) -> Any:
        if is_cache(leaves[0]):
            return CacheElsewhere()
        if isinstance(leaves[0], torch.Tensor):
            if all(x.dim() and len(x) == size for x, size in zip(leaves, sizes, strict=True)):
                return torch.cat(leaves)
        elif all(leaf == leaves[0] for leaf in leaves):
            return leaves[0]
        raise CapabilityError(
            f"the output {path!r} has not one row for each row of a chunk",
            where=_WHERE,
            fix="fa.big.pipeline(..., chunks=1); or leave the argument out that asks for it, such as labels",
        )

    tree.learn(results)
    try:
        return tree.map_with_path(join, *results), None
    except CapabilityError as error:
        return None, error

"""Every private or version-dependent torch name, with the versions each was checked on.

Nothing else lives here: code uses names that are public and the same in torch 2.9 to 2.13 directly.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# ruff: noqa: SLF001
from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.utils.stateless
import torch.overrides
import torch.utils._pytree

# from 2.13 on `all_gather_into_tensor` warns in favour of `all_gather_single`, which 2.9 to 2.11 lack
all_gather_single: Any = vars(dist).get("all_gather_single", vars(dist)["all_gather_into_tensor"])
# torch.ops-level fused updates: the public torch.optim classes call the same ones. (2.9 to 2.13)
fused_sgd_: Any = torch._fused_sgd_  # pyright: ignore[reportAttributeAccessIssue]
fused_adam_: Any = torch._fused_adam_  # pyright: ignore[reportAttributeAccessIssue]
fused_adamw_: Any = torch._fused_adamw_  # pyright: ignore[reportAttributeAccessIssue]

# the rule of torch.amp.GradScaler, an assertion on the device, a profiler's presence, calls at CUDA's start
assert_on_device: Any = torch._assert_async
amp_update_scale_: Any = torch._amp_update_scale_
profiler_is_on: Callable[[], bool] = torch.autograd._profiler_enabled
# whether a function of torch.func runs, None if not; and whether it differentiates or maps a tensor
transform_now: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack  # pyright: ignore[reportAttributeAccessIssue]
is_mapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor  # pyright: ignore[reportAttributeAccessIssue]
# trees as torch.func takes them, such as the outputs of transformers' models
flatten: Callable[[Any], tuple[list[Any], Any]] = torch.utils._pytree.tree_flatten
unflatten: Callable[[list[Any], Any], Any] = torch.utils._pytree.tree_unflatten
on_cuda_start: Callable[[Callable[[], None]], None] = torch.cuda._lazy_call


@contextlib.contextmanager
def recording_operators() -> Generator[list[str]]:
    """Record the names of operators that run in the body, compiled code's too. Filled at its end. (2.13)

    By torch's older profiler. The newer one corrupts the heap of a forked process now and then, which dies as
    the trace is freed (libkineto's ~MemoryTraceLogger).
    """
    autograd: Any = torch.autograd
    options: Any = vars(torch._C)["_profiler"]._ExperimentalConfig()
    config = autograd.ProfilerConfig(autograd.ProfilerState.CPU, *[False] * 5, options)
    names: list[str] = []
    autograd._enable_profiler_legacy(config)
    try:
        yield names
    finally:
        threads: Any = autograd._disable_profiler_legacy()
        names += [event.name() for events in threads for event in events if event.kind() == "push"]


# an operation that pairs elements by place in memory, so that inductor must keep their layout (2.13)
_STRIDES = "needs_exact_strides"
EXACT_STRIDES: tuple[Any, ...] = (getattr(torch.Tag, _STRIDES),) if hasattr(torch.Tag, _STRIDES) else ()

# stores, which torch's stubs leave out of torch.distributed (2.9 to 2.13)
TCPStore: Any = dist.TCPStore
PrefixStore: Any = dist.PrefixStore
HashStore: Any = dist.HashStore


def default_store() -> Any:
    """The store in which the ranks of the running process group met. (2.9, 2.13)"""
    return dist.distributed_c10d._get_default_store()


# list kernels that have no public name (2.9 to 2.13)
foreach_norm: Any = torch._foreach_norm
foreach_mul_: Any = torch._foreach_mul_
foreach_div: Any = torch._foreach_div
foreach_mul: Any = torch._foreach_mul
foreach_lerp: Any = torch._foreach_lerp
foreach_add: Any = torch._foreach_add
foreach_add_: Any = torch._foreach_add_
foreach_addcmul_: Any = torch._foreach_addcmul_
foreach_copy_: Any = torch._foreach_copy_
foreach_div_: Any = torch._foreach_div_
foreach_sign_: Any = torch._foreach_sign_
foreach_sqrt_: Any = torch._foreach_sqrt_
foreach_clamp_min_: Any = torch._foreach_clamp_min_
foreach_clamp_max_: Any = torch._foreach_clamp_max_


def wrapper_tensor(cls: type[Any], shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    """A tensor of a subclass that has no storage of its own. (2.9 to 2.13)"""
    return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType, reportUnknownMemberType]


def foreach_lerp_(xs: Any, ys: Any, weight: Any) -> None:
    """Move tensors towards others, by a number or a 0-d tensor. torch would read the tensor on the host."""
    if isinstance(weight, torch.Tensor):
        kinds = {(x.dtype, x.device) for x in xs}  # XLA takes weights of the tensor's own dtype only
        made = {(dtype, device): weight.to(device, dtype) for dtype, device in kinds}
        weight = [made[x.dtype, x.device] for x in xs]
    torch._foreach_lerp_(xs, ys, weight)


def local_of(value: torch.Tensor) -> torch.Tensor:
    """The local part of a DTensor without an autograd view. A plain tensor as it is. (2.9 to 2.13)

    Inside torchao's wrapper around a weight that is gathered as fp8, it is the weight. (torchao 0.18)
    """
    if type(value) is torch.Tensor:  # an attribute that is missing costs 0.3 us
        return value
    local = getattr(value, "_local_tensor", value)
    return getattr(local, "_tensor", local)


def dtensor_of(
    local: torch.Tensor, mesh: Any, placements: Sequence[Any], shape: torch.Size, stride: Sequence[int]
) -> Any:
    """A DTensor of this rank's part, which stays the tensor that it is. (2.9 to 2.13)

    `from_local` copies a part to the device of the mesh: of an offloaded part a state would show a copy.
    """
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - slow to import

    made = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=tuple(stride))
    if made._local_tensor.device == local.device:
        return made
    return DTensor(local, made._spec, requires_grad=False)


def laid_out_as(like: Any, local: torch.Tensor) -> Any:
    """A DTensor with the layout of `like`, of this rank's part. The part itself if `like` is no DTensor.

    It takes a tenth of the time of `from_local`, which autograd and torch.compile need. (2.9 to 2.13)
    """
    if type(like) is torch.Tensor or not hasattr(like, "placements"):  # what is missing costs 0.3 us
        return local
    if hasattr(like, "laid_out"):  # a tensor of one stage of a pipeline
        return like.laid_out(local)
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - slow to import

    kind, old = (local.dtype, local.device), like._local_tensor
    if kind == (old.dtype, old.device) and not (local.requires_grad or torch.compiler.is_compiling()):
        return DTensor(local, like._spec, requires_grad=False)
    return dtensor_of(local, like.device_mesh, like.placements, like.shape, like.stride())


def compile_counts() -> tuple[int, int, int]:
    """Of this process: graphs captured, hits and misses of the compile cache on disk. (2.11, 2.13)"""
    from torch._dynamo.utils import counters  # noqa: PLC0415 - slow to import

    counts = counters["inductor"]
    graphs = counters["stats"]["unique_graphs"]
    return int(graphs), int(counts["fxgraph_cache_hit"]), int(counts["fxgraph_cache_miss"])


def on_compilation(begin: Callable[[Any], None], end: Callable[[Any], None]) -> list[Any]:
    """Call `begin` and `end` around each compilation, until `torch.compiler.reset()`. (2.11, 2.13)

    Returns torch's list of functions that are called, which a reset empties.
    """
    handler = torch._dynamo.callback.callback_handler
    if begin not in handler.start_callbacks:
        handler.register_start_callback(begin)
        handler.register_end_callback(end)
    return handler.start_callbacks


def can_make_leaves() -> bool:
    """Whether torch.compile can capture `requires_grad_()` of what the graph made. (2.13; 2.11 can't)"""
    from torch._dynamo.symbolic_convert import SpeculationLog  # noqa: PLC0415 - slow to import

    return hasattr(SpeculationLog(), "graph_break_on_requires_grad_")


@functools.cache
def mend_foreach_fusion() -> None:
    """Keep inductor from a wrong fusion on GPUs, which takes one parameter of one element. (2.11 to 2.13)

    It fuses the kernel that makes a number, such as a factor of all gradients, into the part of a list kernel
    that works on a tensor of one element. The other parts read the number as well, before it is there.
    """
    from torch._inductor.scheduler import ForeachKernelSchedulerNode as Node  # noqa: PLC0415 - slow to import

    found: Any = Node.get_consumer_subnode_for

    def only_reader(self: Any, producer: Any) -> Any:
        made = {buffer.get_name() for buffer in producer.get_outputs()}
        readers = [part for part in self.snodes if made & {read.name for read in part.read_writes.reads}]
        return found(self, producer) if len(readers) == 1 else None

    Node.get_consumer_subnode_for = only_reader


# transformers adds the last two
_LOGGING = ("debug", "info", "warning", "error", "log", "warning_once", "info_once")


class _LoggingFunctions(set[Any]):
    """A set whose copy is empty: torch 2.11 sorts a copy for a log, and functions have no order."""

    def __deepcopy__(self, memo: Any) -> set[Any]:
        return set()


def compiling(limit: int) -> Any:
    """Context in which torch.compile takes `autograd.grad`, and compiles again `limit` times. (2.11, 2.13)"""
    from torch._dynamo import config  # noqa: PLC0415 - slow to import

    # a graph can't log. Models of libraries do, and it is no reason to fail
    new, old = "ignore_logging_functions", "ignore_logger_methods"
    name = new if hasattr(config, new) else old
    functions = getattr(config, name) | {vars(logging.Logger).get(key) for key in _LOGGING}
    traced = {"trace_autograd_ops": True} if hasattr(config, "trace_autograd_ops") else {}
    return config.patch({**traced, "recompile_limit": limit + 2, name: _LoggingFunctions(functions - {None})})


def compile_errors() -> tuple[type[Exception], ...]:
    """The errors of torch.compile if it can't compile. (2.11, 2.13)"""
    from torch._dynamo import exc  # noqa: PLC0415 - slow to import

    return (exc.TorchDynamoException, exc.FailOnRecompileLimitHit)


def graph_pass(change: Callable[[Any], None], files: tuple[str, ...], key: str = "") -> Any:
    """A change of a graph as inductor takes it. The texts of `files`, and `key`, key its cache. (2.13)"""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files  # noqa: PLC0415

    class Pass(CustomGraphPass):
        def __call__(self, graph: object) -> None:
            change(graph)

        def uuid(self) -> Any:
            return get_hash_for_files(files, key)

    return Pass()


def mode_options(mode: str | None) -> dict[str, Any]:
    """The inductor options of a mode of torch.compile. (2.11, 2.13)"""
    from torch._inductor import list_mode_options  # noqa: PLC0415 - slow to import

    return dict(list_mode_options(mode)) if mode else {}


def mark_dynamic(value: torch.Tensor, dim: int) -> None:
    """Tell torch.compile that a dimension varies. (2.11, 2.13)"""
    from torch._dynamo import maybe_mark_dynamic  # noqa: PLC0415 - slow to import

    maybe_mark_dynamic(value, dim)


def mark_static(values: Sequence[Any]) -> None:
    """Tell CUDA graphs that these tensors keep their memory. (2.11, 2.13)"""
    for value in values:  # as `torch._dynamo.mark_static_address` does, which is slow to import
        value._dynamo_static_input_type = "unguarded"


def end_trace(reason: str) -> None:
    """In a graph that has to be whole, raise an error that names this reason. (2.11, 2.13)"""
    from torch._dynamo import graph_break  # noqa: PLC0415 - slow to import

    graph_break(msg=reason)


def begin_all_reduce(value: torch.Tensor, group: dist.ProcessGroup, by: str = "sum") -> torch.Tensor:
    """Start to reduce a tensor over ranks, in a graph. `end_collective` gives the result. (2.11, 2.13)"""
    return torch.ops._c10d_functional.all_reduce(value, by, group.group_name)


def end_collective(value: torch.Tensor) -> torch.Tensor:
    """Wait for a collective of a graph. (2.11, 2.13)"""
    return torch.ops._c10d_functional.wait_tensor(value)


def all_gather_in_graph(value: torch.Tensor, size: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The concatenated `[n]` tensors of all ranks. The tensor itself on a single rank. (2.11, 2.13)"""
    if group is None:
        return value.clone()
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(value, size, group.group_name)
    return torch.ops._c10d_functional.wait_tensor(gathered)


def begin_reduce_scatter(value: torch.Tensor, size: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Start to sum the ranks' tensors of shape `[size * n]`, each rank its part. (2.11, 2.13)"""
    if group is None:
        return value
    return torch.ops._c10d_functional.reduce_scatter_tensor(value, "sum", size, group.group_name)


def all_to_all_in_graph(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Part i of dim 0 goes to rank i, and part i of the result is from rank i. (2.13)"""
    sizes = [1] * len(parts)
    return end_collective(torch.ops._c10d_functional.all_to_all_single(parts, sizes, sizes, group.group_name))


def replace_parameters(root: torch.nn.Module, make: Callable[[Any], Any]) -> None:
    """Replace each parameter by another. A tied parameter stays tied. (2.9 to 2.13)"""
    replacements: dict[int, Any] = {}
    for module in root.modules():
        for name, param in module._parameters.items():
            if param is not None:
                module._parameters[name] = replacements.setdefault(id(param), make(param))


def without_draws() -> contextlib.AbstractContextManager[Any]:
    """In the body the innermost TorchFunctionMode is out, if it says that only draws need it. (2.9 to 2.13)

    It would take part in each operation, and in each attribute that is read.
    """
    if torch.compiler.is_compiling():
        return contextlib.nullcontext()
    inner = getattr(torch.overrides._get_current_function_mode(), "only_draws", False)
    return torch.overrides._pop_mode_temporarily() if inner else contextlib.nullcontext()


def with_tensors(
    model: torch.nn.Module, values: dict[str, torch.Tensor], fn: Callable[..., Any], *args: Any
) -> Any:
    """`fn(model, *args)` with tensors in the place of parameters and buffers, tied ones under one name.

    `torch.func.functional_call` does so for `model(*args)`, and takes no other function. (2.9 to 2.13)
    """
    with torch.nn.utils.stateless._reparametrize_module(model, values, tie_weights=True):
        return fn(model, *args)


def summed_over(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """A tensor summed over ranks, in a graph or outside of one. (2.11, 2.13)"""
    if torch.compiler.is_compiling():
        return end_collective(begin_all_reduce(value, group))
    dist.all_reduce(value, group=group)
    return value


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """The slots of a module's own buffers. nn.Module has no public way to read one. (2.9 to 2.13)"""
    return module._buffers


def parameters_of(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """The slots of a module's own parameters. Writing to one registers nothing. (2.9 to 2.13)"""
    return module._parameters


def transient_buffers(roots: Mapping[str | None, torch.nn.Module]) -> list[str]:
    """The names of buffers that modules do not save (`persistent=False`), behind the model's key. (2.13)"""
    return [
        ("" if key is None else f"{key}/") + (f"{prefix}.{name}" if prefix else name)
        for key, root in roots.items()
        for prefix, module in root.named_modules()
        for name in sorted(module._non_persistent_buffers_set)
    ]


no_torch_function = torch._C._disabled_torch_function_impl
"""As `__torch_function__` of a subclass: operations return plain tensors. (2.9 to 2.13)"""


def packed_shard(dim: int, matrices: int) -> Any:
    """The placement that cuts each of several matrices packed in one dimension. (2.13)"""
    from torch.distributed.tensor.placement_types import _StridedShard  # noqa: PLC0415 - slow to import

    return _StridedShard(dim, split_factor=matrices)


def version_of(tensor: torch.Tensor) -> int:
    """A number that changes with each write to a tensor. (2.9 to 2.13)"""
    return tensor._version


def buffer_sync(sync: bool) -> dict[str, Any]:
    """DistributedDataParallel's argument for buffers: renamed in 2.13, the old name warns. (2.11, 2.13)"""
    names = inspect.signature(torch.nn.parallel.DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": sync}


def leave_to_others(module: torch.nn.Module, names: list[str]) -> None:
    """Let DistributedDataParallel neither send nor average these parameters. (2.9 to 2.13)"""
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)


class DataParallel(torch.nn.parallel.DistributedDataParallel):
    """DistributedDataParallel whose buckets are laid out once, last parameter first, if `fixed`. (2.13)

    torch rebuilds them after a process's first backward, in the order in which gradients came. Then
    sums over three ranks or more round differently, and a run that goes on in a new process is not the
    run that went on: fixed, both begin with the layout that they end with. With `find_unused_parameters`
    torch never changes it.
    """

    def __init__(self, *args: Any, fixed: bool, **options: Any) -> None:
        self._fixed = fixed
        super().__init__(*args, **options)
        self._fix_buckets()

    def _fix_buckets(self) -> None:
        if self._fixed and not self.find_unused_parameters:
            self.reducer._push_all_rebuilt_params()
            self.reducer._rebuild_buckets()

    def begin_anew(self) -> None:
        """Forget a forward without a backward, whose hooks would fire in the next. All ranks call it."""
        self.reducer._reset_state()
        self._fix_buckets()

    def check_reduced(self) -> None:
        """Raise RuntimeError if the last backward has not averaged all buckets. (2.9 to 2.13)

        torch checks it before it would lay out buckets anew, which it does once only.
        """
        self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> tuple[list[Any], list[bool]]:
        parameters, sparse = super()._build_params_for_reducer()
        if self.find_unused_parameters or not self._fixed:
            return parameters, sparse
        return parameters[::-1], sparse[::-1]


_ended: weakref.WeakSet[Any] = weakref.WeakSet()
_inherited: list[Any] = []


def end_groups() -> None:
    """Destroy all process groups, and let DTensor forget the meshes that lie on them. (2.9 to 2.13)"""
    _ended.update(dist.distributed_c10d._world.pg_map)
    dist.destroy_process_group()
    forget_meshes()


def keep_inherited() -> None:
    """In a fork: hold the parent's groups that ended. Their destructor would wait for threads not forked."""
    _inherited.extend(_ended)


def forget_meshes() -> None:
    """Clear DTensor's caches of meshes: the next world's mesh equals one without groups. (2.13)"""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import debug  # noqa: PLC0415 - slow to import

    if hasattr(debug, "_clear_sharding_prop_cache"):
        debug._clear_sharding_prop_cache()
    redistribute = sys.modules.get("torch.distributed.tensor._redistribute")
    for name in ("clear_redistribute_planner_cache", "_gen_transform_infos"):
        cache: Any = getattr(redistribute, name, None)
        forget: Callable[[], None] | None = getattr(cache, "cache_clear", cache)
        if forget is not None:
            forget()


def local_offset(value: Any) -> tuple[int, ...]:
    """The offset of a DTensor's local part in each dimension, also if uneven or empty. (2.13)"""
    from torch.distributed.tensor import _utils  # noqa: PLC0415 - slow to import

    if hasattr(value, "local_offset"):
        return value.local_offset()
    layout = (value.shape, value.device_mesh, value.placements)
    _, offset = _utils.compute_local_shape_and_global_offset(*layout)
    return tuple(int(start) for start in offset)


def extension_directory(name: str) -> str:
    """The folder where `torch.utils.cpp_extension.load` builds an extension. It is made. (2.9 to 2.13)"""
    from torch.utils import cpp_extension  # noqa: PLC0415 - slow to import

    return cpp_extension._get_build_directory(name, False)


def register_mapping(kind: type[dict[str, Any]]) -> None:
    """Let torch.func and FSDP2 walk a subclass of dict. (2.9 to 2.13)"""
    register_node(
        kind,
        lambda node: (list(node.values()), list(node.keys())),
        lambda values, keys: kind(zip(keys, values, strict=True)),
    )


def register_node(
    kind: type[Any], flatten: Callable[[Any], tuple[Any, Any]], unflatten: Callable[[Any, Any], Any]
) -> None:
    """Let torch.func and torch.compile walk the instances of a class. (2.9 to 2.13)"""
    name = f"{kind.__module__}.{kind.__qualname__}"
    torch.utils._pytree.register_pytree_node(kind, flatten, unflatten, serialized_type_name=name)


def outside_of_func() -> Any:
    """A context in which no function of torch.func is open: modules can't be built inside of one. (2.13)"""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack  # noqa: PLC0415 - slow to import

    return temporarily_clear_interpreter_stack()

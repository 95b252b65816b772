"""The private names of FSDP2 and of DDP's hooks, with the versions each was checked on."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# ruff: noqa: SLF001
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch


def drop_unsharded_gradients(unit: Any) -> None:
    """Drop the unreduced gradients of an FSDP2 module, which has no public way. (2.13)"""
    group = unit._get_fsdp_state()._fsdp_param_group
    for param in group.fsdp_params if group is not None else ():
        param.unsharded_accumulated_grad = None
        if hasattr(param, "_unsharded_param"):
            param._unsharded_param.grad = None


def reset_shards(root: Any) -> None:
    """Let FSDP2 forget a pass that failed: it would go on with gathered values. (2.9 to 2.13)"""
    state = root._get_fsdp_state()
    if state._is_root is None:  # no forward yet
        return
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    idle = type(state._training_state).IDLE
    state._comm_ctx.post_forward_order.clear()
    for unit in state._state_ctx.all_states:
        unit._training_state = idle
        if (group := unit._fsdp_param_group) is not None:
            group._training_state = idle
            group._post_forward_indices.clear()
            group._to_sharded()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


def finish_shards(root: torch.nn.Module) -> None:
    """Let FSDP2 put its padded shards in place now, not in the first forward. (2.9, 2.13)

    Up to 2.9 the first forward replaces every shard that is not full by another tensor: an optimizer that
    took the old one before would update a tensor that nobody reads.
    """
    for module in root.modules():
        find = getattr(module, "_get_fsdp_state", None)
        group = None if find is None else find()._fsdp_param_group
        if group is not None and group.is_sharded:
            for param in group.fsdp_params:
                param.reset_sharded_param()
            group._reset_sharded_params = True


_WHOLE = "_fnaccel_whole"


def mark_whole(param: torch.nn.Parameter) -> torch.nn.Parameter:
    """Let `guard_shards` take a parameter for one that the library itself put in the place of a shard."""
    setattr(param, _WHOLE, True)
    return param


def guard_shards(unit: Any, refuse: Callable[[str], None]) -> None:
    """Call `refuse(name)` before FSDP2 would put its tensors in the place of those of the user. (2.9 to 2.13)

    FSDP2's own hook does so without a word, and `functional_call` would be ignored. A check of identities
    takes 0.5 us for a unit of 12 parameters. It runs before that hook, and before methods that gather.
    """
    state = unit._get_fsdp_state()
    infos = [(p, p._module_info) for group in shard_groups_of(state) for p in group.fsdp_params]
    slots = [(info.module._parameters, info.param_name, p) for p, info in infos]
    slots += [
        (module._parameters, name, p)
        for p, info in infos
        for module, name in zip(info.shared_modules, info.shared_param_names, strict=True)
    ]
    # the hook of the unit is registered already: this attribute is called by methods only
    state._pre_forward = _ShardGuard(slots, refuse, state._pre_forward)
    unit.register_forward_pre_hook(_ShardGuard(slots, refuse), prepend=True)


class _ShardGuard:
    """A hook before the forward of a unit, or before `then`: its slots have to hold what FSDP2 put there."""

    def __init__(self, slots: list[Any], refuse: Callable[[str], None], then: Any = None) -> None:
        self._slots, self._refuse, self._then = slots, refuse, then

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for slot, name, param in self._slots:
            value = slot[name]
            if value is not param.sharded_param and value is not getattr(param, "_unsharded_param", None):
                split = getattr(param, "_sharded_post_forward_param", None)  # of reshard_after_forward=2
                if value is not split and not hasattr(value, _WHOLE):
                    self._refuse(name)
        return None if self._then is None else self._then(*args, **kwargs)


@contextlib.contextmanager
def without_gathering(root: torch.nn.Module) -> Generator[None]:
    """In the body no unit of FSDP2 gathers or reduces: its two hooks are out. A user's stay. (2.9 to 2.13)"""
    hooks: list[tuple[dict[int, Any], dict[int, Any]]] = []
    methods: list[tuple[dict[str, Any], dict[str, Any]]] = []
    try:
        for module in root.modules():
            if not hasattr(module, "_get_fsdp_state"):
                continue
            state: Any = module._get_fsdp_state()  # pyright: ignore[reportCallIssue]
            out = {state._pre_forward_hook_handle.id, state._post_forward_hook_handle.id}
            for slots in (module._forward_pre_hooks, module._forward_hooks):
                hooks.append((slots, dict(slots)))
                for number, hook in hooks[-1][1].items():
                    if number in out or isinstance(hook, _ShardGuard):
                        del slots[number]
            attributes = vars(state)  # what methods that gather call
            methods.append((attributes, {n: attributes[n] for n in _HOOKS if n in attributes}))
            attributes["_pre_forward"] = lambda _module, args, kwargs: (args, kwargs)
            attributes["_post_forward"] = lambda _module, _args, output: output
        yield
    finally:
        for slots, before in hooks:
            slots.clear()
            slots.update(before)
        for attributes, before in methods:
            for name in _HOOKS:
                attributes.pop(name, None)
            attributes.update(before)


_HOOKS = ("_pre_forward", "_post_forward")


Talks = Callable[[str, Sequence[str]], None]


def before_shards_talk(unit: Any, call: Talks) -> Callable[[], None]:
    """Call `call(what, lacking)` before FSDP2 "gathers" or "reduces" for a unit. (2.9 to 2.13)

    `lacking` are the parameters that have no gradient to reduce.

    Returns:
        A function that ends it for what is reduced.
    """
    groups = shard_groups_of(unit._get_fsdp_state())
    for group in groups:
        group.unshard = functools.partial(_gather, group, group.unshard, call)
        group.post_backward = functools.partial(_reduce, group, group.post_backward, call)

    def end() -> None:
        for group in groups:
            vars(group).pop("post_backward", None)

    return end


def _gather(group: Any, unshard: Callable[..., None], call: Talks, *args: Any) -> None:
    skips = not getattr(group, "unshard_in_backward", True) and "BACKWARD" in str(group._training_state)
    if group._all_gather_result is None and not group.is_unsharded and not skips:
        call("gathers", ())
    unshard(*args)


def _reduce(group: Any, post_backward: Callable[..., None], call: Talks, *args: Any) -> None:
    if group.reduce_grads:
        lacking = [str(p._param_fqn) for p in group.fsdp_params if not _has_gradient(p)]
        if len(lacking) < len(group.fsdp_params):
            call("reduces", lacking)
    post_backward(*args)


def _has_gradient(param: Any) -> bool:
    whole = getattr(param, "_unsharded_param", None)
    return whole is not None and (param.unsharded_accumulated_grad is not None or whole.grad is not None)


def shard_groups_of(state: Any) -> list[Any]:
    """The groups of parameters that an FSDP2 module gathers. (2.9 to 2.13)"""
    groups = getattr(state, "_fsdp_param_groups", None)  # one until 2.12
    group = getattr(state, "_fsdp_param_group", None)
    return list(groups) if groups is not None else [group] if group is not None else []


def mend_batched_powersgd() -> None:
    """Let torch's batched PowerSGD run: it hands one matrix to a function that takes a batch. (2.13)

    Once per process. A function that takes matrices already is left alone.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook  # noqa: PLC0415 - slow to import

    batched: Any = powerSGD_hook._orthogonalize
    if getattr(batched, "takes_matrices", False):
        return

    def orthogonalize(matrices: torch.Tensor, epsilon: float = 0) -> None:
        # in place, so a view of one matrix as a batch of one is enough
        batched(matrices.unsqueeze(0) if matrices.dim() == 2 else matrices, epsilon)

    orthogonalize.takes_matrices = True  # pyright: ignore[reportFunctionMemberAccess]
    powerSGD_hook._orthogonalize = orthogonalize  # pyright: ignore[reportPrivateUsage]

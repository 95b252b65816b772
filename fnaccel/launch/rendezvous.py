"""`CheckedBackend`: torch's rendezvous backend, with a check of the bytes that the store holds.

torch keeps the state of a rendezvous as a pickle in the store, and unpickles what it finds there. A store has
no password, so any process that reaches its port could run code in a launcher. The bytes are checked before
torch gets them: they may build the state of a rendezvous, and nothing else.
"""

from __future__ import annotations

import datetime
import io
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

T = TypeVar("T")
_TORCH = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
_STATE_CLASS, _NODE_CLASS = f"{_TORCH}._RendezvousState", f"{_TORCH}._NodeDesc"  # torch 2.9 to 2.13
_ALLOWED = {
    *(_STATE_CLASS, _NODE_CLASS, "datetime.datetime", "datetime.timedelta", "datetime.timezone"),
    "builtins.set",
}
"""The classes of a state, as its pickle names them."""
_STATE = {
    "round": int,
    "complete": bool,
    "deadline": (datetime.datetime, type(None)),
    "closed": bool,
    "participants": dict,
    "wait_list": set,
    "redundancy_list": set,
    "last_heartbeats": dict,
}
"""The fields of the state, and their types."""


class CheckedBackend(C10dRendezvousBackend):
    """As torch's backend. Calls `refuse` with the bytes if they are not the state of a rendezvous.

    Args:
        store, name: as of torch's backend.
        refuse: returns the error to raise.
    """

    def __init__(self, store: Any, name: str, refuse: Callable[[bytes], Exception]) -> None:
        super().__init__(store, name)
        self._refuse = refuse

    def get_state(self) -> tuple[bytes, Any] | None:
        """As torch's method, for bytes that torch may unpickle."""
        try:
            return self._checked(super().get_state())
        except RendezvousStateError as error:
            raise self._refuse(b"no base64") from error

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """As torch's method, for bytes that torch may unpickle."""
        try:
            return self._checked(super().set_state(state, token))
        except RendezvousStateError as error:
            raise self._refuse(b"no base64") from error

    def _checked(self, answer: T) -> T:
        """An answer of torch's backend. Its first value is the bytes."""
        if isinstance(answer, tuple) and not is_state(answer[0]):
            raise self._refuse(answer[0])
        return answer


def is_state(data: bytes) -> bool:
    """Whether these bytes are a pickle of a rendezvous state. Nothing but such a state is built for it.

    Example:
        >>> import pickle
        >>> from fnaccel.launch.rendezvous import is_state
        >>> is_state(pickle.dumps(print))
        False
    """
    try:
        state = _Reader(io.BytesIO(data)).load()
    except Exception:  # a damaged pickle may raise anything
        return False
    if _name(state) != _STATE_CLASS or vars(state).keys() != _STATE.keys():
        return False
    if not all(isinstance(value, _STATE[name]) for name, value in vars(state).items()):
        return False
    nodes = [*state.participants, *state.last_heartbeats, *state.wait_list, *state.redundancy_list]
    times = state.last_heartbeats.values()
    return (
        all(_name(node) == _NODE_CLASS for node in nodes)
        and all(isinstance(rank, int) for rank in state.participants.values())
        and all(isinstance(when, datetime.datetime) for when in times)
    )


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # protocol 4 looks a dotted name up attribute by attribute: the module and the name are compared whole
        if "." in name or f"{module}.{name}" not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


def _name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"

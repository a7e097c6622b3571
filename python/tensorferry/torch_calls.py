"""Calls of ``torch.distributed.rpc`` on TensorFerry's backend, by fewer layers than torch's own.

``rpc_sync`` of a Python function, and of a method of an RRef, hand the pickle to the agent and wait there, without
torch's futures. The messages and the pickles are torch's. All other calls take torch's way: ``remote``, TorchScript and
builtin operators, ``async_execution``, profiled calls, contexts of distributed autograd, agents with GPUs, and picklers
of the program's own.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch.distributed.rpc import api as _api
from torch.distributed.rpc import internal as _internal
from torch.distributed.rpc import rref_proxy as _rref_proxy
from torch.distributed.rpc.constants import UNSET_RPC_TIMEOUT

from . import _torch_rpc  # type: ignore[attr-defined]  # a compiled module without types

# torch tells no types of the functions that it keeps to itself.
api: Any = _api
internal: Any = _internal
rref_proxy: Any = _rref_proxy
jit_builtins: Any = torch.jit._builtins

_pickler = internal._internal_rpc_pickler
_torch_invoke = api._invoke_rpc
_torch_invoke_on_reference = rref_proxy._invoke_rpc
_RETURNS = (internal.RPCExecMode.SYNC, internal.RPCExecMode.ASYNC)
_CODE_MISSING = (
    " Default RPC pickler does not serialize function code. Ensure that UDFs are defined on both caller and callee "
    "modules."
)

_agent: Any = None  # whose calls take the short way; None: torch's way is taken
_workers: dict[Any, Any] = {}  # of a static group, by name and by rank


def use(agent: Any) -> None:
    """Lets the calls of ``agent``, torch's current one, take the short way; None: no calls take it."""
    global _agent
    _workers.clear()
    _agent = agent


# ---- pickles


def _reducers() -> dict[type, Any]:
    """By type, as torch's pickler uses them."""
    return {
        **_pickler._dispatch_table,
        rpc.PyRRef: _pickler._py_rref_reducer,
        rpc.RRef: _pickler._rref_reducer,
        internal.PythonUDF: lambda call: (internal.PythonUDF, tuple(call)),
        **_pickler._class_reducer_dict,
    }


_table: dict[type, Any] = {}
_table_reducers = 0  # how many of the program's own reducers the table has


def serialize(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    """As torch's ``internal.serialize``, with a table of reducers that is made once."""
    global _table, _table_reducers
    if isinstance(value, torch.jit.ScriptModule):
        return internal.serialize(value)  # type: ignore[no-any-return]
    if not _table or len(_pickler._class_reducer_dict) != _table_reducers:
        _table, _table_reducers = _reducers(), len(_pickler._class_reducer_dict)
    tables = internal._thread_local_tensor_tables
    outer = getattr(tables, "send_tables", None)
    tensors: list[torch.Tensor] = []
    tables.send_tables = tensors
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream)
    pickler.dispatch_table = _table
    try:
        pickler.dump(value)
    finally:
        if outer is None:
            del tables.send_tables
        else:
            tables.send_tables = outer
    return stream.getvalue(), tensors


def load(pickled: bytes, tensors: list[torch.Tensor]) -> Any:
    """As torch's ``internal.deserialize``: an AttributeError is returned, and ``run`` raises it."""
    tables = internal._thread_local_tensor_tables
    outer = getattr(tables, "recv_tables", None)
    tables.recv_tables = tensors
    try:
        return pickle.loads(pickled)
    except AttributeError as error:
        missing = AttributeError(f"{error}{_CODE_MISSING}")
        missing.__cause__ = error
        return missing
    finally:
        if outer is None:
            del tables.recv_tables
        else:
            tables.recv_tables = outer


def run(call: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Runs the call of a peer, and pickles its result, or its error as torch does."""
    return serialize(internal._run_function(call))


# ---- calls


class _Answered:
    """The place of torch's future in ``rpc_sync``: the answer has come."""

    __slots__ = ("answer",)

    def __init__(self, answer: tuple[bytes, list[torch.Tensor]]) -> None:
        self.answer = answer

    def wait(self) -> Any:
        value = load(*self.answer)
        internal._handle_exception(value)
        return value


def _worker(to: Any) -> Any:
    found = _workers.get(to)
    if found is None:
        found = api._to_worker_info(to)
        if _agent.is_static_group:
            _workers[to] = found
    return found


def _is_python(func: Any) -> bool:
    return (
        callable(func)
        and jit_builtins._find_builtin(func) is None
        and not isinstance(func, torch.jit.ScriptFunction)
        and not hasattr(func, "_wrapped_async_rpc_function")
    )


def _takes_short_way() -> bool:
    return _agent is not None and api._default_pickler is _pickler and not api._get_should_profile()


def _invoke(
    to: Any, func: Any, rpc_type: Any, args: Any = None, kwargs: Any = None, rpc_timeout: float = UNSET_RPC_TIMEOUT
) -> Any:
    """In place of torch's ``api._invoke_rpc``."""
    if not _takes_short_way() or rpc_type not in _RETURNS or not _is_python(func):
        return _torch_invoke(to, func, rpc_type, args, kwargs, rpc_timeout)
    worker = to if isinstance(to, rpc.WorkerInfo) else _worker(to)
    pickled, tensors = serialize(internal.PythonUDF(func, args or (), kwargs or {}))
    if rpc_type is internal.RPCExecMode.SYNC:
        answer = _agent._call(worker, pickled, tensors, rpc_timeout)
        if answer is not None:
            return _Answered(answer)
    return api._invoke_rpc_python_udf(worker, pickled, tensors, rpc_timeout, False)


def _call_method(created_on: int, number: int, method: str, args: Any, kwargs: Any) -> Any:
    """At an RRef's owner: calls a method of the object that the RRef refers to."""
    return getattr(_torch_rpc.owned_object(created_on, number), method)(*args, **kwargs)


def _invoke_on_reference(rref: Any, rpc_api: Any, method: str, timeout: float, *args: Any, **kwargs: Any) -> Any:
    """In place of torch's ``rref_proxy._invoke_rpc``. An RRef that is sent to its owner costs a message more, by which
    the owner accepts it; the short way sends the RRef's number, while the caller keeps the RRef."""
    if rpc_api is api.rpc_sync and _takes_short_way() and not rref.is_owner():
        kind = rref._get_type(timeout=timeout, blocking=False).wait()
        script = issubclass(kind, (torch.jit.ScriptModule, torch._C.ScriptModule))
        if script or not hasattr(getattr(kind, method), "_wrapped_async_rpc_function"):
            call = internal.PythonUDF(_call_method, (*_torch_rpc.id_of_reference(rref), method, args, kwargs), {})
            answer = _agent._call(rref.owner(), *serialize(call), timeout)
            if answer is not None:
                return _Answered(answer).wait()
    return _torch_invoke_on_reference(rref, rpc_api, method, timeout, *args, **kwargs)


def install() -> None:
    """Puts the functions of this module in the place of torch's."""
    api._invoke_rpc = _invoke
    rref_proxy._invoke_rpc = _invoke_on_reference

"""The shared library ``libtensorferry_c.so`` by ctypes, and its errors as exceptions.

``include/tensorferry/c.h`` describes each function and record; the names here are the same.
"""

from __future__ import annotations

import builtins
import ctypes
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from ctypes import POINTER, byref, c_char_p, c_double, c_int32, c_int64, c_size_t, c_uint16, c_uint64, c_void_p
from typing import Any, TypeVar

from . import errors

__all__ = ["ABI", "Arguments", "CallOptions", "Event", "GroupOptions", "check", "in_thread", "lib", "options_for_c"]

ABI = 1
T = TypeVar("T")


class Failure(ctypes.Structure):
    """tferry_error"""

    _fields_ = [
        ("code", c_int32),
        ("name", c_char_p),
        ("text", c_char_p),
        ("type_name", c_char_p),
        ("message", c_char_p),
        ("traceback", c_char_p),
        ("peer", c_char_p),
    ]


class CallOptions(ctypes.Structure):
    """tferry_call_options"""

    _fields_ = [
        ("timeout_ms", c_int64),
        ("require", c_char_p),
        ("order", ctypes.c_uint32),
        ("wait_for_ready", ctypes.c_uint8),
        ("idempotent", ctypes.c_uint8),
        ("reserved", c_uint16),
    ]


class Arguments(ctypes.Structure):
    """tferry_arguments"""

    _fields_ = [
        ("values", c_char_p),
        ("count", c_size_t),
        ("positional", c_size_t),
        ("keywords", POINTER(c_char_p)),
        ("keyword_count", c_size_t),
        ("memory", c_uint64),
    ]


class Event(ctypes.Structure):
    """tferry_event"""

    _fields_ = [
        ("kind", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("token", c_uint64),
        ("call", c_void_p),
    ]


class GroupOptions(ctypes.Structure):
    """tferry_group_options"""

    _fields_ = [
        ("root", c_uint64),
        ("tag", c_uint64),
        ("factor", c_double),
        ("timeout_ms", c_int64),
        ("memory", c_uint64),
        ("reduction", c_int32),
        ("reserved", c_int32),
    ]


_OUT = POINTER(c_void_p)
_TEXTS = POINTER(c_char_p)
#: The result and the parameters of each function. A result of Failure is an error to check.
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "tferry_abi": (c_int32, []),
    "tferry_version": (c_char_p, []),
    "tferry_error_free": (None, [POINTER(Failure)]),
    "tferry_error_code": (c_int32, [c_char_p]),
    "tferry_message_values": (c_void_p, [c_void_p, POINTER(c_size_t)]),
    "tferry_message_free": (None, [c_void_p]),
    "tferry_agent_join": (POINTER(Failure), [_TEXTS, c_size_t, _TEXTS, c_size_t, _OUT]),
    "tferry_agent_name": (c_char_p, [c_void_p]),
    "tferry_agent_rank": (c_int32, [c_void_p]),
    "tferry_agent_explain": (POINTER(Failure), [c_void_p, c_char_p, c_uint64, _OUT]),
    "tferry_agent_link_state": (POINTER(Failure), [c_void_p, c_char_p, _OUT]),
    "tferry_text_free": (None, [c_void_p]),
    "tferry_agent_shutdown": (POINTER(Failure), [c_void_p, c_int64]),
    "tferry_agent_leave": (None, [c_void_p]),
    "tferry_agent_free": (None, [c_void_p]),
    "tferry_agent_call": (
        POINTER(Failure),
        [c_void_p, POINTER(CallOptions), c_char_p, c_char_p, POINTER(Arguments), _OUT],
    ),
    "tferry_future_wait": (c_int32, [c_void_p, c_int64]),
    "tferry_future_notify": (None, [c_void_p, c_uint64]),
    "tferry_future_cancel": (None, [c_void_p]),
    "tferry_future_take": (POINTER(Failure), [c_void_p, _OUT]),
    "tferry_future_free": (None, [c_void_p]),
    "tferry_agent_next": (None, [c_void_p, c_int64, POINTER(Event)]),
    "tferry_agent_serve": (POINTER(Failure), [c_void_p, c_char_p]),
    "tferry_agent_released": (c_size_t, [c_void_p, POINTER(c_uint64), c_size_t]),
    "tferry_call_function": (c_char_p, [c_void_p]),
    "tferry_call_peer": (c_char_p, [c_void_p]),
    "tferry_call_rank": (c_int32, [c_void_p]),
    "tferry_call_cancelled": (c_int32, [c_void_p]),
    "tferry_call_left_ms": (c_int64, [c_void_p]),
    "tferry_call_arguments": (
        c_void_p,
        [c_void_p, POINTER(c_size_t), POINTER(_TEXTS), POINTER(c_size_t)],
    ),
    "tferry_call_answer": (POINTER(Failure), [c_void_p, c_char_p, c_size_t, c_uint64]),
    "tferry_call_fail": (None, [c_void_p, c_int32, c_char_p, c_char_p, c_char_p]),
    "tferry_group_form": (
        POINTER(Failure),
        [c_void_p, _TEXTS, c_size_t, _TEXTS, c_size_t, _OUT],
    ),
    "tferry_group_rank": (c_size_t, [c_void_p]),
    "tferry_group_size": (c_size_t, [c_void_p]),
    "tferry_group_start": (
        POINTER(Failure),
        [c_void_p, c_int32, POINTER(GroupOptions), c_char_p, c_size_t, c_char_p, c_size_t, _OUT],
    ),
    "tferry_group_abort": (None, [c_void_p, c_char_p]),
    "tferry_group_free": (None, [c_void_p]),
    "tferry_store_serve": (POINTER(Failure), [c_char_p, c_uint16, c_char_p, c_char_p, _OUT]),
    "tferry_store_port": (c_uint16, [c_void_p]),
    "tferry_store_free": (None, [c_void_p]),
}


def _load() -> ctypes.CDLL:
    loaded = ctypes.CDLL(os.path.join(os.path.dirname(os.path.abspath(__file__)), "libtensorferry_c.so"))
    for name, (result, parameters) in _FUNCTIONS.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, parameters
    if loaded.tferry_abi() != ABI:
        raise ImportError(f"libtensorferry_c.so has interface {loaded.tferry_abi()}, and this package wants {ABI}")
    return loaded


lib = _load()


def _exception_of(failure: Failure) -> Exception:
    """Makes the exception. One of Python's own types, or of ours, that the peer's function raised keeps its type."""
    text = failure.text.decode(errors="replace")
    name = failure.name.decode()
    if name != "RemoteError":
        made: Exception = getattr(errors, name)(text)
        return made
    type_name, peer = failure.type_name.decode(errors="replace"), failure.peer.decode(errors="replace")
    message = failure.message.decode(errors="replace")
    module, _, name = type_name.rpartition(".")
    home = {"builtins": builtins, "tensorferry.errors": errors, errors.__name__: errors}.get(module)
    cls = getattr(home, name, None)
    error: Exception
    if isinstance(cls, type) and issubclass(cls, Exception) and cls.__init__ is Exception.__init__:
        error = cls(message)
    elif isinstance(cls, type) and issubclass(cls, (LookupError, ArithmeticError, ValueError, TypeError, OSError)):
        try:
            error = cls(message)
        except TypeError:  # its constructor wants more than a text
            error = errors.RemoteError(text, type_name, peer)
    else:
        error = errors.RemoteError(text, type_name, peer)
    error.__cause__ = errors.RemoteTraceback(peer, failure.traceback.decode(errors="replace") or text)
    return error


def check(failed: Any) -> None:
    """Raises the exception of a tferry_error*, and frees it. Does nothing for a null pointer."""
    if not failed:
        return
    try:
        error = _exception_of(failed.contents)
    finally:
        lib.tferry_error_free(failed)
    raise error


def _text_of(value: object) -> bytes:
    if isinstance(value, bool):
        return b"true" if value else b"false"
    return str(value).encode()


def options_for_c(options: Mapping[str, object]) -> tuple[Any, int]:
    """Returns the options that are not None as an array of names and values, and how many there are."""
    given = [(name.encode(), _text_of(value)) for name, value in options.items() if value is not None]
    flat = [text for pair in given for text in pair]
    return (c_char_p * len(flat))(*flat), len(given)


def texts_for_c(texts: Sequence[str]) -> tuple[Any, int]:
    """Returns an array of texts, and its length."""
    return (c_char_p * len(texts))(*[text.encode() for text in texts]), len(texts)


def text_from(call: Callable[[Any], Any]) -> str:
    """Returns the text that a function gives to free."""
    out = c_void_p()
    check(call(byref(out)))
    try:
        return ctypes.string_at(out.value or 0).decode(errors="replace")
    finally:
        lib.tferry_text_free(out)


def in_thread(function: Callable[[], T], undo: Callable[[T], object]) -> T:
    """Runs a function that blocks. On the main thread, Ctrl-C ends the wait: the function then goes on, on a thread of
    its own, and ``undo`` gets what it returns."""
    if threading.current_thread() is not threading.main_thread():
        return function()
    ended = threading.Event()
    results: list[T] = []
    failures: list[BaseException] = []
    lock = threading.Lock()
    given_up = False

    def run() -> None:
        try:
            result = function()
        except BaseException as error:
            failures.append(error)
        else:
            with lock:
                results.append(result)
                keep = not given_up
            if not keep:
                undo(result)
        ended.set()

    threading.Thread(target=run, name="tensorferry wait", daemon=True).start()
    try:
        ended.wait()
    except BaseException:
        with lock:
            given_up = True
            late = list(results)
        for result in late:
            undo(result)
        raise
    if failures:
        raise failures[0]
    return results[0]

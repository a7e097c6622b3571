"""Plugins: channels, converters and reductions that other packages and programs add to all agents of the process.

An installed package adds them by an entry point of the group ``tensorferry.plugins``, a function without arguments. The
first agent of a process calls these functions, unless ``TENSORFERRY_PLUGINS`` says otherwise.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

import torch

from . import _C, errors

__all__ = ["load_plugin", "register_converter", "register_reduction"]

GROUP = "tensorferry.plugins"


def load_plugin(path: str | os.PathLike[str]) -> list[str]:
    """Loads a shared library that registers channels, converters or reductions, for the rest of the process's life.

    A channel runs on threads without the GIL, so it is written in C++: ``tensorferry/plugin.h`` and
    ``examples/08-own-channel`` show how. Agents that are made afterwards have what the library registers. A library
    that is loaded already changes nothing.

    Args:
        path: the library, which has ``TENSORFERRY_PLUGIN`` and is built for this minor version of TensorFerry. A name
            without a slash is found as the system's loader finds libraries.

    Returns:
        What the library has registered: ``["channel spool"]``.

    Raises:
        InvalidArgument: the library cannot be loaded, is no plugin of this minor version, or registers a name that is
            taken. Nothing is registered then.

    Example::

        try:
            print(tensorferry.load_plugin("/opt/spool/libspool_plugin.so"))
        except tensorferry.errors.InvalidArgument as error:
            print(error)  # cannot load the plugin: /opt/spool/libspool_plugin.so: cannot open shared object file ...
    """
    return _C.load_plugin(os.fspath(path))


def register_converter(
    device_type: str,
    to_host: Callable[[torch.Tensor], torch.Tensor],
    from_host: Callable[[torch.Tensor, torch.device], torch.Tensor],
) -> None:
    """Registers how tensors of a device type that TensorFerry does not know travel: through host memory.

    Agents that are made afterwards send such tensors as any other: in arguments, in results and inside other values.
    A receiver that has no converter for the type gets the tensor in host memory. Two tensors in one storage arrive in
    memory of their own each. The agents of ``torch.distributed.rpc`` refuse such tensors, as torch does.

    The functions run without gradients, on any thread, and finish their copies before they return. What they raise
    fails the call, with TypeError at the sender and InvalidArgument at the receiver.

    Args:
        device_type: torch's name of the type, such as ``"xpu"`` or ``"privateuseone"``; not ``"cpu"`` or ``"cuda"``.
        to_host: is called at the sender with a strided tensor, and returns a CPU tensor with the same sizes and dtype.
        from_host: is called at the receiver with a CPU tensor, which it may keep, and the device with the type and the
            index of the sender's. It returns a tensor of that type with the same sizes and dtype.

    Raises:
        ValueError: torch knows no such device type.
        InvalidArgument: the type has a converter already, or is one of TensorFerry's own.

    Example::

        tensorferry.register_converter(
            "xpu", to_host=lambda tensor: tensor.cpu(), from_host=lambda host, device: host.to(device)
        )
    """
    _C.register_converter(device_type, to_host, from_host)


def register_reduction(name: str, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]) -> None:
    """Registers a reduction, which the operations of a :class:`tensorferry.collectives.Group` then take as ``op=name``.

    It must mean the same at every rank. Tensors of GPUs are copied to host memory and back. A reduction that a plugin
    registers in C++ (:func:`load_plugin`) needs no GIL, and so takes less time.

    Args:
        name: the reduction's name.
        function: is called with two CPU tensors of one dimension, on any thread. It changes the first one, or returns
            the result. What it raises fails the group at every rank.

    Raises:
        InvalidArgument: the name is taken.

    Example::

        tensorferry.register_reduction("logaddexp", torch.logaddexp)
        try:
            tensorferry.register_reduction("logaddexp", torch.logaddexp)
        except tensorferry.errors.InvalidArgument as error:
            print(error)  # "reduction logaddexp" is registered twice in this process: by Python and by Python
    """
    _C.register_reduction(name, function)


_lock = threading.RLock()  # guards the two below; a plugin may make an agent
_loaded = False
_failed: str | None = None


def _chosen(found: dict[str, EntryPoint]) -> list[str]:
    """The names of the entry points that ``TENSORFERRY_PLUGINS`` lets through."""
    choice = [each.strip() for each in os.environ.get("TENSORFERRY_PLUGINS", "").split(",") if each.strip()]
    if choice == ["off"]:
        return []
    if unknown := [each for each in choice if each not in found]:
        known = f"installed are: {', '.join(sorted(found))}" if found else "none is installed"
        raise errors.InvalidArgument(
            f"TENSORFERRY_PLUGINS names {unknown[0]!r}, and there is no such plugin; {known}; off: none is loaded"
        )
    return choice or sorted(found)


def load_installed() -> None:
    """Calls the entry points of installed packages, once in a process. Every agent calls this before it is made."""
    global _loaded, _failed
    with _lock:
        if _failed is not None:
            raise errors.InvalidArgument(_failed)
        if _loaded:
            return
        found = {each.name: each for each in entry_points(group=GROUP)}
        chosen = _chosen(found)
        _loaded = True
        for name in chosen:
            entry = found[name]
            try:
                entry.load()()
            except Exception as error:
                package = f" of {entry.dist.name} {entry.dist.version}" if entry.dist else ""
                _failed = (
                    f"the plugin {name!r}{package} failed ({entry.value}): {type(error).__name__}: {error}. Uninstall "
                    "it, or name the others in TENSORFERRY_PLUGINS (off: none)"
                )
                raise errors.InvalidArgument(_failed) from error
            except BaseException:  # Ctrl-C: the next agent loads what is missing
                _loaded = False
                raise

"""What can go wrong with a call. Everything of ours derives from :class:`Error`, a :class:`RuntimeError`.

An exception that a remote function raised arrives as its own type where that can be rebuilt here, else as
:class:`RemoteError`; either way its ``__cause__`` is a :class:`RemoteTraceback` that names the peer::

    try:
        rpc.rpc_sync("worker1", divide, args=(1, 0))
    except ZeroDivisionError as error:
        print(error.__cause__)
"""

from __future__ import annotations

__all__ = [
    "AgentClosed",
    "Cancelled",
    "ChannelUnavailable",
    "ConnectionLost",
    "DeadlineExceeded",
    "Error",
    "InternalError",
    "InvalidArgument",
    "NotFound",
    "PermissionDenied",
    "ProtocolError",
    "RemoteError",
    "RemoteTraceback",
    "ResourceExhausted",
    "Unauthenticated",
]


class Error(RuntimeError):
    """The base of all errors of TensorFerry's own. Its text says what happened, to which peer, and what to do."""


class ConnectionLost(Error):
    """The peer died, left, or became unreachable; calls that were in flight to it fail with this at once."""


class DeadlineExceeded(Error, TimeoutError):
    """No answer within the time-out. The callee may or may not have run the function."""


class Cancelled(Error):
    """The call was cancelled before its answer came."""


class InvalidArgument(Error, ValueError):
    """An argument or option makes no sense; nothing was sent."""


class NotFound(Error, LookupError):
    """There is no agent, function or object of that name."""


class PermissionDenied(Error):
    """The callee does not let this peer call that function."""


class ResourceExhausted(Error):
    """A bound was reached: handlers that run at once, bytes in flight, memory."""


class ChannelUnavailable(Error):
    """No channel can carry a tensor of the call, or the one that ``require=`` names cannot."""


class ProtocolError(Error):
    """The peer sent what the protocol does not allow, or speaks another version; its link is closed."""


class Unauthenticated(Error):
    """The peer did not prove that it knows the cluster key, or there is no key to listen beyond this host with."""


class AgentClosed(Error):
    """The agent was shut down, before the call or while it was in flight."""


class InternalError(Error):
    """A mistake in TensorFerry, or a failure of the system underneath it."""


class RemoteTraceback(Exception):
    """Where a remote exception was raised: the ``__cause__`` of what arrives here.

    Args:
        peer: the name of the agent that raised.
        text: the traceback, as that agent would print it.
    """

    def __init__(self, peer: str, text: str) -> None:
        super().__init__(peer, text)
        self.peer = peer
        self.text = text

    def __str__(self) -> str:
        return f'on "{self.peer}":\n{self.text.rstrip()}'


class RemoteError(Error):
    """An exception of a remote function whose own type cannot be rebuilt here.

    Args:
        message: the type's name and the exception's text.
        type_name: ``"module.QualifiedName"`` of the type over there.
        peer: the name of the agent that raised.
    """

    def __init__(self, message: str, type_name: str = "", peer: str = "") -> None:
        super().__init__(message)
        self.type_name = type_name
        self.peer = peer

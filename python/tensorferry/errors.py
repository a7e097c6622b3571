"""The errors of calls. All errors of TensorFerry's own derive from :class:`Error`, a :class:`RuntimeError`.

If a remote function raises an exception, the caller gets an exception of the same type if that type can be rebuilt
here, else a :class:`RemoteError`. In both cases its ``__cause__`` is a :class:`RemoteTraceback` that names the peer::

    try:
        rpc.rpc_sync("worker1", divide, args=(1, 0))
    except ZeroDivisionError as error:
        print(error.__cause__)
"""


class Error(RuntimeError):
    """The base class of all errors of TensorFerry's own. The text says what happened, at which peer, and what to do."""


class RemoteTraceback(Exception):
    """The traceback of a remote exception: the ``__cause__`` of the exception that the caller gets.

    Args:
        peer: the name of the agent at which the exception was raised.
        text: the traceback, as that agent would print it.
    """

    def __init__(self, peer: str, text: str) -> None:
        super().__init__(peer, text)
        self.peer = peer
        self.text = text

    def __str__(self) -> str:
        return f'on "{self.peer}":\n{self.text.rstrip()}'


class RemoteError(Error):
    """Stands for an exception of a remote function whose own type cannot be rebuilt here.

    Args:
        message: the name of the exception's type, and its text.
        type_name: the ``"module.QualifiedName"`` of the type at the peer.
        peer: the name of the agent at which the exception was raised.
    """

    def __init__(self, message: str, type_name: str = "", peer: str = "") -> None:
        super().__init__(message)
        self.type_name = type_name
        self.peer = peer


# The classes below are written by scripts/errors.py from include/tensorferry/error_codes.h.


class Cancelled(Error):
    """The call was cancelled before its reply came."""


class InvalidArgument(Error, ValueError):
    """An argument or an option is invalid, or the result has another type than the caller asked for."""


class DeadlineExceeded(Error, TimeoutError):
    """No reply came within the time-out. The callee may or may not have run the function."""


class NotFound(Error, LookupError):
    """No agent, function, method or object has that name."""


class PermissionDenied(Error):
    """The callee does not let this peer call that function."""


class ResourceExhausted(Error):
    """A limit was reached: of functions that run at once, of bytes in flight, or of memory."""


class ChannelUnavailable(Error):
    """No channel can carry a tensor of the call, or the one channel that the caller requires cannot."""


class ConnectionLost(Error):
    """The peer died, left, or became unreachable. Calls in flight to it fail at once."""


class ProtocolError(Error):
    """The peer broke the protocol, or speaks another version of it. The link to it is closed."""


class Unauthenticated(Error):
    """The peer did not prove that it knows the cluster key, or this agent has no key to listen beyond its host."""


class AgentClosed(Error):
    """The agent was shut down, before the call or while it was in flight."""


class InternalError(Error):
    """A bug in TensorFerry, or a failure of the operating system or of a driver."""


__all__ = [
    "AgentClosed", "Cancelled", "ChannelUnavailable", "ConnectionLost", "DeadlineExceeded", "Error", "InternalError",
    "InvalidArgument", "NotFound", "PermissionDenied", "ProtocolError", "RemoteError", "RemoteTraceback",
    "ResourceExhausted", "Unauthenticated",
]  # fmt: skip

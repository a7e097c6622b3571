/// The table of error codes. To add an error, add a row with the next number here, and run `make format`.
///
/// From the table are made:
///
/// - by macros: the codes and their names (base/status.h), the classes of errors.h, and the conversions between them;
/// - by scripts/errors.py, which `make format` runs: the classes of the Python module tensorferry.errors, and the list
///   in docs/protocol.md; with the lines at the end of this file, a table in docs/troubleshooting.md. A test compares.
///
/// docs/troubleshooting.md also has a section on each error, with its texts and their causes.
///
/// The columns:
///
/// - the number that travels in error replies: never change it;
/// - the enumerator of Code;
/// - the name of the class, in C++ and Python;
/// - the builtin exception that the Python class derives from (RuntimeError: by its base class Error, as all do);
/// - the description of the class, one string literal.
#pragma once

/// The errors whose classes have only a text.
#define TENSORFERRY_PLAIN_ERRORS(ERROR)                                                                                \
  ERROR(1, cancelled, Cancelled, RuntimeError, "The call was cancelled before its reply came.")                        \
  ERROR(2, invalid_argument, InvalidArgument, ValueError,                                                              \
        "An argument or an option is invalid, or the result has another type than the caller asked for.")              \
  ERROR(3, deadline_exceeded, DeadlineExceeded, TimeoutError,                                                          \
        "No reply came within the time-out. The callee may or may not have run the function.")                         \
  ERROR(4, not_found, NotFound, LookupError, "No agent, function, method or object has that name.")                    \
  ERROR(5, permission_denied, PermissionDenied, RuntimeError, "The callee does not let this peer call that function.") \
  ERROR(6, resource_exhausted, ResourceExhausted, RuntimeError,                                                        \
        "A limit was reached: of functions that run at once, of bytes in flight, or of memory.")                       \
  ERROR(7, channel_unavailable, ChannelUnavailable, RuntimeError,                                                      \
        "No channel can carry a tensor of the call, or the one channel that the caller requires cannot.")              \
  ERROR(8, connection_lost, ConnectionLost, RuntimeError,                                                              \
        "The peer died, left, or became unreachable. Calls in flight to it fail at once.")                             \
  ERROR(9, protocol_error, ProtocolError, RuntimeError,                                                                \
        "The peer broke the protocol, or speaks another version of it. The link to it is closed.")                     \
  ERROR(10, unauthenticated, Unauthenticated, RuntimeError,                                                            \
        "The peer did not prove that it knows the cluster key, or this agent has no key to listen beyond its host.")   \
  ERROR(12, agent_closed, AgentClosed, RuntimeError,                                                                   \
        "The agent was shut down, before the call or while it was in flight.")                                         \
  ERROR(13, internal, InternalError, RuntimeError,                                                                     \
        "A bug in TensorFerry, or a failure of the operating system or of a driver.")

/// All errors. RemoteError has more than a text, so errors.h and tensorferry.errors declare its class.
#define TENSORFERRY_ERRORS(ERROR)                    \
  TENSORFERRY_PLAIN_ERRORS(ERROR)                    \
  ERROR(11, remote_error, RemoteError, RuntimeError, \
        "The called function raised an exception whose type the caller does not have.")

// What to do about each error, for docs/troubleshooting.md:
// DO(Cancelled) Nothing, if the program cancelled the call. Of a group: see which rank left it or aborted it.
// DO(InvalidArgument) Correct the argument or the option that the text names.
// DO(DeadlineExceeded) Read how far the call came. Give it more time, or find out what holds the peer up.
// DO(NotFound) Check the name. Start the process that has it, or pass `wait_for_ready=True` if it starts later.
// DO(PermissionDenied) Expose the function or the class at the peer.
// DO(ResourceExhausted) Send less at once, or raise the limit that the text names.
// DO(ChannelUnavailable) Remove `require=` or `share`, or the reason that the text gives for each channel.
// DO(ConnectionLost) Look at the output and the exit status of the process that the text names.
// DO(ProtocolError) Install the same release at both ends. If they are the same, report it.
// DO(Unauthenticated) Give all processes of the job one key.
// DO(RemoteError) Read the traceback of the peer, which is the cause of the exception.
// DO(AgentClosed) Let `shutdown` be the last call. In a forked child, start an agent of its own.
// DO(InternalError) Look at the errno or the driver's text. If there is none, report it.

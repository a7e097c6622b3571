/// `tensorpipe`: carries buffers through pipes of the TensorPipe inside libtorch. It is a target of its own, because it
/// links libtorch. An agent has it only if its choice of channels names it.
#pragma once

#include <memory>

#include "channels/channel.h"

namespace tensorferry {

struct TensorpipeOptions {
  bool loopback = true;  // false, for tests: ends on one host meet as if on two hosts
};

/// Makes the driver. It carries CPU memory to CPU memory and GPU memory to GPU memory, between any two agents.
///
/// One pipe joins the two ends of a device pair. Control messages of the link set it up when the pair is opened. Until
/// then the channel refuses offers that another channel can carry.
///
/// A ticket names an offer by number, and the sender writes the buffer when the receiver's request comes. So tickets
/// may be pulled in any order, discarded or withdrawn, although a pipe is strictly in order. `released` runs when
/// TensorPipe has read the source and the receiver has acknowledged.
///
/// GPU: TensorPipe reads the source after the work that the source's stream had when the buffer was offered. It writes
/// on the receiver's stream, and `landed` runs when it has enqueued the write there. The channel refuses memory that
/// cudaIpcGetMemHandle does not export.
///
/// If a pipe breaks, the pair becomes unusable, with TensorPipe's reason, and the operations under way fail with
/// it. A peer can do no more harm on the link, by tickets or control messages. TensorPipe's own sockets are another
/// matter: TensorPipe ends the process on bytes that it does not understand.
///
/// In a build without TensorPipe the driver reaches no peer, and gives the reason.
std::unique_ptr<Driver> make_tensorpipe_driver(TensorpipeOptions options = {});

}  // namespace tensorferry

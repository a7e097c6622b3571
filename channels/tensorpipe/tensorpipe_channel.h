/// `tensorpipe`: buffers through pipes of the TensorPipe inside libtorch. In a target of its own, because it links
/// libtorch; an agent has it only where its choice of channels names it.
#pragma once

#include <memory>

#include "channels/channel.h"

namespace tensorferry {

struct TensorpipeOptions {
  bool loopback = true;  // false, for tests: ends on one host meet as ends on two do
};

/// CPU memory to CPU memory, GPU memory to GPU memory; any two processes.
///
/// One pipe joins the two ends of a device pair. It is made by control messages of the link's when the pair is opened;
/// until then, offers that another channel can carry are refused. A ticket is a number; the receiver's request has the
/// sender write the buffer, so tickets may be pulled in any order, discarded or withdrawn, though a pipe is strictly in
/// order. `released` runs when TensorPipe has read the source and the receiver has acknowledged.
///
/// GPU: the source is read behind what its stream had been given when it was offered; TensorPipe writes on the
/// receiver's stream, and `landed` runs when it has put that there. Memory that cudaIpcGetMemHandle does not export is
/// refused.
///
/// Where a pipe breaks the pair falls away with TensorPipe's reason; what was under way fails with it. What a peer says
/// on the link (tickets, control messages) can do no more. TensorPipe's own sockets are another matter: it ends the
/// process on bytes that it does not understand.
///
/// In a build without TensorPipe the driver reaches nothing, and says why.
std::unique_ptr<Driver> make_tensorpipe_driver(TensorpipeOptions options = {});

}  // namespace tensorferry

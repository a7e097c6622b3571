/// Conversion between messages of torch.distributed.rpc and messages of an agent.
///
/// The payload of torch's message and the bytes of its tensors travel as they are: a payload of more than 8 KB, and all
/// tensors, as buffers. If the codec cannot carry one of the tensors (a quantised one), the whole message travels as
/// torch serialises it for a byte stream.
#pragma once

#include <torch/csrc/distributed/rpc/message.h>

#include <vector>

#include "agent/agent.h"
#include "base/status.h"
#include "converters/registry.h"
#include "rpc/tensor.h"

namespace tensorferry::torch_rpc {

using TorchMessage = c10::intrusive_ptr<torch::distributed::rpc::Message>;

/// Encodes `message`. The buffers of the result keep its tensors and its payload alive. InvalidArgument: a tensor
/// cannot be sent, neither by the codec nor by torch.
Result<Message> encode(const TorchMessage& message, const Converters& converters);

/// A message from a peer, and the storages of its tensors that are not on the CPU.
struct Decoded {
  TorchMessage message;
  std::vector<WeakStorage> device_storages;
};

/// Decodes what encode() made. Tensors on a GPU are usable on the current streams. Errors: ProtocolError, and those of
/// TensorReader::read.
Result<Decoded> decode(const Received& received, const Converters& converters);

}  // namespace tensorferry::torch_rpc

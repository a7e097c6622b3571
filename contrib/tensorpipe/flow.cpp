#include "contrib/tensorpipe/flow.h"

#include <utility>

#include "base/text.h"
#include "channels/completion.h"
#include "contrib/tensorpipe/contexts.h"
#include "contrib/tensorpipe/messages.h"

namespace tensorferry::tp {

void PipeFlow::use(Pipe pipe) {
  std::vector<Outgoing> unsent;
  bool late = false;
  {
    const std::lock_guard lock(mutex_);
    late = !end_.ok();
    if (!late) {
      pipe_ = pipe;
      unsent.swap(unsent_);
    }
  }
  if (late) return pipe->close();
  for (auto& each : unsent) write(pipe, std::move(each));
  read_next(pipe);
}

bool PipeFlow::ready() const {
  const std::lock_guard lock(mutex_);
  return pipe_ != nullptr;
}

Status PipeFlow::end() const {
  const std::lock_guard lock(mutex_);
  return end_;
}

void PipeFlow::send(std::uint64_t offer, Buffer source, Completion done) {
  Outgoing outgoing{offer, std::move(source), std::move(done)};
  Pipe pipe;
  Status ended;
  {
    const std::lock_guard lock(mutex_);
    ended = end_;
    pipe = pipe_;
    if (ended.ok() && !pipe) {
      unsent_.push_back(std::move(outgoing));
      return;
    }
  }
  if (!ended.ok()) return complete(std::move(outgoing.done), std::move(ended));
  write(pipe, std::move(outgoing));
}

void PipeFlow::write(const Pipe& pipe, Outgoing outgoing) {
  tensorpipe::Message message;
  message.metadata = tensorferry::text_of(encode(Metadata{outgoing.offer}));
  auto& tensor = message.tensors.emplace_back();
  tensor.length = outgoing.source.bytes;
  tensor.targetDevice = device_of(pair_.remote);
  if (pair_.local.type == DeviceType::cuda) {
    auto buffer = sending_.buffer_of(outgoing.source);
    if (!buffer.ok()) {  // the peer waits for these bytes, and must be told
      fail(buffer.status());
      return complete(std::move(outgoing.done), buffer.status());
    }
    tensor.buffer = *buffer;
  } else {
    tensor.buffer = tensorpipe::CpuBuffer{outgoing.source.data};
  }
  auto shared = std::make_shared<Outgoing>(std::move(outgoing));  // std::function must be copyable
  pipe->write(std::move(message),
              [self = shared_from_this(), shared](const tensorpipe::Error& error) { self->sent(*shared, error); });
}

void PipeFlow::sent(Outgoing& outgoing, const tensorpipe::Error& error) {
  if (!error && pair_.local.type == DeviceType::cuda)
    return sending_.when_read(outgoing.source,
                              [self = shared_from_this(), source = outgoing.source, done = std::move(outgoing.done)](
                                  Status status) mutable { complete(std::move(done), std::move(status)); });
  complete(std::move(outgoing.done), error ? status_of(error) : Status());
}

bool PipeFlow::receive(std::uint64_t offer, Buffer& memory, Completion& landed, Completion& consumed) {
  Status ended;
  {
    const std::lock_guard lock(mutex_);
    ended = end_;
    if (ended.ok()) {
      if (awaited_.contains(offer)) return false;
      awaited_.emplace(offer, Incoming{std::move(memory), std::move(landed), std::move(consumed)});
      return true;
    }
  }
  complete(std::move(landed), ended);
  complete(std::move(consumed), std::move(ended));
  return true;
}

void PipeFlow::read_next(const Pipe& pipe) {
  pipe->readDescriptor([self = shared_from_this(), weak = std::weak_ptr(pipe)](
                           const tensorpipe::Error& error, const tensorpipe::Descriptor& descriptor) {
    if (error) return self->fail(self->status_of(error));
    if (const auto there = weak.lock()) self->read(there, descriptor);
  });
}

void PipeFlow::read(const Pipe& pipe, const tensorpipe::Descriptor& descriptor) {
  auto incoming = take(descriptor);
  if (!incoming)
    return fail({Code::protocol_error, formatted("{} sent bytes by TensorPipe that this end did not request", peer_)});
  tensorpipe::Allocation allocation;
  allocation.tensors.push_back({pair_.local.type == DeviceType::cuda
                                    ? gpu::buffer_of(incoming->memory)
                                    : tensorpipe::Buffer(tensorpipe::CpuBuffer{incoming->memory.data})});
  auto shared = std::make_shared<Incoming>(std::move(*incoming));  // std::function must be copyable
  pipe->read(std::move(allocation),
             [self = shared_from_this(), shared](const tensorpipe::Error& error) { self->landed(*shared, error); });
  read_next(pipe);
}

std::optional<PipeFlow::Incoming> PipeFlow::take(const tensorpipe::Descriptor& descriptor) {
  const auto metadata = decode<Metadata>(view_of(descriptor.metadata));
  if (!metadata || !descriptor.payloads.empty() || descriptor.tensors.size() != 1) return std::nullopt;
  const auto& tensor = descriptor.tensors.front();
  // TensorPipe ends the process if it is given memory on another device.
  if (!(tensor.sourceDevice == device_of(pair_.remote)) || !tensor.targetDevice.has_value() ||
      !(*tensor.targetDevice == device_of(pair_.local)))
    return std::nullopt;
  const std::lock_guard lock(mutex_);
  const auto found = awaited_.find(metadata->offer);
  if (found == awaited_.end() || found->second.memory.bytes != tensor.length) return std::nullopt;
  auto incoming = std::move(found->second);
  awaited_.erase(found);
  return incoming;
}

void PipeFlow::landed(Incoming& incoming, const tensorpipe::Error& error) {
  auto status = error ? status_of(error) : Status();
  complete(std::move(incoming.landed), status);
  if (!status.ok() || pair_.local.type == DeviceType::cpu)
    return complete(std::move(incoming.consumed), std::move(status));
  const auto memory = incoming.memory;
  gpu::when_written(memory, [memory, consumed = std::move(incoming.consumed)](Status written) mutable {
    complete(std::move(consumed), std::move(written));
  });
}

void PipeFlow::fail(Status status) {
  if (end(status)) broke_(std::move(status));
}

void PipeFlow::close(Status status) {
  if (status.ok()) status = Status(Code::connection_lost, "the link has ended");
  if (end(status)) return;
  const std::lock_guard lock(mutex_);
  end_ = std::move(status);  // the pipe may have failed because the link ended: the link knows why
}

bool PipeFlow::end(Status status) {
  Pipe pipe;
  std::vector<Outgoing> unsent;
  std::map<std::uint64_t, Incoming> awaited;
  {
    const std::lock_guard lock(mutex_);
    if (!end_.ok()) return false;
    end_ = status;
    pipe.swap(pipe_);
    unsent.swap(unsent_);
    awaited.swap(awaited_);
  }
  if (pipe) pipe->close();
  for (auto& each : unsent) complete(std::move(each.done), status);
  for (auto& [offer, incoming] : awaited) {
    complete(std::move(incoming.landed), status);
    complete(std::move(incoming.consumed), status);
  }
  return true;
}

/// Prefers the status that ended the pipe, because it says more than TensorPipe's error that follows.
Status PipeFlow::status_of(const tensorpipe::Error& error) const {
  if (auto ended = end(); !ended.ok()) return ended;
  return {Code::connection_lost, formatted("TensorPipe's pipe to {} broke: {}", peer_, error.what())};
}

}  // namespace tensorferry::tp

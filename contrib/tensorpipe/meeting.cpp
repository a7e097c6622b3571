#include "contrib/tensorpipe/meeting.h"

#include <algorithm>
#include <exception>
#include <tuple>
#include <utility>

#include "base/environment.h"
#include "base/host.h"
#include "base/text.h"
#include "channels/xth/directory.h"
#include "contrib/tensorpipe/contexts.h"

namespace tensorferry::tp {
namespace {

constexpr std::size_t most_strangers = 64;

/// Returns the kernel and the network namespace, which processes share if they reach each other at a loopback address.
/// Returns "" if they are unknown.
std::string own_host() {
  const auto boot = boot_id();
  const auto net = own_namespace("net");
  return boot.empty() || net == 0 ? std::string() : formatted("{}/{}", boot, net);
}

/// Returns an address at which other hosts reach this one. It is chosen as the agent's is: by
/// TENSORFERRY_SOCKET_IFNAME, else by TensorPipe's guess.
Result<std::string> own_address() {
  const std::string interface(environment::socket_ifname.value());
  const auto [error, address] = interface.empty() ? tensorpipe::transport::uv::lookupAddrLikeNccl()
                                                  : tensorpipe::transport::uv::lookupAddrForIface(interface);
  if (error) {
    return Status(
        Code::channel_unavailable,
        formatted("TensorPipe finds no address of this host ({}); set TENSORFERRY_SOCKET_IFNAME", error.what()));
  }
  return address;
}

}  // namespace

PipeMeeting::PipeMeeting(std::shared_ptr<WireUse> wire, DeviceType type, std::string peer, bool loopback, Met met)
    : wire_(std::move(wire)),
      type_(type),
      peer_(std::move(peer)),
      loopback_(loopback),
      mine_(xth::random_id()),
      met_(std::move(met)) {}

void PipeMeeting::begin() { send(PipeHello{mine_, own_host()}); }

void PipeMeeting::hear(const PipeHello& hello) {
  {
    const std::lock_guard lock(mutex_);
    if (ended_ || std::exchange(heard_hello_, true)) return;
    theirs_ = hello.secret;
  }
  if (mine_ == hello.secret) return fail({Code::protocol_error, formatted("{} repeats this end's secret", peer_)});
  if (mine_ < hello.secret) return;  // the other end listens, and sends its address
  const bool same_host = loopback_ && !hello.host.empty() && hello.host == own_host();
  Contexts::of_this_process().background().submit([self = shared_from_this(), same_host] { self->listen(same_host); });
}

void PipeMeeting::hear(const Listening& listening) {
  {
    const std::lock_guard lock(mutex_);
    if (ended_ || !heard_hello_ || theirs_ < mine_ || std::exchange(heard_address_, true)) return;
  }
  if (!is_address(listening.address))
    return fail({Code::protocol_error, formatted("{} announced an invalid address", peer_)});
  Contexts::of_this_process().background().submit(
      [self = shared_from_this(), address = listening.address] { self->dial(address); });
}

void PipeMeeting::listen(bool same_host) {
  auto& contexts = Contexts::of_this_process();
  const auto context = contexts.of(type_);
  if (!context.ok()) return fail(context.status());
  const auto host = same_host ? Result<std::string>("127.0.0.1") : own_address();
  if (!host.ok()) return fail(host.status());
  std::shared_ptr<tensorpipe::Listener> listener;
  std::string address;
  try {
    listener = (*context)->listen({"uv://" + *host});
    address = listener->address("uv");
  } catch (const std::exception& error) {
    return fail({Code::channel_unavailable, formatted("TensorPipe cannot listen at {}: {}", *host, error.what())});
  }
  {
    const std::lock_guard lock(mutex_);
    if (!ended_) listener_ = listener;
  }
  accept_next();
  send(Listening{std::move(address)});
}

void PipeMeeting::accept_next() {
  std::shared_ptr<tensorpipe::Listener> listener;
  {
    const std::lock_guard lock(mutex_);
    if (ended_ || !listener_) return;
    listener = listener_;
  }
  listener->accept([self = shared_from_this()](const Error& error, Pipe pipe) {
    if (error)
      return self->fail({Code::channel_unavailable, formatted("TensorPipe stopped listening: {}", error.what())});
    self->accept_next();
    self->accepted(std::move(pipe));
  });
}

void PipeMeeting::accepted(Pipe pipe) {
  bool welcome = false;
  {
    const std::lock_guard lock(mutex_);
    welcome = !ended_ && pipes_.size() < most_strangers;
    if (welcome) pipes_.push_back(pipe);
  }
  if (!welcome) return pipe->close();
  read_handshake(pipe, [self = shared_from_this()](const Error&, const Pipe& from, const Descriptor* handshake) {
    if (handshake == nullptr || handshake->metadata != text_of(self->mine_)) {
      {
        const std::lock_guard lock(self->mutex_);
        std::erase(self->pipes_, from);
      }
      return from->close();
    }
    Secret theirs;
    {
      const std::lock_guard lock(self->mutex_);
      theirs = self->theirs_;
    }
    self->send_handshake(from, theirs);
    self->finish_with(from);
  });
}

void PipeMeeting::dial(const std::string& address) {
  auto& contexts = Contexts::of_this_process();
  const auto context = contexts.of(type_);
  if (!context.ok()) return fail(context.status());
  Pipe pipe;
  try {
    pipe = (*context)->connect("uv://" + address, tensorpipe::PipeOptions().remoteName(peer_));
  } catch (const std::exception& error) {
    return fail({Code::channel_unavailable, formatted("TensorPipe cannot dial {}: {}", address, error.what())});
  }
  Secret theirs;
  {
    const std::lock_guard lock(mutex_);
    if (!ended_) pipes_.push_back(pipe);
    theirs = theirs_;
  }
  send_handshake(pipe, theirs);
  read_handshake(pipe, [self = shared_from_this(), address](const Error& error, const Pipe& from,
                                                            const Descriptor* handshake) {
    if (error) {
      return self->fail(
          {Code::channel_unavailable, formatted("TensorPipe reaches no process at {}: {}", address, error.what())});
    }
    if (handshake == nullptr || handshake->metadata != text_of(self->mine_))
      return self->fail({Code::channel_unavailable, formatted("the process at {} is not {}", address, self->peer_)});
    self->finish_with(from);
  });
}

void PipeMeeting::read_handshake(const Pipe& pipe,
                                 UniqueFunction<void(const Error&, const Pipe&, const Descriptor*)> then) {
  auto shared = std::make_shared<decltype(then)>(std::move(then));  // std::function must be copyable
  // The pipe owns its callbacks: a callback that owned the pipe would keep it alive for ever.
  pipe->readDescriptor([weak = std::weak_ptr(pipe), shared](const Error& error, const Descriptor& handshake) {
    const auto from = weak.lock();
    if (!from) return;
    const bool fits = !error && handshake.payloads.empty() && handshake.tensors.empty();
    if (fits) from->read({}, [](const Error&) {});
    (*shared)(error, from, fits ? &handshake : nullptr);
  });
}

void PipeMeeting::send_handshake(const Pipe& pipe, const Secret& secret) {
  tensorpipe::Message handshake;
  handshake.metadata = text_of(secret);
  pipe->write(std::move(handshake), [](const Error&) {});  // the read on this pipe reports errors
}

void PipeMeeting::finish_with(const Pipe& pipe) {
  if (auto met = end(pipe)) met(pipe);
}

void PipeMeeting::send(const Control& control) {
  wire_->with([&](Wire& wire) { wire.control(encode(control), {}); });
}

void PipeMeeting::fail(Status status) {
  if (auto met = end(nullptr)) met(std::move(status));
}

void PipeMeeting::close() { (void)end(nullptr); }

PipeMeeting::Met PipeMeeting::end(const Pipe& kept) {
  std::vector<Pipe> left;
  std::shared_ptr<tensorpipe::Listener> listener;
  Met met;
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(ended_, true)) return {};
    left.swap(pipes_);
    listener.swap(listener_);
    std::swap(met, met_);
  }
  for (const auto& pipe : left) {
    if (pipe != kept) pipe->close();
  }
  if (listener) listener->close();
  return met;
}

}  // namespace tensorferry::tp

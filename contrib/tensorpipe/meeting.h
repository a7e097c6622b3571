/// Handshake that gives the two ends of a channel a pipe that each knows to lead to the other.
#pragma once

#include <tensorpipe/tensorpipe.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/function.h"
#include "base/status.h"
#include "channels/wire_use.h"
#include "contrib/tensorpipe/messages.h"
#include "include/tensorferry/device.h"

namespace tensorferry::tp {

/// Sets up the pipe for one end of a channel:
/// - Each end sends a hello on the link, with a secret.
/// - The end with the greater secret listens on a port that the system chooses, and sends the address. The other end
///   dials.
/// - Each end's first message on the pipe is the other end's secret. A port is open to every user of the host, so
///   neither end trusts the other before that.
///
/// The listener is closed as soon as the two have met. Until then a stranger's pipe that sends nothing stays open,
/// without an answer; at most 64 do. One that sends another message is closed.
///
/// Threads: any. `met` runs once, on any thread with no lock held; not after close().
class PipeMeeting final : public std::enable_shared_from_this<PipeMeeting> {
 public:
  using Pipe = std::shared_ptr<tensorpipe::Pipe>;
  using Met = UniqueFunction<void(Result<Pipe>)>;

  /// `loopback`: ends on one host meet at a loopback address. False, for tests: they meet as if on two hosts.
  PipeMeeting(std::shared_ptr<WireUse> wire, DeviceType type, std::string peer, bool loopback, Met met);

  void begin();
  void hear(const PipeHello& hello);
  void hear(const Listening& listening);
  void close();

 private:
  using Error = tensorpipe::Error;
  using Descriptor = tensorpipe::Descriptor;

  void listen(bool same_host);
  void accept_next();
  void accepted(Pipe pipe);
  void dial(const std::string& address);
  void finish_with(const Pipe& pipe);
  /// Reads the first message and passes it to `then`; passes null if it does not have the form of a handshake.
  void read_handshake(const Pipe& pipe, UniqueFunction<void(const Error&, const Pipe&, const Descriptor*)> then);
  void send_handshake(const Pipe& pipe, const Secret& secret);
  void send(const Control& control);
  void fail(Status status);
  /// Ends the meeting: closes the listener and all pipes except `kept`. Returns `met_`; returns an empty function if
  /// the meeting had ended before.
  Met end(const Pipe& kept);

  const std::shared_ptr<WireUse> wire_;
  const DeviceType type_;
  const std::string peer_;
  const bool loopback_;
  const Secret mine_;

  std::mutex mutex_;
  bool ended_ = false;
  bool heard_hello_ = false, heard_address_ = false;
  Secret theirs_{};
  Met met_;
  std::shared_ptr<tensorpipe::Listener> listener_;
  std::vector<Pipe> pipes_;  // that have not proved themselves yet
};

}  // namespace tensorferry::tp

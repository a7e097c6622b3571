/// How the two ends of a channel come by a pipe that each knows to lead to the other.
#pragma once

#include <tensorpipe/tensorpipe.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "channels/function.h"
#include "channels/status.h"
#include "channels/tensorpipe/messages.h"
#include "channels/wire_use.h"
#include "include/tensorferry/device.h"

namespace tensorferry::tp {

/// Each end says hello by the link, with a secret. The end with the greater secret listens on a port of the system's
/// choosing and tells the address; the other one dials. The first message of either on the pipe is the other's secret:
/// a port is open to every user of the host, so neither believes who is there. The listener is closed as soon as the
/// two have met; until then strangers may dial and are left standing.
///
/// Threads: any. `met` runs once, on any thread with no lock held; not after close().
class Meeting final : public std::enable_shared_from_this<Meeting> {
 public:
  using Pipe = std::shared_ptr<tensorpipe::Pipe>;
  using Met = UniqueFunction<void(Result<Pipe>)>;

  /// `loopback`: ends on one host meet at a loopback address. False, for tests: as if they were on two.
  Meeting(std::shared_ptr<WireUse> wire, DeviceType type, std::string peer, bool loopback, Met met);

  void begin();
  void hear(const Hello& hello);
  void hear(const Listening& listening);
  void close();

 private:
  using Error = tensorpipe::Error;
  using Descriptor = tensorpipe::Descriptor;

  void listen(bool same_host);
  void accept_next();
  void accepted(Pipe pipe);
  void dial(const std::string& address);
  void greeted(const Pipe& pipe);
  /// Reads the first message; `then` gets it, or nothing where it is none of a greeting's form.
  void read_greeting(const Pipe& pipe, UniqueFunction<void(const Error&, const Pipe&, const Descriptor*)> then);
  void say(const Pipe& pipe, const Secret& secret);
  void send(const Control& control);
  void fail(Status status);
  /// Ends the meeting: closes what is left over but `kept`. What `met_` was; empty where it has run, or may not.
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
  std::vector<Pipe> pipes_;  // that have proved nothing yet
};

}  // namespace tensorferry::tp

/// The bulk connections of one link: those that this side writes, and those that it reads.
///
/// A link has one bulk connection in a direction at first. If buffers wait although all connections are being written,
/// the sender makes another one, up to `most`: one TCP connection is bound by one window, and by one thread at each
/// end. A buffer goes on one connection, whole. Buffers that wait belong to the link, so the next connection that is
/// free takes the one that has waited longest.
///
/// If the two hosts have several networks in common, the connections are spread over them. A large buffer then goes as
/// several buffers (splits()), of which a slower network takes fewer.
///
/// Threads: none of its own; the mutex of Connections guards it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "agent/transport/frame_stream.h"

namespace tensorferry {

class BulkStreams final {
 public:
  using Stream = std::shared_ptr<FrameStream>;

  /// The bound for one direction. A receiver accepts so many if it says feature::several_bulk.
  static constexpr std::size_t most = 4;
  /// A buffer below this size is written before another connection could be made.
  static constexpr std::size_t worth_another = std::size_t{1} << 20;

  /// SO_SNDBUF of a unix socket that this side writes. With the kernel's default of 208 KiB, the reader empties the
  /// socket before the writer runs again; more than 1 MiB does not stay in a CPU's cache.
  static constexpr int unix_send_buffer = 1 << 20;

  std::vector<Stream> out, in;
  std::vector<Stream> held;   // of `in`: their next buffer has no destination yet
  std::uint64_t resumes = 0;  // destinations registered so far for bulk bytes

  /// Says how many connections this side may make: the peer takes several (`several`), by unix socket or not (`local`).
  /// On one host the two ends share the CPUs, and a connection keeps one busy at each end.
  void allow(bool several, bool local) {
    const std::size_t cpus = std::max(1U, std::thread::hardware_concurrency());
    most_out_ = !several ? 1 : local ? std::clamp<std::size_t>(cpus / 2, 2, most) : most;
  }
  /// Makes no more connections than there are.
  void allow_no_more() { most_out_ = out.size(); }
  /// Returns whether another connection may help, if a buffer of `bytes` bytes waits.
  [[nodiscard]] bool wants_another(std::size_t bytes) const {
    return bytes >= worth_another && !out.empty() && out.size() < most_out_;
  }

  /// The peer puts buffers together from pieces, and further connections go over other networks if they can.
  void spread() noexcept { spread_ = true; }
  /// Two connections of `out` go over different networks.
  void over_several_networks() noexcept { several_networks_ = true; }
  /// Returns whether a large buffer should go in pieces. The first one does, because the connections are made when
  /// buffers wait. It ends if no further connection can be made and all go over one network.
  [[nodiscard]] bool splits() const noexcept { return spread_ && (several_networks_ || out.size() < most_out_); }

  /// Adds a connection that this side writes. The caller has it, as after take_idle().
  void add_out(const Stream& stream) {
    out.push_back(stream);
    taken_.push_back(stream.get());
  }
  /// Returns a connection that no thread writes, for the caller alone until give_back(); null: there is none.
  Stream take_idle() {
    for (const auto& stream : out) {
      if (std::find(taken_.begin(), taken_.end(), stream.get()) != taken_.end()) continue;
      taken_.push_back(stream.get());
      return stream;
    }
    return nullptr;
  }
  void give_back(const FrameStream* stream) { std::erase(taken_, stream); }

 private:
  std::vector<const FrameStream*> taken_;  // of `out`
  std::size_t most_out_ = 1;
  bool spread_ = false, several_networks_ = false;
};

}  // namespace tensorferry

/// What one end of a cuda_gdr channel does: sends sources, reads them by the cards, and probes the way between the
/// GPUs.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "channels/cuda_basic/busy_transfers.h"
#include "channels/cuda_gdr/flush.h"
#include "channels/cuda_gdr/gpu_cards.h"
#include "channels/cuda_gdr/messages.h"
#include "channels/cuda_gdr/probe_page.h"
#include "channels/host_memory.h"
#include "channels/ibv/fetch.h"
#include "channels/later_tickets.h"
#include "channels/offers.h"
#include "channels/rdma/shared_connection.h"
#include "channels/resends.h"
#include "channels/wire_use.h"

namespace tensorferry::cuda_gdr {

/// One pull, until the card reads.
struct Pull {
  ibv::KeyedSource source;
  cuda_basic::Transfer transfer;  // into this end's memory; null data: the buffer is dropped

  void finish(const Status& status) { transfer.finish(status); }
};

/// One read by a card. `registration` and `flush` are set when it begins.
struct GpuRead {
  std::shared_ptr<rdma::LocalCards> local;
  std::vector<ibv::CardFetch::Way> ways;
  std::shared_ptr<rdma::Registration> registration;
  std::shared_ptr<Flush> flush;
  Status why{Code::agent_closed, "the agent was closed before it began"};  // why it could not begin
};

/// The part of a channel that outlives it, because the work of cards and GPUs refers to it. Thread-safe.
struct GdrEnd final : std::enable_shared_from_this<GdrEnd> {
  GdrEnd(Wire& w, int d, GpuCards& c)
      : wire(w), peer(w.peer()), device(d), cards(c), shared(rdma::SharedConnection::of(w, c.cards())) {}

  Status ended() {
    const std::lock_guard lock(mutex);
    return end;
  }

  // --- as the sender
  void source_reached(std::uint64_t offer, const Status& status);
  void send_again(const Resend& resend);

  // --- as the receiver
  void start(Pull pull);
  void read(Pull pull);
  bool begin(GpuRead& reading, const std::shared_ptr<ibv::CardFetch>& fetch, GpuCards::Unregistered unregistered);
  void ask_again(std::uint64_t offer, const Status& why, cuda_basic::Transfer transfer);
  /// Returns the lanes for a ticket's keys that are nearest to the GPU.
  std::vector<ibv::CardFetch::Way> ways_to(const ibv::KeyedSource& source, std::uint64_t bytes);

  // --- the probe
  void changed(const Status& status);
  void offer_probe_at(std::chrono::steady_clock::time_point at, std::chrono::seconds retry = first_retry);
  void offer_probe(std::chrono::seconds retry);
  void probe();
  void probed(Status status);

  static constexpr std::chrono::seconds first_retry{1};  // of a probe

  WireUse wire;
  const std::string peer;
  const int device;
  GpuCards& cards;  // for uses of `wire` alone, because the driver outlives the channel, and not this
  const std::shared_ptr<rdma::SharedConnection> shared;
  const std::shared_ptr<Offers> offers = std::make_shared<Offers>();
  Resends resends{offers};
  const std::shared_ptr<cuda_basic::BusyTransfers> busy =
      std::make_shared<cuda_basic::BusyTransfers>();  // pulls into busy memory
  LaterTickets<Pull, SourceReady> later;
  HostMemory host_memory{{.idle_bytes = 0, .floor_bytes = 0}};

  Mutex mutex;  // guards the members below
  Status end;
  std::set<std::uint64_t> unreached;  // offers whose streams have not reached them
  Status connected{Code::channel_unavailable, "its probe is under way"};
  /// The probe: whether a card reads the peer's GPU.
  struct Probing {
    std::optional<GpuProbe> asked;    // what the peer shows
    std::shared_ptr<ProbePage> page;  // what this end shows
    enum class State : std::uint8_t { untried, running, passed, failed } state = State::untried;
    int failures = 0;
    Status failure;  // the last one
  };
  Probing probing;
};

}  // namespace tensorferry::cuda_gdr

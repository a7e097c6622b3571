#include "channels/ibv/card_transfers.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "base/text.h"
#include "channels/completion.h"
#include "channels/ibv/messages.h"
#include "channels/joined_ends.h"
#include "channels/rdma/local_cards.h"

namespace tensorferry::ibv {
namespace {

using rdma::Access;
using rdma::LocalCards;
using rdma::QueuePair;

constexpr std::size_t copied_bytes = std::size_t{64} << 10;  // up to here a copy costs less than a registration
constexpr std::uint64_t most_step = std::uint64_t{1} << 20;  // so that several lanes share a large run
constexpr std::size_t line = 64;                             // the words of two lanes share none

Status unavailable(std::string why) { return {Code::channel_unavailable, std::move(why)}; }

struct ExposedToCards final : ExposedMemory {
  [[nodiscard]] Flush flush() const override { return flushed_by; }

  std::shared_ptr<LocalCards> local;
  std::shared_ptr<rdma::Registration> registration;
  std::vector<std::size_t> written_through;  // the ports of all links by which peers may write a device's memory
  Flush flushed_by;
};

/// One lane of a transfer, with its keys.
struct CardLane {
  std::shared_ptr<QueuePair> pair;
  std::size_t card = 0;
  std::size_t port = 0;     // of this end
  std::uint32_t there = 0;  // the key of the peer's memory
  std::uint32_t word = 0;
  std::vector<QueuePair::Step> steps{};
};

/// A transfer under way. The steps' completions hold it.
class RunningTransfer final : public std::enable_shared_from_this<RunningTransfer> {
 public:
  RunningTransfer(OneSided::Transfer transfer, Completion done, std::size_t lanes)
      : transfer_(std::move(transfer)), done_(std::move(done)), lanes_(lanes), ends_(lanes) {}

  OneSided::Transfer& transfer() noexcept { return transfer_; }
  /// Where the steps copy from or to: the caller's memory, or staging memory.
  std::byte* memory = nullptr;
  std::shared_ptr<rdma::Registration> registration;
  rdma::StagingArea::Piece staging, words;
  ExposedMemory::Flush flush;  // of what is read into a device's memory

  void lane_done(const Status& status) {
    auto outcome = ends_.one_ended(status);
    if (!outcome) return;
    for (std::size_t lane = 0; outcome->ok() && lane < lanes_; ++lane) *outcome = look(lane);
    if (!flush) return end(*std::move(outcome));
    // After an error too: what the cards have written before must not come over what is written there next.
    flush([self = shared_from_this(), ended = *std::move(outcome)](const Status& flushed) {
      self->end(ended.ok() ? flushed : ended);
    });
  }
  /// Returns NotFound unless the word that a lane has read is the expected one.
  [[nodiscard]] Status look(std::size_t lane) const {
    std::uint64_t word = 0;
    std::memcpy(&word, words.data + lane * line, sizeof word);
    return word == transfer_.expected ? Status() : Status(Code::not_found, "the memory was withdrawn");
  }
  void end(Status outcome) {
    if (outcome.ok() && staging.data != nullptr && !transfer_.writes) {
      std::memcpy(transfer_.here.data, staging.data, transfer_.here.bytes);
    }
    registration.reset();  // before the memory, whose owner it may outlive otherwise
    staging = words = {};
    transfer_.here = {};
    complete(std::move(done_), std::move(outcome));
  }

 private:
  OneSided::Transfer transfer_;
  Completion done_;
  const std::size_t lanes_;
  JoinedEnds ends_;
};

std::vector<CardLane> lanes_to(const KeyedMemory& there, const KeyedMemory& word,
                               const std::vector<rdma::PeerConnection::Lane>& lanes, const LocalCards& local) {
  std::vector<CardLane> out;
  const auto key_of = [](const KeyedMemory& memory, std::size_t port) {
    return std::ranges::find(memory.keys, port, [](const auto& each) { return std::size_t{each.port}; });
  };
  for (const auto& lane : lanes) {
    const auto key = key_of(there, lane.their_port);
    const auto second = key_of(word, lane.their_port);
    if (key == there.keys.end() || second == word.keys.end()) continue;
    out.push_back({lane.pair, local.ports[lane.my_port].card, lane.my_port, key->key, second->key});
  }
  return out;
}

std::vector<std::size_t> ports_of(const std::vector<CardLane>& ways) {
  std::vector<std::size_t> ports;
  for (const auto& way : ways) ports.push_back(way.port);
  return ports;
}

/// Returns whether all runs lie in memory of `bytes` bytes, and those here in the transfer's.
bool fits(const OneSided::Transfer& transfer, const KeyedMemory& there, const KeyedMemory& word) {
  const auto bytes = transfer.run_bytes;
  if (bytes > OneSided::most_run_bytes || bytes > there.bytes) return false;
  if (bytes != 0 && transfer.here.bytes / bytes != transfer.offsets.size()) return false;
  if (transfer.here.bytes != bytes * transfer.offsets.size()) return false;
  if (word.bytes < sizeof(std::uint64_t) || transfer.word_offset > word.bytes - sizeof(std::uint64_t)) return false;
  return std::ranges::all_of(transfer.offsets, [&](auto offset) { return offset <= there.bytes - bytes; });
}

/// Drops the ways through ports that are farther from the device than others.
void keep_nearest(std::vector<CardLane>& ways, DeviceMemory& device, const LocalCards& local) {
  const auto near = device.nearest(local, ports_of(ways));
  std::erase_if(ways, [&](const CardLane& way) { return std::ranges::find(near, way.port) == near.end(); });
}

/// Finds memory that the cards may use for the transfer's bytes, which are the host's or the device's.
Status prepare(RunningTransfer& running, const std::shared_ptr<LocalCards>& cards_here,
               const std::vector<std::size_t>& cards, const std::vector<CardLane>& ways, DeviceMemory* device) {
  auto& local = *cards_here;
  auto words = local.staging->take(ways.size() * line, cards);
  if (!words.ok()) return words.status();
  running.words = *std::move(words);
  const auto& here = running.transfer().here;
  running.memory = here.data;
  if (here.bytes == 0) return {};
  if (here.device != Device()) {
    auto reached = device->reach(local, here, cards);
    if (!reached.ok()) return reached.status();
    running.registration = *std::move(reached);
    if (running.transfer().writes) return {};
    auto flush = device->flush(cards_here, ports_of(ways));
    if (!flush.ok()) return flush.status();
    running.flush = *std::move(flush);
    return {};
  }
  running.registration = local.registrations->find(here.data, here.bytes, Access::lands, cards);
  if (running.registration == nullptr && here.bytes <= copied_bytes) {
    if (auto piece = local.staging->take(here.bytes, cards); piece.ok()) {
      running.staging = *std::move(piece);
      running.memory = running.staging.data;
      running.registration = running.staging.registration;
      if (running.transfer().writes) std::memcpy(running.memory, here.data, here.bytes);
      return {};
    }
  }
  if (running.registration != nullptr) return {};
  auto made = local.registrations->make(here.data, here.bytes, Access::lands, cards);
  if (!made.ok()) return made.status();
  running.registration = *std::move(made);
  return {};
}

/// Gives each lane its steps, and the read of the word at their end.
void plan(RunningTransfer& running, std::vector<CardLane>& lanes, std::uint64_t there, std::uint64_t word) {
  const auto& transfer = running.transfer();
  const auto& offsets = transfer.offsets;
  std::size_t turn = 0;
  std::uint64_t at = 0;
  for (std::size_t run = 0; run < offsets.size() && transfer.run_bytes != 0;) {
    auto end = run + 1;
    while (end < offsets.size() && offsets[end] == offsets[end - 1] + transfer.run_bytes) ++end;
    const auto bytes = (end - run) * transfer.run_bytes;
    for (std::uint64_t begin = 0; begin < bytes; begin += most_step) {
      auto& lane = lanes[turn++ % lanes.size()];
      lane.steps.push_back({{.to = running.memory + at + begin,
                             .local_key = running.registration->keys(lane.card).local,
                             .from = there + offsets[run] + begin,
                             .remote_key = lane.there,
                             .bytes = static_cast<std::uint32_t>(std::min(most_step, bytes - begin))},
                            transfer.writes});
    }
    at += bytes;
    run = end;
  }
  for (std::size_t i = 0; i < lanes.size(); ++i) {
    lanes[i].steps.push_back({{.to = running.words.data + i * line,
                               .local_key = running.words.registration->keys(lanes[i].card).local,
                               .from = word + transfer.word_offset,
                               .remote_key = lanes[i].word,
                               .bytes = sizeof(std::uint64_t)},
                              false,
                              true});
  }
}

}  // namespace

Status CardTransfers::check(const Buffer& memory) const {
  if (memory.device == Device() || (device_ != nullptr && memory.device == device_->device())) return {};
  return unavailable(formatted("these network cards do not reach memory on {}", text_of(memory.device)));
}

Result<Bytes> CardTransfers::expose(const Buffer& memory, ExposedRights rights,
                                    std::shared_ptr<ExposedMemory>& exposed) {
  const auto ports = connection_->ports();
  const auto local = connection_->cards();
  if (ports == nullptr || local == nullptr) return unavailable(connection_->why_down());
  if (auto reached = check(memory); !reached.ok()) return reached;
  if (memory.bytes == 0) return unavailable("there are no bytes to reach");
  const auto* known = dynamic_cast<ExposedToCards*>(exposed.get());
  if (known != nullptr && known->local != local) known = nullptr;
  const auto access = !rights.write ? Access::peers_read : rights.read ? Access::peers_use : Access::peers_write;
  const auto earlier = known != nullptr ? known->registration : nullptr;
  const bool on_device = memory.device != Device();
  const auto through = on_device ? device_->nearest(*local, *ports) : *ports;
  const auto cards = local->cards_of(through);
  auto made = on_device ? device_->expose(*local, memory, access, cards, earlier)
                        : local->registrations->make_apart(memory.data, memory.bytes, access, cards, earlier);
  if (!made.ok()) return made.status();
  auto fresh = std::make_shared<ExposedToCards>();
  fresh->local = local;
  fresh->registration = *made;
  if (on_device && rights.write) {
    auto& written = fresh->written_through;
    if (known != nullptr) written = known->written_through;
    for (const auto port : through) {
      if (std::ranges::find(written, port) == written.end()) written.push_back(port);
    }
    auto flush = device_->flush(local, written);
    if (!flush.ok()) return flush.status();
    fresh->flushed_by = *std::move(flush);
  }
  exposed = std::move(fresh);
  KeyedMemory out{reinterpret_cast<std::uintptr_t>(memory.data), memory.bytes, rights.write, {}};
  for (const auto port : through) {
    out.keys.push_back({static_cast<std::uint8_t>(port), (*made)->keys(local->ports[port].card).remote});
  }
  return encode(out);
}

void CardTransfers::transfer(Transfer transfer, Completion done) {
  const auto lanes = connection_->lanes();
  const auto local = connection_->cards();
  if (lanes == nullptr || local == nullptr) return complete(std::move(done), unavailable(connection_->why_down()));
  if (auto reached = check(transfer.here); !reached.ok()) return complete(std::move(done), std::move(reached));
  const auto there = decode<KeyedMemory>(transfer.there);
  const auto word = decode<KeyedMemory>(transfer.word);
  if (!there || !word || !fits(transfer, *there, *word)) {
    return complete(std::move(done), unavailable("the peer told of other memory than the transfer's"));
  }
  if (transfer.writes && !there->write) return complete(std::move(done), unavailable("the peer takes no writes"));
  auto ways = lanes_to(*there, *word, *lanes, *local);
  if (transfer.here.device != Device()) keep_nearest(ways, *device_, *local);
  if (ways.empty()) return complete(std::move(done), unavailable("no queue pair reaches it now"));
  if (ways.size() > 1 && transfer.here.bytes <= local->options.stripe_bytes) {
    std::swap(ways.front(),
              *std::ranges::min_element(ways, {}, [](const CardLane& lane) { return lane.pair->outstanding(); }));
    ways.resize(1);
  }
  const auto cards = local->cards_of(ports_of(ways));
  const auto running = std::make_shared<RunningTransfer>(std::move(transfer), std::move(done), ways.size());
  if (auto prepared = prepare(*running, local, cards, ways, device_.get()); !prepared.ok()) {
    return running->end(unavailable(std::string(prepared.what())));
  }
  plan(*running, ways, there->address, word->address);
  // A step that meets the key of withdrawn memory would fail the lane, so the word is read first.
  const auto pair = ways.front().pair;
  const auto first = ways.front().steps.back();
  pair->run({first}, [running, ways = std::move(ways)](Status status) mutable {
    if (status.ok()) status = running->look(0);
    if (!status.ok()) return running->end(std::move(status));
    for (auto& way : ways) {
      way.pair->run(std::move(way.steps), [running](const Status& ended) { running->lane_done(ended); });
    }
  });
}

}  // namespace tensorferry::ibv

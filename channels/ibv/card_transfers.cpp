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
  std::shared_ptr<LocalCards> local;
  std::shared_ptr<rdma::Registration> registration;
};

/// One lane of a transfer, with its keys.
struct CardLane {
  std::shared_ptr<QueuePair> pair;
  std::size_t card = 0;
  std::uint32_t there = 0;  // the key of the peer's memory
  std::uint32_t word = 0;
  std::vector<QueuePair::Step> steps{};
};

/// A transfer under way. The steps' completions hold it.
class RunningTransfer final {
 public:
  RunningTransfer(OneSided::Transfer transfer, Completion done, std::size_t lanes)
      : transfer_(std::move(transfer)), done_(std::move(done)), lanes_(lanes), ends_(lanes) {}

  OneSided::Transfer& transfer() noexcept { return transfer_; }
  /// Where the steps copy from or to: the caller's memory, or staging memory.
  std::byte* memory = nullptr;
  std::shared_ptr<rdma::Registration> registration;
  rdma::StagingArea::Piece staging, words;

  void lane_done(const Status& status) {
    auto outcome = ends_.one_ended(status);
    if (!outcome) return;
    for (std::size_t lane = 0; outcome->ok() && lane < lanes_; ++lane) *outcome = look(lane);
    end(*std::move(outcome));
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
    out.push_back({lane.pair, local.ports[lane.my_port].card, key->key, second->key});
  }
  return out;
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

/// Finds memory that the cards may use for the transfer's bytes.
Status prepare(RunningTransfer& running, const LocalCards& local, const std::vector<std::size_t>& cards,
               std::size_t lanes) {
  auto words = local.staging->take(lanes * line, cards);
  if (!words.ok()) return words.status();
  running.words = *std::move(words);
  const auto& here = running.transfer().here;
  running.memory = here.data;
  if (here.bytes == 0) return {};
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

Result<Bytes> CardTransfers::expose(const Buffer& memory, ExposedRights rights,
                                    std::shared_ptr<ExposedMemory>& exposed) {
  const auto ports = connection_->ports();
  const auto local = connection_->cards();
  if (ports == nullptr || local == nullptr) return unavailable(connection_->why_down());
  if (memory.device != Device()) return unavailable("ibv reaches memory of the host alone");
  if (memory.bytes == 0) return unavailable("there are no bytes to reach");
  auto* known = dynamic_cast<ExposedToCards*>(exposed.get());
  if (known != nullptr && known->local != local) known = nullptr;
  const auto access = !rights.write ? Access::peers_read : rights.read ? Access::peers_use : Access::peers_write;
  auto made = local->registrations->make_apart(memory.data, memory.bytes, access, local->cards_of(*ports),
                                               known != nullptr ? known->registration : nullptr);
  if (!made.ok()) return made.status();
  if (known == nullptr) {
    auto fresh = std::make_shared<ExposedToCards>();
    fresh->local = local;
    fresh->registration = *made;
    exposed = std::move(fresh);
  }
  KeyedMemory out{reinterpret_cast<std::uintptr_t>(memory.data), memory.bytes, rights.write, {}};
  for (const auto port : *ports) {
    out.keys.push_back({static_cast<std::uint8_t>(port), (*made)->keys(local->ports[port].card).remote});
  }
  return encode(out);
}

void CardTransfers::transfer(Transfer transfer, Completion done) {
  const auto lanes = connection_->lanes();
  const auto local = connection_->cards();
  if (lanes == nullptr || local == nullptr) return complete(std::move(done), unavailable(connection_->why_down()));
  const auto there = decode<KeyedMemory>(transfer.there);
  const auto word = decode<KeyedMemory>(transfer.word);
  if (!there || !word || !fits(transfer, *there, *word)) {
    return complete(std::move(done), unavailable("the peer told of other memory than the transfer's"));
  }
  if (transfer.writes && !there->write) return complete(std::move(done), unavailable("the peer takes no writes"));
  auto ways = lanes_to(*there, *word, *lanes, *local);
  if (ways.empty()) return complete(std::move(done), unavailable("no queue pair reaches it now"));
  if (ways.size() > 1 && transfer.here.bytes <= local->options.stripe_bytes) {
    std::swap(ways.front(),
              *std::ranges::min_element(ways, {}, [](const CardLane& lane) { return lane.pair->outstanding(); }));
    ways.resize(1);
  }
  std::vector<std::size_t> cards;
  for (const auto& way : ways) {
    if (std::ranges::find(cards, way.card) == cards.end()) cards.push_back(way.card);
  }
  const auto running = std::make_shared<RunningTransfer>(std::move(transfer), std::move(done), ways.size());
  if (auto prepared = prepare(*running, *local, cards, ways.size()); !prepared.ok()) {
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

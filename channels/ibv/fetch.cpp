#include "channels/ibv/fetch.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace tensorferry::ibv {

CardFetch::~CardFetch() {
  if (ended_) end({Code::agent_closed, "the agent was closed before a buffer was read"});
}

std::vector<CardFetch::Way> CardFetch::ways_to(const KeyedSource& source,
                                               const std::vector<rdma::PeerConnection::Lane>& lanes,
                                               const rdma::LocalCards& local) {
  std::vector<Way> ways;
  for (const auto& lane : lanes) {
    const auto key = std::find_if(source.keys.begin(), source.keys.end(),
                                  [&](const auto& each) { return each.port == lane.their_port; });
    if (key != source.keys.end()) ways.push_back({lane.pair, local.ports[lane.my_port].card, key->key, lane.my_port});
  }
  return ways;
}

void CardFetch::choose(std::vector<Way>& ways, std::uint64_t bytes, std::size_t stripe_bytes) {
  if (ways.size() < 2 || bytes > stripe_bytes) return;
  std::swap(ways.front(), *std::min_element(ways.begin(), ways.end(), [](const auto& one, const auto& other) {
              return one.pair->outstanding() < other.pair->outstanding();
            }));
  ways.resize(1);
}

void CardFetch::start(std::vector<Way> ways, std::shared_ptr<rdma::Registration> registration) {
  registration_ = std::move(registration);
  const auto most = piece_bytes(memory_.bytes);
  const auto pieces = (memory_.bytes + most - 1) / most;
  ends_.expect(pieces);
  const auto self = shared_from_this();  // the last piece may be done before the loop is
  for (std::size_t i = 0; i < pieces; ++i) {
    const auto& way = ways[i % ways.size()];
    const auto at = i * most;
    way.pair->read({.to = memory_.data + at,
                    .local_key = registration_->keys(way.card).local,
                    .from = source_.address + at,
                    .remote_key = way.remote_key,
                    .bytes = static_cast<std::uint32_t>(std::min(most, memory_.bytes - at))},
                   [self](const Status& status) { self->one_done(status); });
  }
}

void CardFetch::one_done(const Status& status) {
  if (auto outcome = ends_.one_ended(status)) end(*std::move(outcome));
}

void CardFetch::start_staged(Way way, rdma::StagingArea::Piece staging, std::size_t staging_bytes) {
  way_ = std::move(way);
  staging_ = std::move(staging);
  staging_bytes_ = staging_bytes;
  next_staged();
}

void CardFetch::next_staged() {
  const auto bytes = std::min(staging_bytes_, memory_.bytes - copied_);
  way_.pair->read({.to = staging_.data,
                   .local_key = staging_.registration->keys(way_.card).local,
                   .from = source_.address + copied_,
                   .remote_key = way_.remote_key,
                   .bytes = static_cast<std::uint32_t>(bytes)},
                  [self = shared_from_this(), bytes](const Status& status) {
                    if (!status.ok()) return self->end(status);
                    std::memcpy(self->memory_.data + self->copied_, self->staging_.data, bytes);
                    self->copied_ += bytes;
                    if (self->copied_ == self->memory_.bytes) return self->end({});
                    self->next_staged();
                  });
}

void CardFetch::end(Status status) {
  registration_.reset();  // before the memory, whose owner it may outlive otherwise
  staging_ = {};
  way_ = {};
  auto ended = std::move(ended_);
  ended_ = {};
  ended(std::move(status), std::move(memory_));
}

}  // namespace tensorferry::ibv

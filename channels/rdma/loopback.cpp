#include "channels/rdma/loopback.h"

#include <utility>

namespace tensorferry::rdma {

Result<std::shared_ptr<Loopback>> Loopback::make(LocalCards& cards, std::size_t port) {
  const auto& of = cards.ports[port];
  std::shared_ptr<Loopback> made(new Loopback(cards, of.card));
  auto registered = cards.registrations->make(&made->landing_->byte, sizeof(Landing), Access::lands, {of.card});
  if (!registered.ok()) return registered.status();
  made->registration_ = std::move(*registered);
  auto pair = QueuePair::make(cards.cards[of.card], of.port, cards.options, [](const Status&) {});
  if (!pair.ok()) return pair.status();
  made->pair_ = std::move(*pair);
  if (auto added = cards.completions->add(made->pair_); !added.ok()) return added;
  if (auto connected = made->pair_->connect(made->pair_->address()); !connected.ok()) return connected;
  return made;
}

Loopback::~Loopback() {
  if (pair_ == nullptr || born_in_ != forks()) return;
  pair_->fail({Code::channel_unavailable, "its use has ended"});
  cards_.completions->retire(pair_);
}

void Loopback::read(std::uint64_t address, std::uint32_t remote_key, Completion done) {
  pair_->read({.to = &landing_->byte,
               .local_key = registration_->keys(card_).local,
               .from = address,
               .remote_key = remote_key,
               .bytes = 1},
              [landing = landing_, registration = registration_, done = std::move(done)](const Status& status) mutable {
                registration.reset();
                done(status);
              });
}

}  // namespace tensorferry::rdma

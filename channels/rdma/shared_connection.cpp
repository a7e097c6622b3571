#include "channels/rdma/shared_connection.h"

#include "base/text.h"

namespace tensorferry::rdma {

std::shared_ptr<SharedConnection> SharedConnection::of(Wire& wire, SharedCards& cards) {
  const auto make = [&cards] {
    auto made = std::make_shared<SharedConnection>(cards);
    PeerConnection::Listener listener;
    listener.send = [weak = std::weak_ptr(made)](const Bytes& message) {
      if (const auto self = weak.lock()) self->send(message);
    };
    listener.changed = [weak = std::weak_ptr(made)](const Status& status) {
      if (const auto self = weak.lock()) self->changed(status);
    };
    made->connection_ = std::make_shared<PeerConnection>(cards.connecting(), std::move(listener));
    return made;
  };
  auto* const shared = wire.shared();
  return shared == nullptr ? make() : shared->find_or_make<SharedConnection>(&cards, make);
}

void SharedConnection::join(std::weak_ptr<WireUse> wire, Changed changed) {
  User user{std::move(wire), changed ? std::make_shared<Changed>(std::move(changed)) : nullptr};
  cards_.connecting().submit([weak = weak_from_this(), user = std::move(user)] {
    const auto self = weak.lock();
    if (self == nullptr) return;
    const bool first = self->users_.empty();
    self->users_.push_back(user);
    if (first) self->connection_->begin([&cards = self->cards_] { return cards.open(); });
    if (self->state_) user.tell(*self->state_);
  });
}

void SharedConnection::User::tell(const Status& status) const {
  const auto use = wire.lock();
  if (use == nullptr) return;
  use->with([&](Wire& to) { changed ? (*changed)(status) : to.ready(status); });
}

void SharedConnection::send(const Bytes& message) {
  for (const auto& user : users_) {
    const auto use = user.wire.lock();
    if (use && use->with([&](Wire& to) { to.control(message, {}); })) return;
  }
}

void SharedConnection::changed(const Status& status) {
  state_ = status;
  for (const auto& user : users_) user.tell(status);
}

std::string SharedConnection::describe() const {
  const auto lanes = connection_->lanes();
  const auto local = connection_->cards();
  if (lanes == nullptr || local == nullptr) return {};
  std::vector<std::string> ports;
  for (const auto& lane : *lanes) {
    const auto& port = local->ports[lane.my_port].port;
    auto text = formatted("{} port {}, {}", port.device, port.number, name_of(port.kind));
    if (port.gigabits > 0) text += formatted(", {} Gbit/s", static_cast<std::uint64_t>(port.gigabits));
    ports.push_back(std::move(text));
  }
  return joined(ports, "; ");
}

}  // namespace tensorferry::rdma

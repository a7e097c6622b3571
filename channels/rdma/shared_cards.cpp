#include "channels/rdma/shared_cards.h"

#include <string>

namespace tensorferry::rdma {

std::shared_ptr<SharedCards> SharedCards::of(SharedState& agent) {
  return agent.find_or_make<SharedCards>(nullptr, [] { return std::make_shared<SharedCards>(); });
}

std::variant<std::vector<CardPort>, Refusal> SharedCards::usable_ports() {
  const std::lock_guard lock(mutex_);
  if (ports_) return *ports_;
  auto wanted = options_ ? Result<Options>(*options_) : Options::from_environment();
  if (!wanted.ok()) {
    ports_ = Refusal{std::string(wanted.status().what())};
  } else {
    prescribed_ = *wanted;
    ports_ = rdma::usable_ports(prescribed_);
    if (auto* found = std::get_if<std::vector<CardPort>>(&*ports_); found != nullptr && found->size() > most_ports)
      found->resize(most_ports);
  }
  return *ports_;
}

Result<std::shared_ptr<LocalCards>> SharedCards::open() {
  const auto found = usable_ports();
  if (const auto* refusal = std::get_if<Refusal>(&found)) return Status(Code::channel_unavailable, refusal->reason);
  const std::lock_guard lock(mutex_);
  if (opened_.cards != nullptr) return opened_.cards;
  auto opened = LocalCards::open(std::get<std::vector<CardPort>>(found), prescribed_, staging_bytes_);
  if (opened.ok()) opened_.cards = *opened;
  return opened;
}

}  // namespace tensorferry::rdma

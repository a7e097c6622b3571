#include "channels/rdma/local_cards.h"

#include <algorithm>
#include <utility>

#include "base/text.h"

namespace tensorferry::rdma {

Result<std::shared_ptr<LocalCards>> LocalCards::open(const std::vector<CardPort>& ports, const Options& options,
                                                     std::size_t staging_bytes) {
  const auto* const library = verbs();
  if (library == nullptr) return Status(Code::channel_unavailable, why_missing());
  std::shared_ptr<LocalCards> local(new LocalCards);
  local->options = options;
  for (const auto& port : ports) {
    const auto known = std::find_if(local->cards.begin(), local->cards.end(),
                                    [&](const auto& card) { return card->name() == port.device; });
    const auto index = static_cast<std::size_t>(known - local->cards.begin());
    if (known == local->cards.end()) {
      auto opened = OpenCard::open(*library, port.device);
      if (!opened.ok()) return opened.status();
      local->cards.push_back(std::move(*opened));
    }
    local->ports.push_back({port, index});
  }
  local->budget = std::make_shared<PinnedBudget>(options.pinned_bytes);
  local->registrations = std::make_shared<Registrations>(local->cards, local->budget);
  Allocations::of_this_process().tell(local->registrations);
  local->staging = std::make_shared<StagingArea>(local->registrations, staging_bytes);
  local->completions = std::make_shared<CompletionThread>(local->cards);
  return local;
}

LocalCards::~LocalCards() {
  if (completions != nullptr) completions->end();
}

std::vector<std::size_t> LocalCards::cards_of(const std::vector<std::size_t>& port_indices) const {
  std::vector<std::size_t> found;
  for (const auto index : port_indices) {
    const auto card = ports[index].card;
    if (std::find(found.begin(), found.end(), card) == found.end()) found.push_back(card);
  }
  return found;
}

PortAddress address_of(const CardPort& port) { return {static_cast<std::uint8_t>(port.kind), port.gid}; }

bool can_reach(const PortAddress& one, const PortAddress& other) {
  if (one.kind != other.kind) return false;
  if (one.kind == static_cast<std::uint8_t>(GidKind::infiniband)) {
    constexpr std::size_t subnet = 8;  // bytes of the prefix
    return std::equal(one.gid.begin(), one.gid.begin() + subnet, other.gid.begin());
  }
  return is_ipv4(one.gid) == is_ipv4(other.gid) && routable(one.gid) == routable(other.gid);
}

Bytes descriptor_of(const std::vector<CardPort>& ports) {
  PortList list;
  for (const auto& port : ports) list.ports.push_back(address_of(port));
  return encode(list);
}

std::optional<Refusal> reaches(ByteView mine, ByteView theirs) {
  const auto ours = decode<PortList>(mine), others = decode<PortList>(theirs);
  if (!ours || !others) return Refusal{"its descriptor cannot be read, or is of another version"};
  for (const auto& port : ours->ports) {
    for (const auto& other : others->ports) {
      if (can_reach(port, other)) return std::nullopt;
    }
  }
  const auto text_of_ports = [](const std::vector<PortAddress>& ports) {
    std::vector<std::string> texts;
    for (const auto& port : ports)
      texts.push_back(formatted("{} {}", name_of(static_cast<GidKind>(port.kind)), text_of(port.gid)));
    return joined(texts, ", ");
  };
  return Refusal{formatted("no port here ({}) reaches one of the peer's ({})", text_of_ports(ours->ports),
                           text_of_ports(others->ports))};
}

std::vector<std::pair<std::size_t, std::size_t>> pair_ports(const std::vector<PortAddress>& one,
                                                            const std::vector<PortAddress>& other) {
  std::vector<std::pair<std::size_t, std::size_t>> pairs;
  std::vector<bool> taken(other.size());
  for (std::size_t mine = 0; mine < one.size(); ++mine) {
    for (std::size_t theirs = 0; theirs < other.size(); ++theirs) {
      if (taken[theirs] || !can_reach(one[mine], other[theirs])) continue;
      taken[theirs] = true;
      pairs.emplace_back(mine, theirs);
      break;
    }
  }
  return pairs;
}

}  // namespace tensorferry::rdma

#include "channels/rdma/peer_connection.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "base/host.h"
#include "base/text.h"

namespace tensorferry::rdma {

namespace {

constexpr std::chrono::milliseconds first_pause{50};
constexpr std::chrono::milliseconds longest_pause{30'000};
constexpr std::uint32_t last_attempt = std::numeric_limits<std::uint32_t>::max();
constexpr std::chrono::seconds stable_after{10};  // a connection that was up for so long begins with the first pause

std::chrono::milliseconds pause_after(int failures) {
  const auto doubled = first_pause * (std::int64_t{1} << std::min(failures, 16));
  return std::min<std::chrono::milliseconds>(doubled, longest_pause);
}

Status text_with(std::string_view what, const Status& why) {
  return {Code::channel_unavailable, formatted("{}: {}", what, why.what())};
}

}  // namespace

/// A page that the peer reads the answer to its challenge from, and into which this end reads the peer's.
class PeerConnection::ProbeWords final {
 public:
  static Result<std::shared_ptr<ProbeWords>> make(LocalCards& cards, const std::vector<std::size_t>& ports,
                                                  std::uint64_t answer) {
    auto words = std::make_shared<ProbeWords>();
    auto registered = cards.registrations->make(words->page_->data(), page, Access::offered, cards.cards_of(ports));
    if (!registered.ok()) return registered.status();
    words->registration_ = std::move(*registered);
    std::memcpy(words->page_->data(), &answer, sizeof answer);
    return words;
  }
  [[nodiscard]] std::uint64_t address() const { return reinterpret_cast<std::uintptr_t>(page_->data()); }
  [[nodiscard]] Registration::Keys keys(std::size_t card) const { return registration_->keys(card); }
  /// Returns where the word that port `port` reads lands.
  [[nodiscard]] std::byte* landing(std::size_t port) const { return page_->data() + line * (port + 1); }
  [[nodiscard]] std::uint64_t landed(std::size_t port) const {
    std::uint64_t word = 0;
    std::memcpy(&word, landing(port), sizeof word);
    return word;
  }

 private:
  static constexpr std::size_t page = 4096;
  static constexpr std::size_t line = 64;
  static_assert(line * (most_ports + 1) <= page);
  struct alignas(page) Page final {
    std::byte* data() { return bytes; }
    std::byte bytes[page] = {};  // NOLINT(modernize-avoid-c-arrays)
  };

  std::unique_ptr<Page> page_ = std::make_unique<Page>();
  std::shared_ptr<Registration> registration_;  // deregistered before the page is freed
};

/// One test of all queue pairs of an attempt.
struct PeerConnection::Probe {
  struct Read {
    Lane lane;
    Status status;
  };
  std::uint32_t attempt = 0;
  std::shared_ptr<ProbeWords> words;
  std::vector<Read> reads;
  std::atomic<std::size_t> left{0};
};

/// The background thread may end when the connection has been closed. So it is used under the lock that closes it.
template <class Job>
void PeerConnection::submit(Job job, Clock::time_point at) {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  background_.submit(
      [weak = weak_from_this(), job = std::move(job)]() mutable {
        const auto self = weak.lock();
        if (self != nullptr && !self->closed()) job(*self);
      },
      at);
}

bool PeerConnection::closed() const {
  const std::lock_guard lock(mutex_);
  return closed_;
}

void PeerConnection::begin(OpenCards open) {
  open_ = std::move(open);
  submit([](PeerConnection& self) {
    if (self.attempt_.number == 0) self.start(1, false);
  });
}

void PeerConnection::on(ConnectPorts message) {
  {
    const std::lock_guard lock(mutex_);
    inbox_.connect = std::move(message);
  }
  submit_handling();
}

void PeerConnection::on(PortsConnected message) {
  {
    const std::lock_guard lock(mutex_);
    inbox_.connected = std::move(message);
  }
  submit_handling();
}

void PeerConnection::on(const PortLost& message) {
  {
    const std::lock_guard lock(mutex_);
    inbox_.lost.at(message.port) = message.attempt;
  }
  submit_handling();
}

/// Queues one job at most, however many messages the peer sends.
void PeerConnection::submit_handling() {
  {
    const std::lock_guard lock(mutex_);
    if (closed_ || std::exchange(inbox_.queued, true)) return;
  }
  submit([](PeerConnection& self) { self.handle(); });
}

void PeerConnection::handle() {
  std::optional<ConnectPorts> offered;
  std::optional<PortsConnected> connected;
  std::vector<std::shared_ptr<QueuePair>> ended;
  {
    const std::lock_guard lock(mutex_);
    inbox_.queued = false;
    offered.swap(inbox_.connect);
    connected.swap(inbox_.connected);
    const auto is_lost = [&](const Lane& lane) {
      // A port that the peer offers again has no lane there.
      return inbox_.lost.at(lane.their_port) == lane.attempt ||
             (offered && offered->attempt > lane.attempt &&
              std::any_of(offered->ports.begin(), offered->ports.end(),
                          [&](const auto& port) { return port.index == lane.their_port; }));
    };
    for (const auto& pair : pairs_) {
      if (pair.connected && is_lost(pair.lane)) ended.push_back(pair.lane.pair);
    }
    if (lanes_ != nullptr) {
      for (const auto& lane : *lanes_) {
        if (is_lost(lane)) ended.push_back(lane.pair);
      }
    }
  }
  for (const auto& pair : ended) pair->fail({Code::channel_unavailable, "the peer's end of the queue pair has failed"});
  if (offered) {
    if (offered->attempt > attempt_.number) start(offered->attempt, true);
    if (offered->attempt == attempt_.number && !attempt_.joined) connect(*offered);
  }
  if (connected && connected->attempt == attempt_.number && attempt_.joined && !attempt_.probing) probe(*connected);
}

void PeerConnection::start(std::uint32_t attempt, bool follows) {
  std::vector<bool> taken(most_ports);
  {
    const std::lock_guard lock(mutex_);
    for (const auto& pair : std::exchange(pairs_, {})) leaving_.push_back(pair.lane);
    if (lanes_ != nullptr) {
      for (const auto& lane : *lanes_) taken[lane.my_port] = true;
    } else {
      why_down_ = "its queue pairs are being connected";
    }
    update_ports();
  }
  drop_leaving({Code::channel_unavailable, "the queue pairs are being connected anew"});
  attempt_ = {.number = attempt, .challenge = random_word(), .words = std::move(attempt_.words)};
  if (cards() == nullptr) {
    auto opened = open_();
    if (!opened.ok()) return attempt_failed(opened.status());
    const std::lock_guard lock(mutex_);
    cards_ = std::move(*opened);
  }

  const auto cards = this->cards();
  ConnectPorts offer{attempt_.number, attempt_.challenge, {}};
  Status why(Code::channel_unavailable, "no port is usable");
  std::vector<Lane> made;
  for (std::size_t i = 0; i < cards->ports.size() && i < most_ports; ++i) {
    if (taken[i]) continue;
    auto pair = make_pair(i, attempt);
    if (!pair.ok()) {
      why = pair.status();
      if (follows) retries_.missing.insert(i);  // the peer wants a lane, and this end has to say when its port is up
      continue;
    }
    const auto& address = (*pair)->address();
    offer.ports.push_back({static_cast<std::uint8_t>(i), address_of(cards->ports[i].port), address.lid, address.mtu,
                           address.number, address.first_packet});
    made.push_back({.my_port = i, .attempt = attempt, .pair = std::move(*pair)});
  }
  if (made.empty()) return attempt_failed(why);
  bool closed = false;
  {
    const std::lock_guard lock(mutex_);
    closed = closed_;
    for (const auto& lane : made) {
      if (!closed) pairs_.push_back({.lane = lane});
    }
  }
  if (closed) return drop(made, why);
  listener_.send(encode(offer));
}

Result<std::shared_ptr<QueuePair>> PeerConnection::make_pair(std::size_t port, std::uint32_t attempt) {
  const auto cards = this->cards();
  const auto& of = cards->ports[port];
  const auto& card = cards->cards[of.card];
  ibv_port_attr state{};
  if (const int error = query_port(card->verbs(), card->context(), of.port.number, state); error != 0)
    return status_of(error, formatted("querying {} port {}", card->name(), of.port.number));
  if (state.state != IBV_PORT_ACTIVE)
    return Status(Code::channel_unavailable, formatted("{} port {} is down", card->name(), of.port.number));
  auto now = of.port;
  now.lid = state.lid;
  now.mtu = state.active_mtu;
  auto made = QueuePair::make(card, now, cards->options, [weak = weak_from_this(), attempt, port](const Status& why) {
    if (const auto self = weak.lock()) self->lane_failed(attempt, port, why);
  });
  if (!made.ok()) return made;
  if (auto added = cards->completions->add(*made); !added.ok()) return added;
  return made;
}

void PeerConnection::connect(const ConnectPorts& theirs) {
  std::vector<Pair> pairs;
  {
    const std::lock_guard lock(mutex_);
    pairs = pairs_;
  }
  if (pairs.empty()) return;  // this end has failed in this attempt; it begins another
  const auto cards = this->cards();
  std::vector<PortAddress> here, there;
  for (const auto& pair : pairs) here.push_back(address_of(cards->ports[pair.lane.my_port].port));
  for (const auto& port : theirs.ports) there.push_back(port.port);
  const bool first = attempt_.challenge < theirs.challenge;
  PortsConnected answer{attempt_.number, 0, {}};
  std::vector<std::size_t> ports;
  Status why(Code::channel_unavailable, "no active port of this host can reach one of the peer's");
  for (const auto& [one, other] : first ? pair_ports(here, there) : pair_ports(there, here)) {
    auto& mine = pairs[first ? one : other];
    const auto& peer = theirs.ports[first ? other : one];
    auto connected = mine.lane.pair->connect({peer.port.gid, peer.lid, peer.mtu, peer.queue_pair, peer.first_packet});
    mine.connected = connected.ok();
    mine.lane.their_port = peer.index;
    if (!connected.ok()) {
      why = connected;
      continue;
    }
    ports.push_back(mine.lane.my_port);
  }
  if (ports.empty()) return attempt_failed(why);
  auto words = ProbeWords::make(*cards, ports, ~theirs.challenge);
  if (!words.ok()) return attempt_failed(words.status());
  attempt_.words = std::move(*words);
  answer.address = attempt_.words->address();
  for (const auto port : ports)
    answer.keys.push_back({static_cast<std::uint8_t>(port), attempt_.words->keys(cards->ports[port].card).remote});
  {
    const std::lock_guard lock(mutex_);
    if (closed_ || pairs_.empty()) return;
    pairs_ = std::move(pairs);
    update_ports();  // before the peer can have the answer: a peer that is ready gets no refusal
  }
  attempt_.joined = true;
  listener_.send(encode(answer));
}

void PeerConnection::probe(const PortsConnected& theirs) {
  attempt_.probing = true;
  const auto cards = this->cards();
  const auto probe = std::make_shared<Probe>();
  probe->attempt = attempt_.number;
  probe->words = attempt_.words;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& pair : pairs_) {
      if (pair.connected)
        probe->reads.push_back({pair.lane, Status(Code::channel_unavailable, "the peer has no key for its port")});
    }
  }
  probe->left = probe->reads.size() + 1;
  const auto one_done = [weak = weak_from_this(), probe] {
    if (probe->left.fetch_sub(1) != 1) return;
    if (const auto self = weak.lock()) self->submit([probe](PeerConnection& each) { each.probed(*probe); });
  };
  for (auto& read : probe->reads) {
    const auto key = std::find_if(theirs.keys.begin(), theirs.keys.end(),
                                  [&](const auto& each) { return each.port == read.lane.their_port; });
    if (key == theirs.keys.end()) {
      one_done();
      continue;
    }
    const auto port = read.lane.my_port;
    read.lane.pair->read({.to = attempt_.words->landing(port),
                          .local_key = attempt_.words->keys(cards->ports[port].card).local,
                          .from = theirs.address,
                          .remote_key = key->key,
                          .bytes = sizeof(std::uint64_t)},
                         [&read, probe, one_done](const Status& status) {
                           read.status = status;
                           one_done();
                         });
  }
  one_done();
}

void PeerConnection::probed(const Probe& probe) {
  if (probe.attempt != attempt_.number || attempt_.over) return;
  attempt_.over = true;
  std::vector<Lane> fresh, unused;
  Status why(Code::channel_unavailable, "the peer's memory does not hold the word of the probe");
  for (const auto& read : probe.reads) {
    const bool right = read.status.ok() && probe.words->landed(read.lane.my_port) == ~attempt_.challenge;
    (right ? fresh : unused).push_back(read.lane);
    if (!read.status.ok()) why = read.status;
  }
  for (const auto& lane : unused) tell_lost(lane);
  if (fresh.empty()) return attempt_failed(why);
  bool first = false;
  {
    const std::lock_guard lock(mutex_);
    if (closed_ || pairs_.empty()) return;
    leaving_ = std::move(unused);
    for (const auto& pair : std::exchange(pairs_, {})) {
      if (!pair.connected) leaving_.push_back(pair.lane);
    }
    first = lanes_ == nullptr;
    auto lanes = first ? std::vector<Lane>() : *lanes_;
    lanes.insert(lanes.end(), fresh.begin(), fresh.end());
    lanes_ = std::make_shared<const std::vector<Lane>>(std::move(lanes));
    update_ports();
    why_down_.clear();
  }
  drop_leaving(why);
  for (const auto& lane : fresh) retries_.missing.erase(lane.my_port);
  if (first) listener_.changed({});
  if (retries_.missing.empty()) {
    retries_.up_since = Clock::now();
  } else {
    begin_later();
  }
  for (const auto& lane : fresh) {
    if (lane.pair->failed())
      lane_failed(lane.attempt, lane.my_port, {Code::channel_unavailable, "a queue pair failed after its probe"});
  }
}

/// Runs on the thread that notices. Of a queue pair that is not a lane yet, the probe learns.
void PeerConnection::lane_failed(std::uint32_t attempt, std::size_t my_port, const Status& why) {
  Lane failed;
  {
    const std::lock_guard lock(mutex_);
    if (closed_ || lanes_ == nullptr) return;
    auto lanes = *lanes_;
    const auto found = std::find_if(lanes.begin(), lanes.end(), [&](const auto& lane) {
      return lane.my_port == my_port && lane.attempt == attempt;
    });
    if (found == lanes.end()) return;
    failed = *found;
    lanes.erase(found);
    lanes_ = lanes.empty() ? nullptr : std::make_shared<const std::vector<Lane>>(std::move(lanes));
    update_ports();  // at once: no offer and no read by this lane any more
    if (lanes_ == nullptr) why_down_ = std::string(why.what());
  }
  drop({failed}, why);
  submit([failed = std::move(failed), why](PeerConnection& self) { self.lost(failed, why); });
}

void PeerConnection::lost(const Lane& lane, const Status& why) {
  tell_lost(lane);
  retries_.missing.insert(lane.my_port);
  if (lanes() == nullptr) listener_.changed(text_with("the connection by RDMA failed and is being made anew", why));
  begin_later();
}

void PeerConnection::tell_lost(const Lane& lane) {
  listener_.send(encode(PortLost{lane.attempt, static_cast<std::uint8_t>(lane.my_port)}));
}

void PeerConnection::attempt_failed(const Status& why) {
  bool is_up = false;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& pair : std::exchange(pairs_, {})) leaving_.push_back(pair.lane);
    update_ports();
    is_up = lanes_ != nullptr;
    if (!is_up) why_down_ = std::string(why.what());
  }
  drop_leaving(why);
  attempt_.joined = true;  // a message of this attempt that comes late changes nothing
  attempt_.probing = attempt_.over = true;
  if (!is_up) listener_.changed(why);
  if (!is_up || !retries_.missing.empty()) begin_later();
}

/// Begins the next attempt after a pause, unless by then another one has begun, the peer takes part in this one, or
/// nothing is missing.
void PeerConnection::begin_later() {
  const auto now = Clock::now();
  if (retries_.up_since != Clock::time_point() && now - retries_.up_since >= stable_after) retries_.failures = 0;
  retries_.up_since = {};
  submit(
      [attempt = attempt_.number](PeerConnection& self) {
        if (self.attempt_.number != attempt || attempt == last_attempt || (self.attempt_.joined && !self.attempt_.over))
          return;
        if (self.lanes() == nullptr || !self.retries_.missing.empty()) self.start(attempt + 1, false);
      },
      now + pause_after(retries_.failures++));
}

/// Call under the lock.
void PeerConnection::update_ports() {
  std::vector<std::size_t> ports;
  if (lanes_ != nullptr) {
    for (const auto& lane : *lanes_) ports.push_back(lane.my_port);
  } else {
    for (const auto& pair : pairs_) {
      if (pair.connected) ports.push_back(pair.lane.my_port);
    }
  }
  ports_ = closed_ || ports.empty() ? nullptr : std::make_shared<const std::vector<std::size_t>>(std::move(ports));
}

void PeerConnection::drop(const std::vector<Lane>& lanes, const Status& why) noexcept {
  if (lanes.empty()) return;
  const auto cards = this->cards();
  for (const auto& lane : lanes) {
    lane.pair->fail(why);
    cards->completions->retire(lane.pair);
  }
}

void PeerConnection::drop_leaving(const Status& why) {
  std::vector<Lane> lanes;
  {
    const std::lock_guard lock(mutex_);
    lanes = leaving_;
  }
  drop(lanes, why);
  const std::lock_guard lock(mutex_);
  leaving_.clear();
}

PeerConnection::Lanes PeerConnection::lanes() const {
  const std::lock_guard lock(mutex_);
  return lanes_;
}

PeerConnection::Ports PeerConnection::ports() const {
  const std::lock_guard lock(mutex_);
  return ports_;
}

bool PeerConnection::awaits() const {
  const auto lanes = this->lanes();
  return lanes != nullptr &&
         std::any_of(lanes->begin(), lanes->end(), [](const auto& lane) { return lane.pair->awaits(); });
}

void PeerConnection::poll() {
  const auto lanes = this->lanes();
  if (lanes == nullptr) return;
  for (const auto& lane : *lanes) {
    if (lane.pair->awaits()) (void)lane.pair->poll();
  }
}

std::string PeerConnection::why_down() const {
  const std::lock_guard lock(mutex_);
  return why_down_;
}

std::shared_ptr<LocalCards> PeerConnection::cards() const {
  const std::lock_guard lock(mutex_);
  return cards_;
}

void PeerConnection::close() noexcept {
  if (born_in_ != forks()) return;
  std::vector<Lane> dropped;
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(closed_, true)) return;
    dropped = leaving_;
    if (lanes_ != nullptr) dropped.insert(dropped.end(), lanes_->begin(), lanes_->end());
    for (const auto& pair : std::exchange(pairs_, {})) dropped.push_back(pair.lane);
    lanes_.reset();
    ports_.reset();
    why_down_ = "the link has ended";
  }
  drop(dropped, {Code::channel_unavailable, "the link has ended"});
}

}  // namespace tensorferry::rdma

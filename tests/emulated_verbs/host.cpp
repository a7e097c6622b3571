#include "tests/emulated_verbs/host.h"

#include <pthread.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <thread>

#include "tests/emulated_verbs/queue_pair.h"

namespace tensorferry::emulated_verbs {
namespace {

constexpr std::uint32_t number_bits = 12;  // of a queue pair within its process
constexpr std::uint32_t processes = 1U << (24 - number_bits);
constexpr std::size_t most_pairs = 2048;

Host* host = nullptr;

socklen_t name_socket(std::uint32_t process, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  const int length = std::snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "emulated-verbs.%u.%u",
                                   static_cast<unsigned>(::getuid()), process);
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<std::size_t>(length));
}

const char* or_default(const char* variable, const char* value) {
  const char* const found = std::getenv(variable);
  return found == nullptr ? value : found;
}

}  // namespace

ibv_gid Card::gid(int number, int row) const {
  ibv_gid gid{};
  auto* const raw = gid.raw;
  if (row < 2) {
    raw[0] = 0xfe;
    raw[1] = 0x80;
    raw[8] = 0x02;
    raw[14] = static_cast<std::uint8_t>(index);
  } else {
    raw[10] = raw[11] = 0xff;
    raw[12] = 10;
    raw[13] = 99;
    raw[14] = static_cast<std::uint8_t>(index);
  }
  raw[15] = static_cast<std::uint8_t>(number);
  return gid;
}

std::optional<AsyncEvent> Context::take_event() {
  // A thread that destroys the object sees the event either in the queue or as open.
  const auto noted = [this](const AsyncEvent& event) {
    const std::lock_guard lock(lock_);
    open_.insert(event.object);
  };
  return events.take(noted);
}

void Context::acknowledge(const void* object) {
  const std::lock_guard lock(lock_);
  open_.extract(object);
  acknowledged_.notify_all();
}

void Context::forget(const void* object) {
  events.remove([&](const AsyncEvent& event) { return event.object == object; });
  std::unique_lock lock(lock_);
  acknowledged_.wait(lock, [&] { return !open_.contains(object); });
}

Host& Host::get() {
  static std::once_flag once;
  std::call_once(once, [] {
    host = new Host;  // NOLINT: its threads run until the process ends
    ::pthread_atfork([] { host->mutex_.lock(); }, [] { host->mutex_.unlock(); }, [] { host->forget_parent(); });
  });
  return *host;
}

Host::Host() {
  const int count = std::clamp(std::atoi(or_default("EMULATED_VERBS_CARDS", "2")), 0, 4);
  const std::string_view down = or_default("EMULATED_VERBS_DOWN", "");
  for (int at = 0; at < count; ++at) {
    auto card = std::make_unique<Card>();
    card->index = at;
    card->ports = at == 2 ? 2 : 1;  // the third card has two
    card->node_type = IBV_NODE_CA;
    card->transport_type = IBV_TRANSPORT_IB;
    std::snprintf(card->name, sizeof card->name, "emu%d", at);
    std::snprintf(card->dev_name, sizeof card->dev_name, "uverbs%d", at);
    std::snprintf(card->ibdev_path, sizeof card->ibdev_path, "%s/class/infiniband/%s", EMULATED_VERBS_SYSFS,
                  card->name);
    for (int port = 0; port < card->ports; ++port) {
      const auto name = std::string(card->name) + ":" + std::to_string(port + 1);
      card->port[static_cast<std::size_t>(port)].up = down.find(name) == std::string_view::npos;
    }
    cards_.push_back(std::move(card));
  }
}

std::vector<Card*> Host::cards() {
  std::vector<Card*> all;
  for (const auto& card : cards_) all.push_back(card.get());
  return all;
}

void Host::add(Context* context) {
  const std::lock_guard lock(mutex_);
  contexts_.insert(context);
}

void Host::remove(Context* context) {
  const std::lock_guard lock(mutex_);
  contexts_.erase(context);
}

bool Host::set_port(const std::string& device, int port, bool up) {
  const std::lock_guard lock(mutex_);
  for (const auto& card : cards_) {
    if (device != card->name || port < 1 || port > card->ports) continue;
    if (card->port[static_cast<std::size_t>(port - 1)].up.exchange(up) == up) return true;
    for (auto* const context : contexts_) {
      if (context->device != card.get()) continue;
      context->events.push({up ? IBV_EVENT_PORT_ACTIVE : IBV_EVENT_PORT_ERR, nullptr, port});
    }
    return true;
  }
  return false;
}

bool Host::add(const std::shared_ptr<QueuePair>& pair) {
  const std::lock_guard lock(mutex_);
  if (pairs_.size() >= most_pairs) return false;
  if (listener_ < 0) listen();
  if (listener_ < 0) return false;
  do {
    last_ = (last_ + 1) % (1U << number_bits);
    pair->qp_num = process_ << number_bits | last_;
  } while (pair->qp_num == 0 || pairs_.contains(pair->qp_num));
  pair->handle = pair->qp_num;
  pairs_[pair->qp_num] = pair;
  ++made_;
  return true;
}

void Host::remove(const QueuePair& pair) {
  const std::lock_guard lock(mutex_);
  pairs_.erase(pair.qp_num);
}

std::shared_ptr<QueuePair> Host::find(std::uint32_t number) {
  const std::lock_guard lock(mutex_);
  const auto found = pairs_.find(number);
  return found == pairs_.end() ? nullptr : found->second;
}

std::size_t Host::fail_queue_pairs(std::size_t most) {
  std::vector<std::shared_ptr<QueuePair>> pairs;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [number, pair] : pairs_) pairs.push_back(pair);
  }
  std::size_t failed = 0;
  for (const auto& pair : pairs) {
    if (failed < most && pair->fail(IBV_EVENT_QP_FATAL)) ++failed;
  }
  return failed;
}

std::size_t Host::queue_pairs() {
  const std::lock_guard lock(mutex_);
  return pairs_.size();
}

int Host::connect(std::uint32_t number) {
  sockaddr_un address;
  const auto length = name_socket(number >> number_bits, address);
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  if (::connect(fd, reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    ::close(fd);
    return -1;
  }
  return fd;
}

void Host::listen() {
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return;
  const auto first = static_cast<std::uint32_t>(::getpid()) * 2654435761U >> number_bits;
  for (std::uint32_t at = 0; at < processes; ++at) {
    sockaddr_un address;
    const auto process = 1 + (first + at) % (processes - 1);
    const auto length = name_socket(process, address);
    if (::bind(fd, reinterpret_cast<const sockaddr*>(&address), length) != 0) continue;
    if (::listen(fd, 1024) != 0) break;
    listener_ = fd;
    process_ = process;
    // A queue pair of a process that had this number before must not be taken for one of this process.
    last_ = static_cast<std::uint32_t>(::getpid()) % (1U << number_bits);
    std::thread([this] { accept(); }).detach();
    return;
  }
  ::close(fd);
}

void Host::accept() {
  for (;;) {
    const int fd = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) continue;
    const std::lock_guard lock(mutex_);
    sockets_.insert(fd);
    std::thread([this, fd] { serve(fd); }).detach();
  }
}

void Host::serve(int fd) {
  Request request;
  while (receive_all(fd, &request, sizeof request)) {
    const auto pair = find(request.destination);
    const Reply dropped{Answer::dropped, 0};
    if (pair ? !pair->respond(fd, request) : !send_all(fd, &dropped, sizeof dropped)) break;
  }
  const std::lock_guard lock(mutex_);
  sockets_.erase(fd);
  ::close(fd);
}

// In a forked child. The parent's sockets must not stay open here, or its peers would not notice its end. Its objects
// stay as they are: the child cannot use them, as it could not with a real card.
void Host::forget_parent() {
  if (listener_ >= 0) ::close(listener_);
  for (const int fd : sockets_) ::close(fd);
  host = new Host;  // NOLINT: as above
}

}  // namespace tensorferry::emulated_verbs

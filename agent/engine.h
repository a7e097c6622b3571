/// What the links of one agent share, and how they reach it. Outlives them: every link holds it.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "agent/agent.h"
#include "agent/auth.h"
#include "agent/functions.h"
#include "agent/housekeeping.h"
#include "agent/pool.h"
#include "agent/rendezvous/directory.h"
#include "agent/wire/frame.h"
#include "channels/channel.h"
#include "channels/fork.h"
#include "channels/host_memory.h"

namespace tensorferry {

class Link;

struct Engine final : std::enable_shared_from_this<Engine> {
  static constexpr std::size_t most_drivers = 64;

  explicit Engine(RawAgentOptions agent_options);
  ~Engine();

  /// The link to `name`, made (and not dialled) where there is none.
  std::shared_ptr<Link> link_to(std::string_view name);
  /// The link that an authenticated connection of this peer's belongs to (`calls`: one that its requests come on). Ends
  /// one of an earlier incarnation, or that it calls through already.
  /// `gone`: the connection has ended already. Then, where another life of the peer's has a link: null, for this one
  /// may be the earlier.
  std::shared_ptr<Link> link_of(const PeerInfo& peer, bool calls, bool gone);
  /// It has ended: forget it, and tell whoever asked to know.
  void lost(const std::shared_ptr<Link>& link, const Status& why);
  std::vector<std::shared_ptr<Link>> all_links();

  /// Opens a connection of `purpose` to the link's peer and attaches it, on a pool thread. Errors close the link.
  void dial(std::shared_ptr<Link> link, wire::Hello::Purpose purpose);
  /// `function` null: asks the resolver for `name` first.
  void run_handler(std::shared_ptr<const Function> function, const std::string& name, const std::shared_ptr<Link>& link,
                   Received arguments, Reply reply);

  /// Whether this is the copy in a forked child: its threads are not there, its locks may be held for ever, and what
  /// it speaks through is the parent's. Nothing may be done with it but to leave it as it is.
  [[nodiscard]] bool inherited() const noexcept { return forks_ != forks(); }
  /// What a child gets that uses it all the same.
  [[nodiscard]] Status used_after_fork() const;

  Memory& memory_of(DeviceType type);
  wire::Hello hello(wire::Hello::Purpose purpose, std::uint64_t expected) const;
  bool tick();
  void look_after();

  RawAgentOptions options;
  PeerInfo self;
  Key key;
  bool own_key = false;  // the user's, not one made up at rendezvous
  Record record;
  std::unique_ptr<Directory> directory;
  std::vector<std::unique_ptr<Driver>> drivers;  // in order of priority
  std::vector<wire::Hello::Driver> descriptors;  // one for each driver
  HostMemory host_memory;
  Functions functions;
  std::mutex resolver_mutex;
  RawAgent::Resolver resolver;
  std::function<void(const PeerInfo&, Status)> peer_lost;  // under resolver_mutex

  std::unique_ptr<Housekeeping> housekeeping;
  std::shared_ptr<Pool> pool;

  std::atomic<std::uint64_t> calls_sent{0}, calls_served{0}, calls_failed{0};
  std::atomic<std::size_t> pending{0}, serving{0};
  std::array<std::atomic<std::uint64_t>, most_drivers + 1> bytes_sent{}, bytes_received{};  // the last one: inline
  std::atomic<std::uint64_t> structure_bytes_spared{0};
  std::atomic<bool> leaving{false};

  std::mutex links_mutex;
  std::map<std::string, std::shared_ptr<Link>, std::less<>> links;

 private:
  const std::uint32_t forks_ = forks();
};

}  // namespace tensorferry

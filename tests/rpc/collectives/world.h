/// A world of agents in one process, with a group over them. Each rank runs on a thread of its own.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "rpc/collectives/groups.h"
#include "tests/agent/agents.h"

namespace tensorferry::testing {

/// How the ranks of a group exchange bytes, and how many there are.
struct GroupShape {
  std::size_t ranks = 2;
  std::string links = "memory";  // "memory", "mail" (a board, large data as messages), "messages" (no board)
  bool ring = false;             // prescribes the ring for each operation that has one
  std::size_t hosts = 1;  // rank r is on host r % hosts, as far as the group can tell; more: prescribes two_level
};
inline std::string name_of(const GroupShape& shape) {
  return std::to_string(shape.ranks) + "_" + shape.links + (shape.ring ? "_ring" : "") +
         (shape.hosts > 1 ? "_on_" + std::to_string(shape.hosts) + "_hosts" : "");
}
inline void PrintTo(const GroupShape& shape, std::ostream* out) { *out << name_of(shape); }

class GroupWorld {
 public:
  /// `change` changes the options of each agent.
  explicit GroupWorld(std::size_t ranks, const std::function<void(RawAgentOptions&)>& change = {})
      : store_(std::make_shared<MemoryStore>()) {
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      agents.push_back(join(store_, "rank" + std::to_string(rank), {}, change));
      services.push_back(collectives::Groups::serve(agents.back()));
      names.push_back("rank" + std::to_string(rank));
    }
  }
  ~GroupWorld() {
    groups.clear();
    for (const auto& service : services) service->leave();
    for (const auto& agent : agents) agent->leave();
  }

  static collectives::GroupSettings settings_of(const GroupShape& shape) {
    collectives::GroupSettings settings;
    settings.timeout = 2 * long_enough;  // so that an ending is no time-out
    settings.board = shape.links != "messages";
    settings.memory = shape.links == "memory";
    if (shape.hosts > 1) settings.algorithms = "all_reduce=two_level,reduce=two_level,broadcast=two_level";
    if (shape.ring)
      settings.algorithms = "all_reduce=ring,reduce=ring,broadcast=ring,all_gather=ring,reduce_scatter=ring";
    return settings;
  }
  /// Forms a group of all agents, or of those of `ranks`.
  void form(const collectives::GroupSettings& settings, std::vector<std::size_t> ranks = {}, std::size_t hosts = 1) {
    if (ranks.empty()) {
      for (std::size_t rank = 0; rank < agents.size(); ++rank) ranks.push_back(rank);
    }
    std::vector<std::string> members;
    for (const auto rank : ranks) members.push_back(names[rank]);
    groups.assign(ranks.size(), nullptr);
    on_threads(ranks.size(), [&](std::size_t i) {
      auto own = settings;
      if (hosts > 1) own.host = "host" + std::to_string(ranks[i] % hosts);
      auto formed = services[ranks[i]]->form(members, own);
      EXPECT_TRUE(formed.ok()) << formed.status().text();
      if (formed.ok()) groups[i] = *formed;
    });
  }
  /// Runs `body` for each rank of the group at once.
  void run(const std::function<void(std::size_t rank, collectives::RawGroup& group)>& body) {
    on_threads(groups.size(), [&](std::size_t rank) {
      if (groups[rank]) body(rank, *groups[rank]);
    });
  }
  static void on_threads(std::size_t count, const std::function<void(std::size_t)>& body) {
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < count; ++i) threads.emplace_back([&body, i] { body(i); });
    for (auto& thread : threads) thread.join();
  }

  std::vector<std::shared_ptr<RawAgent>> agents;
  std::vector<std::shared_ptr<collectives::Groups>> services;
  std::vector<std::string> names;
  std::vector<std::shared_ptr<collectives::RawGroup>> groups;

 private:
  std::shared_ptr<MemoryStore> store_;
};

template <class T>
std::span<std::byte> bytes_in(std::vector<T>& values) {
  return std::as_writable_bytes(std::span(values));
}
/// Waits for the work and returns its status.
inline Status ended(const std::shared_ptr<collectives::GroupWork>& work) {
  work->wait();
  return work->status();
}

}  // namespace tensorferry::testing

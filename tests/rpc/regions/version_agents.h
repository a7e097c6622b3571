/// Agents that publish versions and subscribe to them, for tests.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "rpc/regions/publications.h"
#include "rpc/regions/subscription.h"
#include "tests/agent/agents.h"

namespace tensorferry::testing {

/// One agent that may publish and subscribe. `host`: which host it pretends to be on; "": this one.
struct VersionAgent {
  VersionAgent(const std::shared_ptr<Store>& store, const std::string& name, const std::string& host = "",
               const Ways& ways = {})
      : agent(join(store, name, ways)) {
    if (host.empty()) return;
    publications->pretend_host(host);
    subscriptions->pretend_host(host);
  }
  ~VersionAgent() { leave(); }
  VersionAgent(const VersionAgent&) = delete;
  VersionAgent& operator=(const VersionAgent&) = delete;
  void leave() {
    publications->close();
    visits->close();
    visitors->close({Code::connection_lost, "the agent has left"});
    agent->leave();
  }

  std::shared_ptr<RawAgent> agent;
  std::shared_ptr<regions::Visitors> visitors = regions::Visitors::serve(*agent);
  std::shared_ptr<regions::Visits> visits = std::make_shared<regions::Visits>(agent);
  std::shared_ptr<regions::Publications> publications = regions::Publications::serve(agent, *visitors);
  std::shared_ptr<regions::Subscriptions> subscriptions =
      std::make_shared<regions::Subscriptions>(agent, visits, publications);
};

/// A set of tensors whose bytes a test changes.
struct TestSet {
  explicit TestSet(std::vector<std::size_t> sizes) {
    for (const auto size : sizes) bytes.emplace_back(size, std::byte{0});
  }
  [[nodiscard]] regions::ImageLayout layout(std::uint32_t block = 4096, bool checksums = true) const {
    regions::ImageLayout out;
    out.block = block;
    out.checksums = checksums;
    for (std::size_t i = 0; i < bytes.size(); ++i)
      out.pieces.push_back({"t" + std::to_string(i), "", 0, bytes[i].size()});
    return out;
  }
  void fill(unsigned value) {
    for (auto& each : bytes) std::ranges::fill(each, static_cast<std::byte>(value));
  }
  [[nodiscard]] std::vector<const std::byte*> pointers() const {
    std::vector<const std::byte*> out;
    for (const auto& each : bytes) out.push_back(each.data());
    return out;
  }
  /// Returns whether the image has these bytes.
  [[nodiscard]] bool is(const std::byte* image, const regions::ImageLayout& layout) const {
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      if (!std::equal(bytes[i].begin(), bytes[i].end(), image + layout.pieces[i].offset)) return false;
    }
    return true;
  }

  std::vector<Bytes> bytes;
};

inline regions::Subscription::Limits soon() { return {Clock().now() + long_enough, {}}; }

}  // namespace tensorferry::testing

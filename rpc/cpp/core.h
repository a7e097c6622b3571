/// The implementation of an Agent (tensorferry/agent.h). Objects and calls in flight keep it alive.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "agent/agent.h"
#include "rpc/collectives/groups.h"
#include "rpc/cpp/device_tensors.h"
#include "rpc/cpp/rendezvous.h"
#include "rpc/member/member.h"
#include "rpc/member/reference_marshaller.h"
#include "tensorferry/agent.h"

namespace tensorferry::regions {
class RegionService;
}

namespace tensorferry::detail {

/// How the tensors of an agent reach devices: AgentOptions::devices and ::device_maps.
struct DeviceSettings {
  Devices devices;  // null: none but host memory
  std::map<std::string, Placement, std::less<>> maps;
};
/// Returns the map as a placement. Throws InvalidArgument if it is not one to one, or has more than 64 entries.
Placement placement_of(const DeviceMap& map);

/// Returns the options of the agent underneath, which meets its peers at `meeting`. Moves out of `options`. Throws
/// InvalidArgument.
RawAgentOptions raw_options_of(AgentOptions& options, const OpenRendezvous& meeting);

/// A member, its store, its groups and its one-sided memory. Thread-safe.
class AgentCore final : public std::enable_shared_from_this<AgentCore> {
 public:
  /// Peers cannot find `joined` yet.
  AgentCore(OpenRendezvous where, std::shared_ptr<Member> joined, Milliseconds default_timeout,
            DeviceSettings device_settings)
      : meeting(std::move(where)),
        member(std::move(joined)),
        timeout(default_timeout),
        devices(std::move(device_settings)),
        groups(collectives::Groups::serve({member, &member->agent()})) {}
  ~AgentCore() { leave(); }
  AgentCore(const AgentCore&) = delete;
  AgentCore& operator=(const AgentCore&) = delete;

  [[nodiscard]] RawAgent& raw() const noexcept { return member->agent(); }
  [[nodiscard]] References& tables() const noexcept { return member->references(); }
  [[nodiscard]] const PeerInfo& self() const { return member->self(); }

  /// Returns a time-out that a program gave: the agent's own if it is negative.
  [[nodiscard]] Milliseconds limit_of(Milliseconds given) const { return given.count() < 0 ? timeout : given; }

  /// Fails the groups, ends the regions, then leaves.
  void leave() {
    groups->leave();
    end_regions(false);
    member->leave();
  }

  /// Returns the agent's one-sided memory, which begins with the first use.
  std::shared_ptr<regions::RegionService> regions();
  /// Ends its visits to peers and, unless `visits_alone`, its regions, if there are any. Does nothing in a forked
  /// child.
  void end_regions(bool visits_alone);

  const OpenRendezvous meeting;
  const std::shared_ptr<Member> member;
  const Milliseconds timeout;
  const DeviceSettings devices;
  const std::shared_ptr<collectives::Groups> groups;

 private:
  std::mutex regions_mutex_;
  std::shared_ptr<regions::RegionService> regions_;
};

/// Collects the references inside one message to `peer`. Used by one thread; `peer` and `id` must outlive it.
class ObjectMarshaller final : public ReferenceMarshaller {
 public:
  using ReferenceMarshaller::ReferenceMarshaller;

  /// Makes an ObjectMarshaller for a result that stays here. It stores the object that the result is, if it is one,
  /// and adds no reference.
  static ObjectMarshaller keeping(const Member& member) {
    ObjectMarshaller out(member, {});
    out.keeps_ = true;
    return out;
  }
  [[nodiscard]] bool keeps() const noexcept { return keeps_; }
  void keep(const Object& object) { kept_ = object; }
  [[nodiscard]] const Object& kept() const noexcept { return kept_; }

 private:
  bool keeps_ = false;
  Object kept_;
};

/// Starts a call and returns its state. If `first` is not empty, it is sent as bytes before the other arguments.
/// `shown` is the name of the function in errors. `write` writes the `arguments` values of `pack` before this returns.
/// `may_hold_object`: the reply may bring references. `writes_keywords`: `write` also writes the keyword arguments,
/// from begin_keywords() on. Throws if the arguments cannot be sent.
std::shared_ptr<Pending> start_call(const std::shared_ptr<AgentCore>& core, const CallOptions& options,
                                    std::string_view peer, std::string_view function, ByteView first,
                                    std::string_view shown, std::size_t arguments, WriteArguments write,
                                    const void* pack, bool may_hold_object, bool writes_keywords = false);

/// Makes a handler that runs `function`. `shown` is its name in errors. The handler does not keep `core` alive.
Handler handler_of(const std::shared_ptr<AgentCore>& core, std::string shown, std::shared_ptr<Function> function);

/// Serves the functions that references need: calls of methods, and fetches of values.
void serve_objects(const std::shared_ptr<AgentCore>& core);

}  // namespace tensorferry::detail

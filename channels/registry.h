/// The drivers that an agent has, and the order in which it tries them.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "channels/channel.h"
#include "channels/shared_state.h"

namespace tensorferry {

/// A list of named driver factories with priorities. It is a value, copied into each agent's options. Not thread-safe.
class Registry {
 public:
  using Factory = std::function<std::unique_ptr<Driver>()>;
  /// Makes a driver that shares something with other drivers of its agent.
  using SharingFactory = std::function<std::unique_ptr<Driver>(SharedState& of_agent)>;

  /// Returns the channels of this build (channels/registry.cpp lists them, one line each).
  static Registry built_in();

  /// Adds a channel. Higher priorities are tried first, equal ones in the order of adding. A name added again replaces
  /// the earlier one.
  void add(std::string name, int priority, Factory factory);
  void add_sharing(std::string name, int priority, SharingFactory factory);

  /// Adds a channel that an agent has only if its choice allows it by name.
  void add_on_request(std::string name, Factory factory);

  /// Makes the drivers of an agent, in the order in which it tries them. `choice` overrides the default order:
  /// - "cma,basic" allows these alone, in this order.
  /// - "-cma" removes names from the default order.
  /// - "cma:90" gives a channel this priority in the default order, also one on request.
  /// - "" changes nothing.
  ///
  /// InvalidArgument for a choice that both allows and changes the default order, for a priority that is no integer,
  /// and for an unknown name. The text then lists the known names, with those on request among them.
  [[nodiscard]] Result<std::vector<std::unique_ptr<Driver>>> drivers(std::string_view choice) const;

  [[nodiscard]] std::vector<std::string> names() const;

 private:
  struct Entry {
    std::string name;
    std::optional<int> priority;  // none: on request
    SharingFactory factory;
  };
  void insert(Entry entry);

  std::vector<Entry> entries_;
};

}  // namespace tensorferry

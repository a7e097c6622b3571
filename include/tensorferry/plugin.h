/// Channels, reductions and converters that a program, or a shared library, adds to all agents of its process.
///
///     // Registered when the program or the library is loaded, before any agent is made:
///     const tensorferry::ChannelPlugin spool("spool", /*priority=*/90, [] {
///       return std::make_unique<SpoolDriver>("/scratch");
///     });
///     // Once in a shared library, so that load_plugin() and Python's tensorferry.load_plugin() can load it:
///     TENSORFERRY_PLUGIN
///
/// Converters need torch: see tensorferry/converter.h. A channel of one agent alone is AgentOptions::register_channels.
///
/// A process has one list of what is registered, Plugins. An agent reads it when it is made; what is registered later
/// does not reach that agent. Two registrations of one name are an error that each agent reports when it is made.
///
/// As tensorferry/channel.h, this interface may change with each minor version: compile a library again for each.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "tensorferry/channel.h"
#include "tensorferry/device.h"
#include "tensorferry/reduction.h"

namespace tensorferry {

struct DeviceConverter;  // converter.h

/// What has been registered in this process: the one list, which agents read when they are made. Thread-safe.
///
/// Programs use the classes below instead. What is in the list must stay loaded, so load() never closes a library.
class Plugins final {
 public:
  struct Channel {
    std::string name;
    std::optional<int> priority;  // none: only for agents whose choice of channels names it
    Registry::Factory factory;
  };
  struct NamedReduction {
    std::string name;
    ReduceOp op;
  };
  struct Converter {
    std::string name;  // of the device type, as torch has it: "xpu"
    DeviceType type;
    std::shared_ptr<const DeviceConverter> converter;
  };
  using Entry = std::variant<Channel, NamedReduction, Converter>;

  static Plugins& of_process();
  /// Makes of_process() return the list of another copy of this library in the process, which must outlive its uses.
  static void share(Plugins& other);

  /// Adds an entry, without a check; `origin` names it in errors. Returns a number for remove().
  std::uint64_t add(Entry entry, std::string origin = "this program");
  void remove(std::uint64_t number);
  /// Adds an entry if check() allows it; else InvalidArgument.
  Status add_checked(Entry entry, const std::string& origin);

  /// Loads a shared library and adds what it has registered, or nothing. A library that is loaded again changes
  /// nothing. Returns what it has registered: "channel spool". InvalidArgument: it cannot be loaded, is no plugin of
  /// this minor version, or registers a name that is taken.
  Result<std::vector<std::string>> load(const std::string& path);

  /// Returns InvalidArgument if a name is registered twice, or is one of the library's own.
  [[nodiscard]] Status check() const;
  /// Adds the channels to an agent's registry. Returns the error of check().
  Status add_channels_to(Registry& registry) const;
  /// Returns the reduction registered under `name`; else InvalidArgument, which lists the known names.
  [[nodiscard]] Result<ReduceOp> reduction(std::string_view name) const;
  [[nodiscard]] std::vector<Converter> converters() const;
  /// Returns how often the list has changed.
  [[nodiscard]] std::uint64_t changes() const noexcept { return changes_.load(std::memory_order_acquire); }

 private:
  struct Item {
    std::uint64_t number;
    Entry entry;
    std::string origin;
  };
  [[nodiscard]] Status check_with(const Item* added) const;  // with mutex_ held

  mutable std::mutex mutex_;  // not a Mutex (base/mutex.h), which is another type in a program's debug build
  std::uint64_t next_ = 0;
  std::vector<Item> items_;
  std::atomic<std::uint64_t> changes_{0};
  std::vector<std::pair<const void*, std::vector<std::string>>> loaded_;  // libraries, and what each has registered
};

namespace detail {

/// An entry of Plugins that lives as long as this object.
class PluginEntry {
 public:
  explicit PluginEntry(Plugins::Entry entry) : number_(plugins_->add(std::move(entry))) {}
  ~PluginEntry() { plugins_->remove(number_); }
  PluginEntry(const PluginEntry&) = delete;
  PluginEntry& operator=(const PluginEntry&) = delete;

 private:
  Plugins* plugins_ = &Plugins::of_process();
  std::uint64_t number_;
};

/// What the function `tensorferry_plugin` of a library returns. The layout never changes.
struct PluginLibrary {
  const char* made_for;
  Plugins* plugins;
};

/// The minor version that a library is compiled for. load() refuses another.
inline constexpr char plugin_version[] = "0.1";

}  // namespace detail

/// Registers a channel while it lives. Agents try it by its priority, as Registry::add() says; without a priority, only
/// agents whose choice of channels names it have it. `factory` runs once for each agent, on the thread that makes it.
class ChannelPlugin final : detail::PluginEntry {
 public:
  ChannelPlugin(std::string name, std::optional<int> priority, Registry::Factory factory)
      : PluginEntry(Plugins::Channel{std::move(name), priority, std::move(factory)}) {}
};

/// Registers a reduction while it lives: registered_reduction() in C++, and the `op` of that name in Python. `combine`
/// and `any_order` are those of ReduceOp. It reduces host memory; Python copies tensors of GPUs there and back.
class ReductionPlugin final : detail::PluginEntry {
 public:
  ReductionPlugin(std::string name, decltype(ReduceOp::combine) combine, bool any_order = false)
      : PluginEntry(Plugins::NamedReduction{std::move(name), custom(std::move(combine), any_order)}) {}

 private:
  static ReduceOp custom(decltype(ReduceOp::combine) combine, bool any_order) {
    ReduceOp op(Reduction::custom);
    op.combine = std::move(combine);
    op.any_order = any_order;
    return op;
  }
};

/// Returns the reduction that is registered under `name`. It must be registered at every rank. Throws InvalidArgument,
/// which lists the known names.
ReduceOp registered_reduction(std::string_view name);

/// Loads a shared library that has TENSORFERRY_PLUGIN, for the rest of the process's life, and registers what the
/// library registers. Call it before agents are made. Returns what that is: "channel spool". Throws InvalidArgument as
/// Plugins::load() does.
std::vector<std::string> load_plugin(const std::string& path);

}  // namespace tensorferry

/// Makes a shared library a plugin. Stands once in it, outside of any namespace.
#define TENSORFERRY_PLUGIN                                                                                           \
  extern "C" __attribute__((visibility("default"))) const tensorferry::detail::PluginLibrary* tensorferry_plugin() { \
    static const tensorferry::detail::PluginLibrary library{tensorferry::detail::plugin_version,                     \
                                                            &tensorferry::Plugins::of_process()};                    \
    return &library;                                                                                                 \
  }

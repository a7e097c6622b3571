/// The table of functions that this agent serves: names, the numbers that callers use for them, and handlers. A
/// resolver of the program's may add functions when they are called first.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "agent/handles.h"

namespace tensorferry {

/// One served function. Immutable: the table replaces it as a whole, and a running handler keeps the old one.
struct RawFunction {
  std::string name;
  std::uint32_t number = 0;
  Handler handler;
  HandlerOptions options;
};

/// Maps names and numbers to functions. Thread-safe. A name keeps its number when its function is replaced.
class Functions final {
 public:
  /// Makes `name` callable; replaces an earlier function of that name.
  std::shared_ptr<const RawFunction> serve(std::string name, Handler handler, HandlerOptions options) {
    std::shared_ptr<const RawFunction> replaced;  // destroyed after the lock is released: it runs users' code
    const std::lock_guard lock(mutex_);
    auto [it, fresh] = numbers_.try_emplace(std::move(name), static_cast<std::uint32_t>(by_number_.size()));
    if (fresh) by_number_.emplace_back();
    auto function =
        std::make_shared<const RawFunction>(RawFunction{it->first, it->second, std::move(handler), options});
    replaced = std::exchange(by_number_[it->second], function);
    return function;
  }
  /// Drops all functions, and the resolver: they may hold what holds this agent. A running handler keeps its own.
  void clear() {
    Resolver resolver;  // these are destroyed after the lock is released
    std::vector<std::shared_ptr<const RawFunction>> functions(1);
    const std::lock_guard lock(mutex_);
    resolver_.swap(resolver);
    by_number_.swap(functions);
    numbers_.clear();
  }
  /// Returns the function, or null if it was never served here.
  [[nodiscard]] std::shared_ptr<const RawFunction> find(std::uint32_t number) const {
    const std::lock_guard lock(mutex_);
    return number < by_number_.size() ? by_number_[number] : nullptr;
  }
  [[nodiscard]] std::shared_ptr<const RawFunction> find(std::string_view name) const {
    const std::lock_guard lock(mutex_);
    const auto it = numbers_.find(name);
    return it == numbers_.end() ? nullptr : by_number_[it->second];
  }
  /// See RawAgent::resolve_with.
  void resolve_with(Resolver resolver) {
    const std::lock_guard lock(mutex_);
    std::swap(resolver_, resolver);  // the earlier one is destroyed after the lock is released
  }
  /// Returns the function. If it was never served, asks the resolver, under no lock, and serves what that returns.
  /// Null: there is none. An error is the resolver's.
  Result<std::shared_ptr<const RawFunction>> find_or_resolve(const std::string& name) {
    Resolver resolve;
    {
      const std::lock_guard lock(mutex_);
      resolve = resolver_;
    }
    auto function = find(name);  // another request may have resolved it meanwhile
    if (function || !resolve) return function;
    auto found = resolve(name);
    if (!found.ok()) return found.status();
    if (*found) function = serve(name, std::move((*found)->first), (*found)->second);
    return function;
  }

 private:
  mutable std::mutex mutex_;  // guards the others
  Resolver resolver_;
  std::map<std::string, std::uint32_t, std::less<>> numbers_;
  std::vector<std::shared_ptr<const RawFunction>> by_number_ =
      std::vector<std::shared_ptr<const RawFunction>>(1);  // 0: by name
};

}  // namespace tensorferry

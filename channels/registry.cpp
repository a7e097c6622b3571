#include "channels/registry.h"

#include <algorithm>
#include <charconv>
#include <system_error>
#include <utility>

#include "base/text.h"
#include "channels/basic/basic_channel.h"
#include "channels/cma/cma_channel.h"
#include "channels/shm/shm_channel.h"
#ifdef TENSORFERRY_HAS_CUDA
#include "channels/cuda_basic/cuda_basic_channel.h"
#include "channels/cuda_ipc/cuda_ipc_channel.h"
#include "channels/cuda_xth/cuda_xth_channel.h"
#endif
#ifdef TENSORFERRY_HAS_RDMA
#include "channels/ibv/ibv_channel.h"
#include "channels/rdma/shared_cards.h"
#ifdef TENSORFERRY_HAS_CUDA
#include "channels/cuda_gdr/cuda_gdr_channel.h"
#endif
#endif
#include "channels/xth/xth_channel.h"

namespace tensorferry {

Registry Registry::built_in() {
  Registry registry;
  registry.add("xth", 100, std::make_unique<XthDriver>);
  registry.add("shm", 80, [] { return std::make_unique<ShmDriver>(); });
  registry.add("cma", 60, [] { return std::make_unique<CmaDriver>(); });
#ifdef TENSORFERRY_HAS_RDMA
  registry.add_sharing("ibv", 40, [](SharedState& of_agent) {
    return std::make_unique<IbvDriver>(ibv::IbvOptions(), rdma::SharedCards::of(of_agent));
  });
#endif
  registry.add("basic", 0, std::make_unique<BasicDriver>);
#ifdef TENSORFERRY_HAS_CUDA
  registry.add("cuda_xth", 100, std::make_unique<CudaXthDriver>);
  registry.add("cuda_ipc", 80, [] { return std::make_unique<CudaIpcDriver>(); });
#ifdef TENSORFERRY_HAS_RDMA
  registry.add_sharing("cuda_gdr", 40, [](SharedState& of_agent) {
    return std::make_unique<CudaGdrDriver>(cuda_gdr::CudaGdrOptions(), rdma::SharedCards::of(of_agent));
  });
#endif
  registry.add("cuda_basic", 0, std::make_unique<CudaBasicDriver>);
#endif
  return registry;
}

namespace {

/// Returns null for an empty factory.
Registry::SharingFactory sharing(Registry::Factory factory) {
  if (!factory) return nullptr;
  return [factory = std::move(factory)](SharedState&) { return factory(); };
}

}  // namespace

void Registry::add(std::string name, int priority, Factory factory) {
  add_sharing(std::move(name), priority, sharing(std::move(factory)));
}

void Registry::add_sharing(std::string name, int priority, SharingFactory factory) {
  insert(Entry{std::move(name), priority, std::move(factory)});
}

void Registry::add_on_request(std::string name, Factory factory) {
  insert(Entry{std::move(name), std::nullopt, sharing(std::move(factory))});
}

void Registry::insert(Entry entry) {
  std::erase_if(entries_, [&](const Entry& each) { return each.name == entry.name; });
  const auto place = std::upper_bound(entries_.begin(), entries_.end(), entry.priority,
                                      [](auto wanted, const Entry& each) { return wanted > each.priority; });
  entries_.insert(place, std::move(entry));
}

namespace {

/// "-a, b" -> {"-a", "b"}: commas separate names; spaces around a name and empty names are ignored.
std::vector<std::string_view> words_of(std::string_view choice) {
  std::vector<std::string_view> words;
  while (!choice.empty()) {
    const auto comma = std::min(choice.find(','), choice.size());
    auto word = choice.substr(0, comma);
    choice.remove_prefix(std::min(comma + 1, choice.size()));
    while (!word.empty() && word.front() == ' ') word.remove_prefix(1);
    while (!word.empty() && word.back() == ' ') word.remove_suffix(1);
    if (!word.empty()) words.push_back(word);
  }
  return words;
}

bool contains(const std::vector<std::string_view>& words, std::string_view word) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

/// Returns the integer that is the whole text; nullopt: it is none.
std::optional<int> integer_of(std::string_view text) {
  int value = 0;
  const auto* const end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && stopped == end ? std::optional(value) : std::nullopt;
}

}  // namespace

Result<std::vector<std::unique_ptr<Driver>>> Registry::drivers(std::string_view choice) const {
  std::vector<std::string_view> allowed, removed;
  auto order = *this;
  bool reordered = false;
  for (const auto word : words_of(choice)) {
    const bool removes = word.front() == '-';
    const auto colon = word.find(':');
    const auto name = word.substr(0, colon).substr(removes ? 1 : 0);
    const auto entry = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& e) { return e.name == name; });
    if (entry == entries_.end()) {
      return Status(Code::invalid_argument,
                    formatted("there is no channel \"{}\"; known are: {}", name, joined(names(), ", ")));
    }
    if (colon == std::string_view::npos) {
      auto& list = removes ? removed : allowed;
      if (!contains(list, name)) list.push_back(name);
      continue;
    }
    const auto priority = integer_of(word.substr(colon + 1));
    if (removes || !priority) {
      return Status(Code::invalid_argument,
                    formatted("\"{}\" gives no priority: write \"{}:50\", or another integer; known channels are: {}",
                              word, name, joined(names(), ", ")));
    }
    order.insert({entry->name, priority, entry->factory});
    reordered = true;
  }
  if (!allowed.empty() && (!removed.empty() || reordered)) {
    return Status(
        Code::invalid_argument,
        formatted("\"{}\" both allows channels and changes the default order: name the channels to allow, or "
                  "those to remove with a minus sign before each, and those to move with a priority after each",
                  choice));
  }
  if (allowed.empty()) {
    for (const auto& entry : order.entries_) {
      if (entry.priority && !contains(removed, entry.name)) allowed.push_back(entry.name);
    }
  }
  std::vector<std::unique_ptr<Driver>> drivers;
  SharedState shared;  // keeps nothing: what drivers share lives as long as they do
  for (const auto name : allowed) {
    const auto entry = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& e) { return e.name == name; });
    auto driver = entry->factory ? entry->factory(shared) : nullptr;
    // Frames use the driver's name, and options use the registry's name: the two must be equal.
    if (!driver || driver->name() != name) {
      return Status(Code::invalid_argument, formatted("the factory of channel \"{}\" made {}", name,
                                                      driver ? formatted("\"{}\"", driver->name()) : "nothing"));
    }
    drivers.push_back(std::move(driver));
  }
  return drivers;
}

std::vector<std::string> Registry::names() const {
  std::vector<std::string> names;
  for (const auto& entry : entries_) names.push_back(entry.name);
  return names;
}

}  // namespace tensorferry

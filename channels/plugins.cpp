#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <iterator>

#include "base/text.h"
#include "include/tensorferry/plugin.h"

namespace tensorferry {
namespace {

std::atomic<Plugins*> shared_list{nullptr};

/// The names that entries may not have: kinds of Reduction, and the device types that TensorFerry knows itself.
constexpr std::array<std::string_view, 10> reductions{"sum", "average", "product",           "min",   "max", "band",
                                                      "bor", "bxor",    "premultiplied_sum", "custom"};
constexpr std::array<std::string_view, 2> device_types{"cpu", "cuda"};

const std::string& name_of(const Plugins::Entry& entry) {
  return std::visit([](const auto& each) -> const std::string& { return each.name; }, entry);
}

/// "channel spool", "reduction logsumexp", "converter xpu"
std::string text_of(const Plugins::Entry& entry) {
  static constexpr std::array<std::string_view, 3> kinds{"channel", "reduction", "converter"};
  return formatted("{} {}", kinds.at(entry.index()), name_of(entry));
}

bool is_built_in(const Plugins::Entry& entry) {
  const auto& name = name_of(entry);
  if (std::holds_alternative<Plugins::NamedReduction>(entry)) return std::ranges::count(reductions, name) != 0;
  if (std::holds_alternative<Plugins::Converter>(entry)) return std::ranges::count(device_types, name) != 0;
  const auto channels = Registry::built_in().names();
  return std::ranges::count(channels, name) != 0;
}

bool is_complete(const Plugins::Entry& entry) {
  if (const auto* const channel = std::get_if<Plugins::Channel>(&entry)) return channel->factory != nullptr;
  if (const auto* const reduction = std::get_if<Plugins::NamedReduction>(&entry)) return bool(reduction->op.combine);
  return std::get<Plugins::Converter>(entry).converter != nullptr;
}

/// Loads the library and finds its list.
Result<const detail::PluginLibrary*> open_library(const std::string& path) {
  auto* const handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr)
    return Status(Code::invalid_argument, formatted("cannot load the plugin: {}", std::string_view(::dlerror())));
  using Find = const detail::PluginLibrary* (*)();
  const auto find = reinterpret_cast<Find>(::dlsym(handle, "tensorferry_plugin"));
  if (find == nullptr) {
    return Status(Code::invalid_argument,
                  formatted("{} is no plugin: it has no function tensorferry_plugin, which TENSORFERRY_PLUGIN of "
                            "tensorferry/plugin.h makes",
                            path));
  }
  const auto* const library = find();
  if (library->made_for != std::string_view(detail::plugin_version)) {
    return Status(Code::invalid_argument,
                  formatted("{} is a plugin for TensorFerry {}, and this is {}: compile it again", path,
                            std::string_view(library->made_for), std::string_view(detail::plugin_version)));
  }
  return library;
}

}  // namespace

Plugins& Plugins::of_process() {
  if (auto* const shared = shared_list.load()) return *shared;
  static Plugins own;
  return own;
}

void Plugins::share(Plugins& other) { shared_list = &other; }

std::uint64_t Plugins::add(Entry entry, std::string origin) {
  const std::lock_guard lock(mutex_);
  items_.push_back({next_, std::move(entry), std::move(origin)});
  ++changes_;
  return next_++;
}

void Plugins::remove(std::uint64_t number) {
  std::optional<Item> removed;  // ends after the lock, because an entry may run code of others when it ends
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find(items_, number, &Item::number);
  if (found == items_.end()) return;
  removed = std::move(*found);
  items_.erase(found);
  ++changes_;
}

Status Plugins::add_checked(Entry entry, const std::string& origin) {
  Item item{0, std::move(entry), origin};  // ends after the lock
  const std::lock_guard lock(mutex_);
  if (auto status = check_with(&item); !status.ok()) return status;
  item.number = next_++;
  items_.push_back(std::move(item));
  ++changes_;
  return {};
}

Status Plugins::check_with(const Item* added) const {
  std::vector<const Item*> all;
  for (const auto& item : items_) all.push_back(&item);
  if (added != nullptr) all.push_back(added);
  for (auto each = all.begin(); each != all.end(); ++each) {
    const auto text = text_of((*each)->entry);
    if (!is_complete((*each)->entry) || name_of((*each)->entry).empty())
      return {Code::invalid_argument, formatted("\"{}\" of {} needs a name and a function", text, (*each)->origin)};
    if (is_built_in((*each)->entry)) {
      return {Code::invalid_argument,
              formatted("\"{}\" of {} has a name of TensorFerry's own: give it another", text, (*each)->origin)};
    }
    const auto first = std::find_if(all.begin(), each, [&](const Item* item) { return text_of(item->entry) == text; });
    if (first != each) {
      return {Code::invalid_argument, formatted("\"{}\" is registered twice in this process: by {} and by {}", text,
                                                (*first)->origin, (*each)->origin)};
    }
  }
  return {};
}

Status Plugins::check() const {
  const std::lock_guard lock(mutex_);
  return check_with(nullptr);
}

Result<std::vector<std::string>> Plugins::load(const std::string& path) {
  const auto before = [&] {
    const std::lock_guard lock(mutex_);
    return next_;
  }();
  std::vector<Item> dropped;  // end after the lock
  const auto undo = [&](const Status& why) {
    const auto from = std::ranges::find_if(items_, [&](const Item& item) { return item.number >= before; });
    dropped.assign(std::move_iterator(from), std::move_iterator(items_.end()));
    items_.erase(from, items_.end());
    ++changes_;
    return why;
  };
  const auto library = open_library(path);  // its objects may register themselves in this list, if it has no other
  if (!library.ok()) {
    const std::lock_guard lock(mutex_);
    return undo(library.status());
  }
  auto* const theirs = (*library)->plugins;
  std::vector<Item> items;
  if (theirs != this) {
    const std::lock_guard lock(theirs->mutex_);
    items = theirs->items_;
  }
  const std::lock_guard lock(mutex_);
  for (const auto& [known, names] : loaded_) {
    if (known == *library) return names;
  }
  std::vector<std::string> names;
  for (auto& item : items_) {
    if (theirs != this || item.number < before) continue;
    item.origin = path;
    names.push_back(text_of(item.entry));
  }
  for (auto& item : items) {
    items_.push_back({next_++, std::move(item.entry), path});
    names.push_back(text_of(items_.back().entry));
  }
  if (const auto status = check_with(nullptr); !status.ok()) return undo(status);
  ++changes_;
  loaded_.emplace_back(*library, names);
  return names;
}

Status Plugins::add_channels_to(Registry& registry) const {
  const std::lock_guard lock(mutex_);
  if (auto status = check_with(nullptr); !status.ok()) return status;
  for (const auto& item : items_) {
    const auto* const channel = std::get_if<Channel>(&item.entry);
    if (channel == nullptr) continue;
    if (channel->priority) {
      registry.add(channel->name, *channel->priority, channel->factory);
    } else {
      registry.add_on_request(channel->name, channel->factory);
    }
  }
  return {};
}

Result<ReduceOp> Plugins::reduction(std::string_view name) const {
  const std::lock_guard lock(mutex_);
  std::vector<std::string_view> known(reductions.begin(), reductions.end() - 1);  // custom has no meaning by its name
  for (const auto& item : items_) {
    const auto* const found = std::get_if<NamedReduction>(&item.entry);
    if (found == nullptr) continue;
    if (found->name == name) return found->op;
    known.emplace_back(found->name);
  }
  return Status(Code::invalid_argument,
                formatted("there is no reduction \"{}\"; known are: {}", name, joined(known, ", ")));
}

std::vector<Plugins::Converter> Plugins::converters() const {
  const std::lock_guard lock(mutex_);
  std::vector<Converter> out;
  for (const auto& item : items_) {
    if (const auto* const converter = std::get_if<Converter>(&item.entry)) out.push_back(*converter);
  }
  return out;
}

}  // namespace tensorferry

/// A map from addresses to numbers, by which the Encoder finds an object that a message holds twice.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace tensorferry {

/// Supports insert and find alone; not thread-safe. The first few entries are stored inline and searched linearly: most
/// messages hold no more, and then the map allocates nothing. Beyond them it is an open-addressed hash table whose size
/// is a power of two and which is at most half full.
class IdentityMap {
 public:
  /// Adds an address that is not in the map. Ignores null, which stands for no object.
  void insert(const void* address, std::uint32_t number) {
    if (address == nullptr) return;
    if (size_ < few_.size()) {
      few_[size_++] = {address, number};
      return;
    }
    if (size_ * 2 >= table_.size()) grow();
    ++size_;
    place({address, number});
  }

  [[nodiscard]] std::optional<std::uint32_t> find(const void* address) const {
    if (size_ <= few_.size()) {
      for (std::size_t i = 0; i < size_; ++i) {
        if (few_[i].address == address) return few_[i].number;
      }
      return std::nullopt;
    }
    if (address == nullptr) return std::nullopt;
    for (auto at = slot_of(address);; at = (at + 1) & (table_.size() - 1)) {
      if (table_[at].address == address) return table_[at].number;
      if (table_[at].address == nullptr) return std::nullopt;
    }
  }

 private:
  struct Entry {
    const void* address;
    std::uint32_t number;
  };

  [[nodiscard]] std::size_t slot_of(const void* address) const {
    const auto bits = reinterpret_cast<std::uintptr_t>(address) * 0x9e3779b97f4a7c15U;
    return (bits >> 32) & (table_.size() - 1);
  }
  void place(Entry entry) {
    auto at = slot_of(entry.address);
    while (table_[at].address != nullptr) at = (at + 1) & (table_.size() - 1);
    table_[at] = entry;
  }
  void grow() {
    auto old = std::move(table_);
    table_.assign(old.empty() ? 64 : old.size() * 2, Entry{});
    for (const auto& entry : old.empty() ? std::span<const Entry>(few_) : std::span<const Entry>(old)) {
      if (entry.address != nullptr) place(entry);
    }
  }

  std::size_t size_ = 0;
  std::array<Entry, 8> few_;  // the first min(size_, 8) are set
  std::vector<Entry> table_;
};

}  // namespace tensorferry

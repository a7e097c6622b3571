/// The random choices of one run. A seed decides all of them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

namespace hostile {

/// SplitMix64. Used by one thread.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() {
    auto z = state_ += 0x9e3779b97f4a7c15U;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
    return z ^ (z >> 31);
  }
  /// Returns a number below `bound`; 0 if that is 0.
  std::uint64_t below(std::uint64_t bound) { return bound == 0 ? 0 : next() % bound; }
  bool one_in(std::uint64_t many) { return below(many) == 0; }

  template <class T>
  T one_of(std::initializer_list<T> choices) {
    return *(choices.begin() + below(choices.size()));
  }

  /// Returns a number at which code likes to be wrong: near 0, near a power of two, or any.
  std::uint64_t edge() {
    switch (below(4)) {
      case 0:
        return below(4);
      case 1:
        return (std::uint64_t{1} << below(64)) + below(3) - 1;
      case 2:
        return ~below(3);
      default:
        return next() >> below(64);
    }
  }

  std::string bytes(std::size_t count) {
    std::string made(count, '\0');
    for (auto& each : made) each = static_cast<char>(next());
    return made;
  }

 private:
  std::uint64_t state_;
};

}  // namespace hostile

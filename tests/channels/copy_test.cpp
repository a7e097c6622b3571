#include "channels/copy.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "tests/agent/forked.h"

namespace tensorferry {
namespace {

using tensorferry::testing::in_child;

constexpr std::size_t kilobyte = 1 << 10;
constexpr std::size_t megabyte = 1 << 20;

std::vector<std::byte> noise(std::size_t bytes) {
  std::vector<std::byte> made(bytes);
  std::mt19937_64 random(bytes);
  for (auto& byte : made) byte = std::byte(random() & 0xff);
  return made;
}

std::vector<Streaming> available() {
  std::vector<Streaming> all{Streaming::none};
  const auto best = best_streaming();
  if (best == Streaming::avx512) all.push_back(Streaming::avx2);
  if (best != Streaming::none) all.push_back(best);
  return all;
}

TEST(Copy, EveryKernelCopiesExactlyEverySizeToEveryAlignment) {
  const auto source = noise(200 * kilobyte);
  constexpr std::byte untouched{0xee};
  for (const auto streaming : available()) {
    for (const std::size_t bytes :
         {0ul, 1ul, 63ul, 4096ul, 32 * kilobyte - 1, 32 * kilobyte, 32 * kilobyte + 77, 150 * kilobyte + 5}) {
      for (const std::size_t to_offset : {0ul, 1ul, 63ul, 64ul, 100ul}) {
        for (const std::size_t from_offset : {0ul, 3ul, 64ul}) {
          std::vector<std::byte> target(200 * kilobyte, untouched);
          copy_streaming(target.data() + to_offset, source.data() + from_offset, bytes, streaming);
          ASSERT_TRUE(std::equal(source.begin() + static_cast<std::ptrdiff_t>(from_offset),
                                 source.begin() + static_cast<std::ptrdiff_t>(from_offset + bytes),
                                 target.begin() + static_cast<std::ptrdiff_t>(to_offset)))
              << name_of(streaming) << " " << bytes << " " << to_offset << " " << from_offset;
          for (std::size_t i = 0; i < to_offset; ++i) ASSERT_EQ(target[i], untouched);
          for (std::size_t i = to_offset + bytes; i < target.size(); ++i) ASSERT_EQ(target[i], untouched);
        }
      }
    }
  }
}

TEST(Copy, CopiesASizeOfEachMethod) {
  Copier copier, away(ReadBy::another_core);
  for (const std::size_t bytes : {0 * megabyte, kilobyte, 32 * kilobyte, 330 * kilobyte + 80, 4 * megabyte,
                                  5 * megabyte + 1, 16 * megabyte, 17 * megabyte + 333}) {
    const auto source = noise(bytes);
    for (auto* const each : {&copier, &away}) {
      std::vector<std::byte> target(bytes);
      each->copy(target.data(), source.data(), bytes);
      EXPECT_TRUE(target == source) << bytes;
    }
  }
}

TEST(Copy, SeveralPiecesAreCopiedWhole) {
  Copier copier, away(ReadBy::another_core);
  const std::vector<std::vector<std::size_t>> sets{{},
                                                   {0},
                                                   {5 * megabyte},
                                                   {1, 0, kilobyte, 63},
                                                   std::vector<std::size_t>(200, 20 * kilobyte + 1),
                                                   std::vector<std::size_t>(200, 200 * kilobyte),
                                                   {3, 9 * megabyte + 5, 64, 9 * megabyte}};
  for (const auto& sizes : sets) {
    std::vector<std::vector<std::byte>> sources;
    for (const auto bytes : sizes) sources.push_back(noise(bytes));
    for (auto* const each : {&copier, &away}) {
      std::vector<std::vector<std::byte>> targets;
      for (const auto bytes : sizes) targets.emplace_back(bytes);
      std::vector<Copier::Piece> pieces;
      for (std::size_t i = 0; i < sizes.size(); ++i) pieces.push_back({targets[i].data(), sources[i].data(), sizes[i]});
      each->copy(pieces);
      EXPECT_TRUE(targets == sources) << sizes.size() << " pieces";
    }
  }
}

TEST(Copy, PartsCoverTheWholeOnce) {
  Copier copier;
  for (const std::size_t total : {0ul, 1ul, 9ul, 10ul, 11ul, 1000ul, 1001ul}) {
    std::mutex mutex;
    std::set<std::size_t> seen;
    std::size_t bytes = 0;
    copier.in_parts(total, 10, [&](std::size_t at, std::size_t n) {
      const std::lock_guard lock(mutex);
      EXPECT_TRUE(seen.insert(at).second);
      EXPECT_EQ(at % 10, 0u);
      EXPECT_LE(n, 10u);
      bytes += n;
    });
    EXPECT_EQ(bytes, total);
    EXPECT_EQ(seen.size(), (total + 9) / 10);
  }
}

TEST(Copy, TheWorkIsNotTouchedAfterItsReturn) {
  Copier copier;
  for (int round = 0; round < 200; ++round) {
    std::vector<std::atomic<int>> calls(40);
    copier.in_parts(calls.size(), 1, [&](std::size_t at, std::size_t) {
      ++calls[at];
      if (round % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(20));
    });
    for (const auto& count : calls) ASSERT_EQ(count, 1);
  }
}

TEST(Copy, ConcurrentCopiesDoNotMixTheirBytes) {
  Copier copier;
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (std::size_t i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      const auto source = noise(5 * megabyte + i);
      for (int round = 0; round < 5; ++round) {
        std::vector<std::byte> target(source.size());
        copier.copy(target.data(), source.data(), source.size());
        wrong += target != source;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(Copy, AForkedChildCopiesWithoutHelpers) {
#ifdef TENSORFERRY_UNDER_TSAN
  GTEST_SKIP() << "a child that forks off a process with threads";
#endif
  Copier copier;
  const auto source = noise(5 * megabyte);
  std::vector<std::byte> target(source.size());
  for (int i = 0; i < 10; ++i) copier.copy(target.data(), source.data(), source.size());
  EXPECT_EQ(in_child([&] {
              std::vector<std::byte> mine(source.size());
              copier.copy(mine.data(), source.data(), source.size());
              copier.~Copier();
              return mine == source ? 0 : 1;
            }),
            0);
}

}  // namespace
}  // namespace tensorferry

/// A pair of devices is decided at both ends, each from its own descriptor and the peer's. The two decisions must be
/// the same: these tests compare them over all combinations of two descriptors.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "channels/cma/messages.h"
#include "channels/registry.h"
#include "channels/shm/layout.h"
#include "channels/xth/directory.h"
#ifdef TENSORFERRY_HAS_RDMA
#include "channels/ibv/messages.h"
#endif
#ifdef TENSORFERRY_HAS_CUDA
#include "channels/cuda_basic/messages.h"
#include "channels/cuda_ipc/messages.h"
#endif

namespace tensorferry {
namespace {

std::unique_ptr<Driver> driver_of(const std::string& name) {
  auto drivers = Registry::built_in().drivers(name);
  EXPECT_TRUE(drivers.ok()) << drivers.status().text();
  return drivers.ok() ? std::move(drivers->front()) : nullptr;
}

/// Adds what a broken or foreign peer may send in place of a descriptor: all beginnings of `valid`, each of its bytes
/// changed, and a byte too many.
void add_broken(std::vector<Bytes>& all, Bytes valid) {
  for (std::size_t bytes = 0; bytes < valid.size(); ++bytes)
    all.emplace_back(valid.begin(), valid.begin() + static_cast<std::ptrdiff_t>(bytes));
  for (std::size_t at = 0; at < valid.size(); ++at) {
    auto changed = valid;
    changed[at] ^= std::byte{0x11};
    all.push_back(std::move(changed));
  }
  valid.push_back(std::byte{0});
  all.push_back(std::move(valid));
}

/// Checks that both ends decide alike, each with a driver of its own. Returns how many of the pairs reach each other.
std::size_t expect_one_rule(const std::string& name, const std::vector<Bytes>& descriptors) {
  const auto a = driver_of(name), b = driver_of(name);
  std::size_t reach = 0;
  for (std::size_t i = 0; i < descriptors.size(); ++i) {
    for (std::size_t k = 0; k < descriptors.size(); ++k) {
      const bool here = !a->reaches(descriptors[i], descriptors[k]).has_value();
      const bool there = !b->reaches(descriptors[k], descriptors[i]).has_value();
      EXPECT_EQ(here, there) << name << ": descriptors " << i << " and " << k;
      if (here) ++reach;
    }
  }
  EXPECT_LT(reach, descriptors.size() * descriptors.size() + (name == "basic" ? 1 : 0));
  return reach;
}

TEST(OneRule, BasicReachesEveryPeer) {
  std::vector<Bytes> all{{}, Bytes(1), Bytes(100)};
  EXPECT_EQ(expect_one_rule("basic", all), all.size() * all.size());
}

TEST(OneRule, XthDecidesAlikeAtBothEnds) {
  std::vector<Bytes> all{xth::descriptor()};
  for (int i = 0; i < 4; ++i) {
    const auto id = xth::random_id();
    const auto bytes = std::as_bytes(std::span(id));
    all.emplace_back(bytes.begin(), bytes.end());
  }
  add_broken(all, all.front());
  EXPECT_GT(expect_one_rule("xth", all), 0U);
}

TEST(OneRule, ShmDecidesAlikeAtBothEnds) {
  std::vector<Bytes> all;
  for (const std::uint32_t user : {0U, 1000U}) {
    for (const auto* host : {"a", "b", ""}) all.push_back(encode(shm::ShmDescriptor{user, host}));
  }
  add_broken(all, all.front());
  EXPECT_GT(expect_one_rule("shm", all), 0U);
}

TEST(OneRule, CmaDecidesAlikeAtBothEnds) {
  std::vector<Bytes> all;
  for (const std::uint32_t user : {0U, 1000U}) {
    for (const std::uint64_t pids : {1U, 2U}) {
      for (const std::uint64_t users : {1U, 2U}) {
        for (const std::int32_t pid : {10, 11}) {
          for (const auto* host : {"a", "b"})
            all.push_back(encode(cma::CmaDescriptor{user, pids, users, cma::Identity{pid, 7}, host}));
        }
      }
    }
  }
  add_broken(all, all.front());
  EXPECT_GT(expect_one_rule("cma", all), 0U);
}

#ifdef TENSORFERRY_HAS_RDMA

TEST(OneRule, IbvDecidesAlikeAtBothEnds) {
  std::vector<rdma::PortAddress> ports;
  for (std::uint8_t kind = 0; kind < 3; ++kind) {
    rdma::PortAddress link_local{kind, {0xfe, 0x80}}, routable{kind, {0x20, 0x01}}, ipv4{kind, {}};
    ipv4.gid[10] = ipv4.gid[11] = 0xff;
    ipv4.gid[12] = 10;
    for (auto port : {link_local, routable, ipv4}) {
      port.gid[15] = 1;
      ports.push_back(port);
    }
  }
  std::vector<Bytes> all{encode(rdma::PortList{})};
  for (std::size_t i = 0; i < ports.size(); ++i) {
    all.push_back(encode(rdma::PortList{{ports[i]}}));
    all.push_back(encode(rdma::PortList{{ports[i], ports[(i + 4) % ports.size()]}}));
  }
  add_broken(all, all.back());
  EXPECT_GT(expect_one_rule("ibv", all), 0U);
}

#endif

#ifdef TENSORFERRY_HAS_CUDA

TEST(OneRule, CudaXthDecidesAlikeAtBothEnds) {
  std::vector<Bytes> all{xth::descriptor(), Bytes(16), Bytes(15)};
  add_broken(all, all.front());
  EXPECT_GT(expect_one_rule("cuda_xth", all), 0U);
}

TEST(OneRule, CudaBasicDecidesAlikeAtBothEnds) {
  std::vector<Bytes> all;
  for (int type = 0; type < 4; ++type)
    all.push_back(encode(cuda_basic::CudaBasicDescriptor{static_cast<DeviceType>(type)}));
  add_broken(all, all.front());
  EXPECT_GT(expect_one_rule("cuda_basic", all), 0U);
}

/// All processes of two hosts of three GPUs: each process sees some of them, in some order of peer access. A process
/// that sees both GPUs of a pair may know that they have no access to each other; then neither end wants the pair, also
/// if the other one sees its own GPU alone.
TEST(OneRule, CudaIpcDecidesAlikeAtBothEndsWhateverEachOfThemSees) {
  constexpr int gpus = 3;
  struct Process {
    std::string host;
    unsigned int sees, access;  // bits: GPUs; pairs of GPUs, of which bit a + b - 1 says that a and b have access
  };
  struct Seen {
    Process process;
    int gpu;
  };
  const auto uuid = [](int gpu) { return std::string(16, static_cast<char>('0' + gpu)); };
  std::vector<Bytes> all;
  std::vector<Seen> known;
  std::uint64_t number = 0;
  for (const auto* host : {"a", "b"}) {
    for (unsigned int sees = 1; sees < 1U << gpus; ++sees) {
      for (unsigned int access = 0; access < 1U << 3; ++access) {
        ++number;
        for (int gpu = 0; gpu < gpus; ++gpu) {
          if ((sees & (1U << gpu)) == 0) continue;
          std::string barred;
          for (int other = 0; other < gpus; ++other) {
            const bool visible = other != gpu && (sees & (1U << other)) != 0;
            if (visible && (access & (1U << (gpu + other - 1))) == 0) barred += uuid(other);
          }
          const auto own = uuid(gpu);
          all.push_back(encode(cuda_ipc::CudaIpcDescriptor{host, own, {number, 1}, barred}));
          known.push_back({{host, sees, access}, gpu});
        }
      }
    }
  }
  const auto valid = all.size();
  add_broken(all, all.at(valid / 2 - 1));
  expect_one_rule("cuda_ipc", all);

  const auto driver = driver_of("cuda_ipc");
  const auto bars = [](const Seen& by, int a, int b) {
    const auto both = (1U << a) | (1U << b);
    return a != b && (by.process.sees & both) == both && (by.process.access & (1U << (a + b - 1))) == 0;
  };
  for (std::size_t i = 0; i < valid; ++i) {
    for (std::size_t k = 0; k < valid; ++k) {
      const auto &a = known[i], &b = known[k];
      const bool same =
          a.process.host == b.process.host && a.process.sees == b.process.sees && a.process.access == b.process.access;
      const bool wanted = a.process.host == b.process.host && !same && !bars(a, a.gpu, b.gpu) && !bars(b, a.gpu, b.gpu);
      ASSERT_EQ(!driver->reaches(all[i], all[k]).has_value(), wanted) << i << " " << k;
    }
  }
}

#endif

}  // namespace
}  // namespace tensorferry

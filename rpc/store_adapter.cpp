#include "rpc/store_adapter.h"

#include <sys/vfs.h>

#include <algorithm>
#include <exception>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>
#include <vector>

#include "agent/transport/address.h"
#include "base/text.h"

namespace tensorferry {
namespace {

constexpr std::chrono::milliseconds first_pause{1}, longest_pause{20};

// Returns whether other hosts may have mounted the path's file system, by the magic numbers of statfs(2).
bool on_network_file_system(const std::string& path) {
  struct statfs info {};
  if (::statfs(path.c_str(), &info) != 0) return true;  // unknown: assume that other hosts may
  switch (static_cast<unsigned long>(info.f_type)) {
    case 0x6969:      // NFS
    case 0x517b:      // SMB
    case 0xfe534d42:  // SMB2
    case 0xff534d42:  // CIFS
    case 0x65735546:  // FUSE
    case 0x0bd00bd0:  // Lustre
    case 0x00c36400:  // Ceph
    case 0x47504653:  // GPFS
    case 0x01021997:  // 9p
      return true;
    default:
      return false;
  }
}

bool within_this_host(c10d::Store& store) {
  if (auto* prefix = dynamic_cast<c10d::PrefixStore*>(&store))
    return within_this_host(*prefix->getUnderlyingNonPrefixStore());
  if (auto* tcp = dynamic_cast<c10d::TCPStore*>(&store)) return tensorferry::is_loopback(tcp->getHost());
  if (auto* file = dynamic_cast<c10d::FileStore*>(&store)) return !on_network_file_system(file->getPath());
  return dynamic_cast<c10d::HashStore*>(&store) != nullptr;
}

std::vector<std::uint8_t> octets(ByteView bytes) {
  const auto* data = reinterpret_cast<const std::uint8_t*>(bytes.data());
  return {data, data + bytes.size()};
}

// Returns the first line of an exception's text, because c10 appends a C++ backtrace.
std::string first_line(const std::exception& error) {
  std::string text(error.what());
  return text.substr(0, text.find('\n'));
}

std::string address_of(c10d::Store& store) {
  if (auto* prefix = dynamic_cast<c10d::PrefixStore*>(&store))
    return address_of(*prefix->getUnderlyingNonPrefixStore());
  auto* tcp = dynamic_cast<c10d::TCPStore*>(&store);
  return tcp == nullptr ? "" : join_host_port(tcp->getHost(), tcp->getPort());
}

}  // namespace

template <class Operation>
Status StoreAdapter::guarded(std::string_view what, std::string_view key, Operation operation) const {
  try {
    operation();
    return {};
  } catch (const c10::DistNetworkError& error) {
    if (!address_.empty()) return rendezvous_gone(address_, first_line(error));
    return {Code::internal, formatted("the store failed to {} \"{}\": {}", what, key, first_line(error))};
  } catch (const std::exception& error) {
    return {Code::internal, formatted("the store failed to {} \"{}\": {}", what, key, first_line(error))};
  }
}

StoreAdapter::StoreAdapter(c10::intrusive_ptr<c10d::Store> store)
    : store_(std::move(store)), loopback_(within_this_host(*store_)), address_(address_of(*store_)) {}

Status StoreAdapter::set(std::string_view key, ByteView value) {
  return guarded("set", key, [&] { store_->set(std::string(key), octets(value)); });
}

Result<Bytes> StoreAdapter::get(std::string_view key, std::chrono::milliseconds timeout) {
  const std::string name(key);
  const auto until = std::chrono::steady_clock::now() + timeout;
  Bytes value;
  bool there = false;
  auto failed = guarded("get", key, [&] {
    for (auto pause = first_pause; !(there = store_->check({name})); pause = std::min(2 * pause, longest_pause)) {
      const auto left = until - std::chrono::steady_clock::now();
      if (left <= left.zero()) return;
      std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(pause, left));
    }
    const auto got = store_->get(name);
    const auto* data = reinterpret_cast<const std::byte*>(got.data());
    value.assign(data, data + got.size());
  });
  if (!failed.ok()) return failed;
  if (there) return value;
  return Status(Code::deadline_exceeded,
                "\"" + name + "\" was not set within " + std::to_string(timeout.count()) + " ms");
}

Result<std::int64_t> StoreAdapter::add(std::string_view key, std::int64_t amount) {
  std::int64_t sum = 0;
  auto failed = guarded("add to", key, [&] { sum = store_->add(std::string(key), amount); });
  if (!failed.ok()) return failed;
  return sum;
}

Status StoreAdapter::erase(std::string_view key) {
  auto failed = guarded("delete", key, [&] { store_->deleteKey(std::string(key)); });
  return failed.code() == Code::internal ? Status() : failed;
}

}  // namespace tensorferry

#include "converters/cpu.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstring>
#include <thread>

namespace tensorferry {
namespace {

std::shared_ptr<HostMemory> memory() { return std::make_shared<HostMemory>(); }

/// Returns a buffer of `bytes` bytes, `misalign` bytes behind an aligned address. `held` counts such buffers while they
/// have an owner.
Buffer received(std::size_t bytes, int& held, std::size_t misalign = 0) {
  auto* block = static_cast<std::byte*>(std::aligned_alloc(64, (bytes + misalign + 127) / 64 * 64));
  for (std::size_t i = 0; i < bytes; ++i) block[misalign + i] = static_cast<std::byte>(i);
  ++held;
  return Buffer{Device{}, block + misalign, bytes, nullptr, Owner(block, [&held](void* at) {
                  --held;
                  std::free(at);
                })};
}

using Watched = c10::weak_intrusive_ptr<c10::StorageImpl>;
Watched watch(const at::Tensor& tensor) {
  return Watched(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(tensor.storage().unsafeGetStorageImpl()));
}

at::Tensor bytes_of(const c10::Storage& storage) {
  return at::empty({0}, at::kByte).set_(storage, 0, {static_cast<std::int64_t>(storage.nbytes())}, {1});
}

TEST(CpuConverter, SendsTheTensorsOwnMemory) {
  CpuConverter converter(memory());
  const auto tensor = at::arange(100, at::kLong);
  const auto buffer = *converter.to_buffer(tensor.storage(), 80, 16);
  EXPECT_EQ(buffer.data, static_cast<const std::byte*>(tensor.const_data_ptr()) + 80);
  EXPECT_EQ(buffer.bytes, 16U);
  EXPECT_EQ(buffer.device, Device{});
}

TEST(CpuConverter, ASentStorageOutlivesItsTensorAndIsDroppedOnAnyThread) {
  CpuConverter converter(memory());
  auto tensor = at::full({1000}, 7, at::kInt);
  auto buffer = *converter.to_buffer(tensor.storage(), 0, 4000);
  const auto watched = watch(tensor);
  tensor.reset();
  std::int32_t last = 0;
  std::memcpy(&last, buffer.data + 3996, 4);
  EXPECT_EQ(last, 7);
  EXPECT_FALSE(watched.expired());
  std::thread([&] { buffer.owner.reset(); }).join();
  EXPECT_TRUE(watched.expired());
}

TEST(CpuConverter, LeavesStoragesUnchangedOnRequest) {
  CpuConverter converter(memory(), [] { return true; });
  auto tensor = at::ones({4});
  const auto watched = watch(tensor);
  (*converter.to_buffer(tensor.storage(), 0, 16)).owner.reset();
  tensor.reset();
  EXPECT_FALSE(watched.expired());
  c10::intrusive_ptr<c10::StorageImpl>::reclaim(watched.lock().get());  // frees the storage that the converter leaked
}

TEST(CpuConverter, SendingDoesNotMaterialiseACopyOnWriteStorage) {
  CpuConverter converter(memory());
  const auto original = at::arange(64, at::kInt);
  const auto lazy = at::_lazy_clone(original);
  const auto buffer = *converter.to_buffer(lazy.storage(), 0, lazy.nbytes());
  EXPECT_EQ(buffer.data, static_cast<const std::byte*>(original.const_data_ptr()));
}

TEST(CpuConverter, AReceivedStorageWrapsItsBlockAndReturnsIt) {
  CpuConverter converter(memory());
  int held = 0;
  auto buffer = received(256, held);
  const auto* at = buffer.data;
  {
    const auto storage = *converter.to_storage(std::move(buffer));
    EXPECT_EQ(storage.data(), at);
    EXPECT_EQ(storage.nbytes(), 256U);
    EXPECT_EQ(held, 1);
  }
  EXPECT_EQ(held, 0);
}

TEST(CpuConverter, AReceivedStorageCanBeResizedAndWritten) {
  CpuConverter converter(memory());
  int held = 0;
  auto tensor = bytes_of(*converter.to_storage(received(100, held)));
  tensor.resize_({1000});
  EXPECT_EQ(held, 0);  // the bytes have moved to memory of torch's allocator
  EXPECT_EQ(tensor[99].item<int>(), 99);
  tensor.fill_(3);
  EXPECT_EQ(tensor.sum().item<std::int64_t>(), 3000);
}

TEST(CpuConverter, MisalignedBytesAreCopiedToAlignedMemory) {
  CpuConverter converter(memory());
  int held = 0;
  const auto storage = *converter.to_storage(received(100, held, 3));
  EXPECT_EQ(held, 0);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(storage.data()) % 16, 0U);
  EXPECT_EQ(bytes_of(storage)[99].item<int>(), 99);
}

TEST(CpuConverter, ZeroBytesMakeAnEmptyStorageThatCanGrow) {
  CpuConverter converter(memory());
  auto tensor = bytes_of(*converter.to_storage(Buffer{}));
  EXPECT_EQ(tensor.numel(), 0);
  tensor.resize_({10}).fill_(1);
  EXPECT_EQ(tensor.sum().item<std::int64_t>(), 10);
}

TEST(CpuConverter, ReceivesIntoItsPool) {
  const auto pool = memory();
  CpuConverter converter(pool);
  EXPECT_EQ(converter.memory(), pool);
  auto buffer = converter.memory()->allocate(1 << 20, Device{});
  ASSERT_NE(buffer.data, nullptr);
  EXPECT_GE(pool->usage().held_bytes, std::size_t{1} << 20);
  auto storage = *converter.to_storage(std::move(buffer));
  EXPECT_GE(pool->usage().held_bytes, std::size_t{1} << 20);
  storage = {};
  EXPECT_EQ(pool->usage().held_bytes, 0U);
}

TEST(Converters, AreFoundByDeviceType) {
  Converters converters;
  EXPECT_EQ(converters.find(DeviceType::cpu), nullptr);
  const auto cpu = std::make_shared<CpuConverter>(memory());
  converters.add(DeviceType::cpu, cpu);
  EXPECT_EQ(converters.find(DeviceType::cpu), cpu.get());
  EXPECT_EQ(converters.find(DeviceType::cuda), nullptr);
  EXPECT_EQ(converters.find(static_cast<DeviceType>(77)), nullptr);
}

}  // namespace
}  // namespace tensorferry

#include "rpc/registering.h"

#include <ATen/MapAllocator.h>

#include <optional>
#include <string>
#include <utility>

#include "channels/allocations.h"
#include "channels/region.h"

namespace tensorferry {
namespace {

using SharedData = std::shared_ptr<at::DataPtr>;

void drop_shared_data(void* context) { delete static_cast<SharedData*>(context); }

/// Makes the memory of a storage outlive what torch does to the storage, and returns an owner of the memory. resize_()
/// and share_memory_() put other memory into a storage and free the old one, of which nothing would tell the cards.
SharedData share_data(c10::StorageImpl& storage) {
  if (storage.data_ptr().get_deleter() == &drop_shared_data)
    return *static_cast<SharedData*>(storage.data_ptr().get_context());
  auto shared = std::make_shared<at::DataPtr>();
  *shared = storage.set_data_ptr(
      at::DataPtr(storage.mutable_data(), new SharedData(shared), &drop_shared_data, storage.device()));
  return shared;
}

/// Returns whether torch shares the storage with other processes. Such a storage is never moved, and torch recognises
/// it by its deleter.
bool is_shared_by_torch(const at::DataPtr& data) {
  return at::MapAllocator::fromDataPtr(data) != nullptr || at::RefcountedMapAllocator::fromDataPtr(data) != nullptr;
}

}  // namespace

Result<RegisteredMemory> register_ahead(const at::Tensor& tensor) {
  const auto no = [](std::string why) { return Status(Code::invalid_argument, "cannot register " + std::move(why)); };
  if (!tensor.defined()) return no("an undefined tensor");
  if (tensor.layout() != at::kStrided || !tensor.has_storage())
    return no("a tensor without one memory of its own (sparse, nested, or inside torch.func): register its parts");
  if (!tensor.is_cpu()) return no("a tensor on " + tensor.device().str() + ": only memory of the CPU can be");
  const auto storage = tensor.storage();
  auto& impl = *storage.unsafeGetStorageImpl();
  auto* const data = static_cast<std::byte*>(impl.mutable_data());
  const auto bytes = storage.nbytes();
  if (data == nullptr || bytes == 0) return RegisteredMemory{};

  auto& all = Allocations::of_this_process();
  Owner owner;
  if (const auto region = Regions::of_this_process().find(data, bytes)) {
    owner = region->region;
  } else if (is_shared_by_torch(impl.data_ptr())) {
    owner = std::make_shared<c10::Storage>(storage);
  } else {
    owner = share_data(impl);
  }
  return RegisteredMemory{all.hold(data, bytes, std::move(owner)), bytes};
}

}  // namespace tensorferry

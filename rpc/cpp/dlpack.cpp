#include "tensorferry/dlpack.h"

#include <memory>
#include <optional>
#include <utility>

#include "tensorferry/errors.h"

namespace tensorferry {
namespace {

struct Pairing {
  DType dtype;
  dlpack::DataType theirs;
};
constexpr Pairing pairings[] = {
    {DType::boolean, {dlpack::boolean, 8, 1}},          {DType::uint8, {dlpack::unsigned_integer, 8, 1}},
    {DType::uint16, {dlpack::unsigned_integer, 16, 1}}, {DType::uint32, {dlpack::unsigned_integer, 32, 1}},
    {DType::uint64, {dlpack::unsigned_integer, 64, 1}}, {DType::int8, {dlpack::signed_integer, 8, 1}},
    {DType::int16, {dlpack::signed_integer, 16, 1}},    {DType::int32, {dlpack::signed_integer, 32, 1}},
    {DType::int64, {dlpack::signed_integer, 64, 1}},    {DType::float16, {dlpack::floating, 16, 1}},
    {DType::float32, {dlpack::floating, 32, 1}},        {DType::float64, {dlpack::floating, 64, 1}},
    {DType::bfloat16, {dlpack::bfloat, 16, 1}},         {DType::complex32, {dlpack::complex, 32, 1}},
    {DType::complex64, {dlpack::complex, 64, 1}},       {DType::complex128, {dlpack::complex, 128, 1}},
};

DType dtype_of(dlpack::DataType theirs) {
  for (const auto& pairing : pairings) {
    if (pairing.theirs.code == theirs.code && pairing.theirs.bits == theirs.bits && theirs.lanes == 1) {
      return pairing.dtype;
    }
  }
  throw InvalidArgument("DLPack type " + std::to_string(theirs.code) + " of " + std::to_string(theirs.bits) +
                        " bits and " + std::to_string(theirs.lanes) + " lanes has no counterpart here");
}

dlpack::DataType theirs_of(DType dtype) {
  for (const auto& pairing : pairings) {
    if (pairing.dtype == dtype) return pairing.theirs;
  }
  throw InvalidArgument("DLPack has no " + std::string(name_of(dtype)));
}

Device device_of(dlpack::DLPackDevice theirs) {
  if (theirs.device_type == dlpack::cpu || theirs.device_type == dlpack::cuda_host) return {};
  if (theirs.device_type == dlpack::cuda && theirs.device_id >= 0 && theirs.device_id < 256) {
    return {DeviceType::cuda, static_cast<std::uint8_t>(theirs.device_id)};
  }
  throw InvalidArgument("DLPack device " + std::to_string(theirs.device_type) + ":" + std::to_string(theirs.device_id) +
                        " has no counterpart here");
}

/// The DLPack tensor that to_dlpack returns, with the tensor that owns its memory.
struct Export {
  dlpack::ManagedTensor managed{};
  Tensor tensor;
  Tensor::Shape shape, strides;
};

}  // namespace

Tensor from_dlpack(dlpack::ManagedTensor* managed) {
  if (managed == nullptr) throw InvalidArgument("the DLPack tensor is null");
  const std::shared_ptr<void> owner(managed, [](dlpack::ManagedTensor* done) {
    if (done->deleter != nullptr) done->deleter(done);
  });
  const auto& array = managed->dl_tensor;
  if (array.ndim < 0 || (array.ndim != 0 && array.shape == nullptr))
    throw InvalidArgument("a DLPack tensor has no shape");
  Tensor::Shape shape(array.shape, array.shape + array.ndim);
  Tensor::Shape strides;
  if (array.strides != nullptr) strides.assign(array.strides, array.strides + array.ndim);
  auto* data = array.data == nullptr ? nullptr : static_cast<std::byte*>(array.data) + array.byte_offset;
  return Tensor::from_memory(data, std::move(shape), dtype_of(array.dtype), owner, std::move(strides),
                             device_of(array.device));
}

dlpack::ManagedTensor* to_dlpack(const Tensor& tensor) {
  auto out = std::make_unique<Export>();
  out->tensor = tensor;
  out->shape = tensor.shape();
  out->strides = tensor.strides();
  auto& array = out->managed.dl_tensor;
  array.data = tensor.raw();
  array.device = tensor.device().type == DeviceType::cuda ? dlpack::DLPackDevice{dlpack::cuda, tensor.device().index}
                                                          : dlpack::DLPackDevice{dlpack::cpu, 0};
  array.ndim = static_cast<std::int32_t>(out->shape.size());
  array.dtype = theirs_of(tensor.dtype());
  array.shape = out->shape.data();
  array.strides = out->strides.data();
  out->managed.manager_ctx = out.get();
  out->managed.deleter = [](dlpack::ManagedTensor* self) {
    const std::unique_ptr<Export> ends(static_cast<Export*>(self->manager_ctx));
  };
  return &out.release()->managed;
}

}  // namespace tensorferry

#include "tensorferry/tensor.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "rpc/core/layout.h"
#include "tensorferry/errors.h"

namespace tensorferry {
namespace {

std::string text_of(const Tensor::Shape& shape) {
  std::string out = "[";
  for (const auto size : shape) out += (out.size() == 1 ? "" : ", ") + std::to_string(size);
  return out + "]";
}

/// Returns the number of elements of a tensor of that shape. Throws InvalidArgument if a size is negative, the tensor
/// is too large, it has more than 64 dimensions, or there is no such dtype.
std::size_t count_of(const Tensor::Shape& shape, DType dtype) {
  const auto each = size_of(dtype);
  if (each == 0) throw InvalidArgument("there is no such dtype");
  if (shape.size() > Dims::max) throw InvalidArgument("a tensor has at most 64 dimensions");
  // Sizes of 0 are left out until the end, so that the product of the other sizes is checked too.
  std::size_t count = 1;
  bool none = false;
  for (const auto size : shape) {
    if (size < 0) throw InvalidArgument("a tensor of shape " + text_of(shape) + " is invalid: a size is negative");
    none = none || size == 0;
    const bool overflows = size != 0 && __builtin_mul_overflow(count, static_cast<std::size_t>(size), &count);
    if (overflows || count > PTRDIFF_MAX / each) {
      throw InvalidArgument("a tensor of shape " + text_of(shape) + " is too large");
    }
  }
  return none ? 0 : count;
}

Tensor::Shape row_major(const Tensor::Shape& shape) {
  Tensor::Shape strides(shape.size());
  std::int64_t stride = 1;
  for (auto i = shape.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<std::int64_t>(shape[i], 1);
  }
  return strides;
}

/// Copies the elements of dimension `at` and of the later dimensions between two tensors of one shape and dtype.
void copy_elements(const Tensor& from, const Tensor& to, std::size_t at, const std::byte* source, std::byte* target) {
  const auto each = size_of(from.dtype());
  if (at == from.shape().size()) {
    std::memcpy(target, source, each);
    return;
  }
  const auto size = from.shape()[at];
  if (at + 1 == from.shape().size() && from.strides()[at] == 1 && to.strides()[at] == 1) {
    std::memcpy(target, source, static_cast<std::size_t>(size) * each);
    return;
  }
  for (std::int64_t i = 0; i < size; ++i) {
    copy_elements(from, to, at + 1, source + i * from.strides()[at] * static_cast<std::int64_t>(each),
                  target + i * to.strides()[at] * static_cast<std::int64_t>(each));
  }
}

}  // namespace

Tensor Tensor::empty(Shape shape, DType dtype) {
  const auto bytes = count_of(shape, dtype) * size_of(dtype);
  std::shared_ptr<std::byte[]> memory(new std::byte[std::max<std::size_t>(bytes, 1)]);  // NOLINT: uninitialised
  void* data = memory.get();
  return from_memory(data, std::move(shape), dtype, std::shared_ptr<void>(std::move(memory), data));
}

Tensor Tensor::of_elements(void* data, std::size_t count, Shape shape, DType dtype, std::shared_ptr<void> owner) {
  if (count_of(shape, dtype) != count) {
    throw InvalidArgument("a tensor of shape " + text_of(shape) + " cannot be made of " + std::to_string(count) +
                          " elements");
  }
  return from_memory(data, std::move(shape), dtype, std::move(owner));
}

Tensor Tensor::from_memory(void* data, Shape shape, DType dtype, std::shared_ptr<void> owner, Shape strides,
                           Device device) {
  Tensor out;
  out.size_ = count_of(shape, dtype);
  if (strides.empty()) strides = row_major(shape);
  if (strides.size() != shape.size()) {
    throw InvalidArgument(std::to_string(strides.size()) + " strides do not fit the shape " + text_of(shape));
  }
  if (std::any_of(strides.begin(), strides.end(), [](auto stride) { return stride < 0; })) {
    throw InvalidArgument("negative strides cannot be sent: copy the tensor first");
  }
  if (data == nullptr && out.size_ != 0) throw InvalidArgument("a tensor with elements needs memory");
  out.dtype_ = dtype;
  out.device_ = device;
  out.shape_ = std::move(shape);
  out.strides_ = std::move(strides);
  out.data_ = data;
  out.owner_ = std::move(owner);
  return out;
}

bool Tensor::is_contiguous() const noexcept {
  if (size_ == 0) return true;
  std::int64_t stride = 1;
  for (auto i = shape_.size(); i-- > 0;) {
    if (shape_[i] != 1 && strides_[i] != stride) return false;
    stride *= shape_[i];
  }
  return true;
}

void Tensor::check_access(DType wanted) const {
  if (dtype_ != wanted) throw InvalidArgument("a " + text() + " is read as " + std::string(name_of(wanted)));
  if (device_.type != DeviceType::cpu) {
    throw InvalidArgument("a " + text() + " on " + tensorferry::text_of(device_) + " is read as host memory");
  }
}

void Tensor::check_contiguous() const {
  if (!is_contiguous()) throw InvalidArgument("a " + text() + " is not contiguous: see Tensor::contiguous()");
}

void Tensor::check_one() const {
  if (size_ != 1) throw InvalidArgument("a " + text() + " is not one element");
}

Tensor Tensor::contiguous() const { return is_contiguous() ? *this : clone(); }

Tensor Tensor::clone() const {
  if (device_.type != DeviceType::cpu) throw InvalidArgument("a " + text() + " can be copied only in host memory");
  auto out = empty(shape_, dtype_);
  out.copy_from(*this);
  return out;
}

void Tensor::copy_from(const Tensor& other) const {
  if (device_.type != DeviceType::cpu || other.device_.type != DeviceType::cpu) {
    throw InvalidArgument("a " + other.text() + " can be copied only in host memory");
  }
  if (dtype_ != other.dtype_ || shape_ != other.shape_) {
    throw InvalidArgument("a " + other.text() + " cannot be copied into a " + text());
  }
  if (size_ == 0) return;
  if (is_contiguous() && other.is_contiguous()) {
    std::memmove(data_, other.data_, bytes());
  } else {
    copy_elements(other, *this, 0, static_cast<const std::byte*>(other.data_), static_cast<std::byte*>(data_));
  }
}

Tensor Tensor::reshape(Shape shape) const {
  check_contiguous();
  if (count_of(shape, dtype_) != size_) {
    throw InvalidArgument("a " + text() + " cannot have the shape " + text_of(shape));
  }
  return from_memory(data_, std::move(shape), dtype_, owner_, {}, device_);
}

std::string Tensor::text() const { return std::string(name_of(dtype_)) + " tensor " + text_of(shape_); }

}  // namespace tensorferry

/// Tensors without torch: a dtype, a shape, strides, and memory with an owner.
#pragma once

#include <complex>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "tensorferry/device.h"
#include "tensorferry/dtype.h"

namespace tensorferry {

/// The dtype of elements of C++ type T. Defined for bool, the integers of fixed width, float, double, and their complex
/// types.
template <class T>
struct DTypeOf;
template <>
struct DTypeOf<bool> : std::integral_constant<DType, DType::boolean> {};
template <>
struct DTypeOf<std::int8_t> : std::integral_constant<DType, DType::int8> {};
template <>
struct DTypeOf<std::int16_t> : std::integral_constant<DType, DType::int16> {};
template <>
struct DTypeOf<std::int32_t> : std::integral_constant<DType, DType::int32> {};
template <>
struct DTypeOf<std::int64_t> : std::integral_constant<DType, DType::int64> {};
template <>
struct DTypeOf<std::uint8_t> : std::integral_constant<DType, DType::uint8> {};
template <>
struct DTypeOf<std::uint16_t> : std::integral_constant<DType, DType::uint16> {};
template <>
struct DTypeOf<std::uint32_t> : std::integral_constant<DType, DType::uint32> {};
template <>
struct DTypeOf<std::uint64_t> : std::integral_constant<DType, DType::uint64> {};
template <>
struct DTypeOf<float> : std::integral_constant<DType, DType::float32> {};
template <>
struct DTypeOf<double> : std::integral_constant<DType, DType::float64> {};
template <>
struct DTypeOf<std::complex<float>> : std::integral_constant<DType, DType::complex64> {};
template <>
struct DTypeOf<std::complex<double>> : std::integral_constant<DType, DType::complex128> {};
template <class T>
inline constexpr DType dtype_v = DTypeOf<std::remove_cv_t<T>>::value;

/// A strided tensor. Copies share its memory, as torch's do. The memory of a tensor that arrives from a peer belongs to
/// this process, except if the peer handed it over to be shared.
///
/// Threads: access to the elements is not synchronised. A thread that writes them makes sure that no other thread uses
/// them. The elements of an argument of a call must not be written until its future has completed.
class Tensor {
 public:
  using Shape = std::vector<std::int64_t>;

  /// Makes a float32 tensor of shape [0].
  Tensor() = default;

  /// Makes a row-major tensor in uninitialised host memory. Throws InvalidArgument if a size is negative, the tensor is
  /// too large for the address space, it has more than 64 dimensions, or there is no such dtype.
  static Tensor empty(Shape shape, DType dtype);
  /// Makes a tensor of a vector's elements, and takes the vector's memory without a copy. An empty `shape` means
  /// [values.size()]. Throws InvalidArgument if `shape` has another number of elements.
  template <class T>
  static Tensor from_vector(std::vector<T> values, Shape shape = {}) {
    static_assert(!std::is_same_v<T, bool>, "std::vector<bool> packs its elements");
    if (shape.empty()) shape = {static_cast<std::int64_t>(values.size())};
    const auto count = values.size();
    auto owner = std::make_shared<std::vector<T>>(std::move(values));
    void* data = owner->data();
    return of_elements(data, count, std::move(shape), dtype_v<T>, std::move(owner));
  }
  /// Makes a tensor of one element, of shape [].
  template <class T>
  static Tensor scalar(T value) {
    auto owner = std::make_shared<T>(value);
    void* data = owner.get();
    return from_memory(data, {}, dtype_v<T>, std::move(owner));
  }
  /// Makes a tensor in existing memory, without a copy.
  ///
  /// `owner` keeps the memory alive. It is released with the last tensor that shares the memory, on any thread. If it
  /// is null, the caller makes sure that the memory outlives every copy of the tensor, and every call that the tensor
  /// was passed to until that call has completed. `strides` count elements; empty means row-major. Throws
  /// InvalidArgument if `shape` is invalid (see empty()), if the number of strides is another, if a stride is negative,
  /// or if `data` is null and there are elements.
  static Tensor from_memory(void* data, Shape shape, DType dtype, std::shared_ptr<void> owner, Shape strides = {},
                            Device device = {});

  [[nodiscard]] DType dtype() const noexcept { return dtype_; }
  [[nodiscard]] Device device() const noexcept { return device_; }
  [[nodiscard]] const Shape& shape() const noexcept { return shape_; }
  /// Returns the strides in elements, one for each dimension.
  [[nodiscard]] const Shape& strides() const noexcept { return strides_; }
  /// Returns the number of elements; 1 if the shape is [].
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  /// Returns size() times the bytes of an element.
  [[nodiscard]] std::size_t bytes() const noexcept { return size_ * size_of(dtype_); }
  /// Returns whether the elements lie in row-major order without gaps.
  [[nodiscard]] bool is_contiguous() const noexcept;

  /// Returns a pointer to the first element. Throws InvalidArgument if the dtype is not T's, or the memory is not the
  /// host's.
  template <class T>
  [[nodiscard]] T* data() const {
    check_access(dtype_v<T>);
    return static_cast<T*>(data_);
  }
  /// Returns all elements of a contiguous tensor. Throws InvalidArgument as data() does, and if the tensor is not
  /// contiguous (see contiguous()).
  template <class T>
  [[nodiscard]] std::span<T> elements() const {
    check_access(dtype_v<T>);
    check_contiguous();
    return {static_cast<T*>(data_), size_};
  }
  /// Returns the value of a tensor of one element. Throws InvalidArgument as data() does, and if the tensor has another
  /// number of elements.
  template <class T>
  [[nodiscard]] T item() const {
    check_one();
    return *data<T>();
  }
  /// Returns a pointer to the first element, of any dtype, on any device.
  [[nodiscard]] void* raw() const noexcept { return data_; }
  /// Returns the owner of the memory; null if the caller keeps it alive.
  [[nodiscard]] const std::shared_ptr<void>& owner() const noexcept { return owner_; }

  /// Returns the tensor itself if it is contiguous, else a contiguous copy. Throws InvalidArgument if a copy is needed
  /// and the tensor is not in host memory.
  [[nodiscard]] Tensor contiguous() const;
  /// Returns a contiguous copy in memory of its own. Throws InvalidArgument if the tensor is not in host memory.
  [[nodiscard]] Tensor clone() const;
  /// Copies the elements of `other`, which has the same shape and dtype, into this tensor's memory. Throws
  /// InvalidArgument if it has not, or if one of them is not in host memory.
  void copy_from(const Tensor& other) const;
  /// Returns a tensor of another shape in the same memory. Throws InvalidArgument if the tensor is not contiguous, or
  /// if `shape` has another number of elements.
  [[nodiscard]] Tensor reshape(Shape shape) const;

  /// Returns a description for messages: "float32 tensor [2, 3]".
  [[nodiscard]] std::string text() const;

 private:
  static Tensor of_elements(void* data, std::size_t count, Shape shape, DType dtype, std::shared_ptr<void> owner);
  void check_access(DType wanted) const;
  void check_contiguous() const;
  void check_one() const;

  DType dtype_ = DType::float32;
  Device device_;
  Shape shape_{0};
  Shape strides_{1};
  std::size_t size_ = 0;
  void* data_ = nullptr;
  std::shared_ptr<void> owner_;
};

/// A tensor in host memory whose elements are known to be of type T. An argument or a result of this type accepts
/// tensors of that dtype only.
template <class T>
class TensorOf : public Tensor {
 public:
  TensorOf() : Tensor(Tensor::empty({0}, dtype_v<T>)) {}
  /// Throws InvalidArgument if `tensor` has another dtype or is not in host memory.
  TensorOf(Tensor tensor) : Tensor(std::move(tensor)) {  // NOLINT(google-explicit-constructor)
    static_cast<void>(Tensor::data<T>());
  }
  [[nodiscard]] T* data() const { return static_cast<T*>(raw()); }
  [[nodiscard]] std::span<T> elements() const { return Tensor::elements<T>(); }
};

}  // namespace tensorferry

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

/// The dtype of elements of type T; defined for bool, the integers, float, double, and their complex types.
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

/// A strided tensor in memory that somebody owns. Copies share the memory, as torch's do; what arrives from a peer is
/// this process's own. Not synchronised: who writes elements sees to it that nobody else uses them, and leaves an
/// argument of a call alone until its future has completed.
class Tensor {
 public:
  using Shape = std::vector<std::int64_t>;

  /// float32 of shape [0].
  Tensor() = default;

  /// Uninitialised host memory, row-major. InvalidArgument: a negative size, or more bytes than there can be.
  static Tensor empty(Shape shape, DType dtype);
  /// The vector's own memory, moved in; of shape [values.size()] unless `shape` says otherwise, of as many elements.
  template <class T>
  static Tensor from_vector(std::vector<T> values, Shape shape = {}) {
    static_assert(!std::is_same_v<T, bool>, "std::vector<bool> packs its elements");
    if (shape.empty()) shape = {static_cast<std::int64_t>(values.size())};
    const auto count = values.size();
    auto owner = std::make_shared<std::vector<T>>(std::move(values));
    void* data = owner->data();
    return of_elements(data, count, std::move(shape), dtype_v<T>, std::move(owner));
  }
  /// One element, of shape [].
  template <class T>
  static Tensor scalar(T value) {
    auto owner = std::make_shared<T>(value);
    void* data = owner.get();
    return from_memory(data, {}, dtype_v<T>, std::move(owner));
  }
  /// Memory of somebody else's, which `owner` keeps alive: it is dropped with the last tensor, on any thread. No copy
  /// is made. `strides` count elements, none negative; empty: row-major. An owner of null: the caller sees to it that
  /// the memory outlives every copy, a call's until it has completed.
  static Tensor from_memory(void* data, Shape shape, DType dtype, std::shared_ptr<void> owner, Shape strides = {},
                            Device device = {});

  [[nodiscard]] DType dtype() const noexcept { return dtype_; }
  [[nodiscard]] Device device() const noexcept { return device_; }
  [[nodiscard]] const Shape& shape() const noexcept { return shape_; }
  /// In elements; as many as there are dimensions.
  [[nodiscard]] const Shape& strides() const noexcept { return strides_; }
  /// How many elements; 1 of shape [].
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  /// size() times the bytes of an element.
  [[nodiscard]] std::size_t bytes() const noexcept { return size_ * size_of(dtype_); }
  /// Row-major without gaps.
  [[nodiscard]] bool is_contiguous() const noexcept;

  /// The first element. InvalidArgument: of another dtype than T, or not in host memory.
  template <class T>
  [[nodiscard]] T* data() const {
    check_access(dtype_v<T>);
    return static_cast<T*>(data_);
  }
  /// All elements of a contiguous tensor. InvalidArgument: also where it is not (see contiguous()).
  template <class T>
  [[nodiscard]] std::span<T> elements() const {
    check_access(dtype_v<T>);
    check_contiguous();
    return {static_cast<T*>(data_), size_};
  }
  /// The value of a tensor of one element.
  template <class T>
  [[nodiscard]] T item() const {
    check_one();
    return *data<T>();
  }
  /// The first element, of whatever dtype, on whatever device.
  [[nodiscard]] void* raw() const noexcept { return data_; }
  [[nodiscard]] const std::shared_ptr<void>& owner() const noexcept { return owner_; }

  /// Itself where it is row-major already, else a copy that is. Host memory only.
  [[nodiscard]] Tensor contiguous() const;
  /// A copy in memory of its own, row-major. Host memory only.
  [[nodiscard]] Tensor clone() const;
  /// The same elements under another shape, of as many. InvalidArgument: not contiguous.
  [[nodiscard]] Tensor reshape(Shape shape) const;

  /// "float32 tensor [2, 3]".
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

/// A tensor whose elements are known to be of type T: as an argument or a result it takes tensors of that dtype alone.
template <class T>
class TensorOf : public Tensor {
 public:
  TensorOf() : Tensor(Tensor::empty({0}, dtype_v<T>)) {}
  /// InvalidArgument: of another dtype.
  TensorOf(Tensor tensor) : Tensor(std::move(tensor)) {  // NOLINT(google-explicit-constructor)
    static_cast<void>(Tensor::data<T>());
  }
  [[nodiscard]] T* data() const { return static_cast<T*>(raw()); }
  [[nodiscard]] std::span<T> elements() const { return Tensor::elements<T>(); }
};

}  // namespace tensorferry

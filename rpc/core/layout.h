/// Layouts of tensors and arrays in buffers, without torch or numpy, and the checks that a layout from a peer stays
/// inside its buffer. Plain values and pure functions.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "base/status.h"
#include "channels/buffer.h"
#include "include/tensorferry/dtype.h"

namespace tensorferry {

/// Sizes or strides: up to 64 numbers, stored inline. A copy copies the numbers in use alone.
class Dims {
 public:
  static constexpr std::size_t max = 64;  // torch's and numpy's own limit is 64

  Dims() noexcept {}  // the numbers past size() stay uninitialised
  Dims(std::initializer_list<std::int64_t> values) : Dims(std::span(values.begin(), values.size())) {}
  /// Copies `values` and cuts off those beyond `max`; callers check the size first.
  explicit Dims(std::span<const std::int64_t> values) {
    for (const auto value : values) push_back(value);
  }
  Dims(const Dims& other) noexcept { *this = other; }
  Dims& operator=(const Dims& other) noexcept {
    size_ = other.size_;
    std::copy_n(other.values_.begin(), size_, values_.begin());
    return *this;
  }

  void push_back(std::int64_t value) noexcept {
    if (size_ < max) values_[size_++] = value;
  }
  void clear() noexcept { size_ = 0; }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] bool empty() const noexcept { return size_ == 0; }
  std::int64_t& operator[](std::size_t i) noexcept { return values_[i]; }
  std::int64_t operator[](std::size_t i) const noexcept { return values_[i]; }
  [[nodiscard]] const std::int64_t* data() const noexcept { return values_.data(); }
  [[nodiscard]] const std::int64_t* begin() const noexcept { return values_.data(); }
  [[nodiscard]] const std::int64_t* end() const noexcept { return values_.data() + size_; }
  operator std::span<const std::int64_t>() const noexcept { return {data(), size()}; }  // NOLINT
  bool operator==(const Dims& other) const noexcept { return std::equal(begin(), end(), other.begin(), other.end()); }

 private:
  std::size_t size_ = 0;
  std::array<std::int64_t, max> values_;
};

/// A strided tensor inside a buffer. Several tensors of one message may lie in the same buffer: they share memory at
/// the receiver as they do at the sender, which then sends the whole storage.
struct TensorLayout {
  enum Flag : std::uint8_t {
    requires_grad = 1,  // arrives as a leaf
    parameter = 2,      // torch.nn.Parameter
    conjugate = 4,      // the lazy conjugate bit; complex only
    negative = 8,       // the lazy negative bit
  };

  DType dtype = DType::float32;
  std::uint8_t flags = 0;
  Device device;  // the tensor's device at the sender; the buffer's record says where it lands
  Dims sizes;
  Dims strides;                     // in elements, not negative; as many as sizes
  std::int64_t storage_offset = 0;  // in elements, from the start of the buffer

  bool operator==(const TensorLayout&) const = default;

  /// Sets `strides` to row-major. Returns false, and leaves them unspecified, if they do not fit 63 bits.
  bool set_contiguous() noexcept;
  /// Returns whether the strides are row-major, exactly as set_contiguous() sets them.
  [[nodiscard]] bool is_contiguous() const noexcept;
};

/// Checks that every element of `layout` lies inside a buffer of `buffer_bytes` bytes, that the element count and the
/// extents fit 63 bits, and that the flags suit the dtype. Assumes nothing about the numbers. Code that makes a tensor
/// from a record must have called it; Decoder::next() has. ProtocolError: the text says which number is wrong.
Status validate(const TensorLayout& layout, std::uint64_t buffer_bytes);

/// A sparse tensor, which travels as the strided tensors that it consists of.
struct SparseLayout {
  enum class Kind : std::uint8_t { coo = 0, csr = 1, csc = 2, bsr = 3, bsc = 4 };
  enum Flag : std::uint8_t { requires_grad = 1, parameter = 2, coalesced = 4 };

  Kind kind = Kind::coo;
  std::uint8_t flags = 0;
  Dims sizes;

  bool operator==(const SparseLayout&) const = default;

  /// Returns the number of strided tensors that follow: (indices, values) for coo; (compressed indices, plain indices,
  /// values) for the other kinds.
  [[nodiscard]] std::size_t parts() const noexcept { return kind == Kind::coo ? 2 : 3; }
};

/// A numpy array or scalar, which travels as its contiguous elements.
struct ArrayLayout {
  enum Flag : std::uint8_t {
    fortran = 1,    // column-major
    read_only = 2,  // the array is not writeable
    scalar = 4,     // a numpy scalar (np.float64(1.5)), not an array without dimensions
  };

  std::string dtype;  // numpy's dtype.str: "<f8", "|b1", "<U5", "<M8[ns]"
  std::uint32_t item_bytes = 0;
  std::uint8_t flags = 0;
  Dims sizes;

  bool operator==(const ArrayLayout&) const = default;
};

/// Checks that the elements take exactly `bytes` bytes, and that `dtype` is of plain bytes, never of objects: byte
/// order, one of "biufcSUVmM", a count, and for m and M optionally a unit in brackets. Its elements must have at least
/// one byte, and as many as `item_bytes` says. The reader must still compare `item_bytes` with the item size of numpy's
/// dtype. ProtocolError: the text says what is wrong.
Status validate(const ArrayLayout& layout, std::uint64_t bytes);

}  // namespace tensorferry

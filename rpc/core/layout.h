/// How the elements of a tensor or array lie in a buffer, without torch or numpy: what a record in a message says, and
/// the proof that it stays inside the buffer.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "channels/buffer.h"
#include "channels/status.h"
#include "include/tensorferry/dtype.h"

namespace tensorferry {

/// Sizes or strides: up to 64 numbers in place. Copying costs what is used.
class Dims {
 public:
  static constexpr std::size_t max = 64;  // torch's and numpy's own limit is 64

  Dims() noexcept {}  // the numbers past size() stay uninitialised
  Dims(std::initializer_list<std::int64_t> values) : Dims(std::span(values.begin(), values.size())) {}
  /// `values` beyond `max` are cut off; callers check first.
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
/// the receiver as they did at the sender (who then sends the storage whole).
struct TensorLayout {
  enum Flag : std::uint8_t {
    requires_grad = 1,  // arrives as a leaf
    parameter = 2,      // torch.nn.Parameter
    conjugate = 4,      // the lazy conjugate bit; complex only
    negative = 8,       // the lazy negative bit
  };

  DType dtype = DType::float32;
  std::uint8_t flags = 0;
  Device device;  // where the sender wants it to land
  Dims sizes;
  Dims strides;                     // in elements, not negative; as many as sizes
  std::int64_t storage_offset = 0;  // in elements, from the start of the buffer

  bool operator==(const TensorLayout&) const = default;

  /// Sets `strides` to row-major. False (strides unspecified) where they do not fit 63 bits.
  bool set_contiguous() noexcept;
  [[nodiscard]] bool is_contiguous() const noexcept;  // row-major, exactly as set_contiguous() has it
};

/// Proves that every element of `layout` lies inside a buffer of `buffer_bytes` bytes, that element count and extents
/// fit 63 bits, and that the flags suit the dtype. Everyone who makes a tensor from a record calls it (Decoder has).
/// ProtocolError says which number is wrong. Assumes nothing about the numbers.
Status validate(const TensorLayout& layout, std::uint64_t buffer_bytes);

/// A sparse tensor travels as the strided tensors that it is made of.
struct SparseLayout {
  enum class Kind : std::uint8_t { coo = 0, csr = 1, csc = 2, bsr = 3, bsc = 4 };
  enum Flag : std::uint8_t { requires_grad = 1, parameter = 2, coalesced = 4 };

  Kind kind = Kind::coo;
  std::uint8_t flags = 0;
  Dims sizes;

  bool operator==(const SparseLayout&) const = default;

  /// Strided tensors that follow: (indices, values) for coo; (compressed indices, plain indices, values) for the
  /// others.
  [[nodiscard]] std::size_t parts() const noexcept { return kind == Kind::coo ? 2 : 3; }
};

/// A numpy array or scalar: contiguous, its elements alone.
struct ArrayLayout {
  enum Flag : std::uint8_t {
    fortran = 1,    // column-major
    read_only = 2,  // the array was not writeable
    scalar = 4,     // a numpy scalar (np.float64(1.5)), not an array of no dimensions
  };

  std::string dtype;  // numpy's dtype.str: "<f8", "|b1", "<U5", "<M8[ns]"
  std::uint32_t item_bytes = 0;
  std::uint8_t flags = 0;
  Dims sizes;

  bool operator==(const ArrayLayout&) const = default;
};

/// Proves that `bytes` is exactly what the elements take, and that `dtype` is one of plain bytes (never an object's):
/// byte order, one of "biufcSUVmM", a count, and for m and M a unit in brackets. The reader still compares `item_bytes`
/// with what numpy makes of `dtype`.
Status validate(const ArrayLayout& layout, std::uint64_t bytes);

}  // namespace tensorferry

#include "rpc/core/layout.h"

#include <charconv>
#include <limits>
#include <optional>
#include <string_view>
#include <system_error>

#include "base/text.h"

namespace tensorferry {
namespace {

/// A number that remembers whether it ever left the range of int64.
class Checked {
 public:
  explicit Checked(std::int64_t value) : value_(value) {}
  Checked& operator*=(std::int64_t factor) {
    overflowed_ |= __builtin_mul_overflow(value_, factor, &value_);
    return *this;
  }
  Checked& operator+=(Checked other) {
    overflowed_ |= other.overflowed_ | __builtin_add_overflow(value_, other.value_, &value_);
    return *this;
  }
  [[nodiscard]] bool fits(std::uint64_t most) const {
    return !overflowed_ && value_ >= 0 && static_cast<std::uint64_t>(value_) <= most;
  }
  [[nodiscard]] std::int64_t value() const { return value_; }

 private:
  std::int64_t value_;
  bool overflowed_ = false;
};

constexpr std::uint64_t any = std::numeric_limits<std::int64_t>::max();

std::string text_of(const Dims& dims) { return formatted("[{}]", joined(dims, ", ")); }

Status wrong(std::string what) { return {Code::protocol_error, std::move(what)}; }

/// Returns the number of elements. The product of the sizes must not overflow even if one of them is 0, because the
/// computation of strides multiplies the other sizes all the same.
Checked elements_of(const Dims& sizes) {
  Checked product(1);
  bool none = false;
  for (const auto size : sizes) {
    none |= size == 0;
    product *= std::max<std::int64_t>(size, 1);
  }
  if (none) product *= 0;
  return product;
}

Status validate_sizes(const Dims& sizes, std::size_t item_bytes) {
  for (const auto size : sizes) {
    if (size < 0) return wrong(formatted("sizes {} hold a negative one", text_of(sizes)));
  }
  auto bytes = elements_of(sizes);
  bytes *= static_cast<std::int64_t>(item_bytes);
  if (!bytes.fits(any)) return wrong(formatted("sizes {} take more than 2^63 bytes", text_of(sizes)));
  return {};
}

Status validate_flags(const TensorLayout& layout) {
  constexpr auto known =
      TensorLayout::requires_grad | TensorLayout::parameter | TensorLayout::conjugate | TensorLayout::negative;
  if ((layout.flags & ~known) != 0) return wrong(formatted("tensor flags 0x{} are not known", hex(layout.flags)));
  if ((layout.flags & TensorLayout::conjugate) != 0 && !is_complex(layout.dtype)) {
    return wrong(formatted("a tensor of {} is marked as conjugate", name_of(layout.dtype)));
  }
  if ((layout.flags & TensorLayout::negative) != 0 && layout.dtype == DType::boolean) {
    return wrong("a tensor of bool is marked as negative");
  }
  if ((layout.flags & TensorLayout::requires_grad) != 0 && !is_differentiable(layout.dtype)) {
    return wrong(formatted("a tensor of {} is marked as requiring grad", name_of(layout.dtype)));
  }
  return {};
}

}  // namespace

bool TensorLayout::set_contiguous() noexcept {
  strides.clear();
  for (std::size_t i = 0; i < sizes.size(); ++i) strides.push_back(1);
  Checked stride(1);
  for (std::size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride.value();
    stride *= std::max<std::int64_t>(sizes[i], 1);
  }
  return stride.fits(any);
}

bool TensorLayout::is_contiguous() const noexcept {
  if (strides.size() != sizes.size()) return false;
  Checked stride(1);
  for (std::size_t i = sizes.size(); i-- > 0;) {
    if (strides[i] != stride.value()) return false;
    stride *= std::max<std::int64_t>(sizes[i], 1);
  }
  return stride.fits(any);
}

Status validate(const TensorLayout& layout, std::uint64_t buffer_bytes) {
  const auto item = size_of(layout.dtype);
  if (item == 0) return wrong(formatted("there is no dtype {}", static_cast<unsigned>(layout.dtype)));
  if (auto status = validate_flags(layout); !status.ok()) return status;
  if (auto status = validate_sizes(layout.sizes, item); !status.ok()) return status;
  if (layout.strides.size() != layout.sizes.size()) {
    return wrong(formatted("{} sizes have {} strides", layout.sizes.size(), layout.strides.size()));
  }
  if (layout.storage_offset < 0) return wrong(formatted("storage offset {} is negative", layout.storage_offset));

  Checked end(layout.storage_offset);  // one past the last element, counted from the buffer's start
  bool none = false;
  for (std::size_t i = 0; i < layout.sizes.size(); ++i) {
    if (layout.strides[i] < 0) return wrong(formatted("strides {} hold a negative one", text_of(layout.strides)));
    none |= layout.sizes[i] == 0;
  }
  for (std::size_t i = 0; i < layout.sizes.size() && !none; ++i) {
    Checked reach(layout.sizes[i] - 1);
    reach *= layout.strides[i];
    end += reach;
  }
  if (!none) end += Checked(1);
  end *= static_cast<std::int64_t>(item);
  if (!end.fits(buffer_bytes)) {
    return wrong(formatted("a {} tensor of sizes {}, strides {}, offset {} reaches past its buffer of {} bytes",
                           name_of(layout.dtype), text_of(layout.sizes), text_of(layout.strides), layout.storage_offset,
                           buffer_bytes));
  }
  return {};
}

namespace {

/// Returns the number that `text` consists of, at most 9 digits; nullopt if it is none.
std::optional<std::uint64_t> number_in(std::string_view text) {
  std::uint32_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (text.empty() || text.size() > 9 || error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

/// Returns the bytes of an element of numpy's dtype.str of a type of plain bytes; 0 if it is no such type. A type
/// without bytes ("|S0") is none: numpy makes arrays of another type of it, whose elements no message fills.
std::uint64_t item_bytes_of(std::string_view dtype) {
  if (dtype.size() < 3 || std::string_view("<>|=").find(dtype[0]) == std::string_view::npos) return 0;
  const char kind = dtype[1];
  dtype.remove_prefix(2);
  if (kind == 'm' || kind == 'M') {  // "<M8", "<M8[ns]", "<m8[25us]"
    if (dtype[0] != '8') return 0;
    dtype.remove_prefix(1);
    if (dtype.empty()) return 8;
    if (dtype.size() < 3 || dtype.front() != '[' || dtype.back() != ']') return 0;
    const bool unit = std::all_of(dtype.begin() + 1, dtype.end() - 1, [](char c) {
      return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    });
    return unit ? 8 : 0;
  }
  if (std::string_view("biufcSUV").find(kind) == std::string_view::npos) return 0;
  const auto count = number_in(dtype);
  constexpr std::uint64_t bytes_of_a_character = 4;  // of 'U': UTF-32
  return count ? *count * (kind == 'U' ? bytes_of_a_character : 1) : 0;
}

}  // namespace

Status validate(const ArrayLayout& layout, std::uint64_t bytes) {
  constexpr auto known = ArrayLayout::fortran | ArrayLayout::read_only | ArrayLayout::scalar;
  if ((layout.flags & ~known) != 0) return wrong(formatted("array flags 0x{} are not known", hex(layout.flags)));
  const auto item = layout.dtype.size() <= 32 ? item_bytes_of(layout.dtype) : 0;
  if (item == 0) return wrong("an array's dtype is not one of plain bytes, at least one an element");
  if (item != layout.item_bytes) {
    return wrong(formatted("an array of dtype {} comes with {} bytes an element", layout.dtype, layout.item_bytes));
  }
  if ((layout.flags & ArrayLayout::scalar) != 0 && !layout.sizes.empty()) return wrong("a scalar has dimensions");
  if (auto status = validate_sizes(layout.sizes, layout.item_bytes); !status.ok()) return status;
  auto expected = elements_of(layout.sizes);
  expected *= layout.item_bytes;
  if (!expected.fits(bytes) || static_cast<std::uint64_t>(expected.value()) != bytes) {
    return wrong(formatted("an array of sizes {} and {} bytes an element comes with {} bytes", text_of(layout.sizes),
                           layout.item_bytes, bytes));
  }
  return {};
}

}  // namespace tensorferry

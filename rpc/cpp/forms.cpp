#include "rpc/cpp/forms.h"

#include <algorithm>
#include <charconv>
#include <utility>

namespace tensorferry::detail {
namespace {

std::optional<DType> dtype_of(std::string_view name) {
  for (unsigned number = 0; number < 256; ++number) {
    const auto dtype = static_cast<DType>(number);
    if (size_of(dtype) != 0 && name_of(dtype) == name) return dtype;
  }
  return std::nullopt;
}

std::optional<Tensor::Shape> numbers_of(std::string_view text) {
  Tensor::Shape out;
  while (!text.empty()) {
    const auto end = std::min(text.find(','), text.size());
    std::int64_t number = 0;
    const auto parsed = std::from_chars(text.data(), text.data() + end, number);
    if (parsed.ec != std::errc() || parsed.ptr != text.data() + end || number < 0 || out.size() == 64) {
      return std::nullopt;
    }
    out.push_back(number);
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return out;
}

}  // namespace

bool TensorForm::is_row_major() const {
  std::int64_t stride = 1;
  for (auto i = shape.size(); i-- > 0;) {
    if (shape[i] == 0) return true;
    if (shape[i] != 1 && strides[i] != stride) return false;
    stride *= shape[i];  // no overflow: parse_form has multiplied all
  }
  return true;
}

std::string form_of(const Tensor& tensor) {
  const auto joined = [](const Tensor::Shape& numbers) {
    std::string out;
    for (const auto each : numbers) out += (out.empty() ? "" : ",") + std::to_string(each);
    return out;
  };
  return std::string(name_of(tensor.dtype())) + "|" + joined(tensor.shape()) + "|" + joined(tensor.strides());
}

std::optional<TensorForm> parse_form(std::string_view form, std::uint64_t bytes) {
  const auto first = form.find('|');
  if (first == std::string_view::npos) return std::nullopt;
  const auto second = form.find('|', first + 1);
  if (second == std::string_view::npos) return std::nullopt;
  const auto dtype = dtype_of(form.substr(0, first));
  auto shape = numbers_of(form.substr(first + 1, second - first - 1));
  auto strides = numbers_of(form.substr(second + 1));
  if (!dtype || !shape || !strides || shape->size() != strides->size()) return std::nullopt;
  std::uint64_t product = size_of(*dtype);
  for (const auto size : *shape) {
    if (__builtin_mul_overflow(product, static_cast<std::uint64_t>(size), &product)) return std::nullopt;
  }
  if (product != bytes) return std::nullopt;
  return TensorForm{*dtype, *std::move(shape), *std::move(strides)};
}

}  // namespace tensorferry::detail

/// Values of messages as C sees them: arrays of tferry_value, read from what a peer sent and written into a message.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "tensorferry/c.h"
#include "tensorferry/tensor.h"
#include "tensorferry/values.h"

namespace tensorferry::detail {
class Reading;
}

/// The values, and the memory that they point to.
struct tferry_message {
  std::vector<tferry_value> values;
  std::deque<std::string> texts;
  std::deque<std::vector<std::int64_t>> shapes;
  std::vector<tensorferry::Tensor> tensors;
};

namespace tensorferry::c {

using Message = std::unique_ptr<tferry_message>;

/// Reads the next value of a message, with the values inside it. Throws as ValueReader does, for a value that does not
/// fit too.
void read_value(detail::Reading& in, tferry_message& out);

/// Goes through the values that a program passes.
class ValueList {
 public:
  /// `owner` is kept with each array that is written, for as long as its memory is read; null: nothing is.
  ValueList(const tferry_value* values, std::size_t count, std::shared_ptr<void> owner)
      : at_(values), end_(values + count), owner_(std::move(owner)) {}
  /// Writes the next value, with those inside it. Throws InvalidArgument if it cannot be sent, or is not there.
  void write(ValueWriter& out);
  /// Returns the next value, which is an array, as a tensor. Throws InvalidArgument.
  Tensor tensor();
  /// Throws InvalidArgument if values are left over.
  void finish() const;

 private:
  const tferry_value& next();
  Tensor tensor_of(const tferry_value& value) const;
  void write_inside(ValueWriter& out, std::uint64_t count);

  const tferry_value* at_;
  const tferry_value* end_;
  std::shared_ptr<void> owner_;
};

}  // namespace tensorferry::c

/// Any value that C can see, as the result of a call.
template <>
struct tensorferry::Value<tensorferry::c::Message> {
  static std::string name() { return "a value that can be read without Python"; }
  static c::Message read(ValueReader& in);
};

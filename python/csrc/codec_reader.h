/// One message being read into Python objects.
#pragma once

#include <Python.h>

#include <vector>

#include "python/csrc/codec_types.h"
#include "rpc/tensor.h"

namespace tensorferry::python {

/// The bytes are a peer's: whatever they say, the worst is a Python error (where pickle is allowed, whatever pickle
/// allows).
class ValueReader {
 public:
  ValueReader(const Codec& codec, MessageReferences* references, Decoder& in)
      : codec_(&codec), references_(references), in_(&in), tensors_(codec.converters(), in.buffers()) {
    if (!in.buffers().empty()) objects_.reserve(in.buffers().size() + 4);  // a tensor each, and what holds them
  }
  /// Of a published value that `in` is the payload of.
  ValueReader(const Codec& codec, Decoder& in) : ValueReader(codec, nullptr, in) { published_ = true; }

  /// The next value; null with an error set.
  Object read() { return read(in_->next()); }
  /// Of the tensors read so far, those that are not on the CPU.
  [[nodiscard]] std::vector<WeakStorage> take_device_storages() { return tensors_.take_device_storages(); }

 private:
  /// The value that `tag` is of.
  Object read(Tag tag);
  Object read_key();
  Object read_big_integer();
  Object read_text();
  Object read_tuple();
  Object read_list();
  Object read_dict();
  Object read_set(Tag tag);
  Object read_tensor(Tag tag);
  Object read_array();
  Object read_pickled();
  Object read_record();
  Object read_published();
  Object read_again();

  /// Keeps a value for when it comes again.
  Object numbered(std::uint32_t number, Object object);
  /// `constant`, or where it is null without an error set the error that `else_why` says.
  Object known(Object constant, const char* else_why);
  /// Sets the error of the Decoder.
  std::nullptr_t failed();
  std::nullptr_t failed(const char* why);

  const Codec* codec_;
  MessageReferences* references_;
  Decoder* in_;
  TensorReader tensors_;
  bool published_ = false;
  std::vector<Object> objects_;  // by number; those that are not complete yet are null
};

}  // namespace tensorferry::python

/// Reads one message into Python objects. Needs the GIL.
#pragma once

#include <Python.h>

#include <optional>
#include <vector>

#include "python/csrc/codec_types.h"
#include "rpc/tensor.h"

namespace tensorferry::python {

/// Holds back Python's garbage collector while it lives, unless the program has switched it off. For objects made by
/// the thousand that are all in use: the collector would visit them again and again in vain. Needs the GIL.
class CollectorPaused {
 public:
  CollectorPaused() : was_on_(PyGC_Disable() != 0) {}
  ~CollectorPaused() {
    if (was_on_) PyGC_Enable();
  }
  CollectorPaused(const CollectorPaused&) = delete;
  CollectorPaused& operator=(const CollectorPaused&) = delete;

 private:
  bool was_on_;
};

/// Reads the values of one message. The bytes come from a peer and are not trusted: malformed ones cause a Python error
/// and nothing worse. If pickle is allowed, a pickle may run any code.
class PythonValueReader {
 public:
  PythonValueReader(const Codec& codec, MessageReferences* references, Decoder& in)
      : codec_(&codec), references_(references), in_(&in), tensors_(codec.converters(), in.buffers()) {
    if (!in.buffers().empty()) objects_.reserve(in.buffers().size() + 4);  // one object per tensor, and some containers
    if (in.buffers().size() >= many_objects) paused_.emplace();
  }
  /// Reads a published value, whose payload is `in`.
  PythonValueReader(const Codec& codec, Decoder& in) : PythonValueReader(codec, nullptr, in) { published_ = true; }

  /// Reads the next value. Null with an error set.
  Object read() { return read(in_->next()); }
  /// Returns the storages of the tensors read so far that are not on the CPU.
  [[nodiscard]] std::vector<WeakStorage> take_device_storages() { return tensors_.take_device_storages(); }

 private:
  /// Reads the value after `tag`.
  Object read(Tag tag);
  /// Reads a key of a dict.
  Object read_key();
  Object read_big_integer();
  Object read_text();
  Object read_tuple();
  Object read_list();
  Object read_dict();
  Object read_set(Tag tag);
  Object read_tensor(Tag tag);
  Object read_of_torch(Tag tag);
  Object read_array();
  Object read_pickled();
  Object read_record();
  Object read_published();
  Object read_again();

  [[nodiscard]] std::size_t counted_keys(std::size_t keys) const;

  /// Keeps `object` under its number, for later back-references, and returns it. Ignores null and unnumbered values.
  Object numbered(std::uint32_t number, Object object);
  /// Does the same for a value that can be a key; `before`: values_ when its first item was read.
  Object numbered(std::uint32_t number, Object object, std::uint64_t before);
  /// Returns `constant`. If it is null without an error set, sets the error `else_why`.
  Object known(Object constant, const char* else_why);
  /// Sets the Decoder's error as the Python error; returns null.
  std::nullptr_t failed();
  /// Fails the Decoder with `why`, then does the same.
  std::nullptr_t failed(const char* why);

  static constexpr std::size_t many_objects = 256;  // fewer hardly start the collector

  const Codec* codec_;
  MessageReferences* references_;
  Decoder* in_;
  TensorReader tensors_;
  std::optional<CollectorPaused> paused_;  // ends before code of the program runs
  bool published_ = false;
  std::vector<Object> objects_;  // by number; null: not complete yet
  // Python hashes a tuple again for each container that it is a key of. So the values in it count again for each
  // back-reference, and a short message cannot hold the GIL for long.
  std::uint64_t values_ = 0;           // that have been read; those behind a back-reference count too
  std::vector<std::uint64_t> within_;  // by number: the values in a tuple, set or record that is complete
  std::size_t keys_ = 0;               // that are being read, one inside the other
  std::uint64_t hashed_again_ = 0;     // values behind the back-references in keys
};

}  // namespace tensorferry::python

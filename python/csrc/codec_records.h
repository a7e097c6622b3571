/// Classes whose instances travel as records of the codec: named tuples, dataclasses, and tensordict's TensorDict.
///
/// A record names its class and its fields, and holds their values. It is written only where the instance is no more
/// than that: of a class that the receiver finds by import, without a say of its own in how it is pickled or made, and
/// with no attributes beside its fields. All else is for pickle. A reader makes the instance as pickle would: `__new__`
/// of object or tuple, then the fields; neither `__init__` nor `__post_init__` nor anything else of the class's runs. A
/// TensorDict is made by its own constructor, which checks what came.
#pragma once

#include <Python.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "python/csrc/codec.h"
#include "python/csrc/exposed.h"

namespace tensorferry::python {

/// What there is to know of one class. Needs the GIL.
class RecordClass {
 public:
  /// Null, without an error set: one for pickle.
  static std::shared_ptr<const RecordClass> of(PyTypeObject* type);

  [[nodiscard]] RecordKind kind() const { return kind_; }
  /// "module:qualname".
  [[nodiscard]] const std::string& name() const { return name_; }
  /// All fields, "x,y,z".
  [[nodiscard]] const std::string& fields() const { return fields_; }

  /// Whether `object`, of this very class, is its fields and nothing more. Runs no code of the user's. (A TensorDict
  /// has its say when it is taken apart.)
  [[nodiscard]] bool fits(PyObject* object) const;
  /// The fields that `object` has: all but those that the class has a value for, and `object` none of its own.
  /// `values`: in that order. False, without an error set: one for pickle after all.
  bool take_apart(PyObject* object, std::string& fields, std::vector<Object>& values) const;

  /// An instance of `type`, which this is of. `fields` as a writer put them, with as many values. Null with an error
  /// set where they are not the class's.
  Object put_together(PyTypeObject* type, std::string_view fields, const std::vector<Object>& values) const;

 private:
  struct Field {
    std::string name;
    Object key;              // interned
    Object slot;             // its descriptor; null: it lies in the instance's dict
    bool defaulted = false;  // the class has a value for instances that have none
  };

  bool examine(PyTypeObject* type);
  bool examine_named_tuple(PyTypeObject* type);
  bool examine_dataclass(PyTypeObject* type);
  bool examine_tensordict(PyTypeObject* type);
  bool add_field(PyTypeObject* type, PyObject* name);
  bool find_name(PyTypeObject* type);
  bool assign(PyObject* object, const Field& field, PyObject* value) const;
  bool take_tensordict_apart(PyObject* object, std::vector<Object>& values) const;
  Object put_tuple_together(PyTypeObject* type, std::string_view fields, const std::vector<Object>& values) const;
  Object put_tensordict_together(PyTypeObject* type, const std::vector<Object>& values) const;
  Object value_of(PyObject* object, PyObject* dict, const Field& field) const;

  RecordKind kind_ = RecordKind::dataclass;
  std::string name_;
  std::string fields_;
  std::vector<Field> members_;
};

/// What one codec has found out about classes. Needs the GIL.
class RecordClasses {
 public:
  /// Null: instances of exactly `type` are for pickle. Runs no code of the user's.
  std::shared_ptr<const RecordClass> of(PyTypeObject* type);

  struct Found {
    Object type;
    std::shared_ptr<const RecordClass> known;
  };
  /// The class that a peer names; looked up in its module each time, as functions are. With `imports` the module is
  /// imported; else only one that this process has imported already is looked into, and nothing runs. Null, with an
  /// error set: NotFound, InvalidArgument where what is there is not a class of this kind, PermissionDenied where it
  /// was not exposed.
  Found find(RecordKind kind, std::string_view name, bool imports);

  /// From now on named tuples and dataclasses are looked for among what was exposed alone. `exposed` outlives this.
  void take_only(const Exposed& exposed) { exposed_ = &exposed; }

 private:
  Object look_for(std::string_view name, bool imports, bool exposed);

  struct Known {
    unsigned int version;  // of the class when it was looked at; 0: look again
    std::shared_ptr<const RecordClass> record;
  };
  struct Path {
    Object key;  // the module's name
    Object module;
    std::vector<Object> names;
  };
  const Path* path_to(std::string_view name, bool imports);

  std::unordered_map<PyTypeObject*, Known> known_;
  std::unordered_map<std::string, Path> paths_;
  const Exposed* exposed_ = nullptr;
};

}  // namespace tensorferry::python

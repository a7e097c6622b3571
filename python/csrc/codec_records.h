/// Classes whose instances travel as records of the codec: named tuples, dataclasses, and tensordict's TensorDict.
///
/// A record names its class and its fields, and holds their values. An instance travels as a record if these conditions
/// hold; other instances are pickled:
/// - Import finds the class by its name.
/// - The class has no code of its own for pickling, making or ending its instances.
/// - The instance has no attributes beside its fields.
///
/// A reader makes the instance as pickle would: `__new__` of object or tuple, then the fields. It runs neither
/// `__init__` nor `__post_init__` nor any other code of the class. A TensorDict is made by its own constructor, which
/// checks its parts.
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

/// Describes one record class. Needs the GIL.
class RecordClass {
 public:
  /// Examines `type`. Null, without an error set: its instances must be pickled.
  static std::shared_ptr<const RecordClass> of(PyTypeObject* type);

  [[nodiscard]] RecordKind kind() const { return kind_; }
  /// Returns "module:qualname".
  [[nodiscard]] const std::string& name() const { return name_; }
  /// Returns the names of all fields, "x,y,z".
  [[nodiscard]] const std::string& fields() const { return fields_; }

  /// Whether `object`, an instance of exactly this class, consists of its fields alone. Runs no code of the user. (A
  /// TensorDict always fits; to_parts() checks it.)
  [[nodiscard]] bool fits(PyObject* object) const;
  /// Gives the names of the fields that `object` has, and their values in that order. A field is left out if the
  /// instance has no value of its own and the class has a default. False, without an error set: `object` must be
  /// pickled after all.
  bool to_parts(PyObject* object, std::string& fields, std::vector<Object>& values) const;

  /// Makes an instance of `type`, the class that this describes. `fields` is the list of names that the writer sent,
  /// with as many values. Null with an error set if the fields are not those of the class.
  Object from_parts(PyTypeObject* type, std::string_view fields, const std::vector<Object>& values) const;

 private:
  struct Field {
    std::string name;
    Object key;              // interned
    Object slot;             // its descriptor; null: the value is in the instance's dict
    bool defaulted = false;  // the class has a value for instances without one
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

/// Caches the record classes of one codec. Needs the GIL.
class RecordClasses {
 public:
  /// Returns the description of `type`. Null: its instances must be pickled. Runs no code of the user.
  std::shared_ptr<const RecordClass> of(PyTypeObject* type);

  struct Found {
    Object type;
    std::shared_ptr<const RecordClass> known;
  };
  /// Finds the class that a peer names. Looks it up in its module each time, as with functions. With `imports`, imports
  /// the module; else uses it only if this process has imported it already, so that no code runs.
  ///
  /// Null, with an error set: NotFound; InvalidArgument if the object of that name is not a class of this kind;
  /// PermissionDenied if the class was not exposed.
  Found find(RecordKind kind, std::string_view name, bool imports);

  /// Restricts find() to exposed classes, for named tuples and dataclasses. `exposed` outlives this object.
  void take_only(const Exposed& exposed) { exposed_ = &exposed; }

 private:
  Object look_for(std::string_view name, bool imports, bool exposed);

  struct Known {
    unsigned int version;  // of the class when it was examined; 0: examine again
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

#include "python/csrc/codec_records.h"

#include <algorithm>
#include <utility>

#include "python/csrc/codec_types.h"
#include "python/csrc/errors.h"
#include "python/csrc/interpreter.h"

namespace tensorferry::python {
namespace {

constexpr const char* not_here = "it must be importable here too, to read a value of it";

std::string_view text_or_empty(PyObject* object) {
  Py_ssize_t bytes = 0;
  const char* const text =
      object != nullptr && PyUnicode_CheckExact(object) ? PyUnicode_AsUTF8AndSize(object, &bytes) : nullptr;
  if (text == nullptr) {
    PyErr_Clear();
    return {};
  }
  return {text, static_cast<std::size_t>(bytes)};
}

Object interned(std::string_view text) {
  auto* string = PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size()));
  if (string != nullptr) PyUnicode_InternInPlace(&string);
  return Object(string);
}

/// Returns the attribute `name` of the class or its bases as stored, without descriptors. Borrowed; null: none.
PyObject* member(PyTypeObject* type, const char* name) {
  const auto key = interned(name);
  return key ? _PyType_Lookup(type, key.get()) : nullptr;
}

/// Returns the first class in the method resolution order that has `name`; null if none has.
PyTypeObject* holder_of(PyTypeObject* type, const char* name) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(type->tp_mro); ++i) {
    auto* const base = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(type->tp_mro, i));
    if (base->tp_dict != nullptr && PyDict_GetItemString(base->tp_dict, name) != nullptr) return base;
  }
  return nullptr;
}

bool as_object_has(PyTypeObject* type, const char* name) {
  return member(type, name) == member(&PyBaseObject_Type, name);
}

/// Whether `found` is the function `name` of the module dataclasses, which gives it to frozen classes with slots.
bool of_dataclasses(PyObject* found, const char* name) {
  static auto* const module = PyImport_ImportModule("dataclasses");
  const Object own(PyObject_GetAttrString(module, name));
  PyErr_Clear();
  return own && own.get() == found;
}

/// Whether the class leaves the pickling, making and ending of its instances to `base`: object or tuple.
bool has_nothing_of_its_own(PyTypeObject* type, const PyTypeObject* base) {
  if ((type->tp_flags & Py_TPFLAGS_HEAPTYPE) == 0 || type->tp_finalize != nullptr || type->tp_del != nullptr)
    return false;
  const PyTypeObject* built_in = type;
  while ((built_in->tp_flags & Py_TPFLAGS_HEAPTYPE) != 0) built_in = built_in->tp_base;
  if (built_in != base) return false;
  if (!as_object_has(type, "__reduce_ex__") || !as_object_has(type, "__reduce__")) return false;
  if (!as_object_has(type, "__getstate__") && !of_dataclasses(member(type, "__getstate__"), "_dataclass_getstate"))
    return false;
  auto* const set_state = member(type, "__setstate__");
  if (set_state != nullptr && !of_dataclasses(set_state, "_dataclass_setstate")) return false;
  if (member(type, "__getnewargs_ex__") != nullptr) return false;
  static auto* const reducers = attribute_of("copyreg", "dispatch_table").release().ptr();
  return PyDict_Contains(reducers, reinterpret_cast<PyObject*>(type)) == 0;
}

std::vector<Object> path_of(std::string_view qualname) {
  std::vector<Object> parts;
  for (std::size_t at = 0; at <= qualname.size();) {
    const auto dot = std::min(qualname.find('.', at), qualname.size());
    parts.push_back(interned(qualname.substr(at, dot - at)));
    if (!parts.back()) return {};
    at = dot + 1;
  }
  return parts;
}

/// Returns the object at `path` below a module. Reads the dicts of modules and classes only, so no `__getattr__` runs.
/// Borrowed; null: none.
PyObject* look_up(PyObject* module, const std::vector<Object>& path) {
  auto* found = module;
  for (const auto& part : path) {
    auto* const dict = PyModule_Check(found) ? PyModule_GetDict(found)
                       : PyType_Check(found) ? reinterpret_cast<PyTypeObject*>(found)->tp_dict
                                             : nullptr;
    found = dict != nullptr ? PyDict_GetItemWithError(dict, part.get()) : nullptr;
    if (found == nullptr) {
      PyErr_Clear();
      return nullptr;
    }
  }
  return found;
}

Object instance_dict(PyObject* object) {
  if (Py_TYPE(object)->tp_dictoffset == 0) return nullptr;
  return Object(PyObject_GenericGetDict(object, nullptr));
}

std::nullptr_t refuse(Code code, const std::string& what) {
  set_error(Status(code, what));
  return nullptr;
}

constexpr std::string_view structure_name = "tensordict:TensorDict";

std::string in_quotes(std::string_view text) { return '"' + std::string(text.substr(0, 200)) + '"'; }

}  // namespace

// ---- One class

std::shared_ptr<const RecordClass> RecordClass::of(PyTypeObject* type) {
  auto made = std::make_shared<RecordClass>();
  const bool record = made->examine(type);
  PyErr_Clear();
  return record ? made : nullptr;
}

bool RecordClass::examine(PyTypeObject* type) {
  if (std::string_view(type->tp_name) == "TensorDict") return examine_tensordict(type);
  const bool record = PyType_IsSubtype(type, &PyTuple_Type) != 0 ? examine_named_tuple(type) : examine_dataclass(type);
  return record && find_name(type);
}

bool RecordClass::examine_named_tuple(PyTypeObject* type) {
  kind_ = RecordKind::named_tuple;
  // A class that namedtuple() made, or a subclass by the user that leaves the making of instances unchanged.
  auto* const made = holder_of(type, "_fields");
  if (made == nullptr || made->tp_base != &PyTuple_Type) return false;
  for (const auto* const name : {"__new__", "__getnewargs__", "_make"}) {
    if (holder_of(type, name) != made) return false;
  }
  auto* const names = member(type, "_fields");
  if (!PyTuple_CheckExact(names) || !has_nothing_of_its_own(type, &PyTuple_Type)) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) {
    if (!add_field(type, PyTuple_GET_ITEM(names, i))) return false;
  }
  return true;
}

bool RecordClass::examine_dataclass(PyTypeObject* type) {
  auto* const declared = member(type, "__dataclass_fields__");
  if (declared == nullptr || !PyDict_CheckExact(declared)) return false;
  if (!has_nothing_of_its_own(type, &PyBaseObject_Type) || type->tp_new != PyBaseObject_Type.tp_new) return false;
  if (member(type, "__getnewargs__") != nullptr) return false;
  static auto* const field_type = attribute_of("dataclasses", "Field").release().ptr();
  static auto* const stored = attribute_of("dataclasses", "_FIELD").release().ptr();  // excludes ClassVar and InitVar
  PyObject* name = nullptr;
  PyObject* field = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(declared, &at, &name, &field) != 0;) {
    if (reinterpret_cast<PyObject*>(Py_TYPE(field)) != field_type) return false;
    const Object kind(PyObject_GetAttrString(field, "_field_type"));
    if (kind.get() == stored && !add_field(type, name)) return false;
  }
  // The value of a slot that is not a field would be lost.
  std::size_t slots = 0;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(type->tp_mro); ++i) {
    auto* const base = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(type->tp_mro, i));
    if ((base->tp_flags & Py_TPFLAGS_HEAPTYPE) == 0 || base->tp_dict == nullptr) continue;
    for (Py_ssize_t at = 0; PyDict_Next(base->tp_dict, &at, &name, &field) != 0;) {
      if (Py_TYPE(field) == &PyMemberDescr_Type) ++slots;
    }
  }
  const auto ours =
      std::count_if(members_.begin(), members_.end(), [](const auto& each) { return each.slot != nullptr; });
  return slots == static_cast<std::size_t>(ours);
}

bool RecordClass::examine_tensordict(PyTypeObject* type) {
  auto* const module = PyDict_GetItemString(PyImport_GetModuleDict(), "tensordict");
  if (module == nullptr || PyModule_Check(module) == 0) return false;
  kind_ = RecordKind::structure;
  name_ = structure_name;
  fields_ = "source,batch_size,device,names,locked";
  return PyDict_GetItemString(PyModule_GetDict(module), "TensorDict") == reinterpret_cast<PyObject*>(type);
}

bool RecordClass::add_field(PyTypeObject* type, PyObject* name) {
  const auto text = text_or_empty(name);
  if (text.empty() || text.find(',') != std::string_view::npos) return false;
  Field field{.name = std::string(text), .key = interned(text), .slot = nullptr};
  if (!field.key) return false;
  if (kind_ == RecordKind::dataclass) {
    auto* const found = _PyType_Lookup(type, field.key.get());
    if (found != nullptr && Py_TYPE(found) == &PyMemberDescr_Type) {
      field.slot = borrow(found);
    } else if (found != nullptr && Py_TYPE(found)->tp_descr_set != nullptr) {
      return false;  // a property: setting it would run its code
    } else if (type->tp_dictoffset == 0) {
      return false;
    }
    field.defaulted = found != nullptr && !field.slot;
  }
  fields_ += (members_.empty() ? "" : ",") + field.name;
  members_.push_back(std::move(field));
  return true;
}

bool RecordClass::find_name(PyTypeObject* type) {
  const auto module = text_or_empty(PyDict_GetItemString(type->tp_dict, "__module__"));
  const auto qualname = text_or_empty(reinterpret_cast<PyHeapTypeObject*>(type)->ht_qualname);
  if (module.empty() || qualname.empty() || module.find(':') != std::string_view::npos) return false;
  name_ = std::string(module) + ':' + std::string(qualname);
  const auto key = interned(module);
  auto* const loaded = key ? PyDict_GetItemWithError(PyImport_GetModuleDict(), key.get()) : nullptr;
  return loaded != nullptr && look_up(loaded, path_of(qualname)) == reinterpret_cast<PyObject*>(type);
}

Object RecordClass::value_of(PyObject* object, PyObject* dict, const Field& field) const {
  Object value;
  if (field.slot) {
    auto* const slot = field.slot.get();
    value.reset(Py_TYPE(slot)->tp_descr_get(slot, object, reinterpret_cast<PyObject*>(Py_TYPE(object))));
  } else if (dict != nullptr) {
    value = borrow(PyDict_GetItemWithError(dict, field.key.get()));
  }
  PyErr_Clear();  // a slot that is not set raises
  return value;
}

bool RecordClass::fits(PyObject* object) const {
  if (kind_ == RecordKind::structure) return true;
  const auto dict = instance_dict(object);
  auto beside = dict ? PyDict_GET_SIZE(dict.get()) : 0;
  if (kind_ == RecordKind::named_tuple)
    return beside == 0 && PyTuple_GET_SIZE(object) == static_cast<Py_ssize_t>(members_.size());
  for (const auto& field : members_) {
    const bool has = value_of(object, dict.get(), field) != nullptr;
    if (!has && !field.defaulted) return false;
    if (has && !field.slot) --beside;
  }
  return beside == 0;
}

bool RecordClass::to_parts(PyObject* object, std::string& fields, std::vector<Object>& values) const {
  fields = fields_;
  if (kind_ == RecordKind::structure) return take_tensordict_apart(object, values);
  values.reserve(members_.size());
  if (kind_ == RecordKind::named_tuple) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(object); ++i) values.push_back(borrow(PyTuple_GET_ITEM(object, i)));
    return true;
  }
  const auto dict = instance_dict(object);
  fields.clear();
  for (const auto& field : members_) {
    auto value = value_of(object, dict.get(), field);
    if (!value) continue;
    fields += (values.empty() ? "" : ",") + field.name;
    values.push_back(std::move(value));
  }
  return true;
}

bool RecordClass::take_tensordict_apart(PyObject* object, std::vector<Object>& values) const {
  const auto function = attribute_of("tensorferry._tensordict", "to_parts");
  const Object parts(PyObject_CallOneArg(function.ptr(), object));
  PyErr_Clear();  // pickling it then reports the error
  if (!parts || !PyTuple_CheckExact(parts.get())) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(parts.get()); ++i)
    values.push_back(borrow(PyTuple_GET_ITEM(parts.get(), i)));
  return true;
}

bool RecordClass::assign(PyObject* object, const Field& field, PyObject* value) const {
  if (!field.slot) return PyObject_GenericSetAttr(object, field.key.get(), value) == 0;
  return Py_TYPE(field.slot.get())->tp_descr_set(field.slot.get(), object, value) == 0;
}

Object RecordClass::put_tuple_together(PyTypeObject* type, std::string_view fields,
                                       const std::vector<Object>& values) const {
  if (fields != fields_ || values.size() != members_.size()) {
    return refuse(Code::invalid_argument, "a named tuple " + in_quotes(name_) + " arrived with the fields " +
                                              in_quotes(fields) + "; here it has " + in_quotes(fields_) +
                                              ": another version of it?");
  }
  Object items(PyTuple_New(static_cast<Py_ssize_t>(values.size())));
  if (!items) return nullptr;
  for (std::size_t i = 0; i < values.size(); ++i) {
    PyTuple_SET_ITEM(items.get(), static_cast<Py_ssize_t>(i), Py_NewRef(values[i].get()));
  }
  const Object args(PyTuple_Pack(1, items.get()));
  return args ? Object(PyTuple_Type.tp_new(type, args.get(), nullptr)) : nullptr;
}

Object RecordClass::put_tensordict_together(PyTypeObject* type, const std::vector<Object>& values) const {
  const Object parts(PyTuple_New(static_cast<Py_ssize_t>(values.size())));
  if (!parts) return nullptr;
  for (std::size_t i = 0; i < values.size(); ++i) {
    PyTuple_SET_ITEM(parts.get(), static_cast<Py_ssize_t>(i), Py_NewRef(values[i].get()));
  }
  const auto function = attribute_of("tensorferry._tensordict", "from_parts");
  return Object(PyObject_CallFunctionObjArgs(function.ptr(), type, parts.get(), nullptr));
}

Object RecordClass::from_parts(PyTypeObject* type, std::string_view fields, const std::vector<Object>& values) const {
  if (kind_ == RecordKind::named_tuple) return put_tuple_together(type, fields, values);
  if (kind_ == RecordKind::structure) return put_tensordict_together(type, values);
  static auto* const no_args = PyTuple_New(0);
  Object object(PyBaseObject_Type.tp_new(type, no_args, nullptr));
  if (!object) return nullptr;
  std::size_t used = 0;
  auto rest = fields;
  for (const auto& field : members_) {
    // A writer with the same version of the class sends the fields in this order. It leaves out a field only if the
    // class has a default for it.
    const bool comes = rest.starts_with(field.name) &&
                       (rest.size() == field.name.size() || rest[field.name.size()] == ',') && used < values.size();
    if (!comes && !field.defaulted) break;
    if (!comes) continue;
    if (!assign(object.get(), field, values[used++].get())) return nullptr;
    rest.remove_prefix(std::min(rest.size(), field.name.size() + 1));
    if (&field == &members_.back() && rest.empty() && used == values.size()) return object;
  }
  if (rest.empty() && used == values.size() && fits(object.get())) return object;
  return refuse(Code::invalid_argument, "a dataclass " + in_quotes(name_) + " arrived with the fields " +
                                            in_quotes(fields) + "; here it has " + in_quotes(fields_) +
                                            ": another version of it?");
}

// ---- All classes

std::shared_ptr<const RecordClass> RecordClasses::of(PyTypeObject* type) {
  if ((type->tp_flags & Py_TPFLAGS_HEAPTYPE) == 0) return nullptr;
  auto& known = known_[type];
  // A class that has changed since, or another class at its address, has another version tag.
  if (known.version == 0 || known.version != type->tp_version_tag) {
    auto record = RecordClass::of(type);
    auto& entry = known_[type];  // examining may import modules, which may call of() again
    entry = {type->tp_version_tag, std::move(record)};
    return entry.record;
  }
  return known.record;
}

const RecordClasses::Path* RecordClasses::path_to(std::string_view name, bool imports) {
  const auto found = paths_.find(std::string(name));
  if (found != paths_.end() &&
      PyDict_GetItemWithError(PyImport_GetModuleDict(), found->second.key.get()) == found->second.module.get()) {
    return &found->second;
  }
  const auto colon = name.find(':');
  constexpr std::size_t longest = 1024;
  if (colon == std::string_view::npos || colon == 0 || name.size() > longest) {
    return refuse(Code::protocol_error, in_quotes(name) + " is not the name of a class");
  }
  const auto module = name.substr(0, colon);
  Object key(PyUnicode_DecodeUTF8(module.data(), static_cast<Py_ssize_t>(module.size()), "strict"));
  if (!key) return nullptr;
  auto loaded = borrow(PyDict_GetItemWithError(PyImport_GetModuleDict(), key.get()));
  if (!loaded && imports) {
    loaded.reset(PyImport_Import(key.get()));
    if (!loaded && PyErr_ExceptionMatches(PyExc_ModuleNotFoundError) == 0) return nullptr;
    PyErr_Clear();
  }
  if (!loaded) {
    return refuse(Code::not_found, "no module " + in_quotes(module) + (imports ? "" : " has been imported here") +
                                       ", which has the class of a received value: " + not_here);
  }
  Path path{std::move(key), std::move(loaded), path_of(name.substr(colon + 1))};
  if (path.names.empty()) return nullptr;
  if (look_up(path.module.get(), path.names) == nullptr) {
    return refuse(Code::not_found,
                  "there is no class " + in_quotes(name.substr(colon + 1)) + " in module " + in_quotes(module) +
                      (module == "__main__" ? ", which is another program here" : "") + ": " + not_here);
  }
  constexpr std::size_t most = 4096;  // programs use a few hundred; a peer can give one class any number of names
  if (paths_.size() >= most) paths_.clear();
  return &paths_.insert_or_assign(std::string(name), std::move(path)).first->second;
}

Object RecordClasses::look_for(std::string_view name, bool imports, bool exposed) {
  if (exposed) {
    const auto colon = std::min(name.find(':'), name.size());
    const auto type = exposed_->class_named(name.substr(0, colon), name.substr(std::min(colon + 1, name.size())));
    if (type) return borrow(type.ptr());
    return refuse(Code::permission_denied,
                  "the class " + in_quotes(name) + " of a received value was not exposed here");
  }
  const auto* const path = path_to(name, imports);
  if (path == nullptr) return nullptr;
  auto* const object = look_up(path->module.get(), path->names);
  return object != nullptr ? borrow(object) : borrow(Py_None);  // removed from the module since
}

RecordClasses::Found RecordClasses::find(RecordKind kind, std::string_view name, bool imports) {
  // Structures have one class, which every agent knows. Other classes must be exposed here, if only those are allowed.
  const bool exposed = exposed_ != nullptr && (kind != RecordKind::structure || name != structure_name);
  Found found{.type = look_for(name, imports, exposed), .known = nullptr};
  if (!found.type) return {};
  if (PyType_Check(found.type.get())) found.known = of(reinterpret_cast<PyTypeObject*>(found.type.get()));
  if (found.known == nullptr || found.known->kind() != kind) {
    refuse(Code::invalid_argument, in_quotes(name) + " is not, in this process, a class whose instances travel as a " +
                                       (kind == RecordKind::named_tuple ? "named tuple"
                                        : kind == RecordKind::dataclass ? "dataclass"
                                                                        : "structure"));
    return {};
  }
  return found;
}

}  // namespace tensorferry::python

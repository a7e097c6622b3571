#include "python/csrc/regions.h"

#include <ATen/ops/from_blob.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "converters/cpu.h"
#include "python/csrc/agent.h"
#include "python/csrc/errors.h"
#include "rpc/regions/service.h"

namespace tensorferry::python {
namespace {

using regions::ByteRange;
using regions::HeldVersion;
using regions::ImageLayout;
using regions::Publication;
using regions::RegionService;
using regions::RemoteRegion;
using regions::Runs;
using regions::Subscription;
using regions::VersionView;
using Tensors = std::vector<at::Tensor>;
using Ranges = std::vector<std::pair<std::uint64_t, std::uint64_t>>;

/// Returns the bytes of a dense tensor on the CPU or on a CUDA device; the buffer keeps its storage.
Buffer memory_of(const at::Tensor& tensor) {
  if (!tensor.is_cpu() && !tensor.is_cuda()) {
    raise(Status(Code::invalid_argument,
                 "a tensor on " + tensor.device().str() + ": regions are in memory of the CPU or of a CUDA device"));
  }
  if (tensor.layout() != at::kStrided || !tensor.is_non_overlapping_and_dense()) {
    raise(Status(Code::invalid_argument, "a tensor with gaps or without one memory of its own: make it contiguous()"));
  }
  Device device;
  if (tensor.is_cuda()) device = {DeviceType::cuda, static_cast<std::uint8_t>(tensor.device().index())};
  auto kept = std::make_shared<c10::Storage>(tensor.storage());
  return {device, static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes(), nullptr, std::move(kept)};
}

/// Returns the bytes of a dense CPU tensor; the buffer keeps its storage.
Buffer bytes_of(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return memory_of(tensor);
  raise(Status(Code::invalid_argument, "a tensor on " + tensor.device().str() +
                                           ": versions are in host memory; devices are not supported yet"));
}

/// Returns the memory of a GPU as a tensor of bytes on that GPU, which keeps it mapped.
at::Tensor tensor_of_gpu(Buffer memory) {
  const at::Device device(at::kCUDA, static_cast<at::DeviceIndex>(memory.device.index));
  return at::from_blob(
      memory.data, {static_cast<std::int64_t>(memory.bytes)},
      [kept = std::move(memory.owner)](void*) mutable { kept = {}; }, at::TensorOptions(at::kByte).device(device),
      device);
}

std::optional<Clock::time_point> until_of(double seconds) {
  if (seconds <= 0) return std::nullopt;
  return Clock().now() +
         std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::min(seconds, 1e9)));
}

Milliseconds timeout_of(double seconds) {
  return seconds <= 0
             ? Milliseconds(0)
             : Milliseconds(std::max<std::int64_t>(1, static_cast<std::int64_t>(std::min(seconds, 1e9) * 1000)));
}

/// Runs `body` without the GIL, with a check for signals. Raises what a signal handler raised, or the error.
template <class Body>
auto without_gil(const Body& body) {
  auto done = [&] {
    const GilReleased released;
    return body(std::function<bool()>([&] { return interrupted(released.state()); }));
  }();
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  if constexpr (std::is_same_v<decltype(done), Status>) {
    check(done);
  } else {
    return value_or_raise(std::move(done));
  }
}

/// An object whose last owner drops it without the GIL, because that may end a lease.
template <class T>
std::shared_ptr<T> dropped_without_gil(std::shared_ptr<T> object) {
  auto* const shown = object.get();
  return {shown, [kept = std::move(object)](T*) mutable {
            if (closing() || PyGILState_Check() == 0) return;
            const GilReleased released;
            kept = {};
          }};
}

Runs runs_of(std::uint64_t run_bytes, const py::object& offsets) {
  if (py::isinstance<py::int_>(offsets)) return Runs::one(offsets.cast<std::uint64_t>(), run_bytes);
  const auto given = offsets.cast<at::Tensor>().contiguous();
  if (!given.is_cpu() || given.scalar_type() != at::kLong)
    throw py::type_error("offsets are an int64 tensor on the CPU");
  const auto* const first = given.const_data_ptr<std::int64_t>();
  Runs out{run_bytes, {}};
  out.offsets.assign(first, first + given.numel());  // a negative one is out of every region's bounds
  return out;
}

/// Returns whether a copy takes less time than to release the GIL and take it back.
bool is_quick(const RemoteRegion& region, const Buffer& memory) {
  return !region.on_gpu() && region.reach() == regions::Reach::mapped && regions::on_host(memory) &&
         memory.bytes <= (std::size_t{16} << 10);
}

std::shared_ptr<RegionService> service_of(PythonAgent& agent) {
  auto member = agent.member().shared_from_this();
  auto& raw = member->agent();
  return std::make_shared<RegionService>(std::shared_ptr<RawAgent>(std::move(member), &raw));
}

Ranges ranges_of(const std::vector<ByteRange>& ranges) {
  Ranges out;
  out.reserve(ranges.size());
  for (const auto& range : ranges) out.emplace_back(range.offset, range.bytes);
  return out;
}

/// Copies the parts of `ranges` that lie in the targets: tensors, each with its offset in the image.
void copy_image(RegionService& service, const VersionView& view,
                const std::vector<std::pair<std::uint64_t, at::Tensor>>& targets, const std::optional<Ranges>& ranges) {
  std::vector<regions::ImageTarget> wanted;
  for (const auto& [offset, tensor] : targets) {
    const auto target = bytes_of(tensor);
    wanted.push_back({offset, target.bytes, target.data});
  }
  std::optional<std::vector<ByteRange>> changed;
  if (ranges) {
    changed.emplace();
    for (const auto& [offset, bytes] : *ranges) changed->push_back({offset, bytes});
  }
  const auto copies = value_or_raise(regions::copies_of(view, wanted, changed));
  const GilReleased released;
  service.copier.copy(copies);
}

at::Tensor tensor_of_view(const HeldVersion& view, std::uint64_t offset, std::uint64_t bytes) {
  const auto all = view->layout->bytes;
  if (offset > all || bytes > all - offset) throw py::value_error("bytes beyond the end of the version");
  auto* const data = const_cast<std::byte*>(view->data) + offset;  // torch has no tensors that are read-only
  return at::from_blob(
      data, {static_cast<std::int64_t>(bytes)}, [kept = dropped_without_gil(view)](void*) mutable { kept = {}; },
      at::TensorOptions(at::kByte));
}

/// Returns the marks that a uint8 tensor has, one for each block.
regions::BlockMarks marks_of(const at::Tensor& given, const regions::ImageLayout& layout) {
  const auto marks = bytes_of(given);
  if (marks.bytes != layout.blocks()) throw py::value_error("as many marks as the publication has blocks");
  const auto* const first = reinterpret_cast<const std::uint8_t*>(marks.data);
  return {first, first + marks.bytes};
}

/// Returns the pointers of the pieces that are not on a GPU, which come first.
/// nullptr for None.
std::vector<const std::byte*> pointers_to(const Publication& publication,
                                          const std::vector<std::optional<at::Tensor>>& tensors,
                                          std::vector<Buffer>& kept) {
  const auto& layout = publication.store().layout();
  const auto& pieces = layout.pieces;
  if (tensors.size() > pieces.size() ||
      (tensors.size() < pieces.size() && pieces[tensors.size()].offset < layout.gpu_from)) {
    throw py::value_error("a version has as many tensors as the publication");
  }
  std::vector<const std::byte*> out;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i]) {
      out.push_back(nullptr);
      continue;
    }
    kept.push_back(bytes_of(*tensors[i]));
    if (kept.back().bytes != pieces[i].bytes) throw py::value_error("a tensor of another size than the publication's");
    static constexpr std::byte nothing{};  // a tensor without elements may have no memory
    out.push_back(kept.back().bytes == 0 ? &nothing : kept.back().data);
  }
  return out;
}

/// Calls Python from an update, which has released the GIL; keeps what that raises.
class PythonGpuWriter final {
 public:
  PythonGpuWriter(const py::object& make, const py::object& write) : make_(make), write_(write) {}

  [[nodiscard]] regions::GpuWriter writer() {
    return {[this](std::uint64_t bytes) {
              return called<regions::GpuMemory>([&] {
                const auto made = make_(bytes).cast<at::Tensor>();
                if (!made.is_cuda() || made.nbytes() != bytes) throw py::value_error("memory of another size or place");
                return regions::GpuMemory{memory_of(made), 0};
              });
            },
            [this](const Buffer& image, const Buffer* base) {
              return called<regions::BlockMarks>([&] {
                py::object before = py::none();
                if (base != nullptr) before = py::cast(tensor_of_gpu(*base));
                const auto marks = write_(tensor_of_gpu(image), before).cast<at::Tensor>().contiguous();
                if (!marks.is_cpu() || marks.scalar_type() != at::kByte) throw py::type_error("marks are host bytes");
                const auto* const first = marks.const_data_ptr<std::uint8_t>();
                return regions::BlockMarks(first, first + marks.numel());
              });
            }};
  }
  /// Raises what a call has raised.
  void raise() const {
    if (raised_) std::rethrow_exception(raised_);
  }

 private:
  template <class T, class Body>
  Result<T> called(const Body& body) {
    const GilHeld held;
    try {
      return body();
    } catch (const std::exception&) {
      raised_ = std::current_exception();
      return Status(Code::internal, "writing a version on a GPU has failed");
    }
  }
  const py::object &make_, &write_;
  std::exception_ptr raised_;
};

using Pieces = std::vector<std::tuple<std::string, std::string, std::uint64_t, std::uint64_t>>;

/// Returns the name, the form, the offset and the bytes of each.
Pieces pieces_of(const ImageLayout& layout) {
  Pieces out;
  for (const auto& each : layout.pieces) out.emplace_back(each.name, each.form, each.offset, each.bytes);
  return out;
}

template <class T>
using Class = py::class_<T, std::shared_ptr<T>>;

void bind_owned(Class<RegionService>& service) {
  service
      .def(
          "add",
          [](RegionService& self, const at::Tensor& tensor, bool read, bool write, std::vector<std::string> peers,
             const std::string& name, std::string shape) {
            return value_or_raise(
                self.owned->add(memory_of(tensor), {read, write, std::move(peers)}, name, std::move(shape)));
          },
          py::arg("tensor"), py::arg("read"), py::arg("write"), py::arg("peers"), py::arg("name"), py::arg("shape"))
      .def(
          "drop",
          [](RegionService& self, std::uint64_t id) {
            const GilReleased released;
            return self.owned->drop(id).ok();
          },
          py::arg("id"))
      .def(
          "await_notification",
          [](RegionService& self, std::uint64_t id, std::optional<std::uint64_t> number, double timeout) {
            const auto told = without_gil([&](const auto& interrupted) {
              return self.owned->await_notification(id, number, until_of(timeout), interrupted);
            });
            return std::pair(told.peer, told.number);
          },
          py::arg("id"), py::arg("number"), py::arg("timeout"))
      .def_property_readonly("held_by_peers", [](const RegionService& self) {
        return std::pair(self.owned->grants(), self.visitors->size());
      });
}

void bind_copies(Class<RemoteRegion>& remote) {
  remote
      .def(
          "read",
          [](RemoteRegion& self, std::uint64_t run_bytes, const py::object& offsets, const at::Tensor& into,
             double timeout) {
            const auto runs = runs_of(run_bytes, offsets);
            const auto bytes = memory_of(into);
            if (is_quick(self, bytes)) return check(self.read(runs, bytes));
            without_gil([&](const auto& interrupted) {
              return self.read(runs, bytes, {timeout_of(timeout), interrupted});
            });
          },
          py::arg("run_bytes"), py::arg("offsets"), py::arg("into"), py::arg("timeout"))
      .def(
          "write",
          [](RemoteRegion& self, std::uint64_t run_bytes, const py::object& offsets, const at::Tensor& from,
             std::optional<std::uint64_t> notify, double timeout) {
            const auto runs = runs_of(run_bytes, offsets);
            const auto bytes = memory_of(from);
            if (!notify && is_quick(self, bytes)) return check(self.write(runs, bytes));
            without_gil([&](const auto& interrupted) {
              return self.write(runs, bytes, notify, {timeout_of(timeout), interrupted});
            });
          },
          py::arg("run_bytes"), py::arg("offsets"), py::arg("source"), py::arg("notify"), py::arg("timeout"));
}

void bind_remote(Class<RemoteRegion>& remote, Class<RegionService>& service) {
  service.def(
      "open",
      [](RegionService& self, const std::string& owner, std::uint64_t incarnation, std::uint64_t id,
         const std::string& name, double timeout) {
        return dropped_without_gil(without_gil([&](const auto& interrupted) {
          return self.remote->open({owner, incarnation, id, name}, {timeout_of(timeout), interrupted});
        }));
      },
      py::arg("owner"), py::arg("incarnation"), py::arg("id"), py::arg("name"), py::arg("timeout"));
  remote.def_property_readonly("id", &RemoteRegion::id)
      .def_property_readonly("nbytes", &RemoteRegion::bytes)
      .def_property_readonly("shape", [](const RemoteRegion& self) { return self.shape(); })
      .def_property_readonly("on_gpu", &RemoteRegion::on_gpu)
      .def("check", [](const RemoteRegion& self) { check(self.alive()); })
      .def(
          "map_on",
          [](RemoteRegion& self, int device, bool to_write) -> std::optional<at::Tensor> {
            auto mapped = [&] {
              const GilReleased released;
              return self.map_on(device, to_write);
            }();
            if (mapped.status().code() == Code::channel_unavailable) return std::nullopt;
            return tensor_of_gpu(value_or_raise(std::move(mapped)));
          },
          py::arg("device"), py::arg("to_write"))
      .def(
          "word_on",
          [](RemoteRegion& self, int device) {
            auto word = [&] {
              const GilReleased released;
              return self.word_on(device);
            }();
            return tensor_of_gpu(value_or_raise(std::move(word)));
          },
          py::arg("device"))
      .def_property_readonly("alive", [](const RemoteRegion& self) { return self.alive().ok(); })
      .def_property_readonly("carried", [](const RemoteRegion& self) {
        constexpr std::array names{"served", "in place", "mapped", "by card"};
        return std::string(names.at(static_cast<std::size_t>(self.reach())));
      });
  bind_copies(remote);
}

void bind_publications(Class<Publication>& versions, Class<RegionService>& service) {
  service
      .def(
          "publish",
          [](RegionService& self, const std::string& name,
             const std::vector<std::tuple<std::string, std::string, std::uint64_t>>& pieces, std::uint32_t block,
             bool checksums, std::size_t kept, std::size_t on_gpu) {
            ImageLayout layout;
            layout.block = block;
            layout.checksums = checksums;
            for (const auto& [piece, form, bytes] : pieces) layout.pieces.push_back({piece, form, 0, bytes});
            return value_or_raise(self.publications->publish(name, std::move(layout), {kept}, on_gpu));
          },
          py::arg("name"), py::arg("pieces"), py::arg("block"), py::arg("checksums"), py::arg("kept"),
          py::arg("on_gpu"))
      .def(
          "withdraw",
          [](RegionService& self, const std::string& name) {
            const GilReleased released;
            self.publications->withdraw(name);
          },
          py::arg("name"));
  versions
      .def(
          "update",
          [](Publication& self, const std::vector<std::optional<at::Tensor>>& tensors,
             const std::optional<at::Tensor>& look, double timeout, const py::object& make, const py::object& write) {
            std::vector<Buffer> kept;
            const auto pointers = pointers_to(self, tensors, kept);
            const auto marks = look ? marks_of(*look, self.store().layout()) : regions::BlockMarks();
            if (!look && std::ranges::count(pointers, nullptr) != 0) throw py::value_error("a tensor is missing");
            const regions::NewBytes bytes{pointers, look ? &marks : nullptr};
            PythonGpuWriter on_gpu(make, write);
            const auto writer = on_gpu.writer();
            const auto* const gpu = write.is_none() ? nullptr : &writer;
            try {
              return without_gil(
                  [&](const auto& interrupted) { return self.update(bytes, until_of(timeout), interrupted, gpu); });
            } catch (...) {
              on_gpu.raise();
              throw;
            }
          },
          py::arg("tensors"), py::arg("look"), py::arg("timeout"), py::arg("make"), py::arg("write"))
      .def_property_readonly("pieces", [](const Publication& self) { return pieces_of(self.store().layout()); })
      .def_property_readonly("gpu_from", [](const Publication& self) { return self.store().layout().gpu_from; })
      .def_property_readonly("blocks", [](const Publication& self) { return self.store().layout().blocks(); })
      .def_property_readonly("version", [](const Publication& self) { return self.store().last_version(); })
      .def_property_readonly("leases", &Publication::leases);
}

void bind_subscriptions(Class<Subscription>& source, Class<VersionView>& shown, Class<RegionService>& service) {
  service
      .def(
          "subscribe",
          [](RegionService& self, const std::string& publisher, const std::string& name, double timeout) {
            return dropped_without_gil(without_gil([&](const auto& interrupted) {
              return self.subscriptions->subscribe(publisher, name, {until_of(timeout), interrupted});
            }));
          },
          py::arg("publisher"), py::arg("name"), py::arg("timeout"))
      .def("copy", &copy_image, py::arg("view"), py::arg("targets"), py::arg("ranges"));
  source
      .def(
          "newest",
          [](Subscription& self, std::optional<std::uint64_t> newer_than, double timeout, bool on_gpu) {
            const auto view = without_gil([&](const auto& interrupted) {
              const Subscription::Limits limits{until_of(timeout), interrupted};
              return newer_than ? self.wait(*newer_than, limits, on_gpu) : self.latest(limits, on_gpu);
            });
            return dropped_without_gil(std::const_pointer_cast<VersionView>(view));
          },
          py::arg("newer_than"), py::arg("timeout"), py::arg("on_gpu") = false)
      .def(
          "changes",
          [](Subscription& self, const VersionView& view, std::uint64_t base, std::uint64_t epoch,
             double timeout) -> std::optional<Ranges> {
            std::optional<std::vector<ByteRange>> found;
            {
              const GilReleased released;
              found = self.changes(view, base, epoch, {until_of(timeout), {}});
            }
            return found ? std::optional(ranges_of(*found)) : std::nullopt;
          },
          py::arg("view"), py::arg("base"), py::arg("epoch"), py::arg("timeout"))
      .def_property_readonly("carried", &Subscription::carried)
      .def_property_readonly("fetched", &Subscription::fetched);
  shown.def_readonly("version", &VersionView::version)
      .def_readonly("epoch", &VersionView::epoch)
      .def_readonly("checksum", &VersionView::checksum)
      .def_property_readonly("pieces", [](const VersionView& self) { return pieces_of(*self.layout); })
      .def_property_readonly("gpu_from", [](const VersionView& self) { return self.layout->gpu_from; })
      .def_property_readonly(
          "region", [](const VersionView& self) { return self.region ? dropped_without_gil(self.region) : nullptr; })
      .def(
          "tensor",
          [](const std::shared_ptr<VersionView>& self, std::uint64_t offset, std::uint64_t bytes) {
            return tensor_of_view(self, offset, bytes);
          },
          py::arg("offset"), py::arg("bytes"));
}

}  // namespace

void bind_regions(py::module_& module) {
  // All classes come before the functions, whose docstrings name them.
  Class<RegionService> service(module, "RegionService", "The one-sided memory of one agent.");
  Class<RemoteRegion> remote(module, "RemoteRegion", "A grant of a peer's region.");
  Class<Publication> versions(module, "Versions", "The versions that an agent publishes.");
  Class<VersionView> shown(module, "VersionView", "One version that may be read.");
  Class<Subscription> source(module, "VersionSource", "A subscription to a publication.");
  service.def(py::init(&service_of), py::arg("agent"))
      .def("end_visits",
           [](RegionService& self) {
             const GilReleased released;
             self.end_visits();
           })
      .def("close", [](RegionService& self) {
        const GilReleased released;
        self.close();
      });
  bind_owned(service);
  bind_remote(remote, service);
  bind_publications(versions, service);
  bind_subscriptions(source, shown, service);
}

}  // namespace tensorferry::python

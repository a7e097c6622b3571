#include "tensorferry/region.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "channels/region.h"
#include "rpc/cpp/core.h"
#include "rpc/cpp/failures.h"
#include "rpc/cpp/forms.h"
#include "rpc/regions/service.h"
#include "tensorferry/agent.h"

namespace tensorferry {
namespace detail {

using regions::RegionService;
using regions::RemoteRegion;
using regions::Runs;
using regions::TransferLimits;

/// A region of this agent, with its tensor. Drops it when it is destroyed.
struct SharedRegion {
  ~SharedRegion() { static_cast<void>(service->owned->drop(handle.id)); }
  std::shared_ptr<AgentCore> core;
  std::shared_ptr<RegionService> service;
  Tensor tensor;
  RegionHandle handle;
};

/// The grant of a peer's region. If it has ended with a link, the next use asks for another. Thread-safe.
class HeldGrant {
 public:
  HeldGrant(std::shared_ptr<AgentCore> core, std::shared_ptr<RegionService> service, regions::RegionKey key)
      : core_(std::move(core)), service_(std::move(service)), key_(std::move(key)) {}

  Result<std::shared_ptr<RemoteRegion>> current(const TransferLimits& limits) {
    {
      const std::lock_guard lock(mutex_);
      if (grant_ && grant_->alive().ok()) return grant_;
    }
    auto opened = service_->remote->open(key_, limits);
    if (!opened.ok()) return opened;
    const std::lock_guard lock(mutex_);
    key_.id = (*opened)->id();  // from now on this region, also if another one gets its name
    grant_ = *opened;
    return opened;
  }
  [[nodiscard]] AgentCore& core() const { return *core_; }

 private:
  const std::shared_ptr<AgentCore> core_;
  const std::shared_ptr<RegionService> service_;
  std::mutex mutex_;
  regions::RegionKey key_;
  std::shared_ptr<RemoteRegion> grant_;
};

/// Rows of a region, in row-major order from byte `first` on.
struct OpenedRegion {
  std::shared_ptr<HeldGrant> grant;
  RegionHandle handle;
  DType dtype = DType::float32;
  Tensor::Shape shape;
  std::uint64_t first = 0;

  [[nodiscard]] std::uint64_t row_bytes() const {
    std::uint64_t bytes = size_of(dtype);
    for (std::size_t i = 1; i < shape.size(); ++i) bytes *= static_cast<std::uint64_t>(shape[i]);
    return bytes;
  }
  [[nodiscard]] std::uint64_t bytes() const {
    return shape.empty() ? size_of(dtype) : static_cast<std::uint64_t>(shape[0]) * row_bytes();
  }
};

}  // namespace detail

namespace {

using detail::OpenedRegion;
using detail::value_or_throw;

Buffer buffer_of(const Tensor& tensor) {
  return {{}, static_cast<std::byte*>(tensor.raw()), tensor.bytes(), nullptr, tensor.owner()};
}

/// Throws InvalidArgument unless the tensor is contiguous host memory of this dtype and shape.
void check_fits(const Tensor& tensor, DType dtype, const Tensor::Shape& shape) {
  if (tensor.device() != Device{}) {
    throw InvalidArgument("a region is copied from and to host memory, not " + text_of(tensor.device()));
  }
  if (tensor.dtype() == dtype && tensor.shape() == shape && tensor.is_contiguous()) return;
  std::string wanted(name_of(dtype));
  for (const auto size : shape) wanted += " " + std::to_string(size);
  throw InvalidArgument("a transfer of a region takes a contiguous tensor of " + wanted + ", not a " + tensor.text());
}

regions::Runs all_of(const OpenedRegion& region) { return regions::Runs::one(region.first, region.bytes()); }

regions::Runs blocks_of(const OpenedRegion& region, std::span<const std::int64_t> indices) {
  if (region.shape.empty()) throw InvalidArgument("a region of one element has no rows");
  regions::Runs out{region.row_bytes(), {}};
  out.offsets.reserve(indices.size());
  for (const auto index : indices) {
    if (index < 0 || index >= region.shape[0]) {
      throw InvalidArgument("a row " + std::to_string(index) + " of a region of " + std::to_string(region.shape[0]));
    }
    out.offsets.push_back(region.first + static_cast<std::uint64_t>(index) * out.run_bytes);
  }
  return out;
}

Tensor::Shape shape_of_blocks(const OpenedRegion& region, std::span<const std::int64_t> indices) {
  auto shape = region.shape;
  if (!shape.empty()) shape[0] = static_cast<std::int64_t>(indices.size());
  return shape;
}

void read_runs(const OpenedRegion& region, const regions::Runs& runs, const Tensor& into,
               const TransferOptions& options) {
  if (options.notify) throw InvalidArgument("a read has no notification");
  const WaitInHandler place;
  const regions::TransferLimits limits{region.grant->core().limit_of(options.timeout), {}};
  const auto grant = value_or_throw(region.grant->current(limits));
  detail::check(grant->read(runs, buffer_of(into), limits));
}

void write_runs(const OpenedRegion& region, const regions::Runs& runs, const Tensor& from,
                const TransferOptions& options) {
  const WaitInHandler place;
  const regions::TransferLimits limits{region.grant->core().limit_of(options.timeout), {}};
  const auto grant = value_or_throw(region.grant->current(limits));
  detail::check(grant->write(runs, buffer_of(from), options.notify, limits));
}

Tensor dense(const Tensor& tensor) { return tensor.device() == Device{} ? tensor.contiguous() : tensor; }

}  // namespace

// ---- the agent's part

std::shared_ptr<regions::RegionService> detail::AgentCore::regions() {
  const std::lock_guard lock(regions_mutex_);
  if (!regions_) regions_ = std::make_shared<RegionService>(std::shared_ptr<RawAgent>(member, &member->agent()));
  return regions_;
}

void detail::AgentCore::end_regions(bool visits_alone) {
  std::shared_ptr<RegionService> service;
  {
    const std::lock_guard lock(regions_mutex_);
    service = regions_;
  }
  if (!service || !raw().usable_here().ok()) return;
  service->end_visits();
  if (!visits_alone) service->close();
}

OwnRegion Agent::region(const Tensor& tensor, RegionOptions options) {
  if (tensor.device() != Device{}) {
    throw InvalidArgument("memory on " + text_of(tensor.device()) + ": regions of GPUs are not supported yet");
  }
  if (!tensor.is_contiguous()) throw InvalidArgument("a region is a contiguous tensor, not a " + tensor.text());
  auto service = core_->regions();
  const auto id =
      value_or_throw(service->owned->add(buffer_of(tensor), {options.read, options.write, std::move(options.peers)},
                                         options.name, detail::form_of(tensor)));
  OwnRegion out;
  out.shared_ = std::make_shared<detail::SharedRegion>(core_, std::move(service), tensor,
                                                       RegionHandle{name(), core_->self().incarnation, id});
  return out;
}

namespace {

std::shared_ptr<const OpenedRegion> opened_by(const std::shared_ptr<detail::AgentCore>& core, regions::RegionKey key,
                                              std::chrono::milliseconds timeout) {
  const WaitInHandler place;
  const auto owner = key.owner;
  const auto incarnation = key.incarnation;
  auto held = std::make_shared<detail::HeldGrant>(core, core->regions(), std::move(key));
  const auto grant = value_or_throw(held->current({core->limit_of(timeout), {}}));
  auto form = detail::parse_form(grant->shape(), grant->bytes());
  if (!form) throw ProtocolError("\"" + owner + "\" described a region as no tensor of its size");
  if (!form->is_row_major()) {
    throw InvalidArgument("region " + std::to_string(grant->id()) + " of \"" + owner +
                          "\" is not row-major: C++ reads only regions that are");
  }
  return std::make_shared<OpenedRegion>(std::move(held), RegionHandle{owner, incarnation, grant->id()}, form->dtype,
                                        std::move(form->shape), 0);
}

}  // namespace

PeerRegion Agent::find_region(std::string_view owner, std::string_view name, std::chrono::milliseconds timeout) {
  if (name.empty()) throw InvalidArgument("a region is found by its name, which is empty");
  // With the incarnation, because a restarted owner may use the region's id for other memory.
  const auto incarnation = value_or_throw(core_->member->id_of(owner)).incarnation;
  PeerRegion out;
  out.opened_ = opened_by(core_, {std::string(owner), incarnation, 0, std::string(name)}, timeout);
  return out;
}

PeerRegion Agent::open_region(const RegionHandle& handle, std::chrono::milliseconds timeout) {
  if (handle.id == 0) throw InvalidArgument("a handle of no region");
  PeerRegion out;
  out.opened_ = opened_by(core_, {handle.owner, handle.incarnation, handle.id, {}}, timeout);
  return out;
}

// ---- regions of this agent

const detail::SharedRegion& OwnRegion::shared() const {
  if (!shared_) throw InvalidArgument("an OwnRegion that is empty");
  return *shared_;
}

RegionHandle OwnRegion::handle() const { return shared().handle; }
const Tensor& OwnRegion::tensor() const { return shared().tensor; }
void OwnRegion::drop() const { static_cast<void>(shared().service->owned->drop(shared().handle.id)); }

RegionNotification OwnRegion::await_notification(std::optional<std::uint64_t> number,
                                                 std::chrono::milliseconds timeout) const {
  const WaitInHandler place;
  const auto limit = shared().core->limit_of(timeout);
  const auto until = limit.count() == 0 ? std::nullopt : std::optional(Clock().now() + limit);
  auto told = value_or_throw(shared().service->owned->await_notification(shared().handle.id, number, until));
  return {std::move(told.peer), told.number};
}

// ---- regions of peers

const detail::OpenedRegion& PeerRegion::opened() const {
  if (!opened_) throw InvalidArgument("a PeerRegion that is empty");
  return *opened_;
}

DType PeerRegion::dtype() const { return opened().dtype; }
const Tensor::Shape& PeerRegion::shape() const { return opened().shape; }
RegionHandle PeerRegion::handle() const { return opened().handle; }

PeerRegion PeerRegion::rows(std::int64_t first, std::int64_t count) const {
  auto part = opened();
  if (part.shape.empty() || first < 0 || count < 0 || first > part.shape[0] || count > part.shape[0] - first) {
    throw InvalidArgument("rows from " + std::to_string(first) + ", " + std::to_string(count) +
                          " of them, of a region of " + std::to_string(part.shape.empty() ? 0 : part.shape[0]));
  }
  part.first += static_cast<std::uint64_t>(first) * part.row_bytes();
  part.shape[0] = count;
  PeerRegion out;
  out.opened_ = std::make_shared<OpenedRegion>(std::move(part));
  return out;
}

void PeerRegion::read_into(const Tensor& into, const TransferOptions& options) const {
  check_fits(into, dtype(), shape());
  read_runs(opened(), all_of(opened()), into, options);
}

Tensor PeerRegion::read(const TransferOptions& options) const {
  auto out = Tensor::empty(shape(), dtype());
  read_into(out, options);
  return out;
}

void PeerRegion::write(const Tensor& from, const TransferOptions& options) const {
  const auto source = dense(from);
  check_fits(source, dtype(), shape());
  write_runs(opened(), all_of(opened()), source, options);
}

void PeerRegion::read_blocks_into(std::span<const std::int64_t> indices, const Tensor& into,
                                  const TransferOptions& options) const {
  const auto runs = blocks_of(opened(), indices);
  check_fits(into, dtype(), shape_of_blocks(opened(), indices));
  read_runs(opened(), runs, into, options);
}

Tensor PeerRegion::read_blocks(std::span<const std::int64_t> indices, const TransferOptions& options) const {
  auto out = Tensor::empty(shape_of_blocks(opened(), indices), dtype());
  read_blocks_into(indices, out, options);
  return out;
}

void PeerRegion::write_blocks(std::span<const std::int64_t> indices, const Tensor& from,
                              const TransferOptions& options) const {
  const auto runs = blocks_of(opened(), indices);
  const auto source = dense(from);
  check_fits(source, dtype(), shape_of_blocks(opened(), indices));
  write_runs(opened(), runs, source, options);
}

std::string PeerRegion::carried() const {
  const WaitInHandler place;
  const auto grant = value_or_throw(opened().grant->current({opened().grant->core().timeout, {}}));
  switch (grant->reach()) {
    case regions::Reach::mapped:
      return "mapped";
    case regions::Reach::in_place:
      return "in place";
    case regions::Reach::by_card:
      return "by card";
    case regions::Reach::served:
      break;
  }
  return "served";
}

Tensor mappable_tensor(Tensor::Shape shape, DType dtype) {
  std::size_t bytes = size_of(dtype);
  bool odd = bytes == 0;
  for (const auto size : shape) {
    odd = odd || size < 0 || __builtin_mul_overflow(bytes, static_cast<std::size_t>(size), &bytes);
  }
  if (odd || bytes == 0) return Tensor::empty(std::move(shape), dtype);  // which says what is wrong
  auto memory = value_or_throw(Regions::of_this_process().make(bytes));
  return Tensor::from_memory(memory.data, std::move(shape), dtype, std::move(memory.owner));
}

}  // namespace tensorferry

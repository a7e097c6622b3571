#include "tensorferry/versions.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <utility>

#include "rpc/cpp/core.h"
#include "rpc/cpp/failures.h"
#include "rpc/cpp/forms.h"
#include "rpc/regions/service.h"
#include "tensorferry/agent.h"

namespace tensorferry {
namespace detail {

using regions::HeldVersion;
using regions::ImageLayout;
using regions::ImagePiece;
using regions::RegionService;

/// A publication of this agent. Withdraws it when it is destroyed.
struct SharedPublication {
  ~SharedPublication() { withdraw(); }
  void withdraw() const {
    // The name may be that of a later publication.
    if (!withdrawn.exchange(true)) service->publications->withdraw(publication->name());
  }
  std::shared_ptr<AgentCore> core;
  std::shared_ptr<RegionService> service;
  std::shared_ptr<regions::Publication> publication;
  std::map<std::string, TensorForm, std::less<>> forms;
  mutable std::atomic<bool> withdrawn{true};  // until it is published
};

struct SharedSubscription {
  [[nodiscard]] regions::Subscription::Limits limits(std::chrono::milliseconds timeout) const {
    const auto limit = core->limit_of(timeout);
    return {limit.count() == 0 ? std::nullopt : std::optional(Clock().now() + limit), {}};
  }
  std::shared_ptr<AgentCore> core;
  std::shared_ptr<RegionService> service;
  std::shared_ptr<regions::Subscription> source;
};

struct SharedVersion {
  HeldVersion view;
};

struct LoadPlan {
  std::shared_ptr<const SharedSubscription> subscription;
  std::vector<LoadTarget> wanted;
  std::vector<ImagePiece> pieces;  // for which the targets were planned
  std::vector<regions::ImageTarget> targets;
  std::uint64_t version = 0, epoch = 0;
};

}  // namespace detail

namespace {

using detail::TensorForm;
using detail::value_or_throw;

template <class T>
const T& held_by(const std::shared_ptr<const T>& pointer, const char* what) {
  if (!pointer) throw InvalidArgument(std::string(what) + " that is empty");
  return *pointer;
}

void check_memory(const std::string& name, const Tensor& tensor) {
  if (tensor.device() == Device{} && tensor.is_contiguous()) return;
  throw InvalidArgument("versions are copied from and to contiguous host memory, and \"" + name + "\" is a " +
                        tensor.text() + (tensor.device() == Device{} ? " with gaps" : " on a device"));
}

const detail::ImagePiece& piece_of(const std::vector<detail::ImagePiece>& pieces, std::string_view name) {
  const auto found = std::ranges::find(pieces, name, &detail::ImagePiece::name);
  if (found == pieces.end()) throw InvalidArgument("the publication has no tensor \"" + std::string(name) + "\"");
  return *found;
}

TensorForm form_of_piece(const detail::ImagePiece& piece) {
  auto form = detail::parse_form(piece.form, piece.bytes);
  if (!form) throw ProtocolError("a peer described \"" + piece.name + "\" as no tensor of its size");
  if (!form->is_row_major()) throw InvalidArgument("\"" + piece.name + "\" is not row-major");
  return *std::move(form);
}

/// Returns the bytes that a target wants of an image. Throws InvalidArgument if it does not fit.
regions::ImageTarget planned(const LoadTarget& wanted, const std::vector<detail::ImagePiece>& pieces) {
  const auto& piece = piece_of(pieces, wanted.name);
  const auto form = form_of_piece(piece);
  auto shape = form.shape;
  std::int64_t first = 0;
  if (wanted.first_row && !shape.empty() && !wanted.into.shape().empty()) {
    first = *wanted.first_row;
    const auto rows = wanted.into.shape()[0];
    if (first >= 0 && first <= shape[0] && rows <= shape[0] - first) shape[0] = rows;
  }
  if (wanted.into.dtype() != form.dtype || wanted.into.shape() != shape || (first != 0 && shape == form.shape)) {
    throw InvalidArgument("\"" + wanted.name + "\" is a tensor of " + piece.form + ", and does not fit into a " +
                          wanted.into.text() + (wanted.first_row ? " from row " + std::to_string(first) : ""));
  }
  const auto row_bytes =
      form.shape.empty() || form.shape[0] == 0 ? 0 : piece.bytes / static_cast<std::uint64_t>(form.shape[0]);
  return {piece.offset + static_cast<std::uint64_t>(first) * row_bytes, wanted.into.bytes(),
          static_cast<std::byte*>(wanted.into.raw())};
}

void make_plan(detail::LoadPlan& plan, const std::vector<detail::ImagePiece>& pieces) {
  std::vector<regions::ImageTarget> targets;
  for (const auto& wanted : plan.wanted) targets.push_back(planned(wanted, pieces));
  plan.targets = std::move(targets);
  plan.pieces = pieces;
  plan.version = 0;
}

std::uint64_t load_from(detail::LoadPlan& plan, const regions::HeldVersion& view,
                        const regions::Subscription::Limits& limits) {
  if (view->epoch == plan.epoch && view->version == plan.version) return plan.version;
  if (view->layout->pieces != plan.pieces) make_plan(plan, view->layout->pieces);
  const auto ranges = plan.subscription->source->changes(*view, plan.version, plan.epoch, limits);
  const auto copies = value_or_throw(regions::copies_of(*view, plan.targets, ranges));
  plan.subscription->service->copier.copy(copies);
  plan.epoch = view->epoch;
  return plan.version = view->version;
}

}  // namespace

// ---- the agent's part

OwnPublication Agent::publish(std::string name, const std::vector<NamedTensor>& tensors, PublicationOptions options) {
  regions::ImageLayout layout;
  layout.block = options.block;
  layout.checksums = options.checksums;
  auto out = std::make_shared<detail::SharedPublication>();
  for (const auto& [key, tensor] : tensors) {
    check_memory(key, tensor);
    if (!out->forms.try_emplace(key, TensorForm{tensor.dtype(), tensor.shape(), tensor.strides()}).second) {
      throw InvalidArgument("a publication of two tensors with the name \"" + key + "\"");
    }
    layout.pieces.push_back({key, detail::form_of(tensor), 0, tensor.bytes()});
  }
  out->core = core_;
  out->service = core_->regions();
  out->publication = value_or_throw(out->service->publications->publish(name, std::move(layout), {options.kept}));
  out->withdrawn = false;
  OwnPublication published;
  published.shared_ = std::move(out);
  published.update(tensors);
  return published;
}

PeerPublication Agent::subscribe(std::string_view publisher, std::string_view name, std::chrono::milliseconds timeout) {
  const WaitInHandler place;
  auto out = std::make_shared<detail::SharedSubscription>();
  out->core = core_;
  out->service = core_->regions();
  out->source = value_or_throw(
      out->service->subscriptions->subscribe(std::string(publisher), std::string(name), out->limits(timeout)));
  PeerPublication subscribed;
  subscribed.shared_ = std::move(out);
  return subscribed;
}

// ---- publications of this agent

const detail::SharedPublication& OwnPublication::shared() const { return held_by(shared_, "an OwnPublication"); }

namespace {

/// Returns the bytes of the tensors in the order of the publication's pieces; nullptr where none is given.
std::vector<const std::byte*> pointers_of(const detail::SharedPublication& own,
                                          const std::vector<NamedTensor>& tensors) {
  const auto& pieces = own.publication->store().layout().pieces;
  std::vector<const std::byte*> pointers(pieces.size());
  for (const auto& [key, tensor] : tensors) {
    check_memory(key, tensor);
    const auto known = own.forms.find(key);
    if (known == own.forms.end() || known->second.dtype != tensor.dtype() || known->second.shape != tensor.shape()) {
      throw InvalidArgument("\"" + own.publication->name() + "\" with another tensor than before: \"" + key + "\", a " +
                            tensor.text());
    }
    auto& pointer = pointers[static_cast<std::size_t>(&piece_of(pieces, key) - pieces.data())];
    if (pointer != nullptr) throw InvalidArgument("a version of two tensors with the name \"" + key + "\"");
    static constexpr std::byte nothing{};  // a tensor without elements may have no memory
    pointer = tensor.bytes() == 0 ? &nothing : static_cast<const std::byte*>(tensor.raw());
  }
  return pointers;
}

std::uint64_t next_version(const detail::SharedPublication& own, const regions::NewBytes& bytes,
                           std::chrono::milliseconds timeout) {
  const auto limit = own.core->limit_of(timeout);
  const auto until = limit.count() == 0 ? std::nullopt : std::optional(Clock().now() + limit);
  return value_or_throw(own.publication->update(bytes, until));
}

}  // namespace

std::uint64_t OwnPublication::update(const std::vector<NamedTensor>& tensors, std::chrono::milliseconds timeout) const {
  const WaitInHandler place;
  const auto& own = shared();
  const auto& pieces = own.publication->store().layout().pieces;
  const auto pointers = pointers_of(own, tensors);
  const auto missing = std::ranges::find(pointers, nullptr) - pointers.begin();
  if (missing != static_cast<std::ptrdiff_t>(pointers.size())) {
    throw InvalidArgument("\"" + own.publication->name() + "\" without its tensor \"" +
                          pieces[static_cast<std::size_t>(missing)].name + "\"");
  }
  return next_version(own, {pointers}, timeout);
}

std::uint64_t OwnPublication::update_only(const std::vector<NamedTensor>& tensors,
                                          std::chrono::milliseconds timeout) const {
  const WaitInHandler place;
  const auto& own = shared();
  const auto& layout = own.publication->store().layout();
  const auto pointers = pointers_of(own, tensors);
  regions::BlockMarks look(layout.blocks());
  for (std::size_t i = 0; i < pointers.size(); ++i) {
    if (pointers[i] != nullptr) regions::mark(look, layout, {layout.pieces[i].offset, layout.pieces[i].bytes});
  }
  return next_version(own, {pointers, &look}, timeout);
}

std::uint64_t OwnPublication::version() const { return shared().publication->store().last_version(); }
std::size_t OwnPublication::leases() const { return shared().publication->leases(); }
void OwnPublication::withdraw() const { shared().withdraw(); }

// ---- versions

const detail::SharedVersion& PublishedVersion::shared() const { return held_by(shared_, "a PublishedVersion"); }
std::uint64_t PublishedVersion::number() const { return shared().view->version; }

std::vector<std::string> PublishedVersion::names() const {
  std::vector<std::string> out;
  for (const auto& piece : shared().view->layout->pieces) out.push_back(piece.name);
  return out;
}

Tensor PublishedVersion::tensor(std::string_view name) const {
  const auto& view = shared().view;
  const auto& piece = piece_of(view->layout->pieces, name);
  auto form = form_of_piece(piece);
  auto* const data = const_cast<std::byte*>(view->data) + piece.offset;  // a Tensor is never read-only
  return Tensor::from_memory(data, std::move(form.shape), form.dtype,
                             std::const_pointer_cast<regions::VersionView>(view));
}

// ---- subscriptions

const detail::SharedSubscription& PeerPublication::shared() const { return held_by(shared_, "a PeerPublication"); }

PublishedVersion PeerPublication::latest(std::chrono::milliseconds timeout) const {
  const WaitInHandler place;
  PublishedVersion out;
  auto view = value_or_throw(shared().source->latest(shared().limits(timeout)));
  out.shared_ = std::make_shared<detail::SharedVersion>(std::move(view));
  return out;
}

PublishedVersion PeerPublication::wait(std::uint64_t newer_than, std::chrono::milliseconds timeout) const {
  const WaitInHandler place;
  PublishedVersion out;
  auto view = value_or_throw(shared().source->wait(newer_than, shared().limits(timeout)));
  out.shared_ = std::make_shared<detail::SharedVersion>(std::move(view));
  return out;
}

VersionLoader PeerPublication::into(std::vector<LoadTarget> targets) const {
  for (const auto& each : targets) check_memory(each.name, each.into);
  auto plan = std::make_shared<detail::LoadPlan>();
  plan->subscription = shared_;
  plan->wanted = std::move(targets);
  make_plan(*plan, shared().source->layout().pieces);
  VersionLoader out;
  out.plan_ = std::move(plan);
  return out;
}

std::string PeerPublication::carried() const { return shared().source->carried(); }
std::uint64_t PeerPublication::fetched() const { return shared().source->fetched(); }

detail::LoadPlan& VersionLoader::plan() const {
  if (!plan_) throw InvalidArgument("a VersionLoader that is empty");
  return *plan_;
}

std::uint64_t VersionLoader::load(std::chrono::milliseconds timeout) const {
  const WaitInHandler place;
  const auto limits = plan().subscription->limits(timeout);
  return load_from(plan(), value_or_throw(plan().subscription->source->latest(limits)), limits);
}

std::uint64_t VersionLoader::wait(std::chrono::milliseconds timeout) const {
  const WaitInHandler place;
  const auto limits = plan().subscription->limits(timeout);
  return load_from(plan(), value_or_throw(plan().subscription->source->wait(plan().version, limits)), limits);
}

std::uint64_t VersionLoader::version() const { return plan().version; }

}  // namespace tensorferry

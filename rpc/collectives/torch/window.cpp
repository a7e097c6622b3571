#include "rpc/collectives/torch/window.h"

#ifdef C10D_BACKEND_HAS_WINDOW

#include <c10/util/Exception.h>

#include <cstring>
#include <utility>

#include "base/text.h"
#include "rpc/collectives/torch/interruptions.h"
#include "rpc/tensor.h"

namespace tensorferry::collectives {
namespace {

// Signals are messages with tags of the library's own. Bit 63 alone marks those of monitored barriers.
constexpr std::uint64_t signal_tags = std::uint64_t{3} << 62U;
constexpr std::byte token{};

[[noreturn]] void throw_status(const Status& status) {
  if (status.code() == Code::invalid_argument) C10_THROW_ERROR(ValueError, status.text());
  C10_THROW_ERROR(DistBackendError, status.text());
}

std::vector<std::shared_ptr<TransferLane>> make_lanes(std::size_t ranks) {
  std::vector<std::shared_ptr<TransferLane>> out;
  for (std::size_t rank = 0; rank < ranks; ++rank) out.push_back(std::make_shared<TransferLane>());
  return out;
}

/// Returns the error of a put, for its caller.
Status error_of_put(const RawGroup& group, std::size_t to, Status status) {
  if (status.ok()) return status;
  if (auto over = group.over(); status.code() == Code::cancelled && !over.ok()) return over;
  if (status.code() == Code::not_found) {
    return {Code::not_found,
            formatted("{} has deregistered its tensor of the window, or has left: {}", group.named(to), status.what())};
  }
  return {status.code(),
          formatted("a put to {} of group \"{}\" failed: {}", group.named(to), group.settings().label, status.what())};
}

/// Returns whether a rank has told something that a rank can tell.
bool is_sound(const RegisteredTensor& told) {
  constexpr std::int64_t most_elements = std::int64_t{1} << 48;
  if (told.state != RegisteredTensor::registered) return told.state == 0 || told.state == RegisteredTensor::refused;
  return 0 <= told.dtype && told.dtype < static_cast<std::int64_t>(at::ScalarType::NumOptions) &&
         dtype_of(static_cast<at::ScalarType>(told.dtype)) && 0 <= told.elements && told.elements <= most_elements &&
         (told.region != 0) == (told.elements != 0);
}

}  // namespace

struct TorchWindow::Place {
  c10::intrusive_ptr<TorchProcessGroup> process_group;
  std::shared_ptr<DeviceGroup> group;
  [[nodiscard]] RawGroup& raw() const { return group->raw(); }
  [[nodiscard]] StartOptions options(std::chrono::milliseconds timeout) const {
    return process_group->start_options(timeout, true);
  }
  [[nodiscard]] c10::intrusive_ptr<c10d::Work> work_of(RawGroup::Work work, c10d::OpType type, const char* title,
                                                       const std::vector<at::Tensor>& inputs,
                                                       std::chrono::milliseconds timeout) const {
    return process_group->work_of(group->on_host(), std::move(work), type, title, {{}}, inputs, timeout);
  }
};

c10::intrusive_ptr<c10d::Window> TorchProcessGroup::new_window(const std::optional<at::Tensor>& tensor) {
  const Returning to_the_caller;
  auto window = c10::make_intrusive<TorchWindow>(*this, shared_group());
  window->meet(tensor);
  return window;
}

TorchWindow::TorchWindow(TorchProcessGroup& of, const std::shared_ptr<DeviceGroup>& group)
    : process_group_(c10::intrusive_ptr<TorchProcessGroup>::unsafe_reclaim_from_nonowning(&of)),
      group_(group),
      lanes_(make_lanes(group->raw().size())) {}

TorchWindow::~TorchWindow() {
  if (memory_) memory_->drop();  // works that have not ended keep the rest
}

TorchWindow::Place TorchWindow::place() const {
  Place out{process_group_.lock(), group_.lock()};
  TORCH_CHECK_WITH(DistBackendError, out.process_group && out.group && !out.raw().closed(),
                   "Cancelled: the process group of this window was destroyed or reconfigured: make a new window");
  return out;
}

std::shared_ptr<WindowMemory> TorchWindow::registered() const {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK_VALUE(memory_, "no tensor is registered with the window: call tensor_register() at every rank");
  return memory_;
}

std::size_t TorchWindow::check_rank_of(std::int64_t given) const {
  TORCH_CHECK_VALUE(0 <= given && given < static_cast<std::int64_t>(lanes_.size()), "a window of ", lanes_.size(),
                    " ranks has no rank ", given);
  return static_cast<std::size_t>(given);
}

std::vector<RegisteredTensor> TorchWindow::gather(const Place& place, const RegisteredTensor& own,
                                                  std::uint64_t& number) const {
  // The operation may outlive this call, if a signal handler ends the wait.
  auto told = std::make_shared<std::vector<RegisteredTensor>>(lanes_.size() + 1);
  told->back() = own;
  auto options = place.options(c10d::kUnsetTimeout);
  options.keep = told;
  std::vector<OutBytes> outputs;
  for (std::size_t rank = 0; rank < lanes_.size(); ++rank) {
    outputs.push_back(std::as_writable_bytes(std::span(&(*told)[rank], 1)));
  }
  const auto work = place.raw().all_gather(std::as_bytes(std::span(&told->back(), 1)), std::move(outputs), DType::int64,
                                           true, std::move(options));
  WaitInterruption interruption;
  const bool ended = work->wait(std::nullopt, interruption.check());
  interruption.rethrow();
  if (ended && !work->status().ok()) throw_status(work->status());
  number = work->number();
  return {told->begin(), told->end() - 1};
}

void TorchWindow::register_at_all(const std::optional<at::Tensor>& tensor, bool first) {
  const auto here = place();
  Result<std::shared_ptr<WindowMemory>> memory(std::shared_ptr<WindowMemory>{});
  RegisteredTensor own;
  if (tensor) {
    const auto service = here.process_group->options_->regions ? here.process_group->options_->regions() : nullptr;
    const std::lock_guard lock(mutex_);
    if (memory_) {
      memory = Status(Code::invalid_argument, "a tensor is registered with the window: call tensor_deregister() first");
    } else if (!service) {
      memory = Status(Code::agent_closed, "the agent of the process group has left");
    } else {
      memory = WindowMemory::of(service, *tensor);
    }
    own.state = RegisteredTensor::refused;
    if (memory.ok()) own = (*memory)->record();
    own.incarnation = static_cast<std::int64_t>(here.raw().agent()->self().incarnation);
  }
  std::uint64_t number = 0;
  auto told = gather(here, own, number);
  if (first) tag_ = signal_tags + number;
  if (!memory.ok()) throw_status(memory.status());
  for (std::size_t rank = 0; rank < told.size(); ++rank) {
    if (!is_sound(told[rank])) {
      throw_status({Code::protocol_error, here.raw().named(rank) + " told of a tensor that there cannot be"});
    }
    if (told[rank].state == own.state) continue;
    throw_status(
        {Code::invalid_argument, formatted("{} {}, so no rank does", here.raw().named(rank),
                                           told[rank].state == RegisteredTensor::refused
                                               ? "could not register its tensor with the window"
                                               : "and this rank do not both register a tensor with the window")});
  }
  if (!tensor) return;
  (*memory)->set_ranks(here.raw().rank(), std::move(told), here.raw().names());
  const std::lock_guard lock(mutex_);
  memory_ = *std::move(memory);
}

void TorchWindow::meet(const std::optional<at::Tensor>& tensor) { register_at_all(tensor, true); }

void TorchWindow::tensor_register(const at::Tensor& tensor, bool) {
  const Returning to_the_caller;
  register_at_all(tensor, false);
}

void TorchWindow::tensor_deregister() {
  const Returning to_the_caller;
  const auto memory = registered();
  // However this ends, the tensor is the caller's again.
  const std::shared_ptr<void> dropped(nullptr, [&](void*) {
    memory->drop();
    const std::lock_guard lock(mutex_);
    memory_ = nullptr;
  });
  const auto here = place();
  WaitInterruption interruption;
  const auto interrupted = interruption.check();
  for (const auto& lane : lanes_) {
    if (!lane->wait_until_idle(interrupted)) interruption.rethrow();
  }
  const auto work = here.raw().barrier(here.options(c10d::kUnsetTimeout));
  (void)work->wait(std::nullopt, interrupted);
  interruption.rethrow();
  if (!work->status().ok()) throw_status(work->status());
}

c10::intrusive_ptr<c10d::Work> TorchWindow::put(const at::Tensor& tensor, int64_t to, int64_t element, bool async_op,
                                                const c10d::PutOptions& opts) {
  const Returning to_the_caller;
  const auto here = place();
  const auto memory = registered();
  const auto rank = check_rank_of(to);
  const auto& there = memory->at(rank);
  const auto dtype = static_cast<at::ScalarType>(there.dtype);
  TORCH_CHECK_VALUE(tensor.defined() && tensor.is_cpu() && tensor.layout() == at::kStrided,
                    "a put takes a dense tensor of the CPU");
  TORCH_CHECK_VALUE(tensor.scalar_type() == dtype, "a put of ", tensor.scalar_type(), " to rank ", rank,
                    ", whose window has ", dtype);
  TORCH_CHECK_VALUE(0 <= element && element <= there.elements && tensor.numel() <= there.elements - element,
                    "a put of ", tensor.numel(), " elements at ", element, " to rank ", rank, ", whose window has ",
                    there.elements);
  const auto from = bytes_of_cpu(tensor.resolve_conj().resolve_neg().contiguous());
  auto options = here.options(opts.timeout);
  WaitInterruption interruption;
  const auto handler = async_op ? std::function<bool()>() : interruption.check();
  const auto begin = [&](UniqueFunction<void(Status)> told) {
    auto delivery = std::make_shared<Delivery>(std::move(told));
    auto write = [group = here.raw().shared_from_this(), memory, rank, element, from, delivery,
                  timeout = options.timeout](const std::function<bool()>& interrupted) {
      regions::TransferLimits limits{
          timeout, [&] { return delivery->done() || !group->over().ok() || (interrupted && interrupted()); }};
      auto status = group->over();
      if (status.ok() && !delivery->done()) status = memory->write(rank, element, from, limits);
      delivery->complete(error_of_put(*group, rank, std::move(status)));
    };
    lanes_[rank]->run(std::move(write), !async_op, handler);
    return delivery;
  };
  auto text = formatted("a put to {} of group \"{}\"", here.raw().named(rank), here.raw().settings().label);
  auto started = here.raw().transfer(options, std::move(text), begin);
  interruption.rethrow();
  auto work = here.work_of(std::move(started), c10d::OpType::SEND, "tensorferry:put", {tensor}, opts.timeout);
  if (!async_op) work->wait(kNoTimeout);
  return work;
}

at::Tensor TorchWindow::map_remote_tensor(int64_t rank) {
  const Returning to_the_caller;
  const auto here = place();
  const auto memory = registered();
  const auto found = check_rank_of(rank);
  WaitInterruption interruption;
  auto mapped = memory->map(found, {here.options(c10d::kUnsetTimeout).timeout, interruption.check()});
  interruption.rethrow();
  if (mapped.ok()) return *std::move(mapped);
  throw_status({mapped.status().code(),
                formatted("the window of {} is not mapped: {}", here.raw().named(found), mapped.status().what())});
}

c10::intrusive_ptr<c10d::Work> TorchWindow::signal(int64_t to, bool async_op, const c10d::SignalOptions& opts) {
  const Returning to_the_caller;
  const auto here = place();
  const auto rank = check_rank_of(to);
  const auto begin = [&](UniqueFunction<void(Status)> told) {
    auto delivery = std::make_shared<Delivery>(std::move(told));
    auto post = [group = here.raw().shared_from_this(), rank, tag = tag_, delivery](const std::function<bool()>&) {
      if (delivery->done()) return;  // withdrawn
      Fingerprint called;
      called.dtype = static_cast<std::uint8_t>(DType::uint8);
      called.elements = 1;
      group->mailbox().post(rank, {true, tag}, {&token, 1}, called,
                            [delivery](Status status) { delivery->complete(std::move(status)); });
    };
    lanes_[rank]->run(std::move(post), true);  // after the puts to that rank
    return delivery;
  };
  auto text = formatted("a signal to {} of group \"{}\"", here.raw().named(rank), here.raw().settings().label);
  auto started = here.raw().transfer(here.options(opts.timeout), std::move(text), begin);
  auto work = here.work_of(std::move(started), c10d::OpType::SEND, "tensorferry:signal", {}, opts.timeout);
  if (!async_op) work->wait(kNoTimeout);
  return work;
}

c10::intrusive_ptr<c10d::Work> TorchWindow::wait_signal(int64_t from, bool async_op,
                                                        const c10d::WaitSignalOptions& opts) {
  const Returning to_the_caller;
  const auto here = place();
  const auto rank = check_rank_of(from);
  auto options = here.options(opts.timeout);
  const auto received = std::make_shared<std::byte>();
  options.keep = received;
  const auto started = here.raw().receive({received.get(), 1}, DType::uint8, rank, tag_, std::move(options));
  auto work = here.work_of(started, c10d::OpType::RECV, "tensorferry:wait_signal", {}, opts.timeout);
  if (async_op) return work;
  try {
    work->wait(kNoTimeout);
  } catch (...) {
    started->withdraw({Code::cancelled, "the program interrupted wait_signal()"});  // else it would take a later signal
    throw;
  }
  return work;
}

c10d::WindowAttr TorchWindow::get_attr(int64_t rank) {
  check_rank_of(rank);
  return {c10d::WindowAccessType::UNIFIED};
}

}  // namespace tensorferry::collectives

#endif

#include "rpc/collectives/torch/data_parallel.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/text.h"
#include "rpc/collectives/torch/unused_thread.h"
#include "rpc/torch_futures.h"

namespace tensorferry::collectives {
namespace {

using Tensors = TensorGroup::Tensors;

constexpr std::size_t in_flight_at_once = 2;

[[noreturn]] void refuse(std::string why) { throw GroupError(Status(Code::invalid_argument, std::move(why))); }

/// Throws `error` again with `where` before its text.
[[noreturn]] void throw_named(const std::string& where, const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const GroupError& known) {
    throw GroupError(Status(known.status().code(), formatted("{}: {}", where, known.status().what())));
  } catch (const c10::Error& known) {
    throw std::runtime_error(formatted("{}: {}", where, known.what_without_backtrace()));
  } catch (const std::exception& known) {
    throw std::runtime_error(formatted("{}: {}", where, known.what()));
  }
}

/// Returns the one tensor of a hook's result, which has as many elements as the bucket.
at::Tensor one_tensor(const c10::IValue& result, std::int64_t elements) {
  at::Tensor out;
  if (result.isTensor()) {
    out = result.toTensor();
  } else if (result.isTensorList() && result.toTensorList().size() == 1) {
    out = result.toTensorList().get(0);
  } else {
    throw std::runtime_error(formatted("its result is a {}; return a future of one tensor",
                                       result.isTensorList()
                                           ? formatted("list of {} tensors", result.toTensorList().size())
                                           : std::string(result.tagKind())));
  }
  if (out.defined() && out.numel() == elements) return out;
  throw std::runtime_error(formatted("its result has {} elements, and the bucket has {}; return as many",
                                     out.defined() ? out.numel() : 0, elements));
}

/// Returns the group for an operation on `tensor`, or throws.
TensorGroup group_on(const DeviceGroup& group, const at::Tensor& tensor) {
  auto on = group.on("all_reduce", {at::TensorList(tensor)}, {});
  if (!on.ok()) throw GroupError(on.status());
  return *std::move(on);
}

/// Returns a future of `tensor` that completes when the operation has ended; for tensors of a device, when it will have
/// in the order of the operation's stream, which the future's users wait for.
GradFuture future_of(const TensorGroup& on, const TensorGroup::Started& started, const at::Tensor& tensor) {
  if (!started.ok()) throw GroupError(started.status());
  const auto order = on.access().order();
  const auto devices = order ? std::vector<c10::Device>{order->device()} : std::vector<c10::Device>();
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get(), devices);
  const auto& state = state_of_unused_thread();
  (*started)->on_done([future, tensor, order, &state](const Status& status) {
    const at::ThreadLocalStateGuard unused(state);
    settle(*future, [&] {
      if (!status.ok()) throw GroupError(status);
      if (order) return order->on_stream([&] { future->markCompleted(tensor); });
      future->markCompleted(tensor);
    });
  });
  return future;
}

/// Averages a sparse bucket in place. DistributedDataParallel makes one for each parameter that has sparse gradients.
GradFuture average_sparse(const DeviceGroup& group, const at::Tensor& buffer) {
  const auto on = group.staged_on("all_reduce_sparse", {at::TensorList(buffer)});
  if (!on.ok()) throw GroupError(on.status());
  StartOptions options;
  options.finish = [buffer, order = on->access().order(), ranks = static_cast<double>(group.raw().size())] {
    const auto divide = [&] {
      const at::NoGradGuard no_grad;
      buffer.div_(ranks);
    };
    if (!order) return divide();
    order->on_stream(divide);
  };
  return future_of(*on, on->all_reduce_sparse(buffer, std::move(options)), buffer);
}

/// Ok; or why no group takes the tensor, which may be on any device.
Status check_on_its_device(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().is_cpu()) return TorchAccess().check(tensor);
  return tensor.layout() == at::kStrided ? Status() : Status(Code::invalid_argument, "a group takes dense tensors");
}

/// Returns the part of a flat tensor that begins at `at`, in the shape of `like`.
at::Tensor part_of(const at::Tensor& flat, std::int64_t at, const at::Tensor& like) {
  return flat.narrow(0, at, like.numel()).view(like.sizes());
}

Tensors at_indices(const Tensors& tensors, const std::vector<std::size_t>& indices) {
  Tensors out;
  for (const auto index : indices) out.push_back(tensors[index]);
  return out;
}

at::Tensor flat_for(const Tensors& tensors) {
  std::int64_t elements = 0;
  for (const auto& tensor : tensors) elements += tensor.numel();
  return at::empty({elements}, tensors[0].options().requires_grad(false).memory_format(c10::MemoryFormat::Contiguous));
}

/// Waits until the future has completed; false: interrupted.
bool wait_for(c10::ivalue::Future& future, const Interrupted& interrupted) {
  struct Ended {
    std::mutex mutex;
    std::condition_variable changed;
    bool ended = false;
  };
  const auto ended = std::make_shared<Ended>();
  future.addCallback([ended](c10::ivalue::Future&) {
    const std::lock_guard lock(ended->mutex);
    ended->ended = true;
    ended->changed.notify_all();
  });
  std::unique_lock lock(ended->mutex);
  while (!ended->changed.wait_for(lock, std::chrono::milliseconds(100), [&] { return ended->ended; })) {
    lock.unlock();
    if (interrupted && interrupted()) return false;
    lock.lock();
  }
  return true;
}

/// The tensors of a bucket on their way.
struct BroadcastInFlight {
  Tensors tensors;
  at::Tensor flat;
  std::optional<TensorWork> work;
};

struct GradientsInFlight {
  GradBucket bucket;
  GradFuture future;
};

/// Fills a bucket with the gradients of `parameters`.
GradBucket filled_bucket(std::size_t index, std::size_t count, const Tensors& parameters) {
  const auto flat = flat_for(parameters);
  std::vector<std::size_t> offsets, lengths;
  std::vector<c10::IntArrayRef> shapes;  // of the parameters, which the bucket keeps
  std::int64_t at = 0;
  for (const auto& parameter : parameters) {
    auto part = part_of(flat, at, parameter);
    const auto& gradient = parameter.grad();
    if (gradient.defined()) {
      if (gradient.layout() != at::kStrided) {
        refuse(formatted("a gradient in bucket {} is sparse: use a layer with dense gradients", index));
      }
      part.copy_(gradient);
    } else {
      part.zero_();
    }
    offsets.push_back(static_cast<std::size_t>(at));
    lengths.push_back(static_cast<std::size_t>(parameter.numel()));
    shapes.push_back(parameter.sizes());
    at += parameter.numel();
  }
  return GradBucket(index, count, flat, std::move(offsets), std::move(lengths), std::move(shapes), parameters,
                    std::nullopt);
}

void copy_to_gradients(const at::Tensor& result, const GradBucket& bucket) {
  if (!result.defined() || result.numel() != bucket.getBuffer().numel()) {
    refuse(formatted("the hook's result for bucket {} has {} elements, and the bucket has {}; return as many",
                     bucket.getIndex(), result.defined() ? result.numel() : 0, bucket.getBuffer().numel()));
  }
  const auto flat = result.reshape({-1});
  std::int64_t at = 0;
  for (const auto& parameter : bucket.getParameters()) {
    const auto part = part_of(flat, at, parameter);
    auto& gradient = parameter.mutable_grad();
    if (gradient.defined()) {
      gradient.copy_(part);
    } else {
      gradient = part.to(parameter.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    }
    at += parameter.numel();
  }
}

/// Gives the bucket its memory, with the tensors in it if this rank `gives` them.
void pack(BroadcastInFlight& bucket, bool gives) {
  if (bucket.tensors.size() == 1) {
    bucket.flat = bucket.tensors[0];
    return;
  }
  bucket.flat = flat_for(bucket.tensors);
  std::int64_t at = 0;
  for (const auto& tensor : bucket.tensors) {
    if (gives) part_of(bucket.flat, at, tensor).copy_(tensor);
    at += tensor.numel();
  }
}

/// Copies what has come to the tensors.
void unpack(const BroadcastInFlight& bucket) {
  if (bucket.tensors.size() == 1) return;
  std::int64_t at = 0;
  for (const auto& tensor : bucket.tensors) {
    tensor.copy_(part_of(bucket.flat, at, tensor));
    at += tensor.numel();
  }
}

}  // namespace

GroupError::GroupError(Status status)
    : c10::DistBackendError({"group", __FILE__, static_cast<std::uint32_t>(__LINE__)}, status.text()),
      status_(std::move(status)) {}

Status broadcast_coalesced(const DeviceGroup& group, const Tensors& tensors, std::size_t root, std::size_t bucket_bytes,
                           Milliseconds timeout, const Interrupted& interrupted) {
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (const auto status = check_on_its_device(tensors[i]); !status.ok()) {
      return {status.code(), formatted("tensor {} of {}: {}", i, tensors.size(), status.what())};
    }
  }
  const at::NoGradGuard no_grad;
  const bool gives = group.raw().rank() == root;
  std::deque<BroadcastInFlight> in_flight;
  Status first;
  bool stopped = false;
  const auto land = [&] {
    const auto bucket = std::move(in_flight.front());
    in_flight.pop_front();
    if (!bucket.work->wait(std::nullopt, interrupted)) {
      stopped = true;
      first = Status(Code::cancelled, "the broadcast was interrupted");
      return;
    }
    if (const auto status = bucket.work->status(); !status.ok()) {
      if (first.ok()) first = status;
      return;
    }
    bucket.work->block_current_stream();
    if (!gives) unpack(bucket);
  };
  for (const auto& indices : buckets_of(tensors, bucket_bytes)) {
    if (in_flight.size() == in_flight_at_once) land();
    if (!first.ok()) break;
    BroadcastInFlight bucket{at_indices(tensors, indices), {}, std::nullopt};
    pack(bucket, gives);
    StartOptions options;
    options.timeout = timeout;
    const auto on = group.on("broadcast", {at::TensorList(bucket.flat)}, options);
    if (!on.ok()) {
      first = on.status();
      break;
    }
    const auto started = on->broadcast(bucket.flat, root, std::move(options));
    if (!started.ok()) {
      first = started.status();
      break;
    }
    bucket.work.emplace(*started, on->access());
    in_flight.push_back(std::move(bucket));
  }
  while (!in_flight.empty() && !stopped) land();
  return first;
}

std::unique_ptr<GroupHook> all_reduce_hook(std::shared_ptr<DeviceGroup> group) {
  return std::make_unique<GroupHook>("all_reduce", std::move(group),
                                     [](const std::shared_ptr<DeviceGroup>& over, GradBucket& bucket) {
                                       const auto& buffer = bucket.getBufferRef();
                                       if (buffer.is_sparse()) return average_sparse(*over, buffer);
                                       const auto on = group_on(*over, buffer);
                                       return future_of(on, on.all_reduce(buffer, buffer, Reduction::average), buffer);
                                     });
}

std::unique_ptr<GroupHook> compress_hook(std::shared_ptr<DeviceGroup> group, at::ScalarType dtype) {
  const auto* const name = dtype == at::kHalf ? "half" : "bfloat16";
  return std::make_unique<GroupHook>(
      name, std::move(group), [dtype](const std::shared_ptr<DeviceGroup>& over, GradBucket& bucket) {
        const at::NoGradGuard no_grad;
        const auto buffer = bucket.getBufferRef();
        if (buffer.is_sparse()) return average_sparse(*over, buffer);  // in its own dtype
        const auto small = buffer.to(dtype);
        const auto on = group_on(*over, small);
        const auto order = on.access().order();
        StartOptions options;
        options.finish = [buffer, small, order] {
          const auto widen = [&] {
            const at::NoGradGuard guard;
            if (!buffer.is_same(small)) buffer.copy_(small);
          };
          if (!order) return widen();
          order->on_stream(widen);
          buffer.record_stream(order->stream());
        };
        return future_of(on, on.all_reduce(small, small, Reduction::average, std::move(options)), buffer);
      });
}

}  // namespace tensorferry::collectives

namespace tensorferry {

using collectives::at_indices;
using collectives::check_on_its_device;
using collectives::copy_to_gradients;
using collectives::filled_bucket;
using collectives::GradientsInFlight;
using collectives::GroupError;
using collectives::in_flight_at_once;
using collectives::Interrupted;
using collectives::one_tensor;
using collectives::part_of;
using collectives::refuse;
using collectives::Tensors;
using collectives::throw_named;
using collectives::wait_for;

std::vector<std::vector<std::size_t>> buckets_of(const Tensors& tensors, std::size_t bucket_bytes) {
  struct Open {
    std::size_t bucket = 0;
    std::size_t bytes = 0;
  };
  std::map<std::pair<at::ScalarType, std::string>, Open> open;  // by dtype and device
  std::vector<std::vector<std::size_t>> out;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto bytes = tensors[i].nbytes();
    auto [found, is_new] = open.try_emplace({tensors[i].scalar_type(), tensors[i].device().str()});
    auto& last = found->second;
    if (is_new || last.bytes + bytes > bucket_bytes) {
      last = {out.size(), 0};
      out.emplace_back();
    }
    out[last.bucket].push_back(i);
    last.bytes += bytes;
  }
  return out;
}

GradFuture run_hook(const std::string& name, const GradBucket& bucket, const std::function<GradFuture()>& run) {
  const auto where = formatted("the hook \"{}\" failed at bucket {}", name, bucket.getIndex());
  GradFuture future;
  try {
    future = run();
    if (!future) throw std::runtime_error("it returned no future");
  } catch (const std::exception&) {
    throw_named(where, std::current_exception());
  }
  return future->then(
      [where, elements = bucket.getBuffer().numel()](c10::ivalue::Future& done) -> c10::IValue {
        try {
          if (done.hasError()) std::rethrow_exception(done.exception_ptr());
          return one_tensor(done.value(), elements);
        } catch (const std::exception&) {
          throw_named(where, std::current_exception());
        }
      },
      c10::TensorType::get());
}

void reduce_gradients(const Tensors& parameters, c10d::CommHookInterface& hook, std::size_t bucket_bytes,
                      const Interrupted& interrupted) {
  const at::NoGradGuard no_grad;
  Tensors trained;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (const auto status = check_on_its_device(parameters[i]); !status.ok()) {
      refuse(formatted("parameter {} of {}: {}", i, parameters.size(), status.what()));
    }
    if (parameters[i].requires_grad()) trained.push_back(parameters[i]);
  }
  const auto buckets = buckets_of(trained, bucket_bytes);
  std::deque<GradientsInFlight> in_flight;
  std::exception_ptr first;
  const auto attempt = [&](const auto& step) {
    try {
      step();
    } catch (const std::exception&) {
      if (!first) first = std::current_exception();
    }
  };
  const auto land = [&] {
    auto& oldest = in_flight.front();
    if (!wait_for(*oldest.future, interrupted)) {
      throw GroupError(Status(Code::cancelled, "the reduction of gradients was interrupted"));
    }
    attempt([&] {
      if (oldest.future->hasError()) std::rethrow_exception(oldest.future->exception_ptr());
      oldest.future->wait();  // it is complete: the current stream waits for the device
      if (!first) copy_to_gradients(hook.parseHookResult(oldest.future->value()), oldest.bucket);
    });
    in_flight.pop_front();
  };
  for (std::size_t i = 0; i < buckets.size() && !first; ++i) {
    if (in_flight.size() == in_flight_at_once) land();
    if (first) break;
    attempt([&] {
      GradientsInFlight next{filled_bucket(i, buckets.size(), at_indices(trained, buckets[i])), nullptr};
      next.future = hook.runHook(next.bucket);
      if (!next.future) throw std::runtime_error(formatted("the hook returned no future for bucket {}", i));
      in_flight.push_back(std::move(next));
    });
  }
  while (!in_flight.empty()) land();
  if (first) std::rethrow_exception(first);
}

}  // namespace tensorferry

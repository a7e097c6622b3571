/// Lets the first request of a backward pass of distributed autograd begin before others of that pass.
#pragma once

#include <torch/csrc/distributed/rpc/message.h>

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace tensorferry::torch_rpc {

/// The backward passes whose requests (BACKWARD_AUTOGRAD_REQ) are being served here, by the id of their context.
///
/// torch's engine prepares a pass in the handler of its first request. One of the last steps of that is to forget the
/// calls that it has to wait for. A request that is handled at the same time may have made such a call already: then
/// the pass ends before the gradients are at the next worker, and an optimizer that reads them there misses some. So
/// while the first request of a pass is in its handler, the others wait. They are not handled one by one after that.
///
/// The first request's answer comes when the whole pass has ended here, so a pass stays known that long.
///
/// Thread-safe.
class BackwardPasses final {
 public:
  /// One request of a pass, from before its handler until its answer is known.
  class Request final {
   public:
    Request(BackwardPasses& passes, std::int64_t context, bool first)
        : passes_(passes), context_(context), first_(first) {}
    ~Request() { passes_.end(context_); }
    Request(const Request&) = delete;
    Request& operator=(const Request&) = delete;
    /// The handler has returned.
    void handled() {
      if (first_) passes_.prepared(context_);
    }

   private:
    BackwardPasses& passes_;
    const std::int64_t context_;
    const bool first_;
  };

  /// Adds a request, and blocks while the first one of the same pass is in its handler. Null: `message` belongs to no
  /// backward pass. Throws what torch throws if it cannot read the message. `this` outlives the result.
  std::shared_ptr<Request> enter(const torch::distributed::rpc::Message& message);

 private:
  struct Pass {
    int requests = 0;
    bool prepared = false;
  };
  void prepared(std::int64_t context);
  void end(std::int64_t context);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::unordered_map<std::int64_t, Pass> passes_;
};

}  // namespace tensorferry::torch_rpc

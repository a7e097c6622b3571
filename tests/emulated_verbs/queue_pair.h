/// An emulated RC queue pair: its states, its queues, the thread that executes its requests, and its answers to the
/// peer's.
#pragma once

#include <infiniband/verbs.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "tests/emulated_verbs/completion_queue.h"
#include "tests/emulated_verbs/host.h"
#include "tests/emulated_verbs/wire.h"

namespace tensorferry::emulated_verbs {

/// Requests execute one after the other, so that completions come in order. Every access to memory happens under the
/// queue pair's lock: when a change to RESET or ERR has returned, nothing moves by this queue pair any more.
class QueuePair final : public ibv_qp {
 public:
  QueuePair(ibv_pd* domain, const ibv_qp_init_attr& attributes);
  QueuePair(const QueuePair&) = delete;
  QueuePair& operator=(const QueuePair&) = delete;

  /// These return 0 or an errno value, as a kernel's drivers do.
  static int check(const ibv_qp_init_attr& attributes);
  int modify(const ibv_qp_attr& attributes, int mask);
  void query(ibv_qp_attr& attributes, ibv_qp_init_attr& initial);
  int post_send(ibv_send_wr* work, ibv_send_wr** bad);
  int post_recv(ibv_recv_wr* work, ibv_recv_wr** bad);

  /// Fails the queue pair with an event. False: it had failed before.
  bool fail(ibv_event_type event);
  /// Ends it. Its entries leave the completion queues.
  void close();

  /// Answers a request of the peer that came on `fd`, or drops it. False: the connection is of no use any more.
  bool respond(int fd, const Request& request);

 private:
  struct SendWork {
    std::uint64_t id = 0, index = 0;
    ibv_wr_opcode opcode = IBV_WR_SEND;
    bool signaled = false, is_inline = false;
    std::uint64_t address = 0;
    std::uint32_t key = 0, immediate = 0;
    std::vector<ibv_sge> pieces;
    std::vector<std::byte> inline_bytes;
    std::uint64_t bytes = 0;
  };
  struct ReceiveWork {
    std::uint64_t id = 0, index = 0;
    std::vector<ibv_sge> pieces;
    std::uint64_t bytes = 0;
  };
  using Lock = std::unique_lock<std::mutex>;
  using Time = std::chrono::microseconds;

  // The requester.
  int check_send(const ibv_send_wr& work) const;
  SendWork copy_of(const ibv_send_wr& work) const;
  void run();
  ibv_wc_status execute(const SendWork& work, std::uint64_t epoch);
  ibv_wc_status check_local(const SendWork& work);
  Answer attempt(const SendWork& work, std::uint64_t epoch, std::uint32_t& timer, ibv_wc_status& local);
  Answer fetch(int fd, const SendWork& work, std::uint64_t epoch, ibv_wc_status& local);
  bool give(int fd, const SendWork& work, std::uint64_t epoch, ibv_wc_status& local);
  int connected(std::uint64_t epoch);
  void disconnect();
  bool pause(Time time, std::uint64_t epoch);
  [[nodiscard]] bool requests(std::uint64_t epoch) const { return epoch == epoch_ && state == IBV_QPS_RTS; }
  [[nodiscard]] bool sends(std::uint64_t epoch) const { return requests(epoch) && port_is_up(); }

  // The responder.
  Reply begin(const Request& request);
  Answer check_remote(const Request& request, const Memory::Span& span);
  bool serve_read(int fd, const Request& request, std::uint64_t epoch);
  bool take_bytes(int fd, const Request& request, std::uint64_t epoch);
  Answer place(const Request& request, std::uint64_t offset, const std::byte* from, std::size_t bytes);
  Answer finish(const Request& request);
  [[nodiscard]] bool answers(std::uint64_t epoch) const {
    return epoch == epoch_ && (state == IBV_QPS_RTR || state == IBV_QPS_RTS) && port_is_up();
  }
  void wait_while_stalled(std::uint64_t epoch);

  // Both; under the lock.
  bool gather(const std::vector<ibv_sge>& pieces, std::uint64_t offset, std::byte* to, std::size_t bytes);
  bool scatter(const std::vector<ibv_sge>& pieces, std::uint64_t offset, const std::byte* from, std::size_t bytes);
  void complete(const SendWork& work, ibv_wc_status status);
  void complete(const ReceiveWork& work, ibv_wc_status status, const Request* request);
  void push(CompletionQueue& queue, Completion completion);
  void enter_error();
  void enter_reset();
  int check_states(const ibv_qp_attr& attributes, int mask) const;
  int check_values(const ibv_qp_attr& attributes, int mask) const;
  void take_values(const ibv_qp_attr& attributes, int mask);
  [[nodiscard]] bool port_is_up() const;
  [[nodiscard]] Context& home() const { return *static_cast<Context*>(context); }

  std::mutex lock_;
  std::condition_variable changed_;
  ibv_qp_attr attributes_{};
  ibv_qp_init_attr initial_;
  CompletionQueue& sent_;
  CompletionQueue& received_;
  std::deque<std::shared_ptr<SendWork>> sends_;
  std::deque<ReceiveWork> receives_;
  std::shared_ptr<WorkPlaces> send_places_ = std::make_shared<WorkPlaces>();
  std::shared_ptr<WorkPlaces> receive_places_ = std::make_shared<WorkPlaces>();
  std::uint64_t epoch_ = 0;  // counts the changes to RESET
  int connection_ = -1;
  std::uint64_t connected_in_ = 0;  // the epoch in which the connection was made
  bool closed_ = false;
  std::thread thread_;
};

}  // namespace tensorferry::emulated_verbs

// How an emulated queue pair executes the requests that were posted to it.
#include <unistd.h>

#include <algorithm>
#include <cmath>

#include "tests/emulated_verbs/limits.h"
#include "tests/emulated_verbs/queue_pair.h"

namespace tensorferry::emulated_verbs {
namespace {

/// The times of the codes of min_rnr_timer, in units of 10 us; the table of the InfiniBand specification.
constexpr std::uint32_t rnr_times[32] = {65536, 1,    2,    3,    4,    6,     8,     12,    16,    24,   32,
                                         48,    64,   96,   128,  192,  256,   384,   512,   768,   1024, 1536,
                                         2048,  3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152};

}  // namespace

void QueuePair::run() {
  Lock lock(lock_);
  for (;;) {
    changed_.wait(lock, [&] { return closed_ || (!sends_.empty() && (state == IBV_QPS_RTS || state == IBV_QPS_ERR)); });
    if (closed_) break;
    const auto work = sends_.front();
    const auto epoch = epoch_;
    auto status = IBV_WC_WR_FLUSH_ERR;
    if (state == IBV_QPS_RTS) {
      lock.unlock();
      status = execute(*work, epoch);
      lock.lock();
      if (closed_ || epoch != epoch_) continue;
    }
    if (status != IBV_WC_SUCCESS && state == IBV_QPS_ERR) status = IBV_WC_WR_FLUSH_ERR;
    sends_.pop_front();
    complete(*work, status);
    if (status != IBV_WC_SUCCESS) enter_error();
  }
  lock.unlock();
  disconnect();
}

ibv_wc_status QueuePair::check_local(const SendWork& work) {
  const Lock lock(lock_);
  if (work.bytes > limits::message_bytes) return IBV_WC_LOC_LEN_ERR;
  const unsigned rights = work.opcode == IBV_WR_RDMA_READ ? IBV_ACCESS_LOCAL_WRITE : 0;
  for (const auto& piece : work.pieces) {
    if (!Host::get().memory.allows({pd, piece.lkey, piece.addr, piece.length}, rights)) return IBV_WC_LOC_PROT_ERR;
  }
  if (work.opcode == IBV_WR_RDMA_READ && attributes_.max_rd_atomic == 0) return IBV_WC_LOC_QP_OP_ERR;
  return IBV_WC_SUCCESS;
}

ibv_wc_status QueuePair::execute(const SendWork& work, std::uint64_t epoch) {
  if (const auto status = check_local(work); status != IBV_WC_SUCCESS) return status;
  ibv_qp_attr attributes{};
  {
    const Lock lock(lock_);
    attributes = attributes_;
  }
  for (int drops = 0, waits = 0;;) {
    std::uint32_t timer = 0;
    auto local = IBV_WC_SUCCESS;
    const auto answer = attempt(work, epoch, timer, local);
    if (local != IBV_WC_SUCCESS) return local;
    switch (answer) {
      case Answer::access:
        return IBV_WC_REM_ACCESS_ERR;
      case Answer::invalid:
        return IBV_WC_REM_INV_REQ_ERR;
      case Answer::operation:
        return IBV_WC_REM_OP_ERR;
      case Answer::not_ready:
        if (attributes.rnr_retry != 7 && waits++ >= attributes.rnr_retry) return IBV_WC_RNR_RETRY_EXC_ERR;
        if (!pause(Time(10 * rnr_times[timer & 31]), epoch)) return IBV_WC_WR_FLUSH_ERR;
        break;
      case Answer::dropped: {
        // 4.096 us times a power of two; the code 0 stands for no end.
        const auto wait =
            attributes.timeout == 0 ? Time(100000) : Time(std::llround(std::ldexp(4.096, attributes.timeout)));
        if (!pause(wait, epoch)) return IBV_WC_WR_FLUSH_ERR;
        if (attributes.timeout != 0 && drops++ >= attributes.retry_cnt) return IBV_WC_RETRY_EXC_ERR;
        break;
      }
      default:
        return IBV_WC_SUCCESS;
    }
  }
}

/// Waits. Returns false if the queue pair has left the state in which it sends.
bool QueuePair::pause(Time time, std::uint64_t epoch) {
  Lock lock(lock_);
  return !changed_.wait_for(lock, time, [&] { return !requests(epoch); });
}

/// Returns the connection to the responder, or -1. Only the thread of the requests opens and closes it.
int QueuePair::connected(std::uint64_t epoch) {
  std::uint32_t destination = 0;
  {
    const Lock lock(lock_);
    if (!sends(epoch)) return -1;
    if (connection_ >= 0 && connected_in_ == epoch) return connection_;
    if (connection_ >= 0) ::close(connection_);
    connection_ = -1;
    destination = attributes_.dest_qp_num;
  }
  const int fd = Host::get().connect(destination);
  const Lock lock(lock_);
  if (fd >= 0 && !requests(epoch)) {
    ::close(fd);
    return -1;
  }
  connected_in_ = epoch;
  return connection_ = fd;
}

void QueuePair::disconnect() {
  const Lock lock(lock_);
  if (connection_ >= 0) ::close(connection_);
  connection_ = -1;
}

Answer QueuePair::attempt(const SendWork& work, std::uint64_t epoch, std::uint32_t& timer, ibv_wc_status& local) {
  const int fd = connected(epoch);
  if (fd < 0) return Answer::dropped;
  Request request{};
  {
    const Lock lock(lock_);
    request.opcode = work.opcode;
    request.source = qp_num;
    request.destination = attributes_.dest_qp_num;
    request.gid = attributes_.ah_attr.grh.dgid;
    request.roce_v2 = attributes_.ah_attr.grh.sgid_index % 2;
    request.first_psn = attributes_.sq_psn;
    request.reads = attributes_.max_rd_atomic;
    request.key = work.key;
    request.address = work.address;
    request.bytes = work.bytes;
    request.immediate = work.immediate;
  }
  Reply reply{Answer::dropped, 0};
  const auto lost = [&] {
    disconnect();
    return Answer::dropped;
  };
  if (!send_all(fd, &request, sizeof request) || !receive_all(fd, &reply, sizeof reply)) return lost();
  timer = reply.timer;
  if (reply.answer != Answer::go) return reply.answer;
  if (work.opcode == IBV_WR_RDMA_READ) {
    const auto answer = fetch(fd, work, epoch, local);
    return answer == Answer::dropped || local != IBV_WC_SUCCESS ? lost() : answer;
  }
  if (!give(fd, work, epoch, local) || !receive_all(fd, &reply, sizeof reply)) return lost();
  return reply.answer;
}

Answer QueuePair::fetch(int fd, const SendWork& work, std::uint64_t epoch, ibv_wc_status& local) {
  std::vector<std::byte> bytes(std::min<std::uint64_t>(chunk_bytes, work.bytes));
  for (std::uint64_t offset = 0; offset < work.bytes;) {
    if (offset > 0) wait_while_stalled(epoch);
    Chunk chunk{};
    if (!receive_all(fd, &chunk, sizeof chunk)) return Answer::dropped;
    if (chunk.answer != Answer::go) return chunk.answer;
    if (!receive_all(fd, bytes.data(), chunk.bytes)) return Answer::dropped;
    const Lock lock(lock_);
    if (!sends(epoch)) return Answer::dropped;
    if (!scatter(work.pieces, offset, bytes.data(), chunk.bytes)) {
      local = IBV_WC_LOC_PROT_ERR;
      return Answer::dropped;
    }
    offset += chunk.bytes;
  }
  return Answer::done;
}

bool QueuePair::give(int fd, const SendWork& work, std::uint64_t epoch, ibv_wc_status& local) {
  if (work.is_inline) return send_all(fd, work.inline_bytes.data(), work.inline_bytes.size());
  std::vector<std::byte> bytes(std::min<std::uint64_t>(chunk_bytes, work.bytes));
  for (std::uint64_t offset = 0; offset < work.bytes;) {
    if (offset > 0) wait_while_stalled(epoch);
    const auto part = std::min<std::uint64_t>(chunk_bytes, work.bytes - offset);
    {
      const Lock lock(lock_);
      if (!sends(epoch)) return false;
      if (!gather(work.pieces, offset, bytes.data(), part)) {
        local = IBV_WC_LOC_PROT_ERR;
        return false;
      }
    }
    if (!send_all(fd, bytes.data(), part)) return false;
    offset += part;
  }
  return true;
}

}  // namespace tensorferry::emulated_verbs

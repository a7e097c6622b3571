#include "tests/emulated_verbs/queue_pair.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "tests/emulated_verbs/limits.h"

namespace tensorferry::emulated_verbs {

QueuePair::QueuePair(ibv_pd* domain, const ibv_qp_init_attr& attributes)
    : ibv_qp(),
      initial_(attributes),
      sent_(*static_cast<CompletionQueue*>(attributes.send_cq)),
      received_(*static_cast<CompletionQueue*>(attributes.recv_cq)) {
  context = domain->context;
  qp_context = attributes.qp_context;
  pd = domain;
  send_cq = attributes.send_cq;
  recv_cq = attributes.recv_cq;
  state = IBV_QPS_RESET;
  qp_type = IBV_QPT_RC;
}

void QueuePair::close() {
  {
    const Lock lock(lock_);
    enter_reset();
    closed_ = true;
  }
  if (thread_.joinable()) thread_.join();
}

bool QueuePair::port_is_up() const {
  return home().card().port[static_cast<std::size_t>(std::max<int>(attributes_.port_num, 1)) - 1].up;
}

// ---- Posting

int QueuePair::check_send(const ibv_send_wr& work) const {
  if (state != IBV_QPS_RTS && state != IBV_QPS_ERR) return EINVAL;
  if (send_places_->posted - send_places_->freed >= initial_.cap.max_send_wr) return ENOMEM;
  if (work.num_sge < 0 || static_cast<unsigned>(work.num_sge) > initial_.cap.max_send_sge) return EINVAL;
  if ((work.send_flags & IBV_SEND_SOLICITED) != 0) return EOPNOTSUPP;
  const bool is_inline = (work.send_flags & IBV_SEND_INLINE) != 0;
  switch (work.opcode) {
    case IBV_WR_RDMA_READ:
      return is_inline ? EINVAL : 0;
    case IBV_WR_SEND:
    case IBV_WR_SEND_WITH_IMM:
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM:
      break;
    default:
      return EOPNOTSUPP;
  }
  std::uint64_t bytes = 0;
  for (int at = 0; at < work.num_sge; ++at) bytes += work.sg_list[at].length;
  return is_inline && bytes > initial_.cap.max_inline_data ? EINVAL : 0;
}

QueuePair::SendWork QueuePair::copy_of(const ibv_send_wr& work) const {
  SendWork copy;
  copy.id = work.wr_id;
  copy.opcode = work.opcode;
  copy.signaled = initial_.sq_sig_all != 0 || (work.send_flags & IBV_SEND_SIGNALED) != 0;
  copy.is_inline = (work.send_flags & IBV_SEND_INLINE) != 0;
  copy.address = work.wr.rdma.remote_addr;
  copy.key = work.wr.rdma.rkey;
  copy.immediate = work.imm_data;
  for (int at = 0; at < work.num_sge; ++at) {
    const auto& piece = work.sg_list[at];
    copy.bytes += piece.length;
    if (!copy.is_inline) {
      copy.pieces.push_back(piece);
    } else {
      const auto* const from = reinterpret_cast<const std::byte*>(piece.addr);
      copy.inline_bytes.insert(copy.inline_bytes.end(), from, from + piece.length);
    }
  }
  return copy;
}

int QueuePair::post_send(ibv_send_wr* work, ibv_send_wr** bad) {
  const Lock lock(lock_);
  for (; work != nullptr; work = work->next) {
    if (const int error = check_send(*work); error != 0) {
      *bad = work;
      return error;
    }
    auto copy = std::make_shared<SendWork>(copy_of(*work));
    copy->index = ++send_places_->posted;
    sends_.push_back(std::move(copy));
  }
  if (!thread_.joinable()) {
    thread_ = std::thread([this] { run(); });
  }
  changed_.notify_all();
  return 0;
}

int QueuePair::post_recv(ibv_recv_wr* work, ibv_recv_wr** bad) {
  const Lock lock(lock_);
  for (; work != nullptr; work = work->next) {
    const bool full = receive_places_->posted - receive_places_->freed >= initial_.cap.max_recv_wr;
    const bool wide = work->num_sge < 0 || static_cast<unsigned>(work->num_sge) > initial_.cap.max_recv_sge;
    if (state == IBV_QPS_RESET || full || wide) {
      *bad = work;
      return full ? ENOMEM : EINVAL;
    }
    ReceiveWork copy;
    copy.id = work->wr_id;
    copy.index = ++receive_places_->posted;
    for (int at = 0; at < work->num_sge; ++at) {
      copy.pieces.push_back(work->sg_list[at]);
      copy.bytes += work->sg_list[at].length;
    }
    if (state == IBV_QPS_ERR) {
      complete(copy, IBV_WC_WR_FLUSH_ERR, nullptr);
    } else {
      receives_.push_back(std::move(copy));
    }
  }
  return 0;
}

// ---- Completions; under the lock

void QueuePair::push(CompletionQueue& queue, Completion completion) {
  completion.pair = this;
  completion.entry.qp_num = qp_num;
  if (completion.entry.status != IBV_WC_SUCCESS) {
    // A card fills in nothing else of a failed entry. These values are such that no program takes them for its own.
    completion.entry.opcode = static_cast<ibv_wc_opcode>(0x7f);
    completion.entry.byte_len = 0xdeadbeef;
    completion.entry.vendor_err = 0x99;
  }
  if (!queue.push(std::move(completion)) && state != IBV_QPS_ERR) {
    enter_error();
    home().events.push({IBV_EVENT_QP_FATAL, static_cast<ibv_qp*>(this), 0});
  }
}

void QueuePair::complete(const SendWork& work, ibv_wc_status status) {
  if (status == IBV_WC_SUCCESS && !work.signaled) return;
  Completion completion;
  completion.places = send_places_;
  completion.index = work.index;
  completion.entry.wr_id = work.id;
  completion.entry.status = status;
  switch (work.opcode) {
    case IBV_WR_RDMA_READ:
      completion.entry.opcode = IBV_WC_RDMA_READ;
      completion.entry.byte_len = static_cast<std::uint32_t>(work.bytes);
      break;
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM:
      completion.entry.opcode = IBV_WC_RDMA_WRITE;
      break;
    default:
      completion.entry.opcode = IBV_WC_SEND;
  }
  push(sent_, std::move(completion));
}

void QueuePair::complete(const ReceiveWork& work, ibv_wc_status status, const Request* request) {
  Completion completion;
  completion.places = receive_places_;
  completion.index = work.index;
  completion.entry.wr_id = work.id;
  completion.entry.status = status;
  if (request != nullptr) {
    const bool write = request->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
    completion.entry.opcode = write ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV;
    completion.entry.byte_len = static_cast<std::uint32_t>(request->bytes);
    completion.entry.src_qp = request->source;
    if (request->opcode != IBV_WR_SEND) {
      completion.entry.wc_flags = IBV_WC_WITH_IMM;
      completion.entry.imm_data = request->immediate;
    }
  }
  push(received_, std::move(completion));
}

// ---- Memory of work requests; under the lock

namespace {

/// Calls `use` with each part of the pieces between `offset` and `offset + bytes`, in order, until it returns false.
template <class Use>
bool for_each_part(const std::vector<ibv_sge>& pieces, std::uint64_t offset, std::size_t bytes, Use use) {
  std::size_t done = 0;
  for (const auto& piece : pieces) {
    if (offset >= piece.length) {
      offset -= piece.length;
      continue;
    }
    const auto part = std::min<std::uint64_t>(piece.length - offset, bytes - done);
    if (part > 0 && !use(piece.lkey, piece.addr + offset, part, done)) return false;
    done += part;
    offset = 0;
    if (done == bytes) return true;
  }
  return done == bytes;
}

}  // namespace

bool QueuePair::gather(const std::vector<ibv_sge>& pieces, std::uint64_t offset, std::byte* to, std::size_t bytes) {
  auto& memory = Host::get().memory;
  return for_each_part(pieces, offset, bytes, [&](auto key, auto address, auto part, auto done) {
    return memory.read({pd, key, address, part}, 0, to + done);
  });
}

bool QueuePair::scatter(const std::vector<ibv_sge>& pieces, std::uint64_t offset, const std::byte* from,
                        std::size_t bytes) {
  auto& memory = Host::get().memory;
  return for_each_part(pieces, offset, bytes, [&](auto key, auto address, auto part, auto done) {
    return memory.write({pd, key, address, part}, IBV_ACCESS_LOCAL_WRITE, from + done);
  });
}

void QueuePair::wait_while_stalled(std::uint64_t epoch) {
  auto& host = Host::get();
  const auto goes_on = [&] {
    if (!host.stalled()) return true;
    const Lock lock(lock_);
    return closed_ || epoch != epoch_ || state == IBV_QPS_ERR;
  };
  if (goes_on()) return;
  ++host.held_up;
  while (!goes_on()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  --host.held_up;
}

}  // namespace tensorferry::emulated_verbs

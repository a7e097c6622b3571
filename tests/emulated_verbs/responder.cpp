// How an emulated queue pair answers the requests of its peer.
#include <algorithm>

#include "tests/emulated_verbs/queue_pair.h"

namespace tensorferry::emulated_verbs {
namespace {

bool takes_receive(const Request& request) { return request.opcode != IBV_WR_RDMA_WRITE; }
bool is_send(const Request& request) { return request.opcode == IBV_WR_SEND || request.opcode == IBV_WR_SEND_WITH_IMM; }

}  // namespace

bool QueuePair::respond(int fd, const Request& request) {
  Reply reply{};
  std::uint64_t epoch = 0;
  {
    const Lock lock(lock_);
    reply = begin(request);
    epoch = epoch_;
  }
  if (!send_all(fd, &reply, sizeof reply)) return false;
  if (reply.answer != Answer::go) return true;
  return request.opcode == IBV_WR_RDMA_READ ? serve_read(fd, request, epoch) : take_bytes(fd, request, epoch);
}

/// Under the lock: decides about a request by its header, as a card does by a message's first packet. A request that is
/// refused fails this queue pair too.
Reply QueuePair::begin(const Request& request) {
  const auto& path = attributes_.ah_attr;
  const bool expected = answers(epoch_) && attributes_.dest_qp_num == request.source &&
                        attributes_.rq_psn == request.first_psn && path.grh.sgid_index % 2 == request.roce_v2;
  // A queue pair that is destroyed, whose context may be closed by now, answers nothing.
  if (!expected) return {Answer::dropped, 0};
  const auto mine = home().card().gid(attributes_.port_num, path.grh.sgid_index);
  if (!std::equal(std::begin(mine.raw), std::end(mine.raw), std::begin(request.gid.raw))) return {Answer::dropped, 0};
  const auto answer = check_remote(request, {pd, request.key, request.address, request.bytes});
  if (answer == Answer::access || answer == Answer::invalid || answer == Answer::operation) {
    enter_error();
    home().events.push(
        {answer == Answer::access ? IBV_EVENT_QP_ACCESS_ERR : IBV_EVENT_QP_REQ_ERR, static_cast<ibv_qp*>(this), 0});
  }
  return {answer, attributes_.min_rnr_timer};
}

Answer QueuePair::check_remote(const Request& request, const Memory::Span& span) {
  auto& memory = Host::get().memory;
  if (request.opcode == IBV_WR_RDMA_READ) {
    if ((attributes_.qp_access_flags & IBV_ACCESS_REMOTE_READ) == 0) return Answer::invalid;
    // A responder that keeps fewer reads than the requester may have under way loses some.
    if (request.reads > attributes_.max_dest_rd_atomic) return Answer::invalid;
    return memory.allows(span, IBV_ACCESS_REMOTE_READ) ? Answer::go : Answer::access;
  }
  if (!is_send(request)) {
    if ((attributes_.qp_access_flags & IBV_ACCESS_REMOTE_WRITE) == 0) return Answer::invalid;
    if (!memory.allows(span, IBV_ACCESS_REMOTE_WRITE)) return Answer::access;
  }
  if (!takes_receive(request)) return Answer::go;
  if (receives_.empty()) return Answer::not_ready;
  if (!is_send(request)) return Answer::go;
  const auto refuse = [&](ibv_wc_status status, Answer answer) {
    complete(receives_.front(), status, nullptr);
    receives_.pop_front();
    return answer;
  };
  const auto& work = receives_.front();
  if (request.bytes > work.bytes) return refuse(IBV_WC_LOC_LEN_ERR, Answer::invalid);
  for (const auto& piece : work.pieces) {
    if (memory.allows({pd, piece.lkey, piece.addr, piece.length}, IBV_ACCESS_LOCAL_WRITE)) continue;
    return refuse(IBV_WC_LOC_PROT_ERR, Answer::operation);
  }
  return Answer::go;
}

bool QueuePair::serve_read(int fd, const Request& request, std::uint64_t epoch) {
  std::vector<std::byte> bytes(std::min<std::uint64_t>(chunk_bytes, request.bytes));
  for (std::uint64_t offset = 0; offset < request.bytes;) {
    if (offset > 0) wait_while_stalled(epoch);
    Chunk chunk{Answer::go, static_cast<std::uint32_t>(std::min<std::uint64_t>(bytes.size(), request.bytes - offset))};
    {
      const Lock lock(lock_);
      if (!answers(epoch)) return false;
      const Memory::Span span{pd, request.key, request.address + offset, chunk.bytes};
      if (!Host::get().memory.read(span, IBV_ACCESS_REMOTE_READ, bytes.data())) {
        chunk = {Answer::access, 0};
        enter_error();
        home().events.push({IBV_EVENT_QP_ACCESS_ERR, static_cast<ibv_qp*>(this), 0});
      }
    }
    if (!send_all(fd, &chunk, sizeof chunk) || !send_all(fd, bytes.data(), chunk.bytes)) return false;
    if (chunk.answer != Answer::go) return true;
    offset += chunk.bytes;
  }
  return true;
}

bool QueuePair::take_bytes(int fd, const Request& request, std::uint64_t epoch) {
  std::vector<std::byte> bytes(std::min<std::uint64_t>(chunk_bytes, request.bytes));
  Reply reply{Answer::go, 0};
  for (std::uint64_t offset = 0; offset < request.bytes;) {
    if (offset > 0) wait_while_stalled(epoch);
    const auto part = std::min<std::uint64_t>(bytes.size(), request.bytes - offset);
    if (!receive_all(fd, bytes.data(), part)) return false;
    const Lock lock(lock_);
    if (reply.answer == Answer::go && !answers(epoch)) reply.answer = Answer::dropped;
    if (reply.answer == Answer::go) reply.answer = place(request, offset, bytes.data(), part);
    offset += part;
  }
  {
    const Lock lock(lock_);
    if (reply.answer == Answer::go && !answers(epoch)) reply.answer = Answer::dropped;
    if (reply.answer == Answer::go) reply.answer = finish(request);
  }
  return send_all(fd, &reply, sizeof reply);
}

/// Under the lock: writes bytes of a request where they belong. An error fails this queue pair.
Answer QueuePair::place(const Request& request, std::uint64_t offset, const std::byte* from, std::size_t bytes) {
  if (is_send(request)) {
    if (scatter(receives_.front().pieces, offset, from, bytes)) return Answer::go;
    complete(receives_.front(), IBV_WC_LOC_PROT_ERR, nullptr);
    receives_.pop_front();
    enter_error();
    return Answer::operation;
  }
  const Memory::Span span{pd, request.key, request.address + offset, bytes};
  if (Host::get().memory.write(span, IBV_ACCESS_REMOTE_WRITE, from)) return Answer::go;
  enter_error();
  home().events.push({IBV_EVENT_QP_ACCESS_ERR, static_cast<ibv_qp*>(this), 0});
  return Answer::access;
}

Answer QueuePair::finish(const Request& request) {
  if (takes_receive(request)) {
    const auto work = std::move(receives_.front());
    receives_.pop_front();
    complete(work, IBV_WC_SUCCESS, &request);
  }
  return Answer::done;
}

}  // namespace tensorferry::emulated_verbs

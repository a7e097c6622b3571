#include "channels/cuda_basic/transfer.h"

#include <iterator>
#include <utility>

#include "channels/completion.h"

namespace tensorferry::cuda_basic {

void Transfer::finish(const Status& status) { complete(std::move(landed), std::move(done), status); }

void finish(const std::vector<DrivenPtr>& over) {
  for (const auto& driven : over) driven->finish();
}

Result<std::uint64_t> Queue::append(DrivenPtr driven) {
  if (closed()) return closed_;
  const auto first = unused_;
  unused_ += chunks_of(driven->bytes());
  waiting_.emplace(first, std::move(driven));
  return first;
}

Status Queue::insert(std::uint64_t first, DrivenPtr driven) {
  if (closed()) return closed_;
  if (waiting_.size() == most)
    return {Code::protocol_error, "too many buffers wait behind a buffer that has not arrived"};
  const auto chunks = driven->chunks_left();
  const auto behind = waiting_.lower_bound(first);
  const bool before =
      behind == waiting_.begin() || std::prev(behind)->first + std::prev(behind)->second->chunks_left() <= first;
  const bool after = first + chunks > first && (behind == waiting_.end() || first + chunks <= behind->first);
  if (first < next_ || !before || !after) return {Code::protocol_error, "two tickets name the same bytes"};
  waiting_.emplace(first, std::move(driven));
  return {};
}

Driven* Queue::due() const {
  return !waiting_.empty() && waiting_.begin()->first == next_ ? waiting_.begin()->second.get() : nullptr;
}

Queue::Chunk Queue::begin() {
  auto node = waiting_.extract(waiting_.begin());
  auto& driven = *node.mapped();
  auto* const data = driven.copies() ? driven.transfer.memory.data + driven.begun : nullptr;
  const auto bytes = std::min(chunk_bytes(driven.bytes()), driven.bytes() - driven.begun);
  Chunk chunk{next_++, node.mapped(), data, bytes, driven.status};
  driven.begun += chunk.bytes;
  ++driven.pending;
  if (driven.chunks_left() == 0) return chunk;
  node.key() = next_;
  waiting_.insert(std::move(node));
  return chunk;
}

std::vector<DrivenPtr> Queue::close(const Status& status) {
  std::vector<DrivenPtr> over;
  if (closed()) return over;
  closed_ = status;
  for (auto& [first, driven] : waiting_) {
    driven->fail(status);
    driven->begun = driven->bytes();
    if (driven->over()) over.push_back(std::move(driven));
  }
  waiting_.clear();
  return over;
}

}  // namespace tensorferry::cuda_basic

#include "agent/templates.h"

#include <algorithm>
#include <cstring>

namespace tensorferry {
namespace {

/// Returns the first index from `at` on at which `a` and `b` differ; their length if there is none.
std::size_t same_until(ByteView a, ByteView b, std::size_t at) {
  for (; a.size() - at >= sizeof(std::uint64_t); at += sizeof(std::uint64_t)) {
    std::uint64_t x = 0, y = 0;
    std::memcpy(&x, a.data() + at, sizeof x);
    std::memcpy(&y, b.data() + at, sizeof y);
    if (x != y) break;
  }
  while (at < a.size() && a[at] == b[at]) ++at;
  return at;
}

/// Returns the index from `at` on at which a run of `worth_skipping` equal bytes begins: more than the two varints of
/// another difference take. If there is none, the end of the last byte that differs.
std::size_t different_until(ByteView a, ByteView b, std::size_t at) {
  constexpr std::size_t worth_skipping = 3;
  std::size_t same = 0;
  for (; at < a.size(); ++at) {
    same = a[at] == b[at] ? same + 1 : 0;
    if (same == worth_skipping) return at + 1 - same;
  }
  return at - same;
}

}  // namespace

std::optional<Bytes> differences(ByteView from, ByteView to, std::size_t most) {
  Bytes out;
  Writer writer(out);
  for (std::size_t at = 0;;) {
    const auto begin = same_until(from, to, at);
    if (begin == to.size()) return out;
    const auto end = different_until(from, to, begin);
    writer.varint(begin - at);
    writer.sized(to.subspan(begin, end - begin));
    if (out.size() > most) return std::nullopt;
    at = end;
  }
}

std::optional<Bytes> apply_differences(ByteView from, ByteView differences) {
  Bytes out(from.begin(), from.end());
  Reader in(differences);
  std::size_t at = 0;
  while (!in.empty()) {
    const auto same = in.varint();
    const auto changed = in.sized();
    if (in.failed() || same > out.size() - at || changed.size() > out.size() - at - same) return std::nullopt;
    at += same;
    std::copy(changed.begin(), changed.end(), out.begin() + static_cast<std::ptrdiff_t>(at));
    at += changed.size();
  }
  if (in.failed()) return std::nullopt;
  return out;
}

/// Returns whether a template is similar to `payload` (its differences take a quarter of it at most). `way` is then set
/// to differences if the receiver has acknowledged that template, else it stays "whole".
bool SentTemplates::find(ByteView payload, Way& way) const {
  const auto [first, last] = by_length_.equal_range(payload.size());
  for (auto it = first; it != last; ++it) {
    const auto& kept = kept_[it->second];
    auto found = differences(kept.payload, payload, payload.size() / 4);
    if (!found) continue;
    if (kept.acknowledged) way = {{wire::Template::Use::differences, it->second, 0}, std::move(*found)};
    return true;
  }
  return false;
}

bool SentTemplates::worth_keeping(std::size_t bytes) {
  if (kept_.size() >= TemplateBounds::count || bytes_ + bytes > TemplateBounds::bytes) return false;
  if (by_length_.count(bytes) >= most_alike) return false;
  if (kept_.size() < TemplateBounds::count / 2 && bytes_ + bytes <= TemplateBounds::bytes / 2) return true;
  if (std::find(seen_.begin(), seen_.end(), bytes) != seen_.end()) return true;
  seen_[next_seen_++ % seen_.size()] = bytes;
  return false;
}

void SentTemplates::add(ByteView payload, std::uint64_t release) {
  by_length_.emplace(payload.size(), number_of_next());
  kept_.push_back({Bytes(payload.begin(), payload.end()), release, false});
  bytes_ += payload.size();
}

/// Finds the template of a release id by binary search: release ids increase with the templates' numbers.
std::deque<SentTemplates::Kept>::iterator SentTemplates::of(std::uint64_t release) {
  const auto it = std::lower_bound(kept_.begin(), kept_.end(), release,
                                   [](const Kept& kept, std::uint64_t id) { return kept.release < id; });
  return it != kept_.end() && it->release == release ? it : kept_.end();
}

void SentTemplates::acknowledged(std::uint64_t release) {
  const std::lock_guard lock(mutex_);
  if (const auto it = of(release); it != kept_.end()) it->acknowledged = true;
}

void SentTemplates::forget(std::uint64_t release) {
  const std::lock_guard lock(mutex_);
  const auto it = of(release);
  if (it == kept_.end()) return;
  const auto number = it - kept_.begin();
  const auto [first, last] = by_length_.equal_range(it->payload.size());
  for (auto each = first; each != last; ++each) {
    if (each->second != number) continue;
    by_length_.erase(each);
    break;
  }
  bytes_ -= it->payload.size();
  it->payload = {};
}

Status ReceivedTemplates::keep(std::uint16_t number, ByteView payload) {
  const std::lock_guard lock(mutex_);
  if (number >= TemplateBounds::count || bytes_ + payload.size() > TemplateBounds::bytes)
    return {Code::protocol_error, "a peer that wants more kept than a table of templates may hold"};
  if (!kept_.try_emplace(number, payload.begin(), payload.end()).second)
    return {Code::protocol_error, "a second template of one number"};
  bytes_ += payload.size();
  return {};
}

Result<Bytes> ReceivedTemplates::restore(std::uint16_t number, ByteView differences) const {
  const Bytes* kept = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (const auto it = kept_.find(number); it != kept_.end()) kept = &it->second;
  }
  if (kept == nullptr) return Status(Code::protocol_error, "a payload like one that has never been kept");
  auto payload = apply_differences(*kept, differences);
  if (!payload) return Status(Code::protocol_error, "a payload that does not fit its template");
  return std::move(*payload);
}

}  // namespace tensorferry

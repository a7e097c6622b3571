// The trace-event format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
#include "agent/observing/call_trace.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <queue>
#include <set>
#include <utility>

#include "base/log.h"
#include "base/text.h"

namespace tensorferry {
namespace {

using Records = std::vector<std::shared_ptr<const CallRecord>>;

/// Appends `text` as a JSON string. Bytes beyond ASCII are taken as Latin-1, so that any name makes valid JSON.
void put_string(std::string& out, std::string_view text) {
  out += '"';
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') out += '\\';
    if (byte < 0x20 || byte >= 0x7f)
      out += "\\u" + hex(byte, 4);
    else
      out += c;
  }
  out += '"';
}

/// Appends a time as microseconds with three decimals.
void put_time(std::string& out, std::int64_t nanoseconds) {
  const auto rest = std::to_string(nanoseconds % 1000);
  out += std::to_string(nanoseconds / 1000) + "." + std::string(3 - rest.size(), '0') + rest;
}

class Writing {
 public:
  explicit Writing(const PeerInfo& self) : pid_(self.incarnation & 0x7fffffff) {
    out_ = "{\"traceEvents\":[\n";
    name("process_name", 0, self.name + " (pid " + std::to_string(::getpid()) + ")");
  }

  void add(const CallRecord& call, int lane) {
    const auto lane_of = static_cast<std::uint64_t>(lane) + (call.served ? 1000000U : 1U);
    if (lane >= named_[call.served]) {
      named_[call.served] = lane + 1;
      name("thread_name", lane_of, formatted("{} {}", call.served ? "calls served" : "calls made", lane + 1));
    }
    const auto begin = call.stages[0].load(), end = call.stages[3].load();
    slice(shown_name(call.function), begin, end, lane_of, &call);
    constexpr std::array made{"send", "wait", "land"}, served{"arrive", "queue", "run"};
    auto from = begin;
    for (std::size_t i = 0; i < 3; ++i) {
      // A call that ended early has not reached every stage: its last slice takes the rest.
      auto until = i == 2 ? end : call.stages[i + 1].load();
      const bool last = until == 0;
      if (last) until = end;
      until = std::clamp(until, from, end);
      if (until > from) slice(call.served ? served[i] : made[i], from, until, lane_of, nullptr);
      from = until;
      if (last) break;
    }
    // An arrow ends at the slice that encloses its time, so both ends lie strictly inside.
    const auto inside = [&](std::int64_t at) { return std::clamp<std::int64_t>(at, begin, std::max(begin, end - 1)); };
    const auto sent = call.stages[CallRecord::sent].load();
    if (call.served) {
      arrow("f", call.flow, begin, lane_of);
      arrow("s", call.flow + 1, inside(end), lane_of);
      return;
    }
    if (sent != 0) arrow("s", call.flow, inside(sent), lane_of);
    if (call.stages[CallRecord::answered] != 0) arrow("f", call.flow + 1, inside(call.stages[2]), lane_of);
  }

  std::string finish(const PeerInfo& self, const std::string& boot_id, std::uint64_t dropped) {
    const auto behind = std::chrono::duration_cast<std::chrono::microseconds>(
        std::chrono::system_clock::now().time_since_epoch() - std::chrono::steady_clock::now().time_since_epoch());
    out_ += "\n],\"displayTimeUnit\":\"ns\",\"otherData\":{\"agent\":";
    put_string(out_, self.name);
    out_ += ",\"boot_id\":";
    put_string(out_, boot_id);
    out_ += formatted(",\"clock_to_realtime_us\":{},\"dropped_calls\":{}}}\n", behind.count(), dropped);
    return std::move(out_);
  }

 private:
  void open(std::string_view phase, std::string_view named, std::uint64_t lane) {
    if (std::exchange(any_, true)) out_ += ",\n";
    out_ += formatted("{\"ph\":\"{}\",\"pid\":{},\"tid\":{},\"name\":", phase, pid_, lane);
    put_string(out_, named);
  }
  void name(std::string_view kind, std::uint64_t lane, std::string_view text) {
    open("M", kind, lane);
    out_ += ",\"args\":{\"name\":";
    put_string(out_, text);
    out_ += "}}";
  }
  void slice(std::string_view named, std::int64_t from, std::int64_t until, std::uint64_t lane,
             const CallRecord* call) {
    open("X", named, lane);
    out_ += ",\"cat\":\"tensorferry\",\"ts\":";
    put_time(out_, from);
    out_ += ",\"dur\":";
    put_time(out_, until - from);
    if (call != nullptr) {
      out_ += ",\"args\":{\"function\":";
      put_string(out_, call->function);
      out_ += call->served ? ",\"caller\":" : ",\"callee\":";
      put_string(out_, call->peer);
      out_ += formatted(",\"bytes\":{},\"transport\":\"{}\"", call->bytes, std::string_view(call->transport));
      if (!call->channel_name.empty()) out_ += ",\"channel\":\"" + call->channel_name + "\"";
      if (!call->served) out_ += ",\"status\":\"" + std::string(call->code == Code::ok ? "ok" : "failed") + "\"";
      out_ += "}";
    }
    out_ += "}";
  }
  void arrow(std::string_view phase, std::uint64_t id, std::int64_t at, std::uint64_t lane) {
    open(phase, "call", lane);
    out_ += ",\"cat\":\"tensorferry\",\"bp\":\"e\",\"id\":\"0x" + hex(id) + "\",\"ts\":";
    put_time(out_, at);
    out_ += "}";
  }

  const std::uint64_t pid_;  // of the incarnation, so that the files of several hosts can be merged
  std::array<int, 2> named_{};
  std::string out_;
  bool any_ = false;
};

/// Spreads calls over lanes, the rows of the picture, so that the calls of a lane do not overlap.
class Lanes {
 public:
  int take(std::int64_t begin, std::int64_t end) {
    while (!busy_.empty() && busy_.top().first <= begin) {
      free_.insert(busy_.top().second);
      busy_.pop();
    }
    int lane = lanes_;
    if (free_.empty())
      ++lanes_;
    else
      lane = free_.extract(free_.begin()).value();
    busy_.emplace(end, lane);
    return lane;
  }

 private:
  using Busy = std::pair<std::int64_t, int>;
  std::priority_queue<Busy, std::vector<Busy>, std::greater<>> busy_;
  std::set<int> free_;
  int lanes_ = 0;
};

std::string chrome_trace(Records records, std::uint64_t dropped, const PeerInfo& self, const std::string& boot_id) {
  std::sort(records.begin(), records.end(),
            [](const auto& a, const auto& b) { return a->stages[0].load() < b->stages[0].load(); });
  Writing writing(self);
  std::array<Lanes, 2> lanes;
  for (const auto& record : records)
    writing.add(*record, lanes[record->served].take(record->stages[0], record->stages[3]));
  return writing.finish(self, boot_id, dropped);
}

}  // namespace

std::size_t CallTrace::start() {
  const std::lock_guard lock(mutex_);
  recordings_.fetch_add(1, std::memory_order_relaxed);
  return records_.size();
}

std::string CallTrace::stop(std::size_t recording, const PeerInfo& self, const std::string& boot_id) {
  Records records;
  std::uint64_t dropped = 0;
  {
    const std::lock_guard lock(mutex_);
    records.assign(records_.begin() + static_cast<std::ptrdiff_t>(std::min(recording, records_.size())),
                   records_.end());
    dropped = dropped_;
    if (recordings_.fetch_sub(1, std::memory_order_relaxed) == 1) {
      records_ = {};
      dropped_ = 0;
    }
  }
  return chrome_trace(std::move(records), dropped, self, boot_id);
}

void CallTrace::add(std::shared_ptr<const CallRecord> record) {
  const std::lock_guard lock(mutex_);
  if (!on()) return;
  if (records_.size() < most_records)
    records_.push_back(std::move(record));
  else
    ++dropped_;
}

std::uint64_t CallTrace::flow_of(std::uint64_t caller, std::uint64_t callee, std::uint64_t call) noexcept {
  constexpr std::uint64_t odd = 0x9e3779b97f4a7c15;
  std::uint64_t mixed = caller * odd ^ callee;
  mixed = (mixed ^ mixed >> 29) * odd ^ call;
  mixed = (mixed ^ mixed >> 32) * odd;
  return (mixed ^ mixed >> 29) & ~std::uint64_t{1};  // even: the reply's arrow has the next number
}

std::string trace_path(const std::string& path, const std::string& agent) {
  std::string own = "." + agent + "." + std::to_string(::getpid());
  std::replace(own.begin(), own.end(), '/', '_');
  const auto dot = path.rfind('.');
  const auto slash = path.rfind('/');
  const bool extension = dot != std::string::npos && (slash == std::string::npos || dot > slash + 1) && dot != 0;
  return extension ? path.substr(0, dot) + own + path.substr(dot) : path + own;
}

void write_trace(const std::string& path, const std::string& text) {
  std::FILE* file = std::fopen(path.c_str(), "we");
  const bool written = file != nullptr && std::fwrite(text.data(), 1, text.size(), file) == text.size();
  const int error = errno;
  const bool closed = file != nullptr && std::fclose(file) == 0;
  if (!written || !closed) log_warning(formatted("cannot write the trace to {}: {}", path, std::strerror(error)));
}

}  // namespace tensorferry

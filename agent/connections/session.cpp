#include "agent/connections/session.h"

#include <poll.h>

#include "base/text.h"

namespace tensorferry {

Status process_has_ended(std::int32_t pid, const std::string& host) {
  return {Code::connection_lost, pid != 0 ? formatted("its process has ended (pid {} on {})", pid, host)
                                          : formatted("its process has ended (on {})", host)};
}

int Session::watch(FileDescriptor process, std::int32_t pid) {
  const std::lock_guard lock(mutex_);
  if (process_) return -1;
  process_ = std::move(process);
  pid_ = pid;
  return process_.get();
}

int Session::process() const {
  const std::lock_guard lock(mutex_);
  return process_.get();
}

std::int32_t Session::pid() const {
  const std::lock_guard lock(mutex_);
  return pid_;
}

bool Session::process_ended(Milliseconds patience) const {
  pollfd ended{process(), POLLIN, 0};
  return ended.fd >= 0 && ::poll(&ended, 1, static_cast<int>(patience.count())) > 0;
}

Status Session::end_of_process(const std::string& host) const {
  const std::lock_guard lock(mutex_);
  return process_has_ended(pid_, host);
}

void Session::set_record(const Record& record) {
  const std::lock_guard lock(mutex_);
  record_ = record;
}

bool Session::use_connection(std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  if (number <= connection_) return false;
  connection_ = number;
  return true;
}

std::uint64_t Session::connection() const {
  const std::lock_guard lock(mutex_);
  return connection_;
}

std::optional<Record> Session::record() const {
  const std::lock_guard lock(mutex_);
  return record_;
}

}  // namespace tensorferry

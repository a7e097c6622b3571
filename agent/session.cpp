#include "agent/session.h"

#include <poll.h>

namespace tensorferry {

int Session::watch(FileDescriptor process) {
  const std::lock_guard lock(mutex_);
  if (process_) return -1;
  process_ = std::move(process);
  return process_.get();
}

int Session::process() const {
  const std::lock_guard lock(mutex_);
  return process_.get();
}

bool Session::process_ended() const {
  const std::lock_guard lock(mutex_);
  if (!process_) return false;
  pollfd ended{process_.get(), POLLIN, 0};
  return ::poll(&ended, 1, 0) > 0;
}

void Session::set_record(const Record& record) {
  const std::lock_guard lock(mutex_);
  record_ = record;
}

std::optional<Record> Session::record() const {
  const std::lock_guard lock(mutex_);
  return record_;
}

}  // namespace tensorferry

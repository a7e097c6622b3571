#include "agent/transport/secret_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/text.h"

namespace tensorferry {

Result<FileDescriptor> open_secret_file(const std::string& path, SecretReaders readers) {
  FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));  // never block on a fifo
  if (!file) return Status(errno == ENOENT ? Code::not_found : Code::permission_denied, std::strerror(errno));
  struct stat about {};
  if (::fstat(file.get(), &about) != 0) return Status(Code::internal, std::strerror(errno));
  if (!S_ISREG(about.st_mode)) return Status(Code::invalid_argument, "not a regular file");
  if (about.st_uid != ::geteuid() && about.st_uid != 0) {
    return Status(Code::permission_denied, formatted("belongs to uid {}, which could change it", about.st_uid));
  }
  const bool shared = readers == SecretReaders::group_of_root && about.st_uid == 0;
  if ((about.st_mode & (shared ? S_IRWXO | S_IWGRP : S_IRWXO | S_IRWXG)) != 0) {
    return Status(Code::permission_denied, formatted("others can read or write it: chmod 600 {}", path));
  }
  return file;
}

}  // namespace tensorferry

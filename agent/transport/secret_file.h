/// Files that hold a secret: the cluster key, the private key of a certificate.
#pragma once

#include <cstdint>
#include <string>

#include "base/file_descriptor.h"
#include "base/status.h"

namespace tensorferry {

/// Who besides its owner may read such a file.
enum class SecretReaders : std::uint8_t {
  none,
  /// Its group, if it belongs to root: so a system keeps private keys for several services.
  group_of_root,
};

/// Opens the file for reading. Checks the descriptor, not the name, so no other file takes its place after the check.
/// NotFound. PermissionDenied: it cannot be opened, belongs to a user other than this one and root, can be written by
/// others, or can be read by others than `readers`; the text has the command that mends it. InvalidArgument: not a
/// regular file.
Result<FileDescriptor> open_secret_file(const std::string& path, SecretReaders readers);

}  // namespace tensorferry

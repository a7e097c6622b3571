/// The table of the environment variables that TensorFerry's C++ code reads. No other file reads one by its name, and
/// docs/environment.md repeats the table: tests/python/test_docs.py compares both.
///
/// An option that a program sets explicitly goes before the variable. Values are read at each call, without a lock: a
/// program must not change its environment while another thread makes an agent.
#pragma once

#include <cstdlib>
#include <string_view>

namespace tensorferry::environment {

/// Returns the value of any variable, also one of others (`RANK`), or "" if it is unset. The text is valid until the
/// process changes the variable.
[[nodiscard]] inline std::string_view value_of(const char* name) noexcept {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string_view() : std::string_view(value);
}

/// One row of the table: a variable, the default in words, and what its value means.
struct Variable {
  const char* name;
  std::string_view unset;
  std::string_view meaning;

  /// Returns the variable's value. "" stands for the default.
  [[nodiscard]] std::string_view value() const noexcept { return value_of(name); }
};

inline constexpr Variable key_file{
    "TENSORFERRY_KEY_FILE", "no file",
    "The path of a file with the cluster key, which belongs to this user or to root and is not open to others."};

inline constexpr Variable key{"TENSORFERRY_KEY", "no key; on loopback the agents make one up",
                              "The cluster key itself, 16 to 65536 bytes without the white space at both ends."};

inline constexpr Variable channels{
    "TENSORFERRY_CHANNELS", "all channels that have a priority",
    "The channels that an agent has: `shm,basic` allows these alone, in this order, and `-cma` removes one."};

inline constexpr Variable socket_dir{"TENSORFERRY_SOCKET_DIR", "abstract sockets, which have no file",
                                     "The folder of an agent's unix socket, which must belong to this user with mode "
                                     "0700 and is made if it is missing."};

inline constexpr Variable socket_ifname{"TENSORFERRY_SOCKET_IFNAME", "the interface that leads to the store's host",
                                        "The network interface on whose address an agent listens."};

inline constexpr Variable collectives{
    "TENSORFERRY_COLLECTIVES", "the table of algorithms",
    "The algorithms of collective operations: `all_reduce=two_shot,broadcast=ring` prescribes these two."};

inline constexpr Variable log{"TENSORFERRY_LOG", "warnings",
                              "What the process writes to stderr: `off` for nothing, `info` for more than warnings, "
                              "any other value for warnings."};

inline constexpr Variable trace{
    "TENSORFERRY_TRACE", "no trace",
    "The path of a file. Each agent records its calls, and writes them when it leaves, as a Chrome trace beside that "
    "path: `out.json` becomes `out.NAME.PID.json`."};

/// Read by python/tensorferry/torch.py.
inline constexpr Variable torch_rpc{"TENSORFERRY_TORCH_RPC", "the backend that torch takes",
                                    "`1`: calls of `torch.distributed.rpc` go by TensorFerry if the program names no "
                                    "backend."};

}  // namespace tensorferry::environment

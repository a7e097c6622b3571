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

inline constexpr Variable key{"TENSORFERRY_KEY", "no key: the agents of one user on one host need none",
                              "The cluster key itself, 16 to 65536 bytes without the white space at both ends."};

inline constexpr Variable tls{"TENSORFERRY_TLS", "off",
                              "TLS on TCP connections: `key`, by the cluster key; "
                              "`certificate=FILE,private_key=FILE,ca=FILE`; or `off`."};

inline constexpr Variable kernel_tls{"TENSORFERRY_KERNEL_TLS", "used where the kernel has TLS",
                                     "`0`: the kernel's TLS is not used."};

inline constexpr Variable channels{
    "TENSORFERRY_CHANNELS", "all channels that have a priority",
    "The channels that an agent has: `shm,basic` allows these alone, in this order, `-cma` removes one, and `cma:90` "
    "gives one another priority."};

/// Read by python/tensorferry/plugins.py.
inline constexpr Variable plugins{"TENSORFERRY_PLUGINS", "all",
                                  "The plugins of installed packages that a Python process loads: `spool,barge`, or "
                                  "`off`."};

inline constexpr Variable socket_dir{"TENSORFERRY_SOCKET_DIR", "abstract sockets, which have no file",
                                     "The folder of an agent's unix socket, which must belong to this user with mode "
                                     "0700 and is made if it is missing."};

inline constexpr Variable socket_ifname{"TENSORFERRY_SOCKET_IFNAME", "the interface that leads to the store's host",
                                        "The network interfaces on whose addresses an agent listens, in the order in "
                                        "which peers try them."};

inline constexpr Variable collectives{
    "TENSORFERRY_COLLECTIVES", "the table of algorithms",
    "The algorithms of collective operations: `all_reduce=two_shot,broadcast=ring` prescribes these two."};

inline constexpr Variable tuning{
    "TENSORFERRY_TUNING", "`tensorferry/tuning.json` in the folder that `XDG_CONFIG_HOME` names, or in `~/.config`",
    "The path of the file in which `tensorferry tune` keeps the crossings of the algorithms that it has measured. Rank "
    "0 of each group reads it."};

inline constexpr Variable metrics_port{
    "TENSORFERRY_METRICS_PORT", "no server",
    "The port of this host alone on which the process serves its metrics to Prometheus: `9400`, or `9400-9463` for the "
    "first free one."};

inline constexpr Variable metrics_file{
    "TENSORFERRY_METRICS_FILE", "no file",
    "The path of a file. Every 10 s, each process writes its metrics, for the textfile collector of Prometheus' node "
    "exporter, beside that path: `tf.prom` becomes `tf.PID.prom`."};

inline constexpr Variable dump{
    "TENSORFERRY_DUMP", "no handler of the signal",
    "The path of a file. At SIGUSR2, each agent writes its flight recorder beside that path: `out.json` becomes "
    "`out.NAME.PID.json`."};

inline constexpr Variable log{"TENSORFERRY_LOG", "warnings",
                              "What the process writes to stderr: `off` for nothing, `info` for more than warnings, "
                              "any other value for warnings."};

inline constexpr Variable trace{
    "TENSORFERRY_TRACE", "no trace",
    "The path of a file. Each agent records its calls, and writes them when it leaves, as a Chrome trace beside that "
    "path: `out.json` becomes `out.NAME.PID.json`."};

inline constexpr Variable libibverbs{"TENSORFERRY_LIBIBVERBS", "`libibverbs.so.1`, found by the loader",
                                     "The path of the libibverbs that the channels over RDMA cards load."};

inline constexpr Variable rdma_devices{"TENSORFERRY_RDMA_DEVICES", "all ports",
                                       "The RDMA cards and ports that may be used, in the order of preference: "
                                       "`mlx5_0:1,mlx5_1` names port 1 of one card and all ports of another."};

inline constexpr Variable rdma_gid_index{"TENSORFERRY_RDMA_GID_INDEX",
                                         "RoCE v2 before v1, and a routable address before a link-local one",
                                         "The index in each port's table of GIDs."};

inline constexpr Variable rdma_service_level{
    "TENSORFERRY_RDMA_SERVICE_LEVEL", "0", "The InfiniBand service level of RDMA, 0 to 15; on Ethernet the priority."};

inline constexpr Variable rdma_traffic_class{
    "TENSORFERRY_RDMA_TRAFFIC_CLASS", "0",
    "The traffic class of RDMA packets, 0 to 255: on RoCE v2 the byte of the IP header that holds DSCP."};

inline constexpr Variable rdma_timeout{"TENSORFERRY_RDMA_TIMEOUT", "16, which is 0.27 s",
                                       "The time until an RDMA packet without an answer is sent again: the value n, 1 "
                                       "to 31, stands for 4.096 us times 2^n. After six times the connection fails."};

inline constexpr Variable rdma_stripe{
    "TENSORFERRY_RDMA_STRIPE", "1M",
    "The size above which a buffer is split over several RDMA ports, for example `4M`."};

inline constexpr Variable rdma_queue_depth{"TENSORFERRY_RDMA_QUEUE_DEPTH", "256",
                                           "The number of work requests that one RDMA queue pair holds, 1 to 32768."};

inline constexpr Variable rdma_pinned{
    "TENSORFERRY_RDMA_PINNED", "no limit but that of `ulimit -l`",
    "The size of the memory that this process may have registered with RDMA cards at once, for example `8G`."};

/// Read by python/tensorferry/torch.py.
inline constexpr Variable torch_rpc{"TENSORFERRY_TORCH_RPC", "the backend that torch takes",
                                    "`1`: calls of `torch.distributed.rpc` go by TensorFerry if the program names no "
                                    "backend."};

}  // namespace tensorferry::environment

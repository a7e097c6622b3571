#include "python/csrc/agent_options.h"

#include <pybind11/stl.h>

#include <type_traits>
#include <vector>

#include "contrib/tensorpipe/tensorpipe_channel.h"
#include "include/tensorferry/plugin.h"
#include "python/csrc/errors.h"

namespace tensorferry::python {

Device device_of(const std::pair<int, int>& device) {
  return {static_cast<DeviceType>(device.first), static_cast<std::uint8_t>(device.second)};
}

Milliseconds milliseconds(double seconds) { return Milliseconds(static_cast<std::int64_t>(seconds * 1000)); }

RawAgentOptions options_of(const std::string& name, int rank, std::shared_ptr<Store> store, const py::dict& given) {
  RawAgentOptions options;
  options.name = name;
  options.rank = rank;
  options.store = std::move(store);
  options.registry.add_on_request("tensorpipe", [] { return make_tensorpipe_driver(); });
  check(Plugins::of_process().add_channels_to(options.registry));
  py::set known;
  const auto take = [&](const char* key, auto& field) {
    known.add(key);
    if (given.contains(key) && !given[key].is_none()) field = given[key].cast<std::decay_t<decltype(field)>>();
  };
  auto heartbeat = std::chrono::duration<double>(options.heartbeat).count();
  auto peer_timeout = std::chrono::duration<double>(options.peer_timeout).count();
  take("prefix", options.prefix);
  take("key", options.key);
  take("channels", options.channels);
  take("max_threads", options.max_threads);
  take("max_bytes_in_flight", options.max_bytes_in_flight);
  take("max_queued_calls", options.max_queued_calls);
  take("max_queued_bytes", options.max_queued_bytes);
  take("heartbeat", heartbeat);
  take("peer_timeout", peer_timeout);
  take("interface", options.interface);
  take("ports", options.ports);
  take("reaches", options.reaches);
  take("unix_sockets", options.unix_sockets);
  take("shared_memory", options.shared_memory);
  take("socket_dir", options.socket_dir);
  take("tls", options.tls);
  take("trace", options.trace);
  std::vector<int> gpus;
  take("gpus", gpus);
  known.add("device_maps");
  known.add("world_size");
  for (const auto index : gpus) options.devices.push_back(device_of({1, index}));
  options.heartbeat = milliseconds(heartbeat);
  options.peer_timeout = milliseconds(peer_timeout);
  for (const auto& [key, value] : given) {
    if (!known.contains(key)) throw py::type_error("an agent has no option " + py::repr(key).cast<std::string>());
  }
  return options;
}

}  // namespace tensorferry::python

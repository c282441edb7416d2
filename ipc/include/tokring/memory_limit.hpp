// How much memory this process may still take before its cgroup kills it.
#pragma once
#include <algorithm>
#include <cstdint>
#include <fstream>
#include <optional>
#include <string>

namespace tokring {

namespace detail {
// How one version of cgroups spells it. Version 1 has a tree for memory alone.
struct MemoryController {
  const char* line;  // what marks its line in /proc/self/cgroup, before the path
  const char* mount;
  const char* limit;
  const char* used;
  const char* reclaimable;  // key in memory.stat: page cache that goes before anybody is killed
};
inline constexpr MemoryController kMemoryV2{"0::", "", "/memory.max", "/memory.current", "inactive_file"};
inline constexpr MemoryController kMemoryV1{":memory:", "/memory", "/memory.limit_in_bytes", "/memory.usage_in_bytes",
                                            "total_inactive_file"};
inline constexpr uint64_t kNoLimit = 1ULL << 62;  // version 1 says "none" with a number near 2^63

inline std::optional<uint64_t> read_number(const std::string& path) {
  std::ifstream file(path);
  uint64_t value = 0;
  if (file >> value) return value;
  return std::nullopt;  // absent, or "max"
}

inline uint64_t reclaimable_bytes(const std::string& directory, const char* wanted) {
  std::ifstream file(directory + "/memory.stat");
  std::string key;
  uint64_t value = 0;
  while (file >> key >> value) {
    if (key == wanted) return value;
  }
  return 0;
}

inline std::string cgroup_path(const std::string& marker) {
  std::ifstream file("/proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {
    size_t at = line.find(marker);
    if (at != std::string::npos && (marker[0] == ':' || at == 0)) return line.substr(at + marker.size());
  }
  return "/";
}

inline std::optional<uint64_t> memory_available(const MemoryController& controller, const std::string& mount) {
  std::optional<uint64_t> available;
  for (std::string path = cgroup_path(controller.line);; path = path.substr(0, path.find_last_of('/'))) {
    std::string directory = mount + controller.mount + (path == "/" ? "" : path);
    auto limit = read_number(directory + controller.limit);
    auto current = read_number(directory + controller.used);
    if (limit && current && *limit < kNoLimit) {
      uint64_t used = *current - std::min(*current, reclaimable_bytes(directory, controller.reclaimable));
      uint64_t room = *limit - std::min(*limit, used);
      available = std::min(available.value_or(room), room);
    }
    if (path.empty() || path == "/") return available;
  }
}
}  // namespace detail

// The smallest head-room of the cgroups (version 2 and 1) and their parents; nothing if no limit is set or can be read.
inline std::optional<uint64_t> cgroup_memory_available(const std::string& mount = "/sys/fs/cgroup") {
  auto available = detail::memory_available(detail::kMemoryV2, mount);
  auto in_version_1 = detail::memory_available(detail::kMemoryV1, mount);
  if (available && in_version_1) return std::min(*available, *in_version_1);
  return available ? available : in_version_1;
}

}  // namespace tokring

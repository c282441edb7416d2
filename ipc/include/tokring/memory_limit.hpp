// How much memory this process may still take before its cgroup kills it.
#pragma once
#include <algorithm>
#include <cstdint>
#include <fstream>
#include <optional>
#include <string>

namespace tokring {

namespace detail {
inline std::optional<uint64_t> read_number(const std::string& path) {
  std::ifstream file(path);
  uint64_t value = 0;
  if (file >> value) return value;
  return std::nullopt;  // absent, or "max"
}

inline uint64_t inactive_file_bytes(const std::string& directory) {
  std::ifstream file(directory + "/memory.stat");
  std::string key;
  uint64_t value = 0;
  while (file >> key >> value) {
    if (key == "inactive_file") return value;
  }
  return 0;
}

inline std::string cgroup_path() {
  std::ifstream file("/proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {
    if (line.rfind("0::", 0) == 0) return line.substr(3);
  }
  return "/";
}
}  // namespace detail

// The smallest head-room of the cgroup (v2) and its parents; nothing if no limit is set or it can't be read.
inline std::optional<uint64_t> cgroup_memory_available(const std::string& mount = "/sys/fs/cgroup") {
  std::optional<uint64_t> available;
  for (std::string path = detail::cgroup_path();; path = path.substr(0, path.find_last_of('/'))) {
    std::string directory = mount + (path == "/" ? "" : path);
    auto limit = detail::read_number(directory + "/memory.max");
    auto current = detail::read_number(directory + "/memory.current");
    if (limit && current) {
      uint64_t used = *current - std::min(*current, detail::inactive_file_bytes(directory));
      uint64_t room = *limit - std::min(*limit, used);
      available = std::min(available.value_or(room), room);
    }
    if (path.empty() || path == "/") return available;
  }
}

}  // namespace tokring

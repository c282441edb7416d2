// StreamReader: a client of many streams that costs little itself; SendFloor: the least a server of streams can do.
#pragma once
#include <nanobind/nanobind.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tokring::bench {

// One connection per request; reads whatever comes and counts server-sent events.
class StreamReader {
 public:
  StreamReader(int port, const std::vector<std::string>& requests);
  StreamReader(const StreamReader&) = delete;
  StreamReader& operator=(const StreamReader&) = delete;
  ~StreamReader();

  // Reads until every stream has that many events or is closed; false if that takes longer.
  bool read_until(uint64_t events_per_stream, double timeout_s);

  // Microseconds between two events of a stream, of all streams since the last call; 0 within one recv(2).
  std::vector<uint32_t> take_gaps_us();

  uint64_t num_events() const;
  uint64_t num_bytes() const { return num_bytes_; }
  size_t num_closed() const;

 private:
  struct Stream {
    int fd;
    uint64_t num_events = 0;
    std::chrono::steady_clock::time_point last_event = {};
    size_t matched = 0;  // characters of "data: " seen at the end of what was read
    bool is_closed = false;
  };
  void read_available(Stream& stream);
  static uint64_t count_events(Stream& stream, std::string_view data);
  void note_gaps(Stream& stream, uint64_t num_new);

  std::vector<Stream> streams_;
  std::vector<char> buffer_;
  std::vector<uint32_t> gaps_us_;
  uint64_t num_bytes_ = 0;
  int epoll_fd_;
};

// Accepts `num_streams` connections, takes a request from each, then sends `event` to all of them, `num_steps` times.
void send_steps(int listen_fd, size_t num_streams, size_t num_steps, const std::string& event,
                std::chrono::microseconds step);

void bind_stream_load(nanobind::module_& module);

}  // namespace tokring::bench

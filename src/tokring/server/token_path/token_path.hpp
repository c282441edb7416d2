// TokenPath: OUT frames in, bytes on client sockets out. No Python in here; interface.py documents every call.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "connection.hpp"
#include "step_frame.hpp"
#include "stream.hpp"
#include "token_table.hpp"

namespace tokring::token_path {

enum class EventKind : uint8_t { kFinished = 1, kStopped = 2, kDelta = 3, kDead = 4, kOverLimit = 5, kSent = 6 };

struct Event {
  EventKind kind;
  uint32_t subject;  // a stream slot or a connection id
};
using Events = std::vector<Event>;

// Words in the stats page, which this process alone writes.
struct Histogram {
  std::vector<uint64_t> bounds_ns;  // inclusive upper bounds
  uint64_t* buckets = nullptr;      // one more than bounds; null: not observed
  uint64_t* sum_ns = nullptr;
  void observe(uint64_t value_ns);
};

struct Limits {
  size_t max_backlog_bytes;
  uint64_t max_backlog_age_ns;
};

struct Counters {
  uint64_t tokens = 0, surplus_tokens = 0, stale_rows = 0, chunks = 0, sends = 0, sent_bytes = 0, blocked = 0;
};

class TokenPath {
 public:
  TokenPath(TokenTable table, size_t num_stream_slots, Limits limits, Histogram inter_token, Histogram first_token);
  TokenPath(const TokenPath&) = delete;
  TokenPath& operator=(const TokenPath&) = delete;
  ~TokenPath() { release(); }

  uint32_t connect(bool is_chunked);
  void attach(uint32_t connection, int fd, Events& events);
  void pause(uint32_t connection);
  void resume(uint32_t connection, Events& events);
  void write(uint32_t connection, std::string_view data, bool end, Events& events);
  // Calls take(id, bytes) for each BYTES-mode connection with output, which is then empty.
  template <class Take>
  void outputs(Take take);
  size_t backlog(uint32_t connection) { return find_connection(connection).backlog(); }
  std::string disconnect(uint32_t connection);
  int writable_fd() const { return epoll_fd_; }

  void open(uint64_t stream_slot, uint32_t generation, StreamOptions options, const uint32_t* connection);
  Stream& stream(uint64_t stream_slot);
  void close(uint64_t stream_slot);

  // Reading a frame is apart from stepping through it, so that a caller can look at its size in between.
  const StepFrame& read(const void* address, size_t length);
  void step(uint64_t budget_us, Events& events);
  void flush(uint64_t budget_us, Events& events);
  size_t pending() const { return queue_.size(); }
  const Counters& counters() const { return counters_; }
  size_t num_stalled() const;  // connections whose client, for now, takes no more
  void release();

 private:
  void feed_row(size_t row, size_t first_token, uint64_t now_ns, Events& events);
  Stream* live_stream(uint32_t slot, uint32_t generation);
  void observe_output(Stream& stream, uint64_t now_ns);
  void report(uint32_t slot, Stream& stream, Events& events);
  void enqueue(Connection& connection);
  void unqueue(Connection& connection);
  void pump_queue(uint64_t budget_us, bool skip_awaiting, Events& events);
  void pump(Connection& connection, Events& events);
  void render(Connection& connection);
  void send(Connection& connection, Events& events);
  void hold_or_free(Connection& connection);
  void watch(Connection& connection);
  void unwatch(Connection& connection);
  void check_limits(Connection& connection, Events& events);
  void drop(Connection& connection, EventKind kind, Events& events);
  Connection& find_connection(uint32_t connection);

  TokenTable table_;
  TokenFragments fragments_;
  Limits limits_;
  Histogram inter_token_, first_token_;
  std::vector<std::unique_ptr<Stream>> streams_;  // by slot
  std::map<uint32_t, std::unique_ptr<Connection>> connections_;
  uint32_t next_connection_ = 0;
  bool hands_bytes_back_ = false;             // some connection was attached without a descriptor
  std::vector<Connection*> queue_, pumping_;  // with something to render or send, in order
  std::map<uint32_t, Connection*> held_;  // that can't be sent to now: not attached, paused, or their socket is full
  Counters counters_;
  StepFrame frame_;
  std::string event_;  // scratch: one SSE event
  int epoll_fd_;
};

template <class Take>
void TokenPath::outputs(Take take) {
  if (!hands_bytes_back_) return;
  for (auto& [id, connection] : connections_) {
    if (connection->unsent().empty() || connection->owns_descriptor() || connection->is_paused) continue;
    take(id, connection->unsent());
    connection->clear_output();
  }
}

}  // namespace tokring::token_path

// LoadClient: sends streamed requests to one HTTP server when they are due and notes the time of each token chunk.
#pragma once
#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tokring::bench {

// Times are CLOCK_MONOTONIC nanoseconds; 0 = never happened.
struct Answer {
  int64_t sent_ns = 0;
  int64_t first_token_ns = 0;
  int64_t last_token_ns = 0;
  int64_t end_ns = 0;
  uint64_t num_chunks = 0;  // server-sent events that carry text
  int status = 0;
  bool is_complete = false;  // the stream ended as HTTP and as server-sent events ([DONE]) say
  std::string last_event;    // last event before [DONE]: where servers put the usage
  std::string body_start;    // what came instead of events, for error messages
};

// Reads one HTTP/1.1 response (chunked, with a length, or until the connection closes) and its server-sent events.
class AnswerReader {
 public:
  // gaps_ns collects the times between one token chunk and the next.
  void feed(std::string_view data, int64_t now_ns, Answer& answer, std::vector<int64_t>& gaps_ns);
  void connection_closed(Answer& answer);
  bool is_done() const { return state_ == State::kDone; }

 private:
  enum class State { kHead, kChunkSize, kChunk, kChunkEnd, kTrailer, kLength, kUntilClose, kDone };
  void read_head(Answer& answer);
  void read_body(std::string_view data, int64_t now_ns, Answer& answer, std::vector<int64_t>& gaps_ns);
  void read_event(std::string_view line, int64_t now_ns, Answer& answer, std::vector<int64_t>& gaps_ns);
  bool take_line(std::string_view& data);

  State state_ = State::kHead;
  std::string head_;
  std::string protocol_line_;  // of the chunked framing
  std::string event_line_;     // of the server-sent events
  uint64_t remaining_ = 0;     // of the chunk, or of the body
  bool is_marked_done_ = false;
};

class LoadClient {
 public:
  // host: a numeric IPv4 address.
  LoadClient(const std::string& host, int port);
  LoadClient(const LoadClient&) = delete;
  LoadClient& operator=(const LoadClient&) = delete;
  ~LoadClient() { close_all(); }

  // Sends request i at due_ns[i] after the start, but never more than `concurrency` at once (0: no bound), each on a
  // connection of its own. Returns false if not all have been answered after timeout_s.
  bool run(const std::vector<std::string>& requests, const std::vector<int64_t>& due_ns, size_t concurrency,
           double timeout_s);

  std::vector<Answer> answers;
  std::vector<int64_t> gaps_ns;

 private:
  struct Connection {
    int fd = -1;
    size_t num_sent = 0;  // bytes of the request
    AnswerReader reader;
  };
  void start(size_t index);
  void send_some(size_t index, const std::string& request);
  void receive(size_t index);
  void finish(size_t index);
  void close_all();

  std::string host_;
  int port_;
  int epoll_fd_ = -1;
  size_t num_open_ = 0;
  std::vector<Connection> connections_;
  std::vector<char> buffer_;
};

void bind_load_client(nanobind::module_& module);

}  // namespace tokring::bench

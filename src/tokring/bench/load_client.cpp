#include "load_client.hpp"

#include <arpa/inet.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <system_error>

namespace nb = nanobind;
using namespace nb::literals;

namespace tokring::bench {
namespace {

constexpr size_t kReadBytes = 256 << 10;
constexpr size_t kMaxHeadBytes = 64 << 10;
constexpr size_t kShownBodyBytes = 2000;
constexpr int kMaxWaitMs = 100;

int checked(int result) {
  if (result < 0) throw std::system_error(errno, std::system_category());
  return result;
}

int64_t monotonic_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

// The value of a header in a lower-cased head; empty if there is none.
std::string_view header(std::string_view head, std::string_view name) {
  size_t at = head.find("\r\n" + std::string(name) + ":");
  if (at == std::string_view::npos) return {};
  at += 2 + name.size() + 1;
  std::string_view value = head.substr(at, head.find("\r\n", at) - at);
  value.remove_prefix(std::min(value.find_first_not_of(" \t"), value.size()));
  return value;
}

// Whether a member of this name holds a text that is not empty.
bool has_text(std::string_view event, std::string_view name) {
  for (size_t at = event.find(name); at != std::string_view::npos; at = event.find(name, at + 1)) {
    size_t value = event.find_first_not_of(" :", at + name.size());
    if (value != std::string_view::npos && event[value] == '"' && value + 1 < event.size() && event[value + 1] != '"')
      return true;
  }
  return false;
}

bool carries_token(std::string_view event) {
  return has_text(event, "\"content\"") || has_text(event, "\"text\"") || has_text(event, "\"reasoning_content\"");
}

}  // namespace

void AnswerReader::feed(std::string_view data, int64_t now_ns, Answer& answer, std::vector<int64_t>& gaps_ns) {
  while (!data.empty() && state_ != State::kDone) {
    switch (state_) {
      case State::kHead: {
        size_t before = head_.size();
        head_ += data;
        size_t end = head_.find("\r\n\r\n", before < 3 ? 0 : before - 3);
        if (end == std::string::npos) {
          if (head_.size() > kMaxHeadBytes) throw std::runtime_error("a response head without an end");
          return;
        }
        data.remove_prefix(end + 4 - before);
        head_.resize(end + 2);
        read_head(answer);
        break;
      }
      case State::kChunkSize: {
        if (!take_line(data)) return;
        auto [_, error] =
            std::from_chars(protocol_line_.data(), protocol_line_.data() + protocol_line_.size(), remaining_, 16);
        if (error != std::errc()) throw std::runtime_error("a chunk without a size");
        protocol_line_.clear();
        state_ = remaining_ ? State::kChunk : State::kTrailer;
        break;
      }
      case State::kChunkEnd:
        if (!take_line(data)) return;
        protocol_line_.clear();
        state_ = State::kChunkSize;
        break;
      case State::kTrailer: {
        if (!take_line(data)) return;
        bool is_last = protocol_line_.empty();
        protocol_line_.clear();
        if (is_last) state_ = State::kDone;
        break;
      }
      case State::kChunk:
      case State::kLength: {
        std::string_view part = data.substr(0, remaining_);
        read_body(part, now_ns, answer, gaps_ns);
        data.remove_prefix(part.size());
        remaining_ -= part.size();
        if (!remaining_) state_ = state_ == State::kChunk ? State::kChunkEnd : State::kDone;
        break;
      }
      case State::kUntilClose:
        read_body(data, now_ns, answer, gaps_ns);
        return;
      case State::kDone:
        return;
    }
  }
  if (state_ == State::kDone) answer.is_complete = is_marked_done_;
}

void AnswerReader::connection_closed(Answer& answer) {
  if (state_ == State::kUntilClose) answer.is_complete = is_marked_done_;
  state_ = State::kDone;
}

void AnswerReader::read_head(Answer& answer) {
  std::transform(head_.begin(), head_.end(), head_.begin(), [](unsigned char letter) { return std::tolower(letter); });
  if (head_.size() < 12 || !head_.starts_with("http/1.")) throw std::runtime_error("not an HTTP/1 response");
  std::from_chars(head_.data() + 9, head_.data() + 12, answer.status);
  std::string_view length = header(head_, "content-length");
  if (header(head_, "transfer-encoding").find("chunked") != std::string_view::npos) {
    state_ = State::kChunkSize;
  } else if (!length.empty()) {
    std::from_chars(length.data(), length.data() + length.size(), remaining_);
    state_ = remaining_ ? State::kLength : State::kDone;
  } else {
    state_ = State::kUntilClose;
  }
}

// Moves what belongs to one line of the framing into protocol_line_; true when it is whole.
bool AnswerReader::take_line(std::string_view& data) {
  size_t end = data.find('\n');
  protocol_line_ += data.substr(0, end);
  data.remove_prefix(end == std::string_view::npos ? data.size() : end + 1);
  if (end == std::string_view::npos) return false;
  if (protocol_line_.ends_with('\r')) protocol_line_.pop_back();
  return true;
}

void AnswerReader::read_body(std::string_view data, int64_t now_ns, Answer& answer, std::vector<int64_t>& gaps_ns) {
  if (answer.body_start.size() < kShownBodyBytes && !answer.num_chunks)
    answer.body_start += data.substr(0, kShownBodyBytes - answer.body_start.size());
  while (!data.empty()) {
    size_t end = data.find('\n');
    if (end == std::string_view::npos) {
      event_line_ += data;
      return;
    }
    if (event_line_.empty()) {
      read_event(data.substr(0, end), now_ns, answer, gaps_ns);
    } else {
      event_line_ += data.substr(0, end);
      read_event(event_line_, now_ns, answer, gaps_ns);
      event_line_.clear();
    }
    data.remove_prefix(end + 1);
  }
}

void AnswerReader::read_event(std::string_view line, int64_t now_ns, Answer& answer, std::vector<int64_t>& gaps_ns) {
  if (!line.starts_with("data:")) return;
  std::string_view event = line.substr(5);
  if (event.starts_with(' ')) event.remove_prefix(1);
  if (event.ends_with('\r')) event.remove_suffix(1);
  if (event == "[DONE]") {
    is_marked_done_ = true;
    return;
  }
  answer.last_event = event;
  if (!carries_token(event)) return;
  ++answer.num_chunks;
  if (!answer.first_token_ns)
    answer.first_token_ns = now_ns;
  else
    gaps_ns.push_back(now_ns - answer.last_token_ns);
  answer.last_token_ns = now_ns;
}

LoadClient::LoadClient(const std::string& host, int port) : host_(host), port_(port), buffer_(kReadBytes) {
  in_addr address;
  if (inet_pton(AF_INET, host.c_str(), &address) != 1) throw std::invalid_argument("not an IPv4 address: " + host);
}

bool LoadClient::run(const std::vector<std::string>& requests, const std::vector<int64_t>& due_ns, size_t concurrency,
                     double timeout_s) {
  if (requests.size() != due_ns.size()) throw std::invalid_argument("one due time per request");
  close_all();
  answers.assign(requests.size(), {});
  gaps_ns.clear();
  connections_.resize(requests.size());
  epoll_fd_ = checked(epoll_create1(EPOLL_CLOEXEC));
  int64_t start_ns = monotonic_ns();
  int64_t end_ns = start_ns + static_cast<int64_t>(timeout_s * 1e9);
  size_t next = 0;
  std::array<epoll_event, 256> ready;
  while ((next < requests.size() || num_open_) && monotonic_ns() < end_ns) {
    int64_t now_ns = monotonic_ns() - start_ns;
    while (next < requests.size() && due_ns[next] <= now_ns && (!concurrency || num_open_ < concurrency)) start(next++);
    int wait_ms = kMaxWaitMs;
    if (next < requests.size() && (!concurrency || num_open_ < concurrency))
      wait_ms = static_cast<int>(std::clamp<int64_t>((due_ns[next] - now_ns) / 1'000'000, 0, kMaxWaitMs));
    int count = epoll_wait(epoll_fd_, ready.data(), static_cast<int>(ready.size()), wait_ms);
    if (count < 0 && errno != EINTR) throw std::system_error(errno, std::system_category());
    for (int i = 0; i < count; ++i) {
      size_t index = ready[static_cast<size_t>(i)].data.u64;
      if (connections_[index].num_sent < requests[index].size())
        send_some(index, requests[index]);
      else
        receive(index);
    }
  }
  bool all = next == requests.size() && !num_open_;
  close_all();
  return all;
}

void LoadClient::start(size_t index) {
  Connection& connection = connections_[index];
  connection.fd = checked(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  ++num_open_;
  int on = 1;
  checked(::setsockopt(connection.fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port_));
  inet_pton(AF_INET, host_.c_str(), &address.sin_addr);
  answers[index].sent_ns = monotonic_ns();
  if (::connect(connection.fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) < 0 &&
      errno != EINPROGRESS) {
    finish(index);
    return;
  }
  epoll_event event = {};
  event.events = EPOLLOUT;
  event.data.u64 = index;
  checked(epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, connection.fd, &event));
}

void LoadClient::send_some(size_t index, const std::string& request) {
  Connection& connection = connections_[index];
  ssize_t sent = ::send(connection.fd, request.data() + connection.num_sent, request.size() - connection.num_sent,
                        MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent < 0) {
    if (errno != EAGAIN && errno != EINTR) finish(index);
    return;
  }
  connection.num_sent += static_cast<size_t>(sent);
  if (connection.num_sent < request.size()) return;
  epoll_event event = {};
  event.events = EPOLLIN;
  event.data.u64 = index;
  checked(epoll_ctl(epoll_fd_, EPOLL_CTL_MOD, connection.fd, &event));
}

void LoadClient::receive(size_t index) {
  Connection& connection = connections_[index];
  ssize_t count = ::recv(connection.fd, buffer_.data(), buffer_.size(), 0);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (count <= 0) {
    connection.reader.connection_closed(answers[index]);
  } else {
    connection.reader.feed({buffer_.data(), static_cast<size_t>(count)}, monotonic_ns(), answers[index], gaps_ns);
  }
  if (connection.reader.is_done()) finish(index);
}

void LoadClient::finish(size_t index) {
  answers[index].end_ns = monotonic_ns();
  ::close(connections_[index].fd);  // leaves the epoll set by itself
  connections_[index] = {};
  --num_open_;
}

void LoadClient::close_all() {
  for (size_t index = 0; index < connections_.size(); ++index)
    if (connections_[index].fd >= 0) finish(index);
  connections_.clear();
  if (epoll_fd_ >= 0) ::close(epoll_fd_);
  epoll_fd_ = -1;
}

void bind_load_client(nb::module_& module) {
  nb::class_<Answer>(module, "Answer")
      .def_ro("sent_ns", &Answer::sent_ns)
      .def_ro("first_token_ns", &Answer::first_token_ns)
      .def_ro("last_token_ns", &Answer::last_token_ns)
      .def_ro("end_ns", &Answer::end_ns)
      .def_ro("num_chunks", &Answer::num_chunks)
      .def_ro("status", &Answer::status)
      .def_ro("is_complete", &Answer::is_complete)
      .def_prop_ro("last_event",
                   [](const Answer& self) { return nb::bytes(self.last_event.data(), self.last_event.size()); })
      .def_prop_ro("body_start",
                   [](const Answer& self) { return nb::bytes(self.body_start.data(), self.body_start.size()); });
  nb::class_<LoadClient>(module, "LoadClient")
      .def(nb::init<const std::string&, int>(), "host"_a, "port"_a)
      .def(
          "run",
          [](LoadClient& self, const std::vector<nb::bytes>& requests, const std::vector<int64_t>& due_ns,
             size_t concurrency, double timeout_s) {
            std::vector<std::string> copies;
            for (const nb::bytes& request : requests) copies.emplace_back(request.c_str(), request.size());
            nb::gil_scoped_release unlocked;
            return self.run(copies, due_ns, concurrency, timeout_s);
          },
          "requests"_a, "due_ns"_a, "concurrency"_a, "timeout_s"_a)
      .def_prop_ro("answers", [](const LoadClient& self) { return self.answers; })
      .def_prop_ro("gaps_ns", [](const LoadClient& self) {
        return nb::ndarray<nb::numpy, const int64_t, nb::ndim<1>>(self.gaps_ns.data(), {self.gaps_ns.size()})
            .cast(nb::rv_policy::copy);
      });
}

}  // namespace tokring::bench

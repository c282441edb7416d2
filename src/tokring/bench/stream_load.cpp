#include "stream_load.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>
#include <thread>
#include <utility>

namespace nb = nanobind;
using namespace nb::literals;

namespace tokring::bench {
namespace {

constexpr std::string_view kEventStart = "data: ";
constexpr size_t kReadBytes = 256 << 10;

int checked(int result) {
  if (result < 0) throw std::system_error(errno, std::system_category());
  return result;
}

int connect_to(int port) {
  int fd = checked(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  checked(::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address));
  return fd;
}

void send_all(int fd, std::string_view data) {
  while (!data.empty()) {
    ssize_t sent = ::send(fd, data.data(), data.size(), MSG_NOSIGNAL);
    if (sent < 0) throw std::system_error(errno, std::system_category());
    data.remove_prefix(static_cast<size_t>(sent));
  }
}

}  // namespace

StreamReader::StreamReader(int port, const std::vector<std::string>& requests)
    : buffer_(kReadBytes), epoll_fd_(checked(epoll_create1(EPOLL_CLOEXEC))) {
  streams_.reserve(requests.size());
  for (const std::string& request : requests) {
    streams_.push_back({connect_to(port)});
    send_all(streams_.back().fd, request);
    checked(::fcntl(streams_.back().fd, F_SETFL, O_NONBLOCK));
    epoll_event event = {};
    event.events = EPOLLIN;
    event.data.u64 = streams_.size() - 1;
    checked(epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, streams_.back().fd, &event));
  }
}

StreamReader::~StreamReader() {
  for (const Stream& stream : streams_) ::close(stream.fd);
  ::close(epoll_fd_);
}

bool StreamReader::read_until(uint64_t events_per_stream, double timeout_s) {
  auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
  auto is_behind = [&](const Stream& stream) { return !stream.is_closed && stream.num_events < events_per_stream; };
  std::array<epoll_event, 256> ready;
  while (std::any_of(streams_.begin(), streams_.end(), is_behind)) {
    int count = epoll_wait(epoll_fd_, ready.data(), static_cast<int>(ready.size()), 100);
    if (count < 0 && errno != EINTR) throw std::system_error(errno, std::system_category());
    for (int i = 0; i < count; ++i) read_available(streams_[ready[static_cast<size_t>(i)].data.u64]);
    if (std::chrono::steady_clock::now() > deadline) return false;
  }
  return true;
}

void StreamReader::read_available(Stream& stream) {
  ssize_t count = ::recv(stream.fd, buffer_.data(), buffer_.size(), 0);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (count <= 0) {
    stream.is_closed = true;
    epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, stream.fd, nullptr);
    return;
  }
  num_bytes_ += static_cast<uint64_t>(count);
  if (uint64_t num_new = count_events(stream, {buffer_.data(), static_cast<size_t>(count)})) note_gaps(stream, num_new);
}

void StreamReader::note_gaps(Stream& stream, uint64_t num_new) {
  auto now = std::chrono::steady_clock::now();
  if (stream.num_events > num_new) {
    auto gap = std::chrono::duration_cast<std::chrono::microseconds>(now - stream.last_event);
    gaps_us_.push_back(static_cast<uint32_t>(std::min<int64_t>(gap.count(), UINT32_MAX)));
  }
  gaps_us_.insert(gaps_us_.end(), num_new - 1, 0);
  stream.last_event = now;
}

std::vector<uint32_t> StreamReader::take_gaps_us() { return std::exchange(gaps_us_, {}); }

uint64_t StreamReader::count_events(Stream& stream, std::string_view data) {
  uint64_t before = stream.num_events;
  for (char character : data) {
    if (character != kEventStart[stream.matched]) {
      stream.matched = character == kEventStart[0] ? 1 : 0;
    } else if (++stream.matched == kEventStart.size()) {
      ++stream.num_events;
      stream.matched = 0;
    }
  }
  return stream.num_events - before;
}

uint64_t StreamReader::num_events() const {
  uint64_t total = 0;
  for (const Stream& stream : streams_) total += stream.num_events;
  return total;
}

size_t StreamReader::num_closed() const {
  return static_cast<size_t>(
      std::count_if(streams_.begin(), streams_.end(), [](const Stream& stream) { return stream.is_closed; }));
}

void send_steps(int listen_fd, size_t num_streams, size_t num_steps, const std::string& event,
                std::chrono::microseconds step) {
  std::vector<int> clients;
  std::array<char, 8192> request;
  for (size_t i = 0; i < num_streams; ++i) {
    clients.push_back(checked(::accept4(listen_fd, nullptr, nullptr, SOCK_CLOEXEC)));
    int on = 1;
    checked(::setsockopt(clients.back(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on));
    if (::recv(clients.back(), request.data(), request.size(), 0) <= 0) throw std::runtime_error("no request came");
  }
  auto due = std::chrono::steady_clock::now();
  for (size_t i = 0; i < num_steps; ++i) {
    for (int client : clients) send_all(client, event);
    due += step;
    std::this_thread::sleep_until(due);
  }
  for (int client : clients) ::close(client);
}

void bind_stream_load(nb::module_& module) {
  nb::class_<StreamReader>(module, "StreamReader")
      .def(
          "__init__",
          [](StreamReader* self, int port, const std::vector<nb::bytes>& requests) {
            std::vector<std::string> copies;
            for (const nb::bytes& request : requests) copies.emplace_back(request.c_str(), request.size());
            new (self) StreamReader(port, copies);
          },
          "port"_a, "requests"_a)
      .def("read_until", &StreamReader::read_until, "events_per_stream"_a, "timeout_s"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def("take_gaps_us", &StreamReader::take_gaps_us)
      .def_prop_ro("num_events", &StreamReader::num_events)
      .def_prop_ro("num_bytes", &StreamReader::num_bytes)
      .def_prop_ro("num_closed", &StreamReader::num_closed);
  module.def(
      "send_steps",
      [](int listen_fd, size_t num_streams, size_t num_steps, const nb::bytes& event, uint64_t step_us) {
        std::string copy(event.c_str(), event.size());
        nb::gil_scoped_release unlocked;
        send_steps(listen_fd, num_streams, num_steps, copy, std::chrono::microseconds(step_us));
      },
      "listen_fd"_a, "num_streams"_a, "num_steps"_a, "event"_a, "step_us"_a);
}

}  // namespace tokring::bench

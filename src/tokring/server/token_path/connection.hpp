// Connection: ordered bytes to one client, on an own descriptor or handed back, and what waits for it.
#pragma once
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdint>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "stream.hpp"

namespace tokring::token_path {

inline constexpr size_t kIdleOutputBytes = 64 << 10;  // a larger buffer is given back once it is empty

class Connection {
 public:
  Connection(uint32_t id, bool is_chunked) : id(id), is_chunked_(is_chunked) {}
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  ~Connection() {
    if (fd_ >= 0) ::close(fd_);
  }

  // Sends on a descriptor of its own: the transport may close its number, and another client get it.
  void attach(int fd) {
    if (fd >= 0) {
      fd_ = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);
      if (fd_ < 0) throw std::system_error(errno, std::system_category());
    }
    is_attached = true;
    is_paused = false;
  }
  int fd() const { return fd_; }
  bool owns_descriptor() const { return fd_ >= 0; }

  // One HTTP chunk, or the bare bytes.
  void append(std::string_view data) {
    if (is_chunked_) {
      char digits[20];
      char* end = std::to_chars(digits, digits + sizeof digits, data.size(), 16).ptr;
      output_.append(digits, static_cast<size_t>(end - digits)).append("\r\n");
    }
    output_.append(data);
    if (is_chunked_) output_.append("\r\n");
  }
  void append_end() {
    is_ending = true;
    if (is_chunked_) output_.append("0\r\n\r\n");
  }

  std::string_view unsent() const { return std::string_view(output_).substr(num_sent_); }
  void clear_output() {
    output_.clear();
    num_sent_ = 0;
    if (output_.capacity() > kIdleOutputBytes) output_.shrink_to_fit();
  }

  // Sends what the socket takes, or sets is_blocked. Returns the bytes sent, -1 if the peer is gone.
  ssize_t send() {
    ssize_t sent;
    do {
      sent = ::send(fd_, unsent().data(), unsent().size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    } while (sent < 0 && errno == EINTR);
    if (sent < 0 && errno != EAGAIN && errno != EWOULDBLOCK) return -1;
    if (sent < 0) sent = 0;
    num_sent_ += static_cast<size_t>(sent);
    is_blocked = num_sent_ < output_.size();
    if (!is_blocked) clear_output();
    return sent;
  }

  size_t backlog() const {
    size_t bytes = unsent().size();
    for (const Stream* stream : streams) bytes += stream->num_ready_bytes();
    return bytes;
  }

  // Checked while nothing can be sent; the age counts from the last progress.
  bool is_over_limit(size_t max_bytes, uint64_t max_age_ns, uint64_t now_ns) {
    size_t bytes = backlog();
    if (bytes == 0) {
      stalled_since_ns = 0;
      return false;
    }
    if (stalled_since_ns == 0) stalled_since_ns = now_ns;
    return bytes > max_bytes || now_ns - stalled_since_ns > max_age_ns;
  }

  // Nothing more will be sent: forgets what was queued.
  void drop() {
    is_dead = true;
    clear_output();
    for (Stream* stream : streams) stream->discard();
  }

  // For the whole connection.
  const uint32_t id;
  std::vector<Stream*> streams;
  bool is_attached = false;
  // Changing with the client's pace.
  bool is_paused = true;
  bool is_blocked = false;
  bool is_watched = false;  // registered with epoll
  bool is_queued = false;
  bool is_dead = false;
  bool is_ending = false;     // write(end=True) was called and SENT not yet reported
  bool awaits_write = false;  // a stream ended in the latest step: its last text leaves with what write() brings
  uint64_t stalled_since_ns = 0;

 private:
  bool is_chunked_;
  int fd_ = -1;  // our dup(); -1: bytes are handed back
  std::string output_;
  size_t num_sent_ = 0;
};

}  // namespace tokring::token_path

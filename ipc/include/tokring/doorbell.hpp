// A doorbell is a non-blocking pipe: one byte means "look again", never a count. Each side holds only its own end.
#pragma once
#include <signal.h>
#include <unistd.h>

#include <cerrno>

namespace tokring {

// A doorbell of a dead peer must not kill who rings it: SIGPIPE's default action is turned off for the process. A
// handler of the process's own stays. Pipes have no MSG_NOSIGNAL.
inline void survive_broken_doorbells() noexcept {
  struct sigaction action {};
  if (sigaction(SIGPIPE, nullptr, &action) != 0 || action.sa_handler != SIG_DFL) return;
  action.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &action, nullptr);
}

// A full pipe has rung already; a closed one belongs to a dead peer, which its control socket reports.
inline void ring_doorbell(int fd) noexcept {
  const char byte = 1;
  while (write(fd, &byte, 1) < 0 && errno == EINTR) {
  }
}

// Empties the pipe, at most `limit` bytes: a hostile peer that keeps writing must not hold us here.
inline void drain_doorbell(int fd, size_t limit = 65536) noexcept {
  char bytes[512];
  for (size_t drained = 0; drained < limit;) {
    ssize_t got = read(fd, bytes, sizeof bytes);
    if (got < 0 && errno == EINTR) continue;
    if (got < static_cast<ssize_t>(sizeof bytes)) return;  // EOF, EAGAIN or the last ones
    drained += static_cast<size_t>(got);
  }
}

}  // namespace tokring

// Attach over the control socket (SOCK_SEQPACKET): HELLO -> SEGMENT + descriptor, or REFUSE with a reason.
#pragma once
#include <poll.h>
#include <sys/socket.h>

#include <optional>
#include <vector>

#include "tokring/clock.hpp"
#include "tokring/segment.hpp"

namespace tokring {

namespace detail {

inline std::string side_text(const char* who, uint32_t pid, uint32_t version, uint64_t hash) {
  return std::string(who) + " (pid " + std::to_string(pid) + ") has layout version " + std::to_string(version) +
         ", hash " + hex(hash);
}

inline ControlHeader control_header(ControlKind kind) {
  return {kControlMagic, static_cast<uint16_t>(kind), 0, kLayoutVersion, static_cast<uint32_t>(getpid()), kLayoutHash};
}

template <class Message>
std::vector<std::byte> control_packet(ControlKind kind, const Message& message, std::string_view tail = {}) {
  ControlHeader header = control_header(kind);
  std::vector<std::byte> packet(sizeof header + sizeof message + tail.size());
  std::memcpy(packet.data(), &header, sizeof header);
  std::memcpy(packet.data() + sizeof header, &message, sizeof message);
  if (!tail.empty()) std::memcpy(packet.data() + sizeof header + sizeof message, tail.data(), tail.size());
  return packet;
}

// Waits until the socket is ready for `events`. Throws AttachError at the deadline.
inline void wait_ready(int socket, short events, uint64_t deadline_ns, const char* what) {
  for (;;) {
    uint64_t now = now_ns();
    int left_ms = now >= deadline_ns ? 0 : static_cast<int>((deadline_ns - now) / 1'000'000 + 1);
    pollfd entry{socket, events, 0};
    int ready = poll(&entry, 1, left_ms);
    if (ready > 0) return;
    if (ready < 0 && errno != EINTR) throw AttachError("poll of the control socket failed: " + errno_text(errno));
    if (ready == 0) throw AttachError(std::string("timed out waiting for ") + what);
  }
}

inline void send_packet(int socket, const std::vector<std::byte>& packet, int passed_fd, uint64_t deadline_ns) {
  iovec part{const_cast<std::byte*>(packet.data()), packet.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char room[CMSG_SPACE(sizeof(int))] = {};
  if (passed_fd >= 0) {
    message.msg_control = room;
    message.msg_controllen = sizeof room;
    cmsghdr* item = CMSG_FIRSTHDR(&message);
    item->cmsg_level = SOL_SOCKET;
    item->cmsg_type = SCM_RIGHTS;
    item->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(item), &passed_fd, sizeof(int));
  }
  for (;;) {
    wait_ready(socket, POLLOUT, deadline_ns, "room in the control socket");
    if (sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0) return;
    if (errno != EINTR && errno != EAGAIN)
      throw AttachError("sending on the control socket failed: " + errno_text(errno));
  }
}

struct Packet {
  std::vector<std::byte> bytes;
  std::vector<OwnedFd> fds;
};

inline void take_fds(msghdr& message, Packet& packet) {
  for (cmsghdr* item = CMSG_FIRSTHDR(&message); item != nullptr; item = CMSG_NXTHDR(&message, item)) {
    if (item->cmsg_level != SOL_SOCKET || item->cmsg_type != SCM_RIGHTS) continue;
    size_t count = (item->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(item) + i * sizeof(int), sizeof fd);
      packet.fds.emplace_back(fd);
    }
  }
}

inline Packet receive_packet(int socket, uint64_t deadline_ns, const char* what) {
  Packet packet;
  for (;;) {
    wait_ready(socket, POLLIN, deadline_ns, what);
    packet.bytes.resize(kMaxControlMessageBytes);
    iovec part{packet.bytes.data(), packet.bytes.size()};
    alignas(cmsghdr) char room[CMSG_SPACE(4 * sizeof(int))];
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = room;
    message.msg_controllen = sizeof room;
    ssize_t got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (got < 0) throw AttachError("receiving on the control socket failed: " + errno_text(errno));
    take_fds(message, packet);
    if (got == 0) throw AttachError(std::string("the peer closed the control socket while we waited for ") + what);
    if (message.msg_flags & MSG_TRUNC) throw AttachError(std::string("oversized control message instead of ") + what);
    packet.bytes.resize(static_cast<size_t>(got));
    return packet;
  }
}

template <class Message>
Message read_message(const Packet& packet, const char* what, size_t* tail_offset = nullptr) {
  size_t needed = sizeof(ControlHeader) + sizeof(Message);
  if (packet.bytes.size() < needed || (tail_offset == nullptr && packet.bytes.size() != needed)) {
    throw AttachError(std::string(what) + " has " + std::to_string(packet.bytes.size()) + " bytes, needed " +
                      std::to_string(needed));
  }
  Message message;
  std::memcpy(&message, packet.bytes.data() + sizeof(ControlHeader), sizeof message);
  if (tail_offset != nullptr) *tail_offset = needed;
  return message;
}

// The header of any control message, whatever the peer's layout version.
inline ControlHeader read_control_header(const Packet& packet) {
  ControlHeader header{};
  if (packet.bytes.size() < sizeof header)
    throw AttachError("control message of " + std::to_string(packet.bytes.size()) + " bytes");
  std::memcpy(&header, packet.bytes.data(), sizeof header);
  if (header.magic != kControlMagic) {
    throw AttachError("control message begins with " + hex(header.magic) + ", tokring's begin with " +
                      hex(kControlMagic));
  }
  return header;
}

inline std::optional<std::string> layout_mismatch(const ControlHeader& theirs, const char* they, const char* we) {
  if (theirs.layout_version == kLayoutVersion && theirs.layout_hash == kLayoutHash) return std::nullopt;
  return side_text(they, theirs.pid, theirs.layout_version, theirs.layout_hash) + "; " +
         side_text(we, static_cast<uint32_t>(getpid()), kLayoutVersion, kLayoutHash) +
         ": both must come from one installation of tokring; restart the server";
}

}  // namespace detail

inline uint64_t deadline_after(double timeout_s) {
  return now_ns() + static_cast<uint64_t>(std::max(timeout_s, 0.0) * 1e9);
}

// Front end: asks for a segment. Throws AttachError.
inline void say_hello(int socket, const SegmentShape& shape, uint32_t frontend_index, uint64_t deadline) {
  using namespace detail;
  uint32_t pid = static_cast<uint32_t>(getpid());
  HelloMessage hello{shape.req_bytes, shape.out_bytes, process_start_time(pid), shape.num_stream_slots, frontend_index};
  send_packet(socket, control_packet(ControlKind::HELLO, hello), -1, deadline);
}

// Front end: maps the segment that the engine answers with. Throws AttachError.
inline std::shared_ptr<Segment> receive_segment(int socket, const SegmentShape& shape, uint64_t deadline) {
  using namespace detail;
  Packet packet = receive_packet(socket, deadline, "the engine's SEGMENT message");
  ControlHeader header = read_control_header(packet);
  if (header.kind == static_cast<uint16_t>(ControlKind::REFUSE)) {
    size_t offset = 0;
    RefuseMessage refuse = read_message<RefuseMessage>(packet, "REFUSE", &offset);
    size_t length = std::min<size_t>(refuse.text_bytes, packet.bytes.size() - offset);
    throw AttachError("the engine refused this front end: " +
                      std::string(reinterpret_cast<const char*>(packet.bytes.data() + offset), length));
  }
  if (auto mismatch = layout_mismatch(header, "the engine", "this front end")) throw AttachError(*mismatch);
  if (header.kind != static_cast<uint16_t>(ControlKind::SEGMENT)) {
    throw AttachError("control message of kind " + std::to_string(header.kind) + " instead of SEGMENT");
  }
  SegmentMessage message = read_message<SegmentMessage>(packet, "SEGMENT");
  if (packet.fds.size() != 1)
    throw AttachError("SEGMENT carries " + std::to_string(packet.fds.size()) + " descriptors instead of 1");
  return Segment::attach(std::move(packet.fds[0]), shape, message.connection_generation, header.pid);
}

// Both in turn.
inline std::shared_ptr<Segment> request_segment(int socket, const SegmentShape& shape, uint32_t frontend_index,
                                                double timeout_s) {
  uint64_t deadline = deadline_after(timeout_s);
  say_hello(socket, shape, frontend_index, deadline);
  return receive_segment(socket, shape, deadline);
}

struct AcceptedSegment {
  std::shared_ptr<Segment> segment;
  uint32_t frontend_index;
};

// Engine: answers one HELLO. What it can't serve it refuses in words, then throws AttachError with the same words.
inline AcceptedSegment serve_segment(int socket, uint32_t engine_index, uint64_t max_segment_bytes, double timeout_s) {
  using namespace detail;
  uint64_t deadline = deadline_after(timeout_s);
  Packet packet = receive_packet(socket, deadline, "the front end's HELLO message");
  RefuseCode code = RefuseCode::PROTOCOL;
  try {
    ControlHeader header = read_control_header(packet);
    code = RefuseCode::LAYOUT;
    if (auto mismatch = layout_mismatch(header, "the front end", "the engine")) throw AttachError(*mismatch);
    code = RefuseCode::PROTOCOL;
    if (header.kind != static_cast<uint16_t>(ControlKind::HELLO)) {
      throw AttachError("control message of kind " + std::to_string(header.kind) + " instead of HELLO");
    }
    HelloMessage hello = read_message<HelloMessage>(packet, "HELLO");
    code = RefuseCode::SIZE;
    SegmentShape shape{hello.req_bytes, hello.out_bytes, hello.num_stream_slots};
    shape.check(max_segment_bytes);
    code = RefuseCode::MEMORY;
    auto segment = Segment::create(shape, engine_index, header.pid, hello.frontend_start_time);
    SegmentMessage message{shape.total(), segment->header().connection_generation};
    send_packet(socket, control_packet(ControlKind::SEGMENT, message), segment->fd(), deadline);
    return {std::move(segment), hello.frontend_index};
  } catch (const AttachError& error) {
    std::string text = error.what();
    RefuseMessage refuse{static_cast<uint32_t>(code), static_cast<uint32_t>(text.size())};
    try {
      send_packet(socket, control_packet(ControlKind::REFUSE, refuse, text), -1, deadline);
    } catch (const AttachError&) {
      // The front end is gone or does not read: the first error is the one to tell.
    }
    throw;
  }
}

}  // namespace tokring

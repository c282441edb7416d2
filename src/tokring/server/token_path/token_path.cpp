#include "token_path.hpp"

#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <stdexcept>
#include <system_error>

#include "tokring/atomics.hpp"

namespace tokring::token_path {

namespace {

uint64_t monotonic_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000U + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace

void Histogram::observe(uint64_t value_ns) {
  if (buckets == nullptr) return;
  auto bound = std::lower_bound(bounds_ns.begin(), bounds_ns.end(), value_ns);
  uint64_t* bucket = buckets + (bound - bounds_ns.begin());
  add_relaxed(bucket, 1);
  add_relaxed(sum_ns, value_ns);
}

TokenPath::TokenPath(TokenTable table, size_t num_stream_slots, Limits limits, Histogram inter_token,
                     Histogram first_token)
    : table_(std::move(table)),
      fragments_(table_),
      limits_(limits),
      inter_token_(std::move(inter_token)),
      first_token_(std::move(first_token)),
      streams_(num_stream_slots),
      epoll_fd_(epoll_create1(EPOLL_CLOEXEC)) {
  if (epoll_fd_ < 0) throw std::system_error(errno, std::system_category());
}

void TokenPath::release() {
  for (auto& stream : streams_) stream.reset();
  connections_.clear();
  held_.clear();
  queue_.clear();
  if (epoll_fd_ >= 0) ::close(epoll_fd_);
  epoll_fd_ = -1;
}

// ---- connections ----

uint32_t TokenPath::connect(bool is_chunked) {
  uint32_t id = next_connection_++;
  connections_[id] = std::make_unique<Connection>(id, is_chunked);
  hold_or_free(*connections_[id]);
  return id;
}

void TokenPath::attach(uint32_t connection, int fd, Events& events) {
  Connection& found = find_connection(connection);
  if (found.is_attached) {
    throw std::invalid_argument("connection " + std::to_string(connection) + " is already attached");
  }
  found.attach(fd);
  hold_or_free(found);
  hands_bytes_back_ |= fd < 0;
  if (!found.is_dead) pump(found, events);
}

void TokenPath::pause(uint32_t connection) {
  Connection& found = find_connection(connection);
  found.is_paused = true;
  hold_or_free(found);
}

void TokenPath::resume(uint32_t connection, Events& events) {
  Connection& found = find_connection(connection);
  if (!found.is_attached) {
    throw std::invalid_argument("connection " + std::to_string(connection) + " is not attached");
  }
  found.is_paused = false;
  hold_or_free(found);
  if (!found.is_dead) pump(found, events);
}

void TokenPath::write(uint32_t connection, std::string_view data, bool end, Events& events) {
  Connection& found = find_connection(connection);
  if (found.is_dead) return;
  render(found);
  if (!data.empty()) found.append(data);
  if (end) found.append_end();
  pump(found, events);
}

std::string TokenPath::disconnect(uint32_t connection) {
  Connection& found = find_connection(connection);
  unwatch(found);
  unqueue(found);
  std::string unsent(found.unsent());
  for (Stream* stream : found.streams) {
    stream->discard();
    stream->connection = nullptr;
  }
  held_.erase(connection);
  connections_.erase(connection);
  return unsent;
}

Connection& TokenPath::find_connection(uint32_t connection) {
  auto found = connections_.find(connection);
  if (found == connections_.end()) {
    throw std::out_of_range("connection " + std::to_string(connection) + " does not exist");
  }
  return *found->second;
}

// ---- streams ----

void TokenPath::open(uint64_t stream_slot, uint32_t generation, StreamOptions options, const uint32_t* connection) {
  if (stream_slot >= streams_.size()) {
    throw std::out_of_range("stream slot " + std::to_string(stream_slot) + " is not below " +
                            std::to_string(streams_.size()));
  }
  if (streams_[stream_slot]) {
    throw std::invalid_argument("stream slot " + std::to_string(stream_slot) + " is already open");
  }
  Connection* found = connection == nullptr ? nullptr : &find_connection(*connection);
  auto stream = std::make_unique<Stream>(table_, fragments_, generation, std::move(options));
  stream->connection = found;
  if (found != nullptr) found->streams.push_back(stream.get());
  streams_[stream_slot] = std::move(stream);
}

Stream& TokenPath::stream(uint64_t stream_slot) {
  if (stream_slot >= streams_.size() || !streams_[stream_slot]) {
    throw std::out_of_range("stream slot " + std::to_string(stream_slot) + " is not open");
  }
  return *streams_[stream_slot];
}

void TokenPath::close(uint64_t stream_slot) {
  Stream& closing = stream(stream_slot);
  if (Connection* connection = closing.connection) {
    render(*connection);  // keeps released text of a stream that is closed before write()
    std::erase(connection->streams, &closing);
  }
  streams_[stream_slot].reset();
}

// ---- driving it ----

const StepFrame& TokenPath::read(const void* address, size_t length) {
  frame_.read(address, length, static_cast<uint32_t>(streams_.size()));
  return frame_;
}

void TokenPath::step(uint64_t budget_us, Events& events) {
  uint64_t now_ns = monotonic_ns();
  for (size_t row = 0, token = 0; row < frame_.num_rows(); token += frame_.num_tokens(row), ++row) {
    feed_row(row, token, now_ns, events);
  }
  for (const FinishRecord& record : frame_.finish()) {
    Stream* stream = live_stream(record.stream_slot, record.slot_generation);
    if (stream == nullptr) continue;
    stream->end(record);
    report(record.stream_slot, *stream, events);
    events.push_back({EventKind::kFinished, record.stream_slot});
    if (stream->connection != nullptr) stream->connection->awaits_write = true;
  }
  pump_queue(budget_us, true, events);
}

void TokenPath::flush(uint64_t budget_us, Events& events) {
  std::array<epoll_event, 64> writable;
  int num_writable = epoll_wait(epoll_fd_, writable.data(), static_cast<int>(writable.size()), 0);
  for (int i = 0; i < num_writable; ++i) {
    auto& connection = *static_cast<Connection*>(writable[static_cast<size_t>(i)].data.ptr);
    unwatch(connection);
    connection.is_blocked = false;
    hold_or_free(connection);
    enqueue(connection);
  }
  pump_queue(budget_us, false, events);
  for (auto& [id, connection] : held_) check_limits(*connection, events);
}

size_t TokenPath::num_stalled() const {
  return static_cast<size_t>(std::count_if(held_.begin(), held_.end(), [](const auto& entry) {
    return !entry.second->is_dead && entry.second->is_attached;
  }));
}

// ---- first pass: rows to text ----

void TokenPath::feed_row(size_t row, size_t first_token, uint64_t now_ns, Events& events) {
  uint32_t slot = frame_.stream_slot(row);
  Stream* stream = live_stream(slot, frame_.slot_generation(row));
  if (stream == nullptr) return;
  size_t end = first_token + frame_.num_tokens(row);
  if (first_token < end && !stream->is_dropping()) observe_output(*stream, now_ns);
  for (size_t token = first_token; token < end; ++token) {
    if (stream->is_dropping()) {
      ++counters_.surplus_tokens;
      continue;
    }
    ++counters_.tokens;
    if (frame_.has_logprobs(token)) {
      LogprobRow logprobs = frame_.logprobs(token);
      stream->feed(frame_.token_id(token), &logprobs);
    } else {
      stream->feed(frame_.token_id(token), nullptr);
    }
    if (stream->stop() != nullptr) {
      report(slot, *stream, events);
      events.push_back({EventKind::kStopped, slot});
      if (stream->connection != nullptr) stream->connection->awaits_write = true;
    }
  }
  report(slot, *stream, events);
}

// The stream that a row speaks of; null (and counted) if that request is over.
Stream* TokenPath::live_stream(uint32_t slot, uint32_t generation) {
  Stream* stream = streams_[slot].get();
  if (stream == nullptr || stream->generation != generation || stream->finish) {
    ++counters_.stale_rows;
    return nullptr;
  }
  return stream;
}

void TokenPath::observe_output(Stream& stream, uint64_t now_ns) {
  uint64_t publish_ns = frame_.publish_ns();
  if (stream.first_output_ns == 0) {
    stream.first_output_ns = now_ns;
    uint64_t arrival_ns = stream.options.arrival_ns;
    if (arrival_ns != 0) first_token_.observe(now_ns > arrival_ns ? now_ns - arrival_ns : 0);
  } else {
    inter_token_.observe(publish_ns > stream.last_publish_ns ? publish_ns - stream.last_publish_ns : 0);
  }
  stream.last_publish_ns = publish_ns;
}

// Queues what a row released: to its connection, as a DELTA event, or nowhere if the client is gone.
void TokenPath::report(uint32_t slot, Stream& stream, Events& events) {
  if (!stream.has_news()) return;
  if (stream.options.mode == StreamMode::kSend) {
    if (stream.connection == nullptr || stream.connection->is_dead) {
      stream.discard();
    } else {
      enqueue(*stream.connection);
    }
  } else if (stream.options.mode == StreamMode::kDelta && !stream.is_delta_reported) {
    stream.is_delta_reported = true;
    events.push_back({EventKind::kDelta, slot});
  }
}

// ---- second pass: text to bytes to clients ----

void TokenPath::enqueue(Connection& connection) {
  if (connection.is_queued) return;
  connection.is_queued = true;
  queue_.push_back(&connection);
}

void TokenPath::unqueue(Connection& connection) {
  if (!connection.is_queued) return;
  connection.is_queued = false;
  std::erase(queue_, &connection);
}

void TokenPath::pump_queue(uint64_t budget_us, bool skip_awaiting, Events& events) {
  uint64_t deadline_ns = monotonic_ns() + budget_us * 1000;
  pumping_.clear();
  pumping_.swap(queue_);
  size_t next = 0;
  for (bool in_time = true; in_time && next < pumping_.size(); ++next) {
    Connection& connection = *pumping_[next];
    if (skip_awaiting && connection.awaits_write) {
      queue_.push_back(&connection);
      continue;
    }
    connection.is_queued = false;
    pump(connection, events);
    in_time = monotonic_ns() <= deadline_ns;
  }
  queue_.insert(queue_.end(), pumping_.begin() + static_cast<ptrdiff_t>(next), pumping_.end());
}

// Renders and sends. Leaves the queue, since what can't go now goes on attach, resume or writability.
void TokenPath::pump(Connection& connection, Events& events) {
  unqueue(connection);
  connection.awaits_write = false;
  if (connection.is_paused || connection.is_blocked) {
    check_limits(connection, events);
    return;
  }
  connection.stalled_since_ns = 0;
  while (!connection.is_blocked && !connection.is_dead) {
    render(connection);
    if (connection.unsent().empty() || !connection.owns_descriptor()) {
      if (connection.is_ending) events.push_back({EventKind::kSent, connection.id});
      connection.is_ending = false;
      return;
    }
    send(connection, events);
  }
}

void TokenPath::render(Connection& connection) {
  for (Stream* stream : connection.streams) {
    if (!stream->has_news()) continue;
    event_.assign("data: ");
    stream->render(event_);
    event_.append("\n\n");
    connection.append(event_);
    ++counters_.chunks;
  }
}

void TokenPath::send(Connection& connection, Events& events) {
  ++counters_.sends;
  ssize_t num_sent = connection.send();
  if (num_sent < 0) {
    drop(connection, EventKind::kDead, events);
    return;
  }
  counters_.sent_bytes += static_cast<uint64_t>(num_sent);
  if (connection.is_blocked) {
    ++counters_.blocked;
    watch(connection);
    hold_or_free(connection);
  }
}

void TokenPath::hold_or_free(Connection& connection) {
  if (connection.is_paused || connection.is_blocked) {
    held_.emplace(connection.id, &connection);
  } else {
    held_.erase(connection.id);
  }
}

void TokenPath::watch(Connection& connection) {
  epoll_event event = {};
  event.events = EPOLLOUT;
  event.data.ptr = &connection;
  connection.is_watched = epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, connection.fd(), &event) == 0;
}

// Before the descriptor is closed: the transport's own keeps the open file alive, and epoll would go on reporting it.
void TokenPath::unwatch(Connection& connection) {
  if (connection.is_watched) epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, connection.fd(), nullptr);
  connection.is_watched = false;
}

void TokenPath::check_limits(Connection& connection, Events& events) {
  if (connection.is_dead) return;
  if (connection.is_over_limit(limits_.max_backlog_bytes, limits_.max_backlog_age_ns, monotonic_ns())) {
    drop(connection, EventKind::kOverLimit, events);
  }
}

void TokenPath::drop(Connection& connection, EventKind kind, Events& events) {
  unwatch(connection);
  unqueue(connection);
  connection.drop();
  events.push_back({kind, connection.id});
}

}  // namespace tokring::token_path

// Zero-copy numpy views of the OUT ring. Each keeps the mapping alive as long as it lives; how many live is the
// reference count of what they all hang on, which is the debug check of release().
#pragma once
#include <memory>

#include "bindings.hpp"

namespace tokring::binding {

class OutViews {
 public:
  OutViews(const std::shared_ptr<Segment>& segment, bool writable)
      : writable_(writable), owner_(new std::shared_ptr<Segment>(segment), [](void* held) noexcept {
          delete static_cast<std::shared_ptr<Segment>*>(held);
        }) {}

  // `count` elements at `offset` bytes into the frame.
  nb::object u8(const std::byte* frame, uint64_t offset, uint64_t count) const {
    return column<uint8_t>(frame, offset, count);
  }
  nb::object u32(const std::byte* frame, uint64_t offset, uint64_t count) const {
    return column<uint32_t>(frame, offset, count);
  }
  nb::object i32(const std::byte* frame, uint64_t offset, uint64_t count) const {
    return column<int32_t>(frame, offset, count);
  }
  nb::object f32(const std::byte* frame, uint64_t offset, uint64_t count) const {
    return column<float>(frame, offset, count);
  }
  // [rows, width] elements at `offset` bytes into the frame.
  template <class T>
  nb::object matrix(const std::byte* frame, uint64_t offset, uint64_t rows, uint64_t width) const {
    const std::array<Py_ssize_t, 2> shape{static_cast<Py_ssize_t>(rows), static_cast<Py_ssize_t>(width)};
    return NumpyApi::get().view(reinterpret_cast<const T*>(frame + offset), shape, owner_, writable_);
  }
  nb::object records(const std::byte* frame, uint64_t offset, uint64_t count, std::string_view structure,
                     size_t record_bytes) const {
    return u8(frame, offset, count * record_bytes).attr("view")(struct_dtype(structure));
  }

  // Arrays that are still referenced somewhere; views of one array count as one with it.
  Py_ssize_t live() const { return Py_REFCNT(owner_.ptr()) - 1; }

  uint64_t released = 0;  // frames before this position are dead

 private:
  template <class T>
  nb::object column(const std::byte* frame, uint64_t offset, uint64_t count) const {
    const std::array<Py_ssize_t, 1> shape{static_cast<Py_ssize_t>(count)};
    return NumpyApi::get().view(reinterpret_cast<const T*>(frame + offset), shape, owner_, writable_);
  }

  bool writable_;
  nb::capsule owner_;  // keeps the mapping; referenced by every array
};

// ([token_index u32[n],] rank i32[n], logprob f32[n], top_id i32[n, width], top_logprob f32[n, width])
inline nb::object logprob_columns(const OutViews& views, const std::byte* frame, const LogprobsView& logprobs,
                                  bool with_token_index) {
  const LogprobOffsets& at = logprobs.at;
  size_t rows = logprobs.count, width = logprobs.width;
  nb::object rank = views.i32(frame, at.rank, rows);
  nb::object logprob = views.f32(frame, at.logprob, rows);
  nb::object top_id = views.matrix<int32_t>(frame, at.top_id, rows, width);
  nb::object top_logprob = views.matrix<float>(frame, at.top_logprob, rows, width);
  if (!with_token_index) return nb::make_tuple(rank, logprob, top_id, top_logprob);
  return nb::make_tuple(views.u32(frame, at.token_index, rows), rank, logprob, top_id, top_logprob);
}

// What both channel classes do alike: counters, close.
inline int fileno_of(const nb::object& socket) { return nb::cast<int>(socket.attr("fileno")()); }

template <class Channel>
void close_channel(Channel& self) {
  if (self.views) self.views->released = ~0ULL;
  self.views.reset();
  self.end->close();
  self.end->Base::count_in(nullptr);
  self.stats.reset();
}

template <class Channel>
nb::object counters_of(const Channel& self) {
  nb::dict values;
  const uint64_t* words = self.end->counters();
  for (size_t i = 0; i < std::size(kChannelNames); ++i) values[text(kChannelNames[i])] = get_relaxed(words + i);
  return values;
}

// Counts in block `peer` of a writable stats page from now on; the channel keeps the page mapped.
template <class Channel>
void count_in(Channel& self, nb::object page, uint32_t peer) {
  self.usable().count_in(reinterpret_cast<uint64_t*>(nb::cast<uintptr_t>(page.attr("channel_address")(peer))));
  self.stats = std::move(page);
}

}  // namespace tokring::binding

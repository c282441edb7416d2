// Zero-copy numpy views of the OUT ring. One array per element type lies over the whole double mapping; a column is a
// slice of it. A slice costs about 0.1 us and keeps the mapping alive as long as it lives; how many live is the base's
// reference count, which is the debug check of release().
#pragma once
#include <memory>

#include "bindings.hpp"

namespace tokring::binding {

class OutViews {
 public:
  OutViews(const std::shared_ptr<Segment>& segment, bool writable) : start_(segment->out().data) {
    size_t bytes = 2 * segment->out().bytes;
    u8_ = base<uint8_t>(segment, bytes, writable);
    u32_ = base<uint32_t>(segment, bytes / 4, writable);
    i32_ = base<int32_t>(segment, bytes / 4, writable);
    f32_ = base<float>(segment, bytes / 4, writable);
  }

  // `count` elements at `offset` bytes into the frame.
  nb::object u8(const std::byte* frame, uint64_t offset, uint64_t count) const {
    return slice(u8_, frame, offset, count, 1);
  }
  nb::object u32(const std::byte* frame, uint64_t offset, uint64_t count) const {
    return slice(u32_, frame, offset, count, 4);
  }
  nb::object i32(const std::byte* frame, uint64_t offset, uint64_t count) const {
    return slice(i32_, frame, offset, count, 4);
  }
  nb::object f32(const std::byte* frame, uint64_t offset, uint64_t count) const {
    return slice(f32_, frame, offset, count, 4);
  }
  nb::object records(const std::byte* frame, uint64_t offset, uint64_t count, std::string_view structure,
                     size_t record_bytes) const {
    return u8(frame, offset, count * record_bytes).attr("view")(struct_dtype(structure));
  }

  // Slices that are still referenced somewhere.
  Py_ssize_t live() const {
    Py_ssize_t references = 0;
    for (const nb::object* base : {&u8_, &u32_, &i32_, &f32_}) references += Py_REFCNT(base->ptr()) - 1;
    return references;
  }

  uint64_t released = 0;  // frames before this position are dead

 private:
  template <class T>
  static nb::object base(const std::shared_ptr<Segment>& segment, size_t count, bool writable) {
    auto* keep = new std::shared_ptr<Segment>(segment);
    nb::capsule owner(keep, [](void* held) noexcept { delete static_cast<std::shared_ptr<Segment>*>(held); });
    auto* data = reinterpret_cast<T*>(segment->out().data);
    if (writable) return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(data, {count}, owner));
    return nb::cast(nb::ndarray<nb::numpy, const T, nb::ndim<1>>(data, {count}, owner));
  }

  nb::object slice(const nb::object& base, const std::byte* frame, uint64_t offset, uint64_t count,
                   uint64_t width) const {
    auto first = static_cast<Py_ssize_t>((static_cast<uint64_t>(frame - start_) + offset) / width);
    PyObject* view = PySequence_GetSlice(base.ptr(), first, first + static_cast<Py_ssize_t>(count));
    if (view == nullptr) throw nb::python_error();
    return nb::steal(view);
  }

  const std::byte* start_;
  nb::object u8_, u32_, i32_, f32_;
};

// ([token_index u32[n],] rank i32[n], logprob f32[n], top_id i32[n, width], top_logprob f32[n, width])
inline nb::object logprob_columns(const OutViews& views, const std::byte* frame, const LogprobsView& logprobs,
                                  bool with_token_index) {
  const LogprobOffsets& at = logprobs.at;
  size_t rows = logprobs.count, width = logprobs.width;
  nb::object rank = views.i32(frame, at.rank, rows);
  nb::object logprob = views.f32(frame, at.logprob, rows);
  nb::object top_id = views.i32(frame, at.top_id, rows * width).attr("reshape")(rows, width);
  nb::object top_logprob = views.f32(frame, at.top_logprob, rows * width).attr("reshape")(rows, width);
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

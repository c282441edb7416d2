// Python classes BlockPool and StepColumns.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "bind.hpp"
#include "block_pool.hpp"
#include "bookkeeping.hpp"
#include "sha256.hpp"

namespace tokring::cpu {
namespace {

template <class T>
using Vector = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

template <class T>
Vector<T> array_of(std::vector<T>&& values) {
  auto* kept = new std::vector<T>(std::move(values));
  return Vector<T>(kept->data(), {kept->size()},
                   nb::capsule(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); }));
}

int64_t id_at(const Input& ids, int64_t index) {
  return holds(ids, Type::i64) ? data<int64_t>(ids)[index] : data<int32_t>(ids)[index];
}

[[noreturn]] void refuse(int64_t block, const char* why) {
  throw nb::value_error(("block " + std::to_string(block) + " " + why).c_str());
}

// Calls `visit` with each block id once all of them were found to be blocks of the pool.
template <class Visit>
void for_each_block(const BlockPool& pool, const Input& blocks, Visit visit) {
  expect(blocks, "blocks", {Type::i64, Type::i32}, {kAny});
  for (int64_t i = 0; i < size(blocks, 0); ++i) {
    const int64_t block = id_at(blocks, i);
    if (block < 0 || block >= pool.num_blocks()) refuse(block, "is not one of the pool's");
  }
  for (int64_t i = 0; i < size(blocks, 0); ++i) visit(id_at(blocks, i));
}

std::optional<Vector<int64_t>> allocate(BlockPool& pool, int64_t count) {
  require(count >= 0, "count must not be negative");
  if (count > pool.num_free()) return std::nullopt;
  std::vector<int64_t> blocks(static_cast<size_t>(count));
  pool.allocate(count, blocks.data());
  return array_of(std::move(blocks));
}

void share(BlockPool& pool, const Input& blocks) {
  for_each_block(pool, blocks, [&](int64_t block) {
    if (pool.references()[block] == 0 && pool.cached()[block] == 0) refuse(block, "is free, without content to share");
  });
  for_each_block(pool, blocks, [&](int64_t block) { pool.share(block); });
}

void release(BlockPool& pool, const Input& blocks) {
  for_each_block(pool, blocks, [&](int64_t block) {
    if (pool.references()[block] == 0) refuse(block, "is released but free already: a block table is wrong");
  });
  // The last of the sequence is the first to be evicted.
  for (int64_t i = size(blocks, 0); i-- > 0;) pool.release(id_at(blocks, i));
}

int64_t num_digests(const nb::bytes& chain) {
  require(chain.size() % sizeof(Digest) == 0, "a chain must be digests of 32 bytes, one after the other");
  return static_cast<int64_t>(chain.size() / sizeof(Digest));
}

Digest digest_at(const nb::bytes& chain, int64_t index) {
  Digest digest;
  std::memcpy(digest.data(), chain.c_str() + index * static_cast<int64_t>(sizeof digest), sizeof digest);
  return digest;
}

Vector<int64_t> find(const BlockPool& pool, const nb::bytes& chain, int64_t max_blocks) {
  std::vector<int64_t> blocks;
  const int64_t stop = std::min(num_digests(chain), max_blocks);
  for (int64_t i = 0; i < stop; ++i) {
    const int64_t block = pool.find(digest_at(chain, i));
    if (block < 0) break;
    blocks.push_back(block);
  }
  return array_of(std::move(blocks));
}

void insert(BlockPool& pool, const nb::bytes& chain, int64_t first, const Input& blocks) {
  expect(blocks, "blocks", {Type::i64, Type::i32}, {kAny});
  require(first >= 0 && first + size(blocks, 0) <= num_digests(chain), "there are more blocks than digests");
  for_each_block(pool, blocks, [&](int64_t block) {
    if (pool.references()[block] == 0) refuse(block, "is free: nobody can have computed it");
  });
  for (int64_t i = 0; i < size(blocks, 0); ++i) pool.insert(digest_at(chain, first + i), id_at(blocks, i));
}

void forget(BlockPool& pool, const Input& blocks) {
  for_each_block(pool, blocks, [&](int64_t block) {
    if (pool.references()[block] == 0) refuse(block, "is free");
  });
  for_each_block(pool, blocks, [&](int64_t block) { pool.forget(block); });
}

// The values of a one-dimensional, contiguous array of four bytes each. Taking a read-only array as an Input is slower.
class Words {
 public:
  explicit Words(const nb::object& array) {
    if (PyObject_GetBuffer(array.ptr(), &view_, PyBUF_ND) != 0) nb::raise_python_error();
    if (view_.ndim == 1 && view_.itemsize == 4) return;
    PyBuffer_Release(&view_);
    throw nb::value_error("an array must have one dimension and values of four bytes");
  }
  Words(const Words&) = delete;
  Words& operator=(const Words&) = delete;
  ~Words() { PyBuffer_Release(&view_); }

  const uint8_t* bytes() const { return static_cast<const uint8_t*>(view_.buf); }
  int64_t size() const { return view_.shape[0]; }

 private:
  Py_buffer view_;
};

nb::bytes chain_of(const nb::bytes& chain, const nb::bytes& root, const nb::object& token_ids, int64_t num_tokens,
                   int64_t block_size, bool use_instructions) {
  const Words words(token_ids);
  require(block_size > 0 && root.size() == sizeof(Digest), "root must be a digest, block_size above 0");
  require(num_tokens <= words.size(), "there are fewer token_ids than num_tokens");
  const int64_t first = num_digests(chain), stop = num_tokens / block_size;
  if (first >= stop) return chain;
  std::vector<Digest> digests(static_cast<size_t>(stop));
  std::memcpy(digests.data(), chain.c_str(), chain.size());
  sha256_chain(first > 0 ? digests[static_cast<size_t>(first - 1)] : digest_at(root, 0),
               words.bytes() + 4 * first * block_size, stop - first, 4 * block_size, digests.data() + first,
               use_instructions);
  return nb::bytes(digests.data(), digests.size() * sizeof(Digest));
}

// Keeps the arrays that it borrows alive.
class RowStore {
 public:
  RowStore(std::vector<Output> matrices, std::vector<int64_t> record_offsets)
      : borrowed_(std::move(matrices)), record_offsets_(std::move(record_offsets)) {
    require(!borrowed_.empty(), "there must be a matrix");
    num_rows_ = size(borrowed_[0], 1);
    size_t num_columns = 0;
    for (const Output& matrix : borrowed_) {
      expect(matrix, "a matrix", {Type::i64, Type::i32, Type::f32}, {kAny, num_rows_});
      num_columns += static_cast<size_t>(size(matrix, 0));
    }
    require(record_offsets_.size() == num_columns, "record_offsets must hold one offset for each column");
    num_values_ = static_cast<size_t>(std::ranges::count_if(record_offsets_, [](int64_t at) { return at < 0; }));
    size_t column = 0;
    for (const Output& matrix : borrowed_) {
      for (int64_t i = 0; i < size(matrix, 0); ++i) {
        const int64_t offset = record_offsets_[column++];
        if (offset >= 0) record_bytes_ = std::max(record_bytes_, static_cast<size_t>(offset) + width(matrix));
      }
    }
  }

  void put(int64_t row, const nb::bytes& record, const nb::tuple& values) {
    check(row);
    require(values.size() == num_values_, "values must hold one value for each column that the record does not have");
    require(record.size() >= record_bytes_, "the record is too short");
    size_t column = 0, next = 0;
    for (const Output& matrix : borrowed_) {
      const size_t bytes = width(matrix);
      for (int64_t i = 0; i < size(matrix, 0); ++i) {
        const int64_t index = i * num_rows_ + row, offset = record_offsets_[column++];
        if (offset < 0) {
          set(matrix, index, values[next++]);
          continue;
        }
        std::memcpy(data<char>(matrix) + static_cast<size_t>(index) * bytes, record.c_str() + offset, bytes);
      }
    }
  }

  void move(int64_t source, int64_t target) {
    check(source);
    check(target);
    const int64_t rows_back = source - target;
    for_each_value(target, [&](char* value, size_t bytes) {
      std::memcpy(value, value + rows_back * static_cast<int64_t>(bytes), bytes);
    });
  }

 private:
  static void set(const Output& matrix, int64_t index, nb::handle value) {
    if (holds(matrix, Type::f32)) {
      const double number = PyFloat_AsDouble(value.ptr());
      if (number == -1.0 && PyErr_Occurred()) nb::raise_python_error();
      data<float>(matrix)[index] = static_cast<float>(number);
      return;
    }
    const long long number = PyLong_AsLongLong(value.ptr());
    if (number == -1 && PyErr_Occurred()) nb::raise_python_error();
    if (holds(matrix, Type::i64)) {
      data<int64_t>(matrix)[index] = number;
    } else {
      if (number < INT32_MIN || number > INT32_MAX) {
        throw nb::value_error((std::to_string(number) + " does not fit 32 bits").c_str());
      }
      data<int32_t>(matrix)[index] = static_cast<int32_t>(number);
    }
  }

  static size_t width(const Output& matrix) { return matrix.dtype().bits / 8; }

  void check(int64_t row) const { require(row >= 0 && row < num_rows_, "there is no such row"); }

  template <class Visit>
  void for_each_value(int64_t row, Visit visit) {
    for (const Output& matrix : borrowed_) {
      const size_t bytes = width(matrix);
      char* value = data<char>(matrix) + static_cast<size_t>(row) * bytes;
      for (int64_t i = 0; i < size(matrix, 0); ++i, value += static_cast<size_t>(num_rows_) * bytes)
        visit(value, bytes);
    }
  }

  std::vector<Output> borrowed_;
  std::vector<int64_t> record_offsets_;  // by column; -1: not in the record
  int64_t num_rows_;
  size_t num_values_;
  size_t record_bytes_ = 0;  // that are read
};

// Keeps the arrays that it borrows alive.
class BoundColumns {
 public:
  BoundColumns(const Output& num_tokens, const Output& num_computed, const Output& num_scheduled,
               const Output& last_token, const Output& max_total, const Output& token_base,
               const Output& first_token_ns, const Output& token_ids, const Output& stop_ids, const Output& block_ids,
               const Output& num_blocks, int64_t block_size, const Output& step_rows, const Output& step_tokens,
               const Output& slot_mapping)
      : borrowed_{num_tokens, num_computed, num_scheduled, last_token, max_total, token_base,  first_token_ns,
                  token_ids,  stop_ids,     block_ids,     num_blocks, step_rows, step_tokens, slot_mapping} {
    const int64_t max_rows = size(num_tokens, 0);
    for (const auto& [array, name] : {std::pair(&num_tokens, "num_tokens"),
                                      {&num_computed, "num_computed"},
                                      {&num_scheduled, "num_scheduled"},
                                      {&last_token, "last_token"},
                                      {&max_total, "max_total"},
                                      {&num_blocks, "num_blocks"}}) {
      expect(*array, name, {Type::i32}, {max_rows});
    }
    expect(token_base, "token_base", {Type::i64}, {max_rows});
    expect(first_token_ns, "first_token_ns", {Type::i64}, {max_rows});
    expect(token_ids, "token_ids", {Type::i32}, {kAny});
    expect(stop_ids, "stop_ids", {Type::i32}, {kAny, max_rows});
    expect(block_ids, "block_ids", {Type::i32}, {max_rows, kAny});
    expect(step_rows, "step_rows", {Type::i32}, {7, max_rows + 1});
    expect(step_tokens, "step_tokens", {Type::i32}, {2, kAny});
    const int64_t max_tokens = size(step_tokens, 1);
    expect(slot_mapping, "slot_mapping", {Type::i64}, {max_tokens});
    require(block_size > 0 && (block_size & (block_size - 1)) == 0, "block_size must be a power of two");
    columns_ = {max_rows,
                size(block_ids, 1),
                __builtin_ctz(static_cast<unsigned>(block_size)),
                data<int32_t>(num_tokens),
                data<int32_t>(num_computed),
                data<int32_t>(num_scheduled),
                data<int32_t>(last_token),
                data<int32_t>(max_total),
                data<int64_t>(token_base),
                data<int64_t>(first_token_ns),
                data<int32_t>(token_ids),
                size(token_ids, 0),
                data<int32_t>(stop_ids),
                data<int32_t>(block_ids),
                data<int32_t>(num_blocks)};
    auto* by_row = data<int32_t>(step_rows);
    const int64_t width = max_rows + 1;
    step_ = {max_tokens,
             by_row,
             by_row + width,
             by_row + 2 * width,
             by_row + 3 * width,
             data<int32_t>(step_tokens),
             data<int32_t>(step_tokens) + max_tokens,
             data<int64_t>(slot_mapping),
             by_row + 4 * width,
             by_row + 5 * width,
             by_row + 6 * width};
    num_stop_columns_ = size(stop_ids, 0);
  }

  std::tuple<int64_t, int64_t, int64_t> build(int64_t num_rows) {
    check_rows(num_rows);
    const StepSize built = build_step(columns_, num_rows, step_);
    built_ = {0, 0, 0};
    require(built.num_requests != -1, "more tokens are scheduled than a step has room for");
    require(built.num_requests != -2, "a row has tokens scheduled that it does not have, or no block for");
    built_ = built;
    return {built.num_requests, built.num_tokens, built.num_samples};
  }

  Vector<int64_t> advance() {
    count_as_computed();
    append_placeholders(columns_, step_, lengths_.data(), static_cast<int64_t>(lengths_.size()));
    return array_of(std::vector<int64_t>(lengths_));
  }

  std::pair<int64_t, std::vector<int32_t>> plan(int64_t num_rows, const std::optional<Input>& held) const {
    check_rows(num_rows);
    if (held) expect(*held, "held", {Type::boolean}, {num_rows});
    std::vector<int32_t> prefilling(static_cast<size_t>(num_rows));
    const Plan plan = plan_decodes(columns_, num_rows, held ? data<bool>(*held) : nullptr, prefilling.data());
    prefilling.resize(static_cast<size_t>(plan.num_prefilling));
    return {plan.num_decoding, std::move(prefilling)};
  }

  bool grow(int64_t num_rows, BlockPool& pool) const {
    check_rows(num_rows);
    std::vector<int32_t> scratch(static_cast<size_t>(num_rows));
    return append_blocks(columns_, num_rows, pool, scratch.data());
  }

  std::pair<std::vector<int32_t>, int64_t> resolve(const Input& rows, const std::optional<Input>& lengths,
                                                   const Input& token_ids, int64_t num_stop_columns, int64_t now_ns) {
    expect(rows, "rows", {Type::i32}, {kAny});
    const int64_t count = size(rows, 0);
    expect(token_ids, "token_ids", {Type::i32}, {count});
    require(num_stop_columns >= 0 && num_stop_columns <= num_stop_columns_, "there are fewer stop id columns");
    const int64_t* lengths_before;
    if (lengths) {
      expect(*lengths, "lengths", {Type::i64}, {count});
      lengths_before = data<int64_t>(*lengths);
    } else {
      require(count == built_.num_samples, "rows must be those that sample in the step built last");
      count_as_computed();
      lengths_before = lengths_.data();
    }
    for (int64_t i = 0; i < count; ++i) {
      const int32_t row = data<int32_t>(rows)[i];
      if (row < 0 || row >= columns_.max_rows) throw nb::value_error((numbered("rows", i) + " is no row").c_str());
      const int64_t length = lengths_before[i];
      if (length < 0 || length >= columns_.num_tokens[row]) {
        throw nb::value_error((numbered("rows", i) + " has no such token").c_str());
      }
    }
    std::vector<int32_t> ended(static_cast<size_t>(count));
    const Resolved resolved = resolve_tokens(columns_, data<int32_t>(rows), lengths_before, data<int32_t>(token_ids),
                                             count, num_stop_columns, now_ns, ended.data());
    ended.resize(static_cast<size_t>(resolved.num_ended));
    return {std::move(ended), resolved.num_silent};
  }

  int64_t admit(int64_t row, BlockPool& pool, const nb::bytes& chain, int64_t max_hits, int64_t num_blocks,
                int64_t spare) {
    check_row(row);
    require(columns_.num_blocks[row] == 0, "a row that has blocks can't be given others");
    require(0 <= max_hits && max_hits <= num_blocks && num_blocks <= columns_.max_blocks && spare >= 0,
            "max_hits must be from 0 to num_blocks, and these fit the table");
    int32_t* blocks = columns_.block_ids + row * columns_.max_blocks;
    const int64_t stop = std::min(num_digests(chain), max_hits);
    int64_t num_hits = 0;
    for (; num_hits < stop; ++num_hits) {
      const int64_t block = pool.find(digest_at(chain, num_hits));
      if (block < 0) break;
      pool.share(block);
      blocks[num_hits] = static_cast<int32_t>(block);
    }
    const int64_t num_new = num_blocks - num_hits;
    if (num_new + spare > pool.num_free()) {
      while (num_hits > 0) pool.release(blocks[--num_hits]);
      return -1;
    }
    pool.allocate(num_new, blocks + num_hits);
    columns_.num_blocks[row] = static_cast<int32_t>(num_blocks);
    return num_hits;
  }

  void insert(int64_t row, BlockPool& pool, const nb::bytes& chain, int64_t first, int64_t stop) const {
    check_row(row);
    require(0 <= first && stop <= num_digests(chain) && stop <= columns_.num_blocks[row],
            "there are fewer digests or blocks");
    const int32_t* blocks = blocks_in_use(row, first, stop, pool);
    for (int64_t i = first; i < stop; ++i) pool.insert(digest_at(chain, i), blocks[i]);
  }

  void leave(int64_t row, int64_t last, BlockPool& pool) {
    check_row(row);
    check_row(last);
    int32_t* blocks = blocks_in_use(row, 0, columns_.num_blocks[row], pool);
    // The last of the sequence is the first to be evicted.
    for (int32_t i = std::exchange(columns_.num_blocks[row], 0); i-- > 0;) pool.release(blocks[i]);
    if (row == last) return;
    const int32_t count = std::exchange(columns_.num_blocks[last], 0);
    std::copy_n(columns_.block_ids + last * columns_.max_blocks, count, blocks);
    columns_.num_blocks[row] = count;
  }

  Vector<int32_t> draft(int64_t num_rows, const Input& eligible, std::tuple<int32_t, int32_t, int32_t> rules,
                        int64_t budget, BlockPool& pool) const {
    check_rows(num_rows);
    expect(eligible, "eligible", {Type::i32}, {num_rows});
    const auto [min_ngram, max_ngram, max_tokens] = rules;
    require(1 <= min_ngram && min_ngram <= max_ngram, "min_ngram must be from 1 to max_ngram");
    std::vector<int32_t> num_drafts(static_cast<size_t>(num_rows));
    draft_tokens(columns_, num_rows, data<int32_t>(eligible), {min_ngram, max_ngram, max_tokens}, budget, pool,
                 num_drafts.data());
    return array_of(std::move(num_drafts));
  }

  Vector<int32_t> verify(const Input& rows, const Input& num_drafts, const Input& following, int64_t num_stop_columns,
                         const Output& token_ids) const {
    expect(rows, "rows", {Type::i32}, {kAny});
    const int64_t count = size(rows, 0);
    expect(num_drafts, "num_drafts", {Type::i32}, {count});
    expect(following, "following", {Type::i32}, {kAny});
    expect(token_ids, "token_ids", {Type::i32}, {count});
    require(num_stop_columns >= 0 && num_stop_columns <= num_stop_columns_, "there are fewer stop id columns");
    int64_t total = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int32_t row = data<int32_t>(rows)[i], drafts = data<int32_t>(num_drafts)[i];
      require(row >= 0 && row < columns_.max_rows && drafts >= 0, "a row or its number of drafts is out of range");
      require(columns_.token_base[row] + columns_.num_tokens[row] + drafts <= columns_.token_ids_size,
              "a row has no room for so many drafts");
      total += drafts;
    }
    require(total == size(following, 0), "following must hold one token for each draft");
    std::vector<int32_t> accepted(static_cast<size_t>(count));
    verify_drafts(columns_, data<int32_t>(rows), data<int32_t>(num_drafts), count, data<int32_t>(following),
                  num_stop_columns, data<int32_t>(token_ids), accepted.data());
    return array_of(std::move(accepted));
  }

 private:
  // Of the step built last; fills lengths_.
  void count_as_computed() {
    for (int64_t i = 0; i < built_.num_samples; ++i) {
      const int32_t row = step_.rows[step_.sample_index[i]];
      const int64_t end = columns_.token_base[row] + columns_.num_tokens[row];
      if (end < 0 || end >= columns_.token_ids_size) {
        throw nb::value_error((numbered("row ", row) + " has no room for another token").c_str());
      }
    }
    lengths_.resize(static_cast<size_t>(built_.num_samples));
    advance_rows(columns_, step_, std::exchange(built_, {0, 0, 0}), lengths_.data());
  }

  // The blocks of a row, once those of [first, stop) were found to be in use.
  int32_t* blocks_in_use(int64_t row, int64_t first, int64_t stop, BlockPool& pool) const {
    int32_t* blocks = columns_.block_ids + row * columns_.max_blocks;
    for (int64_t i = first; i < stop; ++i) {
      if (blocks[i] < 0 || blocks[i] >= pool.num_blocks()) refuse(blocks[i], "is not one of the pool's");
      if (pool.references()[static_cast<size_t>(blocks[i])] == 0) {
        refuse(blocks[i], "is free, but a row has it: a block table is wrong");
      }
    }
    return blocks;
  }

  void check_row(int64_t row) const { require(row >= 0 && row < columns_.max_rows, "there is no such row"); }

  void check_rows(int64_t num_rows) const {
    require(num_rows >= 0 && num_rows <= columns_.max_rows, "num_rows exceeds the columns");
  }

  std::vector<Output> borrowed_;
  StepColumns columns_;
  StepArrays step_;
  StepSize built_{0, 0, 0};       // what is in step_, until it is counted as computed
  std::vector<int64_t> lengths_;  // of the rows that sampled in the step counted last, before it
  int64_t num_stop_columns_;
};

}  // namespace

void bind_bookkeeping(nb::module_& module) {
  using nb::arg;
  nb::class_<BlockPool>(module, "BlockPool")
      .def(nb::init<int64_t>(), arg("num_blocks"))
      .def_prop_ro("num_blocks", &BlockPool::num_blocks)
      .def_prop_ro("num_free", &BlockPool::num_free)
      .def_prop_ro(
          "references",
          [](BlockPool& pool) { return Vector<int32_t>(pool.references().data(), {pool.references().size()}); },
          nb::rv_policy::reference_internal)
      .def_prop_ro(
          "cached",
          [](BlockPool& pool) {
            return Vector<bool>(reinterpret_cast<bool*>(pool.cached().data()), {pool.cached().size()});
          },
          nb::rv_policy::reference_internal)
      .def("allocate", allocate, arg("count"))
      .def("share", share, arg("blocks").noconvert())
      .def("release", release, arg("blocks").noconvert())
      .def("find", find, arg("chain"), arg("max_blocks"))
      .def("insert", insert, arg("chain"), arg("first"), arg("blocks").noconvert())
      .def("forget", forget, arg("blocks").noconvert())
      .def("forget_all", &BlockPool::forget_all)
      .def("log_events", &BlockPool::log_events)
      .def("take_events",
           [](BlockPool& pool) {
             const std::vector<uint8_t> events = pool.take_events();
             return nb::bytes(events.data(), events.size());
           })
      .def("index_is_sound", &BlockPool::index_is_sound)
      .def("stack", [](const BlockPool& pool) { return array_of(std::vector<int32_t>(pool.stack())); })
      .def("queue", [](const BlockPool& pool) { return array_of(pool.queue()); });
  nb::class_<RowStore>(module, "RowStore")
      .def(nb::init<std::vector<Output>, std::vector<int64_t>>(), arg("matrices"), arg("record_offsets"))
      .def("put", &RowStore::put, arg("row"), arg("record"), arg("values"))
      .def("move", &RowStore::move, arg("source"), arg("target"));
  nb::class_<BoundColumns>(module, "StepColumns")
      .def(nb::init<const Output&, const Output&, const Output&, const Output&, const Output&, const Output&,
                    const Output&, const Output&, const Output&, const Output&, const Output&, int64_t, const Output&,
                    const Output&, const Output&>(),
           nb::kw_only(), arg("num_tokens").noconvert(), arg("num_computed").noconvert(),
           arg("num_scheduled").noconvert(), arg("last_token").noconvert(), arg("max_total").noconvert(),
           arg("token_base").noconvert(), arg("first_token_ns").noconvert(), arg("token_ids").noconvert(),
           arg("stop_ids").noconvert(), arg("block_ids").noconvert(), arg("num_blocks").noconvert(), arg("block_size"),
           arg("step_rows").noconvert(), arg("step_tokens").noconvert(), arg("slot_mapping").noconvert())
      .def("build", &BoundColumns::build, arg("num_rows"))
      .def("plan", &BoundColumns::plan, arg("num_rows"), arg("held").noconvert().none())
      .def("grow", &BoundColumns::grow, arg("num_rows"), arg("pool"))
      .def("advance", &BoundColumns::advance)
      .def("resolve", &BoundColumns::resolve, arg("rows").noconvert(), arg("lengths").noconvert().none(),
           arg("token_ids").noconvert(), arg("num_stop_columns"), arg("now_ns"))
      .def("admit", &BoundColumns::admit, arg("row"), arg("pool"), arg("chain"), arg("max_hits"), arg("num_blocks"),
           arg("spare"))
      .def("insert", &BoundColumns::insert, arg("row"), arg("pool"), arg("chain"), arg("first"), arg("stop"))
      .def("leave", &BoundColumns::leave, arg("row"), arg("last"), arg("pool"))
      .def("draft", &BoundColumns::draft, arg("num_rows"), arg("eligible").noconvert(), arg("rules"), arg("budget"),
           arg("pool"))
      .def("verify", &BoundColumns::verify, arg("rows").noconvert(), arg("num_drafts").noconvert(),
           arg("following").noconvert(), arg("num_stop_columns"), arg("token_ids").noconvert());
  module.def("sha256_chain", chain_of, arg("chain"), arg("root"), arg("token_ids"), arg("num_tokens"),
             arg("block_size"), arg("use_instructions") = true);
}

}  // namespace tokring::cpu

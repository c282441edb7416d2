// Python module tokring_kernels._cpu. Arguments are checked in the bind_*.cpp files; long calls release the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

#include "arrays.hpp"
#include "bind.hpp"
#include "dispatch.hpp"
#include "kernel_table.hpp"
#include "thread_pool.hpp"

namespace tokring::cpu {
namespace {

std::vector<std::string> supported_levels() {
  std::vector<std::string> names;
  for (Level level : {Level::generic, Level::avx2, Level::avx512, Level::avx512_vnni, Level::amx}) {
    if (level == Level::amx ? features().amx : level <= best_level()) names.emplace_back(level_name(level));
  }
  return names;
}

void set_threads(int num_threads, int worker_nice, int spin_us) {
  require(num_threads >= 1, "num_threads must be at least 1");
  nb::gil_scoped_release released;
  ThreadPool::instance().set_num_threads(num_threads, worker_nice);
  ThreadPool::instance().set_spin_us(spin_us);
}

// Reads all words once, in the pool's threads: what memory can deliver to kernels.
int64_t xor_words(const Input& words) {
  expect(words, "words", {Type::i64}, {kAny}, 1);
  const int64_t* from = data<int64_t>(words);
  const int64_t count = size(words, 0);
  constexpr int64_t kWordsPerTask = int64_t{1} << 17;
  nb::gil_scoped_release released;
  std::atomic<int64_t> result{0};
  ThreadPool::instance().run((count + kWordsPerTask - 1) / kWordsPerTask, [&](int64_t task) {
    int64_t part = 0;
    for (int64_t i = task * kWordsPerTask; i < std::min(count, (task + 1) * kWordsPerTask); ++i) part ^= from[i];
    result.fetch_xor(part, std::memory_order_relaxed);
  });
  return result.load(std::memory_order_relaxed);
}

}  // namespace
}  // namespace tokring::cpu

NB_MODULE(_cpu, module) {
  using namespace tokring::cpu;
  using nb::arg;
  module.attr("BLOCK_SIZE") = kBlockTokens;
  module.attr("TILE_TOKENS") = kTileTokens;
  module.def("supported_levels", supported_levels);
  module.def("level", [] { return std::string(level_name(active_level())); });
  module.def(
      "set_level", [](const std::string& name) { set_level(name); }, arg("name"));
  module.def("set_num_threads", set_threads, arg("num_threads"), arg("worker_nice"), arg("spin_us"));
  module.def("num_threads", [] { return ThreadPool::instance().num_threads(); });
  module.def("xor_words", xor_words, arg("words").noconvert());
  bind_attention(module);
  bind_bookkeeping(module);
  bind_elementwise(module);
  bind_linear(module);
  bind_decoder(module);
  bind_sampling(module);
}

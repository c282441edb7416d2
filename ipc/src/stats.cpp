// Stats pages and the heartbeat for Python.
#include <nanobind/stl/vector.h>

#include <unordered_map>
#include <vector>

#include "bindings.hpp"
#include "tokring/heartbeat.hpp"
#include "tokring/stats_page.hpp"

namespace tokring::binding {

namespace {

using Page = std::shared_ptr<StatsMap>;

// Rows by name; a stat may be named or given as its row number (StatsMap.index), which saves the look-up.
const StatRow& row_of(nb::handle stat) {
  static const auto* by_name = [] {
    auto* map = new std::unordered_map<std::string_view, const StatRow*>;
    for (const StatRow& row : kStatsTable) map->emplace(row.name, &row);
    return map;
  }();
  if (PyLong_Check(stat.ptr())) {
    auto number = nb::cast<size_t>(stat);
    if (number >= kNumStats) throw nb::index_error("no such stat");
    return kStatsTable[number];
  }
  Py_ssize_t length = 0;
  const char* name = PyUnicode_AsUTF8AndSize(stat.ptr(), &length);
  if (name == nullptr) throw nb::python_error();
  auto found = by_name->find(std::string_view(name, static_cast<size_t>(length)));
  if (found == by_name->end()) throw nb::key_error(name);
  return *found->second;
}

const StatRow& scalar_row(nb::handle stat, uint32_t instance) {
  const StatRow& row = row_of(stat);
  if (row.kind == 'h') throw nb::type_error((std::string(row.name) + " is a histogram: observe() it").c_str());
  if (instance >= row.instances) throw nb::index_error(std::string(row.name).c_str());
  return row;
}

const StatRow& histogram_row(nb::handle stat, uint32_t instance) {
  const StatRow& row = row_of(stat);
  if (row.kind != 'h') throw nb::type_error((std::string(row.name) + " is no histogram: add() or set() it").c_str());
  if (instance >= row.instances) throw nb::index_error(std::string(row.name).c_str());
  return row;
}

void add(StatsMap& page, nb::handle stat, uint64_t amount, uint32_t instance) {
  add_relaxed(page.writable_words() + scalar_row(stat, instance).first_word + instance, amount);
}

void set(StatsMap& page, nb::handle stat, uint64_t value, uint32_t instance) {
  set_relaxed(page.writable_words() + scalar_row(stat, instance).first_word + instance, value);
}

uint64_t get(const StatsMap& page, nb::handle stat, uint32_t instance) {
  return get_relaxed(page.words() + scalar_row(stat, instance).first_word + instance);
}

void observe(StatsMap& page, nb::handle stat, double value, uint32_t instance) {
  page.observe(histogram_row(stat, instance), instance, value);
}

void observe_many(StatsMap& page, nb::handle stat, const Column<double>& values, uint32_t instance) {
  const StatRow& row = histogram_row(stat, instance);
  for (double value : span_of<double>(values)) page.observe(row, instance, value);
}

// The table's words as a numpy array: writable for the page's own process. Plain aligned u64 stores: single writer.
nb::object counters(Page page) {
  uint64_t* words = page->words();
  bool writable = page->writable();
  nb::capsule owner(new Page(std::move(page)), [](void* held) noexcept { delete static_cast<Page*>(held); });
  if (writable) return nb::cast(nb::ndarray<nb::numpy, uint64_t, nb::ndim<1>>(words, {kNumTableWords}, owner));
  return nb::cast(nb::ndarray<nb::numpy, const uint64_t, nb::ndim<1>>(words, {kNumTableWords}, owner));
}

// Sums every word of the table over the pages (wrapping never happens: counters are below 2^63 in practice).
nb::object sum_pages(const std::vector<Page>& pages) {
  auto* sums = new std::vector<uint64_t>(kNumTableWords, 0);
  nb::capsule owner(sums, [](void* held) noexcept { delete static_cast<std::vector<uint64_t>*>(held); });
  for (const Page& page : pages) {
    const uint64_t* words = page->words();
    for (uint32_t i = 0; i < kNumTableWords; ++i) (*sums)[i] += get_relaxed(words + i);
  }
  return nb::cast(nb::ndarray<nb::numpy, uint64_t, nb::ndim<1>>(sums->data(), {kNumTableWords}, owner));
}

uint64_t* channel_block(const StatsMap& page, uint32_t peer) {
  if (peer >= kMaxPeers)
    throw nb::index_error(("peer " + std::to_string(peer) + ": a page has " + std::to_string(kMaxPeers)).c_str());
  return page.channel(peer);
}

// Address of the block in which a channel counts (see count_in); only for the page's own process.
uintptr_t channel_address(const StatsMap& page, uint32_t peer) {
  page.writable_words();
  return reinterpret_cast<uintptr_t>(channel_block(page, peer));
}

nb::dict channel(const StatsMap& page, uint32_t peer) {
  const uint64_t* words = channel_block(page, peer);
  nb::dict values;
  for (size_t i = 0; i < std::size(kChannelNames); ++i) values[text(kChannelNames[i])] = get_relaxed(words + i);
  values["hop_sum_ns"] = get_relaxed(words + kWord_hop_sum);
  nb::list buckets;
  for (uint32_t i = 0; i < kHopBuckets; ++i) buckets.append(get_relaxed(words + kWord_hop_sum + 1 + i));
  values["hop_buckets"] = buckets;
  return values;
}

nb::tuple bounds_of(const double* bounds, uint32_t count) {
  nb::list values;
  for (uint32_t i = 0; i < count; ++i) values.append(bounds[i]);
  return nb::tuple(values);
}

nb::list table_rows() {
  nb::list rows;
  for (const StatRow& row : kStatsTable) {
    rows.append(nb::make_tuple(text(row.name), std::string(1, row.kind), row.first_word, row.instances, row.words,
                               row.scale, bounds_of(row.bounds, row.num_bounds)));
  }
  return rows;
}

// Seconds since the page's last heartbeat, and since its running step began (-1: no step runs).
nb::tuple ages(const StatsMap& page) {
  uint64_t now = now_ns();
  auto since = [now](uint64_t then) { return then < now ? static_cast<double>(now - then) * 1e-9 : 0.0; };
  uint64_t step_started = page.get(StatIndex::step_started_ns);
  return nb::make_tuple(since(page.get(StatIndex::heartbeat_ns)), step_started == 0 ? -1.0 : since(step_started));
}

// A watched page as Python holds it: keeps its heartbeat alive.
struct Watch {
  std::shared_ptr<Heartbeat> heartbeat;
  const Heartbeat::Watched* entry;
};

Watch watch(std::shared_ptr<Heartbeat> heartbeat, Page page) {
  const Heartbeat::Watched* entry = heartbeat->watch(std::move(page));
  return {std::move(heartbeat), entry};
}

void bind_heartbeat(nb::module_& module) {
  nb::class_<Watch>(module, "Watch")
      .def_prop_ro("silence_s", [](const Watch& w) { return w.heartbeat->seconds(&w.entry->silent_ticks); })
      .def_prop_ro("step_age_s", [](const Watch& w) { return w.heartbeat->seconds(&w.entry->step_ticks); });
  nb::class_<Heartbeat>(module, "Heartbeat")
      .def(nb::init<Page, double>(), "page"_a, nb::kw_only(), "interval_s"_a = 1.0)
      .def("start", &Heartbeat::start)
      .def("stop", &Heartbeat::stop, nb::call_guard<nb::gil_scoped_release>())
      .def("watch", &watch, "page"_a)
      .def("__enter__",
           [](std::shared_ptr<Heartbeat> self) {
             self->start();
             return self;
           })
      .def("__exit__", [](Heartbeat& self, nb::args) {
        nb::gil_scoped_release unlocked;
        self.stop();
      });
}

}  // namespace

void bind_stats(nb::module_& module) {
  module.attr("STATS_VERSION") = kStatsVersion;
  module.attr("STATS_HASH") = kStatsHash;
  module.attr("STATS_PAGE_BYTES") = kStatsPageBytes;
  module.attr("MAX_PEERS") = kMaxPeers;
  module.attr("MAX_HANDLERS") = kMaxHandlers;
  module.attr("MAX_HTTP_METHODS") = kMaxHttpMethods;
  module.attr("HOP_BOUNDS") = bounds_of(kBounds_hop_seconds, kHopBuckets - 1);
  module.def("stats_table", &table_rows);
  module.def("sum_pages", &sum_pages, "pages"_a);
  nb::class_<StatsMap>(module, "StatsMap")
      .def(nb::init<int, uint32_t, uint32_t, bool>(), "fd"_a, "role"_a, "index"_a, "writable"_a)
      .def_prop_ro("role", [](const StatsMap& p) { return p.header().role; })
      .def_prop_ro("index", [](const StatsMap& p) { return p.header().index; })
      .def_prop_ro("pid", [](const StatsMap& p) { return p.header().pid; })
      .def_prop_ro("owner_is_running",
                   [](const StatsMap& p) {
                     StatsHeader header = p.header();
                     uint64_t started = process_start_time(header.pid);
                     return started != 0 && started == header.process_start_time;
                   })
      .def_prop_ro("writable", &StatsMap::writable)
      .def_prop_ro("counters", &counters)
      .def_prop_ro("ages", &ages)
      .def("add", &add, "stat"_a, "amount"_a = 1, "instance"_a = 0)
      .def("set", &set, "stat"_a, "value"_a, "instance"_a = 0)
      .def("get", &get, "stat"_a, "instance"_a = 0)
      .def("observe", &observe, "stat"_a, "value"_a, "instance"_a = 0)
      .def("observe_many", &observe_many, "stat"_a, "values"_a, "instance"_a = 0)
      .def("channel", &channel, "peer"_a)
      .def("channel_address", &channel_address, "peer"_a);
  bind_heartbeat(module);
}

}  // namespace tokring::binding

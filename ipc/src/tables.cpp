// The compiled tables as Python data: fields, enumerations, constants; numpy dtypes built from them.
#include <map>

#include "bindings.hpp"
#include "tokring/field_table.hpp"

namespace tokring::binding {

namespace {

std::string numpy_format(const FieldRow& row) {
  std::string format = std::string("<") + row.kind + std::to_string(row.width);
  return row.count == 1 ? format : "(" + std::to_string(row.count) + ",)" + format;
}

nb::object build_dtype(const StructRow& structure) {
  nb::list names, formats, offsets;
  for (const FieldRow& row : kFieldTable) {
    if (row.structure != structure.name) continue;
    names.append(text(row.name));
    formats.append(numpy_format(row));
    offsets.append(row.offset);
  }
  nb::dict description;
  description["names"] = names;
  description["formats"] = formats;
  description["offsets"] = offsets;
  description["itemsize"] = structure.bytes;
  return nb::module_::import_("numpy").attr("dtype")(description);
}

nb::list field_rows() {
  nb::list rows;
  for (const FieldRow& row : kFieldTable) {
    std::string type = std::string(1, row.kind) + std::to_string(row.width);
    rows.append(nb::make_tuple(text(row.structure), text(row.name), type, row.offset, row.count));
  }
  return rows;
}

nb::dict struct_sizes() {
  nb::dict sizes;
  for (const StructRow& row : kStructTable) sizes[text(row.name)] = row.bytes;
  return sizes;
}

nb::dict enum_members() {
  nb::dict enums;
  auto add = [&enums](const EnumRow& row) {
    nb::str name = text(row.enumeration);
    if (!enums.contains(name)) enums[name] = nb::dict();
    nb::cast<nb::dict>(enums[name])[text(row.name)] = row.value;
  };
  for (const EnumRow& row : kEnumTable) add(row);
  for (const EnumRow& row : kStatsEnumTable) add(row);
  return enums;
}

uint32_t crc32c_of(nb::handle data) {
  Bytes bytes(data);
  return crc32c(bytes.bytes().data(), bytes.bytes().size());
}

}  // namespace

nb::handle struct_dtype(std::string_view structure) {
  static auto* cache = new std::map<std::string, nb::handle, std::less<>>();  // as long as the interpreter
  if (auto found = cache->find(structure); found != cache->end()) return found->second;
  for (const StructRow& row : kStructTable) {
    if (row.name != structure) continue;
    nb::handle dtype = build_dtype(row).release();
    cache->emplace(std::string(structure), dtype);
    return dtype;
  }
  throw nb::key_error(std::string(structure).c_str());
}

void bind_tables(nb::module_& module) {
  module.attr("LAYOUT_VERSION") = kLayoutVersion;
  module.attr("LAYOUT_HASH") = kLayoutHash;
  module.attr("FRAME_ALIGNMENT") = kFrameAlignment;
  module.attr("SEGMENT_HEADER_BYTES") = kSegmentHeaderBytes;
  module.attr("SEGMENT_CONTROL_OFFSET") = kSegmentControlOffset;
  module.attr("DATA_ALIGNMENT") = kDataAlignment;
  module.attr("MIN_RING_BYTES") = kMinRingBytes;
  module.attr("MAX_LOGPROBS") = kMaxLogprobs;
  module.attr("MAX_STREAM_SLOTS") = kMaxStreamSlots;
  module.attr("NUM_INLINE_STOP_IDS") = kNumInlineStopIds;
  module.attr("NO_STREAM_SLOT") = kNoStreamSlot;
  module.attr("SEGMENT_MAGIC") = kSegmentMagic;
  module.attr("CONTROL_MAGIC") = kControlMagic;
  module.attr("MAX_CONTROL_MESSAGE_BYTES") = kMaxControlMessageBytes;
  module.attr("AWAKE") = kAwake;
  module.def("field_table", &field_rows, "Rows (struct, field, type, offset, count) of the compiled layout.");
  module.def("struct_sizes", &struct_sizes);
  module.def("enum_table", &enum_members);
  module.def(
      "struct_dtype", [](const std::string& name) { return nb::borrow(struct_dtype(name)); }, "structure"_a);
  module.def("request_frame_bytes", &request_frame_bytes, "num_ids"_a, "extension_bytes"_a);
  module.def("now_ns", &now_ns, "CLOCK_MONOTONIC in nanoseconds, the clock of every shared time.");
  module.def("crc32c", &crc32c_of, "data"_a);
  module.def("cgroup_memory_available", &cgroup_memory_available, "mount"_a = "/sys/fs/cgroup");
}

}  // namespace tokring::binding

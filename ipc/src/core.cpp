// tokring_ipc._core: the rings, the stats page and the compiled tables for Python.
#include "bindings.hpp"

NB_MODULE(_core, module) {
  using namespace tokring;
  using namespace tokring::binding;
  nb::exception<PeerCorrupt>(module, "PeerCorrupt", PyExc_RuntimeError);
  nb::exception<AttachError>(module, "AttachError", PyExc_RuntimeError);
  nb::exception<HandleDead>(module, "HandleDead", PyExc_RuntimeError);
  bind_tables(module);
  bind_front_end_channel(module);
  bind_engine_channel(module);
  bind_request_limits(module);
  bind_stats(module);
}

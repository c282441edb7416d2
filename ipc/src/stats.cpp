#include "bindings.hpp"
namespace tokring::binding { void bind_stats(nb::module_&) {} }

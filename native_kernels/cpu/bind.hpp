// The parts of the Python module that live in files of their own.
#pragma once

#include <nanobind/nanobind.h>

namespace tokring::cpu {

void bind_linear(nanobind::module_& module);

}  // namespace tokring::cpu

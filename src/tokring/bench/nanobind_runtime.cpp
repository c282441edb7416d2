// nanobind's own runtime, compiled into this extension (setup.py puts its source folder on the include path).
#include "nb_combined.cpp"

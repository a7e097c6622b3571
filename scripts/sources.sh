# Sourced by other scripts. cpp_sources prints the C++ and CUDA files of the tree, both tracked files and new ones.
cpp_sources() { git ls-files --cached --others --exclude-standard -- '*.cpp' '*.h' '*.cu' '*.cuh'; }

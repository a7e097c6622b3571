# Sourced: the C++ and the Python files of the tree, tracked or about to be.
cpp_sources() { git ls-files --cached --others --exclude-standard -- '*.cpp' '*.h' '*.cu' '*.cuh'; }

# Builds for 64-bit Arm on another processor, and runs the tests by QEMU's emulation of a process: scripts/aarch64.sh.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(ENV{PKG_CONFIG_LIBDIR} /usr/lib/aarch64-linux-gnu/pkgconfig)  # else OpenSSL is that of this processor
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64-static)

# Lets CMake build the pristine Horovod 0.28.1 against today's torch, whose headers want C++17 or later, in half the time.
# Horovod asks for C++14 by number, so the flag that stands for 14 is what has to change. CMake reads this
# file twice: as the toolchain file (too early to change a flag), and again at the end of project().
if(NOT DEFINED CMAKE_CXX14_STANDARD_COMPILE_OPTION)
  set(CMAKE_PROJECT_INCLUDE "${CMAKE_CURRENT_LIST_FILE}")
else()
  foreach(_standard 14 17)
    set(CMAKE_CXX${_standard}_STANDARD_COMPILE_OPTION "-std=c++20")
    set(CMAKE_CXX${_standard}_EXTENSION_COMPILE_OPTION "-std=gnu++20")
  endforeach()
  # Open MPI and torch are found from where Horovod is installed, not from where it was built: so one
  # wheel serves any checkout.
  set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)
  set(CMAKE_INSTALL_RPATH "$ORIGIN/../../../..;$ORIGIN/../../torch/lib")
  # GCC 13 and later no longer bring these in by the way.
  set(CMAKE_CXX_FLAGS "${CMAKE_CXX_FLAGS} -include cstdint -include string -include stdexcept")
  # Horovod's own flags, without debug information.
  set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O3 -DNDEBUG")
  # Four files at a time, so that the large ones, mpi_ops_v2.cc and adapter_v2.cc, read torch's headers once. More would
  # put Gloo's allreduce.cc beside allreduce_local.cc, whose names collide.
  set(CMAKE_UNITY_BUILD ON)
  set(CMAKE_UNITY_BUILD_BATCH_SIZE 4)
endif()

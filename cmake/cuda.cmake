# The GPU's side of the library, compiled where there is an nvcc; a GPU is not needed.
#   KDTREE_CUDA       AUTO (the default): if an nvcc is found; ON: fail without one; OFF: CPU only
#   KDTREE_CUDA_ARCH  targets, "90a;100f;120f" or some of them
# The environment gives the defaults; -UKDTREE_CUDA -UKDTREE_CUDA_ARCH makes a build folder forget
# what another call gave. Sets KDTREE_CUDA_ARCHS, the targets built for, "" for none.

function(kdtree_setting name default what)
  if(DEFINED ENV{${name}})
    set(default "$ENV{${name}}")
  endif()
  set(${name} "${default}" CACHE STRING "${what}")
endfunction()

kdtree_setting(KDTREE_CUDA AUTO "Build for CUDA: AUTO, ON or OFF")
kdtree_setting(KDTREE_CUDA_ARCH "90a;100f;120f" "CUDA targets")
string(REGEX REPLACE "[, ]+" ";" KDTREE_CUDA_ARCHS "${KDTREE_CUDA_ARCH}")

string(TOUPPER "${KDTREE_CUDA}" wish)
if(NOT wish MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "KDTREE_CUDA: wanted AUTO, ON or OFF, got '${KDTREE_CUDA}'")
endif()
set(known 90a 100f 120f)
foreach(arch IN LISTS KDTREE_CUDA_ARCHS)
  if(NOT arch IN_LIST known)
    message(FATAL_ERROR "KDTREE_CUDA_ARCH: wanted some of ${known}, got '${KDTREE_CUDA_ARCH}'")
  endif()
endforeach()
if(NOT KDTREE_CUDA_ARCHS)
  message(FATAL_ERROR "KDTREE_CUDA_ARCH: wanted some of ${known}, got ''")
endif()
if(wish STREQUAL "OFF")
  set(KDTREE_CUDA_ARCHS "")
elseif(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  # nvcc is often outside PATH. Of several toolkits the newest.
  file(GLOB toolkits /usr/local/cuda-*/bin)
  list(SORT toolkits COMPARE NATURAL ORDER DESCENDING)
  find_program(nvcc nvcc NO_CACHE
    HINTS ENV CUDA_HOME ENV CUDA_PATH PATH_SUFFIXES bin
    PATHS /usr/local/cuda/bin ${toolkits})
  if(nvcc)
    set(CMAKE_CUDA_COMPILER "${nvcc}" CACHE FILEPATH "nvcc")
  elseif(wish STREQUAL "AUTO")
    message(STATUS "No nvcc found: the library is built for the CPU alone")
    set(KDTREE_CUDA_ARCHS "")
  else()
    message(FATAL_ERROR "KDTREE_CUDA is ${KDTREE_CUDA}, but no nvcc was found: set CUDA_HOME")
  endif()
endif()

if(NOT KDTREE_CUDA_ARCHS)
  return()
endif()

set(CMAKE_CUDA_ARCHITECTURES OFF)  # CMake does not know family targets: -gencode gives them
enable_language(CUDA)
message(STATUS "CUDA targets: ${KDTREE_CUDA_ARCHS} (${CMAKE_CUDA_COMPILER})")
set(oldest_nvcc 12.9)  # before: no family targets, 100f and 120f
if("${KDTREE_CUDA_ARCHS}" MATCHES "f" AND CMAKE_CUDA_COMPILER_VERSION VERSION_LESS oldest_nvcc)
  message(FATAL_ERROR
    "KDTREE_CUDA_ARCH is ${KDTREE_CUDA_ARCHS}: wanted nvcc ${oldest_nvcc} or newer, got "
    "${CMAKE_CUDA_COMPILER_VERSION} (${CMAKE_CUDA_COMPILER}). Set CUDA_HOME to a newer toolkit, "
    "KDTREE_CUDA_ARCH=90a for Hopper alone, or KDTREE_CUDA=OFF to build for the CPU")
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_FLAGS_RELEASE "-O3")

set(KDTREE_CUDA_INSIDE ${KDTREE_CUDA_ARCHS})  # what kdtree_build_info() says: PTX counts too
set(KDTREE_CUDA_OPTIONS -Xptxas=-warn-spills,-warn-lmem-usage --threads=2)
foreach(arch IN LISTS KDTREE_CUDA_ARCHS)
  list(APPEND KDTREE_CUDA_OPTIONS "-gencode=arch=compute_${arch},code=sm_${arch}")
endforeach()
if("120f" IN_LIST KDTREE_CUDA_ARCHS)
  # For later devices, which compile it when they load it.
  list(APPEND KDTREE_CUDA_OPTIONS "-gencode=arch=compute_120,code=compute_120")
  list(APPEND KDTREE_CUDA_INSIDE 120)
endif()

# Adds .cu files to a target. No Torch and no shared CUDA runtime: works beside any other one.
function(kdtree_add_cuda target)
  target_sources(${target} PRIVATE ${ARGN})
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${KDTREE_CUDA_OPTIONS}>")
  string(REPLACE ";" "," archs "${KDTREE_CUDA_INSIDE}")
  target_compile_definitions(${target} PRIVATE KDTREE_CUDA_ARCHS="${archs}")
  set_target_properties(${target} PROPERTIES CUDA_RUNTIME_LIBRARY Static)
endfunction()

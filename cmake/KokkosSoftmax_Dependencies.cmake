# SPDX-FileCopyrightText: The KokkosSoftmax authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

# Kokkos, and for the heads Kokkos Kernels: what the enclosing project brought, else what find_package finds, else the
# pinned source built in this tree. Afterwards the targets Kokkos::kokkos and, when KokkosSoftmax_LINEAR is ON,
# Kokkos::kokkoskernels exist, and these are set:
#   KokkosSoftmax_KOKKOS_ORIGIN  PARENT, FOUND or FETCHED
#   KokkosSoftmax_LANGUAGE       language of sources that include Kokkos: CXX, CUDA or HIP
#   KokkosSoftmax_BACKENDS       what Kokkos was built with, in Kokkos' upper-case names
#   KokkosSoftmax_LINEAR         ON when the heads are built

include("${CMAKE_CURRENT_LIST_DIR}/KokkosSoftmax_Fetch.cmake")

set(KokkosSoftmax_FETCH_DEPENDENCIES
    AUTO
    CACHE STRING "Build the pinned Kokkos in this tree: AUTO (when find_package finds none), ON or OFF"
)
set(KokkosSoftmax_ENABLE_CUDA
    AUTO
    CACHE STRING "CUDA in a fetched Kokkos: AUTO (with a CUDA compiler and a GPU that answers), ON or OFF"
)
set(KokkosSoftmax_ENABLE_LINEAR
    AUTO
    CACHE STRING "The fused heads, which need Kokkos Kernels: AUTO (when it is at hand or fetched), ON or OFF"
)
option(KokkosSoftmax_NATIVE "Build a fetched Kokkos for this machine's CPU, unless a Kokkos_ARCH_* names another" ON)
foreach(name IN ITEMS FETCH_DEPENDENCIES ENABLE_CUDA ENABLE_LINEAR)
  set_property(CACHE KokkosSoftmax_${name} PROPERTY STRINGS AUTO ON OFF)
endforeach()

# The first header that names what Kokkos was built with; the same file whoever built Kokkos.
function(_kokkossoftmax_read_kokkos_config out_var)
  set(dirs "")
  foreach(target IN ITEMS Kokkos::kokkoscore kokkoscore Kokkos::kokkos kokkos)
    if(TARGET ${target})
      get_target_property(includes ${target} INTERFACE_INCLUDE_DIRECTORIES)
      list(APPEND dirs ${includes})
    endif()
  endforeach()
  foreach(dir IN LISTS dirs)
    # One expression may hold several folders, and the list is cut between them.
    string(REGEX REPLACE "^\\$<BUILD_INTERFACE:|>$" "" dir "${dir}")
    if(EXISTS "${dir}/KokkosCore_config.h")
      file(READ "${dir}/KokkosCore_config.h" text)
      set(${out_var}
          "${text}"
          PARENT_SCOPE
      )
      return()
    endif()
  endforeach()
  message(FATAL_ERROR "KokkosSoftmax: Kokkos' include directories (${dirs}) hold no KokkosCore_config.h")
endfunction()

# Compute capability of the first GPU that answers, without the dot ("90"), or nothing.
function(_kokkossoftmax_detect_gpu out_var)
  set(${out_var}
      ""
      PARENT_SCOPE
  )
  find_program(KokkosSoftmax_NVIDIA_SMI nvidia-smi)
  mark_as_advanced(KokkosSoftmax_NVIDIA_SMI)
  if(KokkosSoftmax_NVIDIA_SMI)
    execute_process(
      COMMAND "${KokkosSoftmax_NVIDIA_SMI}" --query-gpu=compute_cap --format=csv,noheader
      RESULT_VARIABLE result
      OUTPUT_VARIABLE output
      ERROR_QUIET
    )
    if(result EQUAL 0 AND output MATCHES "^ *([0-9]+)\\.([0-9]+)")
      set(${out_var}
          "${CMAKE_MATCH_1}${CMAKE_MATCH_2}"
          PARENT_SCOPE
      )
    endif()
  endif()
endfunction()

# Kokkos' name of a GPU architecture; only those that Kokkos 4.5.1 knows.
function(_kokkossoftmax_kokkos_gpu_arch architecture out_var)
  set(known 70=VOLTA70 72=VOLTA72 75=TURING75 80=AMPERE80 86=AMPERE86 89=ADA89 90=HOPPER90)
  set(${out_var}
      ""
      PARENT_SCOPE
  )
  foreach(pair IN LISTS known)
    if(pair MATCHES "^${architecture}=(.*)$")
      set(${out_var}
          "${CMAKE_MATCH_1}"
          PARENT_SCOPE
      )
    endif()
  endforeach()
endfunction()

# A vendor that find_package(BLAS) knows and finds, or the one that BLA_VENDOR names. The reference BLAS does not count,
# for it is many times slower, and neither does a vendor whose library is called libblas like the reference's.
function(_kokkossoftmax_find_fast_blas out_var)
  set(${out_var}
      ""
      PARENT_SCOPE
  )
  # Configured once more, the cache names the OpenBLAS that was fetched, and any vendor would seem to be found.
  if("$CACHE{BLAS_LIBRARIES}" STREQUAL "scipy_openblas")
    return()
  endif()
  set(vendors ${BLA_VENDOR})
  if(NOT vendors)
    set(vendors Intel10_64lp OpenBLAS FLAME Arm_mp Apple IBMESSL_SMP)
  endif()
  foreach(vendor IN LISTS vendors)
    set(BLA_VENDOR ${vendor})
    unset(BLAS_LIBRARIES)
    find_package(BLAS QUIET)
    if(BLAS_FOUND)
      set(${out_var}
          ${vendor}
          PARENT_SCOPE
      )
      return()
    endif()
  endforeach()
endfunction()

# Sets out_var to ON when Kokkos Kernels' header says that it has no BLAS of the host.
function(_kokkossoftmax_kernels_without_blas out_var)
  set(${out_var}
      OFF
      PARENT_SCOPE
  )
  set(dirs "")
  foreach(target IN ITEMS Kokkos::kokkoskernels KokkosKernels::kokkoskernels kokkoskernels)
    if(TARGET ${target})
      get_target_property(includes ${target} INTERFACE_INCLUDE_DIRECTORIES)
      list(APPEND dirs ${includes})
    endif()
  endforeach()
  foreach(dir IN LISTS dirs)
    # One expression may hold several folders, and the list is cut between them.
    string(REGEX REPLACE "^\\$<BUILD_INTERFACE:|>$" "" dir "${dir}")
    if(EXISTS "${dir}/KokkosKernels_config.h")
      # Left out by name; a definition further down holds under conditions.
      file(STRINGS "${dir}/KokkosKernels_config.h" lines
           REGEX "^/\\* #undef KOKKOSKERNELS_ENABLE_TPL_(BLAS|MKL) \\*/"
      )
      file(STRINGS "${dir}/KokkosKernels_config.h" armpl REGEX "^#define KOKKOSKERNELS_ENABLE_TPL_ARMPL")
      list(LENGTH lines left_out)
      if(left_out EQUAL 2 AND NOT armpl)
        set(${out_var}
            ON
            PARENT_SCOPE
        )
      endif()
      return()
    endif()
  endforeach()
endfunction()

# ---- Kokkos ---------------------------------------------------------------------------------------------------------

if(TARGET Kokkos::kokkos)
  set(KokkosSoftmax_KOKKOS_ORIGIN PARENT)
else()
  if(NOT KokkosSoftmax_FETCH_DEPENDENCIES STREQUAL "ON")
    find_package(Kokkos 4.5 QUIET CONFIG)
  endif()
  if(Kokkos_FOUND)
    set(KokkosSoftmax_KOKKOS_ORIGIN FOUND)
    message(STATUS "KokkosSoftmax: Kokkos ${Kokkos_VERSION} found in ${Kokkos_DIR}")
    if(Kokkos_VERSION VERSION_GREATER_EQUAL 6)
      message(WARNING "KokkosSoftmax knows Kokkos 4.5 to 5.x; this is ${Kokkos_VERSION}")
    endif()
  elseif(KokkosSoftmax_FETCH_DEPENDENCIES STREQUAL "OFF")
    message(FATAL_ERROR "KokkosSoftmax: no Kokkos 4.5 or newer was found; set Kokkos_ROOT to its prefix, or "
                        "KokkosSoftmax_FETCH_DEPENDENCIES to AUTO"
    )
  else()
    set(KokkosSoftmax_KOKKOS_ORIGIN FETCHED)
  endif()
endif()

# A Python wheel has its Kokkos inside its library, so that it meets no other one in the process.
set(_shared_kokkos ${KokkosSoftmax_WANTS_C})
if(SKBUILD)
  set(_shared_kokkos OFF)
endif()

if(KokkosSoftmax_KOKKOS_ORIGIN STREQUAL "FETCHED")
  kokkossoftmax_fetch_kokkos(KokkosSoftmax_KOKKOS_SOURCES)

  # Everything below is a cache entry because Kokkos reads cache entries; a user's own -DKokkos_... wins.
  set(_gpu_architecture "")
  set(_with_cuda OFF)
  if(NOT KokkosSoftmax_ENABLE_CUDA STREQUAL "OFF")
    if(CMAKE_CUDA_ARCHITECTURES)
      string(REGEX MATCH "^[0-9]+" _gpu_architecture "${CMAKE_CUDA_ARCHITECTURES}")
    else()
      _kokkossoftmax_detect_gpu(_gpu_architecture)
    endif()
    if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
      # Installers seldom put nvcc on PATH; CMake itself asks PATH alone.
      find_program(KokkosSoftmax_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH /usr/local/cuda PATH_SUFFIXES bin)
      mark_as_advanced(KokkosSoftmax_NVCC)
      if(KokkosSoftmax_NVCC)
        set(ENV{CUDACXX} "${KokkosSoftmax_NVCC}")
      endif()
    endif()
    if(KokkosSoftmax_ENABLE_CUDA STREQUAL "ON")
      set(_with_cuda ON)
      if(NOT _gpu_architecture)
        message(FATAL_ERROR "KokkosSoftmax: no GPU answers; name one with -DCMAKE_CUDA_ARCHITECTURES=90, or leave "
                            "KokkosSoftmax_ENABLE_CUDA to AUTO"
        )
      endif()
    elseif(_gpu_architecture)
      include(CheckLanguage)
      check_language(CUDA)
      if(CMAKE_CUDA_COMPILER)
        set(_with_cuda ON)
      else()
        message(STATUS "KokkosSoftmax: a GPU answers, but there is no CUDA compiler: building without CUDA")
      endif()
    endif()
  endif()
  if(_with_cuda)
    _kokkossoftmax_kokkos_gpu_arch("${_gpu_architecture}" _kokkos_gpu_arch)
    if(NOT _kokkos_gpu_arch)
      set(_message "the fetched Kokkos 4.5.1 does not know GPUs of architecture ${_gpu_architecture}; bring a newer Kokkos")
      if(KokkosSoftmax_ENABLE_CUDA STREQUAL "ON")
        message(FATAL_ERROR "KokkosSoftmax: ${_message}")
      endif()
      message(STATUS "KokkosSoftmax: ${_message}. Building without CUDA")
      set(_with_cuda OFF)
    endif()
  endif()
  # Kokkos takes one parallel backend of the host.
  set(_with_openmp OFF)
  if(NOT Kokkos_ENABLE_THREADS AND NOT Kokkos_ENABLE_HPX)
    find_package(OpenMP QUIET COMPONENTS CXX)
    set(_with_openmp ${OpenMP_CXX_FOUND})
  endif()
  set(Kokkos_ENABLE_SERIAL ON CACHE BOOL "Kokkos backend")
  set(Kokkos_ENABLE_OPENMP ${_with_openmp} CACHE BOOL "Kokkos backend")
  set(Kokkos_ENABLE_CUDA ${_with_cuda} CACHE BOOL "Kokkos backend")
  set(Kokkos_ENABLE_DEPRECATED_CODE_4 OFF CACHE BOOL "Deprecated Kokkos interfaces, which KokkosSoftmax does not use")
  if(Kokkos_ENABLE_CUDA)
    set(Kokkos_ARCH_${_kokkos_gpu_arch} ON CACHE BOOL "Kokkos GPU architecture")
    # Kokkos 4.5.1 and CUDA 13: its mdspan does not compile, and nvcc_wrapper's default architecture is gone.
    set(Kokkos_ENABLE_IMPL_MDSPAN OFF CACHE BOOL "")
    set(Kokkos_ENABLE_COMPILE_AS_CMAKE_LANGUAGE ON CACHE BOOL "")
    if(NOT CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES ${_gpu_architecture} CACHE STRING "CUDA architectures" FORCE)
    endif()
    enable_language(CUDA)
    # CMake 3.25 does not know that nvcc has C++20 and would leave Kokkos itself at nvcc's default.
    if(NOT cuda_std_20 IN_LIST CMAKE_CUDA_COMPILE_FEATURES)
      string(APPEND CMAKE_CUDA_FLAGS " -std=c++20")
    endif()
    # One CUDA runtime a process: inside a static program, shared between shared libraries.
    if(BUILD_SHARED_LIBS OR _shared_kokkos)
      set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)
      set(KokkosSoftmax_CUDA_RUNTIME_TARGET CUDA::cudart)
    else()
      set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
      set(KokkosSoftmax_CUDA_RUNTIME_TARGET CUDA::cudart_static)
    endif()
  endif()
  if(KokkosSoftmax_NATIVE AND NOT CMAKE_CROSSCOMPILING)
    # A CPU that the user named stays; GPU names do not count.
    set(_named_cpu FALSE)
    get_cmake_property(_names CACHE_VARIABLES)
    foreach(_name IN LISTS _names)
      if(_name MATCHES "^Kokkos_ARCH_" AND "${${_name}}"
         AND NOT _name MATCHES "^Kokkos_ARCH_(NATIVE$|KEPLER|MAXWELL|PASCAL|VOLTA|TURING|AMPERE|ADA|HOPPER|AMD_GFX|VEGA|INTEL)"
      )
        set(_named_cpu TRUE)
      endif()
    endforeach()
    if(NOT _named_cpu)
      set(Kokkos_ARCH_NATIVE ON CACHE BOOL "Build for this machine's CPU")
    endif()
  endif()
  # Objects of the static libraries end up in other people's shared ones.
  set(CMAKE_POSITION_INDEPENDENT_CODE ON)
  # For Kokkos and Kokkos Kernels alone; our own library is what the user said.
  set(_shared_libs_of_user "${BUILD_SHARED_LIBS}")
  if(_shared_kokkos)
    set(BUILD_SHARED_LIBS ON)
  endif()
  # SYSTEM: its headers do not answer to our warnings.
  add_subdirectory("${KokkosSoftmax_KOKKOS_SOURCES}/kokkos" "${PROJECT_BINARY_DIR}/_deps/kokkos-build" SYSTEM)
endif()

# ---- Backends and language ------------------------------------------------------------------------------------------

_kokkossoftmax_read_kokkos_config(_kokkos_config)
set(KokkosSoftmax_BACKENDS "")
foreach(_backend IN ITEMS CUDA HIP SYCL OPENMPTARGET OPENACC HPX OPENMP THREADS SERIAL)
  if(_kokkos_config MATCHES "#define KOKKOS_ENABLE_${_backend}[ \r\n]")
    list(APPEND KokkosSoftmax_BACKENDS ${_backend})
  endif()
endforeach()
if(KokkosSoftmax_KOKKOS_ORIGIN STREQUAL "FOUND" AND Kokkos_COMPILE_LANGUAGE)
  set(KokkosSoftmax_LANGUAGE ${Kokkos_COMPILE_LANGUAGE})
else()
  # Kokkos in the tree says it by the option alone.
  set(KokkosSoftmax_LANGUAGE CXX)
  if(Kokkos_ENABLE_COMPILE_AS_CMAKE_LANGUAGE)
    foreach(_backend IN ITEMS CUDA HIP)
      if(_backend IN_LIST KokkosSoftmax_BACKENDS)
        set(KokkosSoftmax_LANGUAGE ${_backend})
      endif()
    endforeach()
  endif()
endif()
if(NOT KokkosSoftmax_LANGUAGE STREQUAL "CXX")
  if(NOT CMAKE_${KokkosSoftmax_LANGUAGE}_ARCHITECTURES AND Kokkos_${KokkosSoftmax_LANGUAGE}_ARCHITECTURES)
    set(CMAKE_${KokkosSoftmax_LANGUAGE}_ARCHITECTURES ${Kokkos_${KokkosSoftmax_LANGUAGE}_ARCHITECTURES})
  endif()
  enable_language(${KokkosSoftmax_LANGUAGE})
endif()
list(JOIN KokkosSoftmax_BACKENDS ", " _backends)
message(STATUS "KokkosSoftmax: Kokkos backends: ${_backends}")

# ---- Kokkos Kernels, for the heads ----------------------------------------------------------------------------------

set(KokkosSoftmax_LINEAR OFF)
set(_wants_linear ${KokkosSoftmax_ENABLE_LINEAR})
if(_wants_linear STREQUAL "AUTO" AND NOT EXISTS "${PROJECT_SOURCE_DIR}/include/KokkosSoftmax_Linear.hpp")
  set(_wants_linear OFF)
endif()
if(_wants_linear)
  if(TARGET Kokkos::kokkoskernels)
    set(KokkosSoftmax_LINEAR ON)
  elseif(KokkosSoftmax_KOKKOS_ORIGIN STREQUAL "FETCHED")
    set(KokkosKernels_ADD_DEFAULT_ETI OFF CACHE BOOL "")
    set(KokkosKernels_INST_FLOAT ON CACHE BOOL "")
    set(KokkosKernels_INST_DOUBLE ON CACHE BOOL "")
    set(KokkosKernels_ENABLE_ALL_COMPONENTS OFF CACHE BOOL "")
    set(KokkosKernels_ENABLE_COMPONENT_BLAS ON CACHE BOOL "")
    set(KokkosKernels_ENABLE_TPL_BLAS ON CACHE BOOL "")
    set(KokkosKernels_ENABLE_TPL_LAPACK OFF CACHE BOOL "")
    set(KokkosKernels_ENABLE_TPL_CUSPARSE OFF CACHE BOOL "")
    set(KokkosKernels_ENABLE_TPL_CUSOLVER OFF CACHE BOOL "")
    set(KokkosKernels_ENABLE_TPL_CUBLAS ${Kokkos_ENABLE_CUDA} CACHE BOOL "")
    set(_openblas_library "")
    set(_blas_vendor "")
    if(KokkosKernels_ENABLE_TPL_BLAS)
      _kokkossoftmax_find_fast_blas(_blas_vendor)
    endif()
    # With a mangling given, Kokkos Kernels does not ask for a Fortran compiler.
    if(_blas_vendor)
      message(STATUS "KokkosSoftmax: BLAS: ${_blas_vendor}")
      set(BLA_VENDOR ${_blas_vendor})
      set(F77_BLAS_MANGLE "(name,NAME) name ## _" CACHE STRING "Names of Fortran BLAS symbols")
    elseif(KokkosKernels_ENABLE_TPL_BLAS)
      kokkossoftmax_fetch_openblas(_openblas)
      set(_openblas_library "${_openblas}/lib/libscipy_openblas.so")
      set(F77_BLAS_MANGLE "(name,NAME) scipy_ ## name ## _" CACHE STRING "Names of Fortran BLAS symbols")
      set(BLAS_LIBRARIES scipy_openblas CACHE STRING "")
      set(BLAS_LIBRARY_DIRS "${_openblas}/lib" CACHE STRING "")
    endif()
    # In the tree Kokkos Kernels takes the language and the way to cuBLAS from these.
    set(Kokkos_COMPILE_LANGUAGE ${KokkosSoftmax_LANGUAGE})
    list(PREPEND CMAKE_MODULE_PATH "${CMAKE_CURRENT_LIST_DIR}/modules")
    add_subdirectory(
      "${KokkosSoftmax_KOKKOS_SOURCES}/kokkos-kernels" "${PROJECT_BINARY_DIR}/_deps/kokkos-kernels-build" SYSTEM
    )
    list(POP_FRONT CMAKE_MODULE_PATH)
    if(_openblas_library)
      # What Kokkos Kernels exports is the library's path in this build tree; the installed one lies beside it.
      install(FILES "${_openblas_library}" DESTINATION ${CMAKE_INSTALL_LIBDIR})
      file(GLOB _openblas_license "${_openblas}/../*.dist-info/licenses/LICENSE.txt")
      install(
        FILES ${_openblas_license}
        DESTINATION ${CMAKE_INSTALL_DOCDIR}
        RENAME LICENSE.OpenBLAS.txt
      )
      set_property(
        TARGET BLAS
        PROPERTY INTERFACE_LINK_LIBRARIES
                 "$<BUILD_INTERFACE:${_openblas_library}>"
                 "$<INSTALL_INTERFACE:$<INSTALL_PREFIX>/${CMAKE_INSTALL_LIBDIR}/libscipy_openblas.so>"
      )
    endif()
    set(KokkosSoftmax_LINEAR ON)
  else()
    find_package(KokkosKernels QUIET CONFIG)
    if(KokkosKernels_FOUND)
      message(STATUS "KokkosSoftmax: Kokkos Kernels found in ${KokkosKernels_DIR}")
      set(KokkosSoftmax_LINEAR ON)
    elseif(_wants_linear STREQUAL "AUTO")
      message(STATUS "KokkosSoftmax: this Kokkos comes without Kokkos Kernels: building the softmax family without the heads")
    else()
      message(FATAL_ERROR "KokkosSoftmax: the heads need Kokkos Kernels built with this Kokkos; set KokkosKernels_ROOT, or "
                          "KokkosSoftmax_ENABLE_LINEAR to OFF or AUTO"
      )
    endif()
  endif()
  if(KokkosSoftmax_LINEAR)
    _kokkossoftmax_kernels_without_blas(_without_blas)
    if(_without_blas AND NOT KokkosSoftmax_SAID_THAT_HEADS_ARE_SLOW)
      message(WARNING "KokkosSoftmax: this Kokkos Kernels was built without a BLAS: the heads work on the host, many "
                      "times slower than they could"
      )
    endif()
    set(KokkosSoftmax_SAID_THAT_HEADS_ARE_SLOW ${_without_blas} CACHE INTERNAL "Said once a build tree")
  endif()
endif()

if(KokkosSoftmax_KOKKOS_ORIGIN STREQUAL "FETCHED")
  set(BUILD_SHARED_LIBS "${_shared_libs_of_user}")
endif()

# SPDX-FileCopyrightText: The KokkosSoftmax authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

# Which faces for other languages are built. Afterwards these are set:
#   KokkosSoftmax_C        ON when the C library is built
#   KokkosSoftmax_FORTRAN  ON when the Fortran module is built over it

set(KokkosSoftmax_ENABLE_C
    AUTO
    CACHE STRING "The C library, a shared one: AUTO (not in a subdirectory, and when Kokkos can be part of one), ON or OFF"
)
set(KokkosSoftmax_ENABLE_FORTRAN
    AUTO
    CACHE STRING "The Fortran module over the C library: AUTO (when there is a Fortran compiler), ON or OFF"
)
foreach(name IN ITEMS ENABLE_C ENABLE_FORTRAN)
  set_property(CACHE KokkosSoftmax_${name} PROPERTY STRINGS AUTO ON OFF)
endforeach()

# Why Kokkos cannot be part of a shared library, or nothing. Static archives that were compiled without -fPIC cannot.
function(_kokkossoftmax_refuse_shared out_var)
  set(${out_var}
      ""
      PARENT_SCOPE
  )
  if(NOT KokkosSoftmax_KOKKOS_ORIGIN STREQUAL "FOUND" OR NOT TARGET Kokkos::kokkoscore)
    return() # in this tree: position independent, or the enclosing project's affair
  endif()
  get_target_property(type Kokkos::kokkoscore TYPE)
  if(NOT type STREQUAL "STATIC_LIBRARY")
    return()
  endif()
  get_target_property(archive Kokkos::kokkoscore LOCATION)
  if(NOT DEFINED KokkosSoftmax_KOKKOS_IS_PIC OR NOT KokkosSoftmax_KOKKOS_PIC_OF STREQUAL archive)
    set(probe "${PROJECT_BINARY_DIR}/CMakeFiles/kokkossoftmax_pic_probe.so")
    execute_process(
      COMMAND "${CMAKE_CXX_COMPILER}" -shared -o "${probe}" -Wl,--whole-archive "${archive}" -Wl,--no-whole-archive
      RESULT_VARIABLE result
      OUTPUT_QUIET ERROR_QUIET
    )
    file(REMOVE "${probe}")
    if(result EQUAL 0)
      set(KokkosSoftmax_KOKKOS_IS_PIC ON CACHE INTERNAL "The Kokkos that was found can be part of a shared library")
    else()
      set(KokkosSoftmax_KOKKOS_IS_PIC OFF CACHE INTERNAL "The Kokkos that was found can be part of a shared library")
    endif()
    set(KokkosSoftmax_KOKKOS_PIC_OF "${archive}" CACHE INTERNAL "What that was said of")
  endif()
  if(NOT KokkosSoftmax_KOKKOS_IS_PIC)
    set(${out_var}
        "the Kokkos in ${Kokkos_DIR} is static and was compiled without -fPIC, so it cannot be part of a shared library; build it with CMAKE_POSITION_INDEPENDENT_CODE=ON or BUILD_SHARED_LIBS=ON"
        PARENT_SCOPE
    )
  endif()
endfunction()

set(KokkosSoftmax_C OFF)
if(KokkosSoftmax_ENABLE_C)
  set(_refusal "")
  if(KokkosSoftmax_ENABLE_C STREQUAL "AUTO" AND NOT PROJECT_IS_TOP_LEVEL)
    set(_refusal "a subdirectory of another project has it with KokkosSoftmax_ENABLE_C=ON")
  elseif(WIN32)
    set(_refusal "it was not tried on Windows")
  else()
    _kokkossoftmax_refuse_shared(_refusal)
  endif()
  if(NOT _refusal)
    set(KokkosSoftmax_C ON)
  elseif(KokkosSoftmax_ENABLE_C STREQUAL "AUTO")
    message(STATUS "KokkosSoftmax: without the C library: ${_refusal}")
  else()
    message(FATAL_ERROR "KokkosSoftmax: no C library: ${_refusal}")
  endif()
endif()
if(KokkosSoftmax_C)
  enable_language(C)
endif()

set(KokkosSoftmax_FORTRAN OFF)
if(KokkosSoftmax_ENABLE_FORTRAN AND KokkosSoftmax_C)
  include(CheckLanguage)
  check_language(Fortran)
  if(CMAKE_Fortran_COMPILER)
    enable_language(Fortran)
    set(KokkosSoftmax_FORTRAN ON)
  elseif(KokkosSoftmax_ENABLE_FORTRAN STREQUAL "AUTO")
    message(STATUS "KokkosSoftmax: no Fortran compiler: without the Fortran module")
  else()
    message(FATAL_ERROR "KokkosSoftmax: KokkosSoftmax_ENABLE_FORTRAN is ON, and there is no Fortran compiler")
  endif()
elseif(KokkosSoftmax_ENABLE_FORTRAN AND NOT KokkosSoftmax_ENABLE_FORTRAN STREQUAL "AUTO")
  message(FATAL_ERROR "KokkosSoftmax: the Fortran module needs the C library, which is not built")
endif()

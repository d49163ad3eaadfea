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

# What is static in Kokkos would be there twice in a C++ program that has a static Kokkos and links the C library, so
# the C library is built over a shared Kokkos: a Kokkos that is fetched is built so.
set(KokkosSoftmax_WANTS_C OFF)
if(KokkosSoftmax_ENABLE_C STREQUAL "AUTO")
  if(PROJECT_IS_TOP_LEVEL AND NOT WIN32)
    set(KokkosSoftmax_WANTS_C ON)
  endif()
elseif(KokkosSoftmax_ENABLE_C)
  set(KokkosSoftmax_WANTS_C ON)
endif()

# kokkossoftmax_decide_faces(): once Kokkos is known.
macro(kokkossoftmax_decide_faces)
  set(KokkosSoftmax_C ${KokkosSoftmax_WANTS_C})
  set(KokkosSoftmax_C_HIDES_KOKKOS OFF)
  if(KokkosSoftmax_C)
    set(_kokkos_type "")
    foreach(_target IN ITEMS Kokkos::kokkoscore kokkoscore)
      if(TARGET ${_target})
        get_target_property(_kokkos_type ${_target} TYPE)
        break()
      endif()
    endforeach()
    if(NOT _kokkos_type STREQUAL "SHARED_LIBRARY")
      if(KokkosSoftmax_ENABLE_C STREQUAL "AUTO")
        message(STATUS "KokkosSoftmax: without the C library, because Kokkos is static: build Kokkos with "
                       "BUILD_SHARED_LIBS=ON; or, with a Kokkos compiled with -fPIC, set KokkosSoftmax_ENABLE_C=ON for "
                       "a C library with a Kokkos of its own inside"
        )
        set(KokkosSoftmax_C OFF)
      else()
        message(STATUS "KokkosSoftmax: Kokkos is static: the C library has one of its own inside, apart from that of a "
                       "C++ program that links it"
        )
        set(KokkosSoftmax_C_HIDES_KOKKOS ON)
      endif()
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
endmacro()

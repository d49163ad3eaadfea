# SPDX-FileCopyrightText: The KokkosSoftmax authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

# The C interface: a shared library of its own, over a shared Kokkos, which is then one for it and for a C++ program that
# links both.

kokkossoftmax_scalar_pairs(pairs "${PROJECT_SOURCE_DIR}/include/impl/KokkosSoftmax_Scalars.hpp")

set(c_sources KokkosSoftmax_C.cpp KokkosSoftmax_CHost.cpp)
set(c_backends "")
foreach(backend IN ITEMS OPENMP THREADS HPX SERIAL)
  if(backend IN_LIST backends)
    list(APPEND c_backends ${backend})
    break()
  endif()
endforeach()
if(CUDA IN_LIST backends)
  list(APPEND c_backends CUDA)
  list(APPEND c_sources KokkosSoftmax_CCuda.cpp)
else()
  list(APPEND c_sources KokkosSoftmax_CNoCuda.cpp)
endif()

# One source of a template.
function(kokkossoftmax_c_source template name)
  string(MAKE_C_IDENTIFIER "${name}" name)
  set(source "${CMAKE_CURRENT_BINARY_DIR}/KokkosSoftmax_${template}_${name}.cpp")
  configure_file(KokkosSoftmax_${template}.cpp.in "${source}" @ONLY)
  set(c_sources
      ${c_sources} "${source}"
      PARENT_SCOPE
  )
endfunction()

# kokkossoftmax_c_sources(<name> <input> <outputs> <pack>): the rows of an input scalar with these outputs, the heads, and
# whether what packs such weights is with them.
macro(kokkossoftmax_c_sources name input outputs pack)
  set(KOKKOSSOFTMAX_INSTANTIATE_IN ${input})
  set(KOKKOSSOFTMAX_INSTANTIATE_PACK ${pack})
  set(KOKKOSSOFTMAX_INSTANTIATE_PAIRS "")
  foreach(output IN ITEMS ${outputs})
    string(APPEND KOKKOSSOFTMAX_INSTANTIATE_PAIRS "M(${input}, ${output}) ")
  endforeach()
  string(STRIP "${KOKKOSSOFTMAX_INSTANTIATE_PAIRS}" KOKKOSSOFTMAX_INSTANTIATE_PAIRS)
  string(REPLACE "KokkosSoftmax::" "" source_name "${name}")
  kokkossoftmax_c_source(CRows "${source_name}")
  if(backend STREQUAL "CUDA")
    kokkossoftmax_c_source(CNamedRows "${source_name}")
  endif()
  if(KokkosSoftmax_LINEAR)
    kokkossoftmax_c_source(CHeads "${source_name}")
  endif()
endmacro()

set(inputs "")
foreach(pair IN LISTS pairs)
  string(REGEX REPLACE ",.*$" "" input "${pair}")
  string(REGEX REPLACE "^.*," "" output "${pair}")
  string(MAKE_C_IDENTIFIER "outputs_of_${input}" outputs)
  list(APPEND inputs ${input})
  list(APPEND ${outputs} ${output})
endforeach()
list(REMOVE_DUPLICATES inputs)

foreach(backend IN LISTS c_backends)
  kokkossoftmax_backend_type(KOKKOSSOFTMAX_INSTANTIATE_BACKEND ${backend})
  kokkossoftmax_c_source(CChain ${backend})
  foreach(input IN LISTS inputs)
    string(MAKE_C_IDENTIFIER "outputs_of_${input}" outputs)
    if(backend STREQUAL "CUDA")
      # A minute of the compiler's for each.
      set(pack 1)
      foreach(output IN LISTS ${outputs})
        kokkossoftmax_c_sources("${backend}_${input}_${output}" "${input}" "${output}" ${pack})
        set(pack 0)
      endforeach()
    else()
      # The outputs of an input share most of what is read.
      kokkossoftmax_c_sources("${backend}_${input}" "${input}" "${${outputs}}" 1)
    endif()
  endforeach()
endforeach()
# On the host a head's time is its GEMM's, whatever comes after; on a device kernels of their own pay, for rows too.
if(KokkosSoftmax_LINEAR AND CUDA IN_LIST c_backends)
  list(APPEND c_sources KokkosSoftmax_CNamedHeads.cpp)
endif()

add_library(kokkossoftmax_c SHARED ${c_sources})
add_library(KokkosSoftmax::C ALIAS kokkossoftmax_c)
kokkossoftmax_sources(${c_sources})
kokkossoftmax_target(kokkossoftmax_c)
set_target_properties(
  kokkossoftmax_c
  PROPERTIES EXPORT_NAME C
             VERSION ${PROJECT_VERSION}
             SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}
             LINKER_LANGUAGE ${KokkosSoftmax_LANGUAGE}
)
target_include_directories(
  kokkossoftmax_c PUBLIC "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>"
                         "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}/kokkossoftmax>"
)
target_include_directories(kokkossoftmax_c PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}")
# Its users are told nothing of what is inside.
target_link_libraries(kokkossoftmax_c PRIVATE "$<BUILD_INTERFACE:KokkosSoftmax::KokkosSoftmax>")
if(KokkosSoftmax_C_HIDES_KOKKOS)
  set_target_properties(
    kokkossoftmax_c PROPERTIES CXX_VISIBILITY_PRESET hidden CUDA_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON
  )
  target_link_options(kokkossoftmax_c PRIVATE "LINKER:--exclude-libs,ALL")
elseif(UNIX AND NOT APPLE)
  set(map "${CMAKE_CURRENT_SOURCE_DIR}/KokkosSoftmax_C.map")
  target_link_options(kokkossoftmax_c PRIVATE "LINKER:--version-script=${map}")
  set_target_properties(kokkossoftmax_c PROPERTIES LINK_DEPENDS "${map}")
endif()

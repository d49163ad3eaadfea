# SPDX-FileCopyrightText: The KokkosSoftmax authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

# A compiler launcher for a build tree TO of the library beside another one, FROM: an object that FROM has, and that the
# compiler would make the same of, is copied. cmake -DFROM=<build tree> -DTO=<build tree> -P reuse_object.cmake -- <command>

set(command "")
set(object "")
set(began FALSE)
math(EXPR last "${CMAKE_ARGC} - 1")
foreach(i RANGE ${last})
  set(argument "${CMAKE_ARGV${i}}")
  if(began)
    if(before STREQUAL "-o")
      set(object "${argument}")
    endif()
    set(before "${argument}")
    string(REPLACE ";" "\\;" argument "${argument}")
    list(APPEND command "${argument}")
  elseif(argument STREQUAL "--")
    set(began TRUE)
    set(before "")
  endif()
endforeach()

# text_of(<out_var> <file>): what stands in a file of either tree, with one name for the trees and without what makes no
# difference here: whether the code is optimized, and warnings errors; the macro that CMake defines where a shared library
# is compiled, and nobody asks for. Nothing if the file is not there, like flags.make with another generator: then all is
# compiled.
function(text_of out_var file)
  set(text "")
  if(EXISTS "${file}")
    file(READ "${file}" text)
    string(REPLACE "${TO}" "${FROM}" text "${text}")
    string(REGEX REPLACE " -(O[0-3]|finline-[a-z-]+|Werror|D[A-Za-z0-9_]+_EXPORTS)" "" text "${text}")
    string(REGEX REPLACE "_DEFINES = *" "_DEFINES = " text "${text}")
  endif()
  set(${out_var}
      "${text}"
      PARENT_SCOPE
  )
endfunction()

file(REAL_PATH "${TO}" real_to)
file(RELATIVE_PATH folder "${real_to}" "${CMAKE_CURRENT_BINARY_DIR}") # a script's is where it was called
set(same FALSE)
if(object MATCHES "^(CMakeFiles/[^/]+\\.dir)/" AND EXISTS "${FROM}/${folder}/${object}")
  set(files "${folder}/${CMAKE_MATCH_1}/flags.make")
  # The source, when it was generated, and the headers that were.
  list(GET command -1 source)
  cmake_path(IS_PREFIX TO "${source}" generated)
  if(generated)
    file(RELATIVE_PATH source "${TO}" "${source}")
    list(APPEND files "${source}")
  endif()
  file(GLOB headers RELATIVE "${TO}" "${TO}/include/*.hpp" "${TO}/_deps/kokkos*-build/Kokkos*_*onfig*.h*")
  list(APPEND files ${headers})
  set(same TRUE)
  foreach(file IN LISTS files)
    text_of(in_to "${TO}/${file}")
    text_of(in_from "${FROM}/${file}")
    if(in_to STREQUAL "" OR NOT in_to STREQUAL in_from)
      set(same FALSE)
    endif()
  endforeach()
endif()
if(same)
  configure_file("${FROM}/${folder}/${object}" "${TO}/${folder}/${object}" COPYONLY)
else()
  execute_process(COMMAND ${command} RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "The compiler failed: ${result}")
  endif()
endif()

# SPDX-FileCopyrightText: The KokkosSoftmax authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

# What the library, its tests and its benchmarks share.

include("${CMAKE_CURRENT_LIST_DIR}/KokkosSoftmax_Hopper.cmake")

# kokkossoftmax_sources(<file>...): compile these with the language that Kokkos was built with. Call it where the target
# is made: the property belongs to the folder.
function(kokkossoftmax_sources)
  if(NOT KokkosSoftmax_LANGUAGE STREQUAL "CXX")
    set_source_files_properties(${ARGN} PROPERTIES LANGUAGE ${KokkosSoftmax_LANGUAGE})
  endif()
endfunction()

# kokkossoftmax_cuda_standard(<target> PRIVATE|PUBLIC): C++20 for CUDA sources, with CMakes, too, that do not know that
# nvcc has it (3.25 is one of them).
function(kokkossoftmax_cuda_standard target scope)
  if(cuda_std_20 IN_LIST CMAKE_CUDA_COMPILE_FEATURES)
    target_compile_features(${target} ${scope} cuda_std_20)
  else()
    target_compile_options(${target} ${scope} "$<$<COMPILE_LANGUAGE:CUDA>:-std=c++20>")
  endif()
endfunction()

# kokkossoftmax_target(<target>): language standard, warnings and architectures of our own code.
function(kokkossoftmax_target target)
  target_compile_features(${target} PRIVATE cxx_std_20)
  set_target_properties(${target} PROPERTIES CXX_EXTENSIONS OFF CUDA_EXTENSIONS OFF)
  set(warnings -Wall -Wextra -Wshadow)
  if(KokkosSoftmax_WARNINGS_AS_ERRORS)
    list(APPEND warnings -Werror)
  endif()
  list(JOIN warnings "," xcompiler)
  set(nvcc_warnings "-Xcompiler=${xcompiler}")
  if(KokkosSoftmax_WARNINGS_AS_ERRORS)
    list(APPEND nvcc_warnings -Werror=all-warnings)
  endif()
  target_compile_options(
    ${target} PRIVATE "$<$<COMPILE_LANG_AND_ID:CXX,GNU,Clang,AppleClang,IntelLLVM>:${warnings}>"
                      "$<$<COMPILE_LANG_AND_ID:CUDA,NVIDIA>:${nvcc_warnings}>"
  )
  if(KokkosSoftmax_LANGUAGE STREQUAL "CUDA")
    kokkossoftmax_cuda_standard(${target} PRIVATE)
    # wgmma and setmaxnreg exist in 90a alone, while Kokkos' own flag is 90.
    set(architectures "")
    foreach(architecture IN LISTS CMAKE_CUDA_ARCHITECTURES)
      string(REGEX REPLACE "^90(-real|-virtual)?$" "90a-real" architecture "${architecture}")
      list(APPEND architectures ${architecture})
    endforeach()
    set_target_properties(${target} PROPERTIES CUDA_ARCHITECTURES "${architectures}")
  else()
    kokkossoftmax_compile_for_sm_90a(${target})
  endif()
endfunction()

# kokkossoftmax_test_options(<target>): KokkosSoftmax_TEST_OPTIONS for a program that is there to be run in a test.
# Optimising what tests and comparison instantiate for themselves takes most of the time of the preset "test".
function(kokkossoftmax_test_options target)
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:${KokkosSoftmax_TEST_OPTIONS}>")
endfunction()

# kokkossoftmax_scalar_pairs(<out_var> <header>): the lines "M(input, output)" of KOKKOSSOFTMAX_FOR_EACH_SCALAR_PAIR, as
# a list of "input,output", so that the header is the one place that says what is instantiated.
function(kokkossoftmax_scalar_pairs out_var header)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${header}")
  file(READ "${header}" text)
  string(FIND "${text}" "#define KOKKOSSOFTMAX_FOR_EACH_SCALAR_PAIR(M)" begin)
  if(begin EQUAL -1)
    message(FATAL_ERROR "KokkosSoftmax: ${header} does not define KOKKOSSOFTMAX_FOR_EACH_SCALAR_PAIR(M)")
  endif()
  string(SUBSTRING "${text}" ${begin} -1 text)
  # The macro ends at the first line without a backslash.
  string(REGEX MATCH "^([^\n]*\\\\[ \t\r]*\n)*[^\n]*" text "${text}")
  string(REGEX MATCHALL "M\\([^()]+,[^()]+\\)" calls "${text}")
  set(pairs "")
  foreach(call IN LISTS calls)
    string(REGEX REPLACE "^M\\(|\\)$|[ \t]" "" pair "${call}")
    list(APPEND pairs "${pair}")
  endforeach()
  if(NOT pairs)
    message(FATAL_ERROR "KokkosSoftmax: KOKKOSSOFTMAX_FOR_EACH_SCALAR_PAIR in ${header} lists no pair M(input, output)")
  endif()
  set(${out_var}
      "${pairs}"
      PARENT_SCOPE
  )
endfunction()

# kokkossoftmax_backend_type(<out_var> <backend>): the execution space of an upper-case backend name.
function(kokkossoftmax_backend_type out_var backend)
  set(types
      CUDA=Cuda
      HIP=HIP
      SYCL=SYCL
      OPENMPTARGET=Experimental::OpenMPTarget
      OPENACC=Experimental::OpenACC
      HPX=Experimental::HPX
      OPENMP=OpenMP
      THREADS=Threads
      SERIAL=Serial
  )
  foreach(pair IN LISTS types)
    if(pair MATCHES "^${backend}=(.*)$")
      set(${out_var}
          "Kokkos::${CMAKE_MATCH_1}"
          PARENT_SCOPE
      )
    endif()
  endforeach()
endfunction()

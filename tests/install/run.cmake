# SPDX-FileCopyrightText: The KokkosSoftmax authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

# One install test. KIND says which: package, rebuilt_package or subdirectory.

string(REPLACE "@" ";" COMMON "${COMMON}")
string(REPLACE "@" ";" DEPENDENCIES "${DEPENDENCIES}")
string(REPLACE "@" ";" C_COMMON "${C_COMMON}")
file(REMOVE_RECURSE "${WORK_DIR}")
file(MAKE_DIRECTORY "${WORK_DIR}")

# run(<what> <command>...): stops with the output when the command fails.
function(run what)
  execute_process(
    COMMAND ${ARGN}
    RESULT_VARIABLE result
    OUTPUT_VARIABLE output
    ERROR_VARIABLE output
  )
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${what} failed (${result}):\n${output}")
  endif()
  message(STATUS "${what}: done")
endfunction()

# Builds the consumer with these options and runs it: without optimization, for intrinsics want constants then, too.
function(consume)
  run("Configuring the consumer" "${CMAKE_COMMAND}" -S "${SOURCE_DIR}/tests/install/consumer" -B "${WORK_DIR}/consumer"
      ${COMMON} ${ARGN} -DCMAKE_CXX_FLAGS_RELEASE=-O0
  )
  run("Building the consumer" "${CMAKE_COMMAND}" --build "${WORK_DIR}/consumer" --target consumer --parallel ${CORES})
  if(CAN_RUN)
    run("Running the consumer" "${WORK_DIR}/consumer/consumer")
  endif()
endfunction()

# The same in C, and in Fortran where there is the module.
function(consume_from_c)
  run("Configuring the consumer in C" "${CMAKE_COMMAND}" -S "${SOURCE_DIR}/tests/install/c_consumer" -B
      "${WORK_DIR}/c_consumer" -DCMAKE_BUILD_TYPE=Release -DCONSUMER_FORTRAN=${FORTRAN} ${C_COMMON} ${ARGN}
  )
  run("Building the consumer in C" "${CMAKE_COMMAND}" --build "${WORK_DIR}/c_consumer" --parallel ${CORES})
  if(CAN_RUN)
    run("Running the consumer in C" "${WORK_DIR}/c_consumer/consumer")
    if(FORTRAN)
      run("Running the consumer in Fortran" "${WORK_DIR}/c_consumer/fortran_consumer")
    endif()
  endif()
endfunction()

# No text file of the installed tree names a folder; where it was installed first is no matter, for it is gone as well.
function(check_names_no tree folder allowed)
  file(GLOB_RECURSE files "${tree}/*.cmake" "${tree}/*.hpp" "${tree}/*.h" "${tree}/*.pc")
  foreach(file IN LISTS files)
    file(READ "${file}" text)
    string(REPLACE "${allowed}" "" text "${text}")
    string(FIND "${text}" "${folder}" place)
    if(NOT place EQUAL -1)
      message(FATAL_ERROR "${file} names ${folder}")
    endif()
  endforeach()
endfunction()

# What is installed, or built along, is looked at, not how fast it is.
set(quickly "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG" -DKokkosSoftmax_WARNINGS_AS_ERRORS=OFF)

if(KIND STREQUAL "subdirectory")
  # The consumer compiles the kernels that it calls.
  consume("-DCONSUMER_SUBDIRECTORY=${SOURCE_DIR}" "-DCONSUMER_KOKKOS_SOURCES=${KOKKOS_SOURCES}" ${DEPENDENCIES}
          -DKokkosSoftmax_COMPILED_BACKENDS=NONE ${quickly}
  )
  file(REMOVE_RECURSE "${WORK_DIR}")
  return()
endif()

set(build_dir "${BUILD_DIR}")
if(KIND STREQUAL "rebuilt_package")
  set(build_dir "${WORK_DIR}/build")
  # The C library is the same in both kinds, and installed with the package of this build tree. So are most objects, Kokkos'
  # among them: what is looked at is how they are linked and installed.
  set(C OFF)
  foreach(language IN ITEMS CXX CUDA)
    set(ENV{CMAKE_${language}_COMPILER_LAUNCHER}
        "${CMAKE_COMMAND};-DFROM=${BUILD_DIR};-DTO=${build_dir};-P;${SOURCE_DIR}/tests/install/reuse_object.cmake;--"
    )
  endforeach()
  run("Configuring the library" "${CMAKE_COMMAND}" -S "${SOURCE_DIR}" -B "${build_dir}" ${COMMON} ${DEPENDENCIES}
      -DBUILD_SHARED_LIBS=${SHARED} -DKokkosSoftmax_ENABLE_C=OFF -DKokkosSoftmax_ENABLE_FORTRAN=OFF
      -DKokkosSoftmax_ENABLE_TESTS=OFF -DKokkosSoftmax_ENABLE_PERF=OFF ${quickly}
  )
  unset(ENV{CMAKE_CXX_COMPILER_LAUNCHER})
  unset(ENV{CMAKE_CUDA_COMPILER_LAUNCHER})
  run("Building the library" "${CMAKE_COMMAND}" --build "${build_dir}" --parallel ${CORES})
endif()
run("Installing" "${CMAKE_COMMAND}" --install "${build_dir}" --prefix "${WORK_DIR}/installed")
if(KIND STREQUAL "rebuilt_package")
  file(REMOVE_RECURSE "${build_dir}")
endif()
file(RENAME "${WORK_DIR}/installed" "${WORK_DIR}/moved")
check_names_no("${WORK_DIR}/moved" "${build_dir}" "${WORK_DIR}/installed")
consume("-DCMAKE_PREFIX_PATH=${WORK_DIR}/moved" ${quickly})
if(C)
  consume_from_c("-DCMAKE_PREFIX_PATH=${WORK_DIR}/moved")
endif()
file(REMOVE_RECURSE "${WORK_DIR}")

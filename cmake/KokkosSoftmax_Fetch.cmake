# SPDX-FileCopyrightText: The KokkosSoftmax authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

# Brings the pinned sources of Kokkos, Kokkos Kernels and OpenBLAS from the Python package registry, checked by hash,
# or takes them from a local copy (KokkosSoftmax_DEPENDENCIES_SOURCE_DIR). Nothing else is ever downloaded.

set(KokkosSoftmax_DEPENDENCIES_SOURCE_DIR
    ""
    CACHE PATH "Local copy of the pinned dependencies: the unpacked sdist, the sdist itself, or a folder with the sdist and the OpenBLAS wheel"
)
set(KokkosSoftmax_DOWNLOAD_DIR
    "${PROJECT_BINARY_DIR}/_deps/download"
    CACHE PATH "Where downloaded dependencies are kept; build trees may share it"
)

# The sdist of pycompadre carries Kokkos 4.5.1 and Kokkos Kernels 4.5.1, complete.
set(_kokkossoftmax_sdist_name pycompadre-1.7.6)
set(_kokkossoftmax_sdist_sha256 c766ec4d445ce076069be4b8c51a23ffac4ee79ea949ca86446bfd8c299b154c)
set(_kokkossoftmax_requirements_dir "${CMAKE_CURRENT_LIST_DIR}/requirements")

# Sets out_var to a Python that has pip: the first python3 of PATH may be one without it. Asked without PYTHONPATH, as it
# is used below: where pip builds a wheel, that hides what is installed.
function(_kokkossoftmax_find_pip out_var)
  find_package(Python3 QUIET COMPONENTS Interpreter)
  find_program(KokkosSoftmax_PYTHON3 python3)
  mark_as_advanced(KokkosSoftmax_PYTHON3)
  set(tried "")
  foreach(python IN ITEMS "${KokkosSoftmax_PYTHON3}" "${Python3_EXECUTABLE}" /usr/bin/python3)
    if(python AND EXISTS "${python}")
      execute_process(
        COMMAND ${CMAKE_COMMAND} -E env --unset=PYTHONPATH "${python}" -m pip --version
        RESULT_VARIABLE result
        OUTPUT_QUIET ERROR_QUIET
      )
      if(result EQUAL 0)
        set(${out_var}
            "${python}"
            PARENT_SCOPE
        )
        return()
      endif()
      string(APPEND tried " ${python}")
    endif()
  endforeach()
  set(${out_var}
      ""
      PARENT_SCOPE
  )
endfunction()

# Stops with what went wrong and with the way out.
function(_kokkossoftmax_fetch_failed what detail)
  message(
    FATAL_ERROR
      "KokkosSoftmax: ${what} could not be fetched.\n${detail}\n"
      "Any of these helps:\n"
      "  - install Kokkos 4.5 or newer and point CMake at it with -DKokkos_ROOT=<prefix>;\n"
      "  - on a machine with a connection, download ${_kokkossoftmax_sdist_name}.tar.gz (Python package pycompadre, "
      "source distribution)\n    and set -DKokkosSoftmax_DEPENDENCIES_SOURCE_DIR=<that file, or the folder it was unpacked to>;\n"
      "    a folder that holds the file, and for the heads the wheel of scipy-openblas32, works too."
  )
endfunction()

# _kokkossoftmax_pip_download(<requirements file> <what> [<option>...]): one file of a registry into the download folder.
function(_kokkossoftmax_pip_download requirements what)
  _kokkossoftmax_find_pip(python)
  if(NOT python)
    _kokkossoftmax_fetch_failed("${what}" "There is no python3 with pip on this machine.")
  endif()
  file(MAKE_DIRECTORY "${KokkosSoftmax_DOWNLOAD_DIR}")
  set(tools "${KokkosSoftmax_DOWNLOAD_DIR}/build-tools")
  set(pip ${CMAKE_COMMAND} -E env "PYTHONPATH=${tools}" "${python}" -m pip --quiet --no-input
          --disable-pip-version-check
  )
  # pip asks an sdist for its metadata even when it only downloads it, and that needs these two. A folder of their own
  # does without a virtual environment, which not every machine can make.
  if("--no-build-isolation" IN_LIST ARGN AND NOT EXISTS "${tools}/setuptools")
    execute_process(
      COMMAND ${pip} install --no-deps --only-binary :all: --require-hashes --target "${tools}" -r
              "${_kokkossoftmax_requirements_dir}/build-tools.txt"
      RESULT_VARIABLE result
      OUTPUT_VARIABLE output
      ERROR_VARIABLE output
    )
    if(NOT result EQUAL 0)
      file(REMOVE_RECURSE "${tools}")
      _kokkossoftmax_fetch_failed("${what}" "pip install of setuptools and packaging said:\n${output}")
    endif()
  endif()
  execute_process(
    COMMAND ${pip} download --no-deps --require-hashes ${ARGN} --dest "${KokkosSoftmax_DOWNLOAD_DIR}" -r
            "${_kokkossoftmax_requirements_dir}/${requirements}"
    RESULT_VARIABLE result
    OUTPUT_VARIABLE output
    ERROR_VARIABLE output
  )
  if(NOT result EQUAL 0)
    _kokkossoftmax_fetch_failed("${what}" "pip download said:\n${output}")
  endif()
endfunction()

# _kokkossoftmax_patch(<file> <old> <new>): replaces the one place where <old> stands; a file patched before is left
# alone, and anything else is an error, so that a changed source is noticed.
function(_kokkossoftmax_patch file old new)
  file(READ "${file}" text)
  string(FIND "${text}" "${old}" first)
  string(FIND "${text}" "${old}" last REVERSE)
  if(first EQUAL -1)
    string(FIND "${text}" "${new}" already)
    if(already EQUAL -1)
      message(FATAL_ERROR "KokkosSoftmax: ${file} has no '${old}' to patch")
    endif()
    return()
  elseif(NOT first EQUAL last)
    message(FATAL_ERROR "KokkosSoftmax: ${file} has '${old}' more than once")
  endif()
  string(REPLACE "${old}" "${new}" text "${text}")
  file(WRITE "${file}" "${text}")
endfunction()

# CUDA 13 changed the signatures of three functions that Kokkos 4.5.1 calls.
function(_kokkossoftmax_patch_kokkos source_dir)
  file(STRINGS "${source_dir}/kokkos/CMakeLists.txt" version REGEX "^set\\(Kokkos_VERSION_(MAJOR|MINOR|PATCH) [0-9]+\\)")
  string(REGEX REPLACE "[^0-9;]" "" version "${version}")
  if(NOT version STREQUAL "4;5;1")
    return()
  endif()
  set(instance "${source_dir}/kokkos/core/src/Cuda/Kokkos_Cuda_Instance.hpp")
  file(READ "${instance}" text)
  if(text MATCHES "cudaMemLocation")
    return() # a local copy that somebody has patched already
  endif()
  _kokkossoftmax_patch(
    "${instance}" "return cudaGraphAddDependencies(graph, from, to, numDependencies);"
    "#if CUDART_VERSION >= 13000
    return cudaGraphAddDependencies(graph, from, to, nullptr, numDependencies);
#else
    return cudaGraphAddDependencies(graph, from, to, numDependencies);
#endif"
  )
  _kokkossoftmax_patch(
    "${instance}" "return cudaMemAdvise(devPtr, count, advice, device);"
    "#if CUDART_VERSION >= 13000
    return cudaMemAdvise(devPtr, count, advice, cudaMemLocation{cudaMemLocationTypeDevice, device});
#else
    return cudaMemAdvise(devPtr, count, advice, device);
#endif"
  )
  _kokkossoftmax_patch(
    "${instance}" "return cudaMemPrefetchAsync(devPtr, count, dstDevice,
                                get_input_stream(stream));"
    "#if CUDART_VERSION >= 13000
    return cudaMemPrefetchAsync(devPtr, count, cudaMemLocation{cudaMemLocationTypeDevice, dstDevice}, 0,
                                get_input_stream(stream));
#else
    return cudaMemPrefetchAsync(devPtr, count, dstDevice, get_input_stream(stream));
#endif"
  )
endfunction()

# Static programs take the CUDA runtime with them, so that one built here runs where only the driver is installed.
function(_kokkossoftmax_patch_cuda_runtime source_dir)
  set(find_cuda "${source_dir}/kokkos/cmake/Modules/FindTPLCUDA.cmake")
  file(READ "${find_cuda}" text)
  string(REPLACE "CUDA::cuda_driver CUDA::cudart)"
                 "CUDA::cuda_driver \${KokkosSoftmax_CUDA_RUNTIME_TARGET})" patched "${text}"
  )
  if(NOT patched MATCHES "KokkosSoftmax_CUDA_RUNTIME_TARGET")
    message(FATAL_ERROR "KokkosSoftmax: ${find_cuda} has no CUDA::cudart to patch")
  endif()
  if(NOT patched STREQUAL text)
    file(WRITE "${find_cuda}" "${patched}")
  endif()
endfunction()

# kokkossoftmax_fetch_kokkos(<out_dir>): a folder with patched copies of kokkos/ and kokkos-kernels/, in the build tree.
function(kokkossoftmax_fetch_kokkos out_dir)
  set(sources "${PROJECT_BINARY_DIR}/_deps/${_kokkossoftmax_sdist_name}")
  set(${out_dir}
      "${sources}"
      PARENT_SCOPE
  )
  set(stamp "${sources}/.kokkossoftmax-complete")
  set(origin "${KokkosSoftmax_DEPENDENCIES_SOURCE_DIR}")
  if(EXISTS "${stamp}")
    file(READ "${stamp}" stamped)
    if(stamped STREQUAL "${origin}")
      return()
    endif()
  endif()
  file(REMOVE_RECURSE "${sources}")

  set(archive "")
  if(origin)
    if(IS_DIRECTORY "${origin}" AND EXISTS "${origin}/kokkos/CMakeLists.txt")
      message(STATUS "KokkosSoftmax: Kokkos from the local copy ${origin}")
      file(COPY "${origin}/kokkos" DESTINATION "${sources}")
      if(EXISTS "${origin}/kokkos-kernels")
        file(COPY "${origin}/kokkos-kernels" DESTINATION "${sources}")
      endif()
    elseif(EXISTS "${origin}" AND NOT IS_DIRECTORY "${origin}")
      set(archive "${origin}")
    elseif(EXISTS "${origin}/${_kokkossoftmax_sdist_name}.tar.gz")
      set(archive "${origin}/${_kokkossoftmax_sdist_name}.tar.gz")
    else()
      message(
        FATAL_ERROR
          "KokkosSoftmax: KokkosSoftmax_DEPENDENCIES_SOURCE_DIR=${origin} is neither ${_kokkossoftmax_sdist_name}.tar.gz, "
          "nor a folder that holds it, nor the folder it was unpacked to (with kokkos/CMakeLists.txt)"
      )
    endif()
  else()
    set(archive "${KokkosSoftmax_DOWNLOAD_DIR}/${_kokkossoftmax_sdist_name}.tar.gz")
    if(NOT EXISTS "${archive}")
      message(STATUS "KokkosSoftmax: no Kokkos was found; fetching the pinned source of Kokkos 4.5.1")
      _kokkossoftmax_pip_download(kokkos.txt "Kokkos" --no-binary pycompadre --no-build-isolation)
    endif()
  endif()
  if(archive)
    file(SHA256 "${archive}" sha256)
    if(NOT sha256 STREQUAL _kokkossoftmax_sdist_sha256)
      message(FATAL_ERROR "KokkosSoftmax: ${archive} is not the pinned file: its SHA-256 is ${sha256}, expected is "
                          "${_kokkossoftmax_sdist_sha256}"
      )
    endif()
    file(
      ARCHIVE_EXTRACT
      INPUT "${archive}"
      DESTINATION "${PROJECT_BINARY_DIR}/_deps"
      PATTERNS "${_kokkossoftmax_sdist_name}/kokkos/*" "${_kokkossoftmax_sdist_name}/kokkos-kernels/*"
    )
  endif()
  _kokkossoftmax_patch_kokkos("${sources}")
  _kokkossoftmax_patch_cuda_runtime("${sources}")
  file(WRITE "${stamp}" "${origin}")
endfunction()

# kokkossoftmax_fetch_openblas(<out_dir>): the unpacked wheel: lib/libscipy_openblas.so, include/.
function(kokkossoftmax_fetch_openblas out_dir)
  set(unpacked "${PROJECT_BINARY_DIR}/_deps/openblas")
  set(${out_dir}
      "${unpacked}/scipy_openblas32"
      PARENT_SCOPE
  )
  if(EXISTS "${unpacked}/scipy_openblas32/lib")
    return()
  endif()
  set(wheel "")
  if(IS_DIRECTORY "${KokkosSoftmax_DEPENDENCIES_SOURCE_DIR}")
    file(GLOB wheel "${KokkosSoftmax_DEPENDENCIES_SOURCE_DIR}/scipy_openblas32-*.whl")
  endif()
  if(NOT wheel)
    file(GLOB wheel "${KokkosSoftmax_DOWNLOAD_DIR}/scipy_openblas32-*.whl")
    if(NOT wheel)
      message(STATUS "KokkosSoftmax: no optimised BLAS was found; fetching the pinned OpenBLAS")
    endif()
    # pip takes a file that is there already, after it has checked its hash.
    _kokkossoftmax_pip_download(openblas.txt "OpenBLAS" --only-binary :all:)
    file(GLOB wheel "${KokkosSoftmax_DOWNLOAD_DIR}/scipy_openblas32-*.whl")
  endif()
  list(GET wheel 0 wheel)
  file(SHA256 "${wheel}" sha256)
  file(READ "${_kokkossoftmax_requirements_dir}/openblas.txt" pinned)
  string(FIND "${pinned}" "sha256:${sha256}" known)
  if(known EQUAL -1)
    message(FATAL_ERROR "KokkosSoftmax: ${wheel} is not one of the pinned files: its SHA-256 is ${sha256}")
  endif()
  file(ARCHIVE_EXTRACT INPUT "${wheel}" DESTINATION "${unpacked}")
endfunction()

# kokkossoftmax_find_numpy(<python> <out_dir>): nothing where that Python has NumPy, else a folder for PYTHONPATH with the
# pinned one; nothing, and a message, where that cannot be had.
function(kokkossoftmax_find_numpy python out_dir)
  set(${out_dir}
      ""
      PARENT_SCOPE
  )
  execute_process(
    COMMAND "${python}" -c "import numpy"
    RESULT_VARIABLE result
    OUTPUT_QUIET ERROR_QUIET
  )
  if(result EQUAL 0)
    return()
  endif()
  set(folder "${PROJECT_BINARY_DIR}/_deps/numpy")
  if(NOT EXISTS "${folder}/numpy")
    message(STATUS "KokkosSoftmax: no NumPy was found for the tests; fetching the pinned one")
    execute_process(
      COMMAND "${python}" -m pip --quiet --no-input --disable-pip-version-check install --no-deps --only-binary :all:
              --require-hashes --target "${folder}" -r "${_kokkossoftmax_requirements_dir}/numpy.txt"
      RESULT_VARIABLE result
      OUTPUT_VARIABLE output
      ERROR_VARIABLE output
    )
    if(NOT result EQUAL 0)
      file(REMOVE_RECURSE "${folder}")
      message(STATUS "KokkosSoftmax: NumPy could not be fetched, tests of the Python package will be skipped:\n${output}")
      return()
    endif()
  endif()
  set(${out_dir}
      "${folder}"
      PARENT_SCOPE
  )
endfunction()

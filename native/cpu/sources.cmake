# The CPU's sources (REFIT_CPU_SOURCES), and the flags of the sources that use one instruction set each (cpu/isa/isa.h
# says why). The end of a file's name is the instruction set. Both CMake projects include this file.
file(GLOB_RECURSE REFIT_CPU_SOURCES CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/*.cc)

# Contraction would fuse multiply and add in some instruction sets and not in others.
set(refit_scalar_flags -ffp-contract=off)
set(refit_avx2_flags ${refit_scalar_flags} -mavx2 -mfma)
set(refit_avx512_flags ${refit_scalar_flags} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # GCC's own intrinsics for undefined registers look uninitialised to it (GCC bug 105593).
  list(APPEND refit_avx512_flags -Wno-uninitialized -Wno-maybe-uninitialized)
endif()
set(refit_avx512bf16_flags ${refit_avx512_flags} -mavx512bf16)

if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64|amd64")
  list(FILTER REFIT_CPU_SOURCES EXCLUDE REGEX "_avx[^/]*\\.cc$")
endif()
foreach(source IN LISTS REFIT_CPU_SOURCES)
  if(source MATCHES "_(scalar|avx2|avx512|avx512bf16)\\.cc$")
    set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS "${refit_${CMAKE_MATCH_1}_flags}")
  endif()
endforeach()

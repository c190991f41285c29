# The CPU's sources (REFIT_CPU_SOURCES) and the flags of the units that hold one instruction set each (why: cpu/isa.h).
# Included from the native root: include(cpu/sources.cmake).
file(GLOB REFIT_CPU_SOURCES CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/*.cc)

# Contraction would fuse multiply and add here and not there.
set(refit_isa_flags -ffp-contract=off)
set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/isa_scalar.cc ${CMAKE_CURRENT_LIST_DIR}/attention_scalar.cc PROPERTIES
  COMPILE_OPTIONS "${refit_isa_flags}")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64|amd64")
  set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/isa_avx2.cc ${CMAKE_CURRENT_LIST_DIR}/attention_avx2.cc PROPERTIES
    COMPILE_OPTIONS "${refit_isa_flags};-mavx2;-mfma")
  set(refit_avx512_flags ${refit_isa_flags} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # GCC's own intrinsics for undefined registers look uninitialised to it (GCC bug 105593).
    list(APPEND refit_avx512_flags -Wno-uninitialized -Wno-maybe-uninitialized)
  endif()
  set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/isa_avx512.cc ${CMAKE_CURRENT_LIST_DIR}/attention_avx512.cc PROPERTIES
    COMPILE_OPTIONS "${refit_avx512_flags}")
  set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/isa_avx512bf16.cc PROPERTIES
    COMPILE_OPTIONS "${refit_avx512_flags};-mavx512bf16")
else()
  list(FILTER REFIT_CPU_SOURCES EXCLUDE REGEX "/isa_avx[^/]*\\.cc$")
endif()

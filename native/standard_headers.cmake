# Precompiled headers of the C++ library (standard_headers.h) for builds that are made to see that tests pass or that
# everything compiles: half of the compile time of a small source is these. Both CMake projects include this file.
file(WRITE ${CMAKE_BINARY_DIR}/standard_headers.cc "")
add_library(refit_standard_headers OBJECT EXCLUDE_FROM_ALL ${CMAKE_BINARY_DIR}/standard_headers.cc)
target_precompile_headers(refit_standard_headers PRIVATE ${CMAKE_CURRENT_LIST_DIR}/standard_headers.h)

# For targets with the flags of refit_standard_headers: -fPIC and -fPIE would each need headers of their own. A compiler
# cache cannot use precompiled headers.
function(precompile_standard_headers)
  if(CMAKE_CXX_COMPILER_LAUNCHER)
    return()
  endif()
  foreach(target IN LISTS ARGN)
    target_precompile_headers(${target} REUSE_FROM refit_standard_headers)
  endforeach()
endfunction()

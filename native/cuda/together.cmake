# Compiling all kernels of a target at a time. Most of the time of an unoptimized build goes into headers, which nvcc
# reads four times for each source. UNITY_BUILD of CMake 3.25 leaves .cu out.

# Sets `result` to the given sources with one source, `name`.cu, in place of those in CUDA: it includes them. Names in
# their anonymous namespaces must differ.
function(include_together result name)
  set(rest)
  set(text)
  foreach(source IN LISTS ARGN)
    if(source MATCHES "\\.cu$")
      string(APPEND text "#include \"${source}\"\n")
    else()
      list(APPEND rest ${source})
    endif()
  endforeach()
  file(GENERATE OUTPUT ${CMAKE_BINARY_DIR}/together/${name}.cu CONTENT "${text}")
  set(${result} ${rest} ${CMAKE_BINARY_DIR}/together/${name}.cu PARENT_SCOPE)
endfunction()

# Compiling several sources of the CUDA library at a time. Most of the time of an unoptimized build goes into headers,
# which nvcc reads four times for each source. UNITY_BUILD of CMake 3.25 leaves .cu out.

# Sets `result` to sources that include the given ones: one for the sources of a folder in one language, and one for
# those that are alone in theirs. Names in their anonymous namespaces must differ. A few sources stay by themselves. The
# names of the sources that are made begin with `prefix`.
function(compile_together result prefix)
  set(apart)
  set(units)
  foreach(source IN LISTS ARGN)
    # Tests include the sources of writes, to compile them with fault points, and must be able to leave these out.
    # gpus.cc has a definition of its own, and GCC warns about types of an included source that cublas_lt.cc has.
    if(source MATCHES "/(write_ring|write_run|gpus|cublas_lt)\\.cc$")
      list(APPEND apart ${source})
    else()
      get_filename_component(folder ${source} DIRECTORY)
      get_filename_component(folder ${folder} NAME)
      get_filename_component(extension ${source} LAST_EXT)
      list(APPEND units ${folder}${extension})
      list(APPEND sources_${folder}${extension} ${source})
    endif()
  endforeach()
  list(REMOVE_DUPLICATES units)
  set(written)
  foreach(unit IN LISTS units)
    list(LENGTH sources_${unit} count)
    set(name ${unit})
    if(count EQUAL 1)
      string(REGEX REPLACE ".*\\." "alone." name ${unit})
    endif()
    foreach(source IN LISTS sources_${unit})
      string(APPEND text_${name} "#include \"${source}\"\n")
    endforeach()
    list(APPEND written ${name})
  endforeach()
  list(REMOVE_DUPLICATES written)
  foreach(name IN LISTS written)
    file(GENERATE OUTPUT ${CMAKE_BINARY_DIR}/together/${prefix}${name} CONTENT "${text_${name}}")
    list(APPEND apart ${CMAKE_BINARY_DIR}/together/${prefix}${name})
  endforeach()
  set(${result} ${apart} PARENT_SCOPE)
endfunction()

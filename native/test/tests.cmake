# The test programs, one for each *_test.cc in native/test or a folder below it, and group_life, which opens
# nccl_loop.so. All are tests of ctest. The thread sanitizer runs only tests that have threads and need no
# kernel, because the kernels take longest to compile.
enable_testing()

file(GLOB_RECURSE test_sources CONFIGURE_DEPENDS test/*_test.cc)
list(FILTER test_sources EXCLUDE REGEX "/test/gpu/")
if(REFIT_SANITIZE STREQUAL "thread")
  list(FILTER test_sources INCLUDE REGEX "/(gloo|ipc|pool|step_queue|store|write)(_[a-z_]+)?_test\\.cc$")
endif()
if(NOT test_sources)
  message(FATAL_ERROR "native/test has no *_test.cc")
endif()

add_library(refit_core_faults OBJECT EXCLUDE_FROM_ALL ${REFIT_CORE_SOURCES})
target_compile_definitions(refit_core_faults PRIVATE REFIT_FAULTS)
# The build for the thread sanitizer compiles each source by itself, so that a missing #include is found.
set(together OFF)
if(REFIT_UNITY AND NOT REFIT_SANITIZE STREQUAL "thread")
  set(together ON)
endif()
set_target_properties(refit_core_faults refit_kernels PROPERTIES UNITY_BUILD ${together})
set(objects $<TARGET_OBJECTS:refit_core_faults>)
if(NOT REFIT_SANITIZE STREQUAL "thread")
  list(APPEND objects $<TARGET_OBJECTS:refit_kernels>)
endif()
# One library for all programs: an archive links the parts that a program uses, not all of them.
add_library(refit_tested STATIC ${objects})

function(add_test_program name)
  add_executable(${name} ${ARGN})
  target_compile_definitions(${name} PRIVATE REFIT_FAULTS)
  target_link_libraries(${name} PRIVATE refit_tested Threads::Threads ${CMAKE_DL_LIBS})
  set(programs ${programs} ${name} PARENT_SCOPE)
endfunction()

foreach(source IN LISTS test_sources)
  get_filename_component(name ${source} NAME_WE)
  add_test_program(${name} ${source})
  add_test(NAME ${name} COMMAND ${name})
endforeach()

file(GLOB_RECURSE loop_sources CONFIGURE_DEPENDS test/nccl_loop*.cc)
add_library(nccl_loop MODULE ${loop_sources})
set_target_properties(nccl_loop PROPERTIES PREFIX "" SUFFIX .so)
target_link_libraries(nccl_loop PRIVATE Threads::Threads)
file(GLOB_RECURSE group_life_sources CONFIGURE_DEPENDS test/group_life*.cc test/group_bytes*.cc
     test/group_p2p*.cc)
add_library(refit_group_faults OBJECT EXCLUDE_FROM_ALL ${REFIT_GROUP_SOURCES})
target_compile_definitions(refit_group_faults PRIVATE REFIT_FAULTS)
set_target_properties(refit_group_faults PROPERTIES UNITY_BUILD ${together})
add_test_program(group_life ${group_life_sources} $<TARGET_OBJECTS:refit_group_faults>)
add_dependencies(group_life nccl_loop)
add_test(NAME group_life COMMAND group_life $<TARGET_FILE:nccl_loop>)

if(together)
  include(standard_headers.cmake)
  precompile_standard_headers(${programs} refit_core_faults refit_group_faults)
endif()

get_property(names DIRECTORY PROPERTY TESTS)
set_tests_properties(${names} PROPERTIES TIMEOUT 300
                     ENVIRONMENT "TSAN_OPTIONS=suppressions=${CMAKE_CURRENT_SOURCE_DIR}/test/tsan.supp")

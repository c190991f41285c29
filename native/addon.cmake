# refit.node, and the libraries that the tests of the addon open: refit-faults.node (fault points that tests can arm),
# refit-stand-in.so (a CUDA library without a GPU) and nccl_loop.so (NCCL's interface, with threads as ranks).

# Sets `package`'s folder of headers in `result`. Node resolves the package, so hoisted installations work as well.
function(node_include package result)
  execute_process(COMMAND node -p "require('${package}').include_dir" WORKING_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR}
                  OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR "${package} is not installed: run \"npm ci\" first")
  endif()
  get_filename_component(found ${found} ABSOLUTE BASE_DIR ${CMAKE_CURRENT_SOURCE_DIR})
  set(${result} ${found} PARENT_SCOPE)
endfunction()

# Splits the sources after the two names into those that can see a fault point and all others. A source sees one if it
# includes core/fault.h, itself or through a header that does. The others are compiled once for both builds, with
# REFIT_WITHOUT_FAULT_POINTS, under which core/fault.h is an error.
function(split_by_faults with without)
  file(GLOB_RECURSE headers CONFIGURE_DEPENDS core/*.h codec/*.h transport/*.h binding/*.h)
  set(pattern "REFIT_FAULT")
  foreach(header IN LISTS headers)
    file(STRINGS ${header} lines REGEX "REFIT_FAULT|include \"core/fault\\.h\"" LIMIT_COUNT 1)
    if(lines)
      file(RELATIVE_PATH name ${CMAKE_CURRENT_SOURCE_DIR} ${header})
      string(REPLACE "." "\\." name ${name})
      string(APPEND pattern "|include \"${name}\"")
    endif()
  endforeach()
  set(seeing)
  set(rest)
  foreach(source IN LISTS ARGN)
    file(STRINGS ${source} lines REGEX "${pattern}" LIMIT_COUNT 1)
    if(lines)
      list(APPEND seeing ${source})
    else()
      list(APPEND rest ${source})
    endif()
  endforeach()
  # A source moves to the other list when it gains or loses its fault point.
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${ARGN} ${headers})
  set(${with} ${seeing} PARENT_SCOPE)
  set(${without} ${rest} PARENT_SCOPE)
endfunction()

node_include(node-addon-api addon_api_include)
node_include(node-api-headers api_headers_include)
split_by_faults(core_with_faults core_plain ${REFIT_CORE_SOURCES})
split_by_faults(binding_with_faults binding_plain ${REFIT_BINDING_SOURCES})

function(add_objects target)
  add_library(${target} OBJECT EXCLUDE_FROM_ALL ${ARGN})
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${REFIT_UNITY})
endfunction()
function(add_binding target)
  add_objects(${target} ${ARGN})
  target_include_directories(${target} SYSTEM PRIVATE ${addon_api_include} ${api_headers_include})
  target_compile_definitions(${target} PRIVATE NAPI_VERSION=9)
endfunction()
add_objects(refit_core_plain ${core_plain})
add_binding(refit_binding_plain ${binding_plain})
foreach(plain refit_core_plain refit_binding_plain)
  target_compile_definitions(${plain} PRIVATE REFIT_WITHOUT_FAULT_POINTS)
endforeach()
# Half of the compile time of these sources is napi.h, which napi_setup.h includes with the settings of the binding.
# A compiler cache cannot use precompiled headers.
if(NOT CMAKE_CXX_COMPILER_LAUNCHER)
  target_precompile_headers(refit_binding_plain PRIVATE binding/napi_setup.h)
endif()
add_objects(refit_core ${core_with_faults})
add_objects(refit_core_faults ${core_with_faults})
add_binding(refit_binding ${binding_with_faults})
add_binding(refit_binding_faults ${binding_with_faults})
foreach(faulty refit_core_faults refit_binding_faults)
  target_compile_definitions(${faulty} PRIVATE REFIT_FAULTS)
endforeach()

# A library that is opened and never closed. nodelete: it must outlive the JS worker thread that loaded it, because
# native threads run its code. The C++ library is linked statically because the program that opens it may have another.
function(add_opened_library target name suffix)
  add_library(${target} MODULE EXCLUDE_FROM_ALL ${ARGN})
  set_target_properties(${target} PROPERTIES OUTPUT_NAME ${name} PREFIX "" SUFFIX ${suffix} LINKER_LANGUAGE CXX)
  target_link_options(${target} PRIVATE -static-libstdc++ -static-libgcc -Wl,-z,nodelete)
  target_link_libraries(${target} PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
endfunction()

function(add_addon target name faults)
  add_opened_library(${target} ${name} .node $<TARGET_OBJECTS:refit_kernels>
                     $<TARGET_OBJECTS:refit_core_plain> $<TARGET_OBJECTS:refit_core${faults}>
                     $<TARGET_OBJECTS:refit_binding_plain> $<TARGET_OBJECTS:refit_binding${faults}>)
  set(symbols ${CMAKE_CURRENT_SOURCE_DIR}/binding/exports.map)
  set_target_properties(${target} PROPERTIES LINK_DEPENDS ${symbols})
  target_link_options(${target} PRIVATE -Wl,--version-script=${symbols})
endfunction()
add_addon(refit_node refit "")
add_addon(refit_faults_node refit-faults _faults)

# A published package has no native/test.
file(GLOB_RECURSE stand_in_sources CONFIGURE_DEPENDS test/ipc_stand_in*.cc)
file(GLOB_RECURSE loop_sources CONFIGURE_DEPENDS test/nccl_loop*.cc)
if(stand_in_sources)
  add_objects(refit_group_faults ${REFIT_GROUP_SOURCES})
  target_compile_definitions(refit_group_faults PRIVATE REFIT_FAULTS)
  add_opened_library(refit_stand_in refit-stand-in .so ${stand_in_sources} $<TARGET_OBJECTS:refit_group_faults>
                     $<TARGET_OBJECTS:refit_kernels> $<TARGET_OBJECTS:refit_core_plain>
                     $<TARGET_OBJECTS:refit_core_faults>)
  target_compile_definitions(refit_stand_in PRIVATE REFIT_FAULTS)
  add_opened_library(nccl_loop nccl_loop .so ${loop_sources})
  add_custom_target(refit_test_libraries DEPENDS refit_faults_node refit_stand_in nccl_loop)
endif()

// The only file that includes napi.h, so that every file of the binding is compiled with the same settings.
#pragma once

#ifndef NAPI_VERSION
#define NAPI_VERSION 9
#endif
// C++ exceptions become JavaScript ones, std::exception included.
#define NODE_ADDON_API_CPP_EXCEPTIONS
#define NODE_ADDON_API_CPP_EXCEPTIONS_ALL
#define NODE_ADDON_API_DISABLE_DEPRECATED
#define NODE_ADDON_API_REQUIRE_BASIC_FINALIZERS
// A worker that is being terminated refuses every throw; without this, that would abort the whole process.
#define NODE_API_SWALLOW_UNTHROWABLE_EXCEPTIONS
#define NODE_API_NO_EXTERNAL_BUFFERS_ALLOWED

#include <napi.h>

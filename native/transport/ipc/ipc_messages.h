// Error messages for the sender of a refused handle: the cause and the remedy.
#pragma once
#include <string>

#include "transport/ipc/ipc_driver.h"

namespace refit::ipc {

std::string cannot_open(const Refused& refused, const Segment& segment);
std::string cannot_open_event(const Refused& refused);
std::string too_short(uint64_t end, uint64_t bytes);

}  // namespace refit::ipc

#pragma once
#include <cstdint>
#include <string>

namespace refit {

// The message for an opcode that PickleMachine does not read.
std::string describe_opcode(uint8_t opcode);

}  // namespace refit

#pragma once
#include <cstdint>
#include <string>

namespace refit {

// Why PickleMachine does not read an opcode.
std::string describe_opcode(uint8_t opcode);

}  // namespace refit

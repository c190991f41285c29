// Opcodes that Python's unpickler reads and PickleMachine refuses, with the reasons (Lib/pickletools.py has the whole
// list).
#include "codec/pickle_opcodes.h"

#include <cstdio>

namespace refit {
namespace {

constexpr const char* kText = "an opcode of protocol 0 or 1";
constexpr const char* kOutOfBand = "a buffer beside the pickle, which a request cannot carry";
constexpr const char* kExtension = "a number of the copyreg extension registry, which stands for a name";
constexpr const char* kPersistent =
    "a persistent id, as torch.save writes; send handles (ForkingPickler) or safetensors";
constexpr const char* kKeywords = "an instance made with keyword arguments, which none of the known classes needs";

struct RefusedOpcode {
  uint8_t opcode;
  const char* name;
  const char* reason;
};

constexpr RefusedOpcode kRefused[] = {
    {0x50, "PERSID", kPersistent},
    {0x51, "BINPERSID", kPersistent},
    {0x82, "EXT1", kExtension},
    {0x83, "EXT2", kExtension},
    {0x84, "EXT4", kExtension},
    {0x97, "NEXT_BUFFER", kOutOfBand},
    {0x98, "READONLY_BUFFER", kOutOfBand},
    {0x92, "NEWOBJ_EX", kKeywords},
    {0x69, "INST", kText},
    {0x6f, "OBJ", kText},
    {0x53, "STRING", kText},
    {0x54, "BINSTRING", kText},
    {0x55, "SHORT_BINSTRING", kText},
    {0x49, "INT", kText},
    {0x4c, "LONG", kText},
    {0x46, "FLOAT", kText},
    {0x56, "UNICODE", kText},
    {0x64, "DICT", kText},
    {0x6c, "LIST", kText},
    {0x32, "DUP", kText},
    {0x70, "PUT", kText},
    {0x67, "GET", kText},
};

}  // namespace

std::string describe_opcode(uint8_t opcode) {
  char hex[3];
  std::snprintf(hex, sizeof hex, "%02x", opcode);
  for (const RefusedOpcode& refused : kRefused) {
    if (refused.opcode != opcode) continue;
    return std::string("opcode ") + hex + " (" + refused.name + ") is not read: " + refused.reason;
  }
  return std::string(hex) + " is no opcode of pickle";
}

}  // namespace refit

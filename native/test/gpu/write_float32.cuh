// Writes of parameters in float32. For write_test.cc.
#pragma once
#include <string>
#include <vector>

#include "test/gpu/write_world.cuh"

namespace {

// The table of adapters: any bits of float32 arrive as they are. scramble leaves parameters of adapters alone.
void float32_parameters_arrive(uint64_t seed) {
  for (const Place place : {Place::kFile, Place::kMemory, Place::kPinned, Place::kGpu}) {
    Random random(seed);
    Fixture f;
    f.places = {place};
    f.bytes.resize(1);
    f.config.ranks = 2;
    f.config.params = {{"adapters.table", 37, 2, DType::kFloat32}, {"other", 8, 24, kElementType}};
    f.bytes[0].resize(20 * 12 + 37 * 12);
    for (uint8_t& byte : f.bytes[0]) byte = static_cast<uint8_t>(random.below(256));
    // Rows of 2 with a gap behind each, in two tensors.
    f.job.tensors = {{0, 0, DType::kFloat32, 20, 2, 12, 4}, {0, 20 * 12 + 4, DType::kFloat32, 17, 2, 12, 4}};
    for (int r = 0; r < 2; r++) f.job.rects.push_back({0, r, 0, 0, 0, 20, 2, 0, 0});
    for (int r = 0; r < 2; r++) f.job.rects.push_back({1, r, 0, 0, 0, 17, 2, 20, 0});
    f.place();
    World world(f.config, 1);
    const WriteOutcome outcome = world.store->write(f.job);
    CHECKF(outcome.error.empty(), "%s", outcome.error.c_str());
    world.expected.write(f.host_job(), world.pool);
    world.scramble(seed);
    world.compare("float32");
    std::vector<uint8_t> got(5 * 4), want = got;
    world.store->read(1, 0, 3, 1, 5, 1, got.data());
    world.expected.read(1, 0, 3, 1, 5, 1, want.data());
    CHECK(got == want);
    const std::vector<Rect> rects = {{0, 0, 0, 2, 1, 30, 1, 4, 1}, {0, 1, 1, 0, 0, 8, 24, 0, 0}};
    CHECK(world.store->checksum(rects, {24}) == world.expected.checksum(rects, {24}, world.pool));
    f.job.tensors[1].dtype = DType::kBFloat16;
    f.job.tensors[1].col_bytes = 2;
    const WriteOutcome refused = world.store->write(f.job);
    CHECK(refused.error.find("float32") != std::string::npos && refused.states == std::vector<uint8_t>({0, 0}));
    world.compare("float32, refused");
  }
}

}  // namespace

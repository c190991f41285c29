#include "cpu/gemm/gemm_tile.h"
#include "cpu/isa/isa_avx512_vec.h"
#include "cpu/isa/kernels_vec.h"

namespace refit::cpu {

constinit const VectorOps kVectorAvx512 = vector_ops<Avx512>();
constinit const GemmOps kGemmAvx512Bf16 = Gemm<Avx512, FloatArith<Avx512>, LoadWiden<Avx512>, 2>::ops(convert_floats);
constinit const GemmOps kGemmAvx512F32 = Gemm<Avx512, FloatArith<Avx512>, LoadWords<Avx512>, 4>::ops(convert_floats);

}  // namespace refit::cpu

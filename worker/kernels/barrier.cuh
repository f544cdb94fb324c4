// Barriers in shared memory, and boxes of an array that the copy engine brings there.
#pragma once

#include "common.cuh"

// How an array is laid out, for the copy engine: made by the driver, passed by value.
struct alignas(64) TensorMap {
    uint64_t words[16];
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ void barrier_init(uint64_t& barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}

// Until the phase of this parity has ended; the phase before the first counts as odd.
__device__ __forceinline__ void barrier_wait(uint64_t& barrier, int phase) {
    asm volatile("{.reg .pred done;\nagain: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;}" ::"r"(shared_address(&barrier)),
                 "r"(phase)
                 : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t& barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

// Arrives; the phase ends once so many bytes have come too.
__device__ __forceinline__ void barrier_expect(uint64_t& barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// A box by its first corner; what lies outside of the array is zero.
__device__ __forceinline__ void copy_box(uint32_t to, const TensorMap& map, uint64_t& barrier, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to), "l"(&map),
                 "r"(shared_address(&barrier)), "r"(x), "r"(y)
                 : "memory");
}

__device__ __forceinline__ void copy_box(uint32_t to, const TensorMap& map, uint64_t& barrier, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to), "l"(&map),
                 "r"(shared_address(&barrier)), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

#endif

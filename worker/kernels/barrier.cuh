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

// What L2 does with data: to be dropped first, or like any other.
__device__ __forceinline__ uint64_t evict_first() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ uint64_t evict_normal() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// A box by its first corner; what lies outside of the array is zero.
__device__ __forceinline__ void copy_box(uint32_t to, const TensorMap& map, uint64_t& barrier, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to), "l"(&map),
                 "r"(shared_address(&barrier)), "r"(x), "r"(y)
                 : "memory");
}

__device__ __forceinline__ void copy_box(uint32_t to, const TensorMap& map, uint64_t& barrier, int x, int y, uint64_t policy) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
                 "l"(&map), "r"(shared_address(&barrier)), "r"(x), "r"(y), "l"(policy)
                 : "memory");
}

__device__ __forceinline__ void copy_box(uint32_t to, const TensorMap& map, uint64_t& barrier, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to), "l"(&map),
                 "r"(shared_address(&barrier)), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

// A box of the weights: one reading, past what is to stay in L2.
__device__ __forceinline__ void copy_box(uint32_t to, const TensorMap& map, uint64_t& barrier, int x, int y, int z, int u, int v) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(to),
        "l"(&map), "r"(shared_address(&barrier)), "r"(x), "r"(y), "r"(z), "r"(u), "r"(v), "l"(evict_first())
        : "memory");
}

// Blocks of a cluster, whose shared memory is open to one another.
__device__ __forceinline__ int cluster_rank() {
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// Where an address of this block's shared memory is in another block of the cluster.
__device__ __forceinline__ uint32_t address_in(uint32_t address, int rank) {
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

__device__ __forceinline__ void barrier_arrive_at(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// A box to the same place, and barrier, of all blocks of the cluster in `mask`.
__device__ __forceinline__ void copy_box_to_all(uint32_t to, const TensorMap& map, uint64_t& barrier, int x, int y, uint16_t mask) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
        "l"(&map), "r"(shared_address(&barrier)), "r"(x), "r"(y), "h"(mask)
        : "memory");
}

__device__ __forceinline__ void copy_box_to_all(uint32_t to, const TensorMap& map, uint64_t& barrier, int x, int y, uint16_t mask, uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5, %6;" ::"r"(to),
        "l"(&map), "r"(shared_address(&barrier)), "r"(x), "r"(y), "h"(mask), "l"(policy)
        : "memory");
}

// 16 bytes to another block, whose barrier counts them.
__device__ __forceinline__ void store_at(uint32_t to, float x, float y, float z, float w, uint32_t barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "f"(x), "f"(y), "f"(z), "f"(w),
                 "r"(barrier)
                 : "memory");
}

#endif

// What the warps of attn_prefill and attn_shared share, and those of them that look work up and have it brought.
#pragma once

#include "barrier.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int ROWS = 128, KEYS = 128, STAGES = 3, PANEL = 64, ROW_BYTES = PANEL * 2, TILE_BLOCKS = KEYS / BLOCK_TOKENS;
constexpr int CONSUMER_WARPS = 8, FETCHING_WARPS = 2;

struct Params {
    const int *counts, *tables;
    const RowMeta* rows;
    const AttnItem* items;
    const SharedItem* shared_items;
    bf16* out;
    float* partial_o;
    float2* partial_ml;
    int group, q_heads, kv_heads, group_size, window;
    float factor;
};

// An item of one KV head: query rows from a token on, and the keys that they see. No rows: nothing is left. Where keys are shared,
// `place` is where the first token's result goes and `stride` leads to the next one's; else it is the token's position.
struct Work {
    int rows, start, place, low, high, kv_head, table, stride;
};

// Matrices stand as panels of 64 columns in the 128-byte swizzle.
template <int D>
struct Shared {
    bf16 queries[ROWS * D];
    bf16 keys[STAGES][KEYS * D], values[STAGES][KEYS * D];
    Work work;
    uint64_t work_full, work_empty, queries_full, queries_empty;
    uint64_t keys_full[STAGES], keys_empty[STAGES], values_full[STAGES], values_empty[STAGES];

    __device__ __forceinline__ void init() {
        barrier_init(work_full, 1);
        barrier_init(work_empty, CONSUMER_WARPS + FETCHING_WARPS);
        barrier_init(queries_full, 1);
        barrier_init(queries_empty, CONSUMER_WARPS);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(keys_full[i], 1);
            barrier_init(keys_empty[i], CONSUMER_WARPS);
            barrier_init(values_full[i], 1);
            barrier_init(values_empty[i], CONSUMER_WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
};

// kernels/load.rs says the same.
static_assert(sizeof(Shared<64>) == 114848 && sizeof(Shared<128>) == 229536);

// A place in a ring of stages.
struct Place {
    int stage, phase;

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

// Next unit of work, and blocks that found none left, of attn_prefill and of attn_shared. The last of them sets both back for the
// next launch.
__device__ unsigned next_unit[2], finished_blocks[2];

// A unit is an item of one KV head. A few items of one head come before those of the next, so that blocks at work at the same time
// share keys and values; few enough that the units at the end are short.
template <bool IS_SHARED>
__device__ __forceinline__ Work look_up(const Params& p, int n, int unit) {
    const int run = max(1, min(16, n / 16)), first = unit / (run * p.kv_heads) * run, width = min(run, n - first), in_run = unit - first * p.kv_heads;
    const int kv_head = in_run / width, index = first + in_run - kv_head * width;
    if (IS_SHARED) {
        const SharedItem item = p.shared_items[index];
        const RowMeta& row = p.rows[item.row];
        const int table = row.table_offset[p.group] - row.table_first[p.group];
        return {item.n_rows * p.group_size, row.start, item.partial, item.key_begin, item.key_end, kv_head, table, item.stride};
    }
    const AttnItem item = p.items[index];
    const RowMeta& row = p.rows[item.row];
    const int tokens = min(row.len - item.q_start, ROWS / p.group_size), position = row.context + item.q_start;
    return {tokens * p.group_size,
            row.start + item.q_start,
            position,
            p.window > 0 ? max(0, position - p.window + 1) : 0,
            position + tokens,
            kv_head,
            row.table_offset[p.group] - row.table_first[p.group],
            0};
}

// Claims units, each once all others have begun with the one before: who claims earlier takes work that others wait for.
template <int D, bool IS_SHARED>
__device__ __forceinline__ void plan(const Params& p, Shared<D>& shared) {
    const int n = p.counts[(IS_SHARED ? N_SHARED : N_WHOLE) + p.group], units = n * p.kv_heads;
    int unit = blockIdx.x;
    for (int turn = 0;; turn++) {
        shared.work = unit < units ? look_up<IS_SHARED>(p, n, unit) : Work{};
        barrier_arrive(shared.work_full);
        if (unit >= units) break;
        barrier_wait(shared.work_empty, turn % 2);
        unit = gridDim.x + atomicAdd(&next_unit[IS_SHARED], 1);
    }
    if (atomicAdd(&finished_blocks[IS_SHARED], 1) == gridDim.x - 1) next_unit[IS_SHARED] = finished_blocks[IS_SHARED] = 0;
}

template <int D>
__device__ __forceinline__ Work next_work(Shared<D>& shared, int turn) {
    barrier_wait(shared.work_full, turn % 2);
    const Work work = shared.work;
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(shared.work_empty);
    return work;
}

// Has keys, or values, brought from an item's last tile down, each lane a panel of a block. The warp for keys brings queries too.
template <int D, bool IS_KEYS>
__device__ __forceinline__ void fetch(const Params& p, Shared<D>& shared, const TensorMap& map, const TensorMap& q_map) {
    constexpr int PANELS = D / PANEL, TILE_BYTES = KEYS * D * 2;
    uint64_t *const full = IS_KEYS ? shared.keys_full : shared.values_full, *const empty = IS_KEYS ? shared.keys_empty : shared.values_empty;
    const int lane = threadIdx.x % 32, in_tile = lane / PANELS, panel = lane % PANELS;
    const uint32_t to = shared_address(IS_KEYS ? shared.keys : shared.values) + (panel * KEYS + in_tile * BLOCK_TOKENS) * ROW_BYTES;
    Place place = {0, 1};
    for (int turn = 0;; turn++) {
        const Work work = next_work(shared, turn);
        if (work.rows == 0) break;
        const int first_block = work.low / BLOCK_TOKENS, end_block = (work.high + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
        // Row of the cache. A block that no query sees may not be there: it lies out of the array, and comes as zeros.
        const auto row_of = [&](int tile) {
            const int block = tile * TILE_BLOCKS + in_tile;
            const bool is_seen = in_tile < TILE_BLOCKS && block >= first_block && block < end_block;
            return is_seen ? (p.tables[work.table + block] * p.kv_heads + work.kv_head) * BLOCK_TOKENS : -BLOCK_TOKENS;
        };
        int tile = (work.high - 1) / KEYS, row = row_of(tile);
        if (IS_KEYS) {
            barrier_wait(shared.queries_empty, turn % 2 ^ 1);
            if (lane == 0) barrier_expect(shared.queries_full, ROWS / p.group_size * p.group_size * D * 2);
            __syncwarp();
            if (lane < PANELS) {
                const uint32_t queries = shared_address(shared.queries) + lane * (ROWS * ROW_BYTES);
                copy_box(queries, q_map, shared.queries_full, lane * PANEL, work.kv_head * p.group_size, work.start);
            }
        }
#pragma unroll 1
        for (const int last = work.low / KEYS; tile >= last; tile--) {
            // Looked up while this tile waits for its place.
            const int row_ahead = tile > last ? row_of(tile - 1) : 0;
            barrier_wait(empty[place.stage], place.phase);
            if (lane == 0) barrier_expect(full[place.stage], TILE_BYTES);
            __syncwarp();
            if (in_tile < TILE_BLOCKS) copy_box(to + place.stage * TILE_BYTES, map, full[place.stage], panel * PANEL, row);
            place.advance();
            row = row_ahead;
        }
    }
}

#endif

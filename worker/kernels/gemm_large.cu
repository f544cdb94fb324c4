// Gates and factors of more than 64 rows in one product, on Hopper. A tile is 128 rows of A by 112 gates and their factors; each of two warp
// groups multiplies half of its rows. The two blocks of a cluster have tiles side by side, and each fetches half of what both need for both.
#include "barrier.cuh"
#include "gemm.cuh"
#include "wgmma.cuh"

constexpr int LARGE_ROWS = 128, LARGE_GATES = 112, LARGE_K = 64, LARGE_THREADS = 384;
constexpr int GATES_BYTES = LARGE_GATES * LARGE_K * 2, ROWS_BYTES = LARGE_ROWS * LARGE_K * 2, STAGE = ROWS_BYTES + 2 * GATES_BYTES, STAGES = 5;
// Steps that the second group leaves to be done while the first one stores.
constexpr int LAG = 3;
// Pairs of tiles along rows whose blocks run at the same time, with as many tiles along gates: they share what L2 has.
constexpr int PAIRS_ABREAST = 8;

// kernels/large.rs says the same.
static_assert(STAGES * STAGE == 225280);

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int BOTH_GROUPS = 256;

struct Tile {
    int row, gate;
};

struct Large {
    struct Shared {
        uint64_t full[STAGES], empty[STAGES];
    };

    const TensorMap &weights, &inputs;
    bf16* C;
    // Columns of the result, gates and factors each.
    const int N, K, m_cap;
    Shared& shared;
    const uint32_t ring;
    const int rank;

    __device__ __forceinline__ int row_tiles() const { return (m_cap + LARGE_ROWS - 1) / LARGE_ROWS; }
    // Whether tiles of a cluster have other rows and the same weights, instead of the reverse; an odd one would have no neighbour.
    __device__ __forceinline__ bool shares_weights() const { return row_tiles() % 2 == 0; }
    __device__ __forceinline__ int steps() const { return (K + LARGE_K - 1) / LARGE_K; }

    // The block's next tile, if there is one.
    __device__ __forceinline__ bool find(int unit, Tile& tile) const {
        const bool pairs_rows = shares_weights();
        int rows = row_tiles(), gates = (N + LARGE_GATES - 1) / LARGE_GATES, abreast = 2 * PAIRS_ABREAST;
        if (pairs_rows) rows /= 2, abreast /= 2;
        else gates = (gates + 1) / 2;
        if (unit >= rows * gates) return false;
        const int first = unit / (abreast * gates) * abreast, width = min(abreast, rows - first), in_run = unit - first * gates;
        const int row = first + in_run % width, gate = in_run / width;
        tile = {(pairs_rows ? row * 2 + rank : row) * LARGE_ROWS, (pairs_rows ? gate : gate * 2 + rank) * LARGE_GATES};
        return true;
    }

    template <class Body>
    __device__ __forceinline__ void for_tiles(Body body) const {
        Tile tile;
        for (int unit = blockIdx.x / 2; find(unit, tile); unit += gridDim.x / 2) body(tile);
    }

    // By one thread, as below; gates, and factors, which stand N rows behind them.
    __device__ __forceinline__ void fetch_weights() {
        const bool is_read_once = row_tiles() <= 2;
        const uint64_t policy = is_read_once ? evict_first() : evict_normal();
        int stage = 0, phase = 1;
        for_tiles([&](const Tile& tile) {
#pragma unroll 1
            for (int step = 0; step < steps(); step++) {
                barrier_wait(shared.empty[stage], phase);
                barrier_expect(shared.full[stage], 2 * GATES_BYTES);
                const uint32_t to = ring + stage * STAGE + ROWS_BYTES;
                if (shares_weights()) {
                    copy_box_to_all(to + rank * GATES_BYTES, weights, shared.full[stage], step * LARGE_K, tile.gate + rank * N, 3, policy);
                } else {
                    copy_box(to, weights, shared.full[stage], step * LARGE_K, tile.gate, policy);
                    copy_box(to + GATES_BYTES, weights, shared.full[stage], step * LARGE_K, tile.gate + N, policy);
                }
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
        });
    }

    __device__ __forceinline__ void fetch_inputs() {
        release_successor();
        wait_for_predecessor();
        constexpr int HALF = LARGE_ROWS / 2;
        const uint64_t policy = evict_normal();
        int stage = 0, phase = 1;
        for_tiles([&](const Tile& tile) {
#pragma unroll 1
            for (int step = 0; step < steps(); step++) {
                barrier_wait(shared.empty[stage], phase);
                barrier_expect(shared.full[stage], ROWS_BYTES);
                const uint32_t to = ring + stage * STAGE;
                if (shares_weights()) {
                    copy_box(to, inputs, shared.full[stage], step * LARGE_K, tile.row, policy);
                    copy_box(to + ROWS_BYTES / 2, inputs, shared.full[stage], step * LARGE_K, tile.row + HALF, policy);
                } else {
                    copy_box_to_all(to + rank * (ROWS_BYTES / 2), inputs, shared.full[stage], step * LARGE_K, tile.row + rank * HALF, 3, policy);
                }
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
        });
    }

    // x / (1 + exp(-z)) of two gates, times their factors: z is x (SiLU), or what makes it the tanh approximation of GELU. One division does
    // for both, and no branch: the multipliers wait meanwhile.
    struct Gate {
        float linear, cubic;

        __device__ __forceinline__ Gate(int activation) {
            linear = -LOG2_E * (activation == 0 ? 1.f : GELU_LINEAR), cubic = activation == 0 ? 0.f : -LOG2_E * GELU_CUBIC;
        }

        __device__ __forceinline__ float denominator(float x) const {
            const float y = fminf(x, -GATE_MIN);
            return 1.f + exp2_fast(fminf(y * fmaf(cubic, y * y, linear), POWER_MAX));
        }

        __device__ __forceinline__ uint32_t operator()(float x, float y, float x_factor, float y_factor) const {
            x = bound(x), y = bound(y);
            const float a = denominator(x), b = denominator(y), inverse = inverse_fast(a * b);
            return pack(x * x_factor * (b * inverse), y * y_factor * (a * inverse));
        }

    private:
        // Below it nothing is left of a gate, at this power a denominator of two is finite.
        static constexpr float GATE_MIN = -41.f, POWER_MAX = 60.f;

        // What is not a number stays none.
        __device__ __forceinline__ static float bound(float x) {
            asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(GATE_MIN));
            return x;
        }
    };

    // A lane has columns 2t and 2t + 1 of each eight, of rows g and g + 8; of two eights and two lanes each gets four neighbours.
    __device__ __forceinline__ static uint2 exchange(uint32_t first, uint32_t second) {
        const bool is_odd = threadIdx.x % 2;
        const uint32_t other = __shfl_xor_sync(ALL_LANES, is_odd ? first : second, 1);
        return is_odd ? make_uint2(other, second) : make_uint2(first, other);
    }

    __device__ __forceinline__ void store(const float (&c)[LARGE_GATES], const Tile& tile, int first_row, int m, const Gate& gate) const {
        const int lane = threadIdx.x % 32, t = lane % 4, row = tile.row + first_row + lane / 4;
        const int column = tile.gate + t % 2 * 8 + t / 2 * 4;
        bf16* const to = C + (size_t)row * N + column;
#pragma unroll
        for (int i = 0; i < LARGE_GATES / 16; i++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float *x = c + i * 8 + half * 2, *factor = x + LARGE_GATES / 2;
                const uint2 four = exchange(gate(x[0], x[1], factor[0], factor[1]), gate(x[4], x[5], factor[4], factor[5]));
                if (row + half * 8 < m && column + i * 16 < N) *reinterpret_cast<uint2*>(to + (size_t)half * 8 * N + i * 16) = four;
            }
        }
    }

    __device__ __forceinline__ void multiply(int group, const int* m_ptr, int activation) {
        wait_for_predecessor();
        const int m = rows_of(m_ptr, m_cap);
        const Gate gate(activation);
        const uint32_t empty = address_in(shared_address(shared.empty), threadIdx.x % 2);
        const auto release = [&](int stage) {
            if (threadIdx.x % 128 < 2) barrier_arrive_at(empty + stage * 8);
        };
        int stage = 0, phase = 0;
        for_tiles([&](const Tile& tile) {
            float c[LARGE_GATES];
#pragma unroll 1
            for (int step = 0; step < steps(); step++) {
                if (group == 1 && step == max(0, steps() - LAG)) asm volatile("bar.sync 1, %0;" ::"n"(BOTH_GROUPS) : "memory");
                barrier_wait(shared.full[stage], phase);
                const uint32_t x = ring + stage * STAGE + group * (ROWS_BYTES / 2), w = ring + stage * STAGE + ROWS_BYTES;
                multiplications_begin();
#pragma unroll
                for (int k = 0; k < LARGE_K / 16; k++) multiply_shared(c, matrix_at(x + k * 32, 0), matrix_at(w + k * 32, 0), step > 0 || k > 0);
                multiplications_commit();
                multiplications_wait<1>();
                if (step > 0) release(stage == 0 ? STAGES - 1 : stage - 1);
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
            multiplications_wait<0>();
            if (group == 0) asm volatile("bar.arrive 1, %0;" ::"n"(BOTH_GROUPS) : "memory");
            // The sums are in registers only now, whatever the compiler would move.
#pragma unroll
            for (int i = 0; i < LARGE_GATES; i++) asm volatile("" : "+f"(c[i]));
            release(stage == 0 ? STAGES - 1 : stage - 1);
            store(c, tile, group * (LARGE_ROWS / 2) + threadIdx.x % 128 / 32 * 16, m, gate);
        });
    }
};

#endif

KERNEL __launch_bounds__(LARGE_THREADS, 1) gemm_large_gated(bf16* C, int N, int K, int m_cap, const int* m_ptr, int activation,
                                                            const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap inputs) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) char memory[];
    __shared__ Large::Shared shared;
    Large large{weights, inputs, C, N, K, m_cap, shared, shared_address(memory), cluster_rank()};
    const int group = threadIdx.x / 128;
    if (threadIdx.x == 0) {
        prefetch_map(weights), prefetch_map(inputs);
        for (int stage = 0; stage < STAGES; stage++) {
            // Both threads that fetch; both groups of both blocks.
            barrier_init(shared.full[stage], 2);
            barrier_init(shared.empty[stage], 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    cluster_arrive();
    cluster_wait();
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) large.fetch_weights();
        if (threadIdx.x == 32) large.fetch_inputs();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        large.multiply(group - 1, m_ptr, activation);
    }
    // Until then the other block may write here.
    cluster_arrive();
    cluster_wait();
#endif
}

// Loaded into a process by CUDA_INJECTION64_PATH: names and times of its kernels, copies and fills go to the file TRACE_OUT, one a line:
// start and end in ns, blocks (of a copy or fill: bytes), name. scripts/trace_kernels.py builds it and reads that.
#include <cupti.h>
#include <stdio.h>
#include <stdlib.h>

static FILE* out;

static void put(uint64_t start, uint64_t end, uint64_t size, const char* name) {
    fprintf(out, "%llu %llu %llu %s\n", (unsigned long long)start, (unsigned long long)end, (unsigned long long)size, name);
}

static void requested(uint8_t** buffer, size_t* size, size_t* records) {
    *size = 16 << 20;
    *buffer = aligned_alloc(8, *size);
    *records = 0;
}

static void completed(CUcontext context, uint32_t stream, uint8_t* buffer, size_t size, size_t valid) {
    CUpti_Activity* record = NULL;
    while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
        if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
            const CUpti_ActivityKernel9* k = (const CUpti_ActivityKernel9*)record;
            put(k->start, k->end, (uint64_t)k->gridX * k->gridY * k->gridZ, k->name);
        } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
            const CUpti_ActivityMemcpy5* copy = (const CUpti_ActivityMemcpy5*)record;
            put(copy->start, copy->end, copy->bytes, "copy");
        } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
            const CUpti_ActivityMemset4* fill = (const CUpti_ActivityMemset4*)record;
            put(fill->start, fill->end, fill->bytes, "fill");
        }
    }
    free(buffer);
}

static void finish(void) {
    cuptiActivityFlushAll(1);
    fclose(out);
}

int InitializeInjection(void) {
    const char* path = getenv("TRACE_OUT");
    out = path ? fopen(path, "w") : NULL;
    if (out == NULL) {
        fprintf(stderr, "TRACE_OUT is no file that can be written\n");
        return 0;
    }
    cuptiActivityRegisterCallbacks(requested, completed);
    cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
    cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMCPY);
    cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMSET);
    atexit(finish);
    return 1;
}

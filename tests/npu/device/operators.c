/* Operators of CANN that compute here: those that torch_npu calls in C++ where no dispatch mode sees them, as its
 * collectives and its copies to the CPU do.
 *
 * All others only count themselves (the table is generated, tests/npu/device/libraries.py). While the mode calls an
 * operator to have its checks, waits and results' memory, stand_in_quiet is set for the thread and nothing computes:
 * the mode's own kernels do. What computes here does so in the order of its stream.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device.h"

enum { FLOAT, FLOAT16, I8, I32, U8, I16 = 6, U16, U32, I64, U64, DOUBLE, BOOL, BFLOAT16 = 27 };
enum { DIMENSIONS = 16 };
struct tensor {
    int64_t shape[DIMENSIONS], strides[DIMENSIONS];
    int dimensions, type;
    char *data;
};
struct scalar {
    double value;
};
struct integers {
    int64_t *values;
    uint64_t n;
};
struct executor {
    struct tensor to, from;
    double factor;
    int pads;              /* whether ``to`` is larger: ``before`` elements in front of each dimension */
    int64_t before[DIMENSIONS];
    double padding;
    int fills; /* whether ``to`` becomes ``padding`` everywhere */
};

__thread int stand_in_quiet;
/* The last operator that was called to compute and has no value. */
const char *volatile stand_in_without_value;

extern struct counter stand_in_operators[];
void stand_in_count(int which) {
    __sync_fetch_and_add(&stand_in_operators[which].count, 1);
    if (stand_in_quiet) return;
    if (stand_in_without_value != stand_in_operators[which].name)
        fprintf(stderr, "stand-in NPU: %s has no value in tests/npu/device/operators.c\n", stand_in_operators[which].name);
    stand_in_without_value = stand_in_operators[which].name;
}

static size_t bytes_of(int type) {
    switch (type) {
        case FLOAT16: case I16: case U16: case BFLOAT16: return 2;
        case FLOAT: case I32: case U32: return 4;
        case I64: case U64: case DOUBLE: return 8;
        default: return 1;
    }
}

void *aclCreateTensor(const int64_t *shape, uint64_t n, int type, const int64_t *strides, int64_t offset, int format,
                      const int64_t *storage, uint64_t storage_n, void *data) {
    struct tensor *t = calloc(1, sizeof *t);
    t->dimensions = (int)(n < DIMENSIONS ? n : DIMENSIONS);
    t->type = type;
    for (int i = 0; i < t->dimensions; i++) {
        t->shape[i] = shape[i];
        t->strides[i] = strides ? strides[i] : 0;
    }
    t->data = data ? (char *)data + offset * (int64_t)bytes_of(type) : NULL;
    return t;
}
int aclDestroyTensor(void *tensor) {
    free(tensor);
    return 0;
}

static double load(const char *at, int type) {
    float f;
    uint32_t bits;
    _Float16 half;
    switch (type) {
        case FLOAT: memcpy(&f, at, 4); return f;
        case FLOAT16: memcpy(&half, at, 2); return (double)half;
        case BFLOAT16: bits = (uint32_t)(*(const uint16_t *)at) << 16; memcpy(&f, &bits, 4); return f;
        case I8: return *(const int8_t *)at;
        case U8: case BOOL: return *(const uint8_t *)at;
        case I16: return *(const int16_t *)at;
        case I32: return *(const int32_t *)at;
        case I64: return (double)*(const int64_t *)at;
        case DOUBLE: return *(const double *)at;
        default: abort();
    }
}
static void store(char *at, int type, double v) {
    float f = (float)v;
    uint32_t bits;
    _Float16 half = (_Float16)v;
    switch (type) {
        case FLOAT: memcpy(at, &f, 4); break;
        case FLOAT16: memcpy(at, &half, 2); break;
        case BFLOAT16:
            memcpy(&bits, &f, 4);
            *(uint16_t *)at = f != f ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
            break;
        case I8: *(int8_t *)at = (int8_t)v; break;
        case U8: *(uint8_t *)at = (uint8_t)v; break;
        case BOOL: *(uint8_t *)at = v != 0; break;
        case I16: *(int16_t *)at = (int16_t)v; break;
        case I32: *(int32_t *)at = (int32_t)v; break;
        case I64: *(int64_t *)at = (int64_t)v; break;
        case DOUBLE: *(double *)at = v; break;
        default: abort();
    }
}

/* to = from * factor, element by element; ``from`` is broadcast from the last dimension on, or padded. */
static int compute(void *what) {
    struct executor *e = what;
    struct tensor *to = &e->to, *from = &e->from;
    int64_t n = 1, index[DIMENSIONS] = {0};
    int missing = to->dimensions - from->dimensions;
    for (int d = 0; d < to->dimensions; d++) n *= to->shape[d];
    for (int64_t i = 0; i < n; i++) {
        int64_t a = 0, b = 0;
        int outside = e->fills;
        for (int d = 0; d < to->dimensions; d++) {
            a += index[d] * to->strides[d];
            if (d < missing) continue;
            int64_t place = index[d] - e->before[d], size = from->shape[d - missing];
            outside |= e->pads && (place < 0 || place >= size);
            if (e->pads || size != 1) b += place * from->strides[d - missing];
        }
        char *at = to->data + a * (int64_t)bytes_of(to->type);
        const char *source = from->data + b * (int64_t)bytes_of(from->type);
        if (outside)
            store(at, to->type, e->padding);
        else if (to->type == from->type && e->factor == 1)
            memcpy(at, source, bytes_of(to->type));
        else
            store(at, to->type, load(source, from->type) * e->factor);
        for (int d = to->dimensions - 1; d >= 0 && ++index[d] == to->shape[d]; d--) index[d] = 0;
    }
    free(e);
    return 1;
}
static int prepare(const struct tensor *to, const struct tensor *from, double factor, uint64_t *workspace,
                   void **executor) {
    struct executor *e = malloc(sizeof *e);
    *e = (struct executor){*to, *from, factor, 0, {0}, 0, 0};
    *workspace = 0;
    *executor = e;
    return 0;
}
static int run(void *executor, void *stream) {
    if (stand_in_quiet)
        free(executor);
    else
        stand_in_queue(stream, compute, executor);
    return 0;
}

void *aclCreateScalar(const void *value, int type) {
    struct scalar *s = malloc(sizeof *s);
    s->value = type < FLOAT || (type > BOOL && type != BFLOAT16) ? 0 : load(value, type);
    return s;
}
int aclDestroyScalar(void *scalar) {
    free(scalar);
    return 0;
}

void *aclCreateIntArray(const int64_t *values, uint64_t n) {
    struct integers *a = malloc(sizeof *a);
    *a = (struct integers){malloc(n * sizeof *values + 1), n};
    memcpy(a->values, values, n * sizeof *values);
    return a;
}
int aclDestroyIntArray(struct integers *a) {
    free(a->values);
    free(a);
    return 0;
}

int aclnnInplaceCopyGetWorkspaceSize(void *to, void *from, uint64_t *workspace, void **executor) {
    return prepare(to, from, 1, workspace, executor);
}
int aclnnInplaceCopy(void *workspace, uint64_t size, void *executor, void *stream) { return run(executor, stream); }

int aclnnCastGetWorkspaceSize(void *from, int type, void *to, uint64_t *workspace, void **executor) {
    return prepare(to, from, 1, workspace, executor);
}
int aclnnCast(void *workspace, uint64_t size, void *executor, void *stream) { return run(executor, stream); }

int aclnnInplaceMulsGetWorkspaceSize(void *to, struct scalar *by, uint64_t *workspace, void **executor) {
    return prepare(to, to, by->value, workspace, executor);
}
int aclnnInplaceMuls(void *workspace, uint64_t size, void *executor, void *stream) { return run(executor, stream); }

int aclnnInplaceDivsGetWorkspaceSize(void *to, struct scalar *by, uint64_t *workspace, void **executor) {
    return prepare(to, to, 1 / by->value, workspace, executor);
}
int aclnnInplaceDivs(void *workspace, uint64_t size, void *executor, void *stream) { return run(executor, stream); }

/* ``pad`` has two numbers for each dimension, the last dimension's first. */
int aclnnConstantPadNdGetWorkspaceSize(void *from, struct integers *pad, struct scalar *value, void *to,
                                       uint64_t *workspace, void **executor) {
    prepare(to, from, 1, workspace, executor);
    struct executor *e = *executor;
    e->pads = 1;
    e->padding = value->value;
    for (uint64_t i = 0; i + 1 < pad->n; i += 2) e->before[e->to.dimensions - 1 - i / 2] = pad->values[i];
    return 0;
}
int aclnnConstantPadNd(void *workspace, uint64_t size, void *executor, void *stream) { return run(executor, stream); }

static int fill(void *to, double value, uint64_t *workspace, void **executor) {
    prepare(to, to, 1, workspace, executor);
    ((struct executor *)*executor)->fills = 1;
    ((struct executor *)*executor)->padding = value;
    return 0;
}
int aclnnInplaceOneGetWorkspaceSize(void *to, uint64_t *workspace, void **executor) {
    return fill(to, 1, workspace, executor);
}
int aclnnInplaceOne(void *workspace, uint64_t size, void *executor, void *stream) { return run(executor, stream); }

int aclnnInplaceZeroGetWorkspaceSize(void *to, uint64_t *workspace, void **executor) {
    return fill(to, 0, workspace, executor);
}
int aclnnInplaceZero(void *workspace, uint64_t size, void *executor, void *stream) { return run(executor, stream); }

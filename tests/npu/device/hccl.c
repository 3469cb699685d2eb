/* HCCL between processes of one machine: each collective is made of messages, which are files of a folder.
 *
 * A call queues two pieces of work on its stream, as HCCL's kernels are: the first writes what this rank sends, the
 * second waits for what the others send and combines it in the order of ranks. STAND_IN_HCCL names the folder.
 * Sums of 16 bits are taken in fp32 and rounded once.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "device.h"

enum { OK, BAD_PARAMETER, NOT_SUPPORTED = 5 };
enum { INT8, INT16, INT32, FP16, FP32, INT64, UINT64, UINT8, UINT16, UINT32, FP64, BF16 };
enum { SUM, PRODUCT, MAXIMUM, MINIMUM };
typedef struct communicator {
    char name[64];
    uint32_t size, rank;
    uint64_t collectives, sent[64], received[64];
    struct communicator *before; /* the one that this process made before it */
} *Comm;

struct counter stand_in_hccl[] = {{"all_reduce", 0}, {"broadcast", 0}, {"reduce_scatter", 0}, {"all_gather", 0},
                                  {"all_to_all", 0}, {"send", 0},      {"receive", 0},        {NULL, 0}};
static void count(int which) { __sync_fetch_and_add(&stand_in_hccl[which].count, 1); }

static size_t bytes_of(int type) {
    switch (type) {
        case INT16: case FP16: case UINT16: case BF16: return 2;
        case INT32: case FP32: case UINT32: return 4;
        case INT64: case UINT64: case FP64: return 8;
        default: return 1;
    }
}

/* Messages. */

static void path_of(char *path, size_t room, Comm c, char kind, uint64_t number, uint32_t from, uint32_t to) {
    const char *folder = getenv("STAND_IN_HCCL");
    snprintf(path, room, "%s/%s.%c%llu.%u.%u", folder ? folder : "/dev/shm", c->name, kind,
             (unsigned long long)number, from, to);
}

static void write_message(const char *path, const void *data, size_t size) {
    char temporary[600];
    snprintf(temporary, sizeof temporary, "%s~", path);
    int file = open(temporary, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    size_t written = 0;
    while (file >= 0 && written < size) {
        ssize_t n = write(file, (const char *)data + written, size - written);
        if (n <= 0) break;
        written += n;
    }
    if (file < 0 || written < size || close(file) || rename(temporary, path)) {
        perror("stand-in HCCL: cannot write a message");
        abort();
    }
}

/* Returns 0 where the message is not there yet. */
static int read_message(const char *path, void *data, size_t size) {
    int file = open(path, O_RDONLY);
    if (file < 0) return 0;
    struct stat facts;
    fstat(file, &facts);
    if ((size_t)facts.st_size != size) {
        fprintf(stderr, "stand-in HCCL: %s has %zu bytes, and its receiver expects %zu\n", path,
                (size_t)facts.st_size, size);
        abort();
    }
    size_t got = 0;
    while (got < size) {
        ssize_t n = read(file, (char *)data + got, size - got);
        if (n <= 0) {
            perror("stand-in HCCL: cannot read a message");
            abort();
        }
        got += n;
    }
    close(file);
    unlink(path);
    return 1;
}

/* Arithmetic. */

static float from_half(uint16_t h) {
    _Float16 value;
    memcpy(&value, &h, 2);
    return (float)value;
}
static uint16_t to_half(float f) {
    _Float16 value = (_Float16)f;
    uint16_t bits;
    memcpy(&bits, &value, 2);
    return bits;
}
static float from_bf16(uint16_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
static uint16_t to_bf16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#define COMBINE(a, b) (op == SUM ? (a) + (b) : op == PRODUCT ? (a) * (b) : op == MAXIMUM ? ((a) > (b) ? (a) : (b)) : ((a) < (b) ? (a) : (b)))
#define REDUCE(ctype)                                               \
    do {                                                            \
        for (size_t i = 0; i < n; i++) {                            \
            ctype v = ((const ctype *)parts[0])[i];                 \
            for (uint32_t r = 1; r < ranks; r++) {                  \
                ctype w = ((const ctype *)parts[r])[i];             \
                v = (ctype)COMBINE(v, w);                           \
            }                                                       \
            ((ctype *)out)[i] = v;                                  \
        }                                                           \
    } while (0)
#define REDUCE_16(load, store)                                      \
    do {                                                            \
        for (size_t i = 0; i < n; i++) {                            \
            float v = load(((const uint16_t *)parts[0])[i]);        \
            for (uint32_t r = 1; r < ranks; r++) {                  \
                float w = load(((const uint16_t *)parts[r])[i]);    \
                v = COMBINE(v, w);                                  \
            }                                                       \
            ((uint16_t *)out)[i] = store(v);                        \
        }                                                           \
    } while (0)

static void reduce(void *out, char **parts, uint32_t ranks, size_t n, int type, int op) {
    switch (type) {
        case INT8: REDUCE(int8_t); break;
        case INT16: REDUCE(int16_t); break;
        case INT32: REDUCE(int32_t); break;
        case INT64: REDUCE(int64_t); break;
        case FP32: REDUCE(float); break;
        case FP16: REDUCE_16(from_half, to_half); break;
        case BF16: REDUCE_16(from_bf16, to_bf16); break;
    }
}
/* Those that HCCL reduces on Atlas A2 and A3. */
static int reduces(int type) {
    return type == INT8 || type == INT16 || type == INT32 || type == INT64 || type == FP32 || type == FP16 ||
           type == BF16;
}

/* One collective: which bytes go to which rank, which come from which, and how they are combined. */

struct exchange {
    Comm comm;
    char kind;
    uint64_t number;
    char **to, **from;           /* for each rank a place, NULL for nothing */
    size_t *to_bytes, *from_bytes;
    char *own;                   /* from this rank to itself, taken when it is sent */
    char *sum;                   /* where received parts are reduced to, or NULL */
    size_t n;
    int type, op;
    char *got, *room;
    void *out;
};

static struct exchange *new_exchange(Comm c, char kind, uint64_t number) {
    struct exchange *e = calloc(1, sizeof *e);
    e->comm = c;
    e->kind = kind;
    e->number = number;
    e->to = calloc(c->size, sizeof *e->to);
    e->from = calloc(c->size, sizeof *e->from);
    e->to_bytes = calloc(c->size, sizeof *e->to_bytes);
    e->from_bytes = calloc(c->size, sizeof *e->from_bytes);
    e->got = calloc(c->size, 1);
    return e;
}

/* With STAND_IN_NPU_LAZY nothing arrives before somebody waits: what reads without waiting finds NaN. */
static int lazy = -1;

static int publish(void *what) {
    struct exchange *e = what;
    char path[512];
    for (uint32_t r = 0; r < e->comm->size; r++) {
        if (!e->to[r]) continue;
        if (r == e->comm->rank) {
            e->own = malloc(e->to_bytes[r] + 1);
            memcpy(e->own, e->to[r], e->to_bytes[r]);
            continue;
        }
        path_of(path, sizeof path, e->comm, e->kind, e->number, e->comm->rank, r);
        write_message(path, e->to[r], e->to_bytes[r]);
    }
    return 1;
}

static int collect(void *what) {
    struct exchange *e = what;
    char path[512];
    int open_ones = 0;
    if (lazy < 0) lazy = getenv("STAND_IN_NPU_LAZY") != NULL;
    if (lazy && !stand_in_waiting) return 0;
    for (uint32_t r = 0; r < e->comm->size; r++) {
        if (e->got[r] || !e->from[r]) continue;
        if (r == e->comm->rank) {
            memcpy(e->from[r], e->own, e->from_bytes[r]);
            e->got[r] = 1;
            continue;
        }
        path_of(path, sizeof path, e->comm, e->kind, e->number, r, e->comm->rank);
        if (read_message(path, e->from[r], e->from_bytes[r]))
            e->got[r] = 1;
        else
            open_ones = 1;
    }
    if (open_ones) return 0;
    if (e->sum) reduce(e->sum, e->from, e->comm->size, e->n, e->type, e->op);
    free(e->own);
    free(e->room);
    free(e->to);
    free(e->from);
    free(e->to_bytes);
    free(e->from_bytes);
    free(e->got);
    free(e);
    return 1;
}

static int start(struct exchange *e, void *stream) {
    stand_in_queue(stream, publish, e);
    stand_in_queue(stream, collect, e);
    return OK;
}

static char nothing[1];
static void send_to(struct exchange *e, uint32_t rank, const void *data, size_t bytes) {
    e->to[rank] = data && bytes ? (char *)data : nothing;
    e->to_bytes[rank] = bytes;
}
static void receive_from(struct exchange *e, uint32_t rank, void *data, size_t bytes) {
    e->from[rank] = data && bytes ? data : nothing;
    e->from_bytes[rank] = bytes;
}
/* Have each rank's part in memory of its own, to be reduced into ``out``. */
static void reduce_into(struct exchange *e, void *out, size_t n, int type, int op) {
    size_t bytes = n * bytes_of(type);
    e->room = malloc(bytes * e->comm->size + 1);
    for (uint32_t r = 0; r < e->comm->size; r++) receive_from(e, r, e->room + r * bytes, bytes);
    e->sum = out;
    e->n = n;
    e->type = type;
    e->op = op;
}

/* Communicators. */

int HcclGetRootInfo(void *info) {
    static unsigned number;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    memset(info, 0, 4108);
    snprintf(info, 64, "comm%d-%u-%lx", (int)getpid(), __sync_fetch_and_add(&number, 1), now.tv_nsec + now.tv_sec);
    return OK;
}
static Comm made;
static int make(const char *name, uint32_t size, uint32_t rank, void **comm) {
    Comm c = calloc(1, sizeof *c);
    if (size > 64) return NOT_SUPPORTED;
    c->before = made;
    made = c;
    snprintf(c->name, sizeof c->name, "%s", name);
    c->size = size;
    c->rank = rank;
    *comm = c;
    return OK;
}
int HcclCommInitRootInfo(uint32_t size, const void *info, uint32_t rank, void **comm) {
    return make(info, size, rank, comm);
}
int HcclCommInitRootInfoConfig(uint32_t size, const void *info, uint32_t rank, const void *config, void **comm) {
    return make(info, size, rank, comm);
}
int HcclCreateSubCommConfig(void **parent, uint32_t size, uint32_t *ids, uint64_t id, uint32_t rank, void *config,
                            void **comm) {
    char name[64];
    snprintf(name, sizeof name, "%.40s_%llx", ((Comm)*parent)->name, (unsigned long long)id);
    return make(name, size, rank, comm);
}
int HcclCommDestroy(void *comm) { return OK; }
int HcclGetCommName(void *comm, char *name) {
    strcpy(name, ((Comm)comm)->name);
    return OK;
}
int HcclGetCommAsyncError(void *comm, int *error) {
    *error = 0;
    return OK;
}
int HcclSetConfig(int which, int value) { return OK; }
const char *HcclGetErrorString(int error) { return error == NOT_SUPPORTED ? "not supported" : "stand-in HCCL"; }
uint32_t HcclGetCommConfigCapability(void) { return 16; }

/* Collectives. */

static struct exchange *next(void *comm) {
    Comm c = comm;
    return new_exchange(c, 'c', c->collectives++);
}

int HcclAllReduce(void *in, void *out, uint64_t n, int type, int op, void *comm, void *stream) {
    Comm c = comm;
    count(0);
    if (!reduces(type)) return NOT_SUPPORTED;
    struct exchange *e = next(comm);
    for (uint32_t r = 0; r < c->size; r++) send_to(e, r, in, n * bytes_of(type));
    reduce_into(e, out, n, type, op);
    return start(e, stream);
}
int HcclReduce(void *in, void *out, uint64_t n, int type, int op, uint32_t root, void *comm, void *stream) {
    Comm c = comm;
    count(0);
    if (!reduces(type)) return NOT_SUPPORTED;
    struct exchange *e = next(comm);
    send_to(e, root, in, n * bytes_of(type));
    if (c->rank == root) reduce_into(e, out, n, type, op);
    return start(e, stream);
}
int HcclBroadcast(void *buffer, uint64_t n, int type, uint32_t root, void *comm, void *stream) {
    Comm c = comm;
    count(1);
    struct exchange *e = next(comm);
    for (uint32_t r = 0; c->rank == root && r < c->size; r++)
        if (r != root) send_to(e, r, buffer, n * bytes_of(type));
    if (c->rank != root) receive_from(e, root, buffer, n * bytes_of(type));
    return start(e, stream);
}
int HcclScatter(void *in, void *out, uint64_t n, int type, uint32_t root, void *comm, void *stream) {
    Comm c = comm;
    size_t bytes = n * bytes_of(type);
    struct exchange *e = next(comm);
    for (uint32_t r = 0; c->rank == root && r < c->size; r++) send_to(e, r, (char *)in + r * bytes, bytes);
    receive_from(e, root, out, bytes);
    return start(e, stream);
}
static int reduce_scatter(void *in, const uint64_t *counts, const uint64_t *places, void *out, uint64_t n, int type,
                          int op, void *comm, void *stream) {
    Comm c = comm;
    size_t size = bytes_of(type);
    count(2);
    if (!reduces(type)) return NOT_SUPPORTED;
    struct exchange *e = next(comm);
    for (uint32_t r = 0; r < c->size; r++)
        send_to(e, r, (char *)in + (places ? places[r] : r * n) * size, (counts ? counts[r] : n) * size);
    reduce_into(e, out, n, type, op);
    return start(e, stream);
}
int HcclReduceScatter(void *in, void *out, uint64_t n, int type, int op, void *comm, void *stream) {
    return reduce_scatter(in, NULL, NULL, out, n, type, op, comm, stream);
}
int HcclReduceScatterV(void *in, const void *counts, const void *places, void *out, uint64_t n, int type, int op,
                       void *comm, void *stream) {
    return reduce_scatter(in, counts, places, out, n, type, op, comm, stream);
}
static int all_gather(void *in, uint64_t n, void *out, const uint64_t *counts, const uint64_t *places, int type,
                      void *comm, void *stream) {
    Comm c = comm;
    size_t size = bytes_of(type);
    count(3);
    struct exchange *e = next(comm);
    for (uint32_t r = 0; r < c->size; r++) {
        send_to(e, r, in, n * size);
        receive_from(e, r, (char *)out + (places ? places[r] : r * n) * size, (counts ? counts[r] : n) * size);
    }
    return start(e, stream);
}
int HcclAllGather(void *in, void *out, uint64_t n, int type, void *comm, void *stream) {
    return all_gather(in, n, out, NULL, NULL, type, comm, stream);
}
int HcclAllGatherV(void *in, uint64_t n, void *out, const void *counts, const void *places, int type, void *comm,
                   void *stream) {
    return all_gather(in, n, out, counts, places, type, comm, stream);
}
int HcclAlltoAllV(const void *in, const void *counts, const void *places, int type, const void *out,
                  const void *out_counts, const void *out_places, int out_type, void *comm, void *stream) {
    Comm c = comm;
    size_t size = bytes_of(type);
    const uint64_t *n = counts, *at = places, *m = out_counts, *to = out_places;
    count(4);
    struct exchange *e = next(comm);
    for (uint32_t r = 0; r < c->size; r++) {
        send_to(e, r, (const char *)in + at[r] * size, n[r] * size);
        receive_from(e, r, (char *)out + to[r] * size, m[r] * size);
    }
    return start(e, stream);
}
int HcclAlltoAll(const void *in, uint64_t n, int type, const void *out, uint64_t m, int out_type, void *comm,
                 void *stream) {
    Comm c = comm;
    size_t bytes = n * bytes_of(type);
    count(4);
    struct exchange *e = next(comm);
    for (uint32_t r = 0; r < c->size; r++) {
        send_to(e, r, (const char *)in + r * bytes, bytes);
        receive_from(e, r, (char *)out + r * bytes, bytes);
    }
    return start(e, stream);
}
int HcclAlltoAllVC(const void *in, const void *matrix, int type, const void *out, int out_type, void *comm,
                   void *stream) {
    Comm c = comm;
    const uint64_t *n = matrix;
    size_t size = bytes_of(type), at = 0, to = 0;
    count(4);
    struct exchange *e = next(comm);
    for (uint32_t r = 0; r < c->size; r++) {
        size_t sent = n[c->rank * c->size + r] * size, got = n[r * c->size + c->rank] * size;
        send_to(e, r, (const char *)in + at, sent);
        receive_from(e, r, (char *)out + to, got);
        at += sent;
        to += got;
    }
    return start(e, stream);
}
int HcclBarrier(void *comm, void *stream) {
    return all_gather(NULL, 0, NULL, NULL, NULL, INT8, comm, stream);
}

/* Messages between two ranks are numbered by direction, as they have no part in collectives. */

int HcclSend(void *in, uint64_t n, int type, uint32_t to, void *comm, void *stream) {
    Comm c = comm;
    count(5);
    struct exchange *e = new_exchange(c, 'p', c->sent[to]++);
    send_to(e, to, in, n * bytes_of(type));
    return start(e, stream);
}
int HcclRecv(void *out, uint64_t n, int type, uint32_t from, void *comm, void *stream) {
    Comm c = comm;
    count(6);
    struct exchange *e = new_exchange(c, 'p', c->received[from]++);
    receive_from(e, from, out, n * bytes_of(type));
    return start(e, stream);
}
struct item {
    int receives;
    void *buffer;
    uint64_t n;
    int type;
    uint32_t remote;
};
/* All sends before all receives: a batch has no order. */
int HcclBatchSendRecv(struct item *items, uint32_t n, void *comm, void *stream) {
    for (int receives = 0; receives < 2; receives++)
        for (uint32_t i = 0; i < n; i++) {
            struct item *m = &items[i];
            if (m->receives != receives) continue;
            if (receives)
                HcclRecv(m->buffer, m->n, m->type, m->remote, comm, stream);
            else
                HcclSend(m->buffer, m->n, m->type, m->remote, comm, stream);
        }
    return OK;
}

/* Operators that communicate by themselves, by the name of their communicator: values.py calls these, and they return
 * with the result. */

static void *named(const char *name) {
    for (Comm c = made; c; c = c->before)
        if (!strcmp(c->name, name)) return c;
    fprintf(stderr, "stand-in HCCL: no communicator %s\n", name);
    abort();
}
void stand_in_all_gather(const char *name, void *in, void *out, uint64_t bytes) {
    HcclAllGather(in, out, bytes, INT8, named(name), NULL);
    stand_in_settle(NULL);
}
void stand_in_sum_scatter(const char *name, void *in, void *out, uint64_t n, int type) {
    HcclReduceScatter(in, out, n, type, SUM, named(name), NULL);
    stand_in_settle(NULL);
}

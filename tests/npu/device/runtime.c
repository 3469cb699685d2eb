/* CANN's runtime (libascendcl) in host memory: what torch_npu asks of it, and nothing else.
 *
 * Device memory is one range of addresses, so that a CPU tensor over it shows any NPU tensor. Copies are memmove.
 * A stream is a queue in which only communication can still be open: operators compute at once, in
 * tests/npu/device/mode.py. Whatever waits for a stream or an event waits until its queue is done; a thread
 * goes on with open work meanwhile, as a device does.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "device.h"

typedef int aclError;
enum { INVALID = 100000, NOT_SET = 107002, OUT_OF_MEMORY = 207001 };

/* Counters. */

enum { SYNC_STREAM, SYNC_DEVICE, SYNC_EVENT, H2D, D2H, H2D_SYNC, D2H_SYNC, OTHER_COPY, ACLOP, COUNTERS };
struct counter stand_in_runtime[COUNTERS + 1] = {
    {"sync_stream", 0}, {"sync_device", 0}, {"sync_event", 0}, {"h2d", 0},   {"d2h", 0},
    {"h2d_sync", 0},    {"d2h_sync", 0},    {"other_copy", 0}, {"aclop", 0}, {NULL, 0}};

static void count(int which) { __sync_fetch_and_add(&stand_in_runtime[which].count, 1); }

/* Memory: blocks of one reserved range. */

static const size_t RANGE = 1ull << 38, TOTAL = 64ull << 30, ALIGNMENT = 512;
char *stand_in_memory;
size_t stand_in_memory_size;
static struct block {
    char *start;
    size_t size;
    int used;
    struct block *next;
} *blocks;
static size_t used_bytes, limit_bytes;
static int memory_file;
static pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;

static void reserve(void) {
    const char *limit = getenv("STAND_IN_NPU_MEMORY");
    limit_bytes = limit ? strtoull(limit, NULL, 10) : TOTAL;
    memory_file = memfd_create("stand-in NPU", 0); /* which other processes can map, by their handles */
    if (ftruncate(memory_file, RANGE) == 0)
        stand_in_memory = mmap(NULL, RANGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, memory_file, 0);
    if (!stand_in_memory || stand_in_memory == MAP_FAILED) {
        perror("stand-in NPU: no range of addresses");
        abort();
    }
    stand_in_memory_size = RANGE;
    blocks = calloc(1, sizeof *blocks);
    *blocks = (struct block){stand_in_memory, RANGE, 0, NULL};
}

aclError aclrtMalloc(void **pointer, size_t size, int policy) {
    aclError result = OUT_OF_MEMORY;
    size = (size ? size + ALIGNMENT - 1 : ALIGNMENT) / ALIGNMENT * ALIGNMENT;
    pthread_mutex_lock(&memory_lock);
    if (!blocks) reserve();
    for (struct block *b = blocks; b && used_bytes + size <= limit_bytes; b = b->next) {
        if (b->used || b->size < size) continue;
        if (b->size > size) {
            struct block *rest = malloc(sizeof *rest);
            *rest = (struct block){b->start + size, b->size - size, 0, b->next};
            b->next = rest;
            b->size = size;
        }
        b->used = 1;
        used_bytes += size;
        *pointer = b->start;
        memset(b->start, 0xff, size); /* NaN in every floating dtype: what nothing has written is seen */
        result = 0;
        break;
    }
    pthread_mutex_unlock(&memory_lock);
    return result;
}

aclError aclrtMallocAlign32(void **pointer, size_t size, int policy) { return aclrtMalloc(pointer, size, policy); }

/* Gives whole pages back. */
static void punch(char *start, size_t size) {
    size_t page = sysconf(_SC_PAGESIZE), from = (start - stand_in_memory + page - 1) / page * page;
    size_t to = (start - stand_in_memory + size) / page * page;
    if (to > from) fallocate(memory_file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, from, to - from);
}

aclError aclrtFree(void *pointer) {
    pthread_mutex_lock(&memory_lock);
    struct block *before = NULL;
    for (struct block *b = blocks; b; before = b, b = b->next) {
        if (b->start != (char *)pointer || !b->used) continue;
        b->used = 0;
        used_bytes -= b->size;
        punch(b->start, b->size);
        if (b->next && !b->next->used) {
            struct block *next = b->next;
            b->size += next->size;
            b->next = next->next;
            free(next);
        }
        if (before && !before->used) {
            before->size += b->size;
            before->next = b->next;
            free(b);
        }
        break;
    }
    pthread_mutex_unlock(&memory_lock);
    return 0;
}

aclError aclrtMallocHost(void **pointer, size_t size) {
    if (posix_memalign(pointer, 4096, size ? size : ALIGNMENT)) return OUT_OF_MEMORY;
    memset(*pointer, 0xff, size);
    return 0;
}
aclError aclrtFreeHost(void *pointer) {
    free(pointer);
    return 0;
}
aclError aclrtGetMemInfo(int kind, size_t *free_bytes, size_t *total) {
    *total = limit_bytes ? limit_bytes : TOTAL;
    *free_bytes = *total - used_bytes;
    return 0;
}
aclError aclrtHostRegister(void *pointer, uint64_t size, int type, void **device) {
    *device = pointer;
    return 0;
}
aclError aclrtHostUnregister(void *pointer) { return 0; }

/* Handles of memory for other processes: process, file, place and size. */

aclError aclrtIpcMemGetExportKey(void *pointer, size_t size, char *key, size_t length, uint64_t flags) {
    size_t place = (char *)pointer - stand_in_memory;
    int written = snprintf(key, length, "%d %d %zx %zx", getpid(), memory_file, place, size);
    return written < 0 || written >= length ? INVALID : 0;
}
aclError aclrtIpcMemImportByKey(void **pointer, const char *key, uint64_t flags) {
    int process, file;
    size_t place, size, page = sysconf(_SC_PAGESIZE);
    if (sscanf(key, "%d %d %zx %zx", &process, &file, &place, &size) != 4) return INVALID;
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", process, file);
    int opened = open(path, O_RDWR);
    size_t before = place % page;
    char *start = mmap(NULL, size + before, PROT_READ | PROT_WRITE, MAP_SHARED, opened, place - before);
    close(opened);
    if (start == MAP_FAILED) return INVALID;
    *pointer = start + before;
    return 0;
}
/* What is mapped stays so until the process ends. */
aclError aclrtIpcMemClose(const char *key) { return 0; }
aclError aclrtIpcMemSetImportPid(const char *key, int32_t *processes, size_t count) { return 0; }

/* Streams and events. */

struct work {
    stand_in_attempt attempt;
    void *what;
    struct work *next;
};
struct stream {
    int id;
    uint64_t queued, done;
    struct work *first, *last;
    struct stream *next;
};
struct event {
    struct stream *stream;
    uint64_t place, nanoseconds;
};
static struct stream default_stream, *streams = &default_stream;
static pthread_mutex_t queue_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_t helper;
static pid_t helper_of;
volatile int stand_in_waiting;
/* Pieces of work that are open, of all streams. */
volatile int stand_in_open;

static struct stream *stream_of(void *handle) { return handle ? handle : &default_stream; }

/* With the lock held: do what can be done of a stream, in its order. */
static void advance(struct stream *s) {
    while (s->first && s->first->attempt(s->first->what)) {
        struct work *done = s->first;
        s->first = done->next;
        if (!s->first) s->last = NULL;
        s->done++;
        stand_in_open--;
        free(done);
    }
}

static void advance_all(void) {
    pthread_mutex_lock(&queue_lock);
    for (struct stream *s = streams; s; s = s->next) advance(s);
    pthread_mutex_unlock(&queue_lock);
}

static void *help(void *nothing) {
    for (;;) {
        advance_all();
        nanosleep(&(struct timespec){0, 500000}, NULL);
    }
    return NULL;
}

void stand_in_queue(void *handle, stand_in_attempt attempt, void *what) {
    struct stream *s = stream_of(handle);
    pthread_mutex_lock(&queue_lock);
    struct work *w = malloc(sizeof *w);
    *w = (struct work){attempt, what, NULL};
    if (s->last)
        s->last->next = w;
    else
        s->first = w;
    s->last = w;
    s->queued++;
    stand_in_open++;
    advance(s);
    if (s->first && helper_of != getpid()) {
        helper_of = getpid();
        pthread_create(&helper, NULL, help, NULL);
        pthread_detach(helper);
    }
    pthread_mutex_unlock(&queue_lock);
}

static int reached(struct stream *s, uint64_t place) {
    pthread_mutex_lock(&queue_lock);
    int yes = s->done >= place;
    pthread_mutex_unlock(&queue_lock);
    return yes;
}

static void wait_for(struct stream *s, uint64_t place) {
    static const time_t LIMIT = 150;
    time_t start = time(NULL);
    __sync_fetch_and_add(&stand_in_waiting, 1);
    while (!reached(s, place)) {
        advance_all();
        if (reached(s, place)) break;
        if (time(NULL) - start > LIMIT) {
            fprintf(stderr, "stand-in NPU: a collective has not come to its end in %ld seconds\n", (long)LIMIT);
            abort();
        }
        nanosleep(&(struct timespec){0, 100000}, NULL);
    }
    __sync_fetch_and_sub(&stand_in_waiting, 1);
}

/* Waits until a stream has nothing open, for operators that compute at once although they belong behind it. */
void stand_in_settle(void *handle) {
    struct stream *s = stream_of(handle);
    wait_for(s, s->queued);
}

aclError aclrtCreateStream(void **handle) {
    static int id;
    struct stream *s = calloc(1, sizeof *s);
    pthread_mutex_lock(&queue_lock);
    s->id = ++id;
    s->next = streams->next;
    streams->next = s;
    pthread_mutex_unlock(&queue_lock);
    *handle = s;
    return 0;
}
aclError aclrtCreateStreamWithConfig(void **handle, uint32_t priority, uint32_t flags) {
    return aclrtCreateStream(handle);
}
aclError aclrtDestroyStream(void *handle) { return 0; }
aclError aclrtDestroyStreamForce(void *handle) { return 0; }
aclError aclrtStreamGetId(void *handle, int32_t *id) {
    *id = stream_of(handle)->id;
    return 0;
}
aclError aclrtStreamQuery(void *handle, int *open) {
    struct stream *s = stream_of(handle);
    *open = !reached(s, s->queued);
    return 0;
}
aclError aclrtSynchronizeStream(void *handle) {
    count(SYNC_STREAM);
    stand_in_settle(handle);
    return 0;
}
aclError aclrtSynchronizeStreamWithTimeout(void *handle, int milliseconds) { return aclrtSynchronizeStream(handle); }
aclError aclrtSynchronizeDevice(void) {
    count(SYNC_DEVICE);
    for (struct stream *s = streams; s; s = s->next) wait_for(s, s->queued);
    return 0;
}
aclError aclrtSynchronizeDeviceWithTimeout(int milliseconds) { return aclrtSynchronizeDevice(); }

aclError aclrtCreateEvent(void **handle) {
    *handle = calloc(1, sizeof(struct event));
    return 0;
}
aclError aclrtCreateEventWithFlag(void **handle, uint32_t flag) { return aclrtCreateEvent(handle); }
aclError aclrtCreateEventExWithFlag(void **handle, uint32_t flag) { return aclrtCreateEvent(handle); }
aclError aclrtDestroyEvent(void *handle) {
    free(handle);
    return 0;
}
aclError aclrtRecordEvent(void *handle, void *stream) {
    struct event *e = handle;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    e->stream = stream_of(stream);
    e->place = e->stream->queued;
    e->nanoseconds = now.tv_sec * 1000000000ull + now.tv_nsec;
    return 0;
}
aclError aclrtResetEvent(void *handle, void *stream) { return 0; }
static void wait_for_event(struct event *e) {
    if (e->stream) wait_for(e->stream, e->place);
}
/* The host waits in place of the stream, whose operators compute as soon as they are called. */
aclError aclrtStreamWaitEvent(void *stream, void *handle) {
    wait_for_event(handle);
    return 0;
}
aclError aclrtSynchronizeEvent(void *handle) {
    count(SYNC_EVENT);
    wait_for_event(handle);
    return 0;
}
aclError aclrtQueryEventStatus(void *handle, int *complete) {
    struct event *e = handle;
    *complete = !e->stream || reached(e->stream, e->place);
    return 0;
}
aclError aclrtQueryEventWaitStatus(void *handle, int *open) {
    *open = 0;
    return 0;
}
aclError aclrtEventElapsedTime(float *milliseconds, void *start, void *end) {
    *milliseconds = (((struct event *)end)->nanoseconds - ((struct event *)start)->nanoseconds) / 1e6f;
    return 0;
}
aclError aclrtEventGetTimestamp(void *handle, uint64_t *microseconds) {
    *microseconds = ((struct event *)handle)->nanoseconds / 1000;
    return 0;
}

/* Copies. */

struct copy {
    void *to;
    const void *from;
    size_t size;
    int value;
};
static int copy_now(void *what) {
    struct copy *c = what;
    if (c->from)
        memmove(c->to, c->from, c->size);
    else
        memset(c->to, c->value, c->size);
    free(c);
    return 1;
}
static void queue_copy(void *to, const void *from, size_t size, int value, void *stream) {
    struct copy *c = malloc(sizeof *c);
    *c = (struct copy){to, from, size, value};
    stand_in_queue(stream, copy_now, c);
}
static void count_copy(int kind, int waits) {
    if (kind == 1)
        count(waits ? H2D_SYNC : H2D);
    else if (kind == 2)
        count(waits ? D2H_SYNC : D2H);
    else
        count(OTHER_COPY);
}
aclError aclrtMemcpy(void *to, size_t room, const void *from, size_t size, int kind) {
    count_copy(kind, 1);
    memmove(to, from, size);
    return 0;
}
aclError aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, int kind, void *stream) {
    count_copy(kind, 0);
    queue_copy(to, from, size, 0, stream);
    return 0;
}
aclError aclrtMemset(void *to, size_t room, int value, size_t size) {
    memset(to, value, size);
    return 0;
}
aclError aclrtMemsetAsync(void *to, size_t room, int value, size_t size, void *stream) {
    queue_copy(to, NULL, size, value, stream);
    return 0;
}

/* Devices. */

static __thread int device;
static __thread int chosen;
static long contexts[64];

aclError aclInit(const char *path) { return 0; }
aclError aclFinalize(void) { return 0; }
aclError aclrtGetDeviceCount(uint32_t *n) {
    const char *devices = getenv("STAND_IN_NPUS");
    *n = devices ? atoi(devices) : 0;
    return 0;
}
aclError aclrtSetDevice(int d) {
    device = d;
    chosen = 1;
    return 0;
}
aclError aclrtGetDevice(int *d) {
    if (!chosen) return NOT_SET;
    *d = device;
    return 0;
}
aclError aclrtResetDevice(int d) { return 0; }
const char *aclrtGetSocName(void) {
    const char *name = getenv("STAND_IN_NPU_NAME");
    return name ? name : "Ascend910B3";
}
aclError aclrtGetCurrentContext(void **context) {
    *context = &contexts[device];
    return 0;
}
aclError aclrtSetCurrentContext(void *context) { return aclrtSetDevice((int)((long *)context - contexts)); }
aclError aclrtGetPrimaryCtxState(int d, uint32_t *flags, int *active) {
    if (flags) *flags = 0;
    if (active) *active = 1;
    return 0;
}
aclError aclrtDeviceCanAccessPeer(int *can, int from, int to) {
    *can = 1;
    return 0;
}
aclError aclGetDeviceCapability(uint32_t d, int what, int64_t *value) {
    *value = what ? 40 : 20; /* vector and cube cores of an Atlas A2 */
    return 0;
}
const char *aclGetRecentErrMsg(void) { return ""; }
aclError aclrtSetOpExecuteTimeOutV2(uint64_t wanted, uint64_t *actual) {
    if (actual) *actual = wanted;
    return 0;
}
aclError aclrtGetStreamOverflowSwitch(void *stream, uint32_t *flag) {
    *flag = 0;
    return 0;
}
static int64_t options[64];
aclError aclrtSetSysParamOpt(int which, int64_t value) {
    options[which & 63] = value;
    return 0;
}
aclError aclrtGetSysParamOpt(int which, int64_t *value) {
    *value = options[which & 63];
    return 0;
}

/* torch_npu looks these up by name and only wants to hear that they worked. */

#define SUCCEEDS(name) \
    aclError name(void) { return 0; }
SUCCEEDS(aclrtSetDeviceSatMode)
SUCCEEDS(aclrtSetOpWaitTimeout)
SUCCEEDS(aclrtSetOpExecuteTimeOut)
SUCCEEDS(aclrtSetStreamOverflowSwitch)
SUCCEEDS(aclrtCtxSetSysParamOpt)
SUCCEEDS(aclrtSetStreamFailureMode)
SUCCEEDS(aclSetCompileopt)
SUCCEEDS(aclAppLog)
SUCCEEDS(aclDestroyTensorDesc)
SUCCEEDS(aclDestroyDataBuffer)
SUCCEEDS(aclopDestroyAttr)

/* Operators that are not aclnn's are compiled and run by name: their values come from the mode, too. */

aclError aclopCompileAndExecute(void) {
    count(ACLOP);
    return 0;
}
aclError aclopCompileAndExecuteV2(void) { return aclopCompileAndExecute(); }
static char description[64];
void *aclCreateTensorDesc(void) { return description; }
void *aclCreateDataBuffer(void) { return description; }
void *aclopCreateAttr(void) { return description; }
size_t aclGetCompileoptSize(int which) { return 16; }
aclError aclGetCompileopt(int which, char *value, size_t length) {
    strncpy(value, "disable", length);
    return 0;
}

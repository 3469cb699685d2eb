/* What the stand-in's libraries share: streams are queues, and what is queued runs when it can. */
#pragma once
#include <stddef.h>
#include <stdint.h>

/* Tries to do queued work once; returns 1 when it is done, 0 when it has to be tried again. */
typedef int (*stand_in_attempt)(void *work);

/* Appends work to a stream; work that is done at once never enters the queue. */
void stand_in_queue(void *stream, stand_in_attempt attempt, void *work);

/* Waits until a stream (NULL: the default one) has nothing open. */
void stand_in_settle(void *stream);

/* How many threads wait for a stream or an event just now. */
extern volatile int stand_in_waiting;

/* Named counters, read by tests/npu/device/counts.py. */
struct counter {
    const char *name;
    unsigned long count;
};

#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside of the simulated small GPU: an OpenCL layer between the ICD loader and a real implementation ("the driver").
 *
 *   layer.c      entry and exit of the layer, its dispatch table
 *   config.c     CLSIM_* and the file
 *   report.c     one line for each misuse
 *   fault.c      counting calls, the n-th of which fails, hangs or loses the device
 *   object.c     table of the handles that the program holds
 *   order.c      what is ordered after what (vector clocks), which memory is accessed by whom: the race detector
 *   device.c     what the device says of itself; probe.c measures it
 *   context.c    contexts;  queue.c queues
 *   memory.c     buffers: limits, memory that the layer owns
 *   event.c      events: state, times, waits;  callback.c who is called
 *   command.c    the way of one enqueued command, whether the driver's or paced
 *   pacer.c      paced jobs and the threads that run them
 *   transfer.c   read, write, copy;  map.c  map and unmap
 *   arguments.c  what is known of the arguments of kernels
 *   kernel.c     programs, kernels, arguments, launches;  enqueue.c every other command
 *   host.c       memory of the host that copies use; free() and munmap() when preloaded
 *   awake.c      a library of its own: workers of the driver that poll before they sleep
 *   pass.c       everything that only passes through;  extension.c  entry points by name
 *
 * Handles are the driver's own.  A paced command is seen by the program as a user event of the driver, so every other command, queue and
 * callback of the driver can wait for it; the layer answers what a user event cannot say (queue, type, state, times).
 *
 * Locks: sim.enqueuing is held while a command is enqueued, so that queues keep their order, and while an event fails; the driver and callbacks
 * of the program may be called under it, so it is recursive and taken first.  sim.lock guards everything else; neither is called under it.
 */

/* All that the loader's table has. */
#undef CL_TARGET_OPENCL_VERSION
#define CL_TARGET_OPENCL_VERSION 300

#include "tests/sim/clsim.h"

#include <CL/cl_layer.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SIM_N_ELEMENTS(array) (sizeof(array) / sizeof((array)[0]))
#define SIM_MIN(a, b)         ((a) < (b) ? (a) : (b))
#define SIM_MAX(a, b)         ((a) > (b) ? (a) : (b))

/* ---- functions ---------------------------------------------------------------------------------------------------- */

/* A function is known by its place in the dispatch table. */
#define SIM_FN(name)     (offsetof(cl_icd_dispatch, name) / sizeof(void *))
#define SIM_N_FUNCTIONS  (sizeof(cl_icd_dispatch) / sizeof(void *))

/* One call by the program. */
typedef struct SimCall {
    unsigned function;
    uint64_t ordinal;     /* of this function, from 1 */
    cl_int event_status;  /* < 0: the command is accepted and then fails with it */
    bool stalls;          /* the command is accepted and does not complete … */
    int64_t stall_msec;   /* … for this long; < 0: ever */
} SimCall;

const char *sim_function_name(unsigned function);
/* SIM_N_FUNCTIONS when there is none. */
unsigned sim_function_find(const char *name);

/* ---- configuration ------------------------------------------------------------------------------------------------ */

typedef enum SimCheck {
    SIM_CHECK_RACE = 1 << 0,     /* buffers and host memory, by order */
    SIM_CHECK_HOST = 1 << 1,     /* host memory freed or unmapped while in use */
    SIM_CHECK_CONTENT = 1 << 2,  /* host memory changed while in use */
    SIM_CHECK_CALLBACK = 1 << 3, /* callbacks on dead queues */
    SIM_CHECK_RELEASE = 1 << 4,  /* use after release, too many releases */
    SIM_CHECK_LEAK = 1 << 5,     /* objects left at exit */
    SIM_CHECK_MAP = 1 << 6,      /* commands on mapped buffers, bad unmaps */
    SIM_CHECK_ALL = (1 << 7) - 1,
} SimCheck;

/* SIM_LANE_ORDER moves no bytes: commands that only keep their place. */
typedef enum SimLaneKind { SIM_LANE_UP, SIM_LANE_DOWN, SIM_LANE_DEVICE, SIM_LANE_ORDER, SIM_LANE_MAX } SimLaneKind;

typedef enum SimAccessTo { SIM_MEMORY_AUTO, SIM_MEMORY_IN_PLACE, SIM_MEMORY_DRIVER } SimAccessTo;

typedef struct SimConfig {
    uint64_t memory_bytes, max_allocation_bytes; /* 0: the driver's */
    bool unified;              /* true: copies and memory are left to the driver */
    cl_device_type device_type; /* 0: the driver's */
    bool poison;               /* new device memory is full of NaNs */
    double link_ratio;         /* 0: not paced by a ratio */
    double read_rate, link_rate, copy_rate; /* bytes a second; 0: measured, from the ratio, half of the read rate */
    uint64_t latency_nsec;
    unsigned n_engines;        /* 1: both directions share one */
    SimAccessTo memory;
    unsigned checks;
    bool abort_on_misuse;
    int exit_code;             /* when something was misused; 0: the program's own */
    int log_fd;
    bool verbose;
    double part;               /* a copy into less than 1/part of a buffer and a kernel that reads it are apart; 0: never */
    char *counts;              /* file for the numbers of calls, or NULL */
    char *arguments;           /* folder for what is known of the kernels in program binaries, or NULL */
} SimConfig;

/* CLSIM_* over the file that CLSIM_CONFIG names; false after saying what is wrong. */
bool config_load(SimConfig *config);
/* "256M", "1.5G": false when @text is not such a number. */
bool config_number(const char *text, double *ret);

/* ---- report.c ------------------------------------------------------------------------------------------------------- */

/* One line of misuse; @kind is the word of README.md. */
void report_misuse(const char *kind, const char *format, ...) __attribute__((format(printf, 2, 3)));
void report_note(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* What report_note() says only with CLSIM_VERBOSE. */
void report_detail(const char *format, ...) __attribute__((format(printf, 1, 2)));
uint64_t report_n_misuses(void);
/* Sums of what was not printed; the exit status that follows, 0 for the program's own. */
int report_finish(void);

/* ---- fault.c -------------------------------------------------------------------------------------------------------- */

cl_int fault_set(const char *text);
/* Counts the call; a status other than CL_SUCCESS is what the call must return at once. */
cl_int fault_enter(SimCall *call, unsigned function);
cl_ulong fault_count(const char *function);
void fault_write_counts(const char *path);
/* What calls fail with since the device was lost; CL_SUCCESS while it is not. */
cl_int fault_lost(void);

#define SIM_ENTER(call, name) fault_enter((call), SIM_FN(name))

/* ---- object.c ------------------------------------------------------------------------------------------------------- */

typedef enum SimKind {
    SIM_CONTEXT,
    SIM_QUEUE,
    SIM_MEM,
    SIM_PROGRAM,
    SIM_KERNEL,
    SIM_EVENT,
    SIM_SAMPLER,
    SIM_KIND_MAX,
} SimKind;

typedef struct SimContext SimContext;

/* Head of every object.  The driver's handle is released when nobody needs it: neither the program nor the layer. */
typedef struct SimObject SimObject;
struct SimObject {
    SimObject *next; /* of its bucket */
    void *handle;
    SimKind kind;
    bool shown;         /* the program has the handle */
    unsigned app_refs;  /* the program's; 0 and shown: released */
    unsigned refs;      /* the layer's, one for the program's */
    uint64_t id;        /* handles come again, this does not */
    unsigned made_by;   /* function */
    uint64_t made_at;   /* its ordinal */
    SimContext *context; /* ref; NULL for contexts */
};

/* Enters @object, which the caller has allocated, with one reference; the program's when @shown. */
void object_add(SimObject *object, SimKind kind, void *handle, const SimCall *call, SimContext *context, bool shown);
/* The object behind a handle of the program, whether released or not; NULL: unknown.  sim.lock is held. */
SimObject *object_find_locked(SimKind kind, const void *handle);
/* The same with a reference. */
SimObject *object_find(SimKind kind, const void *handle);
SimObject *object_ref_locked(SimObject *object);
SimObject *object_ref(SimObject *object);
/* Gives up a reference (NULL is fine); the last destroys.  Not with sim.lock held. */
void object_unref(SimObject *object);
/* CL_SUCCESS when the program may use the handle in @call; else reports and gives what the call must return. */
cl_int object_check(const SimCall *call, SimKind kind, const void *handle);
/* clRetain… and clRelease…. */
cl_int object_retain(SimCall *call, SimKind kind, void *handle);
cl_int object_release(SimCall *call, SimKind kind, void *handle);
/* Answers a query for a count of references by the program's own. */
bool object_answer_refs(SimKind kind, const void *handle, size_t size, void *value, size_t *size_ret, cl_int *ret);
/* With sim.lock held. */
void object_each_locked(SimKind kind, void (*visit)(SimObject *object, void *userdata), void *userdata);
void object_report_leaks(void);
/* Copies @size bytes as an OpenCL query does. */
cl_int sim_answer(const void *answer, size_t answer_size, size_t size, void *value, size_t *size_ret);

/* ---- order.c --------------------------------------------------------------------------------------------------------- */

/* Commands stand in chains: an in-order queue is one, commands of other queues join where they are ordered.  @clock says for every chain up to
 * which of its commands all are complete before this one begins. */
#define SIM_N_CHAINS 64
typedef struct SimStamp {
    int chain;        /* < 0: not known, e.g. waits for a user event of the program; never reported */
    uint64_t at;      /* place in the chain, from 1 */
    uint64_t clock[SIM_N_CHAINS];
} SimStamp;

typedef struct SimAccess {
    uint64_t begin, end;
    bool writes;
    bool is_part;       /* a small part of its buffer, exactly; … */
    bool may_read_only; /* … or some of this, by a kernel that is not known to write */
    int chain;
    uint64_t at;
    unsigned function;
    uint64_t ordinal;
    char label[40];
} SimAccess;

typedef struct SimAccesses {
    SimAccess *items;
    size_t n_items, n_allocated;
} SimAccesses;

/* All with sim.lock held. */
void order_begin(SimStamp *stamp); /* knows what the host knows */
void order_after(SimStamp *stamp, const SimStamp *before);
/* Gives it a place; @chain is the queue's, or < 0 to join one. */
void order_place(SimStamp *stamp, int chain);
int order_chain_new(void);
void order_chain_free(int chain);
/* The host has seen it complete. */
void order_seen(const SimStamp *stamp);
bool order_is_seen(int chain, uint64_t at);
/* Notes an access and reports those that it may meet; @what: "buffer #3", or NULL for host memory. */
void order_access(SimAccesses *accesses, const SimStamp *stamp, SimAccess access, const char *what);
/* The first access of host memory in [begin, end) that the host has not seen complete. */
bool order_find_unseen(SimAccesses *accesses, uint64_t begin, uint64_t end, SimAccess *ret);

/* ---- the device, contexts, queues ---------------------------------------------------------------------------------- */

typedef struct SimJob SimJob;
typedef struct SimEvent SimEvent;

/* One copy engine. */
typedef struct SimLane {
    pthread_t thread;
    bool started, stopping;
    pthread_cond_t changed; /* with sim.lock */
    SimJob *first, *last;
    SimJob *parked;         /* those that stall */
    double rate;            /* bytes a second; 0: not limited */
    uint64_t busy_until_nsec;
    uint64_t may_spin_nsec, spun_at_nsec; /* what it may wait without sleeping, as of when */
} SimLane;

typedef struct SimDevice SimDevice;
struct SimDevice {
    SimDevice *next;
    cl_device_id handle;
    bool probed, in_place;  /* buffers can be memory of the layer's that the driver reads and writes in place */
    clockid_t clock;        /* that the driver's profiling times follow … */
    int64_t clock_offset;   /* … and how far they are ahead of it */
    double read_rate, link_rate, copy_rate;
    uint64_t memory_bytes, max_allocation_bytes, used_bytes;
    SimLane lanes[SIM_LANE_MAX];
};

/* The one record of a device (or of the device that it is a part of); measured when @probed is asked for.  NULL: no memory. */
SimDevice *device_get(cl_device_id handle, bool probed);
/* What to add to a time of CLOCK_MONOTONIC for one of the driver's profiling times (modulo 2^64). */
uint64_t device_ahead(const SimDevice *device);
/* probe.c: with a context of its own. */
void probe_device(SimDevice *device);
uint64_t sim_now_nsec(clockid_t clock);

struct SimContext {
    SimObject object;
    SimDevice **devices;
    cl_uint n_devices;
    cl_int lost;           /* what its calls fail with after a reset */
    bool discrete, in_place;
    cl_command_queue dma[SIM_LANE_MAX]; /* for memory that the layer cannot reach in place */
};

typedef struct SimQueue {
    SimObject object;
    SimDevice *device;
    bool in_order, profiling;
    SimEvent *last;        /* ref; in order: the last command */
    SimEvent *barrier;     /* ref; out of order: what later commands wait for */
    SimStamp all;          /* everything so far */
    int chain;
} SimQueue;

/* Contexts that exist now are dead, with all that belongs to them: their calls fail with @code. */
void context_reset(cl_int code);
void context_destroy(SimContext *context);
void queue_destroy(SimQueue *queue);

/* ---- memory -------------------------------------------------------------------------------------------------------- */

typedef struct SimMapping SimMapping;
struct SimMapping {
    SimMapping *next;
    uint64_t offset, bytes;
    cl_map_flags flags;
    void *pointer;
};

typedef struct SimMem {
    SimObject object;
    struct SimMem *parent;  /* ref; of a sub-buffer */
    uint64_t origin, bytes; /* origin in the parent */
    cl_mem_flags flags;
    unsigned char *data;    /* device memory in place; NULL: the driver's */
    unsigned char *host;    /* the program's host_ptr */
    unsigned char *shadow;  /* where maps show it; allocated at the first */
    SimMapping *mappings;
    SimAccesses accesses;   /* of the root buffer */
} SimMem;

SimMem *memory_root(SimMem *mem);
uint64_t memory_origin(const SimMem *mem);
unsigned char *memory_data(const SimMem *mem);
void memory_destroy(SimMem *mem);
void memory_name(const SimMem *mem, char *text, size_t size);

/* ---- events -------------------------------------------------------------------------------------------------------- */

typedef void(CL_CALLBACK *SimNotify)(cl_event, cl_int, void *);

/* What is called when an event gets somewhere: a function of the program's, or a job that waits. */
typedef struct SimCallback SimCallback;
struct SimCallback {
    SimCallback *next;
    SimEvent *event; /* ref */
    cl_int type, status;
    bool fired;      /* by the layer; the driver may still come with it */
    SimNotify notify;
    void *userdata;
    SimJob *job;
    bool fails;      /* a failure is the job's: the event stood in its wait list */
    bool is_wait;    /* the layer's own */
};

typedef struct SimFollower SimFollower;
struct SimFollower {
    SimFollower *next;
    SimJob *job;
    bool fails;
    bool is_next; /* of the same engine, and only behind it */
};

typedef struct SimDependent SimDependent;
struct SimDependent {
    SimDependent *next;
    SimEvent *event; /* ref */
};

struct SimEvent {
    SimObject object;
    SimQueue *queue;          /* ref; NULL for the program's user events */
    cl_command_type type;
    unsigned function;
    uint64_t ordinal;
    char label[40];           /* of a kernel */
    bool paced;
    SimLaneKind lane;         /* paced: of its job */
    cl_event order;           /* complete whatever the outcome: what only the queue's order makes wait */
    cl_event tail;            /* out of order: a marker of the driver's that waits for it */
    cl_int status;            /* paced: CL_QUEUED … CL_COMPLETE, or an error */
    bool settled;             /* paced: the driver knows its last status */
    bool may_fail;            /* the driver's, and waits for what may fail */
    uint64_t queued_nsec, submit_nsec, start_nsec, end_nsec; /* CLOCK_MONOTONIC; the device's clock once it is complete */
    SimCallback *callbacks;
    SimFollower *followers;   /* jobs that wait for a paced one */
    SimDependent *dependents; /* commands of the driver's that have it in their wait lists */
    SimStamp stamp;
};

/* A new event for a command of @queue; @paced: with user events of the driver's, else @handle (taken).  NULL: no memory. */
SimEvent *event_new(const SimCall *call, SimQueue *queue, cl_command_type type, bool paced, cl_event handle, bool shown);
/* Moves a paced event on; the last state (<= CL_COMPLETE) lets all that wait for it go. */
void event_set(SimEvent *event, cl_int status);
/* Has the driver call back; CL_SUCCESS: @callback is taken. */
cl_int event_watch(SimCallback *callback);
/* @dependent, of the driver's, has @event in its wait list.  sim.lock is held. */
void event_add_dependent_locked(SimEvent *event, SimEvent *dependent);
/* The driver's event may have failed: calls those back that the driver has not. */
void event_check_failed(SimEvent *event);
void dependents_free(SimDependent *dependents, bool failed);
/* Hands the callbacks of a paced event that @status has reached to the thread that calls.  sim.lock is held. */
void callbacks_queue(SimEvent *event, cl_int status);
/* Waits for an event of the driver's by a callback; its status. */
cl_int callback_wait(SimEvent *event);
void callbacks_stop(void);
/* Submits and waits, whoever's it is; CL_SUCCESS or its error. */
cl_int event_wait(SimEvent *event);
void event_seen(SimEvent *event);
void event_destroy(SimEvent *event);

/* ---- arguments.c ---------------------------------------------------------------------------------------------------- */

typedef struct SimProgram {
    SimObject object;
    bool from_source;
    uint64_t known_by; /* hash of the binary that it was made from; 0: none */
} SimProgram;

typedef struct SimArgument {
    cl_mem buffer;      /* NULL: none, or not a buffer */
    uint64_t buffer_id; /* which object, for a handle may come again */
    bool told, is_memory, is_const;
} SimArgument;

/* The driver forgets what it knew of arguments when a program comes from its binary: kept in a file by the binary's hash. */
uint64_t arguments_hash(const unsigned char *binary, size_t size);
void arguments_store(cl_program program, size_t n_binaries, const size_t *sizes, unsigned char *const *binaries);
/* What is told of argument @index: by the driver, else by the file. */
void arguments_ask(cl_kernel kernel, const char *name, cl_uint n, uint64_t known_by, SimArgument *arguments);

/* ---- commands ------------------------------------------------------------------------------------------------------ */

#define SIM_N_ACCESSES 72
#define SIM_N_WAITS    32 /* longer lists are allocated */
typedef struct SimCommand {
    SimCall *call;
    SimQueue *queue;       /* ref */
    SimEvent **waits;      /* refs; NULL entries: unknown to the layer */
    cl_event *handles;     /* the program's wait list and what the layer adds, for the driver; NULL: none */
    cl_uint n_waits, n_handles;
    void *allocated;
    SimEvent *few_waits[SIM_N_WAITS];
    cl_event few_handles[SIM_N_WAITS + 1];
    const char *label;
    bool waits_for_all;    /* barrier or marker without a list */
    struct {
        SimMem *mem; /* ref; NULL: host memory */
        uint64_t begin, end;
        bool writes, may_read_only;
    } accesses[SIM_N_ACCESSES];
    size_t n_accesses;
} SimCommand;

/* Checks queue and wait list; nothing else is enqueued until command_end(), which is due after a failure too. */
cl_int command_begin(SimCommand *command, SimCall *call, cl_command_queue queue, cl_uint n_waits, const cl_event *waits);
/* @mem: with a reference of the command's own; NULL: host memory by address. */
void command_access(SimCommand *command, SimMem *mem, uint64_t begin, uint64_t bytes, bool writes);
/* The driver was called with command->handles and gave @status and @handle.  @ret_event: the program's.  @ret_wait (may be NULL): a reference
 * for the caller.  Gives @status. */
cl_int command_driver(SimCommand *command, cl_int status, cl_command_type type, cl_event handle, cl_event *ret_event,
                      SimEvent **ret_wait);
/* Hands @job (taken, also on failure) to the pacer. */
cl_int command_paced(SimCommand *command, SimJob *job, cl_command_type type, cl_event *ret_event, SimEvent **ret_wait);
/* Whether a fault makes the command accepted only to fail or stall. */
bool command_is_faulty(const SimCommand *command);
void command_end(SimCommand *command);
/* What a fault turns a command of any type into. */
cl_int command_faulty(SimCommand *command, cl_command_type type, cl_event *ret_event);

/* ---- pacer --------------------------------------------------------------------------------------------------------- */

/* One side of a copy: memory of the device or of the host. */
typedef struct SimEnd {
    SimMem *mem; /* ref; NULL: host */
    unsigned char *host;
    uint64_t offset;
    size_t row_pitch, slice_pitch;
} SimEnd;

struct SimJob {
    SimJob *next;
    SimEvent *event; /* ref */
    SimLaneKind lane;
    SimEnd to, from;
    size_t region[3]; /* bytes of a row, rows, slices; no bytes: only order */
    unsigned pending; /* what it still waits for, and one until it is complete itself */
    uint64_t ready_nsec; /* when all was done but what is before it on its engine: from here its latency counts */
    cl_int status;    /* < 0: fails without copying */
    bool stalls;
    int64_t stall_msec;
    uint64_t until_nsec; /* when it stalls no longer */
    bool hashed;
    uint64_t hash;    /* of the host's memory when it was enqueued */
};

SimJob *job_new(SimLaneKind lane);
void job_free(SimJob *job);
uint64_t job_bytes(const SimJob *job);
/* Waits for @event, which may be the driver's; @fails: its failure is the job's. */
void job_after(SimJob *job, SimEvent *event, bool fails);
/* One of what it waits for is done; @is_next: what was before it on its engine, which has fetched it by now. */
void job_advance(SimJob *job, cl_int status, bool is_next);
void pacer_stop(void);
/* The device is lost: what waits or runs looks again, and fails. */
void pacer_lose(void);

/* ---- host.c --------------------------------------------------------------------------------------------------------- */

/* Whether all pages of [from, from + bytes) are mapped. */
bool host_is_mapped(const void *from, size_t bytes);
uint64_t host_hash(const SimJob *job);

/* ---- the layer ------------------------------------------------------------------------------------------------------- */

typedef struct Sim {
    SimConfig config;
    cl_icd_dispatch next;  /* the layer below */
    cl_icd_dispatch table; /* ours */
    pthread_mutex_t lock;
    pthread_mutex_t enqueuing; /* recursive */
    pthread_cond_t changed; /* some paced event is done */
    SimDevice *devices;
    SimAccesses host;
    atomic_size_t n_host; /* of what is in @host, for a quick look in free() */
    pid_t owner;
    int copy_processor;    /* the last that the program may use; < 0: not known */
    bool ready;
} Sim;

/* The layer interface has no place for a context of ours: a process has one layer. */
extern Sim sim;

void sim_lock(void);
void sim_unlock(void);
/* Waits on a condition with sim.lock held. */
void sim_wait(pthread_cond_t *changed);
bool sim_wait_until(pthread_cond_t *changed, const struct timespec *until); /* false when that has come */
/* Whether this thread holds it. */
bool sim_is_locked(void);

#define SIM_HOOK(name) (sim.table.name = sim.next.name ? layer_##name : NULL)
void context_hook(void);
void device_hook(void);
void event_hook(void);
void enqueue_hook(void);
void extension_hook(void);
void kernel_hook(void);
void map_hook(void);
void memory_hook(void);
void pass_hook(void);
void queue_hook(void);
void transfer_hook(void);

/* Sets *errcode_ret, if there is one. */
#define SIM_SET(pointer, value)     \
    do {                            \
        if (pointer)                \
            *(pointer) = (value);   \
    } while (0)
